"""The metrics of a run as columns, which grow with the file, and what of them fits on a screen."""

import json
import math
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nemorl.observe.metrics import RESERVED_KEYS

Floats = NDArray[np.float64]
Axis = Literal["step", "tokens", "time"]
AXES: Mapping[str, tuple[str, ...]] = {
    "tokens": ("tokens/trained", "tokens/generated"),
    "time": ("time/step",),
}
MAX_PROBLEMS = 20
MAX_OPEN = 16  # runs whose metrics are kept


@dataclass(frozen=True)
class Nonfinite:
    step: int
    name: str
    kind: str  # nan, inf or -inf


class MetricsFile:
    """Reads what was appended since the last look. A file that a resumed run has cut is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clear()

    def _clear(self) -> None:
        self.size = 0  # bytes that were read
        self.steps: list[int] = []
        self.order: list[str] = []  # names of the last line
        self.nonfinite: list[Nonfinite] = []
        self.problems: list[str] = []  # of lines that are no metrics
        self._inode, self._lines = 0, 0
        self._columns: dict[str, list[float]] = {}

    def refresh(self) -> bool:
        """Whether there is more than before, or less. Raises OSError; a file that is missing is empty."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            changed = bool(self.size)
            self._clear()
            return changed
        with file:
            found = os.fstat(file.fileno())
            changed = False
            if found.st_ino != self._inode or found.st_size < self.size:
                changed = bool(self.size)
                self._clear()
                self._inode = found.st_ino
            if found.st_size == self.size:
                return changed
            file.seek(self.size)
            data = file.read()
        complete = data.rfind(b"\n") + 1  # what follows is being written
        for line in data[:complete].splitlines():
            self._lines += 1
            self._add(line)
        self.size += complete
        return changed or complete > 0

    def column(self, name: str) -> Floats:
        """The metric at each of `steps`, NaN where it was not measured."""
        values = self._columns.get(name, [])
        return np.array(values + [math.nan] * (len(self.steps) - len(values)))

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def last(self, name: str, count: int = 1) -> Floats:
        """The metric in the last steps, without those that lack it."""
        values = self._columns.get(name, [])
        first = len(self.steps) - count
        found = np.array(values[max(0, first) :], dtype=np.float64)
        return found[~np.isnan(found)]

    def positions(self, axis: Axis) -> Floats:
        """Of each step on an axis: its number, or all tokens or seconds of the steps until its end."""
        if axis == "step":
            return np.array(self.steps, dtype=np.float64)
        for name in AXES[axis]:
            if name in self._columns:
                return np.cumsum(np.nan_to_num(self.column(name)))
        return np.array(self.steps, dtype=np.float64)

    def _add(self, line: bytes) -> None:
        try:
            found: Any = json.loads(line)
            step, values = int(found["step"]), {k: v for k, v in found.items() if k not in RESERVED_KEYS}
            values |= {name: float(kind) for name, kind in (found.get("nonfinite") or {}).items()}
            numbers = {name: float(value) for name, value in values.items() if value is not None}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if len(self.problems) < MAX_PROBLEMS:
                what = "is not JSON" if isinstance(error, ValueError) else "is no step's metrics"
                self.problems.append(f"line {self._lines} of {self.path.name} {what} and is left out")
            return
        count = len(self.steps)
        self.steps.append(step)
        for name, number in numbers.items():
            values_so_far = self._columns.setdefault(name, [])
            values_so_far.extend([math.nan] * (count - len(values_so_far)))
            values_so_far.append(number)
            if not math.isfinite(number):
                self.nonfinite.append(Nonfinite(step, name, str(number)))
        self.order = list(numbers)


class MetricsFiles:
    """The files of the latest runs that were asked for."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, MetricsFile] = OrderedDict()

    def of(self, path: Path) -> MetricsFile:
        """The metrics of a file, up to date. Raises OSError."""
        found = self._files.pop(path, None) or MetricsFile(path)
        self._files[path] = found
        while len(self._files) > MAX_OPEN:
            self._files.popitem(last=False)
        found.refresh()
        return found


def smoothed(values: Floats, weight: float) -> Floats:
    """The exponential moving average, without its bias to 0; gaps stay gaps, and are passed over."""
    result, total, norm = np.full(len(values), math.nan), 0.0, 0.0
    for at, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
            result[at] = total / norm
    return result


def downsampled(x: Floats, y: Floats, pixels: int) -> tuple[Floats, Floats]:
    """Of the points of each of `pixels` parts of the range of x, ascending, those with the least and most y.

    Gaps and infinities are left out. Few points stay as they are.
    """
    kept = np.isfinite(y)
    x, y = x[kept], y[kept]
    if len(x) <= 2 * pixels or x[-1] <= x[0]:
        return x, y
    part = np.minimum(((x - x[0]) / (x[-1] - x[0]) * pixels).astype(np.int64), pixels - 1)
    order = np.lexsort((y, part))
    borders = np.flatnonzero(np.diff(part[order]))
    least, most = order[np.r_[0, borders + 1]], order[np.r_[borders, len(x) - 1]]
    chosen = np.unique(np.r_[least, most])
    return x[chosen], y[chosen]


def shown_series(
    metrics: MetricsFile,
    names: Sequence[str],
    *,
    axis: Axis = "step",
    pixels: int = 800,
    low: float | None = None,
    high: float | None = None,
    smoothing: float = 0.0,
) -> dict[str, Floats]:
    """`x0`, `y0` of the first of `names` and so on, and its smoothed line `s0` at `t0`, in a range of x."""
    x, arrays = metrics.positions(axis), {}
    inside = np.ones(len(x), dtype=np.bool_)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    for number, name in enumerate(names):
        y = metrics.column(name)
        arrays[f"x{number}"], arrays[f"y{number}"] = downsampled(x[inside], y[inside], pixels)
        if smoothing:
            line = smoothed(y, smoothing)
            arrays[f"t{number}"], arrays[f"s{number}"] = downsampled(x[inside], line[inside], pixels)
    return arrays


def step_at(metrics: MetricsFile, axis: Axis, position: float) -> int | None:
    """The step nearest to a place on an axis."""
    x = metrics.positions(axis)
    return metrics.steps[int(np.abs(x - position).argmin())] if len(x) else None
