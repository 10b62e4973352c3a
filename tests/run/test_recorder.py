"""What a RunRecorder does around the steps, with stand-ins for the processes."""

import asyncio
import contextlib
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemorl.algorithms.metrics import optimizer_metrics
from nemorl.config.load import load_experiment
from nemorl.data.losses import TrainStats
from nemorl.observe.files import JsonLinesWriter
from nemorl.observe.metrics import StepMetrics
from nemorl.observe.timeline import Stages
from nemorl.rollout.schedule import DataPlace
from nemorl.run import validation
from nemorl.run.checkpoints import Progress
from nemorl.run.recorder import RunRecorder
from tests.algorithms.groups import group, trajectory
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

    async def update_weights(step: int) -> None:
        """Nothing to hand over."""

    monkeypatch.setattr(validation, "load_tasks", load_tasks)
    monkeypatch.setattr(validation, "sample_validation", sample_validation)
    experiment = load_experiment(
        write(tmp_path),
        ["algorithm.validation={period: 1, at_start: true, num_prompts: 50}", "checkpointing.enabled=false"],
    )
    observer: Any = SimpleNamespace(
        stage=Stages([]).stage,
        end_step=lambda step: {},
        step=lambda step, version, values: StepMetrics(step, version, values),
        samples=lambda samples: None,
    )
    session: Any = SimpleNamespace(
        rollout=(), update_weights=update_weights, generating=contextlib.nullcontext
    )
    checkpoints: Any = SimpleNamespace(check=lambda: None, due_in_memory=lambda step: False)
    recorder = RunRecorder(experiment, session, observer, checkpoints, Progress())

    async def three_validations() -> None:
        await recorder.start()
        await recorder.finish(1, {}, DataPlace(4))
        await recorder.finish(2, {}, DataPlace(8))

    asyncio.run(three_validations())
    assert loads == [experiment.data.validation]
    assert sampled == [30, 30, 30]


def test_a_run_that_gets_no_better_ends_and_stays_ended(tmp_path: Path) -> None:
    """Its last step has what a last step has: a checkpoint, which a resumed run reads."""
    experiment = load_experiment(
        write(tmp_path),
        ["algorithm.early_stop={metric: reward/mean, patience: 2}", "checkpointing.period=100"],
    )
    waited: list[float] = []

    def told(step: int, version: int, values: dict[str, float]) -> StepMetrics:
        waited.append(values["early_stop/waited"])
        return StepMetrics(step, version, values)

    observer: Any = SimpleNamespace(stage=Stages([]).stage, end_step=lambda step: {}, step=told)
    saved: list[Progress] = []

    async def save(progress: Progress, metrics: StepMetrics) -> None:
        saved.append(progress)

    async def settle() -> None:
        """Nothing is being written."""

    checkpoints: Any = SimpleNamespace(
        check=lambda: None, due_in_memory=lambda step: False, save=save, settle=settle
    )
    nobody: Any = None
    recorder = RunRecorder(experiment, nobody, observer, checkpoints, Progress())

    async def run(rewards: list[float]) -> list[int]:
        done = []
        for step in recorder.steps():
            await recorder.finish(step, {"reward/mean": rewards[step - 1]}, DataPlace(step))
            done.append(step)
        return done

    assert asyncio.run(run([0.1, 0.4, 0.2, 0.4, 0.9])) == [1, 2, 3, 4]
    assert waited == [0, 0, 1, 2]
    (progress,) = saved
    assert (progress.step, progress.best_value, progress.waited) == (4, 0.4, 2)
    assert not list(RunRecorder(experiment, nobody, observer, checkpoints, progress).steps())


def test_a_run_that_is_asked_to_stop_begins_no_step_and_saves_the_last_one_once(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path), ["checkpointing.period=3"])
    observer: Any = SimpleNamespace(
        stage=Stages([]).stage,
        end_step=lambda step: {},
        step=lambda step, version, values: StepMetrics(step, version, values),
    )
    saved: list[tuple[int, int]] = []

    async def save(progress: Progress, metrics: StepMetrics) -> None:
        assert progress.step == metrics.step
        saved.append((progress.step, progress.position))

    async def settle() -> None:
        """Nothing is being written."""

    checkpoints: Any = SimpleNamespace(
        check=lambda: None, due_in_memory=lambda step: False, save=save, settle=settle
    )
    nobody: Any = None

    async def run(told_in: int) -> int:
        saved.clear()
        recorder = RunRecorder(experiment, nobody, observer, checkpoints, Progress())
        for step in recorder.steps():
            if step == told_in:
                recorder.stop.signal = signal.SIGTERM
            await recorder.finish(step, {}, DataPlace(4 * step))
        assert not recorder.finished
        await recorder.save(last=True)
        return recorder.done

    assert asyncio.run(run(told_in=5)) == 5
    assert saved == [(3, 12), (5, 20)]
    assert asyncio.run(run(told_in=6)) == 6
    assert saved == [(3, 12), (6, 24)]


def test_a_run_that_lost_updates_says_so_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = tmp_path / "metrics.jsonl"
    observer: Any = SimpleNamespace(
        folder=SimpleNamespace(paths=SimpleNamespace(metrics=metrics)), summary=lambda changes: None
    )
    nobody: Any = None
    recorder = RunRecorder(load_experiment(write(tmp_path), []), nobody, observer, nobody, Progress())

    def told(*steps: tuple[str, ...], left_out: int = 0) -> list[str]:
        caplog.clear()
        metrics.unlink(missing_ok=True)
        with contextlib.closing(JsonLinesWriter(metrics)) as writer:
            for step, kinds in enumerate(steps, start=1):
                updates = [
                    TrainStats({}, {}, 1.0, 1e-3, kind == "nan", kind == "zero", num_tokens=1, num_computed=1)
                    for kind in kinds
                ]
                writer.append(StepMetrics(step, step, optimizer_metrics(updates, left_out)).to_json())
        recorder.summarize()
        return caplog.messages

    skipped = "updates were skipped because their gradients were not finite"
    empty = "updates had no gradient because of filters, errors, equal rewards or masks"
    assert told(("one",), ("one",)) == []
    assert told(("one", "one"), ("nan", "nan")) == [f"2 of 4 {skipped}; they changed no weight."]
    assert told(("nan",), ("nan",)) == [f"2 of 2 {skipped}; the run has learned nothing."]
    assert told(("one", "zero"), left_out=2) == [f"3 of 4 {empty}; they changed no weight."]
    assert told((), (), left_out=1) == [f"2 of 2 {empty}; the run has learned nothing."]
