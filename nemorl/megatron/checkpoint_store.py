"""Checkpoints on disk: complete or absent, verified before they are used. Imports no torch.

<folder>/step_00000040/            a checkpoint; whatever the writers put there, and
<folder>/step_00000040/manifest.json   size and SHA-256 of every file, the step and its metrics
<folder>/.step_00000040.tmp/       one that is being written, or was when the run died
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nemorl.errors import RunError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,})")


class CorruptCheckpoint(RunError, ValueError):
    """A checkpoint that is not what its manifest says; the message names the file."""


class UnwritableCheckpoint(RunError):
    """A file of a checkpoint could not be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file where the system refuses to write it, as a full disk does."""
    try:
        yield
    except OSError as error:
        raise UnwritableCheckpoint(
            f"{path} cannot be written: {error.strerror or error}. Checkpoints that are complete are not "
            "touched: make room (checkpointing.keep says how many are kept) and continue with --resume."
        ) from error


@dataclass(frozen=True)
class FileRecord:
    path: str  # relative to the checkpoint
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    metrics: dict[str, float]
    files: tuple[FileRecord, ...]

    @classmethod
    def read(cls, checkpoint: Path) -> "Manifest":
        """Raises `CorruptCheckpoint` when there is none or it cannot be read."""
        path = checkpoint / MANIFEST
        try:
            raw = json.loads(path.read_text())
            files = tuple(FileRecord(**f) for f in raw["files"])
            return cls(int(raw["step"]), dict(raw["metrics"]), files)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path} is missing: the checkpoint was not completed") from None
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise CorruptCheckpoint(f"{path} cannot be read as a manifest: {error}") from error


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint, and why newer ones were passed over."""

    step: int
    path: Path
    metrics: dict[str, float]
    skipped: tuple[str, ...]


class CheckpointStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, step: int) -> Path:
        """A new empty folder to write the checkpoint of a step into; it counts only after `commit`."""
        temporary = self.temporary(step)
        shutil.rmtree(temporary, ignore_errors=True)
        with writing(temporary):
            temporary.mkdir(parents=True)
        return temporary

    def commit(self, step: int, metrics: Mapping[str, float], records: Iterable[FileRecord] = ()) -> Path:
        """Make what was written the checkpoint: checksums (of `records`, or read), flush to disk, rename.

        Raises `CorruptCheckpoint` where a file differs from its record.
        """
        temporary, final = self.temporary(step), self.path(step)
        known = {record.path: record for record in records}
        for record in known.values():
            _check_size(temporary / record.path, record.size)
        paths = sorted(p for p in temporary.rglob("*") if p.is_file())
        if not paths:
            raise ValueError(f"nothing was written into {temporary}, so there is no checkpoint to commit")
        files = (known.get(str(path.relative_to(temporary))) or _record(path, temporary) for path in paths)
        manifest = Manifest(step, dict(metrics), tuple(files))
        with writing(temporary / MANIFEST):
            (temporary / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
            for path in (*temporary.rglob("*"), temporary):
                _flush(path)
        replaced = self.folder / f".step_{step:08d}.old.tmp"
        if final.exists():
            # A run that was resumed from an older step writes this one again.
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        _flush(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def temporary(self, step: int) -> Path:
        return self.folder / f".step_{step:08d}.tmp"

    def latest_valid(self, before: float = math.inf) -> Found | None:
        """Return the newest complete checkpoint of a step `before`, or None.

        Corrupt ones are logged and renamed.
        """
        skipped: list[str] = []
        for step in sorted((step for step in self.steps() if step < before), reverse=True):
            path = self.path(step)
            try:
                manifest = verify(path)
            except CorruptCheckpoint as damage:
                logger.warning("checkpoint of step %d is not used: %s", step, damage)
                skipped.append(str(damage))
                aside = path.with_name(f"{path.name}.corrupt")  # or `prune` would count it
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            else:
                return Found(step, path, manifest.metrics, tuple(skipped))
        return None

    def corrupt(self) -> list[str]:
        """Return the names of the checkpoints that `latest_valid` has set aside."""
        return sorted(path.name for path in self.folder.glob("step_*.corrupt"))

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, complete or corrupt, ascending."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(p.name) for p in self.folder.iterdir() if p.is_dir())
        return sorted(int(name.group(1)) for name in names if name)

    def prune(self, keep: int, metric: str | None = None, higher_is_better: bool = True) -> None:
        """Remove all but the newest `keep` checkpoints and the one with the best value of `metric`."""
        steps = self.steps()
        best = self.best(metric, higher_is_better) if metric else None
        for step in sorted(set(steps) - {*steps[-keep:], best}):
            shutil.rmtree(self.path(step))
        for leftover in self.folder.glob(".step_*.tmp"):
            shutil.rmtree(leftover)

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which a run that returned to this one takes again."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later))

    def best(self, metric: str, higher_is_better: bool) -> int | None:
        """Step with the best recorded value of a metric; the newest of equals."""
        values: list[tuple[float, int]] = []
        for step in self.steps():
            with suppress(CorruptCheckpoint):
                value = Manifest.read(self.path(step)).metrics.get(metric, math.nan)
                if math.isfinite(value):
                    values.append((value if higher_is_better else -value, step))
        return max(values)[1] if values else None


def verify(checkpoint: Path) -> Manifest:
    """Return the manifest if every file is as written, else raise `CorruptCheckpoint` naming the first."""
    manifest = Manifest.read(checkpoint)
    for expected in manifest.files:
        path = checkpoint / expected.path
        _check_size(path, expected.size)
        if _record(path, checkpoint) != expected:
            raise CorruptCheckpoint(f"{path} has other contents than were written (SHA-256 differs)")
    return manifest


def _check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise CorruptCheckpoint(f"{path} is missing")
    size = path.stat().st_size
    if size != expected:
        raise CorruptCheckpoint(f"{path} has {size} bytes where {expected} were written")


def _record(path: Path, base: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(str(path.relative_to(base)), path.stat().st_size, digest)


def _flush(path: Path) -> None:
    """Put the file, or the entries of the folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
