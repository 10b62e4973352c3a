"""The process that keeps a test cluster: it starts Slurm's daemons, and ends all that came of them.

It adopts what its descendants leave behind (a job's steps have no parent by design), so that at its
end every process of the cluster is below it in the tree, and none outside the cluster is.
"""

import argparse
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.slurm.configuration import NODES, Daemons, write_configuration

PR_SET_CHILD_SUBREAPER = 36
READY_SECONDS = 40.0
END_SECONDS = 5.0


def main() -> int:
    """`python -m tests.slurm.keeper DIR`: keep a cluster there until SIGTERM, or until standard input ends.

    In the second case it removes the folder, since its owner may be gone. Prints one line of
    JSON, `{"ready": true}` or `{"error": sentence}`. SIGHUP starts daemons again that have ended.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    arguments = parser.parse_args()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = Keeper(write_configuration(arguments.folder, cpus=arguments.cpus, gpus=arguments.gpus))
    try:
        answer = keeper.start()
        print(json.dumps({"error": answer} if answer else {"ready": True}), flush=True)  # noqa: T201
        alone = answer is None and keeper.wait()
    finally:
        keeper.end()
    if alone:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    return 0


class Keeper:
    """The daemons of one cluster and everything below them."""

    def __init__(self, daemons: Daemons) -> None:
        self.daemons = daemons
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._wakeup, self._written = os.pipe()
        os.set_blocking(self._written, False)
        self._asked: set[int] = set()
        signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda received, _: self._asked.add(received))

    def start(self) -> str | None:
        """Start all and wait until both nodes take jobs; the sentence that says why they do not, if so."""
        for name in self.daemons.commands:
            self._launch(name)
            if name == "munged" and not _within(READY_SECONDS, self.daemons.munge_socket.is_socket):
                return self._failed("munged does not listen")
        if not _within(READY_SECONDS, self._idle):
            return self._failed("the nodes do not become idle")
        return None

    def wait(self) -> bool:
        """Until SIGTERM, SIGINT or the end of standard input; whether it was the last."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(0, select.POLLHUP)
        while not self._asked & {signal.SIGTERM, signal.SIGINT}:
            self._reap()
            if signal.SIGHUP in self._asked:
                self._asked.discard(signal.SIGHUP)
                self._revive()
            for descriptor, event in poll.poll():
                if descriptor == 0 and event & (select.POLLHUP | select.POLLERR):
                    return True
                if descriptor == self._wakeup:
                    os.read(self._wakeup, 4096)
        return False

    def end(self) -> None:
        """End the daemons in order, then whatever else descends from here, jobs included."""
        for name in reversed(self.daemons.commands):
            if name in self.running:
                self.running[name].terminate()
        _within(END_SECONDS, lambda: all(p.poll() is not None for p in self.running.values()))
        _within(END_SECONDS, self._none_left)

    def _none_left(self) -> bool:
        left = descendants(os.getpid())
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._reap()
        return not left

    def _revive(self) -> None:
        for name in self.daemons.commands:
            if self.running[name].poll() is not None:
                self._launch(name)

    def _launch(self, name: str) -> None:
        with (self.daemons.folder / "log" / f"{name}.out").open("ab") as output:
            self.running[name] = subprocess.Popen(
                self.daemons.commands[name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.daemons.environment,
                cwd=self.daemons.folder,
                start_new_session=True,
            )

    def _reap(self) -> None:
        """Collect the adopted that have ended; the daemons are left to `Popen`."""
        ours = {p.pid for p in self.running.values()}
        for process in children().get(os.getpid(), []):
            if process not in ours:
                with suppress(ChildProcessError):
                    os.waitpid(process, os.WNOHANG)
        for daemon in self.running.values():
            daemon.poll()

    def _idle(self) -> bool:
        command = [self.daemons.client("sinfo"), "-h", "-N", "-p", "normal", "-o", "%t"]
        answer = subprocess.run(command, env=self.daemons.environment, capture_output=True, text=True)
        return answer.stdout.split() == ["idle"] * len(NODES)

    def _failed(self, what: str) -> str:
        ended = [name for name, process in self.running.items() if process.poll() is not None]
        logs = [self.daemons.folder / "log" / f"{name}.out" for name in ended or self.running]
        return "; ".join([f"{what} within {READY_SECONDS:.0f} s", *map(last_words, logs)])


def last_words(log: Path) -> str:
    """The last lines of a log, on one line."""
    return f"{log.name}: {' / '.join(log.read_text(errors='replace').splitlines()[-3:])}"


def children() -> dict[int, list[int]]:
    """The process ids below each process of this machine."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                below.setdefault(parent, []).append(int(entry.name))
    return below


def descendants(process: int) -> list[int]:
    """All process ids below `process`, parents before children."""
    below, found = children(), []
    queue = [process]
    while queue:
        queue = [child for parent in queue for child in below.get(parent, [])]
        found += queue
    return found


def _within(seconds: float, reached: Callable[[], bool]) -> bool:
    """Whether `reached()` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


if __name__ == "__main__":
    sys.exit(main())
