"""What a process is doing: its own report, and the state that Linux reports of one that does not answer."""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_FRAMES = 40  # of a stack, the innermost ones
MAX_COLLECTIVES = 20  # of one process
PROC = Path("/proc")


@dataclass(frozen=True)
class Call:
    method: str
    seconds: float  # since it was received
    place: str = ""  # `file:line in function`; empty for a coroutine, or while it waits for its turn

    def __str__(self) -> str:
        return f"in {self.method} for {self.seconds:.1f} s" + (f", at {self.place}" if self.place else "")


@dataclass(frozen=True)
class Collective:
    """An operation between ranks that has not completed, from torch's flight recorder."""

    operation: str  # such as `all_reduce`
    group: str  # of ranks
    number: int  # of the operation within its group; all ranks of the group count the same
    ranks: tuple[int, ...] = ()  # of the group
    seconds: float | None = None  # since it began

    def __str__(self) -> str:
        ranks = f" of ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        since = "" if self.seconds is None else f" for {self.seconds:.1f} s"
        return f"{self.operation} {self.number}{ranks}{since}"


@dataclass(frozen=True)
class ServiceCalls:
    """Calls of a service outside of the run's processes, or of environments, that wait for an answer."""

    service: str
    number: int
    seconds: float  # in which none of them has been answered

    def __str__(self) -> str:
        calls = f"{self.number} call waits" if self.number == 1 else f"{self.number} calls wait"
        return f"{self.service} has not answered for {self.seconds:.0f} s; {calls}"


@dataclass(frozen=True)
class Activity:
    """A process by its own report."""

    calls: tuple[Call, ...] = ()  # that run or wait for their turn, the oldest first
    finished: str = ""  # the method that ended last
    idle_seconds: float = 0.0  # since it ended, or since the process began
    collectives: tuple[Collective, ...] = ()
    queues: Mapping[str, float] = field(default_factory=dict)  # depths, as the target names them
    services: tuple[ServiceCalls, ...] = ()
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # lines by thread, innermost last

    def __str__(self) -> str:
        doing = "; ".join(map(str, self.calls)) or "idle"
        return f"{doing}; waits in {self.collectives[0]}" if self.collectives else doing


@dataclass(frozen=True)
class ProcessState:
    """A process as Linux sees it, on this machine."""

    code: str  # `R`, `S`, `D`, `T`, `Z`; empty: there is no such process
    waits_in: str = ""  # function of the kernel
    memory_bytes: int = 0

    @property
    def is_stopped(self) -> bool:
        return self.code in ("T", "t")

    def __str__(self) -> str:
        names = {"": "gone", "Z": "gone", "D": "in a call of the kernel that cannot be interrupted"}
        names |= dict.fromkeys("Tt", "stopped")
        name = names.get(self.code, "running" if self.code == "R" else "waiting")
        details = [f"state {self.code}"] * bool(self.code) + [f"in {self.waits_in}"] * bool(self.waits_in)
        return f"{name} ({', '.join(details)})" if details else name


@dataclass(frozen=True)
class ProcessReport:
    """A worker by its own report, or without one as it looks from outside."""

    group: str
    rank: int
    log: str
    pid: int | None = None
    host: str = ""
    activity: Activity | None = None  # None: it did not answer
    state: ProcessState | None = None  # None: unknown, as on another machine
    error: str = ""  # why there is no answer, if Ray reports it

    @property
    def name(self) -> str:
        return f"{self.group} rank {self.rank}" + (f" (process {self.pid})" if self.pid else "")

    def __str__(self) -> str:
        if self.activity is not None:
            return f"{self.activity} (stacks in {self.log})"
        if self.error:
            return self.error
        if self.state is None or self.state.code in ("R", "S"):
            return "does not respond; its process is stopped or holds the interpreter's lock"
        return f"does not respond; its process {self.pid} is {self.state}"


def process_state(pid: int) -> ProcessState:
    try:
        status = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ProcessState("")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    waits_in = ""
    with suppress(OSError):  # not all systems show it
        waits_in = (PROC / str(pid) / "wchan").read_text(encoding="utf-8").strip("0\n")
    kilobytes = fields.get("VmRSS", "0").split()[0]
    return ProcessState(fields.get("State", "?")[:1], waits_in, int(kilobytes) * 1024)


def end_stopped(pids: Iterable[int]) -> None:
    """End those processes of Ray that are stopped.

    Ray leaves a process that SIGSTOP reaches between its answer to `ray.kill` and its exit as it is, with the
    resources that its successor waits for.
    """
    for pid in pids:
        with suppress(OSError):  # it has ended
            is_of_ray = (PROC / str(pid) / "cmdline").read_bytes().startswith((b"ray::", b"nemorl "))
            if is_of_ray and process_state(pid).is_stopped:
                logger.warning("process %d was stopped while it ended; it is killed", pid)
                os.kill(pid, signal.SIGKILL)


def place_of(thread: str) -> str:
    """Where a thread of this process is; empty if there is none of this name."""
    identities = {one.name: one.ident for one in threading.enumerate()}
    frame = sys._current_frames().get(identities.get(thread) or 0)
    return "" if frame is None else _line(traceback.extract_stack(frame)[-1])


def _line(line: traceback.FrameSummary) -> str:
    return f"{line.filename}:{line.lineno} in {line.name}"


def stacks(loop: asyncio.AbstractEventLoop | None) -> dict[str, tuple[str, ...]]:
    """The stacks of all threads but this one, and where the tasks of an event loop wait."""
    names = {one.ident: one.name for one in threading.enumerate()}
    found = {
        names.get(identity, str(identity)): tuple(
            _line(line) for line in traceback.extract_stack(frame)[-MAX_FRAMES:]
        )
        for identity, frame in sys._current_frames().items()
        if identity != threading.get_ident()
    }
    if loop is not None and (places := Counter(_places_of_tasks(loop))):
        found["tasks"] = tuple(f"{count} at {place}" for place, count in places.most_common(MAX_FRAMES))
    return found


def _places_of_tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    tasks: Iterable[asyncio.Task[Any]] = ()
    with suppress(RuntimeError):  # a task began or ended meanwhile
        tasks = asyncio.all_tasks(loop)
    for task in tasks:
        coroutine: Any = task.get_coro()
        frame = None
        while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
            frame, coroutine = coroutine.cr_frame, coroutine.cr_await
        if frame is not None:
            yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def collectives() -> tuple[Collective, ...]:
    """Operations of torch.distributed in flight here, gloo's and NCCL's; empty in a process without torch."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return ()
    world = distributed._world
    ranks = {name: tuple(sorted(world.pg_group_ranks[group])) for group, name in world.pg_names.items()}
    recorder = sys.modules["torch._C._distributed_c10d"]
    # The second one exists in builds with CUDA.
    dumps = (getattr(recorder, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    traces = [json.loads(dump(includeCollectives=True, onlyActive=True)) for dump in dumps if dump]
    return tuple(one for trace in traces for one in read_trace(trace, ranks))[:MAX_COLLECTIVES]


def read_trace(trace: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> Iterator[Collective]:
    """The operations in flight of a trace of torch's flight recorder; `ranks` by the group's name."""
    for entry in trace.get("entries", ()):
        # gloo's operations stay `scheduled`; those that have ended are retired.
        if entry["retired"] or entry["state"] == "completed":
            continue
        name, description = entry["process_group"]
        yield Collective(
            operation=entry["profiling_name"].rpartition(":")[2],
            group=description if description not in ("", "undefined") else name,
            number=entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            ranks=ranks.get(name, ()),
            seconds=time.time() - entry["time_created_ns"] / 1e9,
        )
