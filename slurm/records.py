"""How each start of a job ended, and whether to requeue the job."""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from nemorl.observe.files import WriteError, write_atomically
from nemorl.observe.run_folder import RunPaths

from . import OptionError
from .rendezvous import EXIT, FOLDER

MAX_RESTARTS = "NEMORL_MAX_RESTARTS"
DEFAULT_MAX_RESTARTS = 3
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: nemorl.sbatch requeues the job
TERMINATED = 143  # by SIGTERM: who sent it decides whether the job is requeued
STATUS_FILE = "NEMORL_STATUS_FILE"  # for nemorl.sbatch, since srun reports the worst status of all nodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExitRecord:
    """How one start of a job ended."""

    code: int  # exit status of the launcher on the head
    reason: str
    step_before: int  # of the newest checkpoint, at the beginning
    step: int

    @property
    def requeues_without_progress(self) -> bool:
        """True where the start asked for another one and wrote no new checkpoint."""
        return self.code == REQUEUE and self.step <= self.step_before

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the record of a start; None where there is none, or none that is valid."""
        try:
            return cls(**json.loads((folder / EXIT).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        write_atomically(folder / EXIT, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")


def newest_step(run_dir: Path) -> int:
    """Step of the newest checkpoint; 0 without one."""
    names = (path.name for path in RunPaths(run_dir).checkpoints.glob("step_*"))
    return max((int(found[1]) for name in names if (found := re.fullmatch(r"step_(\d+)", name))), default=0)


def parse_max_restarts(environment: Mapping[str, str]) -> int:
    """Parse NEMORL_MAX_RESTARTS. Raises `OptionError`."""
    text = environment.get(MAX_RESTARTS) or str(DEFAULT_MAX_RESTARTS)
    if not text.isdecimal():
        raise OptionError(f"{MAX_RESTARTS} = {text}: expected a number of restarts, 0 for none")
    return int(text)


def restarts_without_progress(run_dir: Path, job: str, restart: int) -> int:
    """Number of consecutive starts before this one that asked for another and wrote no new checkpoint."""
    count = 0
    for earlier in reversed(range(restart)):
        start = run_dir / FOLDER / f"{job}.{earlier}"
        # nemorl.sbatch may have called srun several times for one start: 12.0, 12.0.1, ...
        steps = start.parent.glob(f"{start.name}.*")
        attempts = [*sorted(steps, key=lambda path: int(path.suffix[1:]), reverse=True), start]
        record = next((found for path in attempts if (found := ExitRecord.read(path))), None)
        if record is None or not record.requeues_without_progress:
            break
        count += 1
    return count


def write_status(code: int) -> None:
    """Write the exit status for nemorl.sbatch."""
    if path := os.environ.get(STATUS_FILE):
        Path(path).write_text(f"{code}\n", encoding="ascii")


class ExitRecorder:
    """Writes the exit record of a start at each of its stages, since each may be its last."""

    def __init__(self, run_dir: Path, folder: Path, job: str, restart: int) -> None:
        """`folder` is the folder of the start."""
        self._run_dir, self._folder = run_dir, folder
        self._step_before = newest_step(run_dir)
        self._restarts = restarts_without_progress(run_dir, job, restart)
        self.max_restarts = DEFAULT_MAX_RESTARTS

    def write(self, code: int, reason: str) -> ExitRecord:
        """Record how the start ended, as far as is known now; the job fails at the bound on restarts."""
        record = ExitRecord(code, reason, self._step_before, newest_step(self._run_dir))
        if record.requeues_without_progress and self._restarts >= self.max_restarts:
            starts = f"{self._restarts + 1} consecutive starts" if self._restarts else "this start"
            bound = f"{starts} wrote no new checkpoint ({MAX_RESTARTS} = {self.max_restarts}); not requeued"
            record = replace(record, code=1, reason=f"{reason}; {bound}")
        try:
            write_status(record.code)
            record.write(self._folder)
        except (OSError, WriteError) as error:  # a full disk; the launcher's own exit status remains
            logger.error("the exit record cannot be written: %s", error)
        return record
