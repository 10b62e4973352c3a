"""Ray for one run: a local one that ends with it, or a cluster that is joined and left as it was."""

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import ray
from ray._private import ray_constants

from nemorl.config.run import ClusterConfig

from .errors import ClusterUnavailable
from .nodes import wait_for_nodes
from .placement import Placement
from .ray_start import start_apart
from .requests import WorkerRequest, wanted_bundles
from .reserving import available_cores, reserve
from .temporary import FOLDERS, hold, remove_abandoned

logger = logging.getLogger(__name__)

# A socket's path has 107 characters at most, and Ray's end about 85 below the folder of temporary files.
LONGEST_TEMP_DIR = 20
CONNECT_SECONDS = 10.0


class ClusterRuntime:
    """Ray while the `with` block runs.

    Joins the Ray that this process is connected to already, else the cluster at `RAY_ADDRESS`, else starts
    one on this machine that listens on the loopback interface only. Ends only what it started.
    """

    def __init__(self, config: ClusterConfig, requests: Sequence[WorkerRequest]) -> None:
        """`requests` are the workers of the run."""
        self.config = config
        self.requests = tuple(requests)
        self.local = False  # whether this object started a Ray of its own
        self._joined = False
        self._temp_dir: Path | None = None
        self._lock: IO[bytes] | None = None  # held while the folder is in use

    def __enter__(self) -> Self:
        """Start or join. Raises `ClusterUnavailable`."""
        if ray.is_initialized():
            return self
        address = os.environ.get("RAY_ADDRESS")
        try:
            if address:
                self._join(address)
            else:
                self._start()
        except (ConnectionError, OSError, RuntimeError, ValueError, TimeoutError) as error:
            what = (
                f"The Ray cluster at RAY_ADDRESS={address} cannot be joined"
                if address
                else "Ray does not start"
            )
            raise ClusterUnavailable(f"{what}: {' '.join(str(error).split())}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the cluster, or end the local Ray with everything that runs in it."""
        if self.local or self._joined:
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
        """Places for all workers of the run, once `cluster.num_nodes` machines are there.

        Raises `ClusterUnavailable` and `PlacementFailed`.
        """
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
            raise ValueError(
                "it is the address of a Ray client server, and the driver has to run inside the cluster. "
                "Start the command on a node and set RAY_ADDRESS to host:port of the head, or to auto."
            )
        host, _, port = address.rpartition(":")
        if port.isdecimal():  # Ray tries for minutes before it gives up on an address where nothing listens
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        self._joined = True

    def _start(self) -> None:
        _stay_on_this_machine()
        parent = Path(tempfile.gettempdir())
        parent = parent if len(str(parent)) <= LONGEST_TEMP_DIR else Path("/tmp")
        remove_abandoned(parent)
        self._temp_dir = Path(tempfile.mkdtemp(prefix=FOLDERS, dir=parent))
        self._lock = hold(self._temp_dir)
        start_apart(
            self.config.deadlines.start,
            address="local",
            num_cpus=max(available_cores(), sum(int(b["CPU"]) for b in wanted_bundles(self.requests))),
            object_store_memory=self.config.object_store_megabytes * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self._temp_dir),
            # Idle workers would cost 90 MB each; ours are actors, started with an environment of their own.
            _system_config={"prestart_worker_first_driver": False, "enable_metrics_collection": False},
        )
        self.local = True


def _stay_on_this_machine() -> None:
    """Let the Ray that starts next listen on the loopback interface only, and want our token."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray has no argument for this: it replaces a loopback address by the machine's own wherever it is
    # built for clusters, which is this switch (made for laptops with a firewall).
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        # Else Ray writes a token into the home folder, readable for all.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
