"""Ray for one run: a local one that ends with the run, or an existing cluster that is joined.

The folder of a local Ray is locked while the driver lives. One that a driver left, for its logs or because it
was killed, is removed by the next start, which finds the lock free.
"""

import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import ray
from ray._private import ray_constants, services, utils

from nemorl.config.run import ClusterConfig

from .errors import ClusterUnavailable
from .nodes import wait_for_nodes
from .placement import Placement, WorkerRequest, available_cores, required_bundles, reserve

logger = logging.getLogger(__name__)

TRIES = 2
FOLDERS = "nemorl-ray-"  # how their names begin
LOCK = "driver.lock"
# A socket's path has 107 characters at most, and Ray's end about 85 below the folder of temporary files.
MAX_TEMP_DIR_CHARACTERS = 20
CONNECT_SECONDS = 10.0
SYSTEM_CONFIG = {
    # Idle workers would cost 90 MB each; actors are started with their own environment.
    "prestart_worker_first_driver": False,
    "enable_metrics_collection": False,
    # Added to ours, 15 by default: any other process would take the cores from training.
    "worker_niceness": 0,
}


@contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """Inside, `ray.init` does not replace a handler of SIGTERM by its own two, which end the process.

    The one in Python exits; the one in C++ prints a trace and has the process aborted after 3 seconds.
    """
    set_handler, handler = utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    kept = handler != signal.SIG_DFL
    if kept:
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        if kept:
            signal.signal(signal.SIGTERM, handler)  # again, over the one in C++


def start_apart(deadline_seconds: float, **options: Any) -> None:
    """`ray.init(**options)`, tried once more where Ray did not come up in its own time, 30 s.

    Ray's processes get process groups of their own: a SIGTERM to our whole group, as schedulers send it,
    would else end Ray before us. The kernel ends them with us all the same. After `deadline_seconds` no new
    try begins. Raises `ClusterUnavailable`.
    """
    popen, began = services.ConsolePopen, time.monotonic()
    for attempt in range(1, TRIES + 1):
        processes: list[subprocess.Popen[bytes]] = []

        class Apart(popen):  # type: ignore[misc, valid-type]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, process_group=0, **options)
                processes.append(self)  # noqa: B023 - of this attempt

        services.ConsolePopen = Apart
        try:
            with sigterm_handler_kept():
                ray.init(**options)
            return
        except Exception as error:  # Ray raises the bare class where it is late
            ray.shutdown()
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if not (isinstance(error, TimeoutError) or "timed out" in str(error)):
                raise ClusterUnavailable(f"Ray does not start: {' '.join(str(error).split())}") from error
            seconds = time.monotonic() - began
            if attempt == TRIES or seconds >= deadline_seconds:
                times, load = "once" if attempt == 1 else f"{attempt} times", os.getloadavg()[0]
                raised = ", or raise cluster.deadlines.start" if seconds >= deadline_seconds else ""
                raise ClusterUnavailable(
                    f"Ray did not come up in stage 'start': tried {times} in {seconds:.0f} s "
                    f"(cluster.deadlines.start = {deadline_seconds:g}), with a load of {load:.0f} on "
                    f"{os.cpu_count()} cores. Start again when the machine is less busy{raised}."
                ) from error
        finally:
            services.ConsolePopen = popen
        logger.warning("Ray did not come up in %.0f s (try %d of %d); trying again", seconds, attempt, TRIES)


def hold(folder: Path) -> IO[bytes]:
    """Lock a folder until the returned file is closed or this process ends."""
    lock = (folder / LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def remove_abandoned(
    parent: Path,
    names: str = FOLDERS,
    remove: Callable[[Path], None] = lambda folder: shutil.rmtree(folder, ignore_errors=True),
) -> None:
    """Remove the folders whose lock is free. One without a lock file stays: its start may be under way."""
    for path in parent.glob(f"{names}*/{LOCK}"):
        try:
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path.parent)
        except OSError:  # in use, another user's, or just removed by another start
            continue
        logger.info("removed %s, the folder of a run that has ended", path.parent)


def make_temp_dir() -> tuple[Path, IO[bytes]]:
    """Make and lock the folder of a Ray; remove those of runs that have ended."""
    parent = Path(tempfile.gettempdir())
    parent = parent if len(str(parent)) <= MAX_TEMP_DIR_CHARACTERS else Path("/tmp")
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=FOLDERS, dir=parent))
    return folder, hold(folder)


class ClusterRuntime:
    """Ray while the `with` block runs; ends only what it started.

    Joins the Ray that this process is connected to already, else the cluster at `RAY_ADDRESS`, else starts
    one on this machine that listens on the loopback interface only.
    """

    def __init__(self, config: ClusterConfig, requests: Sequence[WorkerRequest], extra: int = 0) -> None:
        """`extra` processes may be started later where this starts a Ray."""
        self.config, self.requests, self._extra = config, tuple(requests), extra
        self.local = False  # whether this object started a Ray of its own
        self._initialized = False  # Ray, by this object
        self._temp_dir: Path | None = None
        self._lock: IO[bytes] | None = None  # held while the folder is in use

    def __enter__(self) -> Self:
        """Raises `ClusterUnavailable`."""
        if ray.is_initialized():
            return self
        # One error of a call is reported; Ray would print those of all other ranks and groups.
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        address, problem = os.environ.get("RAY_ADDRESS"), "Ray does not start"
        try:
            if address:
                problem = f"The Ray cluster at RAY_ADDRESS={address} cannot be joined"
                self._join(address)
            else:
                self._start()
            self._initialized = True
        except (OSError, RuntimeError, ValueError) as error:
            raise ClusterUnavailable(f"{problem}: {' '.join(str(error).split())}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._initialized:
            ray.shutdown()
        if self._temp_dir is None:
            return
        if isinstance(error, Exception):
            logger.info("Ray's own logs are kept in %s until the next start", self._temp_dir)
        else:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    async def reserve(self) -> Placement:
        """Raises `ClusterUnavailable` and `PlacementFailed`."""
        if not self.local:
            await wait_for_nodes(self.config.num_nodes, self.config.deadlines.start)
        return await reserve(
            self.requests,
            strategy=self.config.strategy,
            deadline_seconds=self.config.deadlines.start,
            can_grow=not self.local,
            # Collectives of the workers listen on the loopback interface too.
            environment={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if self.local else {},
        )

    def _join(self, address: str) -> None:
        if address.startswith("ray://"):
            problem = "it is the address of a Ray client server, and the driver has to run inside the cluster"
            fix = "Start the command on a node and set RAY_ADDRESS to host:port of the head, or to auto."
            raise ValueError(f"{problem}. {fix}")
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # Ray tries for minutes before it gives up on an address where nothing listens
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        with sigterm_handler_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)

    def _start(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray has no argument for this: with clusters enabled it replaces a loopback address by the machine's.
        os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
        ray_constants.ENABLE_RAY_CLUSTER = False
        if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
            # Otherwise Ray writes a token into the home folder, readable by all users.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        self._temp_dir, self._lock = make_temp_dir()
        num_processes = sum(int(bundle["CPU"]) for bundle in required_bundles(self.requests))
        start_apart(
            self.config.deadlines.start,
            address="local",
            num_cpus=max(available_cores(), num_processes + self._extra),
            object_store_memory=self.config.object_store_megabytes * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self._temp_dir),
            _system_config=SYSTEM_CONFIG,
        )
        self.local = True
