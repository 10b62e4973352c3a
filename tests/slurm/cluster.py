"""A real Slurm of two nodes on one machine: munged, slurmctld and a slurmd for each node.

It lives in a folder of its own: configuration, key, sockets, state and logs. Nothing of a Slurm that the
machine may have is read or touched, and everything that was started ends with it, also where the process that
started it is killed. Works as root without systemd.

    with SlurmCluster() as cluster:
        cluster.run("sbatch", "--wrap", "hostname")

By hand, and for a shell:

    python -m tests.slurm.cluster start DIR --cpus 2      # prints the SLURM_CONF to export
    python -m tests.slurm.cluster kill DIR n2             # SIGKILL to that node's slurmd
    python -m tests.slurm.cluster revive DIR              # starts the daemons again that have ended
    python -m tests.slurm.cluster stop DIR

Partitions: `normal` (the default; a pre-empted job gets SIGTERM, then after GraceTime SIGKILL and requeue),
`scavenge` (the same without a GraceTime: requeued at once, SIGKILL after KillWait) and `urgent`, whose jobs
pre-empt those of the other two. A job leaves room for others unless it asks for `--exclusive`.
Features: n1 has `n1,domain0`, n2 `n2,domain1`.

What Slurm does, as seen here (22.05):
- Pre-emption with a GraceTime sends SIGTERM to the steps, not to the batch script. A job that ends
  within GraceTime is FAILED or COMPLETED and is *not* requeued: Slurm requeues only what it had to kill.
  While it runs, `scontrol show job` distinguishes it from a cancelled one by `PreemptTime=<a time>`.
- scancel sends SIGTERM to steps and script at once, and the job's state is CANCELLED from then on.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.slurm.configuration import CONFIGURATION, LONGEST_FOLDER, NODES, environment, missing

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 30.0
COMMAND_SECONDS = 60.0


class ClusterError(RuntimeError):
    """The cluster does not start, or was used wrongly; the sentence says why."""


class SlurmCluster:
    """Two nodes, `n1` and `n2`, while the `with` block runs."""

    def __init__(self, *, cpus: int = 2, gpus: int = 0) -> None:
        """`cpus` and `gpus` of each node; the GPUs are counted by Slurm and are not there."""
        self.cpus, self.gpus = cpus, gpus
        self.folder = Path()  # set at the start

    def __enter__(self) -> Self:
        """Start. Raises `ClusterError`."""
        parent = Path(tempfile.gettempdir())
        parent = parent if len(str(parent)) < LONGEST_FOLDER // 2 else Path("/tmp")
        self.folder = Path(tempfile.mkdtemp(prefix="nemorl-slurm-", dir=parent))
        try:
            self._keeper = start_keeper(self.folder, cpus=self.cpus, gpus=self.gpus, stdin=subprocess.PIPE)
        except ClusterError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything, jobs included; the keeper removes the folder."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(STOP_SECONDS)

    @property
    def environment(self) -> dict[str, str]:
        """For processes that use this cluster."""
        return environment(self.folder)

    @property
    def keeper(self) -> int:
        """The process below which all others of the cluster are."""
        return self._keeper.pid

    def run(self, *command: str, check: bool = True) -> str:
        """What one of Slurm's commands says. Raises `ClusterError` with its complaint where it fails."""
        for _ in range(3):
            answer = subprocess.run(
                command,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                cwd=self.folder,
            )
            if answer.returncode != -signal.SIGPIPE:  # the controller of a busy machine closed the connection
                break
        if check and answer.returncode != 0:
            raise ClusterError(f"{' '.join(command)} ended with {answer.returncode}: {answer.stderr.strip()}")
        return answer.stdout

    def kill_daemon(self, node: str) -> None:
        """SIGKILL to the slurmd of `node`; the processes of its jobs continue until Slurm ends them."""
        kill_daemon(self.folder, node)

    def revive(self) -> None:
        """Start the daemons again that have ended."""
        self._keeper.send_signal(signal.SIGHUP)


def start_keeper(folder: Path, *, cpus: int, gpus: int, stdin: int) -> subprocess.Popen[str]:
    """A keeper whose cluster takes jobs. Raises `ClusterError`."""
    absent = missing()
    if absent:
        raise ClusterError(f"Not installed: {', '.join(absent)}. On Debian: apt-get install slurm-wlm munge")
    if len(str(folder)) > LONGEST_FOLDER:
        raise ClusterError(f"The path {folder} is longer than {LONGEST_FOLDER} characters; sockets need less")
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.keeper", str(folder), "--cpus", str(cpus), "--gpus", str(gpus)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        stderr=(folder / "keeper.err").open("ab"),  # not the pipe of a caller who waits for its end
        start_new_session=True,  # a Ctrl-C is for the tests, which then end the cluster
    )
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    answer = json.loads(line) if line else {"error": "the keeper ended without a word"}
    if "error" in answer:
        keeper.wait(STOP_SECONDS)
        raise ClusterError(f"Slurm does not start: {answer['error']}")
    return keeper


def kill_daemon(folder: Path, node: str) -> None:
    """SIGKILL to the slurmd of `node`."""
    if node not in NODES:
        raise ClusterError(f"There is no node {node}; there are {', '.join(NODES)}")
    os.kill(int((folder / f"slurmd.{node}.pid").read_text()), signal.SIGKILL)


def main() -> int:
    """`start`, `stop`, `kill` and `revive` by hand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("start", "stop", "kill", "revive"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("node", nargs="?", choices=NODES, default="n2", help="whose slurmd to kill")
    parser.add_argument("--cpus", type=int, default=2, help="of each node")
    parser.add_argument("--gpus", type=int, default=0, help="of each node; counted, not there")
    arguments = parser.parse_args()
    try:
        _act(arguments)
    except ClusterError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _act(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder.absolute()
    if arguments.action == "start":
        return _start(folder, cpus=arguments.cpus, gpus=arguments.gpus)
    keeper = _keeper(folder)
    if keeper is None:
        raise ClusterError(f"No cluster runs in {folder}")
    if arguments.action == "kill":
        kill_daemon(folder, arguments.node)
    elif arguments.action == "revive":
        os.kill(keeper, signal.SIGHUP)
    else:
        os.kill(keeper, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while _keeper(folder) is not None:
            if time.monotonic() > deadline:
                raise ClusterError(f"The cluster in {folder} does not end; its keeper is process {keeper}")
            time.sleep(0.1)


def _start(folder: Path, *, cpus: int, gpus: int) -> None:
    if _keeper(folder) is not None:
        raise ClusterError(f"A cluster runs in {folder} already; stop it, or take another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / CONFIGURATION).exists():
        raise ClusterError(f"{folder} is not empty and no cluster's; take another folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    keeper = start_keeper(folder, cpus=cpus, gpus=gpus, stdin=subprocess.DEVNULL)
    (folder / "keeper.pid").write_text(str(keeper.pid))
    print(f"export SLURM_CONF={folder / CONFIGURATION}")  # noqa: T201


def _keeper(folder: Path) -> int | None:
    """The process that keeps the cluster in `folder`, if one runs."""
    try:
        process = int((folder / "keeper.pid").read_text())
        words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except (OSError, ValueError):
        return None
    return process if "tests.slurm.keeper" in words and str(folder) in words else None


if __name__ == "__main__":
    sys.exit(main())
