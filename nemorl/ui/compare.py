"""Several runs side by side: curves of a metric, fields of the configuration that differ, and the same tasks.

Tasks are paired by validation set and number. The mean difference has the interval of a paired t test: mean ±
t(0.975, n - 1) · s / √n over the n tasks, of whose rewards each run's mean is taken first.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nemorl.config.yaml import leaves
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.stored import RolloutFiles, StoredRolloutError

from .filters import Mask
from .series import Axis, Floats, MetricsFiles, shown_series
from .trajectories import TrajectoryTable

MAX_RUNS, MAX_TASKS = 10, 200
_NORMAL = 1.959963984540054  # of the normal distribution at 97.5 %


@dataclass(frozen=True)
class MetricNames:
    metrics: Mapping[str, int]  # the number of runs that have each
    notes: Sequence[str]  # on files that cannot be read


class Curves:
    """Metrics of runs as lines. The files are read further as they grow."""

    def __init__(self, files: MetricsFiles) -> None:
        self._files = files

    def names(self, runs: Mapping[str, Path]) -> MetricNames:
        found: Counter[str] = Counter()
        notes = []
        for name, run in runs.items():
            try:
                with self._files.reading(RunPaths(run).metrics) as metrics:
                    notes += [f"{name}: {problem}" for problem in metrics.problems]
                    found.update(metrics.names)
            except OSError as error:
                notes.append(f"{name}: metrics.jsonl cannot be read: {error.strerror or error}")
        return MetricNames(found, notes)

    def of(
        self, runs: Mapping[str, Path], metric: str, axis: Axis = "step", smoothing: float = 0.0
    ) -> tuple[dict[str, Floats], dict[str, Any]]:
        """`x0`, `y0` of the first run and so on, smoothed `s0` at `t0`; and the runs that lack the metric."""
        arrays: dict[str, Floats] = {}
        missing: list[str] = []
        for number, (name, run) in enumerate(runs.items()):
            try:
                with self._files.reading(RunPaths(run).metrics) as metrics:
                    if metric not in metrics.names:
                        missing.append(name)
                        continue
                    lines = shown_series(metrics, [metric], axis=axis, smoothing=smoothing)
            except OSError:
                missing.append(name)
                continue
            arrays |= {f"{key[0]}{number}": line for key, line in lines.items()}
        return arrays, {"missing": missing}


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
    """Fields of the resolved configurations that differ, but for `run_dir`; those of all come first."""
    configs: list[dict[str, Any]] = []
    notes, readable = [], []
    for name, run in runs.items():
        path = RunPaths(run).config
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(loaded, dict):
                raise ValueError("it has no sections")
            readable.append(True)
            configs.append(dict(leaves(loaded)))
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
    # By number within both: sorting one column of integers is ten times as fast as sorting pairs.
    (sets, of_set), (tasks, of_task) = (
        np.unique(table.column(name)[rows], return_inverse=True) for name in ("validation_set", "task")
    )
    pairs, places = np.unique(of_set * max(1, len(tasks)) + of_task, return_inverse=True)
    keys = np.stack([sets[pairs // max(1, len(tasks))], tasks[pairs % max(1, len(tasks))]], axis=1)
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


def paired_interval(differences: Floats) -> tuple[float, float, float]:
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
