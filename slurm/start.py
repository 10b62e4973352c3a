"""One start of a job: the folder through which its nodes find each other, and how it ended.

    <run_dir>/slurm/<job>.<restart>/<node>.json     what a node reports
    <run_dir>/slurm/<job>.<restart>/<node>.failed   why its launcher ended
    <run_dir>/slurm/<job>.<restart>/plan.json       what the head decides
    <run_dir>/slurm/<job>.<restart>/ray_token       Ray's token for this start, readable by the owner only
    <run_dir>/slurm/<job>.<restart>/<node>.log      output of the launcher and of Ray on a node
    <run_dir>/slurm/<job>.<restart>/cancelled       `nemorl slurm cancel` stops this start
    <run_dir>/slurm/<job>.<restart>/exit.json       how it ended, and whether the job is requeued

Every node finding the files of the others proves that the folder is on a shared file system.
"""

import asyncio
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from nemorl.observe.files import WriteError, write_atomically
from nemorl.observe.run_folder import RunPaths

from . import OptionError, SlurmError
from .node import NodeInfo, Ports

FOLDER = "slurm"  # in the run folder
PLAN, TOKEN, EXIT, CANCELLED = "plan.json", "ray_token", "exit.json", "cancelled"
POLL_SECONDS = 0.5
RENDEZVOUS_SECONDS = 300.0  # pulling a container image may come first

MAX_RESTARTS = "NEMORL_MAX_RESTARTS"
DEFAULT_MAX_RESTARTS = 3
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: nemorl.sbatch requeues the job
TERMINATED = 143  # by SIGTERM: who sent it decides whether the job is requeued
STATUS_FILE = "NEMORL_STATUS_FILE"  # for nemorl.sbatch, since srun reports the worst status of all nodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """Addresses of the nodes; or why the job does not start."""

    head: str  # address of the head
    ports: Mapping[str, Ports]  # by node, the head first
    hosts: Mapping[str, str]  # machine of each node
    refused: str = ""

    @property
    def gcs(self) -> str:
        """Ray's address."""
        return f"{self.head}:{next(iter(self.ports.values())).gcs}"

    @property
    def control(self) -> int:
        return next(iter(self.ports.values())).control

    @classmethod
    def read(cls, start: Path) -> Self:
        """Raises `FileNotFoundError`."""
        return TypeAdapter(cls).validate_json((start / PLAN).read_bytes())


class Rendezvous:
    def __init__(self, run_dir: Path, start: str, nodes: Sequence[str]) -> None:
        self.folder = run_dir / FOLDER / start
        self.nodes = tuple(nodes)
        self.token_file = self.folder / TOKEN
        self.folder.mkdir(parents=True, exist_ok=True)

    def log(self, node: str) -> Path:
        return self.folder / f"{node}.log"

    def report(self, info: NodeInfo) -> None:
        write_atomically(self.folder / f"{info.node}.json", json.dumps(asdict(info), indent=2) + "\n")

    def report_failure(self, node: str, reason: str) -> None:
        write_atomically(self.folder / f"{node}.failed", reason + "\n")

    async def wait_for_nodes(self, seconds: float = RENDEZVOUS_SECONDS) -> dict[str, NodeInfo]:
        """Return all reports, the head first. Raises `SlurmError` naming failed or missing nodes."""
        everyone = set(self.nodes)
        await _until(lambda: self._with("json") == everyone or bool(self._with("failed")), seconds)
        if failed := sorted(self._with("failed")):
            reasons = {node: (self.folder / f"{node}.failed").read_text("utf-8").strip() for node in failed}
            raise SlurmError("; ".join(f"{node}: {reason}" for node, reason in reasons.items()))
        if missing := everyone - (present := self._with("json")):
            problem = f"did not appear in {self.folder} within {seconds:g} s ({_listed(present)} did)"
            shared = "Either run_dir is not on a file system that all nodes share: move it to one."
            launcher = "Or the launcher did not start there: see its output above."
            raise SlurmError(f"{_listed(missing)} {problem}. {shared} {launcher}")
        reports = {node: (self.folder / f"{node}.json").read_bytes() for node in self.nodes}
        return {node: TypeAdapter(NodeInfo).validate_json(text) for node, text in reports.items()}

    def publish(self, plan: Plan) -> None:
        """Write the plan for the other nodes, and before it the token that they need."""
        if not plan.refused:
            write_atomically(self.token_file, secrets.token_hex(32), private=True)
        write_atomically(self.folder / PLAN, json.dumps(asdict(plan), indent=2) + "\n")

    async def wait_for_plan(self, seconds: float = 2 * RENDEZVOUS_SECONDS) -> Plan:
        """Return the head's plan. Raises `SlurmError`."""
        await _until(lambda: PLAN in self.files(), seconds)
        if PLAN not in (files := self.files()):
            head = self.nodes[0]
            problem = f"The head, {head}, wrote no plan into {self.folder} within {seconds:g} s"
            cause = f"If {head}.json is not among them, run_dir is not on a file system that all nodes share"
            raise SlurmError(f"{problem}; this node sees {_listed(files)}. {cause}: move it to one.")
        return Plan.read(self.folder)

    def close(self, reason: str) -> None:
        """Remove the token; nodes that still wait for a plan receive the reason instead."""
        if PLAN not in self.files():
            self.publish(Plan("", {}, {}, refused=reason))
        self.token_file.unlink(missing_ok=True)

    def files(self) -> set[str]:
        """Names in the folder. NFS answers a query for one missing file from a cache, a listing less so."""
        return set(os.listdir(self.folder))

    def _with(self, suffix: str) -> set[str]:
        files = self.files()
        return {node for node in self.nodes if f"{node}.{suffix}" in files}


async def _until(is_reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_reached() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


@dataclass(frozen=True)
class ExitRecord:
    code: int  # exit status of the launcher on the head
    reason: str
    step_before: int  # of the newest checkpoint, at the beginning
    step: int

    @property
    def requeues_without_progress(self) -> bool:
        return self.code == REQUEUE and self.step <= self.step_before

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the record of a start; None where it is missing or invalid."""
        try:
            return TypeAdapter(cls).validate_json((folder / EXIT).read_bytes())
        except (OSError, ValueError):
            return None

    def write(self, folder: Path) -> None:
        write_atomically(folder / EXIT, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")


def newest_step(run_dir: Path) -> int:
    """Step of the newest checkpoint on disk; 0 without one."""
    return newest_step_in(RunPaths(run_dir).checkpoints)


def newest_step_in(folder: Path) -> int:
    names = (path.name for path in folder.glob("step_*"))
    found = (re.fullmatch(r"step_(\d+)", name) for name in names)
    return max((int(match[1]) for match in found if match), default=0)


def parse_max_restarts(environment: Mapping[str, str]) -> int:
    """Parse NEMORL_MAX_RESTARTS. Raises `OptionError`."""
    text = environment.get(MAX_RESTARTS) or str(DEFAULT_MAX_RESTARTS)
    if not text.isdecimal():
        raise OptionError(f"{MAX_RESTARTS} = {text}: expected a number of restarts, 0 for none")
    return int(text)


def restarts_without_progress(run_dir: Path, job: str, restart: int) -> int:
    """Number of consecutive starts before this one that asked for another and wrote no new checkpoint."""
    count = 0
    for earlier in reversed(range(restart)):
        start = run_dir / FOLDER / f"{job}.{earlier}"
        # nemorl.sbatch may have called srun several times for one start: 12.0, 12.0.1, ...
        steps = start.parent.glob(f"{start.name}.*")
        attempts = [*sorted(steps, key=lambda path: int(path.suffix[1:]), reverse=True), start]
        record = next((found for path in attempts if (found := ExitRecord.read(path))), None)
        if record is None or not record.requeues_without_progress:
            break
        count += 1
    return count


def write_status(code: int) -> None:
    if path := os.environ.get(STATUS_FILE):
        Path(path).write_text(f"{code}\n", encoding="ascii")


class ExitRecorder:
    """Writes the exit record of a start at each of its stages, since each may be its last."""

    def __init__(self, run_dir: Path, folder: Path, job: str, restart: int) -> None:
        self._run_dir, self._folder = run_dir, folder
        self._step_before = newest_step(run_dir)
        self._restarts = restarts_without_progress(run_dir, job, restart)
        self.max_restarts = DEFAULT_MAX_RESTARTS

    def read_max_restarts(self) -> None:
        self.max_restarts = parse_max_restarts(os.environ)

    def write(self, code: int, reason: str) -> ExitRecord:
        """Record how the start ended, as far as is known now; the job fails at the bound on restarts."""
        record = ExitRecord(code, reason, self._step_before, newest_step(self._run_dir))
        if record.requeues_without_progress and self._restarts >= self.max_restarts:
            starts = f"{self._restarts + 1} consecutive starts" if self._restarts else "this start"
            bound = f"{starts} wrote no new checkpoint ({MAX_RESTARTS} = {self.max_restarts}); not requeued"
            record = replace(record, code=1, reason=f"{reason}; {bound}")
        try:
            write_status(record.code)
            record.write(self._folder)
        except (OSError, WriteError) as error:  # a full disk; the launcher's own exit status remains
            logger.error("the exit record cannot be written: %s", error)
        return record
