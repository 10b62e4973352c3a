"""The order in which tasks are trained on, as a pure function of one integer."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class TaskOrder:
    """Task index of every global position 0, 1, 2, …; each epoch visits every task once.

    A run keeps its place in the data as one position: the order needs no state of its own.
    """

    def __init__(self, num_tasks: int, seed: int, shuffle: bool) -> None:
        if num_tasks < 1:
            raise ValueError("an order needs at least one task")
        self._num_tasks = num_tasks
        self._shuffle = shuffle
        # A step rarely touches more than two epochs, and a permutation may be large.
        self._permutation = lru_cache(maxsize=2)(lambda epoch: _permutation(num_tasks, seed, epoch))

    def task_index(self, position: int) -> int:
        """The task at a position, counted from the start of the run."""
        epoch, place = divmod(position, self._num_tasks)
        return int(self._permutation(epoch)[place]) if self._shuffle else place


def _permutation(num_tasks: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(num_tasks)
