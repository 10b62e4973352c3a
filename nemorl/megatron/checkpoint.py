"""Saving and loading one rank's training state."""

from pathlib import Path
from typing import Any


def save(folder: Path, *_: Any) -> None:
    raise NotImplementedError


def load(folder: Path, *_: Any) -> None:
    raise NotImplementedError
