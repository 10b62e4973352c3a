"""Faults that are drawn, sent to processes of a run, and followed in its log."""

import itertools
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from nemorl.cluster.logs import log_path, process_of


@dataclass(frozen=True)
class Target:
    """Processes of one kind, and the run's messages about them."""

    kind: str
    group: str
    processes: int
    name: str  # in messages
    lost: str  # pattern of the message
    back: str
    log: str = "driver.log"  # or the pattern of several, with the messages

    def name_of(self, rank: int) -> str:
        return self.name.format(rank=rank)


def _supervised(kind: str, group: str, processes: int, name: str) -> Target:
    return Target(kind, group, processes, name, "{name} is lost: ", "{name} restarted and back in rotation")


# Another kind of process is one more row; its part of the run goes into `experiment`.
TARGETS = (
    _supervised("engine", "generation", 2, "generation replica {rank}"),
    _supervised("rollout worker", "rollout", 2, "rollout worker {rank}"),
    Target("policy rank", "policy", 2, "policy", "{name} lost in step ", "{name} restarted in "),
    Target("reward model", "reward_1", 1, "reward_1", "{name} lost, restarting: ", "{name} restarted in "),
    _supervised("environment", "environment", 2, "environment actor {rank}"),
    Target(
        kind="reward server",
        group="",
        processes=1,
        name="reward `digits`",
        lost=r"{name} at \S+ does not answer",
        back=r"{name} at \S+ answers again",
        log="rollout-*.log",
    ),
)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


@dataclass
class Fault:
    due: float  # seconds since the first fault could occur
    target: Target
    rank: int
    signal: signal.Signals
    at: float | None = None  # time of day; None if the process was not there
    detected: float | None = None
    back: float | None = None
    discarded: int = 0  # steps


def draw_faults(seconds: float, pause: tuple[float, float], seed: int) -> list[Fault]:
    """Every kind of process gets every signal before one of them comes again."""
    draw, due, faults = random.Random(seed), 0.0, list[Fault]()
    kinds: list[tuple[Target, signal.Signals]] = []
    while (due := due + draw.uniform(*pause)) < seconds:
        if not kinds:
            kinds = [(target, number) for target in TARGETS for number in SIGNALS]
            draw.shuffle(kinds)
        target, number = kinds.pop()
        faults.append(Fault(due, target, draw.randrange(target.processes), number))
    return faults


def states_below() -> dict[int, str]:
    """State of each living process below this one."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[process.pid] = process.status()
    return {pid: state for pid, state in found.items() if state != psutil.STATUS_ZOMBIE}


def newest_process(fault: Fault, run: Path) -> int | None:
    """Of the rank, by its log."""
    latest = process_of(log_path(run, fault.target.group, fault.rank))
    return None if latest is None else latest[0]


def strike(fault: Fault, pid: int | None) -> None:
    """Send the signal to a process, if it is there and not stopped."""
    if pid is not None and states_below().get(pid, psutil.STATUS_STOPPED) != psutil.STATUS_STOPPED:
        fault.at = time.time()
        os.kill(pid, fault.signal)


@dataclass(frozen=True)
class Event:
    """A line of a log about a member."""

    at: float
    back: bool  # else it was lost
    text: str


def events_of(logs: Path, target: Target, rank: int) -> list[Event]:
    """Those in the logs of this folder."""
    name, found = re.escape(target.name_of(rank)), []
    lines = (log.read_text(encoding="utf-8").splitlines() for log in logs.glob(target.log))
    for line in itertools.chain.from_iterable(lines):
        stamp = re.match(r"(\d+-\d+-\d+ \d+:\d+:\d+,\d+) \w+ \S+: (.*)", line)
        if stamp is None:
            continue
        at = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        for back, text in ((False, target.lost), (True, target.back)):
            if re.match(text.format(name=name), stamp[2]):
                found.append(Event(at, back, stamp[2]))
    return found


def read_times(faults: Sequence[Fault], logs: Path) -> int:
    """Fill in what the logs say of the faults; returns the number of losses without a fault."""
    unexplained = 0
    members: dict[str, list[Fault]] = {}
    for fault in faults:
        members.setdefault(fault.target.name_of(fault.rank), []).append(fault)
    for of_member in members.values():
        events = events_of(logs, of_member[0].target, of_member[0].rank)
        timeline: list[tuple[float, Fault | Event]] = [(event.at, event) for event in events]
        timeline += [(fault.at, fault) for fault in of_member if fault.at is not None]
        pending: Fault | None = None
        lost = False
        for _, event in sorted(timeline, key=lambda pair: pair[0]):
            if isinstance(event, Fault):
                # A server may be back before a call has noticed that it was lost.
                may_be_back = not event.target.group and pending is not None and pending.detected is None
                if (pending is None or may_be_back) and not lost:
                    pending = event
            elif event.back:
                if pending is not None and pending.detected is not None:
                    pending.back = event.at
                    steps = re.search(r": (\d+) completed steps are discarded", event.text)
                    pending.discarded = int(steps[1]) if steps else 0
                    pending = None
                lost = False
            elif not lost:
                lost = True
                if pending is None:
                    unexplained += 1
                else:
                    pending.detected = event.at
    return unexplained


def recovery_times(faults: Sequence[Fault], targets: Sequence[Target] = TARGETS) -> list[dict[str, Any]]:
    """A row for each kind of process and signal."""
    rows = []
    for target in targets:
        for number in SIGNALS:
            of_kind = [f for f in faults if f.target == target and f.signal == number and f.at is not None]
            detected = [f.detected - f.at for f in of_kind if f.detected is not None and f.at is not None]
            back = [f.back - f.at for f in of_kind if f.back is not None and f.at is not None]
            rows.append(
                {
                    "fault": f"{target.kind}, {number.name}",
                    "faults": len(of_kind),
                    "measured": len(back),
                    "detected_seconds": sorted(detected),
                    "back_seconds": sorted(back),
                    "steps_discarded": sorted(f.discarded for f in of_kind if f.back is not None),
                }
            )
    return rows
