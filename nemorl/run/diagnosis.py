"""What a run folder shows about its run: whether it runs, how it ended, and what to look at first."""

import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from statistics import median

from nemorl.cluster.activity import ProcessState, process_state
from nemorl.cluster.logs import last_lines, process_of
from nemorl.errors import UsageError
from nemorl.observe.metrics import StepMetrics, read_metrics
from nemorl.observe.run_folder import RunPaths, holder, read_header
from nemorl.observe.timeline import format_seconds
from nemorl.session.stalls import StallReport, newest_report
from nemorl.slurm.start import newest_step

from .scaling import ReplicaReport, read

LOW_DISK_BYTES = 2**30
SLOW_FACTOR, SLOW_SECONDS = 10, 300.0  # without a step: this many median steps, and at least this long
OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")


class Condition(Enum):
    COMPLETE = "complete"
    HEALTHY = "running"
    HANGING = "running, without progress"
    STOPPED = "stopped, can be continued"
    FAILED = "failed"
    DIED = "its driver died"


# What the text of an error says, and what to look at; the first match decides.
KNOWN_ERRORS = (
    (r"OutOfMemoryError|CUDA out of memory", "a GPU ran out of memory", "lower policy.micro_batch_tokens"),
    (r"No space left|cannot be written|could not be written|File too large", "a disk is full", "make room"),
    (r"replicas are lost", "all engines were lost", "read logs/generation-*.log"),
    (r"not finite|gradient norm was", "gradients were not finite", "lower policy.optimizer.lr"),
    (r"ran out of memory", "a process was killed, as the kernel does without memory", "read its log"),
    (
        r"has not finished stage|no group finished within|hangs in stage",
        "a stage missed its deadline",
        "see the stall report",
    ),
)


@dataclass(frozen=True)
class Worker:
    name: str  # such as `policy-1`
    log: Path
    pid: int
    state: ProcessState | None  # None: on another machine


@dataclass
class Diagnosis:
    condition: Condition
    cause: str = ""  # the probable one; empty if nothing is wrong
    facts: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # to run next


def diagnose(run_dir: Path) -> Diagnosis:
    """Raises UsageError if the folder holds no run, and RunFolderError for a corrupt file."""
    paths = RunPaths(run_dir)
    starts = read_header(paths.header)
    if not starts:
        raise UsageError(f"{run_dir} holds no run: {paths.header} is missing; name a run_dir")
    start, steps = starts[-1], read_metrics(paths.metrics)
    began = datetime.fromisoformat(start["started"]).timestamp()
    driver, replicas = holder(run_dir), read(ReplicaReport, paths.replicas)
    workers = list(_workers(paths.logs, replicas, began))
    stall = newest_report(run_dir)
    report = StallReport.read(stall) if stall is not None and stall.stat().st_mtime >= began else None
    found = Diagnosis(Condition.HEALTHY)
    if driver is not None:
        if replicas is not None:
            found.facts += [
                f"{name}: {str(state).splitlines()[0]}"
                for name, state in replicas.replicas.items()
                if state.state != "up"
            ]
        _of_running(found, driver, workers, steps, paths, began, report)
    else:
        _of_ended(found, start, run_dir, report)
    if report is not None and found.condition is not Condition.COMPLETE:
        found.facts.append(f"{stall}: {report.problem}")
        found.commands.append(f"less {stall}  # stacks of all processes")
    found.facts += _facts(run_dir, steps)
    return found


def _workers(logs: Path, replicas: ReplicaReport | None, began: float) -> Iterator[Worker]:
    """Those of the start that began then, without the engines that have left."""
    engines = (
        {name.replace(" replica ", "-") for name in replicas.replicas} if replicas is not None else set()
    )
    for log in sorted(log for log in logs.glob("*-*.log") if log.stat().st_mtime >= began - 1):
        if engines and re.fullmatch(r"generation-\d+", log.stem) and log.stem not in engines:
            continue
        if (process := process_of(log)) is not None:
            pid, host = process
            yield Worker(log.stem, log, pid, process_state(pid) if host == os.uname().nodename else None)


def _of_running(
    found: Diagnosis,
    driver: tuple[int, str],
    workers: Sequence[Worker],
    steps: Sequence[StepMetrics],
    paths: RunPaths,
    began: float,
    report: StallReport | None,
) -> None:
    pid, host = driver
    found.facts.append(f"the driver is process {pid} on {host}")
    written = paths.metrics.stat().st_mtime if paths.metrics.exists() else 0.0
    changed = max(began, written)
    silent, newest = time.time() - changed, steps[-1].step if steps else 0
    usual = (
        median(times) if (times := [s.values["time/step"] for s in steps if "time/step" in s.values]) else 0.0
    )
    if written > began:
        found.facts.append(f"last step {newest}, {format_seconds(silent)} ago")
    else:
        after = f" after step {newest}" if newest else ""
        found.facts.append(f"started{after} {format_seconds(silent)} ago, and has made no step yet")
    if usual:
        found.facts.append(f"a step takes {format_seconds(usual)} (median)")
    stopped = [w for w in workers if w.state is not None and w.state.is_stopped]
    gone = [w for w in workers if w.state is not None and w.state.code in ("", "Z")]
    if host == os.uname().nodename and process_state(pid).is_stopped:
        found.condition, found.cause = Condition.HANGING, f"the driver, process {pid}, is stopped (state T)"
        found.commands.append(f"kill -CONT {pid}")
    elif stopped:
        one = stopped[0]
        found.condition, found.cause = Condition.HANGING, f"{one.name}, process {one.pid}, is {one.state}"
        found.facts += [f"{w.name}, process {w.pid}: {w.state}" for w in stopped]
        found.commands += [f"kill -CONT {w.pid}  # continue {w.name}" for w in stopped]
    elif report is not None and datetime.fromisoformat(report.since).timestamp() >= changed - 1:
        found.condition, found.cause = Condition.HANGING, report.cause()
    elif silent > max(SLOW_FACTOR * usual, SLOW_SECONDS):
        found.condition = Condition.HANGING
        found.cause = f"no step since {format_seconds(silent)}"
        found.commands.append(f"tail {paths.logs}/*.log")
    for worker in gone:
        found.facts.append(f"{worker.name}, process {worker.pid}, is gone; its log ends: {_end(worker.log)}")
        found.commands.append(f"tail -50 {worker.log}")


def _of_ended(found: Diagnosis, start: dict[str, object], run_dir: Path, report: StallReport | None) -> None:
    end = start.get("end")
    words = shlex.split(str(start["command"]))[1:]
    resume = shlex.join(["nemorl", *words, *(["--resume"] if "--resume" not in words else [])])
    if not isinstance(end, dict):
        found.condition = Condition.DIED
        found.cause = (
            "the driver ended without a record: it was killed (kill -9, out of memory) or its node is down"
        )
        found.commands += [f"tail -50 {run_dir / 'logs' / 'driver.log'}", resume]
        if (kills := _oom_kills()) > 0:
            found.facts.append(
                f"the kernel has killed {kills} processes of this container for lack of memory"
            )
        return
    outcome, error = end["outcome"], str(end["error"])
    if outcome == "complete":
        found.condition = Condition.COMPLETE
        return
    found.condition = Condition.STOPPED if outcome == "stopped" else Condition.FAILED
    found.facts += [f"ended at {end['time']}: {error.splitlines()[0] if error else outcome}"]
    if found.condition is Condition.FAILED:
        cause, fix = next(
            ((cause, fix) for pattern, cause, fix in KNOWN_ERRORS if re.search(pattern, error)),
            (error.splitlines()[0] if error else "an error without a message", ""),
        )
        found.cause = report.cause() if report is not None and report.ended else cause
        found.commands += [f"# {fix}"] * bool(fix)
        logs = dict.fromkeys(re.findall(r"(\S+\.log)\b", error))
        found.commands += [f"tail -50 {log}" for log in logs]
    found.commands.append(resume)


def _facts(run_dir: Path, steps: Sequence[StepMetrics]) -> Iterator[str]:
    if step := newest_step(run_dir):
        yield f"newest checkpoint: step {step}"
    else:
        yield "there is no checkpoint"
    last = steps[-1].values if steps else {}
    for name, text in (
        ("generation/replicas_lost", "losses of engines so far: {}"),
        ("generation/restarts_failed", "restarts of engines that failed: {}"),
        ("rollout/workers_lost", "losses of rollout workers so far: {}"),
        ("rollout/restarts_failed", "restarts of rollout workers that failed: {}"),
        ("environment/actors_lost", "losses of environment actors so far: {}"),
        ("models/restarts", "restarts of models so far: {}"),
        ("skipped_updates", "skipped updates: {}"),
        ("guards/rollbacks", "returns to an earlier checkpoint: {}"),
        ("errors", "trajectories of the last step that failed: {}"),
    ):
        if last.get(name, 0) > 0:
            yield text.format(f"{last[name]:g}")
    bad = sorted(name for name, value in last.items() if value != value or abs(value) == float("inf"))
    if bad:
        yield f"not finite in the last step: {', '.join(bad[:8])}"
    free = shutil.disk_usage(run_dir).free
    if free < LOW_DISK_BYTES:
        yield f"only {free / 2**20:.0f} MB are free on the disk of the run folder"


def _end(log: Path) -> str:
    return (last_lines(log, 1) or ("(nothing)",))[0]


def _oom_kills() -> int:
    try:
        found = re.search(r"^oom_kill (\d+)", OOM_EVENTS.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
