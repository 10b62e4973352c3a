"""Layout of a batch over the data-parallel ranks of a model: sequences and fields, by object reference.

Layouts of the same sequences differ between models, so a field is transferred by sequence and not through the
driver: each data-parallel rank of the one model stores a list of arrays, and a rank of the other reads
those of its sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, Self, TypeVar

import torch

from nemorl.config.policy import PolicyConfig
from nemorl.models.registry import load_shape
from nemorl.trajectories import Float32Array, Int32Array

from .batches import Advantage
from .micro_batches import BatchPlan, packing_metrics, plan_batch
from .packed import Compared, PackedBatch

T = TypeVar("T")


@dataclass(frozen=True)
class SequencePlace:
    """One sequence: a reference to a list, and the row in it."""

    store: Any  # reference to a list of trajectories or examples
    row: int
    num_tokens: int
    advantage: Advantage = 0.0
    weight: float = 0.0  # of each of its trained tokens, see algorithms/aggregation.py; 0 trains nothing
    likelihood: float | None = None  # of its negative logprob, for losses that imitate some sequences
    rewards: tuple[float, ...] | None = None  # of each turn, for advantages that workers compute
    compared: Compared | None = None  # of a sequence that a loss compares with others


@dataclass(frozen=True)
class Shard:
    """The sequences of one data-parallel rank, in the order in which it holds them.

    `stores` arrive as the lists themselves: the actor puts the values in place of the references.
    """

    stores: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]  # [S] index of the store, row in it
    advantages: tuple[Advantage, ...]  # [S]
    weights: tuple[float, ...]  # [S]
    likelihood: tuple[float, ...] | None = None  # [S]
    rewards: tuple[tuple[float, ...], ...] | None = None  # [S]
    compared: tuple[Compared, ...] | None = None  # [S]

    def sequences(self) -> list[Any]:
        """The trajectories or examples themselves, once the references are resolved."""
        return [self.stores[store][row] for store, row in self.places]


def make_shards(sequences: Sequence[SequencePlace], plan: BatchPlan) -> list[Shard]:
    """One shard for each data-parallel rank of the plan; each names every store it needs once."""
    return [_shard([sequences[i] for i in members]) for members in plan.ranks]


def _shard(sequences: Sequence[SequencePlace]) -> Shard:
    stores: dict[Any, int] = {}
    for sequence in sequences:
        stores.setdefault(sequence.store, len(stores))
    return Shard(
        stores=tuple(stores),
        places=tuple((stores[s.store], s.row) for s in sequences),
        advantages=tuple(s.advantage for s in sequences),
        weights=tuple(s.weight for s in sequences),
        likelihood=_all_or_none([s.likelihood for s in sequences], "weighted to be imitated"),
        rewards=_all_or_none([s.rewards for s in sequences], "rewarded"),
        compared=_all_or_none([s.compared for s in sequences], "compared"),
    )


def _all_or_none(of_sequences: Sequence[T | None], what: str) -> tuple[T, ...] | None:
    known = tuple(each for each in of_sequences if each is not None)
    if known and len(known) < len(of_sequences):
        raise ValueError(f"{len(known)} of {len(of_sequences)} sequences of a shard are {what}: all or none")
    return known or None


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
    return [_shard_columns([column.places[place] for place in held]) for held in plan.ranks]


def _shard_columns(places: Sequence[tuple[Any, int]]) -> ColumnShard:
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


@dataclass(frozen=True)
class LoadedBatch:
    """A batch as it lies on the ranks of one model."""

    plan: BatchPlan
    lengths: tuple[int, ...]  # [S] tokens
    micro_batch_tokens: int
    hidden_size: int

    @classmethod
    def plan_for(
        cls,
        sequences: Sequence[SequencePlace],
        config: PolicyConfig,
        num_ranks: int,
        num_minibatches: int,
    ) -> Self:
        """Plan micro-batches and minibatches for `num_ranks` data-parallel ranks."""
        layout, lengths = config.layout, [s.num_tokens for s in sequences]
        hidden_size = load_shape(config.model_path, config.head).hidden_size
        interleaved = layout.virtual_pipeline_parallel_size > 1
        plan = plan_batch(
            lengths,
            num_ranks,
            num_minibatches,
            config.micro_batch_tokens,
            hidden_size,
            fewest=layout.pipeline_parallel_size if interleaved else 1,
            units=[-place if s.compared is None else s.compared.unit for place, s in enumerate(sequences, 1)],
        )
        return cls(plan, tuple(lengths), config.micro_batch_tokens, hidden_size)

    @property
    def micro_batches(self) -> list[list[list[int]]]:
        """[rank][micro-batch] of all minibatches together."""
        return [
            [batch for minibatch in self.plan.minibatches for batch in minibatch[rank]]
            for rank in range(len(self.plan.ranks))
        ]

    def shards(self, sequences: Sequence[SequencePlace]) -> list[Shard]:
        """`make_shards` of the batch's sequences."""
        return make_shards(sequences, self.plan)

    def column(self, stores: Sequence[Any]) -> Column:
        """The field that the data-parallel ranks have stored."""
        return column_of(stores, self.plan)

    def column_shards(self, column: Column) -> list[ColumnShard]:
        """A field by data-parallel rank."""
        return column_shards(column, self.plan)

    def in_order(self, values: Sequence[Sequence[float]]) -> list[float]:
        """[S] in the order of the batch, of values by data-parallel rank in the order of its sequences."""
        by_place = dict(zip(chain(*self.plan.ranks), chain(*values), strict=True))
        return [by_place[place] for place in range(len(by_place))]

    def packing_metrics(self) -> dict[str, float]:
        """How evenly the batch is spread, and how full its micro-batches are."""
        return packing_metrics(self.plan, list(self.lengths), self.micro_batch_tokens, self.hidden_size)
