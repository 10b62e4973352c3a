"""Ray on one node of a job: its command line, its environment, its folder, and what its logs said last."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemorl.cluster.runtime import FOLDERS, hold, remove_abandoned

from .fit import PART
from .hardware import Hardware
from .processes import Child
from .rendezvous import TOKEN, Card, Meeting, Plan

GPU_DOMAIN = "ray.io/gpu-domain"
NODE = "nemorl.io/node"
LONGEST_TEMPORARY = 20  # characters: Ray's sockets lie deep below it, and their paths have 107 at most
END_SECONDS = 15.0
HURRIED_SECONDS = 8.0  # where SIGKILL comes 30 s after SIGTERM, and the run itself has to end before Ray
TOGETHER_SECONDS = 600.0  # until it runs on all nodes
LATE_SECONDS = 25.0
TRIES = 4
TAIL_BYTES = 8192
# Of another Ray than this job's, where they are set; the last one lets `ray start` refuse several nodes.
OF_ANOTHER_RAY = {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
TAILED = ("gcs_server.*", "raylet.*", "ray_process_exit.log", "monitor.*", "*agent*.log")


def labels(card: Card) -> dict[str, str]:
    """What Ray knows of a node: its name, its part of the job, and the NVLink domain of its GPUs.

    GPUs that are not connected over nodes are a domain of their own node's.
    """
    gpus = card.hardware.gpus > 0
    found = {NODE: card.node, PART: card.part or ("gpu" if gpus else "cpu")}
    if gpus:
        found[GPU_DOMAIN] = card.hardware.nvlink_domain or card.node
    return found


def start_command(card: Card, plan: Plan, folder: Path, object_store_bytes: int) -> list[str]:
    """`ray start --block` for a node; of the head where the plan's first ports are its."""
    ports = plan.ports[card.node]
    is_head = card.node == next(iter(plan.ports))
    options = {
        "node-ip-address": card.address,
        "node-name": card.node,
        "num-cpus": card.hardware.cores,
        "num-gpus": card.hardware.gpus,
        "object-store-memory": object_store_bytes,
        "labels": ",".join(f"{name}={value}" for name, value in labels(card).items()),
        "temp-dir": folder,
        "include-log-monitor": "false",  # it would bring workers' words to the driver; they have files
        **ports.ray_options,
    }
    if is_head:
        # Idle workers would cost 90 MB each; ours are actors, started with an environment of their own.
        system = {
            "prestart_worker_first_driver": False,
            "enable_metrics_collection": False,
            "worker_niceness": 0,  # added to ours; 15 by default
        }
        options |= {"port": ports.gcs, "include-dashboard": "false", "system-config": json.dumps(system)}
    else:
        options |= {"address": plan.gcs}
        del options["ray-client-server-port"]
    words = [f"--{name}={value}" for name, value in options.items()]
    head = ["--head"] if is_head else []
    return [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        *head,
        *words,
        "--block",
        "--log-style=record",
    ]


def ray_environment(environment: Mapping[str, str], card: Card, token_file: Path) -> dict[str, str]:
    """For everything of Ray on a node: the secret by its file, and the interface for collectives.

    Ray's workers inherit it.
    """
    network = {"GLOO_SOCKET_IFNAME": card.interface, "NCCL_SOCKET_IFNAME": card.interface}
    inherited = {name: value for name, value in environment.items() if name not in OF_ANOTHER_RAY}
    ours = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # When the run is over there is nothing to wait for; Ray would drain the node for 30 s, and Slurm's
        # SIGKILL would come before the end.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    return {**network, **inherited, **secret_environment(token_file.parent), **ours}


def secret_environment(start: Path) -> dict[str, str]:
    """What makes Ray take and want the secret of a start, whose folder this is."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str((start / TOKEN).absolute())}


def object_store_bytes(hardware: Hardware, configured_megabytes: int, sharing: int) -> int:
    """Shared memory for Ray's objects: a tenth of the node's memory, and no less than a local Ray gets.

    `sharing` nodes are on this machine. No more than fits into /dev/shm, if there is one.
    """
    wanted = max(configured_megabytes * 2**20, hardware.memory_bytes // 10 // sharing)
    room = int(hardware.shared_memory_bytes * 0.9) // sharing
    return max(100 * 2**20, min(wanted, room) if room else wanted)


class RayNode:
    """Ray while the `async with` block runs."""

    def __init__(self, card: Card, plan: Plan, meeting: Meeting, store_bytes: int) -> None:
        """`store_bytes` of shared memory are for objects."""
        self._card, self._plan, self._meeting, self._store_bytes = card, plan, meeting, store_bytes
        self.environment = ray_environment(os.environ, card, meeting.token_file)
        self._starts = 0
        self.hurried = False

    @property
    def was_late(self) -> bool:
        """Whether what ended now may only have been slow, and may be tried again.

        Ray gives itself 30 s to come up, which a busy machine may exceed; what fails for good fails sooner.
        """
        return self._starts < TRIES and time.monotonic() - self._began >= LATE_SECONDS

    async def __aenter__(self) -> Child:
        """Start it."""
        temporary = Path(tempfile.gettempdir())
        temporary = temporary if len(str(temporary)) <= LONGEST_TEMPORARY else Path("/tmp")
        remove_abandoned(temporary)
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDERS, dir=temporary))
        self._lock = hold(self._folder)
        self._starts, self._began = self._starts + 1, time.monotonic()
        command = start_command(self._card, self._plan, self._folder, self._store_bytes)
        self._child = await Child.start(command, self.environment, self._meeting.log(self._card.node))
        return self._child

    async def __aexit__(self, *error: object) -> None:
        """End it, and remove its folder."""
        await self._child.end(HURRIED_SECONDS if self.hurried else END_SECONDS)
        self._lock.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def keep_tails(self) -> None:
        """Copy the ends of Ray's own logs into the run folder, for a run that failed."""
        text = "\n".join(tails(self._folder / "session_latest" / "logs"))
        if text:
            (self._meeting.folder / f"{self._card.node}.ray.log").write_text(text + "\n", encoding="utf-8")


def tails(folder: Path) -> Iterator[str]:
    """The end of each log that says why Ray ended, under its name."""
    for pattern in TAILED:
        for path in sorted(folder.glob(pattern)):
            try:
                with path.open("rb") as log:
                    log.seek(max(0, path.stat().st_size - TAIL_BYTES))
                    said = log.read().decode("utf-8", errors="replace").strip()
            except OSError:
                continue
            if said:
                yield f"=== {path.name}\n{said}"
