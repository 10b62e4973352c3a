"""Errors between the driver and its workers. Each names group, rank and stage."""

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


class WorkerFailed(ClusterError):
    """A method of a worker raised. The traceback is in the worker's log."""

    def __init__(self, group: str, rank: int, stage: str, kind: str, message: str, log: Path) -> None:
        """`kind` is the full name of the exception's class, such as `builtins.ValueError`."""
        super().__init__(group, rank, stage, kind, message, log)
        self.group, self.rank, self.stage = group, rank, stage
        self.kind, self.message, self.log = kind, message, log

    def __str__(self) -> str:
        return (
            f"{self.group} rank {self.rank} failed in stage '{self.stage}' with "
            f"{self.kind.removeprefix('builtins.')}: {self.message} (traceback in {self.log})"
        )


class WorkerDied(ClusterError):
    """The process of a worker ended unexpectedly."""

    def __init__(
        self,
        group: str,
        rank: int,
        stage: str,
        reason: str,
        log: Path,
        last_lines: tuple[str, ...],
        node: str = "",
    ) -> None:
        """`reason` is Ray's description of the exit; `last_lines` is the end of the worker's log.

        `node` is the worker's node in a run over several nodes.
        """
        super().__init__(group, rank, stage, reason, log, last_lines, node)
        self.group, self.rank, self.stage = group, rank, stage
        self.reason, self.log, self.last_lines = reason, log, last_lines
        self.node = node

    def is_reported_in(self, error: BaseException | None) -> bool:
        """True if an error reports this death, directly or as its cause."""
        return f"{self.group} rank {self.rank} died in stage" in str(error)

    def __str__(self) -> str:
        lines = "\n".join(f"  | {line}" for line in self.last_lines) or "  | (nothing was logged)"
        where = f" on node {self.node}" if self.node else ""
        return (
            f"{self.group} rank {self.rank} died in stage '{self.stage}'{where}: {self.reason}\n"
            f"The last lines of {self.log}:\n{lines}"
        )


class NodeLost(WorkerDied):
    """A node of the run was lost, with all workers on it."""

    def __init__(self, group: str, rank: int, stage: str, node: str, tenants: str, log: Path) -> None:
        """`tenants` lists the ranks on the node."""
        reason = f"node {node} was lost"
        WorkerDied.__init__(self, group, rank, stage, reason, log, (), node)
        self.args = (group, rank, stage, node, tenants, log)
        self.tenants = tenants

    def is_reported_in(self, error: BaseException | None) -> bool:
        """True if an error reports the loss of this node."""
        return self.reason in str(error)

    def __str__(self) -> str:
        return (
            f"{self.reason} in stage '{self.stage}', and with it {self.tenants}: the machine is down or "
            f"cannot be reached, or Ray's processes on it were ended (logs of the workers: {self.log.parent})"
        )


class DeadlineExceeded(ClusterError):
    """Some ranks did not answer in time."""

    def __init__(
        self, group: str, ranks: tuple[int, ...], stage: str, seconds: float, where: tuple[str, ...]
    ) -> None:
        """`ranks` have not answered; `where` describes the activity of each of them."""
        super().__init__(group, ranks, stage, seconds, where)
        self.group, self.ranks, self.stage = group, ranks, stage
        self.seconds, self.where = seconds, where

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        doing = "".join(
            f"\n  | rank {rank}: {where}" for rank, where in zip(self.ranks, self.where, strict=True)
        )
        return (
            f"{self.group} has not finished stage '{self.stage}' in {self.seconds:g} s; "
            f"no answer from rank{'s' * (len(self.ranks) > 1)} {ranks}.{doing}"
        )


class GroupEnded(ClusterError):
    """A call to a group whose processes have already ended, after a failure or by `shutdown`."""
