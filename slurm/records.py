"""How each start of a job ended, and whether another one is worth its nodes."""

import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from nemorl.observe.files import WriteError, write_atomically
from nemorl.observe.run_folder import RunPaths

from .errors import OptionError
from .rendezvous import EXIT, FOLDER

VARIABLE = "NEMORL_MAX_RESTARTS"
DEFAULT = 3
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: what `nemorl.sbatch` starts again
TERMINATED = 143  # by SIGTERM: who sent it decides what becomes of the job
VERDICT = "NEMORL_VERDICT"  # a file for `nemorl.sbatch`, since srun reports the worst status of all nodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """How one start of a job ended."""

    code: int  # exit status of the launcher on the head
    reason: str
    step_before: int  # of the newest checkpoint
    step: int

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Of the start whose folder this is; None where it ended without a word, or has not."""
        try:
            return cls(**json.loads((folder / EXIT).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        """Keep it in the start's folder."""
        write_atomically(folder / EXIT, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")


def newest_step(run_dir: Path) -> int:
    """Steps done in the newest checkpoint; 0 without one."""
    names = (path.name for path in RunPaths(run_dir).checkpoints.glob("step_*"))
    return max((int(found[1]) for name in names if (found := re.fullmatch(r"step_(\d+)", name))), default=0)


def max_restarts() -> int:
    """As the variable says. Raises `OptionError`."""
    text = os.environ.get(VARIABLE) or str(DEFAULT)
    if not text.isdecimal():
        raise OptionError(f"{VARIABLE} = {text}: give a number of restarts, 0 for none")
    return int(text)


def barren_restarts(run_dir: Path, job: str, restart: int) -> int:
    """How many starts in a row before this one asked for another and brought no new checkpoint."""
    count = 0
    for before in reversed(range(restart)):
        ending = _newest(run_dir / FOLDER, f"{job}.{before}")
        if ending is None or ending.code != REQUEUE or ending.step > ending.step_before:
            break
        count += 1
    return count


def _newest(folder: Path, start: str) -> Ending | None:
    """Of a start, for which the script may have called `srun` several times: `12.0`, `12.0.1`, …"""
    tries = sorted(folder.glob(f"{start}.*"), key=lambda path: int(path.suffix[1:]), reverse=True)
    return next((e for path in [*tries, folder / start] if (e := Ending.read(path))), None)


def with_bound(ending: Ending, barren: int, limit: int) -> Ending:
    """The same, or a failure where so many starts in a row brought nothing that another would not either."""
    if ending.code != REQUEUE or ending.step > ending.step_before or barren < limit:
        return ending
    starts = f"{barren + 1} start{'s' * (barren > 0)} in a row" if barren else "this start"
    why = f"{starts} brought no new checkpoint ({VARIABLE} = {limit}), so the job is not queued again"
    return Ending(1, f"{ending.reason}; {why}", ending.step_before, ending.step)


def write_verdict(code: int) -> None:
    """Tell the batch script."""
    path = os.environ.get(VERDICT)
    if path:
        Path(path).write_text(f"{code}\n", encoding="ascii")


class Record:
    """What a start of a job leaves behind; kept at every turn of it, since each may be its last."""

    def __init__(self, run_dir: Path, folder: Path, job: str, restart: int) -> None:
        """`folder` is the start's own."""
        self._run_dir, self._folder = run_dir, folder
        self._before, self._barren = newest_step(run_dir), barren_restarts(run_dir, job, restart)
        self.limit = DEFAULT  # as `max_restarts`

    def keep(self, code: int, reason: str) -> Ending:
        """This is how it ended, as far as is known now."""
        ending = Ending(code, reason, self._before, newest_step(self._run_dir))
        ending = with_bound(ending, self._barren, self.limit)
        try:
            write_verdict(ending.code)
            ending.write(self._folder)
        except (OSError, WriteError) as error:  # a full disk; the launcher's own status still tells
            logger.error("how it ended cannot be kept: %s", error)
        return ending
