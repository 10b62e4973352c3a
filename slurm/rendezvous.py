"""How the nodes of a job find each other: by files in the run folder, before anything listens on a port.

    <run_dir>/slurm/<job>.<restart>/<node>.json     what a node reports
    <run_dir>/slurm/<job>.<restart>/<node>.failed   why its launcher ended
    <run_dir>/slurm/<job>.<restart>/plan.json       what the head decides
    <run_dir>/slurm/<job>.<restart>/ray_token       Ray's token for this start, readable by the owner only
    <run_dir>/slurm/<job>.<restart>/<node>.log      output of the launcher and of Ray on a node
    <run_dir>/slurm/<job>.<restart>/cancelled       `nemorl slurm cancel` stops this start
    <run_dir>/slurm/<job>.<restart>/exit.json       how it ended

Every node finding the files of the others proves that the folder is on a shared file system.
"""

import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nemorl.observe.files import write_atomically

from . import SlurmError
from .network import Ports
from .node import NodeInfo

FOLDER = "slurm"  # in the run folder
PLAN, TOKEN, EXIT, CANCELLED = "plan.json", "ray_token", "exit.json", "cancelled"
POLL_SECONDS = 0.5
RENDEZVOUS_SECONDS = 300.0  # pulling a container image may come first


@dataclass(frozen=True)
class Plan:
    """Where each node listens; or why the job does not start."""

    head: str  # address of the head
    ports: Mapping[str, Ports]  # by node, the head first
    hosts: Mapping[str, str]  # machine of each node
    refused: str = ""

    @property
    def gcs(self) -> str:
        """Ray's address."""
        return f"{self.head}:{self._of_head.gcs}"

    @property
    def control(self) -> int:
        """Port of the head's launcher."""
        return self._of_head.control

    @property
    def _of_head(self) -> Ports:
        return next(iter(self.ports.values()))

    def nodes_on_host_of(self, node: str) -> int:
        """Number of nodes on the machine of `node`."""
        return list(self.hosts.values()).count(self.hosts[node])

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        return cls(**{**tree, "ports": {node: Ports(**ports) for node, ports in tree["ports"].items()}})


class Rendezvous:
    """The folder of one start of a job, seen from one node."""

    def __init__(self, run_dir: Path, start: str, nodes: Sequence[str]) -> None:
        """`nodes` are all nodes, the head first."""
        self.folder = run_dir / FOLDER / start
        self.nodes = tuple(nodes)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def token_file(self) -> Path:
        return self.folder / TOKEN

    @property
    def is_cancelled(self) -> bool:
        """True after `nemorl slurm cancel`."""
        return CANCELLED in self._files()

    def log(self, node: str) -> Path:
        """Output of the launcher and of Ray on a node."""
        return self.folder / f"{node}.log"

    def report(self, info: NodeInfo) -> None:
        """Announce this node."""
        write_atomically(self.folder / f"{info.node}.json", json.dumps(asdict(info), indent=2) + "\n")

    def report_failure(self, node: str, reason: str) -> None:
        """Announce that a node cannot take part."""
        write_atomically(self.folder / f"{node}.failed", reason + "\n")

    async def wait_for_nodes(self, seconds: float = RENDEZVOUS_SECONDS) -> dict[str, NodeInfo]:
        """Return the reports of all nodes, the head first.

        Raises `SlurmError` naming the nodes that failed or are missing.
        """
        everyone = set(self.nodes)
        await _until(lambda: self._with("json") == everyone or bool(self._with("failed")), seconds)
        if failed := sorted(self._with("failed")):
            reasons = [(self.folder / f"{node}.failed").read_text("utf-8").strip() for node in failed]
            raise SlurmError(
                "; ".join(f"{node}: {reason}" for node, reason in zip(failed, reasons, strict=True))
            )
        if missing := everyone - (present := self._with("json")):
            raise SlurmError(
                f"{_listed(missing)} did not appear in {self.folder} within {seconds:g} s "
                f"({_listed(present)} did). Either run_dir is not on a file system that "
                "all nodes share: move it to one. Or the launcher did not start there: see its output above."
            )
        reports = {node: (self.folder / f"{node}.json").read_text("utf-8") for node in self.nodes}
        return {node: NodeInfo.from_json(json.loads(text)) for node, text in reports.items()}

    def publish(self, plan: Plan) -> None:
        """Write the plan for the other nodes, and before it the token that they need."""
        if not plan.refused:
            write_atomically(self.token_file, secrets.token_hex(32), private=True)
        write_atomically(self.folder / PLAN, json.dumps(asdict(plan), indent=2) + "\n")

    async def wait_for_plan(self, seconds: float = 2 * RENDEZVOUS_SECONDS) -> Plan:
        """Return the head's plan. Raises `SlurmError`."""
        await _until(lambda: PLAN in self._files(), seconds)
        if PLAN not in self._files():
            raise SlurmError(
                f"The head, {self.nodes[0]}, wrote no plan into {self.folder} within {seconds:g} s; this "
                f"node sees {_listed(self._files())}. If {self.nodes[0]}.json is not among them, run_dir is "
                "not on a file system that all nodes share: move it to one."
            )
        return Plan.from_json(json.loads((self.folder / PLAN).read_text(encoding="utf-8")))

    def close(self, reason: str) -> None:
        """Remove the token; nodes that still wait for a plan get the reason instead."""
        if PLAN not in self._files():
            self.publish(Plan("", {}, {}, refused=reason))
        self.token_file.unlink(missing_ok=True)

    def _files(self) -> set[str]:
        """Names in the folder. NFS answers a query for one missing file from a cache, a listing less so."""
        return set(os.listdir(self.folder))

    def _with(self, suffix: str) -> set[str]:
        """Nodes that have a file with this suffix."""
        files = self._files()
        return {node for node in self.nodes if f"{node}.{suffix}" in files}


async def _until(is_reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_reached() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
