"""A row of fixed width for each trajectory of a run, so that millions of them can be sorted and filtered.

    trajectories/columns.json   the columns, the texts that numbers refer to, and the name of the other file
    trajectories/index.bin      the rows, as a numpy record array

Rows are appended after all else that is written of their step, so what they refer to is complete. Where a run
gives a reward of a new name, the columns change, and a file of another name replaces that of the rows.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import RunFolderError, write_atomically, write_failed

FORMAT = 1
COLUMNS = "columns.json"
REWARD = "reward."  # begins the name of the column of a reward by its name
UNKNOWN = float("nan")

Records = NDArray[np.void]


@dataclass(frozen=True)
class TrajectoryRow:
    step: int
    phase: str  # training or validation
    group: int
    sample: int  # its place in the group
    task: int
    turns: int
    tokens: int
    sampled: int  # tokens of the policy
    reward: float  # the weighted sum
    stop: str
    min_version: int  # oldest weights that sampled a token; -1 when none was sampled
    max_version: int
    seconds_generation: float
    seconds_environment: float
    validation_set: str = ""
    environment: str = ""
    player: str = ""
    fork: int = 0
    retries: int = 0
    failed: bool = False
    trains: bool = False
    stored: bool = False  # with its tokens
    advantage: float = UNKNOWN  # mean over its trained tokens, as trained
    logprob_gap: float = UNKNOWN  # mean of |trainer - engine| over these
    rewards: Mapping[str, float] = field(default_factory=dict)  # by name, before weights


_TYPES: dict[Any, str] = {int: "<i8", float: "<f4", bool: "|b1", str: "<u2"}
_NARROW = dict.fromkeys(("step", "turns", "tokens", "sampled", "sample", "fork", "retries"), "<i4")
_NARROW |= dict.fromkeys(("min_version", "max_version"), "<i4")
# Texts are numbers that refer to them.
_FIXED = {
    each.name: _NARROW.get(each.name, _TYPES[each.type])
    for each in fields(TrajectoryRow)
    if each.name != "rewards"
}
_TEXTS = tuple(each.name for each in fields(TrajectoryRow) if each.type is str)
_KNOWN_TYPES = {*_TYPES.values(), *_NARROW.values()}
_FILE = re.compile(r"index(?:-(\d+))?\.bin")


@dataclass(frozen=True)
class Columns:
    types: Mapping[str, str]  # numpy's, by name
    texts: Mapping[str, Sequence[str]]  # that the numbers of a column refer to, by its name
    file: str = "index.bin"
    format: int = FORMAT

    @property
    def dtype(self) -> np.dtype[np.void]:
        return np.dtype(list(self.types.items()))

    @property
    def rewards(self) -> list[str]:
        return [name.removeprefix(REWARD) for name in self.types if name.startswith(REWARD)]

    def check(self) -> None:
        """Raises ValueError for what no writer has written: rows would be read wrong, or not at all."""
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not {FORMAT}")
        for name, given in self.types.items():
            if given not in _KNOWN_TYPES:
                raise ValueError(f"the column {name} has the unknown type {given!r}")
        for name, known in self.texts.items():
            if self.types.get(name) != _TYPES[str] or not isinstance(known, list):
                raise ValueError(f"{name} is no column of texts")
        if not _FILE.fullmatch(self.file):
            raise ValueError(f"{self.file!r} is no name of a file of rows")

    def first_corrupt(self, records: Records) -> int | None:
        """The first row that refers to a text that the columns lack; None if there is none.

        In rows that were read after their columns it may also be a text that the run has added since.
        """
        wrong = np.zeros(len(records), np.bool_)
        for name, known in self.texts.items():
            wrong |= records[name] >= len(known)
        return int(wrong.argmax()) if wrong.any() else None


class TrajectoryIndex:
    """Reads the rows of a run, also while it continues."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> tuple[Columns, Records]:
        """All complete rows. Raises RunFolderError where there are none, or those of another release."""
        path = self._folder / COLUMNS
        for _ in range(3):  # the file of rows may be replaced in between
            try:
                columns = Columns(**json.loads(path.read_bytes()))
                columns.check()
            except FileNotFoundError:
                raise RunFolderError(f"{self._folder} has no index of trajectories") from None
            except (ValueError, TypeError, AttributeError) as error:
                raise RunFolderError(f"{path} cannot be read: {error}") from error
            with suppress(FileNotFoundError):
                return columns, _rows(self._folder / columns.file, columns.dtype)
        raise RunFolderError(f"{self._folder / columns.file} is missing")


def _rows(path: Path, dtype: np.dtype[np.void]) -> Records:
    count = path.stat().st_size // dtype.itemsize
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)


class IndexWriter:
    """Appends rows in the folder of a run, which it creates. Methods raise WriteError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._size = folder, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_failed(folder, error) from error
        try:
            self._columns, rows = TrajectoryIndex(folder).read()
            self._size = rows.nbytes
        except RunFolderError:
            self._columns = Columns(_FIXED, {key: [] for key in _TEXTS})  # written with the first rows

    def append(self, rows: Iterable[TrajectoryRow]) -> None:
        listed = list(rows)
        if not listed:
            return
        self._widen(listed)
        records = np.zeros(len(listed), self._columns.dtype)
        for name in _FIXED:
            values: list[Any] = [getattr(row, name) for row in listed]
            if name in self._columns.texts:
                numbers = {text: number for number, text in enumerate(self._columns.texts[name])}
                values = [numbers[text] for text in values]
            records[name] = values
        for name in self._columns.rewards:
            records[REWARD + name] = [row.rewards.get(name, UNKNOWN) for row in listed]
        path = self._folder / self._columns.file
        try:
            with path.open("r+b", buffering=0) as file:
                file.truncate(self._size)  # what an append before left of its rows
                file.seek(self._size)
                data = memoryview(records.tobytes())
                while data:
                    data = data[file.write(data) :]
        except OSError as error:
            raise write_failed(path, error) from error
        self._size += records.nbytes

    def keep_until(self, step: int) -> None:
        """Remove the rows of later steps, which a run takes again."""
        rows = self._written()
        kept = rows[rows["step"] <= step]
        if len(kept) < len(rows):
            self._replace(self._columns, kept)

    def _written(self) -> Records:
        """The rows of complete appends."""
        dtype = self._columns.dtype
        if not self._size:
            return np.zeros(0, dtype)
        return _rows(self._folder / self._columns.file, dtype)[: self._size // dtype.itemsize]

    def _widen(self, rows: Sequence[TrajectoryRow]) -> None:
        """Columns for rewards of new names, numbers for new texts.

        They are written before the rows that refer to them. A run that is killed in between leaves texts that
        no row refers to, and the next start gives them the same numbers: known texts keep their places.
        """
        old = self._columns
        types = dict(old.types)
        for name in dict.fromkeys(name for row in rows for name in row.rewards):
            types.setdefault(REWARD + name, "<f4")
        texts = {
            name: list(dict.fromkeys([*known, *(getattr(row, name) for row in rows)]))
            for name, known in old.texts.items()
        }
        if types != old.types or not self._size:
            former = self._written()
            wider = np.zeros(len(former), np.dtype(list(types.items())))
            for name in types:
                wider[name] = former[name] if name in old.types else UNKNOWN
            self._replace(Columns(types, texts, old.file), wider)
        elif texts != old.texts:
            self._columns = Columns(types, texts, old.file)
            self._write_columns()

    def _replace(self, columns: Columns, rows: Records) -> None:
        """Write the rows to a file of another name, and let the columns name it."""
        former = self._folder / columns.file
        number = _FILE.fullmatch(columns.file)
        assert number is not None
        later = f"index-{int(number[1] or 1) + 1}.bin" if former.exists() else columns.file
        path = self._folder / later
        try:
            with path.open("wb") as file:
                file.write(rows.tobytes())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            path.unlink(missing_ok=True)
            raise write_failed(path, error) from error
        self._columns, self._size = Columns(columns.types, columns.texts, later), rows.nbytes
        self._write_columns()
        for other in self._folder.glob("index*.bin"):
            if other != path:
                other.unlink(missing_ok=True)

    def _write_columns(self) -> None:
        content = {each.name: getattr(self._columns, each.name) for each in fields(Columns)}
        write_atomically(self._folder / COLUMNS, json.dumps(content) + "\n")
