"""Stall reports: what every process of a run does when a deadline passes or a stage makes no progress.

A report goes to `stall-N.json` in the run folder, to the log, and in short to the error that ends the run.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from pydantic import TypeAdapter

from nemorl.cluster.activity import ProcessReport
from nemorl.cluster.errors import DeadlineExceeded
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.worker import Worker, describe_activity
from nemorl.errors import RunError
from nemorl.observe.files import WriteError, write_atomically
from nemorl.observe.timeline import Stage, StageListener
from nemorl.rollout.collector import SamplingStalled

logger = logging.getLogger(__name__)

MAX_WATCH_SECONDS = 5.0  # between two looks at the stages
NAME = "stall-{}.json"


@dataclass(frozen=True)
class StallReport:
    stage: str
    since: str  # time of the last progress, in ISO format
    seconds: float  # without progress
    problem: str  # one line
    ended: bool  # the run; else it continued to wait
    processes: tuple[ProcessReport, ...]
    queues: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of the driver, by their owner

    @classmethod
    def read(cls, path: Path) -> "StallReport":
        return TypeAdapter(cls).validate_json(path.read_bytes())

    def cause(self) -> str:
        """The probable cause, from what is certain to what is likely."""
        return next(_causes(self.processes), "no process is visibly stuck; compare the stacks")

    def lines(self) -> Iterator[str]:
        """The report without stacks, for a log."""
        yield f"{self.problem} (stage '{self.stage}', since {self.since}, {self.seconds:.0f} s)"
        yield f"probable cause: {self.cause()}"
        for owner, depths in self.queues.items():
            yield f"{owner}: {_listed(depths)}"
        for process in self.processes:
            state = "" if process.state is None else f", {process.state}"
            yield f"{process.name}{state}: {process}"
            if (activity := process.activity) is not None:
                finished = activity.finished or "nothing"
                yield f"  last finished {finished}, {activity.idle_seconds:.1f} s ago"
                yield from (f"  in flight: {one}" for one in activity.collectives)
                if activity.queues:
                    yield f"  {_listed(activity.queues)}"
                yield from (f"  {waiting}" for waiting in activity.services)


def newest_report(run_dir: Path) -> Path | None:
    return max(run_dir.glob(NAME.format("*")), key=_number, default=None)


def _number(path: Path) -> int:
    text = path.stem.rpartition("-")[2]
    return int(text) if text.isdecimal() else 0


def _listed(depths: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in depths.items())


BUSY_SECONDS = 60.0  # without a step of an engine that has work, or an answer of a service that is asked


def _causes(processes: Sequence[ProcessReport]) -> Iterator[str]:
    for process in processes:
        if process.error:
            yield f"{process.name} ended: {process.error.splitlines()[0]}"
        elif process.state is not None and process.state.code in ("", "Z"):
            yield f"{process.name} is gone: it crashed or was killed, perhaps for lack of memory"
    for process in processes:
        if process.state is not None and process.state.is_stopped:
            yield f"{process.name} is {process.state}; `kill -CONT {process.pid}` continues it"
    for process in processes:
        if process.state is not None and process.state.code == "D" and process.activity is None:
            yield f"{process.name} is {process.state}: a device or a file system does not answer"
    for process in processes:
        services = process.activity.services if process.activity is not None else ()
        for waiting in sorted(services, key=lambda waiting: -waiting.seconds):
            if waiting.seconds > BUSY_SECONDS:
                yield f"{waiting} in {process.name}"
    for process in processes:
        if process.activity is None:
            yield f"{process.name} {process}"
    yield from _waits_of_ranks(processes)
    for process in processes:
        queues = process.activity.queues if process.activity is not None else {}
        if queues.get("running", 0) and queues.get("seconds_since_step", 0) > BUSY_SECONDS:
            yield f"the engine of {process.name} has made no step for {queues['seconds_since_step']:.0f} s"
    calls = [(call, process) for process in processes if process.activity for call in process.activity.calls]
    # A call in a thread works; a coroutine waits for others.
    if placed := [pair for pair in calls if pair[0].place] or calls:
        call, process = max(placed, key=lambda pair: pair[0].seconds)
        yield f"{process.name} is {call}"


def _waits_of_ranks(processes: Sequence[ProcessReport]) -> Iterator[str]:
    """Ranks that wait in a collective, and those of its group that are not in it."""
    answering = [process for process in processes if process.activity is not None]
    for process in answering:
        assert process.activity is not None
        for waited in process.activity.collectives:
            inside = {
                other.rank
                for other in answering
                if other.group == process.group and other.activity is not None
                for one in other.activity.collectives
                if (one.group, one.number, one.ranks) == (waited.group, waited.number, waited.ranks)
            }
            for other in answering:
                if other.group == process.group and other.rank in set(waited.ranks) - inside:
                    yield f"{process.name} waits in {waited} for rank {other.rank}, which is {other.activity}"


class StallReporter(StageListener):
    """Watches the stages and the deadlines of a run. Belongs to one event loop."""

    def __init__(self, run_dir: Path, seconds: float, groups: Mapping[str, WorkerGroup]) -> None:
        """A stage without progress for `seconds` is reported; again after twice the time, and so on."""
        self._run_dir, self._seconds = run_dir, seconds
        self._groups = groups
        self.queues: dict[str, Callable[[], Mapping[str, float]]] = {}  # by owner
        self._progress: dict[Stage, float] = {}  # time of the last one, of the stages that run
        self._reported: dict[Stage, float] = {}  # seconds without progress after which it was reported
        self._explained: RunError | None = None

    def stage_started(self, stage: Stage) -> None:
        self.stage_advanced(stage)

    def stage_advanced(self, stage: Stage) -> None:
        self._progress[stage] = time.monotonic()
        self._reported.pop(stage, None)

    def stage_finished(self, stage: Stage) -> None:
        self._progress.pop(stage, None)
        self._reported.pop(stage, None)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Inside, stages are watched, and an error that ends the work is explained."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        except (DeadlineExceeded, SamplingStalled) as error:
            await self.explain(error)
            raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def explain(
        self, error: DeadlineExceeded | SamplingStalled, workers: Sequence[Worker] = ()
    ) -> None:
        """Report what the processes do at a deadline, and note it in the error; once for each error."""
        if error is self._explained:
            return
        self._explained = error
        stage = error.stage if isinstance(error, DeadlineExceeded) else "generation"
        problem = str(error).splitlines()[0]
        since = min(self._progress.values(), default=time.monotonic())
        if isinstance(error, DeadlineExceeded):
            since = min(since, time.monotonic() - error.seconds)
        report, path = await self._report(stage, since, problem, workers, ended=True)
        where = f"Stall report: {path}; `nemorl doctor {self._run_dir}` explains it." if path else ""
        error.add_note(f"Probable cause: {report.cause()}.\n{where}".rstrip())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(self._seconds / 4, MAX_WATCH_SECONDS))
            for stage, since in list(self._progress.items()):
                seconds = time.monotonic() - since
                if seconds >= max(self._seconds, 2 * self._reported.get(stage, 0.0)):
                    self._reported[stage] = seconds
                    done = f" ({stage.progress})" if stage.progress else ""
                    problem = f"stage '{stage.name}' has made no progress for {seconds:.0f} s{done}"
                    await self._report(stage.name, since, problem, ended=False)

    async def _report(
        self, stage: str, since: float, problem: str, workers: Sequence[Worker] = (), *, ended: bool
    ) -> tuple[StallReport, Path | None]:
        groups = [group.workers for group in self._groups.values() if not group.has_ended]
        everyone = {
            (worker.group, worker.rank): worker for of_group in (*groups, workers) for worker in of_group
        }
        seconds = time.monotonic() - since
        report = StallReport(
            stage,
            datetime.fromtimestamp(time.time() - seconds).astimezone().isoformat(timespec="seconds"),
            seconds,
            problem,
            ended,
            tuple(await describe_activity(list(everyone.values()))),
            {owner: dict(depths()) for owner, depths in self.queues.items()},
        )
        previous = newest_report(self._run_dir)
        path = self._run_dir / NAME.format(_number(previous) + 1 if previous else 1)
        try:
            write_atomically(path, json.dumps(asdict(report), indent=1) + "\n")
        except WriteError as error:
            logger.warning("no stall report: %s", error)
            return report, None
        logger.warning("%s; probable cause: %s; report: %s", problem, report.cause(), path)
        for line in report.lines():
            logger.info("%s", line)
        return report, path
