"""A folder that appears complete or not at all."""

import os
import tempfile
from pathlib import Path


def begin_folder(out: Path) -> Path:
    """A temporary folder beside `out`, so that the last rename stays on one file system.

    Raises FileExistsError where `out` exists.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists already; choose another folder, or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))


def complete_folder(folder: Path, out: Path) -> None:
    """Make a temporary folder `out`, readable by all and on disk."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        _fsync(path)
    _fsync(folder)
    folder.chmod(0o755)
    folder.rename(out)
    _fsync(out.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
