"""The launchers of two nodes, as processes, with stand-ins for Ray and for the run."""

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

from nemorl.slurm.records import Ending
from tests.config.experiments import GRPO, write
from tests.plan.models import write_model

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0


@dataclass
class Launchers:
    """Two nodes of four CPUs each."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]]

    def start(self, train: str, *words: str, nodes: tuple[str, ...] = ("n1", "n2"), **variables: str) -> None:
        """Begin on these nodes; `train` is what the run does."""
        (self.folder / "train").write_text(train)
        for node in nodes:
            self.processes[node] = subprocess.Popen(
                [sys.executable, "-m", "tests.slurm.stub", "experiment.yaml", *words],
                cwd=self.folder,
                env={**_environment(self.folder, node), **variables},
                stderr=(self.folder / f"{node}.said").open("wb"),
            )

    def began(self) -> str:
        """Wait for the run to begin; its command line."""
        _until((self.folder / "began").exists)
        return (self.folder / "began").read_text()

    def ends(self, node: str) -> int:
        """Wait for a node's launcher; its exit status."""
        return self.processes[node].wait(PATIENCE_SECONDS)

    def said(self, node: str) -> str:
        """By its launcher."""
        return (self.folder / f"{node}.said").read_text()

    @property
    def start_folder(self) -> Path:
        """Of the job's first start."""
        return self.folder / "runs" / "sums" / "slurm" / "12.0"

    def ending(self) -> Ending:
        """What is on record."""
        ending = Ending.read(self.start_folder)
        assert ending is not None
        return ending

    def nothing_is_left(self) -> None:
        """No Ray, and no secret."""
        for file in self.folder.glob("*.ray"):
            _until(lambda file=file: not Path(f"/proc/{file.read_text()}").exists())
        assert not (self.start_folder / "ray_token").exists()

    def verdict(self) -> str:
        """What the batch script reads."""
        return (self.folder / "verdict").read_text()

    def ray_runs(self, node: str) -> None:
        """Wait until Ray on a node does; the run does not."""
        written = self.folder / f"{node}.ray"
        _until(lambda: written.exists() and bool(written.read_text()))


def _environment(folder: Path, node: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "NEMORL"))}
    return ours | {
        "SLURM_JOB_ID": "12",
        "SLURMD_NODENAME": node,
        "SLURM_CPUS_ON_NODE": "4",
        "NEMORL_NODES": "n1,n2",
        "NEMORL_VERDICT": str(folder / "verdict"),
        "STAND_IN": str(folder),
        "PYTHONPATH": str(ROOT),
        "TMPDIR": "/tmp",
    }


def _until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    """Nothing of them is left after a test."""
    write(tmp_path, GRPO)
    write_model(tmp_path / "models" / "arithmetic")
    started = Launchers(tmp_path, {})
    yield started
    for process in started.processes.values():
        process.kill()
        process.wait()


def test_a_run_that_is_done_ends_all_nodes_well(launchers: Launchers) -> None:
    launchers.start("ends 0", "seed=7")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (0, 0)
    assert launchers.began().split() == [
        "experiment.yaml",
        "seed=7",
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=0",
    ]
    assert launchers.ending() == Ending(0, "the run is finished", 0, 0)
    assert launchers.verdict() == "0\n"
    plan = json.loads((launchers.start_folder / "plan.json").read_text())
    assert list(plan["ports"]) == ["n1", "n2"]
    launchers.nothing_is_left()


@pytest.mark.parametrize("code", [1, 2])
def test_a_run_that_fails_or_is_refused_says_so(launchers: Launchers, code: int) -> None:
    launchers.start(f"ends {code}")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (code, 0)
    assert launchers.ending().code == code
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
    assert launchers.ending().reason == f"{why}no step is saved"
    launchers.nothing_is_left()


def test_a_signal_before_the_run_begins_ends_the_meeting(launchers: Launchers) -> None:
    launchers.start("runs", nodes=("n1",))
    _until(lambda: "waiting for 2 nodes" in launchers.said("n1"))

    launchers.processes["n1"].send_signal(signal.SIGTERM)

    assert launchers.ends("n1") == 143
    assert "the run had not begun" in launchers.ending().reason


def test_a_node_that_is_killed_is_named_and_another_start_asked_for(launchers: Launchers) -> None:
    launchers.start("runs")
    launchers.began()

    launchers.processes["n2"].kill()

    assert launchers.ends("n1") == 75
    assert launchers.ending().reason.startswith("node n2 is lost: its launcher ended or the node is down")
    launchers.nothing_is_left()  # what the killed launcher had started is gone too


def test_a_node_that_is_killed_while_ray_starts_is_named_and_another_start_asked_for(
    launchers: Launchers,
) -> None:
    (launchers.folder / "hold").touch()
    launchers.start("runs")
    launchers.ray_runs("n2")

    launchers.processes["n2"].kill()

    assert launchers.ends("n1") == 75
    assert launchers.ending().reason.startswith("node n2 is lost: its launcher ended or the node is down")
    launchers.nothing_is_left()


def test_a_head_whose_launcher_is_killed_has_asked_for_another_start(launchers: Launchers) -> None:
    launchers.start("runs")
    launchers.began()

    launchers.processes["n1"].kill()

    assert launchers.ends("n2") == 0
    assert launchers.verdict() == "75\n"
    assert launchers.ending() == Ending(75, "the launcher on the head was killed", 0, 0)


def test_a_run_that_still_saves_at_the_time_limit_is_ended_and_queued_again(launchers: Launchers) -> None:
    launchers.start("saves", HURRIED_SECONDS="0.2", WHY="out of time")
    launchers.began()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        launchers.processes["n1"].send_signal(number)
        _until(lambda number=number: f"got {number.name}" in launchers.said("n1"))

    assert (launchers.ends("n1"), launchers.ends("n2")) == (75, 0)
    assert launchers.ending().reason.startswith("stopped by SIGTERM (out of time): nemorl train ended with")
    launchers.nothing_is_left()


def test_a_node_whose_ray_ends_is_named(launchers: Launchers) -> None:
    launchers.start("runs")
    launchers.began()

    launchers.ray_runs("n2")
    os.kill(int((launchers.folder / "n2.ray").read_text()), signal.SIGKILL)

    assert (launchers.ends("n1"), launchers.ends("n2")) == (75, 1)
    assert launchers.ending().reason.startswith("node n2 is lost: Ray ended there with exit status -9")


def test_a_run_that_fails_because_a_node_hangs_is_not_blamed(launchers: Launchers) -> None:
    """The run notices first; a node that hangs keeps its connection."""
    launchers.start("ends 1 later")
    launchers.began()
    launchers.processes["n2"].send_signal(signal.SIGSTOP)
    (launchers.folder / "go").touch()

    assert launchers.ends("n1") == 75
    assert launchers.ending().reason == "node n2 is lost: does not answer"


def test_starts_that_bring_nothing_come_to_an_end(launchers: Launchers) -> None:
    folder = launchers.start_folder.parent
    for restart in range(2):
        (folder / f"12.{restart}").mkdir(parents=True)
        Ending(75, "node n2 is lost", 0, 0).write(folder / f"12.{restart}")
    launchers.start("ends 75", SLURM_RESTART_COUNT="2", NEMORL_MAX_RESTARTS="2")

    assert launchers.ends("n1") == 1
    ending = Ending.read(folder / "12.2")
    assert ending is not None
    assert "3 starts in a row brought no new checkpoint (NEMORL_MAX_RESTARTS = 2)" in ending.reason
    assert launchers.verdict() == "1\n"


def test_what_does_not_fit_is_refused_before_ray_starts(launchers: Launchers) -> None:
    """A policy rank, an engine and seven rollout workers on twice four CPUs."""
    launchers.start("runs", "cluster.rollout_workers=7")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (2, 0)
    assert "cluster.rollout_workers = 7 cpus" in launchers.said("n1")
    assert "9 CPUs are wanted, and the job has 8" in launchers.said("n1")
    assert not list(launchers.folder.glob("*.ray"))
    launchers.nothing_is_left()


def test_a_config_that_is_refused_is_told_once(launchers: Launchers) -> None:
    launchers.start("runs", "seed=-1")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (2, 2)
    assert "seed = -1" in launchers.said("n1")
    assert launchers.said("n2") == ""
    assert launchers.verdict() == "2\n"


def test_a_node_that_does_not_come_is_named(launchers: Launchers) -> None:
    launchers.start("runs", nodes=("n1",), MEETING_SECONDS="1")

    assert launchers.ends("n1") == 1
    assert "n2 did not appear in runs/sums/slurm/12.0 within 1 s, and n1 did" in launchers.said("n1")
    assert not (launchers.folder / "n1.ray").exists()


def test_a_node_that_cannot_take_part_says_why_and_is_not_waited_for(launchers: Launchers) -> None:
    launchers.start("runs", nodes=("n1",))
    launchers.start("runs", nodes=("n2",), NEMORL_INTERFACE="ib7")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (1, 1)
    assert launchers.ending().reason.startswith("n2: NEMORL_INTERFACE = ib7: ")


def test_a_head_that_cannot_begin_lets_the_others_go(launchers: Launchers) -> None:
    launchers.start("runs", NEMORL_MAX_RESTARTS="many")

    assert (launchers.ends("n1"), launchers.ends("n2")) == (2, 0)
    assert launchers.verdict() == "2\n"
    assert "NEMORL_MAX_RESTARTS = many" in launchers.said("n1")
