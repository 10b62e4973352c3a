"""Fields of a batch on their way between groups of processes, by object reference and not through the driver.

Groups lay the same sequences out differently, so a field travels sequence by sequence: each data-parallel
rank of the one side stores a list of arrays, and a rank of the other reads those that hold its sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from nemorl.data.micro_batches import BatchPlan
from nemorl.data.packed import PackedBatch
from nemorl.trajectories import Float32Array, Int32Array

Field = Literal["old_logprobs", "reference_logprobs", "values", "returns", "top_ids", "top_logprobs"]

TokenArray = Float32Array | Int32Array


@dataclass(frozen=True)
class Column:
    """One field of a batch of S sequences, in the order of the batch."""

    places: tuple[tuple[Any, int], ...]  # [S] reference to a list of arrays, and the row in it


@dataclass(frozen=True)
class ColumnShard:
    """The part of a column that a data-parallel rank holds the sequences of.

    `stores` arrive as the lists themselves: the actor puts the values in place of the references.
    """

    stores: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]  # [sequences of the rank] index of the store, row in it

    def rows(self) -> list[TokenArray]:
        """The arrays themselves, once the references are resolved."""
        return [self.stores[store][row] for store, row in self.places]


def column_of(stores: Sequence[Any], plan: BatchPlan) -> Column:
    """What the data-parallel ranks of a plan have stored, each for the sequences that it holds."""
    found = {
        place: (store, row)
        for store, held in zip(stores, plan.ranks, strict=True)
        for row, place in enumerate(held)
    }
    return Column(tuple(found[place] for place in range(len(found))))


def column_shards(column: Column, plan: BatchPlan) -> list[ColumnShard]:
    """One for each data-parallel rank of the plan; each names every store that it needs once."""
    return [_shard([column.places[place] for place in held]) for held in plan.ranks]


def _shard(places: Sequence[tuple[Any, int]]) -> ColumnShard:
    stores: dict[Any, int] = {}
    for store, _ in places:
        stores.setdefault(store, len(stores))
    return ColumnShard(tuple(stores), tuple((stores[store], row) for store, row in places))


def rows_of(batch: PackedBatch, field: Field) -> list[TokenArray]:
    """A field of a batch as an array for each sequence, [T] or [T, k]."""
    values: torch.Tensor | None = getattr(batch, field)
    if values is None:
        raise RuntimeError(f"the batch has no {field}: they are computed before they are shared")
    return [part.numpy() for part in values.split(batch.lengths)]


def with_rows(batch: PackedBatch, field: Field, rows: Sequence[TokenArray]) -> PackedBatch:
    """The batch with a field from an array for each sequence.

    Raises ValueError where these are of other sequences: their lengths differ.
    """
    lengths = [len(row) for row in rows]
    if lengths != batch.lengths:
        raise ValueError(
            f"the {field} are of sequences of {lengths} tokens, and those of the batch have {batch.lengths}"
        )
    values = torch.cat([torch.from_numpy(row.copy()) for row in rows])
    return replace(batch, **{field: values})
