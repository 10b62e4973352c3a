"""Who waits, who runs, and in which row of the cache."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .sequence import ActiveSequence


class Moves(NamedTuple):
    """Rows whose contents must be copied: `sources[i]` to `targets[i]`."""

    sources: list[int]
    targets: list[int]


class Scheduler:
    """A waiting line and the rows of the running batch.

    Admission is strictly by arrival: when the first in line does not fit, nobody passes it, so a large
    request is served as soon as enough of the batch has finished. A sequence is admitted with room for all
    the tokens it may reach, so a running one is never evicted.
    """

    def __init__(self, max_rows: int, fits: Callable[[int, int], bool]) -> None:
        """`fits(rows, length)` says whether the cache can hold `rows` sequences of up to `length` tokens."""
        self._max_rows = max_rows
        self._fits = fits
        self._waiting: deque[ActiveSequence] = deque()
        self._rows: list[ActiveSequence | None] = []

    @property
    def num_waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return sum(1 for _ in self.running())

    @property
    def num_rows(self) -> int:
        """Rows up to the last used one."""
        return len(self._rows)

    def running(self) -> Iterator[tuple[int, ActiveSequence]]:
        """Every running sequence with its row, by row."""
        return ((row, sequence) for row, sequence in enumerate(self._rows) if sequence is not None)

    def waiting(self) -> Iterator[ActiveSequence]:
        """Everyone in line, first come first."""
        return iter(self._waiting)

    def add(self, sequence: ActiveSequence) -> None:
        """Put a sequence at the end of the line."""
        self._waiting.append(sequence)

    def admit(self) -> list[tuple[int, ActiveSequence]]:
        """Give rows to those at the head of the line who fit now."""
        longest = max((sequence.max_tokens for _, sequence in self.running()), default=0)
        running = self.num_running
        free = [row for row, sequence in enumerate(self._rows) if sequence is None]
        admitted = []
        while self._waiting and running < self._max_rows:
            longest = max(longest, self._waiting[0].max_tokens)
            if not self._fits(max(running + 1, len(self._rows)), longest):
                break
            sequence = self._waiting.popleft()
            row = free.pop(0) if free else len(self._rows)
            if row == len(self._rows):
                self._rows.append(None)
            self._rows[row] = sequence
            running += 1
            admitted.append((row, sequence))
        return admitted

    def remove(self, sequence: ActiveSequence) -> None:
        """Forget a sequence that ended, wherever it was."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._rows[self._rows.index(sequence)] = None
            self._drop_free_end()

    def compact(self) -> Moves:
        """Close the gaps with sequences from the end, so that the running batch is rows 0..n-1."""
        moves = Moves([], [])
        while None in self._rows:
            gap = self._rows.index(None)
            self._rows[gap] = self._rows.pop()  # the last row is never a gap
            moves.sources.append(len(self._rows))
            moves.targets.append(gap)
            self._drop_free_end()
        return moves

    def _drop_free_end(self) -> None:
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
