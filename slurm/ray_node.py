"""Ray on one node of a job, and the child processes of a launcher."""

import asyncio
import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Self

from . import SlurmError
from .node import Hardware, NodeInfo
from .start import TOKEN, Plan, Rendezvous

GPU_DOMAIN = "ray.io/gpu-domain"
NODE = "nemorl.io/node"
PART = "nemorl.io/part"
STOP_SECONDS = 15.0
URGENT_STOP_SECONDS = 8.0  # where SIGKILL comes 30 s after SIGTERM, and the run has to end before Ray
START_SECONDS = 600.0  # until Ray runs on all nodes
SLOW_START_SECONDS = 25.0
MAX_ATTEMPTS = 4
TAIL_BYTES = 8192
POLL_SECONDS = 0.5
# Not inherited: the settings of another Ray; the last one makes `ray start` refuse several nodes.
RAY_VARIABLES = {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
LOGS = ("gcs_server.*", "raylet.*", "ray_process_exit.log", "monitor.*", "*agent*.log")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Child:
    """A child process that gets signals from the launcher only, and is killed when the launcher ends."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None
    ) -> Self:
        """Start a command; its output is appended to `log`, or goes where the launcher's goes."""
        with log.open("ab") if log else nullcontext() as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return cls(process)

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its children."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self, seconds: float) -> int:
        """Send SIGTERM, and after `seconds` SIGKILL to its session; return the exit status."""
        self.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(self.ended)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return await self.ended


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process receive a signal when its parent ends; for `preexec_fn`."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def node_labels(info: NodeInfo) -> dict[str, str]:
    """Ray's labels of a node. GPUs without NVLink between nodes form a domain per node."""
    has_gpus = info.hardware.gpus > 0
    labels = {NODE: info.node, PART: info.part or ("gpu" if has_gpus else "cpu")}
    if has_gpus:
        labels[GPU_DOMAIN] = info.hardware.nvlink_domain or info.node
    return labels


def start_command(info: NodeInfo, plan: Plan, folder: Path, object_store_bytes: int) -> list[str]:
    """`ray start --block` for a node; the first node of the plan is the head."""
    ports = plan.ports[info.node]
    options = {
        **{"node-ip-address": info.address, "node-name": info.node},
        **{"num-cpus": info.hardware.cores, "num-gpus": info.hardware.gpus},
        "object-store-memory": object_store_bytes,
        "labels": ",".join(f"{name}={value}" for name, value in node_labels(info).items()),
        "temp-dir": folder,
        "include-log-monitor": "false",  # it copies the workers' output to the driver; they have log files
        **ports.ray_options,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-style=record"]
    if info.node == next(iter(plan.ports)):
        from nemorl.cluster.runtime import SYSTEM_CONFIG  # imports Ray

        system = json.dumps(SYSTEM_CONFIG)
        options |= {"port": ports.gcs, "include-dashboard": "false", "system-config": system}
        command.append("--head")
    else:
        options["address"] = plan.gcs
        del options["ray-client-server-port"]
    return command + [f"--{name}={value}" for name, value in options.items()]


def ray_environment(environment: Mapping[str, str], info: NodeInfo, token_file: Path) -> dict[str, str]:
    """Environment of Ray and its workers on a node: the token's file, and the interface for collectives."""
    return {
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), info.interface),
        **{name: value for name, value in environment.items() if name not in RAY_VARIABLES},
        **token_environment(token_file.parent),
        "RAY_USAGE_STATS_ENABLED": "0",
        # When the run is over there is nothing to drain; Ray would wait 30 s, and Slurm's SIGKILL come first.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


def token_environment(start: Path) -> dict[str, str]:
    """Variables that make Ray require the token of a start; `start` is its folder."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str((start / TOKEN).absolute())}


def object_store_bytes(hardware: Hardware, configured_megabytes: int, nodes_on_host: int) -> int:
    """Shared memory for Ray's objects: a tenth of the memory or the configured size, within /dev/shm."""
    size = max(configured_megabytes * 2**20, hardware.memory_bytes // 10 // nodes_on_host)
    available = int(hardware.shared_memory_bytes * 0.9) // nodes_on_host
    return max(100 * 2**20, min(size, available) if available else size)


class RayNode:
    """Ray on this node, while the `async with` block runs."""

    def __init__(self, info: NodeInfo, plan: Plan, rendezvous: Rendezvous, configured_megabytes: int) -> None:
        self._info, self._plan, self._rendezvous = info, plan, rendezvous
        nodes_on_host = list(plan.hosts.values()).count(info.host)
        self._store_bytes = object_store_bytes(info.hardware, configured_megabytes, nodes_on_host)
        self.environment = ray_environment(os.environ, info, rendezvous.token_file)
        self.urgent = False  # SIGKILL is near
        self._attempts = 0

    @property
    def was_slow(self) -> bool:
        """True where another attempt may help: Ray gives up after 30 s, other failures come sooner."""
        return self._attempts < MAX_ATTEMPTS and time.monotonic() - self._began >= SLOW_START_SECONDS

    async def __aenter__(self) -> Child:
        from nemorl.cluster.runtime import make_temp_dir  # imports Ray

        self._folder, self._lock = make_temp_dir()
        self._attempts, self._began = self._attempts + 1, time.monotonic()
        command = start_command(self._info, self._plan, self._folder, self._store_bytes)
        self._child = await Child.start(command, self.environment, self._rendezvous.log(self._info.node))
        return self._child

    async def __aexit__(self, *error: object) -> None:
        await self._child.stop(URGENT_STOP_SECONDS if self.urgent else STOP_SECONDS)
        self._lock.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def keep_logs(self) -> None:
        if text := "\n".join(log_tails(self._folder / "session_latest" / "logs")):
            path = self._rendezvous.folder / f"{self._info.node}.ray.log"
            path.write_text(text + "\n", encoding="utf-8")


def log_tails(folder: Path) -> Iterator[str]:
    """Yield the end of each of Ray's logs that may say why it ended, under its name."""
    for path in (path for pattern in LOGS for path in sorted(folder.glob(pattern))):
        with suppress(OSError), path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            if text := log.read().decode("utf-8", errors="replace").strip():
                yield f"=== {path.name}\n{text}"


def members_command(nodes: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "nemorl.slurm.ray_node", str(START_SECONDS), *nodes]


async def wait_for_members(rendezvous: Rendezvous, environment: Mapping[str, str]) -> None:
    """Wait until Ray knows all nodes. Raises `SlurmError` naming the missing ones."""
    # A process of its own, because Ray replaces the signal handlers of a process that connects to it.
    command, pipe = members_command(rendezvous.nodes), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=dict(environment), stdout=pipe)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        problem = f"Ray did not start on {output.decode() or 'the head'} within {START_SECONDS:g} s"
        raise SlurmError(f"{problem}. Its output is in {rendezvous.folder}, a file for each node.")


def main(arguments: Sequence[str]) -> int:
    """Wait until the cluster at RAY_ADDRESS has these nodes; else print the missing ones and return 1."""
    import ray

    deadline, missing = time.monotonic() + float(arguments[0]), set(arguments[1:])
    while True:
        try:
            if not ray.is_initialized():
                ray.init(log_to_driver=False, logging_level=logging.ERROR)
            missing = set(arguments[1:]) - {node["NodeName"] for node in ray.nodes() if node["Alive"]}
        except (ConnectionError, RuntimeError, TimeoutError):  # Ray does not accept connections yet
            ray.shutdown()
        if not missing:
            return 0
        if time.monotonic() > deadline:
            sys.stdout.write(", ".join(sorted(missing)))
            return 1
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
