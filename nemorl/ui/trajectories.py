"""The trajectories of a run as a table: filtered, sorted, counted and read by pages, for a million rows.

The rows are those of the run's index (`nemorl.observe.index`), or, of a run without one, the conversations of
its samples.jsonl. A table does not change: a run that continues has another one, of more rows, so the pages
of a table fit together while the run appends. Columns are copied from the records when they are first used,
and masks and orders are kept for the next page.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from nemorl.config.base import suggestion
from nemorl.observe.files import RunFolderError
from nemorl.observe.index import COLUMNS, REWARD, Records, TrajectoryIndex
from nemorl.observe.run_folder import RunPaths

from .errors import UiError
from .filters import Filter, FilterError, Kind, Mask, parse_filter

MAX_PAGE, MAX_BINS, MAX_NOTES = 1000, 200, 5
NUM_TABLES, NUM_ORDERS, NUM_MASKS = 3, 4, 8  # kept: a table of a million rows has up to 150 MB
REWARDS = "rewards."  # begins the name of a reward's column in filters, as `reward.` does in the index
_REQUIRED = ("step", "phase", "validation_set", "group", "sample", "task", "reward")
Source = Literal["index", "samples"]
Order = NDArray[np.int32]
T = TypeVar("T")
Row = dict[str, Any]


@dataclass(frozen=True)
class Query:
    """Rows that a filter leaves, in an order. Equal rows stay in the order in which they were written."""

    filter: str = ""
    sort: str = ""  # a column; empty: in the order in which they were written
    descending: bool = False


@dataclass(frozen=True)
class Page:
    rows: list[Row]
    offset: int
    matching: int
    total: int
    remarks: tuple[str, ...] = ()  # on the filter


@dataclass(frozen=True)
class Histogram:
    """Bin `i` has the values in [edges[i], edges[i + 1]); the last one ends beyond the largest value."""

    column: str
    edges: list[float]
    counts: list[int]
    unknown: int = 0  # NaN
    infinite: int = 0


@dataclass(frozen=True)
class _Key:
    file: Path
    identity: int  # of the file: a resumed run may replace it by one of the same name
    rows: int
    note: str = ""


class TrajectoryTable:
    """Rows that do not change. Its methods may be called from several threads."""

    def __init__(
        self,
        records: Records,
        texts: Mapping[str, Sequence[str]],
        source: Source = "index",
        notes: Sequence[str] = (),
        lines: Path | None = None,
    ) -> None:
        """`lines`: the file whose lines begin at the records' `line`, of the source `samples`."""
        self.records, self.texts, self.source, self.notes, self.lines = records, texts, source, notes, lines
        self._columns: dict[str, NDArray[Any]] = {}
        self._masks: _Kept[str, tuple[Filter, Mask]] = _Kept(NUM_MASKS)
        self._orders: _Kept[Query, Order] = _Kept(NUM_ORDERS)

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """Kinds of the columns by the name in filters, in their order."""
        found: dict[str, Kind] = {}
        for name in self.records.dtype.names or ():
            if name == "line":
                continue
            of_numbers: Kind = "boolean" if self.records.dtype[name] == np.bool_ else "number"
            found[_shown(name)] = "text" if name in self.texts else of_numbers
        return found

    def column(self, name: str) -> NDArray[Any]:
        """[rows] Numbers that refer to `texts` for a column of texts. Raises UiError for an unknown one."""
        if name not in self.kinds:
            raise UiError(404, f"no column {name}", name, suggestion(name, list(self.kinds)))
        if name not in self._columns:
            self._columns[name] = np.ascontiguousarray(self.records[_stored(name)])
        return self._columns[name]

    def matching(self, text: str) -> tuple[Filter, Mask]:
        """[rows] True for those of a filter. Raises UiError that names the characters that are wrong."""

        def find() -> tuple[Filter, Mask]:
            try:
                parsed = parse_filter(text, self)
            except FilterError as error:
                place = f"columns {error.start + 1} to {error.end}"
                raise UiError(400, error.message, place, error.fix) from error
            return parsed, parsed.mask(self)

        return self._masks.get(text, find)

    def order(self, query: Query) -> Order:
        """Numbers of the rows of a query."""
        return self._orders.get(query, lambda: self._order(query))

    def _order(self, query: Query) -> Order:
        chosen = np.flatnonzero(self.matching(query.filter)[1]).astype(np.int32)
        if not query.sort:
            return chosen[::-1] if query.descending else chosen
        values = self.column(query.sort)[chosen]
        if self.kinds[query.sort] == "text":  # by the alphabet, not by the numbers of the texts
            values = np.argsort(np.argsort(self.texts[query.sort]))[values]
        if values.dtype.kind != "f":
            values = values.astype(np.int64)
        # NaN is last in both directions.
        return chosen[np.argsort(-values if query.descending else values, kind="stable")]

    def page(self, query: Query, offset: int, count: int) -> Page:
        order, filtered = self.order(query), self.matching(query.filter)[0]
        offset, count = max(0, offset), min(max(0, count), MAX_PAGE)
        rows = self.rows(order[offset : offset + count])
        return Page(rows, offset, len(order), len(self), filtered.remarks)

    def rows(self, numbers: Sequence[int] | NDArray[np.integer[Any]]) -> list[Row]:
        """Rows by their numbers: values of the columns by name, with texts in place of their numbers."""
        names = self.records.dtype.names or ()
        chosen = self.records[np.asarray(numbers, np.intp)].tolist()
        rows = []
        for number, values in zip(numbers, chosen, strict=True):
            row: Row = {"row": int(number)}
            for name, value in zip(names, values, strict=True):
                row[_shown(name)] = self.texts[name][value] if name in self.texts else value
            rows.append(row)
        return rows

    def histogram(self, text: str, column: str, bins: int = 40) -> Histogram:
        """Of a column of numbers over the rows of a filter. Edges are short numbers, to be put in filters."""
        if self.kinds.get(column, "number") != "number":
            numbers = [name for name, kind in self.kinds.items() if kind == "number"]
            raise UiError(400, f"{column} has no numbers", column, f"choose one of {', '.join(numbers)}")
        values = self.column(column)[self.matching(text)[1]]
        unknown = infinite = 0
        if values.dtype.kind == "f":
            unknown = int(np.isnan(values).sum())
            finite = values[np.isfinite(values)]
            infinite = len(values) - unknown - len(finite)
            values = finite
        if not len(values):
            return Histogram(column, [], [], unknown, infinite)
        edges = _edges(float(values.min()), float(values.max()), min(max(1, bins), MAX_BINS), values.dtype)
        # In the precision of the column, in which filters compare.
        places = np.searchsorted(np.asarray(edges, values.dtype), values, side="right") - 1
        counts = np.bincount(np.clip(places, 0, len(edges) - 2), minlength=len(edges) - 1)
        return Histogram(column, edges, counts.tolist(), unknown, infinite)

    def counts(self, text: str) -> dict[str, dict[str, int]]:
        """Rows of a filter by text or boolean, for each column in which the table has at least two."""
        mask, found = self.matching(text)[1], {}
        for name, kind in self.kinds.items():
            if kind == "number":
                continue
            names = list(self.texts[name]) if kind == "text" else ["false", "true"]
            values = self.column(name).astype(np.intp)
            if (np.bincount(values, minlength=len(names)) > 0).sum() > 1:
                counted = np.bincount(values[mask], minlength=len(names)).tolist()
                found[name] = dict(zip(names, counted, strict=True))
        return found

    def find(self, step: int, group: int, sample: int, series: "Series") -> int:
        """The number of a trajectory's row. Raises UiError."""
        mask = self._of_series(series) & (self.column("step") == step) & (self.column("group") == group)
        found = np.flatnonzero(mask & (self.column("sample") == sample))
        if not len(found):
            name = f"{step}/{group}/{sample}"
            fix = "choose one of the table; a resumed run takes its later steps again"
            raise UiError(404, f"the run has no trajectory {name}{series}", name, fix)
        return int(found[-1])

    def siblings(self, number: int) -> list[Row]:
        """The trajectories of a row's group, or, of samples, those of its task in its step."""
        row = self.rows([number])[0]
        mask = self._of_series(Series.of(row)) & (self.column("step") == row["step"])
        of = "group" if self.source == "index" else "task"
        found = np.flatnonzero(mask & (self.column(of) == row[of]))
        return self.rows(found[np.argsort(self.column("sample")[found], kind="stable")])

    def of_task(
        self, task: int, series: "Series", offset: int, count: int, *, stored: bool = False, each: bool = True
    ) -> Page:
        """The trajectories of a task, from the first step to the last.

        `stored`: those with tokens only. Without `each` only the first one of each step.
        """
        found = self._of_task(task, series)
        if stored and "stored" in self.kinds:
            found = found[self.column("stored")[found]]
        if not each:
            found = found[np.unique(self.column("step")[found], return_index=True)[1]]
        offset, count = max(0, offset), min(max(0, count), MAX_PAGE)
        return Page(self.rows(found[offset : offset + count]), offset, len(found), len(self))

    def trend(self, task: int, series: "Series") -> dict[str, list[float]]:
        """Mean reward of a task in each of its steps."""
        found = self._of_task(task, series)
        found = found[np.isfinite(self.column("reward")[found])]
        steps, places = np.unique(self.column("step")[found], return_inverse=True)
        counts = np.bincount(places, minlength=len(steps))
        sums = np.bincount(places, self.column("reward")[found], len(steps))
        return {"steps": steps.tolist(), "rewards": (sums / np.maximum(counts, 1)).tolist()}

    def last_of_task(self, task: int, validation_set: str, text: str) -> list[Row]:
        """The trajectories of a task among the rows of a filter, of its last step there."""
        mask = self.matching(text)[1] & (self.column("task") == task)
        found = np.flatnonzero(mask & self._has_text("validation_set", validation_set))
        steps = self.column("step")[found]
        return self.rows(found[steps == steps.max()]) if len(found) else []

    def _of_task(self, task: int, series: "Series") -> Order:
        found = np.flatnonzero(self._of_series(series) & (self.column("task") == task)).astype(np.int32)
        return found[np.argsort(self.column("step")[found], kind="stable")]

    def _of_series(self, series: "Series") -> Mask:
        return self._has_text("phase", series.phase) & self._has_text("validation_set", series.validation_set)

    def _has_text(self, column: str, text: str) -> Mask:
        known = list(self.texts[column])
        return np.asarray(self.column(column) == (known.index(text) if text in known else -1))

    def sample(self, number: int) -> dict[str, Any]:
        """The conversation of a row of samples.jsonl."""
        assert self.lines is not None
        try:
            with self.lines.open("rb") as file:
                file.seek(int(self.records["line"][number]))
                return dict(json.loads(file.readline()))
        except (OSError, ValueError) as error:
            fix = "load the page again: a resumed run writes the file again"
            raise UiError(409, f"the line cannot be read: {error}", str(self.lines), fix) from error


@dataclass(frozen=True)
class Series:
    """Whose trajectories: of training, or of a validation."""

    phase: str = "training"
    validation_set: str = ""

    @classmethod
    def of(cls, row: Row) -> "Series":
        return cls(row["phase"], row["validation_set"])

    def __str__(self) -> str:
        named = f" {self.validation_set}" if self.validation_set else ""
        return "" if self.phase == "training" else f" of the {self.phase}{named}"


class Tables:
    """Opens the tables of runs, and keeps the latest ones."""

    def __init__(self) -> None:
        self._tables: _Kept[_Key, TrajectoryTable] = _Kept(NUM_TABLES)
        self._corrupt: set[tuple[Path, int]] = set()  # files of rows, with their identities

    def open(self, run: Path, rows: int | None = None) -> TrajectoryTable:
        """The table of a run; `rows`: as it was when it had that many. Raises UiError where nothing is."""
        paths = RunPaths(run)
        try:
            table = self._of_index(paths, rows)
            if table is None:  # the run has written new texts in between, or the rows are corrupt
                table = self._of_index(paths, rows, is_corrupt=True)
        except (RunFolderError, OSError) as error:
            return self._samples(paths, str(error))
        assert table is not None
        return table

    def _of_index(
        self, paths: RunPaths, rows: int | None, *, is_corrupt: bool = False
    ) -> TrajectoryTable | None:
        """None if rows refer to unknown texts; `is_corrupt`: those rows and all after them are left out.

        Raises RunFolderError and OSError.
        """
        columns, records = TrajectoryIndex(paths.trajectories).read()
        if missing := [name for name in _REQUIRED if name not in columns.types]:
            raise RunFolderError(f"{paths.trajectories / COLUMNS} lacks the columns {', '.join(missing)}")
        file = paths.trajectories / columns.file
        try:
            identity = file.stat().st_ino
        except OSError as error:  # replaced meanwhile
            raise UiError(409, f"{file} was replaced", str(file), "load the page again") from error
        records = records if rows is None else records[: max(0, rows)]
        key, notes = _Key(file, identity, len(records)), []
        if (first := None if key in self._tables else columns.first_corrupt(records)) is not None:
            if not is_corrupt:
                return None
            self._corrupt.add((file, identity))
            if not first:
                raise RunFolderError(f"{file} is corrupt: its rows refer to texts that {COLUMNS} lacks")
            records = records[:first]
            notes = [f"{file} is corrupt from row {first + 1} on; the rows before it are shown"]
            key = _Key(file, identity, first, notes[0])
        table = self._tables.get(key, lambda: TrajectoryTable(records, columns.texts, notes=notes))
        if table.texts != columns.texts:  # new texts come with new rows; a table has those of its rows
            table.texts = columns.texts
        return table

    def count(self, run: Path) -> int:
        """Rows that the run has now, without a table of them. Raises UiError."""
        folder = RunPaths(run).trajectories
        try:
            columns, records = TrajectoryIndex(folder).read()
            file = folder / columns.file
            is_corrupt = (file, file.stat().st_ino) in self._corrupt
        except (RunFolderError, OSError):
            is_corrupt = True
        return len(self.open(run)) if is_corrupt else len(records)

    def _samples(self, paths: RunPaths, problem: str) -> TrajectoryTable:
        """Those of samples.jsonl, with a note why."""
        path = paths.samples
        try:
            stat = path.stat()
        except OSError:
            fix = "runs write them with logger.trajectories: sampled or all, and `nemorl rollout` always"
            if any(paths.trajectories.glob("step_*.json")):
                fix = f"`nemorl show {paths.root}` prints stored trajectories, for which it needs no index"
            raise UiError(404, problem, str(paths.trajectories), fix) from None
        key = _Key(path, stat.st_ino, stat.st_size, problem)
        return self._tables.get(key, lambda: _read_samples(path, problem))


def _read_samples(path: Path, problem: str) -> TrajectoryTable:
    found, notes, start = [], [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):  # else it is being written
                try:
                    found.append(_Sample.of(json.loads(line), number, start))
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    notes.append(f"{path.name}, line {number} is left out: {error!r}")
            start += len(line)
    if len(notes) > MAX_NOTES:
        notes = [*notes[:MAX_NOTES], f"{len(notes) - MAX_NOTES} more lines are left out"]
    names = dict.fromkeys(name for each in found for name in each.rewards)
    texts = {name: sorted({each.texts[name] for each in found}) for name in ("phase", "stop")}
    dtype = [
        ("step", "<i4"),
        ("phase", "<u2"),
        ("validation_set", "<u2"),
        ("group", "<i8"),
        ("sample", "<i4"),
    ]
    dtype += [("task", "<i8"), ("tokens", "<i4"), ("sampled", "<i4"), ("reward", "<f4"), ("stop", "<u2")]
    dtype += [("seconds_environment", "<f4"), ("failed", "|b1"), ("line", "<i8")]
    records = np.zeros(len(found), np.dtype(dtype + [(REWARD + name, "<f4") for name in names]))
    for name in (
        "step",
        "group",
        "task",
        "tokens",
        "sampled",
        "reward",
        "seconds_environment",
        "failed",
        "line",
    ):
        records[name] = [each.numbers[name] for each in found]
    for name, known in texts.items():
        records[name] = [known.index(each.texts[name]) for each in found]
    for name in names:
        records[REWARD + name] = [each.rewards.get(name, np.nan) for each in found]
    reason = f"{problem}. The conversations of samples.jsonl are shown, without tokens"
    return TrajectoryTable(records, texts | {"validation_set": [""]}, "samples", [reason, *notes], path)


@dataclass(frozen=True)
class _Sample:
    """A line of samples.jsonl, also of an older release, which lacks later fields."""

    numbers: dict[str, float]
    texts: dict[str, str]
    rewards: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, line: Any, number: int, start: int) -> "_Sample":
        sampled = int(line.get("sampled_tokens", 0))
        numbers = {
            **{"step": int(line["step"]), "group": number, "task": int(line.get("task", -1))},
            **{"tokens": int(line.get("prompt_tokens", 0)) + sampled, "sampled": sampled},
            **{"reward": float(line["reward"]), "failed": line.get("error") is not None, "line": start},
            "seconds_environment": float(line.get("seconds_environment") or 0.0),
        }
        if any(abs(numbers[name]) >= 2**31 for name in ("step", "task", "tokens", "sampled")):
            raise ValueError("a number is too large")
        texts = {"phase": str(line.get("phase", "training")), "stop": str(line.get("stop", ""))}
        return cls(numbers, texts, {str(k): float(v) for k, v in (line.get("rewards") or {}).items()})


K = TypeVar("K")


class _Kept(OrderedDict[K, T]):
    """The values that were used last. A value that two threads ask for at once may be found twice."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._lock = most, threading.Lock()

    def get(self, key: K, find: Callable[[], T]) -> T:  # type: ignore[override]
        with self._lock:
            if key in self:
                self.move_to_end(key)
                return self[key]
        value = find()
        with self._lock:
            self[key] = value
            while len(self) > self._most:
                self.popitem(last=False)
        return value


def _shown(stored: str) -> str:
    return REWARDS + stored.removeprefix(REWARD) if stored.startswith(REWARD) else stored


def _stored(shown: str) -> str:
    return REWARD + shown.removeprefix(REWARDS) if shown.startswith(REWARDS) else shown


def _edges(low: float, high: float, bins: int, dtype: np.dtype[Any]) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, of integers at least 1, around the values."""
    width = max((high - low) / bins, abs(high) * 1e-6, 1e-30)
    if dtype.kind != "f":
        width = max(width, 1.0)
    power = np.floor(np.log10(width) + 1e-9)
    digit = next(digit for digit in (1, 2, 5, 10) if digit * 10.0**power >= width * (1 - 1e-9))
    step = digit * 10.0**power
    first, last = np.floor(low / step + 1e-9), np.floor(high / step + 1e-9) + 1
    decimals = max(0, int(-power) + 1)
    return [round(float(number * step), decimals) for number in np.arange(first, last + 1)]
