"""Sweeps: one experiment for each combination of values, as tasks of one array job."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .errors import OptionError

LONGEST_NAME = 80


@dataclass(frozen=True)
class Task:
    """One experiment of a sweep."""

    index: int
    values: tuple[tuple[str, str], ...]  # fields with their values as they were written

    @property
    def overrides(self) -> list[str]:
        """As words for the command line."""
        return [f"{field}={value}" for field, value in self.values]

    def run_dir(self, sweep: Path) -> Path:
        """Its folder in the sweep's, named by what is its own: `03_lr=1e-4`."""
        told = "_".join(f"{field.rpartition('.')[2]}={value}" for field, value in self.values)
        return sweep / f"{self.index:02d}_{re.sub(r'[^A-Za-z0-9.=+_-]+', '-', told)[:LONGEST_NAME]}"


def tasks(sweeps: Sequence[str]) -> list[Task]:
    """All combinations of `field=value,value`, the last field changing first. Raises `OptionError`."""
    axes = [[(field, value) for value in values] for field, values in map(_axis, sweeps)]
    fields = [axis[0][0] for axis in axes]
    if twice := sorted({field for field in fields if fields.count(field) > 1}):
        raise OptionError(f"--sweep names {', '.join(twice)} twice: give all its values in one")
    if "run_dir" in fields:
        raise OptionError(
            "--sweep run_dir: each task has a folder of its own below run_dir: sweep another field"
        )
    return [Task(index, values) for index, values in enumerate(itertools.product(*axes))]


def table(found: Sequence[Task], sweep: Path) -> Iterator[str]:
    """Tab-separated lines: task, its folder and the values, under a heading."""
    yield "\t".join(["task", "run_dir", *(field for field, _ in found[0].values)])
    for task in found:
        yield "\t".join([str(task.index), str(task.run_dir(sweep)), *(value for _, value in task.values)])


def _axis(text: str) -> tuple[str, list[str]]:
    """A field and its values, which may have commas inside brackets or quotes."""
    field, equals, listed = text.partition("=")
    try:
        node = yaml.compose(f"[{listed}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise OptionError(f"--sweep {text}: {listed} is no list of values: {error}") from error
    if not equals or not field.strip() or not isinstance(node, yaml.SequenceNode) or not node.value:
        raise OptionError(
            f"--sweep {text}: name a field and its values, such as policy.optimizer.lr=1e-4,3e-4"
        )
    return field.strip(), [
        f"[{listed}]"[item.start_mark.index : item.end_mark.index].strip() for item in node.value
    ]
