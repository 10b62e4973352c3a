"""Models beside the policy in the plan of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemorl.models.shape import ModelShape
from nemorl.plan.fit import plan_run
from nemorl.plan.machine import Gpu, Machine
from nemorl.plan.memory import ProcessMemory
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG, write_model
from tests.plan.test_memory import WHOLE

ROOMY = Machine(64, 10**12, 10**12, ())
PPO = ["algorithm.name=ppo", "algorithm.kl.coefficient=0.1"]
HIDDEN = ModelShape.from_config(CONFIG, "config.json").hidden_size
HEAD = 1000 * 128  # of a language model, which a critic has not
CRITIC = WHOLE - HEAD + HIDDEN


def processes(configure: Configure, *overrides: str) -> dict[str, ProcessMemory]:
    plan = plan_run(configure(*PPO, *overrides), ROOMY)
    assert plan.violations == ()
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
    ("overrides", "field", "mend"),
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
    ],
)
def test_what_does_not_fit_their_models_is_refused(
    configure: Configure, overrides: list[str], field: str, mend: str
) -> None:
    violations = plan_run(configure(*PPO, *overrides), ROOMY).violations
    assert violations[0].field == field
    assert mend in violations[0].mend


def test_a_critic_reads_the_policys_tokens(configure: Configure, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", vocab_size=900)
    (violation,) = plan_run(configure(*PPO, f"critic={{model_path: {other}}}"), ROOMY).violations
    assert violation.field == "critic.model_path"
    assert "its vocabulary of 900 tokens lacks some of the policy's 1000" in violation.mend


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
def test_models_beside_the_policy_spell_its_tokens(
    configure: Configure, model: Path, tmp_path: Path, section: str, theirs: str, sound: bool
) -> None:
    other = write_model(tmp_path / "other", vocab_size=1200)  # large enough for the policy's ids
    (model / "tokenizer.json").write_text(vocabulary("<pad>", "0", "1", special=1), encoding="utf-8")
    (other / "tokenizer.json").write_text(theirs, encoding="utf-8")
    violations = plan_run(configure(*PPO, f"{section}={{model_path: {other}}}"), ROOMY).violations
    assert [violation.field for violation in violations] == [f"{section}.model_path"] * (not sound)
    if not sound:
        assert violations[0].value == str(other)
        assert "token 2 is '!' there and '1' in" in violations[0].mend
        assert "name a model with the policy's tokenizer" in violations[0].mend


def test_models_that_take_turns_find_room_beside_what_the_others_keep(configure: Configure) -> None:
    shared = ["cluster.gpus_per_node=2", "critic.devices=policy"]
    found = processes(configure, *shared)
    policy, critic = found["policy"], found["critic"]
    kept = critic.weights + critic.gradients + critic.optimizer + critic.runtime
    small = replace(ROOMY, gpus=(Gpu("Tiny 1000", policy.on_device + kept - 1),))
    (violation,) = plan_run(configure(*PPO, *shared), small).violations
    assert (violation.field, violation.value) == ("critic.devices", "policy")
    assert "while the policy computes" in violation.mend
    leaving = [*shared, "critic.offload={weights: true, optimizer: true}"]
    assert plan_run(configure(*PPO, *leaving), small).violations == ()


def test_a_reward_model_finds_room_beside_engines_that_are_awake(
    configure: Configure, tmp_path: Path
) -> None:
    taste = write_model(tmp_path / "taste")
    trained = CONFIG | {"architectures": ["LlamaForSequenceClassification"]}
    (taste / "config.json").write_text(json.dumps(trained), encoding="utf-8")
    experiment = configure(
        "generation.backend=vllm", "generation.colocated=true", "cluster.gpus_per_node=1",
        "policy.offload={weights: true, optimizer: true}",
        f"rewards=[{{kind: local_model, model_path: {taste}, devices: policy, offload: {{weights: true}}}}]",
    )  # fmt: skip
    of = {process.group: process for process in plan_run(experiment, ROOMY).processes}
    policy, engine, reward = of["policy"], of["generation"], of["reward_0"]
    assert (reward.gradients, reward.optimizer, reward.logits) == (0, 0, 0)
    left = policy.weights + policy.gradients + policy.optimizer + policy.activations + policy.logits
    wanted = reward.on_device + engine.on_device + policy.on_device - left
    for short, fields in ((0, []), (1, ["rewards.0.devices"])):
        machine = replace(ROOMY, gpus=(Gpu("Tiny 1000", wanted - short),))
        found = [v for v in plan_run(experiment, machine).violations if v.field != "generation.backend"]
        assert [violation.field for violation in found] == fields
    assert "while the reward_0 computes" in found[0].mend
