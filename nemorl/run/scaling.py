"""The number of engines of a run while it is going.

    nemorl scale ─scale.json─▶ Scaling ─▶ ReplicaSupervisor.scale
         ▲                        │
         └──────replicas.json─────┘

Both files are in the run folder: who may write there may scale the run. The newest request counts.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from annotated_types import Interval
from pydantic import TypeAdapter, ValidationError

from nemorl.cluster.errors import ClusterError
from nemorl.cluster.nodes import draining_nodes
from nemorl.config.generation import MOST_REPLICAS
from nemorl.observe.files import RunFolderError, WriteError, write_atomically
from nemorl.observe.run_folder import RunPaths
from nemorl.session.supervisor import ReplicaState, ReplicaSupervisor

POLL_SECONDS = 0.5

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class ScaleRequest:
    number: Annotated[int, Interval(ge=1, le=MOST_REPLICAS)]  # of engines
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def send(self, paths: RunPaths) -> None:
        """Replace the request of the run, if there is one. Raises WriteError."""
        own = paths.scale_request.with_name(f"{paths.scale_request.name}.{self.id}")  # others may write too
        write_atomically(own, json.dumps(asdict(self)) + "\n")
        own.replace(paths.scale_request)


@dataclass(frozen=True)
class ReplicaReport:
    number: int  # that the run strives for
    request: str = ""  # ID of the last request that was followed
    replicas: dict[str, ReplicaState] = field(default_factory=dict)  # by name
    problem: str = ""  # why the number cannot change any more

    @property
    def complete(self) -> bool:
        return len(self.replicas) == self.number and all(r.state == "up" for r in self.replicas.values())

    @property
    def failed(self) -> bool:
        """True if nothing changes any more, and engines are missing."""
        states = self.replicas.values()
        return any(r.cause for r in states) and all(r.cause or r.state == "up" for r in states)


def read(kind: type[T], path: Path) -> T | None:
    """None if there is no file. Raises RunFolderError for another content."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RunFolderError(f"{path} is no {kind.__name__}: {error.errors()[0]['msg']}") from error


class Scaling:
    """Lets engines join until there are `number`, and follows requests. Belongs to one event loop."""

    def __init__(self, run_dir: Path, replicas: ReplicaSupervisor, number: int) -> None:
        self._paths, self._replicas, self._number = RunPaths(run_dir), replicas, number
        self._request = self._refused = ""  # ID of the last request, and why it was not followed
        self._report: ReplicaReport | None = None  # that was written last

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._paths.forget_engines()

    async def _run(self) -> None:
        try:
            await self._replicas.scale(self._number)
            while True:
                found = self._read_request()
                if found is not None and found.id != self._request:
                    logger.warning("scaling from %d to %d generation replicas", self._number, found.number)
                    self._number, self._request = found.number, found.id
                    await self._replicas.scale(found.number)
                # Ray reports them before their processes end.
                nodes = self._replicas.extra_nodes
                if nodes and (drained := nodes & await asyncio.to_thread(draining_nodes)):
                    await self._replicas.leave_nodes(drained)
                self._write_report()
                await asyncio.sleep(POLL_SECONDS)
        except Exception as error:  # the run continues with the engines it has
            problem = f"the number of generation replicas cannot change any more: {error}"
            is_expected = isinstance(error, ClusterError)  # of a process that others watch
            logger.warning(problem, exc_info=None if is_expected else error)
            self._write_report(problem)

    def _read_request(self) -> ScaleRequest | None:
        try:
            return read(ScaleRequest, self._paths.scale_request)
        except (OSError, RunFolderError) as error:
            if str(error) != self._refused:
                self._refused = str(error)
                logger.warning("a request of `nemorl scale` is not followed: %s", error)
            return None

    def _write_report(self, problem: str = "") -> None:
        report = ReplicaReport(self._number, self._request, self._replicas.states, problem)
        if report == self._report:
            return
        try:
            write_atomically(self._paths.replicas, json.dumps(asdict(report)) + "\n")
            self._report = report
        except WriteError as error:
            logger.info("%s", error)  # whose disk is full gets its reports later
