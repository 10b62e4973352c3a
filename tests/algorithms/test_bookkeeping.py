"""What a Bookkeeper does around the steps, with stand-ins for the processes."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemorl.algorithms import evaluate
from nemorl.algorithms.bookkeeping import Bookkeeper
from nemorl.algorithms.checkpoints import Progress
from nemorl.config.load import load_experiment
from nemorl.observe.metrics import StepMetrics
from nemorl.observe.stages import Stages
from tests.algorithms.test_figures import group, trajectory
from tests.config.experiments import write


def test_validation_tasks_are_loaded_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[object] = []
    sampled: list[int] = []

    def load_tasks(dataset: object, data: object) -> range:
        loads.append(dataset)
        return range(30)

    async def sample_validation(
        rollout: object, num_tasks: int, *rest: object, **options: object
    ) -> list[Any]:
        sampled.append(num_tasks)
        return [group(0, trajectory(1.0))]

    async def hand_over(step: int) -> None:
        """Nothing to hand over."""

    monkeypatch.setattr(evaluate, "load_tasks", load_tasks)
    monkeypatch.setattr(evaluate, "sample_validation", sample_validation)
    experiment = load_experiment(
        write(tmp_path),
        ["algorithm.validation={period: 1, at_start: true, num_prompts: 50}", "checkpointing.enabled=false"],
    )
    observer: Any = SimpleNamespace(
        stage=Stages([]).stage,
        step=lambda step, version, values: StepMetrics(step, version, values),
        samples=lambda samples: None,
    )
    session: Any = SimpleNamespace(rollout=(), hand_over=hand_over, generating=contextlib.nullcontext)
    checkpoints: Any = SimpleNamespace(check=lambda: None)
    books = Bookkeeper(experiment, session, observer, checkpoints, Progress())

    async def three_validations() -> None:
        await books.open()
        await books.finish_step(1, {}, position=4)
        await books.finish_step(2, {}, position=8)

    asyncio.run(three_validations())
    assert loads == [experiment.data.validation]
    assert sampled == [30, 30, 30]
