"""Every experiment in configs/ can be loaded; only the models it names may be missing here."""

from pathlib import Path

import pytest
import yaml

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.config.schema import names, variants
from nemorl.errors import ABSENT, ConfigError
from nemorl.plan.fit import plan_run
from nemorl.plan.machine import Machine

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
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


def refusal(file: Path) -> ConfigError | None:
    try:
        load_experiment(file)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_it_loads_or_others_complete_it(file: Path) -> None:
    refused = refusal(file)

    if refused is not None:
        assert file.resolve() in inherited(), str(refused)
        assert all(violation.value is ABSENT for violation in refused.violations), str(refused)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_only_its_model_may_be_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if refusal(file) is not None:
        pytest.skip("a part that others complete")
    monkeypatch.chdir(CONFIGS.parent)  # paths in experiments are relative to where the command runs

    violations = plan_run(load_experiment(file), ROOMY).violations

    assert {violation.field for violation in violations} <= {"policy.model_path"}


def test_every_algorithm_has_one_that_runs_here() -> None:
    """With a model that is made on the spot."""
    experiments = [load_experiment(file) for file in FILES if refusal(file) is None]
    named = {experiment.algorithm.name for experiment in experiments if is_made_here(experiment)}

    assert named == {name for variant in variants(AlgorithmConfig) for name in names(variant)}


def is_made_here(experiment: Experiment) -> bool:
    """Whether its model comes from `make quickstart`, which downloads nothing."""
    return str(experiment.policy.model_path) in ("models/arithmetic", "runs/quickstart/sft/hf")
