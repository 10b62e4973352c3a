"""What the screen of a run shows besides its charts: head, pipeline, alarms, processes, and last steps."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from nemorl.cluster.activity import process_state
from nemorl.cluster.logs import WorkerProcesses, last_lines
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment, read_document
from nemorl.errors import ConfigError, NemorlError, Problem
from nemorl.observe.files import read_end
from nemorl.observe.live import Live, LiveEngine
from nemorl.observe.metrics import MetricGroup, metric_groups
from nemorl.observe.run_folder import RunPaths, read_header
from nemorl.slurm.start import newest_step
from nemorl.slurm.submission import latest_submission

from .alarms import Advice, Alarm, advice, alarms
from .runs import LIVING, RunStatus, run_status, stamp, whole
from .series import MetricsFile, MetricsFiles

RECENT = 20  # steps of the pipeline's shares
HEAD_BYTES = 65536  # of a timeline, with the names of its tracks
WORDS = 12  # last lines of the driver's log that a failed run shows
# Fields of the config that move the seconds of a stage.
FIELDS_OF_STAGES: Mapping[str, tuple[str, ...]] = {
    "generation": ("generation.replicas", "generation.backend", "algorithm.max_staleness"),
    "environment": ("env", "cluster.rollout_workers", "rewards"),
    "training": ("policy.layout", "policy.micro_batch_tokens", "policy.recompute"),
    "logprobs": ("policy.layout", "policy.micro_batch_tokens"),
    "reference": ("policy.layout", "algorithm.kl"),
    "values": ("critic",),
    "teachers": ("teachers",),
    "refit": ("generation.transport",),
    "validation": ("algorithm.validation",),
    "checkpoint": ("checkpointing",),
    "recording": ("logger.trajectories",),
}


@dataclass(frozen=True)
class Head:
    run: str
    state: str
    words: str  # of a run that failed: its error
    last_words: tuple[str, ...]  # of its driver's log
    step: int
    total_steps: int | None
    eta: float | None  # seconds
    step_seconds: float | None  # median of the last steps
    step_started: float | None
    checkpoint_step: int | None
    checkpoint_age: float | None  # seconds
    free_bytes: int
    algorithm: str
    model: str
    device: str
    command: str
    host: str
    is_here: bool  # its driver is a process of this machine
    is_job: bool  # it was submitted to Slurm
    now: float


@dataclass(frozen=True)
class PipelineStage:
    name: str
    seconds: float | None  # mean of the last steps; None for one that is new
    share: float | None  # of the step
    is_open: bool = False
    since: float | None = None  # when it was opened; seconds since the epoch
    done: int = 0
    total: int | None = None
    unit: str = ""
    tokens_per_second: float | None = None
    deadline: float | None = None
    is_bottleneck: bool = False
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerRow:
    name: str
    group: str
    rank: int
    node: str
    pid: int | None
    health: str
    log: str


@dataclass(frozen=True)
class WatchState:
    head: Head
    pipeline: list[PipelineStage]
    critical: dict[str, float]  # share of the last steps in which the driver waited, by kind of process
    alarms: list[Alarm]
    advice: list[Advice]
    workers: list[WorkerRow]
    engines: list[LiveEngine]
    groups: list[MetricGroup]
    num_steps: int
    problems: list[str] = field(default_factory=list)


class Watcher:
    """Answers for the runs that are watched."""

    def __init__(self, metrics: MetricsFiles) -> None:
        self._metrics, self._processes = metrics, WorkerProcesses()
        self._experiments: dict[Path, tuple[Any, Experiment | None, str]] = {}

    def state(self, name: str, folder: Path) -> WatchState:
        """Raises OSError."""
        with self._metrics.reading(RunPaths(folder).metrics) as metrics:
            return self._state(name, RunPaths(folder), metrics)

    def _state(self, name: str, paths: RunPaths, metrics: MetricsFile) -> WatchState:
        now, problems = time.time(), []
        try:
            starts = read_header(paths.header)
        except NemorlError as error:
            starts = []
            problems.append(str(error))
        status = run_status(paths.root, starts, now)
        experiment, problem = self._experiment(paths.config)
        if problem:
            problems.append(problem)
        problems += metrics.problems
        free = shutil.disk_usage(paths.root).free
        found = alarms(status, metrics, experiment, free, now)
        return WatchState(
            _head(name, paths, starts, status, metrics, free, now),
            pipeline(metrics, status.live if status.state in LIVING else None, now),
            _critical(metrics),
            found,
            [] if found else list(advice(metrics, experiment)),
            _workers(paths.logs, status, self._processes),
            list(status.live.engines) if status.live is not None else [],
            _groups(metrics),
            len(metrics.steps),
            problems,
        )

    def _experiment(self, config: Path) -> tuple[Experiment | None, str]:
        """The run's experiment, and why there is none."""
        if (written := stamp(config)) is None:
            return None, "config.yaml is missing"
        known = self._experiments.get(config)
        if known is None or known[0] != written:
            try:
                found, problem = load_experiment(config), ""
            except ConfigError as error:
                found, problem = None, _config_problem(config, error)
            known = self._experiments[config] = (written, found, problem)
        return known[1], known[2]


def _config_problem(config: Path, error: ConfigError) -> str:
    """What is wrong in a run's config.yaml, and in which line; what needs it is not shown."""
    first = next((one for one in error.problems if _line_of(one)), error.problems[0])
    line = _line_of(first)
    where = f"{config.name}, line {line}" if line else config.name
    field = f"{first.field}: " if first.field else ""
    try:
        read_document(config)
    except ConfigError:
        return f"{where} cannot be read: {field}{first.fix}"
    return f"{where} is of another release of nemorl, or was edited: {field}{first.fix}"


def _line_of(problem: Problem) -> str:
    line = problem.origin.rpartition(":")[2]
    return line if line.isdecimal() else ""


def marks(folder: Path) -> tuple[Any, ...]:
    """Changes whenever something was written that the screen shows."""
    paths = RunPaths(folder)
    return tuple(map(stamp, (paths.metrics, paths.live, paths.header, paths.root / ".lock")))


def pipeline(metrics: MetricsFile, live: Live | None, now: float) -> list[PipelineStage]:
    """Stages in the order in which a step has them, then those that are open and new."""
    opened = {} if live is None else {stage.name: stage for stage in live.stages}
    in_order = dict.fromkeys([*metrics.order, *metrics.names])  # step 0 has only a validation
    names = [name.removeprefix("time/") for name in in_order if name.startswith("time/")]
    names = [*(name for name in names if name != "step"), *(name for name in opened if name not in names)]
    count = min(RECENT, len(metrics.steps))
    whole = metrics.last("time/step", RECENT)
    means = {name: metrics.last(f"time/{name}", RECENT).sum() / count for name in names} if count else {}
    step = float(whole.mean()) if len(whole) else 0.0
    longest = max(means, key=lambda name: means[name], default="")
    found = []
    for name in names:
        seconds, stage = means.get(name), opened.get(name)
        if not seconds and stage is None:
            continue  # not in the last steps
        row: dict[str, Any] = {}
        if stage is not None:
            spent = max(now - stage.started, 1e-3)
            row = {"is_open": True, "since": stage.started, "done": stage.done, "total": stage.total}
            row |= {"unit": stage.unit, "deadline": stage.deadline}
            row |= {"tokens_per_second": stage.tokens / spent if stage.tokens else None}
        share = seconds / step if seconds and step else None
        is_bottleneck = name == longest and bool(means[name]) if means else False
        fields = FIELDS_OF_STAGES.get(name, ())
        found.append(
            PipelineStage(
                name,
                float(seconds) if seconds else None,
                float(share) if share else None,
                is_bottleneck=is_bottleneck,
                fields=fields,
                **row,
            )
        )
    return found


def _critical(metrics: MetricsFile) -> dict[str, float]:
    names = [name for name in metrics.names if name.startswith("critical/")]
    count = min(RECENT, len(metrics.steps))
    sums = {name.removeprefix("critical/"): float(metrics.last(name, RECENT).sum()) / count for name in names}
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _groups(metrics: MetricsFile) -> list[MetricGroup]:
    """As in the report, whose first plots are of the reward and of the stages."""
    names = metrics.names
    reward = [name for name in names if name in ("reward/mean", "validation/reward")]
    times = [name for name in names if name.startswith("time/")]
    first = [MetricGroup("Reward", reward, True)] if reward else []
    first += [MetricGroup("Seconds of each stage", times, True)] if times else []
    return [*first, *metric_groups(names)]


def _head(
    name: str,
    paths: RunPaths,
    starts: list[dict[str, Any]],
    status: RunStatus,
    metrics: MetricsFile,
    free: int,
    now: float,
) -> Head:
    live, start = status.live, starts[-1] if starts else {}
    facts = start.get("run", {})
    step = metrics.steps[-1] if metrics.steps else live.step if live is not None else 0
    total = live.total_steps if live is not None else whole(facts.get("steps"))
    seconds = metrics.last("time/step", RECENT)
    usual = median(seconds.tolist()) if len(seconds) else None
    is_living = status.state in LIVING
    eta = usual * (total - step) if is_living and usual is not None and total is not None else None
    checkpoint, age = _checkpoint(paths.checkpoints, now)
    last_words: tuple[str, ...] = ()
    if status.state in ("failed", "killed"):
        last_words = last_lines(paths.logs / "driver.log", WORDS)
    host = status.driver.host if status.driver is not None else start.get("machine", {}).get("host", "")
    return Head(
        name,
        status.state,
        status.words,
        last_words,
        step,
        total,
        eta,
        usual,
        live.step_started if live is not None and is_living else None,
        checkpoint,
        age,
        free,
        facts.get("algorithm", ""),
        facts.get("model", ""),
        facts.get("policy device", ""),
        start.get("command", ""),
        host,
        status.driver is not None and status.driver.pid is not None,
        _is_job(paths.root),
        now,
    )


def _is_job(folder: Path) -> bool:
    try:
        return latest_submission(folder) is not None
    except (NemorlError, ValueError):  # a corrupt record of a submission
        return True


def _checkpoint(folder: Path, now: float) -> tuple[int | None, float | None]:
    """Step of the newest complete checkpoint, and its age in seconds."""
    step = newest_step(folder.parent)
    if not step:
        return None, None
    with suppress(OSError, StopIteration):
        newest = next(path for path in folder.glob("step_*") if path.name.endswith(f"_{step:08d}"))
        return step, now - newest.stat().st_mtime
    return step, None


def _workers(logs: Path, status: RunStatus, processes: WorkerProcesses) -> list[WorkerRow]:
    if status.live is None or status.state not in LIVING:
        return []
    engines = {engine.name: engine for engine in status.live.engines}
    rows = []
    for worker in status.live.workers:
        name = f"{worker.group}-{worker.rank}"
        process = processes.of(logs / f"{name}.log")
        here = process is not None and process[1] == os.uname().nodename
        health = ""
        if process is not None and here:
            state = process_state(process[0])
            health = "gone" if state.code in ("", "Z") else str(state)
        engine = engines.get(f"{worker.group} replica {worker.rank}")
        if engine is not None and engine.state != "up":
            health = engine.state
        node = worker.node or (process[1] if process is not None else "")
        rows.append(
            WorkerRow(name, worker.group, worker.rank, node, process[0] if process else None, health, name)
        )
    return rows


def lanes(timeline: Path, steps: int = 6, max_bytes: int = 2**20) -> dict[str, Any]:
    """Spans of the last steps by track: [name, start, length], start in seconds since the epoch."""
    try:
        data, is_cut = read_end(timeline, max_bytes)
        head = b""
        if is_cut:  # names of tracks are near its beginning
            with timeline.open("rb") as file:
                head = file.read(HEAD_BYTES)
    except OSError:
        return {"tracks": [], "steps": []}
    events = list(_events(data))
    names = (each for each in (*_events(head), *events) if each.get("name") == "thread_name")
    tracks: dict[int, str] = {each["tid"]: each["args"]["name"] for each in names}
    drawn = [each for each in events if each.get("ph") == "X"]
    spans = [(each["tid"], each["name"], each["ts"] / 1e6, each["dur"] / 1e6) for each in drawn]
    numbered = sorted(
        (start, length, name) for tid, name, start, length in spans if tracks.get(tid) == "steps"
    )
    recent = numbered[-steps:]
    if not recent:
        return {"tracks": [], "steps": []}
    begin = recent[0][0]
    found: dict[str, list[tuple[str, float, float]]] = {}
    for tid, name, start, length in spans:
        if start + length > begin and tracks.get(tid, "steps") != "steps":
            found.setdefault(tracks[tid], []).append((name, start, length))
    named = [{"name": name, "spans": sorted(each, key=lambda span: span[1])} for name, each in found.items()]
    return {"tracks": named, "steps": [(name, start, length) for start, length, name in recent]}


def _events(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.split(b"\n"):
        try:
            event = json.loads(line.lstrip(b","))
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event
