"""`data` of task sets that other libraries hold (docs/libraries.md)."""

import json
from collections.abc import Mapping
from functools import lru_cache
from math import inf
from typing import Any, ClassVar, Literal

from pydantic import Field

from .base import Config, function_at


class LibraryDataset(Config):
    source_field: ClassVar[str]  # that names the task set

    size: int | None = Field(None, ge=1)
    """Number of tasks; null takes all of a task set that has an end."""
    offset: int = Field(0, ge=0)
    """Tasks to leave out at its start, so that training and validation do not share any."""

    def shares_tasks(self, other: "LibraryDataset") -> bool:
        """True if both are parts of one task set that overlap."""
        sets = [one.model_dump(exclude={"size", "offset"}) for one in (self, other)]
        ends = [inf if one.size is None else one.offset + one.size for one in (self, other)]
        return sets[0] == sets[1] and self.offset < ends[1] and other.offset < ends[0]

    def indices(self, available: int | None) -> range:
        """Positions of its tasks among those available, None without an end. Raises ValueError."""
        end = available if self.size is None else self.offset + self.size
        if end is None:
            raise ValueError("the task set has no end; set size")
        if available is not None and max(end, self.offset + 1) > available:
            raise ValueError(f"offset and size ask for {end} tasks of {available}; lower them")
        return range(self.offset, end)


class AviaryDataset(LibraryDataset):
    """A task set of aviary."""

    source_field: ClassVar[str] = "dataset"
    name: Literal["aviary"]
    dataset: str
    """Its name, such as `gsm8k`, or `package.module:Class` of a `TaskDataset`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task set, such as `{split: train}`."""


class VerifiersDataset(LibraryDataset):
    """A task set of verifiers."""

    source_field: ClassVar[str] = "taskset"
    name: Literal["verifiers"]
    taskset: str
    """Its id, the name of an installed package."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its settings, as its own documentation names them."""

    @property
    def section(self) -> dict[str, Any]:
        """The task set in the library's own configuration."""
        return {**self.options, "id": self.taskset}


def verifiers_tasks(section: Mapping[str, Any]) -> Any:
    """The task set of such a section. Raises what the library raises."""
    from verifiers import v1 as vf

    return vf.load_taskset(vf.taskset_config_type(section["id"]).model_validate(section))


def aviary_tasks(dataset: str, options: Mapping[str, Any]) -> Any:
    """The task set, made once in a process. Raises NotImported, and what its constructor raises."""
    return _aviary_tasks(dataset, json.dumps(options, sort_keys=True))


@lru_cache
def _aviary_tasks(dataset: str, options: str) -> Any:
    if ":" in dataset:
        return function_at(dataset)(**json.loads(options))
    from aviary.core import TaskDataset

    return TaskDataset.from_name(dataset, **json.loads(options))
