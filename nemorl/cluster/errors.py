"""Errors between driver and workers, with group, rank and stage; pickling requires positional arguments."""

from dataclasses import dataclass
from pathlib import Path

from nemorl.errors import RunError


class ClusterError(RunError):
    """Base of everything the cluster layer raises."""


class ClusterUnavailable(ClusterError):
    """Ray could not be started or joined."""


class PlacementFailed(ClusterError):
    """The cluster cannot hold the requested workers."""


class NotShared(ClusterError):
    """A node cannot access a folder of the driver."""


@dataclass(eq=False, repr=False)
class WorkerFailed(ClusterError):
    """A method of a worker raised. The traceback is in the worker's log."""

    group: str
    rank: int
    stage: str
    kind: str  # full name of the exception's class, such as `builtins.ValueError`
    message: str
    log: Path

    def __str__(self) -> str:
        error = f"{self.kind.removeprefix('builtins.')}: {self.message} (traceback in {self.log})"
        return f"{self.group} rank {self.rank} failed in stage '{self.stage}' with {error}"


class ObjectsLost(WorkerFailed):
    """What a worker was to read, such as trajectories, was lost with its node."""


@dataclass(eq=False, repr=False)
class WorkerDied(ClusterError):
    """The process of a worker ended unexpectedly."""

    group: str
    rank: int
    stage: str
    reason: str  # Ray's description of the exit
    log: Path
    last_lines: tuple[str, ...]  # of the log
    node: str = ""  # of the worker, in a run over several nodes

    def is_reported_in(self, error: BaseException | None) -> bool:
        """True if an error reports this death, directly or as its cause."""
        return f"{self.group} rank {self.rank} died in stage" in str(error)

    def __str__(self) -> str:
        where = f" on node {self.node}" if self.node else ""
        problem = f"{self.group} rank {self.rank} died in stage '{self.stage}'{where}: {self.reason}"
        if not self.last_lines:
            return f"{problem} (it logged nothing to {self.log})"
        lines = "".join(f"\n  | {line}" for line in self.last_lines)
        return f"{problem}\nThe last lines of {self.log}:{lines}"


class NodeLost(WorkerDied):
    """A node of the run was lost, with all workers on it."""

    def __init__(self, group: str, rank: int, stage: str, node: str, tenants: str, log: Path) -> None:
        super().__init__(group, rank, stage, f"node {node} was lost", log, (), node)
        self.tenants = tenants

    def is_reported_in(self, error: BaseException | None) -> bool:
        return self.reason in str(error)

    def __str__(self) -> str:
        cause = "the machine is down or cannot be reached, or Ray's processes on it were ended"
        lost = f"{self.reason} in stage '{self.stage}', and with it {self.tenants}"
        return f"{lost}: {cause} (logs of the workers: {self.log.parent})"


@dataclass(eq=False, repr=False)
class DeadlineExceeded(ClusterError):
    """Some ranks did not answer in time."""

    group: str
    ranks: tuple[int, ...]  # that have not answered
    stage: str
    seconds: float
    where: tuple[str, ...]  # the activity of each of them

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        activities = zip(self.ranks, self.where, strict=True)
        doing = "".join(f"\n  | rank {rank}: {where}" for rank, where in activities)
        problem = f"{self.group} has not finished stage '{self.stage}' in {self.seconds:g} s"
        return f"{problem}; no answer from rank{'s' * (len(self.ranks) > 1)} {ranks}.{doing}"


class WorkerHung(DeadlineExceeded):
    """Some ranks do not even respond while a call of them runs; `seconds` is the limit for a response."""

    def __str__(self) -> str:
        activities = zip(self.ranks, self.where, strict=True)
        doing = "".join(f"\n  | rank {rank}: {where}" for rank, where in activities)
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        problem = f"{self.group} hangs in stage '{self.stage}'"
        return f"{problem}: no response from {ranks} in {self.seconds:g} s{doing}"


class RelayLost(ClusterError):
    """A process that calls ranks for the driver was lost. A call that may run twice can be repeated."""


class RestartsExhausted(ClusterError):
    """A model was lost again after as many restarts as are allowed; the cause is the last loss."""


class NodeNotReplaced(ClusterError):
    """Ranks of a lost node got no place on another one within their deadline."""


class GroupEnded(ClusterError):
    """A call to a group whose processes have already ended, after a failure or by `shutdown`."""
