"""When a run ends early, over its steps and after a resume."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemorl.config.algorithm import EarlyStopConfig
from nemorl.megatron.checkpoint_store import Found
from nemorl.run.checkpoints import Progress
from nemorl.run.stop import EarlyStop
from nemorl.run.train import fix_if_complete

ACCURACY = "validation/accuracy"


def watched(**settings: object) -> EarlyStop:
    return EarlyStop(EarlyStopConfig.model_validate({"metric": ACCURACY, "patience": 2, **settings}))


def ends_at(stop: EarlyStop, values: list[float]) -> int | None:
    """The first value after which the run ends."""
    return next((n for n, value in enumerate(values) if stop.update({ACCURACY: value})), None)


@pytest.mark.parametrize(
    ("settings", "values", "end"),
    [
        ({}, [0.1, 0.2, 0.15, 0.2, 0.9], 3),
        ({}, [0.1, 0.2, 0.15, 0.3, 0.25], None),
        ({"min_delta": 0.1}, [0.1, 0.15, 0.2, 0.9], 2),
        ({"min_delta": 0.1}, [0.1, 0.15, 0.25, 0.3, 0.5], None),  # from the best, not from the last
        ({"higher_is_better": False}, [3.0, 2.0, 2.5, 2.0], 3),
        ({}, [math.nan, math.nan], 1),
        ({}, [0.5, math.nan, 0.6, 0.7], None),
        ({"patience": 1}, [0.5, 0.5], 1),
    ],
)
def test_patience(settings: dict[str, object], values: list[float], end: int | None) -> None:
    assert ends_at(watched(**settings), values) == end


def test_steps_without_the_metric_change_nothing() -> None:
    stop = watched()
    assert not any(stop.update({"reward/mean": 0.0}) for _ in range(10))
    assert EarlyStop(None).update({ACCURACY: 0.0}) is False


def test_a_resumed_run_waits_on() -> None:
    first = watched()
    assert ends_at(first, [0.4, 0.3]) is None
    resumed = EarlyStop(first.config, first.best, first.waited)
    assert resumed.update({ACCURACY: 0.4})
    assert "validation/accuracy has not improved on 0.4 in 2 measurements" in str(resumed)


@pytest.mark.parametrize(
    ("step", "waited", "patience", "fix"),
    [
        (7, 1, 2, ""),
        (7, 2, 2, "To train further, raise algorithm.early_stop.patience; early stop"),
        (7, 2, 3, ""),
        (10, 0, 2, "To train further, raise algorithm.num_steps (now 10)"),
    ],
)
def test_what_is_left_of_a_resumed_run(
    tmp_path: Path, step: int, waited: int, patience: int, fix: str
) -> None:
    Progress(step=step, best_value=0.4, waited=waited).write(tmp_path)
    config = EarlyStopConfig(metric=ACCURACY, patience=patience)
    experiment: Any = SimpleNamespace(algorithm=SimpleNamespace(num_steps=10, early_stop=config))
    message = fix_if_complete(experiment, Found(step, tmp_path, {}, ()))
    assert message.startswith(fix)
    assert bool(message) == bool(fix)
