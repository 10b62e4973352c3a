"""A sound experiment, for tests to spoil."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError, Problem

GRPO = """\
run_dir: runs/sums
policy:
  model_path: models/arithmetic
  precision: float32
  max_sequence_length: 64
  micro_batch_tokens: 512
generation:
  max_new_tokens: 8
data:
  train: {name: arithmetic, digits: 2, size: 1000}
  validation: {name: arithmetic, digits: 2, size: 100, offset: 1000}
  chat: false
rewards:
  - function: exact_match
algorithm:
  name: grpo
  num_steps: 10
  num_prompts_per_step: 4
  num_generations_per_prompt: 8
"""


def write(folder: Path, text: str = GRPO, name: str = "experiment.yaml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def problems_of(file: Path, *overrides: str) -> list[Problem]:
    """The problems of an experiment that must be refused."""
    with pytest.raises(ConfigError) as refused:
        load_experiment(file, overrides)
    return list(refused.value.problems)


def refuses(file: Path, overrides: Sequence[str], field: str, value: object, fix: str) -> None:
    """Assert that this is the only problem of an experiment."""
    problems = problems_of(file, *overrides)
    assert [problem.field for problem in problems] == [field]
    assert problems[0].value == value
    assert fix in problems[0].fix
