"""The launchers of two nodes, as processes, with stubs for Ray and for the run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemorl.slurm.start import ExitRecord
from tests.config.experiments import GRPO, write
from tests.plan.models import write_model

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 240.0  # of a busy machine


@dataclass
class Launchers:
    """Two nodes of four CPUs each."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]]

    def start(self, train: str, *words: str, nodes: tuple[str, ...] = ("n1", "n2"), **variables: str) -> None:
        """Start on these nodes; `train` is what the run does."""
        (self.folder / "train").write_text(train)
        for node in nodes:
            self.processes[node] = subprocess.Popen(
                [sys.executable, "-m", "tests.slurm.stub", "experiment.yaml", *words],
                cwd=self.folder,
                env={**_environment(self.folder, node), **variables},
                stderr=(self.folder / f"{node}.output").open("wb"),
            )

    def began(self) -> str:
        """Wait for the run to begin; return its command line."""
        _until((self.folder / "began").exists)
        return (self.folder / "began").read_text()

    def ends(self, node: str) -> int:
        """Wait for a node's launcher; return its exit status."""
        return self.processes[node].wait(TIMEOUT_SECONDS)

    def output(self, node: str) -> str:
        """Output of its launcher."""
        return (self.folder / f"{node}.output").read_text()

    @property
    def start_folder(self) -> Path:
        """Folder of the job's first start."""
        return self.folder / "runs" / "sums" / "slurm" / "12.0"

    def exit_record(self) -> ExitRecord:
        """The record of the first start."""
        record = ExitRecord.read(self.start_folder)
        assert record is not None
        return record

    def nothing_is_left(self) -> None:
        """Check that no Ray and no token is left."""
        for file in self.folder.glob("*.ray"):
            _until(lambda file=file: not Path(f"/proc/{file.read_text()}").exists())
        assert not (self.start_folder / "ray_token").exists()

    def status(self) -> str:
        """What the batch script reads."""
        return (self.folder / "status").read_text()

    def ray_runs(self, node: str) -> None:
        """Wait until Ray runs on a node."""
        written = self.folder / f"{node}.ray"
        _until(lambda: written.exists() and bool(written.read_text()))


def _environment(folder: Path, node: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "NEMORL"))}
    return ours | {
        "NEMORL_JOB": "12",
        "SLURMD_NODENAME": node,
        "SLURM_CPUS_ON_NODE": "4",
        "NEMORL_NODES": "n1,n2",
        "NEMORL_STATUS_FILE": str(folder / "status"),
        "STUB": str(folder),
        "PYTHONPATH": str(ROOT),
        "TMPDIR": "/tmp",
    }


def _until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    """Two nodes; nothing of them is left after a test."""
    write(tmp_path, GRPO)
    write_model(tmp_path / "models" / "arithmetic")
    started = Launchers(tmp_path, {})
    yield started
    for process in started.processes.values():
        process.kill()
        process.wait()


def test_a_complete_run_ends_all_nodes_with_success(launchers: Launchers) -> None:
    launchers.start("ends 0", "seed=7")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (0, 0)
    assert launchers.began().split() == [
        "experiment.yaml",
        "seed=7",
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=0",
    ]
    assert launchers.exit_record() == ExitRecord(0, "the run is complete", 0, 0)
    assert launchers.status() == "0\n"
    plan = json.loads((launchers.start_folder / "plan.json").read_text())
    assert list(plan["ports"]) == ["n1", "n2"]
    launchers.nothing_is_left()


@pytest.mark.parametrize("code", [1, 2])
def test_a_run_that_fails_or_is_refused_keeps_its_exit_status(launchers: Launchers, code: int) -> None:
    launchers.start(f"ends {code}")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (code, 0)
    assert launchers.exit_record().code == code
    launchers.nothing_is_left()


@pytest.mark.parametrize(
    ("number", "code", "why"),
    [
        (signal.SIGUSR1, 75, "stopped before the time limit: "),
        (signal.SIGTERM, 143, "stopped by SIGTERM (node n2 (down*: Not responding) is lost): "),
    ],
)
def test_a_signal_stops_the_run_in_order(
    launchers: Launchers, number: signal.Signals, code: int, why: str
) -> None:
    """Slurm sends it to all nodes; only one of the two asks for another start."""
    launchers.start("runs", WHY="node n2 (down*: Not responding) is lost")
    launchers.began()

    for process in launchers.processes.values():
        process.send_signal(number)

    assert (launchers.ends("n1"), launchers.ends("n2")) == (code, 0)
    assert launchers.exit_record().reason == f"{why}no checkpoint"
    launchers.nothing_is_left()


def test_a_run_that_was_cancelled_has_that_as_its_reason(launchers: Launchers) -> None:
    """`nemorl slurm cancel` signals the launchers first, when Slurm does not know of it."""
    launchers.start("runs", WHY="signal sent by a user")
    launchers.began()

    (launchers.start_folder / "cancelled").touch()
    launchers.processes["n1"].send_signal(signal.SIGTERM)

    assert launchers.ends("n1") == 143
    reason = launchers.exit_record().reason
    assert reason == "stopped by SIGTERM (cancelled with `nemorl slurm cancel`): no checkpoint"


def test_a_signal_before_the_run_begins_ends_the_rendezvous(launchers: Launchers) -> None:
    launchers.start("runs", nodes=("n1",))
    _until(lambda: "waiting for 2 nodes" in launchers.output("n1"))

    launchers.processes["n1"].send_signal(signal.SIGTERM)

    assert launchers.ends("n1") == 143
    assert "the run had not begun" in launchers.exit_record().reason


def test_a_node_that_is_killed_is_named_and_the_job_requeued(launchers: Launchers) -> None:
    launchers.start("runs")
    launchers.began()

    launchers.processes["n2"].kill()

    assert launchers.ends("n1") == 75
    assert launchers.exit_record().reason.startswith(
        "node n2 is lost: its launcher ended or the node is down"
    )
    launchers.nothing_is_left()  # what the killed launcher had started is gone too


def test_a_node_that_is_killed_while_ray_starts_is_named_and_the_job_requeued(
    launchers: Launchers,
) -> None:
    (launchers.folder / "hold").touch()
    launchers.start("runs")
    launchers.ray_runs("n2")

    launchers.processes["n2"].kill()

    assert launchers.ends("n1") == 75
    assert launchers.exit_record().reason.startswith(
        "node n2 is lost: its launcher ended or the node is down"
    )
    launchers.nothing_is_left()


def test_a_head_whose_launcher_is_killed_has_requested_a_requeue(launchers: Launchers) -> None:
    launchers.start("runs")
    launchers.began()

    launchers.processes["n1"].kill()

    assert launchers.ends("n2") == 0
    assert launchers.status() == "75\n"
    assert launchers.exit_record() == ExitRecord(75, "the launcher on the head was killed", 0, 0)


def test_a_run_that_still_saves_at_the_time_limit_is_killed_and_requeued(launchers: Launchers) -> None:
    launchers.start("saves", URGENT_STOP_SECONDS="0.2", WHY="time limit")
    launchers.began()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        launchers.processes["n1"].send_signal(number)
        _until(lambda number=number: f"received {number.name}" in launchers.output("n1"))

    assert (launchers.ends("n1"), launchers.ends("n2")) == (75, 0)
    assert launchers.exit_record().reason.startswith(
        "stopped by SIGTERM (time limit): nemorl train failed with"
    )
    launchers.nothing_is_left()


def test_a_node_whose_ray_ends_is_named(launchers: Launchers) -> None:
    launchers.start("runs")
    launchers.began()

    launchers.ray_runs("n2")
    os.kill(int((launchers.folder / "n2.ray").read_text()), signal.SIGKILL)

    assert (launchers.ends("n1"), launchers.ends("n2")) == (75, 1)
    assert launchers.exit_record().reason.startswith("node n2 is lost: Ray ended there with exit status -9")


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_run_that_fails_before_the_end_of_ray_is_noticed_is_requeued(
    launchers: Launchers, node: str
) -> None:
    """`ray start --block` looks after its processes once a second."""
    launchers.start("ends 1 later", RAY_GRACE_SECONDS="60")
    launchers.began()
    launchers.ray_runs(node)
    ray = int((launchers.folder / f"{node}.ray").read_text())

    (launchers.folder / "go").touch()
    time.sleep(0.4)
    os.kill(ray, signal.SIGKILL)

    assert launchers.ends("n1") == 75
    assert launchers.exit_record().reason.startswith(f"node {node} is lost: Ray ended there")


def test_a_run_that_fails_because_a_node_hangs_is_requeued(launchers: Launchers) -> None:
    """The run notices first; a node that hangs keeps its connection."""
    launchers.start("ends 1 later", PONG_SECONDS="1")
    launchers.began()
    launchers.processes["n2"].send_signal(signal.SIGSTOP)
    (launchers.folder / "go").touch()

    assert launchers.ends("n1") == 75
    assert launchers.exit_record().reason == "node n2 is lost: it does not answer"


def test_restarts_without_progress_are_bounded(launchers: Launchers) -> None:
    folder = launchers.start_folder.parent
    for restart in range(2):
        (folder / f"12.{restart}").mkdir(parents=True)
        ExitRecord(75, "node n2 is lost", 0, 0).write(folder / f"12.{restart}")
    launchers.start("ends 75", SLURM_RESTART_COUNT="2", NEMORL_MAX_RESTARTS="2")

    assert launchers.ends("n1") == 1
    record = ExitRecord.read(folder / "12.2")
    assert record is not None
    assert "3 consecutive starts wrote no new checkpoint (NEMORL_MAX_RESTARTS = 2)" in record.reason
    assert launchers.status() == "1\n"


def test_an_experiment_that_does_not_fit_is_refused_before_ray_starts(launchers: Launchers) -> None:
    """A policy rank, an engine and seven rollout workers on twice four CPUs."""
    launchers.start("runs", "cluster.rollout_workers=7")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (2, 0)
    assert "cluster.rollout_workers = 7  (command line)" in launchers.output("n1")
    assert "the run needs 9 CPUs (policy 1, generation 1, rollout 7), and the job has 8" in launchers.output(
        "n1"
    )
    assert not list(launchers.folder.glob("*.ray"))
    launchers.nothing_is_left()


def test_an_invalid_config_is_reported_once(launchers: Launchers) -> None:
    launchers.start("runs", "seed=-1")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (2, 2)
    assert "seed = -1" in launchers.output("n1")
    assert launchers.output("n2") == ""
    assert launchers.status() == "2\n"


def test_a_missing_node_is_named(launchers: Launchers) -> None:
    launchers.start("runs", nodes=("n1",), RENDEZVOUS_SECONDS="1")

    assert launchers.ends("n1") == 1
    assert "n2 did not appear in runs/sums/slurm/12.0 within 1 s (n1 did)" in launchers.output("n1")
    assert not (launchers.folder / "n1.ray").exists()


def test_a_node_that_cannot_take_part_is_not_waited_for(launchers: Launchers) -> None:
    launchers.start("runs", nodes=("n1",))
    launchers.start("runs", nodes=("n2",), NEMORL_INTERFACE="ib7")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (1, 1)
    assert launchers.exit_record().reason.startswith("n2: NEMORL_INTERFACE = ib7: ")


def test_a_head_that_cannot_start_ends_the_others(launchers: Launchers) -> None:
    launchers.start("runs", NEMORL_MAX_RESTARTS="many")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (2, 0)
    assert launchers.status() == "2\n"
    assert "NEMORL_MAX_RESTARTS = many" in launchers.output("n1")
