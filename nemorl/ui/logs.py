"""The logs of a run's processes as one, in the order of time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from nemorl.observe.files import read_end

MAX_BYTES = 2**21  # that are read of the end of each file
MAX_LINES = 2000
MAX_CHARACTERS = 4000  # of a line
_START = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[,.](\d{3}))?\s+(DEBUG|INFO|WARNING|ERROR|CRITICAL)?"
)
_BEGIN = re.compile(r"--- worker .* (\d{4}-\d\d-\d\dT\S+)$")


@dataclass(frozen=True)
class LogLine:
    source: str  # name of the file without its ending
    time: float  # seconds since the epoch; 0 before the first line with a time
    level: str  # of the line, or of the one that it continues
    text: str


@dataclass(frozen=True)
class Logs:
    lines: list[LogLine]
    sources: list[str]
    left_out: list[str]  # files of which only the end was read


def read_logs(folder: Path, source: str = "", find: str = "", level: str = "", count: int = 500) -> Logs:
    """The last `count` lines that contain `find`, in any case, of one file or of all; of a level or above."""
    files = sorted(folder.glob("*.log"))
    lines: list[LogLine] = []
    left_out = []
    lowest = _LEVELS.index(level) if level in _LEVELS else -1
    for path in files:
        if source and path.stem != source:
            continue
        try:
            data, is_cut = read_end(path, MAX_BYTES)
        except OSError:  # gone meanwhile
            continue
        if is_cut:
            left_out.append(path.name)
        lines += (
            line
            for line in _parsed(path.stem, data.decode("utf-8", errors="replace"))
            if (not find or find.lower() in line.text.lower())
            and (lowest < 0 or (line.level in _LEVELS and _LEVELS.index(line.level) >= lowest))
        )
    lines.sort(key=lambda line: line.time)  # stable: lines of one file stay in order
    return Logs(lines[-min(count, MAX_LINES) :], [path.stem for path in files], left_out)


_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _parsed(source: str, text: str) -> Iterator[LogLine]:
    time, level = 0.0, ""
    for line in text.split("\n"):
        if not line:
            continue
        if begun := _BEGIN.match(line):
            time, level = _seconds(begun[1]), ""
        elif found := _START.match(line):
            time = _seconds(found[1]) + int(found[2] or 0) / 1000
            level = found[3] or ""
        yield LogLine(source, time, level, line[:MAX_CHARACTERS])


def _seconds(text: str) -> float:
    """A time of a log, which is local where it names no zone."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
