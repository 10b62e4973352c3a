"""How the processes of a group are started, the first time and again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .actor import AsyncHost, Identity, Invocation, ServingHost, SyncHost
from .logs import log_path
from .placement import Placement
from .worker import Worker

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Launch:
    """What every process of a group is started with."""

    name: str
    target: str
    host: Any
    kwargs: tuple[Mapping[str, Any], ...]  # of each rank
    placement: Placement
    variables: Mapping[str, str]
    run_dir: Path

    def process(self, rank: int) -> Worker:
        """An actor in the rank's place, with nothing in it yet."""
        log = log_path(self.run_dir, self.name, rank)
        actor = self.host.options(
            runtime_env={"env_vars": dict(self.variables)},
            max_restarts=0,
            **self.placement.options(self.name, rank),
        )
        identity = Identity(self.name, rank, log, Path.cwd())
        home = self.placement.home(self.name, rank)
        return Worker(self.name, rank, log, actor.remote(identity), home=home)

    def make(self, worker: Worker, invocation: Invocation) -> Any:
        """Have a process make its target; a reference to the answer."""
        return worker.actor.make.remote(invocation, self.target, **self.kwargs[worker.rank])


def host_kind(*, concurrent: bool, serving: bool) -> Any:
    """The actor class whose processes run methods in this way."""
    return AsyncHost if concurrent else ServingHost if serving else SyncHost


def thread_environment(threads: int) -> dict[str, str]:
    """Set before the process imports anything, since the libraries read it when they are loaded."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(threads)) | {"PYTHONFAULTHANDLER": "1"}
