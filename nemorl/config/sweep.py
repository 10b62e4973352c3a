"""A sweep: fields with the values to try, from words or a file, and the points that follow from them.

Grid search takes all combinations of listed values; random search draws points from lists and ranges. Both
are a function of the description alone, so that a sweep can be continued or repeated elsewhere.
"""

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import Field, ValidationError

from nemorl.errors import ConfigError, Problem, UsageError

from .base import Config
from .type_errors import expectation
from .yaml import dotted, parse_document

MAX_NAME_LENGTH = 64
_MAX_PART_LENGTH = 16  # of a field and of a value in a name that would be longer
MAX_DRAWS = 100  # of one random point, until it differs from all others
_RANGE = re.compile(r"\s*(log|uniform|int)\(([^,()]+),([^,()]+)\)\s*")
_CALL = re.compile(r"\s*(\w+)\([^()]*\)\s*")  # as ranges are written
Mode: TypeAlias = Literal["max", "min"]


@dataclass(frozen=True)
class Axis:
    """One field of a sweep: the values to try as written, or a range to draw from."""

    field: str
    values: tuple[str, ...] = ()
    kind: str = ""  # of a range: `log` and `uniform` draw numbers, `int` integers with both ends
    low: float = 0.0
    high: float = 0.0

    def draw(self, generator: random.Random) -> str:
        """Draw a value, with four digits."""
        if not self.kind:
            return generator.choice(self.values)
        if self.kind == "int":
            return str(generator.randint(int(self.low), int(self.high)))
        if self.kind == "uniform":
            return f"{generator.uniform(self.low, self.high):.4g}"
        return f"{math.exp(generator.uniform(math.log(self.low), math.log(self.high))):.4g}"


@dataclass(frozen=True)
class SweepPoint:
    index: int
    values: tuple[tuple[str, str], ...]  # fields with their values, as written

    @property
    def overrides(self) -> list[str]:
        return [f"{field}={value}" for field, value in self.values]

    @property
    def name(self) -> str:
        """The name of its run folder, such as `03_lr=1e-4`; a long one has the beginning of each value."""
        parts = [(_plain(field.rpartition(".")[2]), _plain(value)) for field, value in self.values]
        name = "_".join(f"{field}={value}" for field, value in parts)
        if len(name) > MAX_NAME_LENGTH:
            size = _MAX_PART_LENGTH
            name = "_".join(f"{field[:size]}={value[:size]}" for field, value in parts)[:MAX_NAME_LENGTH]
        return f"{self.index:02d}_{name}"

    def run_dir(self, sweep: Path) -> Path:
        return sweep / self.name

    def __str__(self) -> str:
        return f"point {self.index} ({', '.join(self.overrides)})"


def _plain(text: str) -> str:
    """Without what is special in a path or a shell."""
    return re.sub(r"[^A-Za-z0-9.=+_-]+", "-", text).strip("-")


class SweepConfig(Config):
    """A sweep as a file. Options of the command line replace its fields."""

    experiment: Path
    """Experiment file, relative to this file."""
    parameters: dict[str, Any] = Field(min_length=1)
    """Fields of the experiment, such as `policy.optimizer.lr`: a list of values, a range such as
    `log(1e-6, 1e-4)`, `uniform(0, 1)` or `int(1, 8)`, or one value for all points."""
    random: int | None = Field(None, ge=1)
    """Number of points to draw; null takes all combinations of the lists."""
    seed: int = 0
    """Seed of the random points."""
    metric: str | None = None
    """Metric by which the table of results is sorted; null chooses one."""
    mode: Mode | None = None
    """Whether the metric's best value is the highest or the lowest; null: lowest for a loss."""
    max_concurrent: int | None = Field(None, ge=1)
    """Number of runs at the same time, where the machine has room for more."""
    dir: Path | None = None
    """Folder of the sweep; null is `run_dir` of the experiment."""


@dataclass(frozen=True)
class Sweep:
    """A description of a sweep that was read, with its points."""

    experiment: Path
    points: tuple[SweepPoint, ...]
    metric: str | None = None
    mode: Mode | None = None
    max_concurrent: int | None = None
    dir: Path | None = None
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)  # file and line of a file's fields


def read_sweep(
    path: Path, words: Sequence[str] = (), *, random: int | None = None, seed: int | None = None
) -> Sweep:
    """Read a sweep file, or an experiment file with `field=values` words; words replace fields of the file.

    Raises `UsageError` for the words, `ConfigError` for the file.
    """
    read = _read_file(path)
    axes = {axis.field: axis for axis in parse_axes(words)}
    if read is None:
        return Sweep(path, tuple(sweep_points(axes.values(), random=random, seed=seed or 0)))
    described, origins = read
    of_file = {field: _axis_of_file(field, value) for field, value in described.parameters.items()}
    points = sweep_points(
        (of_file | axes).values(),
        random=described.random if random is None else random,
        seed=described.seed if seed is None else seed,
    )
    kept = {name: getattr(described, name) for name in ("metric", "mode", "max_concurrent", "dir")}
    kept["origins"] = {name: origin for name, origin in origins.items() if name not in axes}
    return Sweep(path.parent / described.experiment, tuple(points), **kept)


def is_sweep_file(path: Path) -> bool:
    """True if the file describes a sweep; False also where it cannot be read."""
    try:
        return "parameters" in parse_document(path.read_text(encoding="utf-8"), str(path)).tree
    except (OSError, UnicodeDecodeError, ConfigError):
        return False


def _read_file(path: Path) -> tuple[SweepConfig, dict[str, str]] | None:
    """The file, and file and line of its parameters.

    None for an experiment, whose problems are reported when it is checked.
    """
    if not is_sweep_file(path):
        return None
    document = parse_document(path.read_text(encoding="utf-8"), str(path))
    try:
        config = SweepConfig.model_validate(document.tree)
    except ValidationError as error:
        known = ", ".join(SweepConfig.model_fields)
        problems = [
            Problem(
                dotted(details["loc"]),
                details["input"],
                f"unknown field of a sweep; it has {known}"
                if details["type"] == "extra_forbidden"
                else expectation(details),
                document.origins.get(details["loc"], ""),
            )
            for details in error.errors()
        ]
        raise ConfigError(str(path), problems) from error
    origins = {name: document.origins.get(("parameters", name), str(path)) for name in config.parameters}
    return config, origins


def parse_axes(words: Iterable[str]) -> list[Axis]:
    """Parse `field=value,value` or `field=log(low,high)`. Raises `UsageError`."""
    axes: dict[str, Axis] = {}
    for word in words:
        field, equals, values = word.partition("=")
        field = field.strip()
        if not equals or not field or not values.strip():
            form = "policy.optimizer.lr=1e-4,3e-4 or policy.optimizer.lr=log(1e-6,1e-4)"
            raise UsageError(f"{word}: expected a field and its values, such as {form}")
        if field in axes:
            raise UsageError(f"{field}: given twice; list all values in one word")
        if found := _RANGE.fullmatch(values):
            axes[field] = _range(field, found)
        elif call := _CALL.fullmatch(values):
            raise UsageError(f"{word}: {call[1]} is no range; use log(…), uniform(…) or int(…)")
        else:
            axes[field] = Axis(field, _listed_values(word, values))
        if len(set(axes[field].values)) < len(axes[field].values):
            raise UsageError(f"{word}: a value is there twice; list each once")
        if field == "run_dir":
            raise UsageError("run_dir: each run gets a folder of its own; sweep another field")
    return list(axes.values())


def _listed_values(word: str, values: str) -> tuple[str, ...]:
    """The items of a YAML list without its brackets, as written."""
    listed = f"[{values}]"
    try:
        node = yaml.compose(listed, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{word}: {values} is not a list of values: {error}") from error
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise UsageError(f"{word}: expected values, such as 1e-4,3e-4")
    return tuple(listed[item.start_mark.index : item.end_mark.index].strip() for item in node.value)


def _range(field: str, found: "re.Match[str]") -> Axis:
    kind, *ends = found.groups()
    text = found[0].strip()
    try:
        low, high = (float(end) for end in ends)
    except ValueError:
        raise UsageError(f"{field}={text}: expected two numbers, such as log(1e-6,1e-4)") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"{field}={text}: the first end must be below the second")
    if kind == "log" and low <= 0:
        raise UsageError(f"{field}={text}: a logarithmic range begins above 0; use uniform for others")
    if kind == "int" and not (low.is_integer() and high.is_integer()):
        raise UsageError(f"{field}={text}: the ends must be integers")
    return Axis(field, kind=kind, low=low, high=high)


def _axis_of_file(field: str, value: object) -> Axis:
    if isinstance(value, str) and (_RANGE.fullmatch(value) or field == "run_dir"):
        (axis,) = parse_axes([f"{field}={value}"])
        return axis
    values = value if isinstance(value, list) else [value]
    if not values or field == "run_dir":
        raise UsageError(f"{field}: expected a list of values in `parameters`")
    return Axis(field, tuple(map(_as_word, values)))


def _as_word(value: object) -> str:
    """A value as YAML in one line; a plain word stays without quotes."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./:-]*", value) and not _is_reserved(value):
        return value
    return json.dumps(value)


def _is_reserved(word: str) -> bool:
    return word.lower() in ("true", "false", "null")


def sweep_points(axes: Iterable[Axis], *, random: int | None = None, seed: int = 0) -> list[SweepPoint]:
    """All combinations, the last field changing first; or `random` different points, drawn with `seed`.

    The first points of a longer random sweep are those of a shorter one. Raises `UsageError`.
    """
    axes = list(axes)
    if not any(axis.kind or len(axis.values) > 1 for axis in axes):
        raise UsageError("a sweep needs a field with several values, such as policy.optimizer.lr=1e-4,3e-4")
    if random is None:
        if ranges := [axis.field for axis in axes if axis.kind]:
            fix = "set the number of points to draw (--random N), or list values"
            raise UsageError(f"{ranges[0]}: a range has no grid; {fix}")
        combinations = list(itertools.product(*(axis.values for axis in axes)))
    else:
        combinations = _draw(axes, random, seed)
    fields = [axis.field for axis in axes]
    return [
        SweepPoint(index, tuple(zip(fields, values, strict=True)))
        for index, values in enumerate(combinations)
    ]


def _draw(axes: Sequence[Axis], count: int, seed: int) -> list[tuple[str, ...]]:
    generator = random.Random(seed)
    drawn: dict[tuple[str, ...], None] = {}
    for _ in range(MAX_DRAWS * count):
        if len(drawn) == count:
            break
        drawn[tuple(axis.draw(generator) for axis in axes)] = None
    if len(drawn) < count:
        problem = f"only {len(drawn)} different points were found"
        has_grid = not any(axis.kind for axis in axes)
        fix = "lower it, or leave it out for the grid" if has_grid else "lower it, or widen the ranges"
        raise UsageError(f"--random {count}: {problem}; {fix}")
    return list(drawn)


def varied_fields(points: Sequence[SweepPoint]) -> list[str]:
    """Fields that differ between points, in the order of the description."""
    values: Mapping[str, set[str]] = {field: set() for field, _ in points[0].values}
    for point in points:
        for field, value in point.values:
            values[field].add(value)
    return [field for field, those in values.items() if len(those) > 1]
