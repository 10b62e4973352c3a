"""Tasks that are made when they are asked for."""

from collections.abc import Sequence
from typing import overload

from nemorl.config.data import DataConfig
from nemorl.trajectories import Task


class LazyTasks(Sequence[Task]):
    """A sequence whose tasks are made one by one, each a pure function of its index."""

    def __init__(self, size: int, data: DataConfig) -> None:
        self._size = size
        self._data = data

    def _make(self, index: int) -> Task:
        raise NotImplementedError

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        positions = range(self._size)[index]
        return self._make(positions) if isinstance(positions, int) else [self._make(i) for i in positions]
