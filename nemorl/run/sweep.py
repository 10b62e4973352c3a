"""The runs of a sweep as processes of this machine, several at a time where cores, memory and GPUs suffice.

    points ─▶ PlannedRun (config file, needs) ─▶ Resources.take ─▶ `nemorl train` ─▶ state, results

Each run is pinned to cores of its own, sees only its GPUs and starts its own Ray. The state of a run is in
its folder: if the driver is killed, its runs stop as after SIGTERM, and a resumed sweep waits for those that
still save.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from nemorl.config.experiment import Experiment
from nemorl.errors import UsageError
from nemorl.observe.run_folder import RunPaths, holder
from nemorl.observe.sweep import Outcome, State, state_of, write_states
from nemorl.plan.machine import Machine
from nemorl.plan.memory import ProcessMemory
from nemorl.slurm.ray_node import die_with_parent

LOG = "train.log"  # in the run folder: output of `nemorl train`
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
HELD_SECONDS = 900.0  # for a run of an earlier driver to save and end
_POLL_SECONDS = 0.5
_LAST_BYTES = 4096
_STOPPED, _WELL = 75, 0  # exit statuses of `nemorl train`


@dataclass(frozen=True)
class Needs:
    """What a run takes of this machine."""

    processes: int  # that compute; each takes a core
    memory_bytes: int
    gpus: int = 0
    ports: frozenset[int] = frozenset()  # on which it listens


@dataclass(frozen=True)
class Share:
    cores: frozenset[int]
    gpus: tuple[str, ...]
    needs: Needs


def needs_of(experiment: Experiment, processes: Sequence[ProcessMemory]) -> Needs:
    gpus = experiment.cluster.gpus_per_node
    memory = sum(p.count * (p.total - p.on_device + p.runtime if gpus else p.total) for p in processes)
    endpoint, metrics = experiment.generation.endpoint, experiment.logger.prometheus
    ports = {listening.port for listening in (endpoint, metrics) if listening is not None} - {0}
    return Needs(sum(p.count for p in processes if p.group != "driver"), memory, gpus, frozenset(ports))


class Resources:
    """Cores, memory, GPUs and ports of this machine, from which runs take a share."""

    def __init__(
        self,
        machine: Machine,
        needs: Sequence[Needs],
        *,
        max_concurrent: int | None = None,
        oversubscribe: bool = False,
        cores: frozenset[int] | None = None,
        gpus: Sequence[str] | None = None,
    ) -> None:
        """`oversubscribe`: as many runs as `max_concurrent`, whatever the number of cores."""
        self._cores = set(cores if cores is not None else range(machine.cores))
        self._gpus = list(gpus if gpus is not None else map(str, range(len(machine.gpus))))
        self._memory, self._ports = machine.memory_bytes, set[int]()
        self._oversubscribe, self._running = oversubscribe, 0
        self.most = self._most_at_once(needs, max_concurrent)
        self._usual_cores = len(self._cores) // self.most

    def _most_at_once(self, needs: Sequence[Needs], max_concurrent: int | None) -> int:
        """How many of the smallest runs have room at the same time; at least one."""
        rooms = [len(needs), max_concurrent or len(needs)]
        for have, least in (
            (len(self._cores), 0 if self._oversubscribe else min(need.processes for need in needs)),
            (self._memory, min(need.memory_bytes for need in needs)),
            (len(self._gpus), min(need.gpus for need in needs)),
        ):
            rooms += [have // least] if least else []
        return max(1, min(rooms))

    def take(self, needs: Needs) -> Share | None:
        """A share for a run, or None until others have ended. A run that is alone always starts."""
        if self._running >= self.most:
            return None
        count = min(len(self._cores), max(needs.processes, self._usual_cores))
        fits = (
            needs.memory_bytes <= self._memory
            and needs.gpus <= len(self._gpus)
            and not needs.ports & self._ports
            and (self._oversubscribe or needs.processes <= len(self._cores))
        )
        if self._running and not fits:
            return None
        cores = frozenset(sorted(self._cores)[:count])
        share = Share(cores, tuple(self._gpus[: needs.gpus]), needs)
        if not self._oversubscribe:
            self._cores -= cores
        del self._gpus[: needs.gpus]
        self._memory -= needs.memory_bytes
        self._ports |= needs.ports
        self._running += 1
        return share

    def give_back(self, share: Share) -> None:
        self._cores |= share.cores
        self._gpus += share.gpus
        self._memory += share.needs.memory_bytes
        self._ports -= share.needs.ports
        self._running -= 1


class Process(Protocol):
    """A `nemorl train` that was started; `subprocess.Popen` is one."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...


@dataclass
class PlannedRun:
    name: str
    config: Path  # experiment file of this run
    run_dir: Path
    needs: Needs
    num_steps: int
    outcome: Outcome = field(default_factory=lambda: Outcome(State.WAITING))
    process: Process | None = None
    share: Share | None = None
    began: float = 0.0  # monotonic seconds of this start


def start_process(run: PlannedRun, share: Share) -> Process:
    """Start `nemorl train` in a process group of its own; it stops in order when this process ends."""
    words = [sys.executable, "-m", "nemorl.cli", "train", str(run.config)]
    words += ["--resume"] * RunPaths(run.run_dir).has_steps
    environment = {**os.environ}
    if share.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    run.run_dir.mkdir(parents=True, exist_ok=True)

    def prepare_child() -> None:
        die_with_parent(signal.SIGTERM)
        os.sched_setaffinity(0, share.cores)

    with (run.run_dir / LOG).open("ab") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,
            preexec_fn=prepare_child,
        )


class SweepDriver:
    """Starts runs in their order as resources allow, until all have ended or a signal comes."""

    def __init__(
        self,
        sweep: Path,
        runs: Sequence[PlannedRun],
        resources: Resources,
        start: Callable[[PlannedRun, Share], Process] = start_process,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        if "RAY_ADDRESS" in os.environ:
            fix = "unset it, or run the sweep as a Slurm job (nemorl slurm submit --sweep)"
            raise UsageError(f"RAY_ADDRESS is set, and each run of a sweep starts its own Ray: {fix}")
        self.runs, self._sweep, self._resources = list(runs), sweep, resources
        self._start, self._poll_seconds = start, poll_seconds
        self.signals: list[int] = []  # that came; the first one stops the runs
        self._sent = 0
        self._began = time.monotonic()

    def run(self, on_change: Callable[[PlannedRun], None], on_poll: Callable[[], None]) -> None:
        """`on_change` is called when the state of a run changes, `on_poll` regularly."""
        handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            while self._advance(on_change):
                on_poll()
                time.sleep(self._poll_seconds)
        finally:
            for run in self.runs:  # after an error of ours
                if run.process is not None:
                    run.process.send_signal(signal.SIGTERM)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _advance(self, on_change: Callable[[PlannedRun], None]) -> bool:
        """Take note of ended runs, start others, pass signals on; False once nothing is left to do."""
        before = {run.name: run.outcome for run in self.runs}
        for run in self.runs:
            if run.process is not None and (status := run.process.poll()) is not None:
                assert run.share is not None
                self._resources.give_back(run.share)
                run.process, run.outcome = None, ended(run.run_dir, status)
        while self._sent < len(self.signals):
            self._sent += 1
            for run in self.runs:
                if run.process is not None:
                    with suppress(ProcessLookupError):
                        run.process.send_signal(signal.SIGTERM)
        if not self.signals:
            self._start_waiting()
        changed = [run for run in self.runs if run.outcome != before[run.name]]
        if changed:
            write_states(self._sweep, {run.name: run.outcome for run in self.runs})
        for run in changed:
            on_change(run)
        active = any(run.process is not None for run in self.runs)
        return active or (not self.signals and any(run.outcome.state == State.WAITING for run in self.runs))

    def _start_waiting(self) -> None:
        for run in self.runs:
            if run.outcome.state != State.WAITING:
                continue
            if (other := holder(run.run_dir)) is not None:  # started by a driver that was killed
                if time.monotonic() - self._began > HELD_SECONDS:
                    reason = f"process {other[0]} on {other[1]} still writes {run.run_dir}; end it"
                    run.outcome = Outcome(State.FAILED, reason)
                continue
            share = self._resources.take(run.needs)
            if share is None:
                return  # in their order, so that a large run gets its turn
            run.share, run.began = share, time.monotonic()
            run.process, run.outcome = self._start(run, share), Outcome(State.RUNNING)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)


def ended(run_dir: Path, status: int) -> Outcome:
    """The outcome of a run by its exit status, with the reason of a failure."""
    if status == _WELL:
        return Outcome(State.COMPLETE)
    if status == _STOPPED:
        return Outcome(State.STOPPED)
    if status < 0:
        return Outcome(State.FAILED, f"killed by {signal.Signals(-status).name}")
    reason = state_of(run_dir).reason or f"exit status {status}: {_last_words(run_dir / LOG)}"
    return Outcome(State.FAILED, reason)


def _last_words(log: Path) -> str:
    """The end of a log in one line."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return " ".join([line for line in lines if line][-3:])
    return "no output"


def to_continue(run_dir: Path, recorded: Outcome | None) -> Outcome:
    """The state from which a resumed sweep continues: only complete runs are kept."""
    outcome = state_of(run_dir, recorded)
    return outcome if outcome.state == State.COMPLETE else Outcome(State.WAITING)
