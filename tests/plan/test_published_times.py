"""Planned next to published step times, which docs/plan_time.md shows."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from nemorl.plan.costs import Attained
from nemorl.plan.layouts import list_layouts
from nemorl.plan.problems import policy_layout_problems
from nemorl.plan.step_time import FITTED, Measured, fit
from tests.config.experiments import write
from tests.plan.published import PUBLISHED, Published, experiment_of, measured, plan_of, shape_of

# NeMo-RL's processes collect all weights in a refit.
SHIPPED = replace(Attained(), gathers_weights=True)
# Where the fit begins: usual values.
USUAL = replace(
    SHIPPED,
    matmul=0.6,
    memory=0.7,
    launch=1e-3,
    expert_launch=1e-4,
    decode_layer=5e-5,
    sequence=3e-5,
    step=10.0,
    refit=0.3,
)
HALVES = (PUBLISHED[0::2], PUBLISHED[1::2])  # the shipped constants are fitted to the first


def errors(runs: tuple[Published, ...], attained: Attained, file: Path) -> list[float]:
    """Of the planned seconds, relative to the published ones."""
    planned = (plan_of(run, experiment_of(run, file), attained).step().seconds for run in runs)
    return [seconds / run.seconds - 1 for run, seconds in zip(runs, planned, strict=True)]


def steps(runs: tuple[Published, ...], file: Path) -> list[Measured]:
    return [measured(run, experiment_of(run, file)) for run in runs]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path)


def test_runs_that_were_not_fitted_are_planned_within_a_few_tenths(file: Path) -> None:
    """The goal is a median error of at most 25%; reached is 12%, and 42% for the worst run."""
    of_others = [abs(error) for error in errors(HALVES[1], SHIPPED, file)]
    assert median(of_others) < 0.13
    assert max(of_others) < 0.45


def test_runs_that_were_fitted(file: Path) -> None:
    of_fitted = [abs(error) for error in errors(HALVES[0], SHIPPED, file)]
    assert median(of_fitted) < 0.12


def test_the_plan_accepts_the_published_layouts(file: Path) -> None:
    for run in PUBLISHED:
        experiment = experiment_of(run, file)
        assert not list(policy_layout_problems(experiment, shape_of(run.model))), run.name
        assert plan_of(run, experiment, SHIPPED).devices == run.gpus, run.name


def test_a_published_layout_is_one_of_those_that_are_listed(file: Path) -> None:
    run = next(run for run in PUBLISHED if run.model == "Qwen3-32B")
    experiment = experiment_of(run, file)
    names = {choice.layout.name for choice in list_layouts(experiment, shape_of(run.model), run.gpus, None)}
    assert experiment.policy.layout.name in names


def test_the_page_has_these_predictions(file: Path) -> None:
    rows = []
    for index, run in enumerate(PUBLISHED):
        step = plan_of(run, experiment_of(run, file), SHIPPED).step()
        stage = step.stages[step.longest]
        longest = f"{step.longest} {stage.seconds:.0f} s, {stage.bound}"
        values = f"{run.seconds:g} | {step.seconds:.0f} | {step.seconds / run.seconds - 1:+.0%}"
        rows.append(f"| {run.name} | {values} | {longest} | {'no' if index % 2 else 'yes'} |\n")
    page = (Path(__file__).parents[2] / "docs/plan_time.md").read_text(encoding="utf-8")
    assert "".join(rows) in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_shipped_constants_are_the_fit_to_the_first_half(file: Path) -> None:
    found = fit(steps(HALVES[0], file), USUAL)
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(SHIPPED, name), rel=0.05), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fit_to_the_second_half_plans_the_first(file: Path) -> None:
    """10%, though the halves do not agree about memory and launches of decoding."""
    found = fit(steps(HALVES[1], file), USUAL)
    assert median(abs(error) for error in errors(HALVES[0], found, file)) < 0.12
