"""Whole runs of algorithms that other files leave out: teachers, pairs, feedback, reward models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment
from nemorl.models.create import PAIRS as PAIRS_OF_DIGITS
from nemorl.models.create import create_tiny_model
from nemorl.observe.metrics import StepMetrics
from tests.run.runs import finish, lines, start, tiny_model, write_experiment

pytestmark = pytest.mark.slow


def train(folder: Path, model: Path, name: str, **sections: Any) -> list[StepMetrics]:
    """The steps of a run; a section replaces the one of `write_experiment`, and None removes it."""
    path = write_experiment(folder, model, name)
    tree = yaml.safe_load(path.read_text())
    tree["policy"]["layout"] = {}
    tree |= sections
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
    status, output = finish(start("train", path))
    assert status == 0, output
    steps = lines(folder / name)
    experiment = load_experiment(folder / name / "config.yaml")
    sections = (experiment.algorithm, experiment.env, experiment.rewards, experiment.data)
    known = metric_names(*sections, teachers=experiment.teachers)
    assert {metric for step in steps for metric in step.values} <= known
    return steps


SAMPLED = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "num_steps": 2}


def test_a_teacher_that_is_the_policy_has_no_divergence_from_it(folder: Path, model: Path) -> None:
    first, last = train(
        folder,
        model,
        "teacher",
        algorithm={"name": "on_policy_distillation", **SAMPLED},
        teachers={"self": {"model_path": str(model)}},
        rewards=None,
    )
    assert first.values["distillation/reverse_kl"] == pytest.approx(0, abs=1e-5)
    assert first.values["logprob_gap/max"] < 1e-4
    assert last.values["time/teachers"] > 0


def test_tokens_are_compared_over_the_policys_processes(folder: Path, model: Path) -> None:
    """The tokens of a group, whose trajectories are on two ranks; the engine is the policy itself."""
    steps = train(
        folder,
        model,
        "tokens",
        policy={
            "model_path": str(model),
            "precision": "float32",
            "max_sequence_length": 16,
            "micro_batch_tokens": 128,
            "layout": {"data_parallel_size": 2},
            "optimizer": {"name": "adam", "lr": 1e-3},
        },
        algorithm={
            "name": "otb",
            **SAMPLED,
            "num_generations_per_prompt": 4,
            "num_minibatches": 2,
            "correction": {"name": "tis", "normalize": True},
        },
    )
    for step in steps:
        assert step.values["advantage/std"] > 0
        assert step.values["correction/mean"] == pytest.approx(1, abs=1e-4)
        assert step.values["grad_norm"] > 0
        assert step.values["time/advantages"] > 0


def test_each_task_has_the_teacher_that_its_column_names(folder: Path, model: Path) -> None:
    """Half of the tasks have the policy itself as the teacher, the others another model."""
    other = tiny_model(folder / "other", seed=1)
    tasks = folder / "tasks.jsonl"
    rows = [
        f'{{"question": "{n}+{n}=", "answer": "{2 * n:02}", "of": "{("self", "other")[n % 2]}"}}'
        for n in range(1, 9)
    ]
    tasks.write_text("\n".join(rows) + "\n", encoding="utf-8")

    def run(name: str, algorithm: dict[str, Any]) -> list[StepMetrics]:
        return train(
            folder,
            model,
            name,
            data={
                "chat": False,
                "train": {
                    "name": "jsonl",
                    "path": str(tasks),
                    "prompt_key": "question",
                    "answer_key": "answer",
                },
            },
            algorithm=algorithm,
            teachers={
                "self": {"model_path": str(model)},
                "another": {
                    "key": "other",
                    "model_path": str(other),
                    "devices": "policy",
                    "offload": {"weights": True},
                },
            },
            rewards=None,
        )

    several = {"teacher_key": "of", "num_steps": 1}
    of_samples = {"name": "on_policy_distillation", "num_minibatches": 2}
    (sampled,) = run("teachers", {**of_samples, **SAMPLED, **several})
    assert sampled.values["updates/all"] == 2
    assert abs(sampled.values["distillation/reverse_kl"]) > 1e-3
    loss = {"name": "forward_kl", "tokens": 4}
    (data,) = run("teachers-of-data", {"name": "distillation", "batch_size": 8, "loss": loss, **several})
    assert data.values["distillation/forward_kl"] > 1e-3


def test_teachers_have_tokens_of_their_own(folder: Path, model: Path) -> None:
    """One of digits and one of the policy's pairs of digits, weighed by text; validation has the loss."""
    pairs = folder / "pairs"
    everywhere = replace(PAIRS_OF_DIGITS, pattern=r"[0-9]{2}|[\s\S]")
    create_tiny_model(pairs, everywhere, hidden=32, ffn=64, heads=4, kv_heads=2)
    steps = train(
        folder,
        pairs,
        "aligned",
        algorithm={
            "name": "aligned_distillation",
            "num_steps": 2,
            "batch_size": 7,
            "loss": {"name": "common_kl", "tokens": 20, "common": "likeliest"},
            "combination": {"name": "trust", "score": "cross_entropy"},
            "validation": {"at_end": True, "generate": False},
        },
        teachers={
            "digits": {"model_path": str(model), "devices": "policy"},
            "pairs": {"model_path": str(pairs)},
        },
        rewards=None,
    )
    first, last = (step.values for step in steps)
    # The policy is its own second teacher, and the 20 likeliest tokens of a text are compared.
    assert first["distillation/projected_kl"] == pytest.approx(0, abs=1e-5)
    assert first["distillation/common_kl"] > 1e-3
    assert first["distillation/aligned"] == first["teachers/digits/aligned"] == 1
    assert first["teachers/digits/divergence"] > 1e-3
    assert first["teachers/digits/weight"] + first["teachers/pairs/weight"] == pytest.approx(1)
    assert 0 < first["teachers/digits/weight"] < 1
    assert first["teachers/digits/weight"] != pytest.approx(0.5, abs=1e-3)
    assert "validation/teachers/pairs/weight" in last
    assert last["validation/loss"] == pytest.approx(
        last["validation/loss/distillation"] + 0.1 * last["validation/loss/sft"], rel=1e-5
    )
    assert len(list((folder / "aligned" / "projections").iterdir())) == 2


def test_interleaved_stages_update_an_engine(folder: Path) -> None:
    """Two virtual stages on each of two processes; the engine has their weights after every step."""
    deep = tiny_model(folder / "deep", layers=4)
    steps = train(
        folder,
        deep,
        "interleaved",
        policy={
            "model_path": str(deep),
            "precision": "float32",
            "max_sequence_length": 16,
            "micro_batch_tokens": 64,
            "layout": {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
            "optimizer": {"name": "adam", "lr": 1e-3},
        },
        algorithm={"name": "grpo", **SAMPLED, "num_generations_per_prompt": 4},
    )
    assert len(steps) == 2
    assert max(step.values["logprob_gap/max"] for step in steps) < 1e-4
    assert all(step.values["refit/gigabytes"] > 0 for step in steps)


PAIRS = {"name": "arithmetic", "digits": 1, "size": 60, "wrong_answers": 0}


@pytest.mark.parametrize(
    ("name", "policy", "metric"),
    [
        ("dpo", {}, "rewards/margin"),
        ("kto", {}, "rewards/margin"),
        ("reward_model", {"head": "scalar"}, "score/margin"),
    ],
)
def test_answers_are_compared(
    folder: Path, model: Path, name: str, policy: dict[str, str], metric: str
) -> None:
    steps = train(
        folder,
        model,
        name,
        policy={
            "model_path": str(model),
            "precision": "float32",
            "max_sequence_length": 16,
            "micro_batch_tokens": 128,
            "optimizer": {"name": "adam", "lr": 1e-2},
            **policy,
        },
        data={"chat": False, "train": PAIRS, "validation": {**PAIRS, "offset": 60, "size": 8}},
        algorithm={"name": name, "num_steps": 8, "batch_size": 16, "validation": {"at_end": True}},
        rewards=None,
        generation=None,
    )
    assert steps[-1].values["loss/preference"] < steps[0].values["loss/preference"]
    assert steps[-1].values[metric] > steps[0].values[metric]
    assert "validation/loss" in steps[-1].values
