"""What a RunRecorder does around the steps, with stand-ins for the processes."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable
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
from nemorl.rollout.versions import UNBROKEN
from nemorl.run import validation
from nemorl.run.checkpoints import Progress
from nemorl.run.recorder import RunRecorder
from nemorl.session.session import Session
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
        trajectories=lambda rows: None,
    )
    session: Any = SimpleNamespace(
        rollout=(),
        update_weights=update_weights,
        generating=contextlib.nullcontext,
        lineage=UNBROKEN,
        num_model_restarts=0,
    )
    checkpoints: Any = SimpleNamespace(check=lambda: None, due_copy=lambda step, has_line: False)
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

    async def save(progress: Progress, metrics: Awaitable[StepMetrics]) -> None:
        saved.append(progress)

    async def settle(*, last: bool = False) -> None:
        """Nothing is being written."""

    checkpoints: Any = SimpleNamespace(
        check=lambda: None,
        due_copy=lambda step, has_line: False,
        save=save,
        settle=settle,
        on_disk=lambda step: True,
    )
    nobody: Any = SimpleNamespace(lineage=UNBROKEN, num_model_restarts=0)
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

    async def save(progress: Progress, metrics: Awaitable[StepMetrics]) -> None:
        assert progress.step == (await metrics).step
        saved.append((progress.step, progress.position))

    async def settle(*, last: bool = False) -> None:
        """Nothing is being written."""

    checkpoints: Any = SimpleNamespace(
        check=lambda: None, due_copy=lambda step, has_line: False, save=save, settle=settle
    )
    nobody: Any = SimpleNamespace(lineage=UNBROKEN, num_model_restarts=0)

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


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_stop_saves_a_state_that_was_restored_from_memory(tmp_path: Path, on_disk: bool) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with contextlib.closing(JsonLinesWriter(metrics)) as writer:
        for step in (1, 2):
            writer.append(StepMetrics(step, step, {"reward/mean": step / 10}).to_json())
    observer: Any = SimpleNamespace(
        stage=Stages([]).stage,
        folder=SimpleNamespace(paths=SimpleNamespace(metrics=metrics)),
        rewind=lambda step: None,
    )
    saved: list[tuple[int, int, float]] = []

    async def save(progress: Progress, line: Awaitable[StepMetrics]) -> None:
        saved.append((progress.step, progress.extra_versions, (await line).values["reward/mean"]))

    async def settle(*, last: bool = False) -> None:
        """Nothing is being written."""

    checkpoints: Any = SimpleNamespace(save=save, settle=settle, on_disk=lambda step: on_disk)
    session: Any = SimpleNamespace(lineage=UNBROKEN)

    async def main() -> None:
        experiment = load_experiment(write(tmp_path), [])
        recorder = RunRecorder(experiment, session, observer, checkpoints, Progress())
        session.lineage = UNBROKEN.restored(2, newest=5)
        recorder.rewind(Progress(2, position=8))
        await recorder.save(last=True)

    asyncio.run(main())
    assert saved == ([] if on_disk else [(2, session.lineage.version(2) - 2, 0.2)])
    assert session.lineage.version(2) > 5


def test_a_run_that_lost_updates_says_so_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = tmp_path / "metrics.jsonl"
    observer: Any = SimpleNamespace(
        folder=SimpleNamespace(paths=SimpleNamespace(metrics=metrics)), summary=lambda changes: None
    )
    nobody: Any = SimpleNamespace(lineage=UNBROKEN, num_model_restarts=0)
    recorder = RunRecorder(load_experiment(write(tmp_path), []), nobody, observer, nobody, Progress())

    def told(*steps: tuple[str, ...], left_out: int = 0) -> list[str]:
        caplog.clear()
        metrics.unlink(missing_ok=True)
        with contextlib.closing(JsonLinesWriter(metrics)) as writer:
            for step, kinds in enumerate(steps, start=1):
                updates = [
                    TrainStats(
                        {},
                        {},
                        1.0,
                        1e-3,
                        kind == "nan",
                        kind == "zero",
                        num_tokens=1,
                        num_distinct=1,
                        num_computed=1,
                    )
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


class Validations:
    """A recorder of a run at staleness 1 whose validations end when the test says so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.ended = asyncio.Event()
        self.lines: list[StepMetrics] = []
        self.saved: list[Awaitable[StepMetrics]] = []
        settings = ["algorithm.max_staleness=1", "algorithm.validation={period: 2}", "algorithm.num_steps=4"]
        settings += ["checkpointing.period=2", *overrides]
        experiment = load_experiment(write(folder), settings)
        self.session = Session()

        async def sample_validation(*rest: object, **options: object) -> list[Any]:
            await self.ended.wait()
            return [group(0, trajectory(1.0))]

        async def save(progress: Progress, metrics: Awaitable[StepMetrics]) -> None:
            self.saved.append(metrics)

        async def settle(*, last: bool = False) -> None:
            """Nothing is being written."""

        def write_line(step: int, version: int, values: dict[str, float]) -> StepMetrics:
            self.lines.append(StepMetrics(step, version, values))
            return self.lines[-1]

        monkeypatch.setattr(validation, "sample_validation", sample_validation)
        monkeypatch.setattr("nemorl.run.recorder.validation_sets", lambda experiment: {"": 1})
        observer: Any = SimpleNamespace(
            stage=Stages([]).stage,
            end_step=lambda step: {"time/step": float(step)},
            step=write_line,
            samples=lambda samples: None,
            trajectories=lambda rows: None,
        )
        checkpoints: Any = SimpleNamespace(
            check=lambda: None, due_copy=lambda step, has_line: False, save=save, settle=settle
        )
        self.recorder = RunRecorder(experiment, self.session, observer, checkpoints, Progress())

    async def finish(self, step: int) -> None:
        await self.recorder.finish(step, {"reward/mean": step / 10}, DataPlace(4 * step))


def test_a_validation_overlaps_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        run = Validations(tmp_path, monkeypatch)
        await run.finish(1)
        await run.finish(2)  # does not wait for the validation
        assert [line.step for line in run.lines] == [1]
        assert run.session.pinned.locked()  # so that the engines keep version 2
        (saved,) = run.saved
        third = asyncio.create_task(run.finish(3))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not third.done()  # lines keep their order
        run.ended.set()
        await third
        assert not run.session.pinned.locked()
        assert [line.step for line in run.lines] == [1, 2, 3]
        second = run.lines[1]
        assert await saved is second
        assert (second.values["time/step"], second.values["validation/accuracy"]) == (2.0, 1.0)
        assert "validation/accuracy" not in run.lines[2].values

    asyncio.run(main())


def test_a_validation_ends_when_all_engines_with_its_weights_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that return need other weights, for which an update waits until none is pinned."""

    async def main() -> None:
        run = Validations(tmp_path, monkeypatch)
        replicas: Any = SimpleNamespace(starved=asyncio.Event())
        run.session.replicas = replicas
        await run.finish(2)
        assert run.session.pinned.locked()
        replicas.starved.set()
        async with run.session.pinned:
            pass
        await run.recorder.settle()
        (line,) = run.lines
        assert line.values == {"reward/mean": 0.2, "time/step": 2.0, "models/restarts": 0.0}

    asyncio.run(asyncio.wait_for(main(), 60))
    lost = "all engines with its weights were lost"
    assert caplog.messages == [f"the validation of step 2 was not completed: {lost}"]


@pytest.mark.parametrize("overrides", [
    ["algorithm.early_stop={metric: validation/accuracy}"],
    ["algorithm.num_steps=2"],
    ["algorithm.max_staleness=0"],
])  # fmt: skip
def test_a_step_waits_for_a_validation_that_decides_or_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    async def main() -> None:
        run = Validations(tmp_path, monkeypatch, *overrides)
        second = asyncio.create_task(run.finish(2))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.done()
        assert run.lines == []
        run.ended.set()
        await second
        assert run.lines[0].values["validation/accuracy"] == 1.0

    asyncio.run(main())


def test_the_end_of_the_steps_waits_for_a_validation_but_not_after_a_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        run = Validations(tmp_path, monkeypatch)
        await run.finish(2)
        closing = asyncio.create_task(run.recorder.close(None, ValueError("the policy died"), None))
        await asyncio.sleep(0)
        run.ended.set()
        await closing
        assert run.lines[0].values["validation/accuracy"] == 1.0
        run.ended.clear()
        other = Validations(tmp_path, monkeypatch)
        await other.finish(2)
        await other.recorder.close(None, asyncio.CancelledError(), None)
        assert other.lines == []

    asyncio.run(main())
