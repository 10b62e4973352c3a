"""Files that survive a crash: replaced whole, or grown by whole lines.

What can go wrong while a run is recorded.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemorl.errors import RunError


class RunFolderError(RunError):
    """The run folder is in use, holds another run, or one of its files is corrupt."""


class WriteError(RunError):
    """A file of the run could not be written; what it held before is still whole."""


class TrackerMissing(RunError):
    """A tracker is asked for whose package is not installed."""


JsonObject = dict[str, Any]


def write_failed(path: Path, error: OSError) -> WriteError:
    """The sentence for a file that could not be written, with the room that is left on its disk."""
    return WriteError(
        f"{path} could not be written: {error.strerror or error}; {room_left(path.parent)}. What was written "
        "before is complete. Make room or fix the folder, then continue with --resume."
    )


def room_left(folder: Path) -> str:
    """Half a sentence about the disk of a folder, which need not be there yet."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        return f"{shutil.disk_usage(there).free / 2**20:.1f} MB are free on its disk"
    except OSError:
        return f"its folder {there} cannot be read"


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file atomically: after a crash it holds the old text or the new one. Raises `WriteError`.

    A private one is read and written by its owner only (mode 0600).
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8", opener=_open_private if private else None) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_failed(path, error) from error


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # of one that a crash has left there
    return descriptor


class JsonLinesWriter:
    """Appends JSON objects, one a line; each line is in the file whole or not at all."""

    def __init__(self, path: Path) -> None:
        """Open for appending; a partial last line, left by a crash, is cut off. Raises `WriteError`."""
        self.path = path
        try:
            self._file = path.open("ab", buffering=0)
            self._size = _end_of_last_line(path)
            self._file.truncate(self._size)
        except OSError as error:
            raise write_failed(path, error) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line and hand it to the operating system. Raises `WriteError`, with the file as before."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        try:
            _write_all(self._file.write, line)
        except OSError as error:
            # A full disk may have taken half of the line; giving up room always works.
            self._file.truncate(self._size)
            raise write_failed(self.path, error) from error
        self._size += len(line)

    def close(self) -> None:
        """Close the file; nothing is buffered here."""
        self._file.close()


def read_json_lines(path: Path) -> list[JsonObject]:
    """All objects of the file; none if it is missing. A partial last line is left out.

    Raises `RunFolderError` naming file and line when any other line is not a JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    # What follows the last line end is empty, or a line that a crash tore.
    return [_parse(path, number, line) for number, line in enumerate(lines[:-1], start=1)]


def keep_json_lines(path: Path, keep: Callable[[JsonObject], bool]) -> None:
    """Drop the objects for which `keep` says no, atomically. Raises `RunFolderError` and `WriteError`."""
    if not path.exists():
        return
    kept = [line for line in read_json_lines(path) if keep(line)]
    write_atomically(
        path, "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in kept)
    )


def _write_all(write: Callable[[bytes], int | None], data: bytes) -> None:
    while data:
        data = data[write(data) or 0 :]


def _end_of_last_line(path: Path) -> int:
    """Bytes up to and including the last line end."""
    return path.read_bytes().rfind(b"\n") + 1


def _parse(path: Path, number: int, line: bytes) -> JsonObject:
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise RunFolderError(
            f"{path}, line {number} is not JSON ({error}): {line[:40]!r}. Remove the line to continue."
        ) from error
    if not isinstance(parsed, dict):
        raise RunFolderError(
            f"{path}, line {number} is {line[:40]!r} instead of a JSON object. Remove the line."
        )
    return parsed
