"""Every experiment in configs/ can be loaded; only the models it names may be missing here.

Recipes, whose models and data are on the hub, have a test of their own (tests/plan/test_recipes.py).
"""

from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from nemorl.config.algorithm import (
    AlgorithmConfig,
    AlignedDistillationConfig,
    DistillationConfig,
    OnlineConfig,
    OnPolicyDistillationConfig,
    RewardModelConfig,
)
from nemorl.config.algorithm.base import AlgorithmBase
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.config.schema import names, variants
from nemorl.errors import ABSENT, ConfigError
from nemorl.plan.machine import Machine
from nemorl.plan.problems import plan_run
from tests.required import missing

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(set(CONFIGS.rglob("*.yaml")) - set((CONFIGS / "recipes").rglob("*.yaml")))
ROOMY = Machine(cores=64, memory_bytes=10**12, shared_memory_bytes=10**12, gpus=())


def inherited() -> set[Path]:
    """Files that others build on; these need not be whole."""
    parents = set()
    for file in FILES:
        named = yaml.safe_load(file.read_text(encoding="utf-8")).get("defaults", [])
        parents |= {(file.parent / name).resolve() for name in ([named] if isinstance(named, str) else named)}
    return parents


def test_there_are_some() -> None:
    assert FILES


@cache
def loaded(file: Path) -> Experiment | ConfigError:
    """The experiment, or why it is none."""
    try:
        return load_experiment(file)
    except ConfigError as error:
        return error


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_it_loads_or_others_complete_it(file: Path) -> None:
    found = loaded(file)

    if isinstance(found, ConfigError):
        for problem in found.problems:
            if "is not installed" in problem.fix:  # a library of environments
                missing(str(problem.value), str(found))
        assert file.resolve() in inherited(), str(found)
        assert all(problem.value is ABSENT for problem in found.problems), str(found)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_only_its_models_may_be_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = loaded(file)
    if isinstance(experiment, ConfigError):
        pytest.skip("a part that others complete, or of a package that is not installed")
    monkeypatch.chdir(CONFIGS.parent)  # paths in experiments are relative to where the command runs

    problems = plan_run(experiment, ROOMY).problems

    assert {problem.field for problem in problems} <= {"policy.model_path", "teachers.sums.model_path"}


def test_every_algorithm_has_one_that_runs_here() -> None:
    """With a model that is made on the spot."""
    named = {algorithm.name for algorithm in of_experiments_made_here()}

    assert named == {name for variant in variants(AlgorithmConfig) for name in names(variant)}


@pytest.mark.parametrize(
    ("algorithm", "part"),
    [
        *((OnlineConfig, part) for part in ("advantage", "loss", "correction", "entropy")),
        (RewardModelConfig, "loss"),
        (OnPolicyDistillationConfig | DistillationConfig, "loss"),
        (AlignedDistillationConfig, "loss"),
    ],
)
def test_every_variant_of_a_part_has_one_that_runs_here(algorithm: Any, part: str) -> None:
    """But functions of one's own."""
    used = {getattr(found, part).name for found in of_experiments_made_here() if isinstance(found, algorithm)}
    kinds = get_args(algorithm) or (algorithm,)
    known = {
        name for kind in kinds for v in variants(kind.model_fields[part].annotation) for name in names(v)
    }

    assert used == known - {"custom"}


@pytest.mark.parametrize(
    ("part", "field", "plain"),
    [
        ("loss", "dual_clip", None),
        ("loss", "top_entropy_quantile", 1.0),
        ("correction", "form", "decoupled"),
        ("correction", "sequence_mask", None),
        ("correction", "off_policy_threshold", None),
        ("correction", "divisor", "all"),
        ("kl", "coefficient", 0.0),
        ("likelihood", "coefficient", 0.0),
    ],
)
def test_every_addition_to_a_loss_has_one_that_runs_here(part: str, field: str, plain: object) -> None:
    sections = [getattr(a, part) for a in of_experiments_made_here() if isinstance(a, OnlineConfig)]

    assert any(getattr(section, field, plain) != plain for section in sections)


@cache
def of_experiments_made_here() -> tuple[AlgorithmBase, ...]:
    """The algorithms of these experiments."""
    experiments = [found for file in FILES if isinstance(found := loaded(file), Experiment)]
    return tuple(experiment.algorithm for experiment in experiments if is_made_here(experiment))


def is_made_here(experiment: Experiment) -> bool:
    """Whether its model comes from `make quickstart`, which downloads nothing."""
    made = ("models/arithmetic", "models/pairs", "runs/quickstart/sft/hf")
    return str(experiment.policy.model_path) in made
