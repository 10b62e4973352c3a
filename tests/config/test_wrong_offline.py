"""What users get wrong where a run learns from given data."""

from pathlib import Path
from typing import Any

import pytest

from nemorl.config.algorithm.pair_losses import PREFERENCE_PRESETS
from nemorl.config.load import load_experiment
from tests.config.experiments import refuses, write

ROOT = Path(__file__).parents[2]
EXPERIMENT = """\
run_dir: runs/preferences
policy:
  model_path: models/arithmetic
  precision: float32
  max_sequence_length: 64
  micro_batch_tokens: 512
data:
  train: {name: arithmetic, digits: 2, size: 1000}
  validation: {name: arithmetic, digits: 2, size: 100, offset: 1000}
  chat: false
algorithm:
  name: dpo
  num_steps: 10
  batch_size: 8
"""
SCORES = ["algorithm.name=reward_model", "policy.head=scalar"]
PAIRS = "{name: preference, path: pairs.jsonl, margin_key: gap}"

WRONG: dict[str, tuple[list[str], str, Any, str]] = {
    "tasks for pairs": (
        ["data.train={name: jsonl, path: tasks.jsonl}"],
        "data.train.name",
        "jsonl",
        "`dpo` learns from pairs of answers; use a dataset `preference`, `arithmetic`",
    ),
    "feedback for pairs": (
        ["data.train={name: feedback, path: judged.jsonl}"],
        "data.train.name",
        "feedback",
        "`dpo` learns from pairs of answers; use a dataset `preference`, `arithmetic`",
    ),
    "pairs for steps": (
        [*SCORES, "algorithm.loss={name: process}", "data.train={name: preference, path: pairs.jsonl}"],
        "data.train.name",
        "preference",
        "learns from judged steps",
    ),
    "feedback to imitate": (
        ["algorithm.name=sft", "data.train={name: feedback, path: judged.jsonl}"],
        "data.train.name",
        "feedback",
        "`sft` learns from answers",
    ),
    "texts for samples": (
        [
            *("algorithm.name=sft", "data.train={name: texts, path: a.jsonl}"),
            *("data.validation={name: texts, path: b.jsonl}", "generation.max_new_tokens=8"),
            *("algorithm.validation={period: 2, generate: true}", "rewards=[{function: exact_match}]"),
        ],
        "data.validation.name",
        "texts",
        "texts have no prompts that could be sampled; use `tasks`, or set algorithm.validation.generate to",
    ),
    "the same files for validation": (
        [
            *("algorithm.name=sft", "data.train={name: texts, path: a, files: '*.txt'}"),
            "data.validation={name: texts, path: a, files: '*.txt'}",
        ],
        "data.validation.path",
        "a",
        "training reads the same file; use another",
    ),
    "an aggregation of no cross entropy": (
        ["algorithm.sft_aggregation=seq-mean-token-sum"],
        "algorithm.sft_aggregation",
        "seq-mean-token-sum",
        "sft_coefficient is 0",
    ),
    "a reward model of tokens": (["algorithm.name=reward_model"], "policy.head", "lm", "set it to scalar"),
    "a policy of scores": (["policy.head=scalar"], "policy.head", "scalar", "set it to lm"),
    "room for one answer": (
        ["policy.micro_batch_tokens=100"],
        "policy.micro_batch_tokens",
        100,
        "one pass must hold both answers of a pair; set it to twice max_sequence_length, 128",
    ),
    "a reference that nobody asks": (
        ["algorithm.name=simpo", "algorithm.reference=live"],
        "algorithm.reference",
        "live",
        "the loss `logistic` has no reference here",
    ),
    "margins of steps": (
        ["algorithm={name: reward_model, loss: {name: process, margin_scale: 1}}"],
        "algorithm.loss.margin_scale",
        1,
        "this field belongs to `bradley_terry`, and algorithm.loss.name is `process`",
    ),
    "margins that the data lack": (
        ["algorithm.loss.margin_scale=1", "data.validation=null"],
        "algorithm.loss.margin_scale",
        1.0,
        "data.train has no margins; set data.train.margin_key to their key, or remove this",
    ),
    "margins that nobody looks at": (
        [f"data.train={PAIRS}", "data.validation=null"],
        "data.train.margin_key",
        "gap",
        "the loss uses no margins; remove this, or set algorithm.loss.margin_scale",
    ),
    "samples of a validation that takes none": (
        ["algorithm.validation={period: 2, num_generations_per_prompt: 4}"],
        "algorithm.validation.num_generations_per_prompt",
        4,
        "algorithm.validation.generate is false",
    ),
    "samples of a reward model": (
        [*SCORES, "algorithm.validation.generate=true"],
        "algorithm.validation.generate",
        True,
        "",
    ),
    "one answer alone": (
        ["algorithm.name=kto", "algorithm.batch_size=1"],
        "algorithm.batch_size",
        1,
        "at least 2",
    ),
    "copies that pairs do not divide among": (
        ["policy.layout.data_parallel_size=3"],
        "algorithm.batch_size",
        8,
        "3, must divide it",
    ),
    "a coin for a label": (
        ["algorithm.loss.label_smoothing=0.5"],
        "algorithm.loss.label_smoothing",
        0.5,
        "a value less than 0.5",
    ),
    "sums of odds": (
        ["algorithm.name=orpo", "algorithm.loss.logprobs=sum"],
        "algorithm.loss.logprobs",
        "sum",
        "mean",
    ),
    "odds beside nothing": (
        ["algorithm.loss={name: odds_ratio}"],
        "algorithm.sft_coefficient",
        0.0,
        "add a cross entropy, as ORPO's 1, or use another loss",
    ),
    "a reference of its own, which comes before the first step": (
        ["algorithm.name=kto", "reference={micro_batch_tokens: 256}"],
        "reference",
        {"micro_batch_tokens": 256},
        "`kto` keeps its reference in the policy's processes; remove this section",
    ),
    "a reference for means alone": (
        ["algorithm.name=simpo", "reference={micro_batch_tokens: 256}"],
        "reference",
        {"micro_batch_tokens": 256},
        "`simpo` uses no reference; remove this section",
    ),
    "answers that all count nothing": (
        ["algorithm.name=kto", "algorithm.desirable_weight=0", "algorithm.undesirable_weight=0"],
        "algorithm.desirable_weight",
        0.0,
        "algorithm.undesirable_weight is 0 too, so no answer counts",
    ),
    "the same pairs to measure on": (
        [f"data.{part}={{name: preference, path: pairs.jsonl}}" for part in ("train", "validation")],
        "data.validation.path",
        "pairs.jsonl",
        "training reads the same file",
    ),
    "a best checkpoint by another kind's figure": (
        ["checkpointing.metric=rewards/desirable"],
        "checkpointing.metric",
        "rewards/desirable",
        "did you mean `rewards/",
    ),
}


@pytest.mark.parametrize(("overrides", "field", "value", "fix"), WRONG.values(), ids=WRONG.keys())
def test_it_is_refused_with_field_value_and_fix(
    tmp_path: Path, overrides: list[str], field: str, value: Any, fix: str
) -> None:
    refuses(write(tmp_path, EXPERIMENT), overrides, field, value, fix)


RIGHT: dict[str, list[str]] = {
    "pairs": [],
    "sums for single answers": ["algorithm.name=kto"],
    "pairs for single answers": ["algorithm.name=kto", "data.train={name: preference, path: pairs.jsonl}"],
    "single answers of one kind": ["algorithm.name=kto", "algorithm.undesirable_weight=0"],
    "odds beside a cross entropy": ["algorithm.name=orpo", "algorithm.sft_coefficient=0.5"],
    "scores": SCORES,
    "scores of steps": [*SCORES, "algorithm.loss={name: process}"],
    "margins": [
        "algorithm.loss.margin_scale=1",
        f"data.train={PAIRS}",
        f"data.validation={PAIRS.replace('pairs', 'held_out')}",
    ],
    "samples in validation": [
        "algorithm.validation={period: 2, generate: true, num_generations_per_prompt: 4}",
        "rewards=[{function: exact_match}]",
        "generation.max_new_tokens=8",
    ],
    "conversations": ["algorithm.name=sft", "data.train={name: conversations, path: talks.jsonl}"],
    "a loss of its own under a name": ["algorithm.loss={name: hinge, margin: 2}"],
}


@pytest.mark.parametrize("overrides", RIGHT.values(), ids=RIGHT.keys())
def test_it_is_taken(tmp_path: Path, overrides: list[str]) -> None:
    load_experiment(write(tmp_path, EXPERIMENT), overrides)


def test_another_name_is_another_method(tmp_path: Path) -> None:
    """What a file says of one method's loss says nothing of another's."""
    file = write(tmp_path, EXPERIMENT.replace("name: dpo", "name: dpo\n  loss: {beta: 0.7}"))
    assert load_experiment(file, []).algorithm.loss.beta == 0.7  # type: ignore[union-attr]
    simpo = load_experiment(file, ["algorithm.name=simpo"]).algorithm
    assert (simpo.loss.beta, simpo.batch_size) == (2.0, 8)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [*PREFERENCE_PRESETS, "kto"])
def test_every_method_is_documented_and_has_an_experiment(name: str) -> None:
    page = (ROOT / "docs" / "preference.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    algorithm = load_experiment(ROOT / "configs" / "offline" / f"{name}.yaml").algorithm
    assert algorithm.name == name
    if name in PREFERENCE_PRESETS:
        preset = PREFERENCE_PRESETS[name]
        assert preset.paper in row
        assert f"`{algorithm.loss.name}`" in row  # type: ignore[union-attr]
        keeps = algorithm.loss.keeps_reference  # type: ignore[union-attr]
        assert f"| {'yes' if keeps else 'no'} |" in row
