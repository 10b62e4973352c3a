"""Models next to the policy in the plan of a run."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape, shape_from_config
from nemorl.plan.machine import Gpu, Machine, memory_problems
from nemorl.plan.memory import ProcessMemory
from nemorl.plan.problems import plan_run
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG, write_model, write_weights
from tests.plan.test_memory import WHOLE

ROOMY = Machine(64, 10**12, 10**12, ())
PPO = ["algorithm.name=ppo", "algorithm.kl.coefficient=0.1"]
HIDDEN = shape_from_config(CONFIG, "config.json").hidden_size
HEAD = 1000 * 128  # of a language model, which a critic has not
CRITIC = WHOLE - HEAD + HIDDEN


def processes(configure: Configure, *overrides: str) -> dict[str, ProcessMemory]:
    plan = plan_run(configure(*PPO, *overrides), ROOMY)
    assert plan.problems == ()
    return {process.group: process for process in plan.processes}


def test_a_critic_trains_and_a_reference_of_its_own_only_reads(configure: Configure) -> None:
    found = processes(configure, "reference={layout: {tensor_parallel_size: 2}}")
    critic, reference, policy = found["critic"], found["reference"], found["policy"]
    assert (critic.weights, critic.gradients, critic.optimizer) == (4 * CRITIC, 4 * CRITIC, 8 * CRITIC)
    assert (critic.logits, critic.staging, critic.reference, critic.kv_cache) == (0, 0, 0, 0)
    assert (reference.count, reference.gradients, reference.optimizer, reference.checkpoint) == (2, 0, 0, 0)
    assert 2 * WHOLE < reference.weights < 4 * WHOLE  # half the matrices, all the norms
    assert policy.reference == 0
    assert processes(configure)["policy"].reference == 4 * WHOLE


@pytest.mark.parametrize(
    ("overrides", "field", "fix"),
    [
        (
            ["critic={layout: {tensor_parallel_size: 3}}"],
            "critic.layout.tensor_parallel_size",
            "it must divide",
        ),
        (["reference={model_path: nowhere}"], "reference.model_path", "there is no such folder: name one"),
        ([f"reference={{model_path: {__file__}}}"], "reference.model_path", "this is a file: name one"),
        ([f"policy.model_path={__file__}"], "policy.model_path", "this is a file: name one"),
        (["critic={lora: {rank: 999, alpha: 1}}"], "critic.lora.rank", "no higher rank than that"),
        (
            ["critic={lora: {rank: 4, alpha: 1, targets: [q_proj, kv_b_proj]}}"],
            "critic.lora.targets",
            "can have an adapter: remove kv_b_proj",
        ),
        (
            ["critic={lora: {rank: 4, alpha: 1, start: nowhere}}"],
            "critic.lora.start",
            "nowhere holds no adapter_config.json",
        ),
    ],
)
def test_what_does_not_fit_their_models_is_refused(
    configure: Configure, overrides: list[str], field: str, fix: str
) -> None:
    problems = plan_run(configure(*PPO, *overrides), ROOMY).problems
    assert problems[0].field == field
    assert fix in problems[0].fix


def test_a_critic_reads_the_policys_tokens(configure: Configure, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", vocab_size=900)
    (problem,) = plan_run(configure(*PPO, f"critic={{model_path: {other}}}"), ROOMY).problems
    assert problem.field == "critic.model_path"
    assert "its vocabulary of 900 tokens lacks some of the policy's 1000" in problem.fix


def vocabulary(*tokens: str, special: int = 0) -> str:
    words = {token: number for number, token in enumerate(tokens)}
    added = [{"id": number, "content": tokens[number]} for number in range(special)]
    return json.dumps({"model": {"vocab": words}, "added_tokens": added})


@pytest.mark.parametrize("section", ["critic", "reference"])
@pytest.mark.parametrize(
    ("theirs", "sound"),
    [
        (vocabulary("<pad>", "0", "1"), True),
        (vocabulary("<s>", "0", "1", special=1), True),  # a special token has another name
        (vocabulary("<pad>", "0", "1", "2", "3"), True),  # further tokens, which the policy never says
        (vocabulary("<pad>", "0", "!"), False),
        (vocabulary("<pad>", "0", "!", special=3), False),
        (json.dumps({"model": {"vocab": [["<pad>", 0.0], ["0", -1.0], ["!", -2.0]]}}), False),
    ],
    ids=["the same", "special tokens", "more", "another", "a special one", "another with scores"],
)
def test_auxiliary_models_spell_the_tokens_of_the_policy(
    configure: Configure, model: Path, tmp_path: Path, section: str, theirs: str, sound: bool
) -> None:
    other = write_model(tmp_path / "other", vocab_size=1200)  # large enough for the policy's ids
    (model / "tokenizer.json").write_text(vocabulary("<pad>", "0", "1", special=1), encoding="utf-8")
    (other / "tokenizer.json").write_text(theirs, encoding="utf-8")
    problems = plan_run(configure(*PPO, f"{section}={{model_path: {other}}}"), ROOMY).problems
    assert [problem.field for problem in problems] == [f"{section}.model_path"] * (not sound)
    if not sound:
        assert problems[0].value == str(other)
        assert "token 2 is '!' there and '1' in" in problems[0].fix
        assert "name a model with the policy's tokenizer" in problems[0].fix


def test_an_aligned_teacher_has_tokens_of_its_own(configure: Configure, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", vocab_size=900)
    teacher = f"teachers={{main: {{model_path: {other}}}}}"
    samples = configure(teacher, "algorithm.name=on_policy_distillation")
    assert [problem.field for problem in plan_run(samples, ROOMY).problems] == ["teachers.main.model_path"]
    aligned = "algorithm={name: aligned_distillation, num_steps: 10, batch_size: 8}"
    assert plan_run(configure(teacher, aligned), ROOMY).problems == ()
    own = configure().policy.model_path
    two = f"teachers={{main: {{model_path: {other}}}, own: {{model_path: {own}}}}}"
    averages = configure(two, aligned, "algorithm.combination={name: average}")
    (problem,) = plan_run(averages, ROOMY).problems
    assert (problem.field, "name a model with the policy's tokenizer" in problem.fix) == (
        "teachers.main.model_path",
        True,
    )
    (other / "tokenizer.json").unlink()
    (problem,) = plan_run(configure(teacher, aligned), ROOMY).problems
    assert "the folder holds no tokenizer.json" in problem.fix


def test_models_that_take_turns_find_room_next_to_what_the_others_keep(configure: Configure) -> None:
    shared = ["cluster.gpus_per_node=2", "critic.devices=policy"]
    found = processes(configure, *shared)
    policy, critic = found["policy"], found["critic"]
    kept = critic.weights + critic.gradients + critic.optimizer + critic.runtime
    small = replace(ROOMY, gpus=(Gpu("Tiny 1000", policy.on_device + kept - 1),))
    (problem,) = plan_run(configure(*PPO, *shared), small).problems
    assert (problem.field, problem.value) == ("critic.devices", "policy")
    assert "while the policy computes" in problem.fix
    leaving = [*shared, "critic.offload={weights: true, optimizer: true}"]
    assert plan_run(configure(*PPO, *leaving), small).problems == ()


def write_reward_model(folder: Path, labels: int = 1) -> Path:
    write_model(folder)
    trained = CONFIG | {"architectures": ["LlamaForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(trained), encoding="utf-8")
    tensors = hf_tensors(load_shape(folder, "scalar")) | {"score.weight": (labels, HIDDEN)}
    write_weights(folder / "model.safetensors", tensors)
    return folder


def test_weights_of_auxiliary_models_are_complete(configure: Configure, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    ppo = [*PPO, f"critic.model_path={other}", f"reference={{model_path: {other}}}"]
    assert plan_run(configure(*ppo), ROOMY).problems == ()  # a critic's head begins at zero
    os.truncate(other / "model.safetensors", 100_000)
    broken = plan_run(configure(*ppo), ROOMY).problems
    assert sorted(problem.field for problem in broken) == ["critic.model_path", "reference.model_path"]
    assert all("is truncated (100000 of" in problem.fix for problem in broken)


@pytest.mark.parametrize(
    ("labels", "spoilt", "fix"),
    [
        (1, None, ""),
        (2, None, "score.weight has the shape [2, 128], and one label requires [1, 128]"),
        (1, "model.safetensors", "1 of the model's 57 tensors are missing, first score.weight"),
        (1, "tokenizer.json", "the folder holds no tokenizer.json: name a folder that does"),
    ],
)
def test_a_reward_model_has_a_trained_head_and_a_tokenizer(
    configure: Configure, tmp_path: Path, labels: int, spoilt: str | None, fix: str
) -> None:
    taste = write_reward_model(tmp_path / "taste", labels)
    if spoilt == "tokenizer.json":
        (taste / spoilt).unlink()
    elif spoilt is not None:
        write_weights(taste / spoilt, hf_tensors(shape_from_config(CONFIG, "config.json")))
    found = plan_run(configure(f"rewards=[{{kind: local_model, model_path: {taste}}}]"), ROOMY).problems
    assert [v.field for v in found] == (["rewards.0.model_path"] if fix else [])
    assert all(fix in problem.fix for problem in found)


def test_a_reward_model_that_is_too_large_is_named_with_its_own_path(
    configure: Configure, tmp_path: Path
) -> None:
    taste = write_reward_model(tmp_path / "taste")
    experiment = configure(f"rewards=[{{kind: local_model, model_path: {taste}}}]")
    processes = [ProcessMemory("policy", 1, weights=10**9), ProcessMemory("reward_0", 1, weights=10**10)]

    (problem,) = memory_problems(experiment, processes, replace(ROOMY, memory_bytes=10**10))

    assert (problem.field, problem.value) == ("rewards.0.model_path", str(taste))


def test_a_reward_model_finds_room_next_to_engines_that_are_awake(
    configure: Configure, tmp_path: Path
) -> None:
    taste = write_reward_model(tmp_path / "taste")
    experiment = configure(
        "generation.backend=vllm", "generation.colocated=true", "cluster.gpus_per_node=1",
        "policy.offload={weights: true, optimizer: true}",
        f"rewards=[{{kind: local_model, model_path: {taste}, devices: policy, offload: {{weights: true}}}}]",
    )  # fmt: skip
    of = {process.group: process for process in plan_run(experiment, ROOMY).processes}
    policy, engine, reward = of["policy"], of["generation"], of["reward_0"]
    assert (reward.gradients, reward.optimizer, reward.logits) == (0, 0, 0)
    left = policy.weights + policy.gradients + policy.optimizer + policy.activations + policy.logits
    left += policy.head_gradient
    wanted = reward.on_device + engine.on_device + policy.on_device - left
    for short, fields in ((0, []), (1, ["rewards.0.devices"])):
        machine = replace(ROOMY, gpus=(Gpu("Tiny 1000", wanted - short),))
        found = [v for v in plan_run(experiment, machine).problems if v.field != "generation.backend"]
        assert [problem.field for problem in found] == fields
    assert "while the reward_0 computes" in found[0].fix
