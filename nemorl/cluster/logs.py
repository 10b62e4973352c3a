"""A worker's log: all output of the process, native code included, and its last lines."""

import faulthandler
import logging
import os
import re
import sys
from datetime import datetime
from pathlib import Path

START_OF_LOG = "--- worker"
TAIL_BYTES = 16384
MAX_START_BYTES = 1024  # of the line with which a start begins its log
# `file.py:12: UserWarning: text`, below which Python shows the line of the source, indented.
PYTHON_WARNING = re.compile(r"\S.*:\d+: (\w+\.)*\w*Warning: ")


def log_path(run_dir: Path, group: str, rank: int) -> Path:
    return run_dir / "logs" / f"{group}-{rank}.log"


def send_output_to(path: Path, group: str, rank: int) -> None:
    """Write all output of this process to `path`; of logging, warnings and our own messages.

    The file descriptors themselves are replaced, so that native libraries and the fault handler write there
    too; every line is passed to the kernel at once, so that none is lost when the process dies.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    faulthandler.enable(file=2, all_threads=False)  # the others would push it out of the last lines
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    # Of others, warnings only: their notes at start would be a dead worker's last words.
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True, format=form)
    logging.getLogger("nemorl").setLevel(logging.INFO)
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    host = os.uname().nodename
    sys.stderr.write(f"{START_OF_LOG} {group}-{rank} process {os.getpid()} on {host} {started}\n")


def process_of(path: Path, since: int = 0) -> tuple[int, str] | None:
    """Process and host of the latest start that wrote a worker's log, from a byte of it on.

    None if there is none, or the log cannot be read.
    """
    try:
        with path.open("rb") as log:
            log.seek(since)
            text = log.read().rpartition(START_OF_LOG.encode())[2]
    except OSError:
        return None
    line = text[:MAX_START_BYTES].decode("utf-8", errors="replace")
    found = re.match(r" \S+ process (\d+) on (\S+) ", line)
    return (int(found[1]), found[2]) if found else None


class WorkerProcesses:
    """Processes of workers whose logs are asked again and again: what was read is not read again."""

    def __init__(self) -> None:
        # Bytes that were read, and the answer.
        self._known: dict[Path, tuple[int, tuple[int, str] | None]] = {}

    def of(self, path: Path) -> tuple[int, str] | None:
        """As `process_of`."""
        try:
            size = path.stat().st_size
        except OSError:
            return None
        read, found = self._known.get(path, (0, None))
        if size < read:
            read, found = 0, None
        if size > read:  # the line of a start may have been incomplete
            found = process_of(path, max(0, read - MAX_START_BYTES)) or found
            self._known[path] = size, found
        return found


def last_lines(path: Path, count: int = 20) -> tuple[str, ...]:
    """The end of a worker's log, of its latest start, without Python's warnings; or why it cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        return (f"({path} cannot be read on this machine: {error.strerror})",)
    starts = [i for i, line in enumerate(lines) if line.startswith(START_OF_LOG)]
    kept, warned = [], False
    for line in lines[starts[-1] + 1 if starts else 0 :]:
        is_source = warned and line.startswith("  ")
        warned = PYTHON_WARNING.match(line) is not None
        if not (warned or is_source):
            kept.append(line)
    return tuple(kept[-count:])
