"""What the driver sends to policy ranks: where sequences lie, and what it decided about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nemorl.data.batches import Advantage
from nemorl.data.micro_batches import BatchPlan
from nemorl.data.packed import Compared

T = TypeVar("T")


@dataclass(frozen=True)
class SequencePlace:
    """One sequence: a list that an object reference stands for, and the row in it."""

    store: Any  # reference to a list of trajectories or examples
    row: int
    num_tokens: int
    advantage: Advantage = 0.0
    weight: float = 0.0  # of each of its trained tokens, see algorithms/aggregation.py; 0 trains nothing
    likelihood: float | None = None  # the same of its negative logprob, of losses that imitate some sequences
    rewards: tuple[float, ...] | None = None  # of each turn, for advantages that workers compute
    compared: Compared | None = None  # of a sequence that a loss holds against others


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
        likelihood=_all_or_none([s.likelihood for s in sequences], "weighed to be imitated"),
        rewards=_all_or_none([s.rewards for s in sequences], "paid"),
        compared=_all_or_none([s.compared for s in sequences], "compared"),
    )


def _all_or_none(of_sequences: Sequence[T | None], what: str) -> tuple[T, ...] | None:
    known = tuple(each for each in of_sequences if each is not None)
    if known and len(known) < len(of_sequences):
        raise ValueError(f"{len(known)} of {len(of_sequences)} sequences of a shard are {what}: all or none")
    return known or None
