"""The nodes of a job, as Slurm's variables tell them to each of its processes."""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import SlurmError

Part = Literal["gpu", "cpu"]
Expand = Callable[[str], list[str]]

COMMAND_SECONDS = 30
# `nemorl.sbatch` writes these, because a container has neither `scontrol` nor the id of the whole job.
NODES, JOB = "NEMORL_NODES", "NEMORL_JOB"


@dataclass(frozen=True)
class Allocation:
    """A job's nodes, in the order of Slurm's lists, and which of them this is."""

    job: str
    restart: int  # how often Slurm has started the job before
    step: int  # of the job, in which this process runs
    components: tuple[
        tuple[str, ...], ...
    ]  # names of the nodes; the second of a heterogeneous job are CPU nodes
    here: str

    @property
    def nodes(self) -> tuple[str, ...]:
        """All names; the first is the head."""
        return tuple(name for component in self.components for name in component)

    @property
    def rank(self) -> int:
        """The place of this node among all."""
        return self.nodes.index(self.here)

    @property
    def start(self) -> str:
        """A name for this start of the job, which no other start has."""
        step = f".{self.step}" if self.step else ""
        return f"{self.job}.{self.restart}{step}"

    def part(self, node: str) -> Part | None:
        """In a heterogeneous job, what a node is for: ranks on GPUs, or what needs none; else None."""
        if len(self.components) == 1:
            return None
        return "gpu" if node in self.components[0] else "cpu"


def read_allocation(environment: Mapping[str, str], expand: Expand | None = None) -> Allocation:
    """The job that this process is a part of. `expand` turns a list such as `n[1-3]` into names.

    Raises `SlurmError` outside of a job, and where the variables contradict each other.
    """
    job = environment.get(JOB) or environment.get("SLURM_JOB_ID")
    if not job:
        raise SlurmError(
            "SLURM_JOB_ID is not set: `nemorl slurm node` is what a job runs on its nodes. To start a job, "
            "use `nemorl slurm submit`."
        )
    components = _given(environment) or _listed(environment, expand or expand_with_scontrol)
    names = [name for component in components for name in component]
    here = environment.get("SLURMD_NODENAME") or (names[0] if len(names) == 1 else "")
    if here not in names:
        raise SlurmError(
            f"SLURMD_NODENAME is {here or 'not set'}, and the nodes of job {job} are {', '.join(names)}: "
            "start `nemorl slurm node` with srun, one task on each node."
        )
    return Allocation(
        job,
        int(environment.get("SLURM_RESTART_COUNT") or 0),
        int(environment.get("SLURM_STEP_ID") or 0),
        components,
        here,
    )


def expand_with_scontrol(nodes: str) -> list[str]:
    """The names in a list of Slurm's. Raises `SlurmError`."""
    if shutil.which("scontrol") is None:
        raise SlurmError(
            f"{NODES} is not set and there is no `scontrol` to expand {nodes}, as in a container: start "
            "`nemorl slurm node` from nemorl.sbatch, which sets it."
        )
    command = ["scontrol", "show", "hostnames", nodes]
    told = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if told.returncode != 0:
        raise SlurmError(f"`{' '.join(command)}` failed: {told.stderr.strip()}")
    return told.stdout.split()


def _given(environment: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Components apart by `;`, names by `,`."""
    text = environment.get(NODES, "")
    return tuple(tuple(component.split(",")) for component in text.split(";")) if text else ()


def _listed(environment: Mapping[str, str], expand: Expand) -> tuple[tuple[str, ...], ...]:
    count = int(environment.get("SLURM_HET_SIZE") or 0)
    names = [f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(count)] or ["SLURM_JOB_NODELIST"]
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise SlurmError(
            f"{', '.join(missing)}, in which Slurm lists the nodes of a job, is not set: start `nemorl slurm "
            "node` with srun inside the job."
        )
    return tuple(tuple(expand(environment[name])) for name in names)
