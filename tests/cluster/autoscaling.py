"""Ray's `AutoscalingCluster` where other clusters run: it neither ends nor disturbs them."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray._private.services import get_node_ip_address
from ray.cluster_utils import AutoscalingCluster

_MARK = "NEMORL_TEST_CLUSTER"  # an environment variable of all its processes
_NODE_ID = b"RAY_CLOUD_INSTANCE_ID="
_HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"


class LocalAutoscalingCluster(AutoscalingCluster):
    """Ray's own runs `ray stop` for all of the machine, takes fixed ports, and reads a file it lacks."""

    def __init__(self, head_cpus: int, worker_types: dict[str, Any], folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            self._port = free.getsockname()[1]
        self.address = f"{get_node_ip_address()}:{self._port}"
        self._folder, self._mark = folder, uuid.uuid4().hex
        self.access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # of its drivers
        self._temp_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path must be short
        self._head: subprocess.Popen[bytes] | None = None
        super().__init__({"CPU": head_cpus}, worker_types)

    def _generate_config(
        self, head_resources: dict[str, Any], worker_node_types: dict[str, Any], **_: Any
    ) -> dict[str, Any]:
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        switches = ("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check")
        empty: dict[str, Any] = {"docker": {}, "auth": {}, "file_mounts": {}}
        commands = (
            *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
            *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"),
        )
        return {
            "cluster_name": "tests",
            "max_workers": 8,
            "idle_timeout_minutes": 0.1,
            "upscaling_speed": 1.0,
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.address,
                "head_node_id": _HEAD,
                **dict.fromkeys(switches, True),
            },
            "available_node_types": {**worker_node_types, "ray.head.default": head},
            "head_node_type": "ray.head.default",
            **empty,
            **{name: [] for name in commands},
        }

    def start(self, **_: Any) -> None:
        config = self._folder / "autoscaling.json"
        config.write_text(json.dumps(self._config))
        command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block"]
        options = {
            "port": self._port, "autoscaling-config": config, "num-cpus": self._head_resources["CPU"],
            "include-dashboard": "false", "object-store-memory": 100 * 2**20, "temp-dir": self._temp_dir,
            "disable-usage-stats": None,
        }  # fmt: skip
        command += [f"--{key}" if value is None else f"--{key}={value}" for key, value in options.items()]
        variables = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", _MARK: self._mark}
        variables |= {"RAY_enable_metrics_collection": "0"}  # as where nemorl starts Ray
        variables |= {
            "RAY_CLOUD_INSTANCE_ID": _HEAD,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
            **self.access,
        }
        variables |= {"AUTOSCALER_HEARTBEAT_TIMEOUT_S": "15"}  # after which a lost node is replaced
        variables |= {"RAY_raylet_start_wait_time_s": "150"}  # 30 by default: too few under load
        with (self._folder / "head.log").open("wb") as log:
            self._head = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + 240
        while "Ray runtime started" not in (text := (self._folder / "head.log").read_text()):
            assert self._head.poll() is None, text
            assert time.monotonic() < end, "Ray does not start"
            time.sleep(0.2)

    def shutdown(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._head is not None:
            self._head.wait()
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    def processes(self) -> list[int]:
        return [pid for pid, _ in self._processes()]

    def nodes(self) -> dict[int, str]:
        """The IDs of all nodes but the head, by the processes of their raylets."""
        found = {}
        for pid, variables in self._processes():
            with suppress(OSError):
                program = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
                nodes = [v.removeprefix(_NODE_ID).decode() for v in variables if v.startswith(_NODE_ID)]
                if program.endswith(b"/raylet") and nodes != [_HEAD]:
                    found[pid] = nodes[0]
        return found

    def drain(self, node: str) -> None:
        """Announce the end of a node, as a pre-emption does."""
        command = [Path(sys.executable).with_name("ray"), "drain-node", "--address", self.address]
        command += ["--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "a test", "--deadline-remaining-seconds", "600"]
        subprocess.run(command, env={**os.environ, **self.access}, check=True, capture_output=True)

    def _processes(self) -> Iterator[tuple[int, list[bytes]]]:
        mark = f"{_MARK}={self._mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if mark in variables:
                    yield int(folder.name), variables
