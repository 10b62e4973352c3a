"""Files that survive a crash: replaced atomically, or extended by complete lines."""

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
    """A file of the run could not be written; its former content is intact."""


class TrackerMissing(RunError):
    """The package of a configured tracker is not installed."""


JsonObject = dict[str, Any]


def write_failed(path: Path, error: OSError) -> WriteError:
    problem = f"{path} could not be written: {error.strerror or error}; {room_left(path.parent)}"
    fix = "Make room or fix the folder, then continue with --resume."
    return WriteError(f"{problem}. What was written before is complete. {fix}")


def room_left(folder: Path) -> str:
    """`folder` may not exist yet."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        return f"{shutil.disk_usage(existing).free / 2**20:.1f} MB are free on its disk"
    except OSError:
        return f"its folder {existing} cannot be read"


def write_atomically(path: Path, text: str, *, private: bool = False, durable: bool = True) -> None:
    """Replace a file: after a crash it holds the old text or the new one. Raises `WriteError`.

    Without `durable` that is so after a crash of the process; the machine's may leave an empty file.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a crash, perhaps with another mode
        temporary.touch(0o600 if private else 0o666)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_failed(path, error) from error


class JsonLinesWriter:
    """Appends JSON objects, one a line; a line is written completely or not at all."""

    def __init__(self, path: Path) -> None:
        """Open for appending and cut off a partial last line. Raises `WriteError`."""
        self.path = path
        self._open()

    def _open(self) -> None:
        try:
            self._file = self.path.open("ab", buffering=0)
            self._size = self.path.read_bytes().rfind(b"\n") + 1
            self._file.truncate(self._size)
        except OSError as error:
            raise write_failed(self.path, error) from error

    def keep(self, keep: Callable[[JsonObject], bool]) -> None:
        """Drop lines as `keep_json_lines`, and append after the rest."""
        self.close()
        keep_json_lines(self.path, keep)
        self._open()

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line, unbuffered. Raises `WriteError`, with the file as before."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        unwritten = line
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) or 0 :]
        except OSError as error:
            # A full disk may have taken half of the line; freeing space always works.
            self._file.truncate(self._size)
            raise write_failed(self.path, error) from error
        self._size += len(line)

    def close(self) -> None:
        self._file.close()


def read_end(path: Path, max_bytes: int) -> tuple[bytes, bool]:
    """The last bytes of a file, from the beginning of a line; whether there are more. Raises OSError."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - max_bytes)
        file.seek(start)
        data = file.read()
    return (data.partition(b"\n")[2] if start else data), start > 0


def read_json_lines(path: Path) -> list[JsonObject]:
    """Return the objects of a file without a partial last line. Raises `RunFolderError` naming a bad line."""
    if not path.exists():
        return []
    objects: list[JsonObject] = []
    # The text after the last line end is empty, or a partial line.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            parsed = json.loads(line)
        except ValueError as error:
            problem = f"is not JSON ({error}): {line[:40]!r}"
            raise RunFolderError(f"{path}, line {number} {problem}. Remove the line to continue.") from error
        if not isinstance(parsed, dict):
            problem = f"is {line[:40]!r} instead of a JSON object"
            raise RunFolderError(f"{path}, line {number} {problem}. Remove the line.")
        objects.append(parsed)
    return objects


def keep_json_lines(path: Path, keep: Callable[[JsonObject], bool]) -> None:
    """Drop the objects for which `keep` is false, atomically. Raises `RunFolderError` and `WriteError`."""
    if path.exists():
        kept = [line for line in read_json_lines(path) if keep(line)]
        text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in kept)
        write_atomically(path, text)
