"""The newest checkpoint in the memory of the run's nodes: what is lost with a process is back in seconds.

Ranks write the files of a checkpoint into a folder in the memory of their node. On several nodes a keeper on
each copies the files of the next one, so that every file is on two nodes:

    <memory_dir>/nemorl-state-<random>/        locked while the run lives
        step_00000041/                         as on disk; only the newest
        .step_00000042.tmp/                    the one that is being written
"""

import asyncio
import hashlib
import logging
import math
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from nemorl.cluster.errors import ClusterError, WorkerFailed
from nemorl.cluster.nodes import alive_nodes
from nemorl.cluster.runtime import hold, remove_abandoned
from nemorl.config.experiment import Experiment
from nemorl.megatron.checkpoint_store import (
    CheckpointStore,
    CorruptCheckpoint,
    FileRecord,
    UnwritableCheckpoint,
    verify,
    writing,
)
from nemorl.observe.files import write_atomically
from nemorl.observe.run_folder import RunPaths
from nemorl.session.handles import Folder, KeeperHandle

if TYPE_CHECKING:
    from nemorl.session.session import Session  # which a keeper's process does without

logger = logging.getLogger(__name__)

FOLDERS = "nemorl-state-"  # how their names begin
PROGRESS_FILE = "driver.json"  # of a checkpoint: what the driver adds to it
_PIECE_BYTES = 32 * 2**20
T = TypeVar("T")
WriteCopy = Callable[[Folder], Awaitable[Sequence[FileRecord]]]


class Keeper:
    """The folder of one node. Ends with its process: the next start finds the lock free and removes it."""

    def __init__(self, parent: Path, left: str = "") -> None:
        """`left` names the folder of a killed driver of the same run, to continue with. Raises OSError."""
        self._lock: IO[bytes] | None = None
        self.folder = parent / left
        if left.startswith(FOLDERS) and self.folder.parent == parent:
            with suppress(OSError):  # removed, or in use
                self._lock = hold(self.folder)
        remove_abandoned(parent, FOLDERS)
        if self._lock is None:
            self.folder = Path(tempfile.mkdtemp(prefix=FOLDERS, dir=parent))
            self._lock = hold(self.folder)
        self.store = CheckpointStore(self.folder)

    async def begin(self, step: int, progress: str) -> Path:
        """A new folder for a step's checkpoint, with the driver's file. Raises `UnwritableCheckpoint`."""
        return await asyncio.to_thread(self._begin, step, progress)

    def _begin(self, step: int, progress: str) -> Path:
        for leftover in self.folder.glob(".step_*.tmp"):  # of ranks that died
            shutil.rmtree(leftover, ignore_errors=True)
        folder = self.store.begin(step)
        with writing(folder / PROGRESS_FILE):
            (folder / PROGRESS_FILE).write_text(progress, encoding="utf-8")
        return folder

    async def files(self, step: int) -> list[str]:
        """Names of the files that were written since `begin`."""
        folder = self.store.temporary(step)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    async def read(self, file: str, start: int) -> bytes:
        """A piece of a file, by its path in the folder; empty at its end."""

        def piece() -> bytes:
            with (self.folder / file).open("rb") as content:
                content.seek(start)
                return content.read(_PIECE_BYTES)

        return await asyncio.to_thread(piece)

    async def pull(self, folder: str, names: Sequence[str], peer: "KeeperHandle") -> list[FileRecord]:
        """Copy files of a checkpoint from another node. Raises `UnwritableCheckpoint`."""
        records = []
        for name in names:
            path, digest, size = self.folder / folder / name, hashlib.sha256(), 0
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    while piece := await peer.read(f"{folder}/{name}", size):
                        digest.update(piece)
                        await asyncio.to_thread(file.write, piece)
                        size += len(piece)
            records.append(FileRecord(name, size, digest.hexdigest()))
        return records

    async def commit(self, step: int, metrics: Mapping[str, float], records: Sequence[FileRecord]) -> None:
        """Make what is here of a step its checkpoint; the one before stays until `keep_only`."""
        here = set(await self.files(step))
        known = [record for record in records if record.path in here]
        await asyncio.to_thread(self.store.commit, step, metrics, known)

    async def keep_only(self, step: int) -> None:
        """Remove all other checkpoints, also later ones: the run may have been restored from an older one."""
        await asyncio.to_thread(self.remove_all, but=self.store.path(step))

    async def remove_after(self, step: int) -> None:
        await asyncio.to_thread(self.store.remove_after, step)

    def remove_all(self, but: Path | None = None) -> None:
        for path in self.folder.glob("*step_*"):  # also what is being written
            if path != but:
                shutil.rmtree(path, ignore_errors=True)

    async def steps(self) -> list[int]:
        return self.store.steps()

    async def path(self, step: int) -> Path:
        return self.store.path(step)

    async def intact(self, step: int) -> list[str]:
        """Names of the files of a checkpoint; none if one of them is not as written."""
        try:
            manifest = await asyncio.to_thread(verify, self.store.path(step))
        except CorruptCheckpoint as damage:
            logger.warning("the checkpoint of step %d in memory is not used: %s", step, damage)
            return []
        return [file.path for file in manifest.files]

    async def clear(self) -> None:
        await asyncio.to_thread(self.remove_all)

    def close(self, keep: bool = False) -> None:
        """Remove the folder, or leave it to the next start."""
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


@contextmanager
def local_keeper(experiment: Experiment, resume: bool) -> Iterator[Keeper | None]:
    """The folder on the driver's node, for a run on one node.

    A run that ends without a checkpoint of its newest state on disk leaves it to the next start: `--resume`
    continues from it, any other run removes it.
    """
    config, paths = experiment.checkpointing, RunPaths(experiment.run_dir)
    keeper: Keeper | None = None
    try:
        if config.keeps_in_memory and experiment.cluster.num_nodes == 1:
            keeper = Keeper(config.memory_dir, paths.memory_folder() if resume else "")
        else:
            remove_abandoned(config.memory_dir, FOLDERS)
    except OSError as error:
        logger.warning("%s", _without_memory(config.memory_dir, str(error)))
    try:
        yield keeper
    finally:
        if keeper is not None:
            newest = max(keeper.store.steps(), default=-1)
            keep = newest > max(CheckpointStore(paths.checkpoints).steps(), default=-1)
            keeper.close(keep)
            if keep:
                where = f"is in {keeper.folder} until the next start on this machine"
                logger.warning("The state of step %d %s: continue with --resume.", newest, where)
            elif paths.memory_folder() == keeper.folder.name:
                paths.memory.unlink()


def _without_memory(folder: Path, problem: str) -> str:
    fix = f"Make room in {folder}, or set checkpointing.memory_period to null"
    return f"No checkpoints are kept in memory: {problem}. The run continues with those on disk. {fix}."


@dataclass(frozen=True)
class HeldState:
    """A checkpoint in memory."""

    step: int
    folder: Folder  # for `TrainedModels.restore`
    progress: str  # content of PROGRESS_FILE


class MemoryCheckpoints:
    """Keeps the newest checkpoint in the memory of the ranks' nodes.

    `local` is the folder of a run on the driver's node. Other nodes have keepers in processes of their own,
    which are started when they are needed. A memory that is full is not used again, and the run continues.
    """

    def __init__(self, experiment: Experiment, session: "Session", local: Keeper | None) -> None:
        self._config, self._session = experiment.checkpointing, session
        self._period = self._config.memory_period
        self._keepers: dict[str, Keeper | KeeperHandle] = {}  # by the node's ID
        self._files: dict[int, set[str]] = {}  # names of those of the newest checkpoints, on all nodes
        self._local: Keeper | None = None
        here = session.driver_node
        if local is not None and {node.id for node in session.trained_nodes} == {here}:
            self._local, self._keepers = local, {here: local}
            write_atomically(RunPaths(experiment.run_dir).memory, local.folder.name + "\n")
        elif experiment.cluster.num_nodes == 1 and local is None:
            self._period = None

    def due(self, step: int) -> bool:
        return self._period is not None and step % self._period == 0

    async def save(self, step: int, progress: str, metrics: Mapping[str, float], write: WriteCopy) -> None:
        """Write the checkpoint of a step, and remove the one before. A failure is logged only."""
        try:
            nodes, used = await self._connect()
            begun = await _each(keeper.begin(step, progress) for keeper in used.values())
            folders = dict(zip(used, begun, strict=True))
            records = await write(self._folder({node: folders[node] for node in nodes}))
            await self._copy_to_buddies(step, used, records)
            await _each(keeper.commit(step, metrics, records) for keeper in used.values())
            await _each(keeper.keep_only(step) for keeper in used.values())
            await _each(keeper.clear() for node, keeper in self._keepers.items() if node not in used)
        except (UnwritableCheckpoint, WorkerFailed, OSError) as error:
            self._period = None
            logger.warning("%s", _without_memory(self._config.memory_dir, str(error).partition(". ")[0]))
            with suppress(ClusterError):
                await _each(keeper.clear() for keeper in self._keepers.values())
        except (ClusterError, CorruptCheckpoint) as error:  # the death of a rank is for others to report
            logger.info("the checkpoint of step %d in memory was not completed: %s", step, error)

    async def remove_after(self, step: int) -> None:
        with suppress(ClusterError):  # a keeper that is lost has none
            await _each(keeper.remove_after(step) for keeper in self._keepers.values())

    async def newest(self, before: float = math.inf) -> HeldState | None:
        """The newest complete checkpoint of a step `before`, with all its files on the ranks' nodes."""
        held: dict[str, list[int]] = {}
        alive = set(self._keepers) if self._local is not None else {node.id for node in alive_nodes()}
        for node, keeper in list(self._keepers.items()):
            with suppress(ClusterError):
                held[node] = await keeper.steps() if node in alive else []
            if not held.get(node):
                held.pop(node, None)
        known = {step for steps in held.values() for step in steps if step < before}
        for step in sorted(known, reverse=True):
            holders = {node: self._keepers[node] for node, steps in held.items() if step in steps}
            try:
                if (folder := await self._collect(step, holders)) is not None:
                    name = f"{CheckpointStore(Path()).path(step)}/{PROGRESS_FILE}"
                    progress = await next(iter(holders.values())).read(name, 0)
                    return HeldState(step, folder, progress.decode())
            except (ClusterError, UnwritableCheckpoint, OSError) as error:
                logger.warning("the checkpoint of step %d in memory is not used: %s", step, error)
        return None

    async def _connect(self) -> "tuple[list[str], dict[str, Keeper | KeeperHandle]]":
        """IDs of the ranks' nodes, and the keepers of these and of a buddy for a single one."""
        if self._local is not None:
            return [*self._keepers], self._keepers
        nodes = list(self._session.trained_nodes)
        ranks = [node.id for node in nodes]
        alive = alive_nodes()
        if len(nodes) == 1:
            others = [node for node in alive if node.id not in ranks]
            nodes += sorted(others, key=lambda node: node.id != self._session.driver_node)[:1]
        self._keepers = {n.id: self._keepers[n.id] for n in alive if n.id in self._keepers}
        missing = [node for node in nodes if node.id not in self._keepers]
        if missing:
            started = await self._session.start_keepers(missing, self._config.memory_dir)
            self._keepers |= {node.id: handle for node, handle in zip(missing, started, strict=True)}
        return ranks, {node.id: self._keepers[node.id] for node in nodes}

    async def _copy_to_buddies(
        self, step: int, keepers: "Mapping[str, Keeper | KeeperHandle]", records: Sequence[FileRecord]
    ) -> None:
        """Each node copies what the ranks of the next one have written."""
        written = dict(zip(keepers, await _each(k.files(step) for k in keepers.values()), strict=True))
        ring = list(keepers)
        folder = CheckpointStore(Path()).temporary(step).name
        pairs = zip(ring, [*ring[1:], *ring[:1]], strict=True) if len(ring) > 1 else ()
        pulls = []
        for node, buddy in pairs:
            source = keepers[buddy]
            assert isinstance(source, KeeperHandle), "a local keeper is alone"
            names = [name for name in written[buddy] if name != PROGRESS_FILE]
            pulls.append(keepers[node].pull(folder, names, source))
        known = {record.path: record for record in records}
        for record in (record for of_node in await _each(pulls) for record in of_node):
            if known.get(record.path, record) != record:
                raise CorruptCheckpoint(f"{record.path} is not what was written on its node")
        of_step = {step: {name for names in written.values() for name in names}}
        self._files = {number: self._files[number] for number in list(self._files)[-1:]} | of_step

    async def _collect(self, step: int, holders: "Mapping[str, Keeper | KeeperHandle]") -> Folder | None:
        """Bring the files of a checkpoint to the ranks' nodes; None if one of them is nowhere."""
        intact = await _each(keeper.intact(step) for keeper in holders.values())
        here = {node: set(files) for node, files in zip(holders, intact, strict=True)}
        everything = set().union(*here.values())
        # A folder that a killed driver left is complete by its own manifest.
        if not everything or self._files.get(step, set() if self._local else {""}) - everything:
            return None
        ranks, keepers = await self._connect()
        name = CheckpointStore(Path()).path(step).name
        for node in ranks:
            lacking = everything - here.get(node, set())
            for holder, files in here.items():
                source = holders[holder]
                if (names := sorted(lacking & files)) and isinstance(source, KeeperHandle):
                    await keepers[node].pull(name, names, source)
                    lacking -= files
        paths = await _each(keepers[node].path(step) for node in ranks)
        return self._folder(dict(zip(ranks, paths, strict=True)))

    def _folder(self, of_nodes: Mapping[str, Path]) -> Folder:
        """A path is one that the driver sees."""
        return of_nodes if self._local is None else of_nodes[self._session.driver_node]


async def _each(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all of them, then raise the first failure."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
