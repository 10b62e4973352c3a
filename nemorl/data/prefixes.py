"""Prefix trees: tokens that several sequences begin with, which a model computes once for all of them.

    P a a a          P ─┬─ a a a
    P b b     ─▶        ├─ b b
    Q c                 └─ (another sequence that is P alone)
                     Q c

A segment is a run of tokens that the same sequences have, after the same tokens. Rollout workers describe the
segments of a group by digests (`shared_runs`), with which the driver plans without the tokens; trainers find
the tree of a micro-batch in its tokens (`prefix_tree`).
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Segment:
    start: int  # place of its first token in each of its sequences
    end: int
    sequences: tuple[int, ...]  # at least one
    parent: int  # number of the segment that ends where this one starts, -1 where sequences begin

    @property
    def length(self) -> int:
        return self.end - self.start


def prefix_tree(sequences: Sequence[NDArray[Any]], shortest: int = 1) -> list[Segment]:
    """The segments of the sequences, each before those that follow it and these without others between them.

    A sequence is an array of tokens, or of rows that are equal only where the tokens are. A run of fewer than
    `shortest` tokens is not shared: each sequence has it in a segment of its own. Sequences that share
    nothing come first, shortest first, and so do the branches of a segment.
    """
    keys = [np.ascontiguousarray(sequence).tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    lengths = np.array([len(sequences[number]) for number in order], dtype=np.int64)
    common = np.zeros(len(order), dtype=np.int64)  # with the one before it
    for place in range(1, len(order)):
        common[place] = _common(sequences[order[place - 1]], sequences[order[place]])
    segments: list[Segment] = []
    # Neighbors in `order` whose first tokens, as many as the third number, lie in the segment `parent`.
    waiting = [(0, len(order), 0, -1)] if order else []
    while waiting:
        first, last, start, parent = waiting.pop()
        one_only = last - first == 1
        end = int(lengths[first] if one_only else common[first + 1 : last].min())
        if end > start and (one_only or end - start >= shortest):
            members = tuple(sorted(order[first:last]))
            segments.append(Segment(start, end, members, parent))
            start, parent = end, len(segments) - 1
        if not one_only:
            cuts = [first, *(first + 1 + np.flatnonzero(common[first + 1 : last] == end)).tolist(), last]
            branches = sorted(
                pairwise(cuts), key=lambda part: (part[1] - part[0] > 1, lengths[slice(*part)].max())
            )
            waiting += [(*part, start, parent) for part in reversed(branches)]
    return segments


def shortest_run(context_parallel_size: int) -> int:
    """Tokens that are worth a segment: under context parallelism each is padded to a multiple of chunks."""
    return 1 if context_parallel_size == 1 else 8 * context_parallel_size


def _common(a: NDArray[Any], b: NDArray[Any]) -> int:
    """The number of rows that both begin with."""
    count = min(len(a), len(b))
    differs = np.flatnonzero(a[:count] != b[:count])
    return int(differs[0]) // a[:1].size if len(differs) else count


def token_rows(tokens: Sequence[NDArray[Any]], experts: Sequence[NDArray[Any] | None]) -> list[NDArray[Any]]:
    """Rows of a `prefix_tree`: tokens, and the experts [n, layers, top_k] that each is given, if any."""
    width = next((each[0].size for each in experts if each is not None), 0)
    if not width:
        return [*tokens]
    unknown = [np.full((len(of_one), width), -1) if each is None else each.reshape(len(of_one), width)
               for of_one, each in zip(tokens, experts, strict=True)]  # fmt: skip
    return [np.column_stack(pair).astype(np.int32) for pair in zip(tokens, unknown, strict=True)]


class Run(NamedTuple):
    """A segment of several sequences, by the digest of its tokens and all before them."""

    digest: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def shared_runs(sequences: Sequence[NDArray[Any]]) -> list[tuple[Run, ...]]:
    """The runs that each sequence shares with another one, from its first token on."""
    runs: list[tuple[Run, ...]] = [()] * len(sequences)
    for segment in prefix_tree(sequences):
        if len(segment.sequences) > 1:
            content = np.ascontiguousarray(sequences[segment.sequences[0]][: segment.end]).tobytes()
            digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
            for number in segment.sequences:
                runs[number] = (*runs[number], Run(digest, segment.start, segment.end))
    return runs


def sequence_cost(length: int, hidden_size: int) -> int:
    """Relative time: per layer and token matrices take 24·h² operations and causal attention 2·h·length."""
    return length * (12 * hidden_size + length)


@dataclass(frozen=True)
class Work:
    """What sets of the sequences of a batch cost a model that computes shared runs once."""

    lengths: Sequence[int]
    runs: Sequence[tuple[Run, ...]]  # that may be shared, of each sequence
    hidden_size: int

    def tokens(self, sequences: Sequence[int]) -> int:
        """That are computed, without padding."""
        again = sum((uses - 1) * run.length for run, uses in self._uses(sequences))
        return sum(self.lengths[number] for number in sequences) - again

    def cost(self, sequences: Sequence[int]) -> int:
        """Relative time, see `sequence_cost`."""
        again = 0
        for run, uses in self._uses(sequences):
            reached = sequence_cost(run.end, self.hidden_size) - sequence_cost(run.start, self.hidden_size)
            again += (uses - 1) * reached
        return sum(sequence_cost(self.lengths[number], self.hidden_size) for number in sequences) - again

    def _uses(self, sequences: Sequence[int]) -> Iterable[tuple[Run, int]]:
        return Counter(chain(*(self.runs[number] for number in sequences))).items()
