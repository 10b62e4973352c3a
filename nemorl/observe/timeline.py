"""timeline.json: when each stage ran, in the Chrome trace format; Perfetto and chrome://tracing open it.

The file is a complete JSON array after every event. Should a crash tear the last line, it still opens: the
format allows an array without its closing bracket ("Trace Event Format", section "JSON Array Format").
"""

import json
import os
from pathlib import Path

from .files import JsonObject, write_failed
from .stages import Stage

STEP_TRACK = 0
END = b"]\n"


class Timeline:
    """Writes one span a stage, each stage's name on a track of its own, so overlapping shows as such.

    A resumed run goes on in the same file as another process, so steps that were repeated show twice.
    """

    def __init__(self, path: Path, title: str = "run") -> None:
        """Open the file, or go on in it. Raises `WriteError`."""
        self._path = path
        self._process = os.getpid()
        self._tracks: dict[str, int] = {}
        try:
            path.touch()
            self._file = path.open("r+b", buffering=0)
            self._end = self._end_of_events()  # where the closing bracket stands
        except OSError as error:
            raise write_failed(path, error) from error
        self._name("process_name", STEP_TRACK, title)
        self._name("thread_name", STEP_TRACK, "steps")

    def stage_started(self, stage: Stage) -> None:
        """Nothing is written before a stage's length is known."""

    def stage_advanced(self, stage: Stage) -> None:
        """Progress is not drawn."""

    def stage_finished(self, stage: Stage) -> None:
        """Add the stage's span."""
        if stage.name not in self._tracks:
            self._tracks[stage.name] = len(self._tracks) + 1
            self._name("thread_name", self._tracks[stage.name], stage.name)
        arguments: JsonObject = {"done": stage.done, "unit": stage.unit} if stage.unit else {}
        if stage.outcome != "done":
            arguments["outcome"] = stage.outcome
        self._span(stage.name, self._tracks[stage.name], stage.started, stage.seconds, arguments)

    def step_finished(self, step: int, started: float, seconds: float) -> None:
        """Add the step's span."""
        self._span(f"step {step}", STEP_TRACK, started, seconds, {"step": step})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _name(self, kind: str, track: int, name: str) -> None:
        self._append({"ph": "M", "name": kind, "pid": self._process, "tid": track, "args": {"name": name}})

    def _span(self, name: str, track: int, started: float, seconds: float, arguments: JsonObject) -> None:
        microseconds = {"ts": round(started * 1e6), "dur": round(seconds * 1e6)}
        self._append(
            {"ph": "X", "name": name, "pid": self._process, "tid": track, **microseconds, "args": arguments}
        )

    def _append(self, event: JsonObject) -> None:
        """Put the event where the closing bracket is, with a new bracket behind it."""
        line = (b"," if self._end > len(b"[\n") else b"") + json.dumps(event).encode() + b"\n"
        try:
            self._file.seek(self._end)
            written = self._file.write(line + END)
            if written != len(line + END):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self._file.truncate(self._end)
            raise write_failed(self._path, error) from error
        self._end += len(line)

    def _end_of_events(self) -> int:
        """The offset behind the last whole event; a new file gets its opening bracket."""
        lines = self._file.read().splitlines(keepends=True)
        if not lines or lines[0] != b"[\n":
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(b"[\n" + END)
            return len(b"[\n")
        whole = [line for line in lines[1:] if line.endswith(b"}\n")]
        end = len(lines[0]) + sum(map(len, whole))
        self._file.truncate(end)
        return end
