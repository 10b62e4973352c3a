"""Versions of the weights of a run: numbers that never repeat, also when steps are discarded.

    version   0 ── 1 ── 2 ── 3 ── 4
    step                │    3    4      discarded: the policy was lost after step 4 and restored from step 2
                        └─ 5 ── 6 ── 7
                           2    3    4

Without a loss the version is the number of steps taken. A restored policy begins an epoch, with a number of
its own for the restored weights: versions grow with time, so a trajectory sampled over a restart has versions
of both branches. The age of a sample is the number of updates between the weights that sampled it and those
that train: on the present branch, and for a discarded version also from it back to the fork.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    version: int = 0  # the first one
    step: int = 0  # steps taken for its weights


@dataclass(frozen=True)
class Lineage:
    """The epochs of a run, oldest first. Immutable, so that what was sent elsewhere stays valid."""

    epochs: tuple[Epoch, ...] = (Epoch(),)

    def version(self, step: int) -> int:
        """The version after this number of steps, in the present epoch."""
        newest = self.epochs[-1]
        return newest.version + step - newest.step

    def step(self, version: int) -> int:
        """Steps taken for a version of the present epoch."""
        newest = self.epochs[-1]
        return newest.step + version - newest.version

    def restored(self, step: int, newest: int) -> "Lineage":
        """The lineage with an epoch from the weights after `step`; `newest` is the last version in use."""
        return Lineage((*self.epochs, Epoch(newest + 1, step)))

    def oldest(self, step: int) -> int:
        """The oldest version of the present branch that is of at least this number of steps."""
        for first, offset, fork in self.pieces():
            version = max(first, step - offset)
            if fork is None or version + offset <= fork:
                return version
        raise AssertionError("the present epoch has no fork")

    def pieces(self) -> Iterator[tuple[int, int, int | None]]:
        """Of each epoch its first version, its steps minus its versions, and its last step that was kept."""
        for number, epoch in enumerate(self.epochs):
            forks = [later.step for later in self.epochs[number + 1 :]]
            yield epoch.version, epoch.step - epoch.version, min(forks, default=None)

    def age(self, version: int, current: int) -> int:
        """Updates between the two; `current` is a version of the present epoch, 0 for newer versions."""
        step, fork = self._place(version)
        return max(0, self.step(current) + step - 2 * fork)

    def discarded(self, version: int) -> bool:
        """True if the weights are not among those that led to the present ones."""
        step, fork = self._place(version)
        return step > fork

    def _place(self, version: int) -> tuple[int, int]:
        """Steps taken for a version, and how many of them are on the present branch.

        A version before the first epoch, as of an engine that never changes in a resumed run, counts to it.
        """
        first, *later = self.pieces()
        _, offset, fork = [first, *(piece for piece in later if piece[0] <= version)][-1]
        step = max(0, version + offset)
        return step, step if fork is None else min(step, fork)


UNBROKEN = Lineage()  # of a run without a loss
