"""Checkpoints in memory: from the copy that the disk has, newer, and never the reason for a run to end."""

import asyncio
import logging
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from nemorl.cluster.errors import WorkerDied, WorkerFailed
from nemorl.cluster.runtime import hold
from nemorl.config.experiment import Experiment
from nemorl.config.run import ClusterConfig
from nemorl.megatron.checkpoint_store import CheckpointStore, FileRecord, Manifest
from nemorl.run.checkpoints import Checkpoints, Progress, SavedState
from nemorl.run.memory import FOLDERS, Keeper, MemoryCheckpoints, local_keeper
from nemorl.session.handles import Folder, KeeperHandle
from tests.config.experiments import GRPO
from tests.run.test_checkpoints import SlowPolicy, in_a_loop, metrics

HERE = SimpleNamespace(trained_nodes=[SimpleNamespace(id="here")], driver_node="here")


class CountingPolicy(SlowPolicy):
    """Writes at once, unless `disk` is cleared, and counts its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.disk.set()
        self.copies = 0

    async def copy_for_checkpoint(self) -> None:
        self.copies += 1
        await super().copy_for_checkpoint()


def experiment_in(folder: Path) -> Experiment:
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    (folder / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
    kept = {"memory_period": 1, "memory_dir": str(memory)}
    changes = {"run_dir": str(folder / "run"), "checkpointing": kept}
    return Experiment.model_validate({**yaml.safe_load(GRPO), **changes})


class Saving:
    """The checkpoints of a run on this node, in folders of a test."""

    def __init__(self, folder: Path, keeper: Keeper | None = None) -> None:
        self.policy, experiment = CountingPolicy(), experiment_in(folder)
        self.keeper = keeper or Keeper(folder / "memory")
        self.memory = MemoryCheckpoints(experiment, HERE, self.keeper)  # type: ignore[arg-type]
        self.store = CheckpointStore(folder / "run" / "checkpoints")
        self.checkpoints = Checkpoints(experiment, self.policy, self.store, self.memory)  # type: ignore[arg-type]

    async def step(self, number: int, to_disk: bool = False) -> None:
        """What the recorder does after a step, and the end of what it began."""
        self.policy.state = f"weights {number}"
        if to_disk:
            await self.checkpoints.save(Progress(step=number), metrics(number))
        elif self.checkpoints.due_copy(number, has_line=True):
            await self.checkpoints.copy(Progress(step=number), metrics(number))

    async def newest(self) -> tuple[int, str, bool]:
        state = await self.checkpoints.newest_state()
        assert state is not None
        assert isinstance(state.folder, Path)
        return state.progress.step, (state.folder / "weights").read_text(), self.holds(state)

    def holds(self, state: SavedState) -> bool:
        """True if the state is in memory."""
        assert isinstance(state.folder, Path)
        return state.folder.is_relative_to(self.keeper.folder)


@in_a_loop
async def test_the_newest_state_is_in_memory_and_only_that(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    for number in (1, 2, 3):
        await saving.step(number)
        await saving.checkpoints.settle()
    assert await saving.newest() == (3, "weights 3", True)
    assert saving.keeper.store.steps() == [3]
    assert saving.store.steps() == []


@in_a_loop
async def test_an_earlier_state_comes_from_memory_or_disk_and_later_ones_are_removed(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    for number in (1, 2, 3, 4):
        await saving.step(number, to_disk=number < 4)
        await saving.checkpoints.settle()
    states = [await saving.checkpoints.newest_state(before) for before in (5, 4, 3, 2)]
    found = [state and (state.progress.step, saving.holds(state)) for state in states]
    assert found == [(4, True), (3, False), (2, False), None]
    await saving.checkpoints.remove_after(2)
    assert (saving.keeper.store.steps(), saving.store.steps()) == ([], [2])


@in_a_loop
async def test_a_step_that_is_due_in_memory_and_on_disk_is_copied_once(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    await saving.step(1, to_disk=True)
    await saving.checkpoints.settle()
    assert saving.policy.copies == 1
    assert saving.keeper.store.steps() == saving.store.steps() == [1]
    both = (Manifest.read(store.path(1)).files for store in (saving.keeper.store, saving.store))
    assert len(set(both)) == 1  # names, sizes and checksums


@in_a_loop
async def test_no_step_waits_for_the_one_before(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    saving.policy.disk.clear()
    await saving.step(1)
    await saving.step(2)  # left out, since the first still reads the copy
    assert saving.policy.copies == 1
    saving.policy.disk.set()
    await saving.checkpoints.settle()
    await saving.step(3)
    assert await saving.newest() == (3, "weights 3", True)


@in_a_loop
async def test_a_rank_that_dies_while_it_writes_leaves_the_one_before(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    await saving.step(1)
    await saving.checkpoints.settle()
    saving.policy.failure = WorkerDied("policy", 1, "checkpoint", "killed", tmp_path / "log", ())
    await saving.step(2)
    assert await saving.newest() == (1, "weights 1", True)
    saving.policy.failure = None  # the group was started again
    await saving.step(3)
    saving.checkpoints.check()
    assert await saving.newest() == (3, "weights 3", True)
    assert [path.name for path in saving.keeper.folder.glob("*step*")] == ["step_00000003"]


@in_a_loop
async def test_what_is_corrupt_or_older_in_memory_comes_from_the_disk(tmp_path: Path) -> None:
    saving = Saving(tmp_path)
    await saving.step(2, to_disk=True)
    await saving.checkpoints.settle()
    await saving.step(3)
    await saving.checkpoints.settle()
    (saving.keeper.store.path(3) / "weights").write_text("weigh")
    assert await saving.newest() == (2, "weights 2", False)
    await saving.step(3)  # again, after the restore
    assert await saving.newest() == (3, "weights 3", True)
    for path in saving.keeper.folder.glob("step_*"):
        (path / "manifest.json").unlink()  # as if it had not been completed
    assert await saving.newest() == (2, "weights 2", False)


@in_a_loop
async def test_a_full_memory_is_reported_once_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = Saving(tmp_path)
    await saving.step(1)
    await saving.checkpoints.settle()
    full = "weights cannot be written: No space left on device. Checkpoints that are complete"
    kind = "nemorl.megatron.checkpoint_store.UnwritableCheckpoint"
    saving.policy.failure = WorkerFailed("policy", 1, "checkpoint", kind, full, tmp_path / "log")
    with caplog.at_level(logging.WARNING):
        await saving.step(2)
        await saving.checkpoints.settle()
        saving.policy.failure = None
        await saving.step(3)
        await saving.step(4, to_disk=True)
    assert len(caplog.records) == 1
    assert "No space left on device. The run continues with those on disk. Make room in" in caplog.text
    assert list(saving.keeper.folder.glob("*step*")) == []
    assert await saving.newest() == (4, "weights 4", False)


def test_a_run_leaves_nothing_in_memory_unless_it_is_newer_than_the_disk(tmp_path: Path) -> None:
    experiment = experiment_in(tmp_path)

    async def run(keeper: Keeper, step: int, *, to_disk: bool) -> None:
        saving = Saving(tmp_path, keeper)
        await saving.step(step, to_disk=to_disk)
        await saving.checkpoints.settle()

    with local_keeper(experiment, resume=False) as keeper:
        assert keeper is not None
        asyncio.run(run(keeper, 3, to_disk=False))
    (left,) = (tmp_path / "memory").iterdir()
    with local_keeper(experiment, resume=True) as keeper:  # it continues from there
        assert keeper is not None
        assert keeper.folder == left
        assert keeper.store.steps() == [3]
        asyncio.run(run(keeper, 4, to_disk=True))
    assert list((tmp_path / "memory").iterdir()) == []
    assert not (tmp_path / "run" / "checkpoints" / "memory").exists()


def test_a_folder_in_use_or_of_another_place_is_not_taken(tmp_path: Path) -> None:
    used = tmp_path / f"{FOLDERS}used"
    used.mkdir()
    with hold(used):
        keeper = Keeper(tmp_path, used.name)
        assert keeper.folder != used
        keeper.close()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "in").mkdir()
    keeper = Keeper(tmp_path / "in", "../outside")
    assert keeper.folder.parent == tmp_path / "in"
    keeper.close()
    assert outside.is_dir()


KILLED = """
import sys, time
from pathlib import Path
from nemorl.run.memory import Keeper
keeper = Keeper(Path(sys.argv[1]))
print(keeper.folder, flush=True)
time.sleep(600)
"""


def test_the_folder_of_a_killed_driver_is_removed_by_the_next_start(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    folder = Path(driver.stdout.readline().strip())
    Keeper(tmp_path).close()
    assert folder.is_dir()  # it is locked
    driver.kill()
    driver.wait()
    Keeper(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


class Process:
    """A keeper's process on a node that may be lost; its calls are answered here."""

    def __init__(self, parent: Path) -> None:
        self.keeper, self.lost = Keeper(parent), False

    async def call(self, method: str, *args: object, **options: object) -> object:
        if self.lost:
            raise WorkerDied("keeper", 0, "checkpoint", "its node was lost", Path("log"), ())
        return await getattr(self.keeper, method)(*args)


class Nodes:
    """Three nodes with a policy rank each, which writes one file."""

    def __init__(self, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: dict[str, Process] = {}
        self.memory, self.driver_node = memory, "a"
        self.trained_nodes = [SimpleNamespace(id=name) for name in "abc"]
        monkeypatch.setattr("nemorl.run.memory.alive_nodes", self.alive)

    def alive(self) -> list[SimpleNamespace]:
        lost = {name for name, process in self.processes.items() if process.lost}
        return [SimpleNamespace(id=name) for name in "abcd" if name not in lost]

    async def start_keepers(self, nodes: list[SimpleNamespace], memory_dir: Path) -> list[KeeperHandle]:
        assert memory_dir == self.memory
        started = {node.id: Process(memory_dir) for node in nodes}
        self.processes |= started
        return [KeeperHandle(process, 1.0) for process in started.values()]  # type: ignore[arg-type]

    async def write(self, folder: Folder) -> list[FileRecord]:
        assert isinstance(folder, dict)
        records = []
        for node, path in folder.items():
            text = f"weights of {node}"
            (path / f"weight_{node}").write_text(text)
            records.append(FileRecord(f"weight_{node}", len(text), sha256(text.encode()).hexdigest()))
        return records


def memory_of_three_nodes(folder: Path, nodes: Nodes) -> MemoryCheckpoints:
    experiment = experiment_in(folder).model_copy(update={"cluster": ClusterConfig(num_nodes=3)})
    return MemoryCheckpoints(experiment, nodes, None)  # type: ignore[arg-type]


@in_a_loop
async def test_every_file_is_on_two_nodes_and_one_may_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path / "memory", monkeypatch)
    memory = memory_of_three_nodes(tmp_path, nodes)
    for step in (1, 2):
        await memory.save(step, f"progress {step}", {}, nodes.write)
    names = {
        name: {p.name for p in process.keeper.store.path(2).glob("w*")}
        for name, process in nodes.processes.items()
    }
    assert names == {
        "a": {"weight_a", "weight_b"},
        "b": {"weight_b", "weight_c"},
        "c": {"weight_c", "weight_a"},
    }
    assert all(process.keeper.store.steps() == [2] for process in nodes.processes.values())

    nodes.processes["c"].lost = True
    nodes.trained_nodes = [SimpleNamespace(id=name) for name in "abd"]  # where the ranks are started again
    state = await memory.newest()
    assert state is not None
    assert (state.step, state.progress) == (2, "progress 2")
    assert isinstance(state.folder, dict)
    assert set(state.folder) == {"a", "b", "d"}
    for path in state.folder.values():
        assert {p.name: p.read_text() for p in path.glob("w*")} == {
            f"weight_{n}": f"weights of {n}" for n in "abc"
        }

    await memory.save(3, "progress 3", {}, nodes.write)  # over the nodes that there are now
    nodes.processes["b"].lost = nodes.processes["d"].lost = True  # a node and its buddy
    assert await memory.newest() is None
    for process in nodes.processes.values():
        process.keeper.close()


@in_a_loop
async def test_a_file_that_its_buddy_lacks_is_not_half_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost between the writing and the copying: the one before is complete."""
    nodes = Nodes(tmp_path / "memory", monkeypatch)
    memory = memory_of_three_nodes(tmp_path, nodes)
    await memory.save(1, "progress 1", {}, nodes.write)

    async def write_and_lose(folder: Folder) -> list[FileRecord]:
        records = await nodes.write(folder)
        nodes.processes["c"].lost = True
        return records

    await memory.save(2, "progress 2", {}, write_and_lose)
    nodes.trained_nodes = [SimpleNamespace(id=name) for name in "ab"]
    state = await memory.newest()
    assert state is not None
    assert (state.step, state.progress) == (1, "progress 1")
    assert memory.due(2)  # it is not given up
    for process in nodes.processes.values():
        process.keeper.close()
