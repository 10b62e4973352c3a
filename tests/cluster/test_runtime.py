"""Starting, joining and ending Ray, also by force. Drivers that end badly are processes of their own."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import services, utils

from nemorl.cluster.errors import ClusterUnavailable
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.runtime import ClusterRuntime, remove_abandoned, start_apart
from nemorl.config.run import ClusterConfig
from nemorl.run.stop import SIGNALS, StopRequest

ROOT = Path(__file__).parents[2]
# A Ray that listens on the loopback interface only is found by drivers that stay on it, too.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# After a kill -9 these stay a minute: they try to notify Ray's head, which is gone, of that.
AGENTS = frozenset({"ray::DashboardAgent", "ray::RuntimeEnvAgent"})


@dataclass
class Driver:
    """A running `tests.cluster.driver`, once its worker sleeps."""

    process: subprocess.Popen[str]
    worker: int
    local: bool
    descendants: list[psutil.Process]

    def survivors(self, seconds: float, but: frozenset[str] = frozenset()) -> list[str]:
        """Names of its processes that are left after this time; those in `but` are not asked for."""
        asked = [p for p in self.descendants if p.is_running() and p.name() not in but]
        return [p.name() for p in psutil.wait_procs(asked, timeout=seconds)[1]]


@contextmanager
def driver(run_dir: Path, sleep: float, **environment: str) -> Iterator[Driver]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") or "AUTH" in k}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.driver", str(run_dir), str(sleep)],
        cwd=ROOT,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    family: list[psutil.Process] = []
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        about = json.loads(line)
        family = psutil.Process(process.pid).children(recursive=True)
        if about["worker"] not in [p.pid for p in family]:
            family.append(psutil.Process(about["worker"]))
        yield Driver(process, about["worker"], about["local"], family)
    finally:
        process.kill()
        process.wait()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def ray_folders(parent: Path) -> list[Path]:
    return list(parent.glob("nemorl-ray-*"))


@pytest.fixture
def temp_dir() -> Iterator[Path]:
    """A short one: Ray's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="nt-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def listeners(process: psutil.Process) -> list[str]:
    """The addresses it listens on; none of a process that has ended meanwhile."""
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        return [c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    return []


def test_all_listeners_of_a_local_ray_are_on_the_loopback_interface(
    runtime: ClusterRuntime, policy: WorkerGroup
):
    assert runtime.local
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [address for process in processes for address in listeners(process)]
    assert len(listening) > 5
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_a_runtime_inside_a_connected_process_leaves_ray_running(
    runtime: ClusterRuntime, policy: WorkerGroup
):
    with ClusterRuntime(ClusterConfig(), []) as inner:
        assert not inner.local
    assert ray.is_initialized()
    assert len(asyncio.run(policy.call("process", stage="testing", seconds=30))) == 4


def test_a_cluster_at_ray_address_is_joined_and_left_running(
    runtime: ClusterRuntime, policy: WorkerGroup, tmp_path: Path
):
    address = ray.get_runtime_context().gcs_address
    with driver(tmp_path, 0.0, RAY_ADDRESS=address, **LOOPBACK) as joined:
        assert not joined.local
        assert joined.process.wait(timeout=30) == 0
        assert joined.survivors(30) == []
    assert (tmp_path / "logs" / "joined-0.log").exists()
    with driver(tmp_path, 600.0, RAY_ADDRESS=address, **LOOPBACK) as killed:
        killed.process.kill()
        assert killed.survivors(30) == []
    assert len(asyncio.run(policy.call("process", stage="testing", seconds=30))) == 4


def test_kill_9_of_a_driver_ends_its_ray_and_its_workers(tmp_path: Path, temp_dir: Path):
    with driver(tmp_path, 600.0, TMPDIR=str(temp_dir)) as killed:
        assert killed.local
        assert ray_folders(temp_dir)
        killed.process.kill()
        assert killed.survivors(30, but=AGENTS) == []
    remove_abandoned(temp_dir)  # as the next start does
    assert ray_folders(temp_dir) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_driver_ends_everything_and_cleans_up(
    tmp_path: Path, temp_dir: Path, number: signal.Signals
):
    """Ctrl-C, `timeout` and schedulers signal the whole group, in which the driver is alone."""
    with driver(tmp_path, 600.0, TMPDIR=str(temp_dir)) as interrupted:
        groups = {os.getpgid(member.pid) for member in interrupted.descendants}
        assert interrupted.process.pid not in groups
        os.killpg(interrupted.process.pid, number)
        assert interrupted.process.wait(timeout=120) != 0  # seconds, and more where the machine is busy
        assert interrupted.survivors(60) == []
        assert ray_folders(temp_dir) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:9", "RAY_ADDRESS=127.0.0.1:9 cannot be joined: [Errno 111] Connection refused"),
        ("ray://127.0.0.1:10001", "the driver has to run inside the cluster"),
    ],
)
def test_an_address_that_cannot_be_joined(monkeypatch: pytest.MonkeyPatch, address: str, message: str):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", None)  # which would try for long, and is not called
    with pytest.raises(ClusterUnavailable, match=re.escape(message)), ClusterRuntime(ClusterConfig(), []):
        pass


def test_a_ray_that_is_late_is_tried_once_more_and_then_reported(monkeypatch: pytest.MonkeyPatch):
    begun: list[subprocess.Popen[bytes]] = []

    def late(**options: object) -> None:
        begun.append(services.ConsolePopen(["sleep", "600"]))
        raise Exception("The current node timed out during startup.")  # the class that Ray raises

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # of the tests' own Ray
    with pytest.raises(
        ClusterUnavailable, match=r"stage 'start': tried 2 times in 0 s .* load of \d+ on .* less busy\.$"
    ):
        start_apart(60.0)
    once = r"tried once in 0 s \(cluster.deadlines.start = 1e-09\).*, or raise cluster.deadlines.start\.$"
    with pytest.raises(ClusterUnavailable, match=once):
        start_apart(1e-9)
    assert [process.returncode for process in begun] == [-signal.SIGKILL] * 3


def test_a_ray_that_cannot_start_is_reported_at_once(monkeypatch: pytest.MonkeyPatch):
    def refuse(**options: object) -> None:
        raise ValueError("The requested object store memory size\nis greater")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # of the tests' own Ray
    with pytest.raises(ClusterUnavailable, match=r"Ray does not start: The requested .* size is greater"):
        start_apart(60.0)


@pytest.mark.parametrize("count", [1, 2])
def test_signals_while_ray_starts_stop_the_run(monkeypatch: pytest.MonkeyPatch, count: int):
    def start(**options: object) -> None:
        utils.set_sigterm_handler(lambda number, frame: sys.exit(number))  # as Ray does
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGTERM)

    stops: list[StopRequest] = []

    async def run() -> None:
        stops.append(StopRequest())
        stops[0].install()
        start_apart(60.0)
        await asyncio.sleep(60)

    monkeypatch.setattr(ray, "init", start)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(run())
    finally:
        for number in SIGNALS:
            signal.signal(number, before if number == signal.SIGTERM else signal.SIG_DFL)
    assert stops[0].signal is signal.SIGTERM
    assert stops[0].immediate == (count == 2)


def test_without_a_handler_that_of_ray_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "init", lambda **options: utils.set_sigterm_handler(signal.SIG_IGN))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        start_apart(60.0)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
