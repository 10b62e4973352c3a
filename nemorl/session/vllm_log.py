"""What vLLM's processes said last. They write where the replica's own process writes."""

import os
import re
import stat
from pathlib import Path

from nemorl.cluster.logs import last_lines

_OUTPUT = 2  # file descriptor
_LINES = 200  # of a start that failed, in which tracebacks of several processes follow each other
_ERROR = re.compile(r"(?:\] |^)((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Violation): .+)$")
_CONSEQUENCES = ("See root cause", "See stack trace", "EngineDeadError")


def last_words(count: int = 12) -> str:
    """To put after a sentence: the first error that was told, and the last lines; or where to look."""
    if not stat.S_ISREG(os.fstat(_OUTPUT).st_mode):
        return "; its output says more"
    lines = last_lines(Path(f"/proc/self/fd/{_OUTPUT}"), _LINES)
    cause = first_error(lines)
    told = "".join(f"\n  | {line}" for line in lines[-count:])
    return (f": {cause}" if cause else "") + f". The last lines of its log:{told or ' none'}"


def first_error(lines: tuple[str, ...]) -> str | None:
    """The end of the first traceback among lines of a log; those after it are mostly its consequences."""
    found = (match[1] for line in lines if (match := _ERROR.search(line)))
    return next((error for error in found if not any(words in error for words in _CONSEQUENCES)), None)
