"""How the nodes of a job find each other: by files in the run folder, before anything listens.

    <run_dir>/slurm/<job>.<restart>/<node>.json     what a node says of itself
    <run_dir>/slurm/<job>.<restart>/<node>.failed   why its launcher ended
    <run_dir>/slurm/<job>.<restart>/plan.json       what the head makes of it
    <run_dir>/slurm/<job>.<restart>/ray_token       the secret of this start, until its end; for the owner
    <run_dir>/slurm/<job>.<restart>/<node>.log      what the launcher and Ray said there
    <run_dir>/slurm/<job>.<restart>/exit.json       how it ended

That every node finds the others' files is the proof that the folder is on a shared file system.
"""

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nemorl.observe.files import write_atomically

from .errors import SlurmError
from .hardware import Hardware
from .ports import Ports

FOLDER = "slurm"  # in the run folder
PLAN, TOKEN, EXIT = "plan.json", "ray_token", "exit.json"
POLL_SECONDS = 0.5
MEETING_SECONDS = 300.0  # a container's image may have to be fetched first


@dataclass(frozen=True)
class Card:
    """A node of the job, in its own words."""

    node: str
    host: str  # the machine; several nodes of a test may share one
    address: str  # where the others reach it
    interface: str
    hardware: Hardware
    free_ports: tuple[int, ...]  # first ports of free blocks
    ports_size: int  # of a block
    part: str | None = None  # in a heterogeneous job, `gpu` or `cpu`

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Self:
        """From JSON."""
        fields = {**tree, "hardware": Hardware(**tree["hardware"]), "free_ports": tuple(tree["free_ports"])}
        return cls(**fields)


@dataclass(frozen=True)
class Plan:
    """Where everybody listens; or why nobody starts."""

    head: str  # address of the head
    ports: Mapping[str, Ports]  # of each node, the head first
    hosts: Mapping[str, str]  # the machine of each node
    refused: str = ""

    @property
    def gcs(self) -> str:
        """Ray's address."""
        return f"{self.head}:{self._of_head.gcs}"

    @property
    def control(self) -> int:
        """The port of the head's launcher."""
        return self._of_head.control

    def sharing(self, node: str) -> int:
        """How many nodes are on the machine of this one."""
        return list(self.hosts.values()).count(self.hosts[node])

    @property
    def _of_head(self) -> Ports:
        return next(iter(self.ports.values()))

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Self:
        """From JSON."""
        return cls(**{**tree, "ports": {node: Ports(**ports) for node, ports in tree["ports"].items()}})


def machine_name() -> str:
    """Two nodes with the same one are the same machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


class Meeting:
    """The folder of one start of a job, seen from one node."""

    def __init__(self, run_dir: Path, start: str, nodes: Sequence[str]) -> None:
        """`nodes` are all, the head first."""
        self.folder = run_dir / FOLDER / start
        self.nodes = tuple(nodes)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def token_file(self) -> Path:
        """Where the secret of this start is."""
        return self.folder / TOKEN

    def log(self, node: str) -> Path:
        """Of the launcher and of Ray on a node."""
        return self.folder / f"{node}.log"

    def join(self, card: Card) -> None:
        """Say that this node is here."""
        write_atomically(self.folder / f"{card.node}.json", json.dumps(asdict(card), indent=2) + "\n")

    def fail(self, node: str, why: str) -> None:
        """Say that a node is of no use."""
        write_atomically(self.folder / f"{node}.failed", why + "\n")

    async def everybody(self, seconds: float = MEETING_SECONDS) -> dict[str, Card]:
        """The cards of all nodes, the head first. Raises `SlurmError` that names who failed or is missing."""
        await _until(lambda: not self._absent() or bool(self._failed()), seconds)
        if failed := self._failed():
            raise SlurmError("; ".join(f"{path.stem}: {path.read_text('utf-8').strip()}" for path in failed))
        if absent := self._absent():
            raise SlurmError(
                f"{', '.join(absent)} did not appear in {self.folder} within {seconds:g} s, and "
                f"{_listed(set(self.nodes) - set(absent))} did. Either run_dir is not on a file system that "
                "all nodes share: name a folder on one. Or the launcher did not start there: see its output "
                "above."
            )
        return {node: Card.read(_json(self.folder / f"{node}.json")) for node in self.nodes}

    def publish(self, plan: Plan) -> None:
        """Tell the others, after the secret that they need is there."""
        if not plan.refused:
            write_atomically(self.token_file, secrets.token_hex(32), private=True)
        write_atomically(self.folder / PLAN, json.dumps(asdict(plan), indent=2) + "\n")

    async def plan(self, seconds: float = 2 * MEETING_SECONDS) -> Plan:
        """What the head decided. Raises `SlurmError`."""
        await _until(lambda: PLAN in _names(self.folder), seconds)
        if PLAN not in _names(self.folder):
            raise SlurmError(
                f"The head, {self.nodes[0]}, wrote no plan into {self.folder} within {seconds:g} s; seen "
                f"from here there are {_listed(_names(self.folder))}. If its card is not among them, run_dir "
                "is not on a file system that all nodes share: name a folder on one."
            )
        return Plan.read(_json(self.folder / PLAN))

    def end(self, reason: str) -> None:
        """Nobody needs the secret any more; who still waits for a plan hears why there is none."""
        if PLAN not in _names(self.folder):
            self.publish(Plan("", {}, {}, refused=reason))
        self.token_file.unlink(missing_ok=True)

    def _absent(self) -> list[str]:
        there = _names(self.folder)
        return [node for node in self.nodes if f"{node}.json" not in there]

    def _failed(self) -> list[Path]:
        there = _names(self.folder)
        return [self.folder / name for node in self.nodes if (name := f"{node}.failed") in there]


async def _until(reached: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not reached() and time.monotonic() < end:
        await asyncio.sleep(POLL_SECONDS)


def _names(folder: Path) -> set[str]:
    """Read anew each time: asking for one file that is not there is answered from a cache by NFS."""
    return set(os.listdir(folder))


def _json(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tree


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
