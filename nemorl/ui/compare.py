"""Several runs side by side: curves of a metric, fields of the configuration that differ, and the same tasks.

Tasks are paired by validation set and number. The mean difference has the interval of a paired t test: mean ±
t(0.975, n - 1) · s / √n over the n tasks, of whose rewards each run's mean is taken first.
"""

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from nemorl.config.base import did_you_mean
from nemorl.observe.metrics import RESERVED_KEYS
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.stored import RolloutFiles, StoredRolloutError

from .errors import UiError
from .filters import Mask
from .trajectories import TrajectoryTable

MAX_RUNS, MAX_TASKS = 10, 200
_NORMAL = 1.959963984540054  # of the normal distribution at 97.5 %
Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class History:
    """The metrics of a run: [S] steps, and of each metric its values, NaN where a step has none."""

    steps: NDArray[np.int64]
    metrics: Mapping[str, Float64Array]
    notes: Sequence[str] = ()

    @property
    def seconds(self) -> Float64Array:
        """[S] Training time up to the end of each step."""
        return np.cumsum(np.nan_to_num(self.metrics.get("time/step", np.zeros(len(self.steps)))))


class Histories:
    """Reads metrics.jsonl of runs, again once it has changed."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[tuple[int, int], History]] = {}
        self._lock = threading.Lock()

    def of(self, run: Path) -> History:
        """Raises UiError. Lines that cannot be read are notes; a line that is being written is left out."""
        path = RunPaths(run).metrics
        try:
            stat = path.stat()
            version = stat.st_size, stat.st_mtime_ns
            with self._lock:
                if (known := self._read.get(path)) is not None and known[0] == version:
                    return known[1]
            history = _history(path)
        except OSError as error:
            fix = "choose a run that has finished a step"
            raise UiError(404, f"{path} cannot be read: {error.strerror}", str(path), fix) from error
        with self._lock:
            self._read[path] = version, history
            while len(self._read) > 2 * MAX_RUNS:
                del self._read[next(iter(self._read))]
        return history


def _history(path: Path) -> History:
    lines, notes = [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                parsed = json.loads(line)
                parsed["step"] = int(parsed["step"])
                lines.append(parsed)
            except (ValueError, TypeError, KeyError):
                notes.append(f"{path.name}, line {number} is no step: it is left out")
    names = dict.fromkeys(name for line in lines for name in line if name not in RESERVED_KEYS)
    values = {name: np.full(len(lines), np.nan) for name in names}
    for place, line in enumerate(lines):
        for name, value in line.items():
            if name in values and isinstance(value, int | float):
                values[name][place] = value
        nonfinite = line.get("nonfinite")
        for name, kind in nonfinite.items() if isinstance(nonfinite, dict) else ():
            if name in values and kind in ("inf", "-inf"):
                values[name][place] = float(kind)
    return History(np.array([line["step"] for line in lines], np.int64), values, notes[:5])


def metric_of(history: History, name: str) -> Float64Array:
    """[S] Raises UiError."""
    if name not in history.metrics:
        fix = did_you_mean(name, list(history.metrics)) or "choose another metric"
        raise UiError(404, f"the run has no metric {name}", name, fix.rstrip())
    return history.metrics[name]


@dataclass(frozen=True)
class FieldDifference:
    field: str
    values: list[Any]  # of each run
    given: list[bool]  # False where a run's configuration lacks the field


@dataclass(frozen=True)
class ConfigDifferences:
    fields: list[FieldDifference]
    notes: list[str]  # on configurations that cannot be read


def config_differences(runs: Mapping[str, Path]) -> ConfigDifferences:
    """Fields of the resolved configurations that differ, but for `run_dir`; those that all have come first."""
    configs: list[dict[str, Any]] = []
    notes, readable = [], []
    for name, run in runs.items():
        path = RunPaths(run).config
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(loaded, dict):
                raise ValueError("it has no sections")
            readable.append(True)
            configs.append(dict(_flat(loaded)))
        except (OSError, ValueError, yaml.YAMLError) as error:
            readable.append(False)
            configs.append({})
            notes.append(f"{name}: {path} cannot be read: {' '.join(str(error).split())}")
    found = []
    compared = [config for config, can in zip(configs, readable, strict=True) if can]
    for name in dict.fromkeys(key for config in compared for key in config):
        seen = {json.dumps(c[name], sort_keys=True, default=str) if name in c else "" for c in compared}
        if len(seen) > 1 and name != "run_dir":
            values = [config.get(name) for config in configs]
            found.append(FieldDifference(name, values, [name in config for config in configs]))
    return ConfigDifferences(sorted(found, key=lambda each: not all(each.given)), notes)


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by their path; lists are values."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


@dataclass(frozen=True)
class TaskMean:
    """The rewards of a task in one run."""

    mean: float
    count: int
    step: int  # the last one of these rewards


@dataclass(frozen=True)
class PairedTask:
    validation_set: str
    task: int
    first: TaskMean
    second: TaskMean
    difference: float  # second minus first


@dataclass(frozen=True)
class Paired:
    """Tasks that both runs have; `low` and `high` bound the mean difference with 95 % confidence."""

    tasks: list[PairedTask]  # at most MAX_TASKS, the largest differences first
    count: int
    first_mean: float
    second_mean: float
    difference: float
    low: float  # NaN, as `high`, of fewer than two tasks
    high: float
    improved: int  # tasks of a larger reward in the second run
    worse: int
    only_first: int  # tasks that only one of the runs has
    only_second: int
    notes: list[str] = field(default_factory=list)


def pair_tasks(
    first: TrajectoryTable, second: TrajectoryTable, text: str = "", *, last: bool = True
) -> Paired:
    """Pair the tasks of two runs over the rows of a filter; `last`: of each task only those of its last step.

    Raises UiError for a filter that cannot be applied to both.
    """
    ours, theirs = (_means(table, table.matching(text)[1], last=last) for table in (first, second))
    both = [key for key in ours if key in theirs]
    before, after = (np.array([side[key].mean for key in both]) for side in (ours, theirs))
    differences = after - before
    mean, low, high = paired_interval(differences)
    order = np.argsort(-np.abs(differences), kind="stable")[:MAX_TASKS].tolist()
    ordered = [(both[n], float(differences[n])) for n in order]
    return Paired(
        [PairedTask(key[0], key[1], ours[key], theirs[key], between) for key, between in ordered],
        len(both),
        float(before.mean()) if both else math.nan,
        float(after.mean()) if both else math.nan,
        mean,
        low,
        high,
        int((differences > 0).sum()),
        int((differences < 0).sum()),
        len(ours) - len(both),
        len(theirs) - len(both),
    )


def same_data(runs: Sequence[Path]) -> bool | None:
    """True if the runs were sampled from one `data.train`; None if a run does not say."""
    try:
        origins = [RolloutFiles(RunPaths(run).trajectories).origin() for run in runs]
    except StoredRolloutError:
        return None
    return all(origin.data == origins[0].data for origin in origins)


def _means(table: TrajectoryTable, mask: Mask, *, last: bool) -> dict[tuple[str, int], TaskMean]:
    """Mean rewards by validation set and task, over finite rewards."""
    rewards = table.column("reward")
    rows = np.flatnonzero(mask & np.isfinite(rewards))
    rewards, steps = rewards[rows].astype(np.float64), table.column("step")[rows].astype(np.int64)
    sets, tasks = table.column("validation_set")[rows], table.column("task")[rows]
    keys, places = np.unique(np.stack([sets.astype(np.int64), tasks], axis=1), axis=0, return_inverse=True)
    places = places.reshape(-1)
    latest = np.full(len(keys), -1, np.int64)
    np.maximum.at(latest, places, steps)
    if last:
        kept = steps == latest[places]
        rewards, places = rewards[kept], places[kept]
    counts = np.bincount(places, minlength=len(keys))
    means = np.bincount(places, rewards, len(keys)) / np.maximum(counts, 1)
    names = table.texts["validation_set"]
    return {
        (names[of_set], task): TaskMean(mean, count, step)
        for (of_set, task), mean, count, step in zip(
            keys.tolist(), means.tolist(), counts.tolist(), latest.tolist(), strict=True
        )
    }


def paired_interval(differences: Float64Array) -> tuple[float, float, float]:
    """Mean, and the bounds of its 95 % interval by a paired t test; NaN where it is unknown."""
    count = len(differences)
    if not count:
        return math.nan, math.nan, math.nan
    mean = float(differences.mean())
    if count < 2:
        return mean, math.nan, math.nan
    half = t_quantile(count - 1) * float(differences.std(ddof=1)) / math.sqrt(count)
    return mean, mean - half, mean + half


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t.

    Exact for 1 and 2 degrees of freedom, else the expansion around the normal quantile (Abramowitz and
    Stegun, 26.7.5), which is at most 0.13 % too small.
    """
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 2 * 0.475 * math.sqrt(2 / (1 - 4 * 0.475**2))
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))
