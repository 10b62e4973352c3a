"""What a run does now, in `live.json`: its stages, engines and processes, for viewers that are no part of it.

The file is replaced at most once a second. One that cannot be written costs a warning, and later a try again.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .files import WriteError, write_atomically
from .timeline import OpenStages, Stage

if TYPE_CHECKING:
    from pydantic import TypeAdapter

PERIOD_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveStage:
    name: str
    started: float  # seconds since the epoch
    done: int
    total: int | None
    unit: str  # of progress, in the plural
    tokens: int  # generated or trained so far
    deadline: float | None  # seconds that one call in it may take, if it has a limit of its own


@dataclass(frozen=True)
class LiveEngine:
    name: str
    state: str  # up, waiting, starting, started or lost
    cause: str = ""  # of one that is lost
    version: int | None = None  # of its weights; None, as what follows, where it has not answered
    running: int | None = None  # requests
    waiting: int | None = None
    seconds_since_step: float | None = None


@dataclass(frozen=True)
class LiveWorker:
    group: str
    rank: int
    node: str  # empty in a run on one machine


@dataclass(frozen=True)
class LiveEnd:
    outcome: str  # complete, stopped or failed
    error: str = ""


@dataclass(frozen=True)
class Live:
    """The content of the file. A driver that was killed leaves the last one, without an end."""

    pid: int  # of the driver
    host: str
    written: float  # seconds since the epoch, as the other times
    step: int  # the last one that ended
    total_steps: int
    step_started: float  # of the step in progress
    stages: Sequence[LiveStage] = ()
    engines: Sequence[LiveEngine] = ()
    workers: Sequence[LiveWorker] = ()
    end: LiveEnd | None = None


class LiveFile(OpenStages):
    """Writes the file in a thread, so that a slow disk holds up no step. `close` ends it."""

    def __init__(
        self, path: Path, total_steps: int, step: int = 0, deadlines: Mapping[str, float] | None = None
    ) -> None:
        """`deadlines` are seconds by name of the stage."""
        super().__init__()
        self.path, self.total_steps, self.step, self.deadlines = path, total_steps, step, deadlines or {}
        self.engines: Sequence[LiveEngine] = ()
        self.workers: Sequence[LiveWorker] = ()
        self._end: LiveEnd | None = None
        self._step_started, self._failed = time.time(), False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live.json", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        with self._lock:
            self.step, self._step_started = step, started + seconds

    def rewind(self, step: int) -> None:
        with self._lock:
            self.step, self._step_started = step, time.time()

    def close(self, end: LiveEnd) -> None:
        self._closed.set()
        self._thread.join()
        self._end = end
        self._write()

    def content(self) -> Live:
        with self._lock:
            return Live(
                os.getpid(),
                os.uname().nodename,
                time.time(),
                self.step,
                self.total_steps,
                self._step_started,
                [self._of_stage(stage) for stage in self._stages],
                self.engines,
                self.workers,
                self._end,
            )

    def _of_stage(self, stage: Stage) -> LiveStage:
        deadline = self.deadlines.get(stage.name)
        counted = stage.done, stage.total, stage.unit, stage.tokens
        return LiveStage(stage.name, stage.started, *counted, deadline)

    def _run(self) -> None:
        self._write()
        while not self._closed.wait(PERIOD_SECONDS):
            self._write()

    def _write(self) -> None:
        try:
            write_atomically(self.path, json.dumps(asdict(self.content())) + "\n", durable=False)
            self._failed = False
        except WriteError as error:
            if not self._failed:
                logger.warning("What the run does now is not shown: %s", error)
            self._failed = True


def read_live(path: Path) -> Live | None:
    """None if there is no file, or one of another release. Raises OSError."""
    from pydantic import ValidationError

    try:
        return _adapter().validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


@cache
def _adapter() -> "TypeAdapter[Live]":
    from pydantic import TypeAdapter

    return TypeAdapter(Live)
