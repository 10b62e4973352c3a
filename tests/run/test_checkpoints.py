"""When checkpoints are begun, committed and given up; the policy is a stand-in whose disk obeys the test."""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import yaml

from nemorl.cluster.errors import WorkerFailed
from nemorl.config.experiment import Experiment
from nemorl.errors import RunError
from nemorl.megatron.checkpoint_store import CheckpointStore, FileRecord, UnwritableCheckpoint
from nemorl.observe.metrics import StepMetrics
from nemorl.run.checkpoints import Checkpoints, Progress
from tests.config.experiments import GRPO

UNWRITABLE = f"{UnwritableCheckpoint.__module__}.{UnwritableCheckpoint.__qualname__}"


class SlowPolicy:
    """Writes what it has copied when `disk` is set, or fails with `failure`."""

    def __init__(self) -> None:
        self.state = "weights"
        self.disk = asyncio.Event()
        self.failure: RunError | None = None

    async def copy_for_checkpoint(self) -> None:
        self.copied = self.state

    async def write_copy(self, folder: Path) -> list[FileRecord]:
        await self.disk.wait()
        if self.failure is not None:
            raise self.failure
        (folder / "weights").write_text(self.copied)
        return []

    async def save(self, folder: Path) -> list[FileRecord]:
        await self.copy_for_checkpoint()
        return await self.write_copy(folder)


def in_a_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: object, **fixtures: object) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


def checkpoints(policy: SlowPolicy, store: CheckpointStore, **fields: object) -> Checkpoints:
    experiment = Experiment.model_validate({**yaml.safe_load(GRPO), "checkpointing": fields})
    return Checkpoints(experiment, policy, store)  # type: ignore[arg-type]


def metrics(step: int) -> asyncio.Future[StepMetrics]:
    line: asyncio.Future[StepMetrics] = asyncio.get_running_loop().create_future()
    line.set_result(StepMetrics(step, step, {}))
    return line


@in_a_loop
async def test_training_continues_while_the_disk_is_slow(store: CheckpointStore) -> None:
    policy = SlowPolicy()
    async with checkpoints(policy, store) as saving:
        await saving.save(Progress(step=1), metrics(1))
        policy.state = "weights of the next step"
        saving.check()
        assert store.steps() == []
        policy.disk.set()
    assert store.latest_valid().step == 1
    assert (store.path(1) / "weights").read_text() == "weights"


@in_a_loop
async def test_a_checkpoint_begins_when_the_one_before_is_committed(store: CheckpointStore) -> None:
    policy = SlowPolicy()
    async with checkpoints(policy, store) as saving:
        await saving.save(Progress(step=1), metrics(1))
        policy.state = "later weights"
        second = asyncio.create_task(saving.save(Progress(step=2), metrics(2)))
        await asyncio.sleep(0)
        assert policy.copied == "weights"
        policy.disk.set()
        await second
        assert 1 in store.steps()
    assert store.steps() == [1, 2]


@in_a_loop
async def test_without_asynchronous_a_step_waits_for_the_files(store: CheckpointStore) -> None:
    policy = SlowPolicy()
    async with checkpoints(policy, store, asynchronous=False) as saving:
        waiting = asyncio.create_task(saving.save(Progress(step=1), metrics(1)))
        await asyncio.sleep(0)
        assert not waiting.done()
        policy.disk.set()
        await waiting
        assert store.steps() == [1]


@in_a_loop
async def test_a_failure_is_raised_at_the_next_check(store: CheckpointStore) -> None:
    policy = SlowPolicy()
    policy.failure = RunError("policy rank 1: the disk is full")
    saving = checkpoints(policy, store)
    await saving.save(Progress(step=1), metrics(1))
    policy.disk.set()
    for _ in range(3):  # until the task that writes has come to its end
        await asyncio.sleep(0)
    with pytest.raises(RunError, match="rank 1: the disk is full"):
        saving.check()
    assert store.latest_valid() is None


def full(step: int) -> RunError:
    """The error of a rank whose disk is full."""
    return WorkerFailed("policy", 1, "checkpoint", UNWRITABLE, f"step {step}: no space", Path("log"))


@in_a_loop
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_full_disk_costs_a_checkpoint_and_no_step(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    policy = SlowPolicy()
    policy.disk.set()
    async with checkpoints(policy, store, asynchronous=asynchronous, max_failures=2) as saving:
        await saving.save(Progress(step=1), metrics(1))
        for step in (2, 3):
            await saving.settle()
            policy.failure = full(step)
            await saving.save(Progress(step=step), metrics(step))
        await saving.settle()
        assert store.steps() == [1]
        assert [
            record.message.count(f"step {step}: no space") for step, record in enumerate(caplog.records, 2)
        ] == [1, 1]
        policy.failure = None
        await saving.save(Progress(step=4), metrics(4))
    assert store.steps() == [1, 4]


@in_a_loop
async def test_a_disk_that_stays_full_ends_the_run(store: CheckpointStore) -> None:
    policy = SlowPolicy()
    policy.disk.set()
    saving = checkpoints(policy, store, max_failures=1)
    policy.failure = full(1)
    await saving.save(Progress(step=1), metrics(1))
    await saving.save(Progress(step=2), metrics(2))
    with pytest.raises(WorkerFailed, match="no space"):
        await saving.save(Progress(step=3), metrics(3))


@in_a_loop
async def test_the_last_checkpoint_has_to_be_written(store: CheckpointStore) -> None:
    policy = SlowPolicy()
    policy.disk.set()
    saving = checkpoints(policy, store)
    policy.failure = full(1)
    await saving.save(Progress(step=1), metrics(1))
    with pytest.raises(WorkerFailed, match="no space"):
        await saving.settle(last=True)


@in_a_loop
async def test_a_stop_writes_the_copy_of_the_last_step(store: CheckpointStore) -> None:
    policy = SlowPolicy()
    policy.disk.set()
    async with checkpoints(policy, store, stop_seconds=60) as saving:
        assert saving.due_copy(1, has_line=True)
        await saving.copy(Progress(step=1), metrics(1))
        policy.state = "half of step 2"
        assert not saving.due_copy(2, has_line=False)  # its validation may be dropped
        saving.save_copy()
        saving.save_copy()  # as when two parts of a run request it
    assert store.steps() == [1]
    assert (store.path(1) / "weights").read_text() == "weights"


@in_a_loop
async def test_the_copy_of_a_step_and_its_checkpoint_are_one(store: CheckpointStore) -> None:
    policy = SlowPolicy()
    policy.disk.set()
    async with checkpoints(policy, store, stop_seconds=60) as saving:
        await saving.copy(Progress(step=1), metrics(1))
        saving.save_copy()
        policy.state = "not copied"
        await saving.save(Progress(step=1), metrics(1))
        await saving.copy(Progress(step=2), metrics(2))
        await saving.save(Progress(step=3), metrics(3))
        saving.save_copy()  # the copy of step 2 is that of step 3 now
    assert store.steps() == [1, 3]
    assert (store.path(1) / "weights").read_text() == "weights"


@in_a_loop
async def test_a_step_that_comes_again_after_a_rollback_is_saved_again(store: CheckpointStore) -> None:
    policy = SlowPolicy()
    policy.disk.set()
    async with checkpoints(policy, store, stop_seconds=60) as saving:
        for step in (1, 2):
            await saving.save(Progress(step=step), metrics(step))
        saved = await saving.newest_state(before=2)
        assert saved is not None
        assert saved.progress.step == 1
        await saving.remove_after(1)
        policy.state = "other weights"
        await saving.save(Progress(step=2), metrics(2))
    assert (store.path(2) / "weights").read_text() == "other weights"


@in_a_loop
async def test_without_a_limit_nothing_is_copied_for_a_stop(store: CheckpointStore) -> None:
    assert not checkpoints(SlowPolicy(), store).due_copy(1, has_line=True)


@in_a_loop
async def test_a_checkpoint_that_takes_too_long_for_a_stop_is_a_warning(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    policy = SlowPolicy()
    async with checkpoints(policy, store, stop_seconds=1e-6) as saving:
        await saving.save(Progress(step=1), metrics(1))
        policy.disk.set()
    assert "more than half of checkpointing.stop_seconds (1e-06): raise it" in caplog.text


async def save_and_check(saving: Checkpoints) -> None:
    async with saving:
        await saving.save(Progress(step=1), metrics(1))
        for _ in range(3):
            await asyncio.sleep(0)
        saving.check()


@in_a_loop
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_failure_is_reported_once_and_leaves_no_folder(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    policy = SlowPolicy()
    policy.failure = RunError("policy rank 1: the disk is full")
    policy.disk.set()
    with caplog.at_level(logging.WARNING), pytest.raises(RunError, match="rank 1: the disk is full"):
        await save_and_check(checkpoints(policy, store, asynchronous=asynchronous))
    assert caplog.text == ""
    assert list(store.folder.iterdir()) == []


async def fail_after_saving(step: int, policy: SlowPolicy, store: CheckpointStore) -> None:
    async with checkpoints(policy, store) as saving:
        await saving.save(Progress(step=step), metrics(step))
        policy.disk.set()
        raise RunError("engine died")


@in_a_loop
async def test_a_run_that_fails_keeps_what_it_was_writing(store: CheckpointStore) -> None:
    with pytest.raises(RunError, match="engine died"):
        await fail_after_saving(1, SlowPolicy(), store)
    assert store.latest_valid().step == 1


@in_a_loop
async def test_a_run_that_fails_says_so_and_not_what_followed(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    policy = SlowPolicy()
    policy.failure = RunError("policy rank 0 died")
    with caplog.at_level(logging.WARNING), pytest.raises(RunError, match="engine died"):
        await fail_after_saving(7, policy, store)
    assert "the checkpoint of step 7 was not completed: policy rank 0 died" in caplog.text


@in_a_loop
async def test_a_checkpoint_is_committed_when_the_line_of_its_step_is_written(store: CheckpointStore) -> None:
    policy, line = SlowPolicy(), asyncio.get_running_loop().create_future()
    policy.disk.set()
    async with checkpoints(policy, store) as saving:
        await saving.save(Progress(step=1), line)
        for _ in range(10):
            await asyncio.sleep(0)
        assert store.steps() == []
        line.set_result(StepMetrics(1, 1, {"validation/accuracy": 0.5}))
    found = store.latest_valid()
    assert found is not None
    assert found.metrics == {"validation/accuracy": 0.5}
