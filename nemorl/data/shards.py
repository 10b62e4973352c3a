"""Distribution of a batch over the data-parallel ranks of a model, and into micro-batches on each rank.

The driver plans with lengths and references only; workers fetch their sequences. A unit is one sequence, or
several that a loss compares and that share a micro-batch. A field goes to a model of another layout past the
driver: each data-parallel rank of the one stores a list of arrays, and a rank of the other reads its own.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, repeat
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nemorl.config.policy import PolicyConfig
from nemorl.trajectories import Float32Array, Int32Array

from .packed import Advantage, Compared, PackedBatch
from .prefixes import Run, Work, shortest_run

T = TypeVar("T")
IntArray = NDArray[np.int64]

MIN_DIVIDED = 16  # ranks of a batch that is laid out so that each reads few stores
MAX_BLOCK = 4  # adjacent ranks that share stores
MAX_MORE_COST = 0.005  # of the most loaded rank, for it
MAX_UNEVEN = 0.002  # of the most loaded one over the mean, at which units are exchanged no more


@dataclass(frozen=True)
class SequencePlace:
    store: Any  # reference to a list of trajectories or examples
    row: int  # in that list
    num_tokens: int
    advantage: Advantage = 0.0
    weight: float = 0.0  # of each of its trained tokens, see algorithms/objective.py; 0 trains nothing
    likelihood: float | None = None  # of its negative logprob, for losses that imitate some sequences
    rewards: tuple[float, ...] | None = None  # of each turn, for advantages that workers compute
    group: int | None = None  # that such advantages compare it in
    compared: Compared | None = None  # of a sequence that a loss compares with others
    runs: tuple[Run, ...] = ()  # that other sequences begin with, too


@dataclass(frozen=True)
class ColumnShard:
    """Rows of several lists in the order of a data-parallel rank; the actor resolves the references."""

    stores: tuple[Any, ...]  # each list once
    places: tuple[tuple[int, int], ...]  # [sequences of the rank] index of the store, row in it

    def rows(self) -> list[Any]:
        return [self.stores[store][row] for store, row in self.places]


@dataclass(frozen=True)
class Shard(ColumnShard):
    advantages: tuple[Advantage, ...]  # [S]
    weights: tuple[float, ...]  # [S]
    likelihood: tuple[float, ...] | None = None  # [S]
    rewards: tuple[tuple[float, ...], ...] | None = None  # [S]
    groups: tuple[int, ...] | None = None  # [S]
    compared: tuple[Compared, ...] | None = None  # [S]


Field = Literal[
    "old_logprobs",
    "reference_logprobs",
    "values",
    "returns",
    "top_ids",
    "top_logprobs",
    "teacher_scores",
]
TokenArray = Float32Array | Int32Array


@dataclass(frozen=True)
class Column:
    """One field of a batch of S sequences, in the order of the batch."""

    places: tuple[tuple[Any, int], ...]  # [S] reference to a list of arrays, and the row in it


@dataclass(frozen=True)
class BatchPlan:
    """The micro-batch of every sequence of a batch. All ranks have equally many micro-batches, none empty."""

    ranks: list[list[int]]  # [rank] indices into the batch, in the order in which the rank holds them
    minibatches: list[list[list[list[int]]]]  # [minibatch][rank][micro-batch] places in that rank's list
    costs: Sequence[Sequence[int]] = ()  # [minibatch][rank] estimated
    num_tokens: int = 0  # of all micro-batches, what is shared in one counted once
    max_tokens: int = 0  # of a micro-batch

    @property
    def micro_batches(self) -> list[list[list[int]]]:
        """[rank][micro-batch] of all minibatches together."""
        return [list(chain(*of_rank)) for of_rank in zip(*self.minibatches, strict=True)]

    def shards(self, sequences: Sequence[SequencePlace]) -> list[Shard]:
        return [
            Shard(
                *_by_store([(s.store, s.row) for s in mine]),
                advantages=tuple(s.advantage for s in mine),
                weights=tuple(s.weight for s in mine),
                likelihood=_all_or_none([s.likelihood for s in mine], "weighted to be imitated"),
                rewards=_all_or_none([s.rewards for s in mine], "rewarded"),
                groups=_all_or_none([s.group for s in mine], "in a group"),
                compared=_all_or_none([s.compared for s in mine], "compared"),
            )
            for mine in ([sequences[place] for place in held] for held in self.ranks)
        ]

    def column(self, stores: Sequence[Any]) -> Column:
        rows = [zip(repeat(store), range(len(held))) for store, held in zip(stores, self.ranks, strict=True)]
        return Column(tuple(self.in_order(rows)))

    def column_shards(self, column: Column) -> list[ColumnShard]:
        return [ColumnShard(*_by_store([column.places[place] for place in held])) for held in self.ranks]

    def in_order(self, values: Iterable[Iterable[T]]) -> list[T]:
        """[S] in the order of the batch, of values by data-parallel rank in the order of its sequences."""
        by_place = dict(zip(chain(*self.ranks), chain(*values), strict=True))
        return [by_place[place] for place in range(len(by_place))]

    def packing_metrics(self) -> dict[str, float]:
        """Balance of the work, and fill and number of a rank's micro-batches.

        `packing/imbalance` is the estimated cost of the most loaded rank over the mean of all, both summed
        over the minibatches, since ranks wait for one another at each.
        """
        most = sum(max(costs) for costs in self.costs)
        mean = sum(sum(costs) / len(costs) for costs in self.costs)
        count = sum(len(minibatch[0]) for minibatch in self.minibatches)
        fill = self.num_tokens / (count * len(self.ranks) * self.max_tokens)
        return {"packing/imbalance": most / mean, "packing/fill": fill, "packing/micro_batches": float(count)}


def _by_store(rows: Sequence[tuple[Any, int]]) -> tuple[tuple[Any, ...], tuple[tuple[int, int], ...]]:
    index = {store: number for number, store in enumerate(dict.fromkeys(store for store, _ in rows))}
    return tuple(index), tuple((index[store], row) for store, row in rows)


def _all_or_none(of_sequences: Sequence[T | None], what: str) -> tuple[T, ...] | None:
    known = tuple(each for each in of_sequences if each is not None)
    if known and len(known) < len(of_sequences):
        raise ValueError(f"{len(known)} of {len(of_sequences)} sequences of a shard are {what}: all or none")
    return known or None


def plan_batch(
    lengths: Sequence[int],
    num_ranks: int,
    num_minibatches: int,
    max_tokens: int,
    hidden_size: int,
    fewest: int = 1,
    units: Sequence[int] | None = None,
    stores: Sequence[Any] | None = None,
    runs: Sequence[tuple[Run, ...]] | None = None,
) -> BatchPlan:
    """Lay a batch of sequences of `lengths` tokens over ranks, minibatches and micro-batches.

    Minibatches take equal runs of the batch, so that groups stay together; each is balanced over the ranks by
    cost and has at least `fewest` micro-batches. Neighbors of one number in `units` stay together. Sequences
    that share `runs` are laid into one micro-batch, as far as balance and `max_tokens` allow. Sequences of
    one of the `stores` are laid on few ranks. Raises ValueError when the counts do not divide, or a unit is
    longer than `max_tokens`.
    """
    work = Work(lengths, runs or [()] * len(lengths), hidden_size)
    numbers = range(len(lengths)) if units is None else units
    members = [list(run) for _, run in groupby(range(len(lengths)), key=numbers.__getitem__)]
    size, rest = divmod(len(members), num_minibatches)
    if rest or not size:
        raise ValueError(f"{len(members)} sequences do not divide into {num_minibatches} minibatches")
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    minibatches, costs, num_tokens = [], [], 0
    for start in range(0, len(members), size):
        part = members[start : start + size]
        local = _laid_out(part, work, num_ranks, max_tokens, fewest, stores)
        minibatch = []
        for batches, held in zip(local, ranks, strict=True):
            places = []
            for sequences in batches:
                places.append(list(range(len(held), len(held) + len(sequences))))
                held.extend(sequences)
                num_tokens += work.tokens(sequences)
            minibatch.append(places)
        minibatches.append(minibatch)
        costs.append([sum(map(work.cost, batches)) for batches in local])
    return BatchPlan(ranks, minibatches, costs, num_tokens, max_tokens)


# Units, each of the sequences that a loss compares, that are computed together.
Piece = list[list[int]]


def _sequences(piece: Piece) -> list[int]:
    return list(chain(*piece))


def _laid_out(
    units: Sequence[list[int]],
    work: Work,
    num_ranks: int,
    max_tokens: int,
    fewest: int,
    stores: Sequence[Any] | None,
) -> list[list[list[int]]]:
    """[rank][micro-batch] sequences. What shares runs is cut as little as the balance of the ranks allows."""
    clusters = _clusters(units, work)
    total = sum(work.cost(_sequences(cluster)) for cluster in clusters)
    found: list[tuple[int, list[Piece], list[int], list[list[int]]]] = []
    # A piece may cost all, a part of the mean of the ranks, or what a unit alone costs.
    for most in (total, *(total // (num_ranks * parts) for parts in (1, 2, 4, 8)), 0):
        pieces = list(chain(*(_cut(cluster, work, max_tokens, most) for cluster in clusters)))
        if len(pieces) >= num_ranks or most == 0:
            costs = [work.cost(_sequences(piece)) for piece in pieces]
            shares = balance(costs, num_ranks)
            largest = max(sum(costs[number] for number in share) for share in shares)
            found.append((largest, pieces, costs, shares))
        if len(pieces) == len(units):
            break
    alone = found[-1]  # units, of which each rank has equally many
    for choice in (*sorted(found, key=lambda choice: choice[0]), alone):
        _, pieces, costs, shares = choice
        if stores is not None and num_ranks >= MIN_DIVIDED:
            shares = _near_shares(costs, [stores[piece[0][0]] for piece in pieces], shares)
        local = [[pieces[number] for number in share] for share in shares]
        tokens = _halved(local, work, max_tokens, fewest)
        if choice is alone or min(map(len, local)) >= _num_micro_batches(tokens, max_tokens, fewest):
            break
    return [
        [list(chain(*(_sequences(share[number]) for number in batch))) for batch in plan]
        for share, plan in zip(local, plan_micro_batches(tokens, max_tokens, fewest), strict=True)
    ]


def _clusters(units: Sequence[list[int]], work: Work) -> list[Piece]:
    """Units that begin with the same run, those that share more next to one another."""
    clusters: dict[object, Piece] = {}
    for number, unit in enumerate(units):
        runs = work.runs[unit[0]]
        clusters.setdefault(runs[0] if runs else number, []).append(unit)
    return [sorted(cluster, key=lambda unit: work.runs[unit[0]]) for cluster in clusters.values()]


def _cut(cluster: Piece, work: Work, max_tokens: int, max_cost: int) -> list[Piece]:
    """Pieces of at most `max_tokens` and `max_cost`, unless a unit alone has more."""
    pieces: list[Piece] = [[]]
    for unit in cluster:
        together = _sequences([*pieces[-1], unit])
        if pieces[-1] and (work.tokens(together) > max_tokens or work.cost(together) > max_cost):
            pieces.append([])
        pieces[-1].append(unit)
    return pieces


def _halved(shares: list[list[Piece]], work: Work, max_tokens: int, fewest: int) -> list[list[int]]:
    """Halve pieces of ranks that have fewer than they need micro-batches; tokens of the pieces of each."""
    while True:
        tokens = [[work.tokens(_sequences(piece)) for piece in share] for share in shares]
        count = _num_micro_batches(tokens, max_tokens, fewest)
        done = True
        for share, of_rank in zip(shares, tokens, strict=True):
            divisible = [number for number, piece in enumerate(share) if len(piece) > 1]
            if len(share) < count and divisible:
                piece = share.pop(max(divisible, key=of_rank.__getitem__))
                share += [piece[: len(piece) // 2], piece[len(piece) // 2 :]]
                done = False
        if done:
            return tokens


def _num_micro_batches(tokens: Sequence[Sequence[int]], max_tokens: int, fewest: int) -> int:
    return max(fewest, *(len(micro_batches(of_rank, max_tokens)) for of_rank in tokens))


def balance(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices for each rank: counts differ by at most one, sums of cost nearly equal.

    Balanced largest differencing (Michiels, Korst, Aarts, van Leeuwen 2003): sequences sorted by cost are
    dealt in rounds, one to a rank; the two rounds of largest spread are joined, heavy with light, until one
    is left.
    """
    count = len(costs)
    if count < num_ranks:
        raise ValueError(f"{count} sequences cannot occupy {num_ranks} data-parallel ranks")
    rounds = -(-count // num_ranks)
    of_all = np.zeros(rounds * num_ranks, np.int64)  # with blanks, which are numbered from `count` on
    of_all[:count] = costs
    descending = np.concatenate([np.argsort(-of_all[:count], kind="stable"), np.arange(count, len(of_all))])
    dealt = descending.reshape(rounds, num_ranks)
    heap = [_round(of_all[indices], indices[:, None], number) for number, indices in enumerate(dealt)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, heavy, left = heapq.heappop(heap)
        _, _, other, right = heapq.heappop(heap)
        heapq.heappush(heap, _round(heavy + other[::-1], np.hstack([left, right[::-1]]), number))
    return [[i for i in indices if i < count] for indices in np.sort(heap[0][3], axis=1).tolist()]


def _near_shares(costs: Sequence[int], stores: Sequence[Any], shares: list[list[int]]) -> list[list[int]]:
    """Shares of units as balanced as these, with the units of each store on few adjacent ranks.

    A rank asks for every store that it reads, and its node fetches all of it. So complete stores are balanced
    over blocks of `MAX_BLOCK` ranks or fewer, and then the units of each block over its ranks. Where there
    are too few stores for it, the shares are these.
    """
    num_ranks = len(shares)
    width = max(width for width in range(1, MAX_BLOCK + 1) if num_ranks % width == 0)
    num_blocks = num_ranks // width
    by_store: dict[Any, list[int]] = {}
    for unit, store in enumerate(stores):
        by_store.setdefault(store, []).append(unit)
    ((size, _),) = Counter(map(len, by_store.values())).most_common(1)
    equal = [held for held in by_store.values() if len(held) == size]
    complete = equal[: len(equal) // num_blocks * num_blocks]
    if not complete:
        return shares
    others = [[unit] for unit in sorted(set(range(len(costs))).difference(*complete))]
    of_units = np.array(costs, np.int64)
    blocks = [
        few + more
        for few, more in zip(
            sorted(_dealt(of_units, complete, num_blocks), key=lambda units: of_units[units].sum()),
            sorted(_dealt(of_units, others, num_blocks), key=lambda units: -of_units[units].sum()),
            strict=True,
        )
    ]
    near = [
        sorted(block[place] for place in share)
        for block in _exchanged(of_units, blocks)
        for share in _exchanged(of_units[block], _dealt_in_turn(of_units[block], width))
    ]
    limit = (1 + MAX_MORE_COST) * max(of_units[share].sum() for share in shares)
    return near if max(of_units[share].sum() for share in near) <= limit else shares


def _dealt(costs: IntArray, runs: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The units of complete runs in lists of nearly equal cost, with equally many runs or one less."""
    blanks = [0] * max(0, count - len(runs))
    dealt = balance([int(costs[run].sum()) for run in runs] + blanks, count)
    return [list(chain(*(runs[number] for number in held if number < len(runs)))) for held in dealt]


def _dealt_in_turn(costs: IntArray, count: int) -> list[list[int]]:
    """Indices by descending cost, each round in the opposite direction of the one before."""
    descending = np.argsort(-costs, kind="stable")
    rounds = np.pad(descending, (0, -len(descending) % count), constant_values=-1).reshape(-1, count)
    rounds[1::2] = rounds[1::2, ::-1]
    return [[index for index in held if index >= 0] for held in rounds.T.tolist()]


def _exchanged(costs: IntArray, lists: list[list[int]]) -> list[list[int]]:
    """Lists of more equal cost: those of most and of least exchange an index each, until that is enough."""
    lists = [[*held] for held in lists]
    sums = np.array([costs[held].sum() for held in lists])
    enough = (1 + MAX_UNEVEN) * sums.mean()
    for _ in range(2 * len(lists)):
        most, least = int(sums.argmax()), int(sums.argmin())
        gap = sums[most] - sums[least]
        moved = costs[lists[most]][:, None] - costs[lists[least]]
        best = int(np.abs(moved - gap // 2).argmin())
        of_most, of_least = divmod(best, len(lists[least]))
        cost = moved[of_most, of_least]
        if sums[most] <= enough or not 0 < cost < gap:
            break
        lists[most][of_most], lists[least][of_least] = lists[least][of_least], lists[most][of_most]
        sums[most] -= cost
        sums[least] += cost
    return lists


def _round(sums: IntArray, indices: IntArray, number: int) -> tuple[int, int, IntArray, IntArray]:
    """A heap entry: largest spread first, then the round dealt first; sums [R] descend, indices [R, k]."""
    order = np.argsort(-sums, kind="stable")
    sums = sums[order]
    return int(sums[-1] - sums[0]), number, sums, indices[order]


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in few groups of at most `max_tokens` tokens each.

    First-fit decreasing: at most 11/9 of the fewest possible groups plus 6/9 (Dósa 2007); packing libraries
    have no stable order. Raises ValueError for a sequence longer than `max_tokens`.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    descending = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if sum(lengths) <= max_tokens:
        return [descending] if descending else []
    for index in descending:
        length = lengths[index]
        if length > max_tokens:
            problem = f"sequence {index} has {length} tokens, a micro-batch takes {max_tokens}"
            fix = "raise `policy.micro_batch_tokens` or lower `policy.max_sequence_length`"
            raise ValueError(f"{problem}: {fix}")
        place = next((g for g, free in enumerate(room) if free >= length), None)
        if place is None:
            groups.append([index])
            room.append(max_tokens - length)
        else:
            groups[place].append(index)
            room[place] -= length
    return groups


def plan_micro_batches(
    lengths_per_rank: Sequence[Sequence[int]], max_tokens: int, fewest: int = 1
) -> list[list[list[int]]]:
    """Micro-batches of each rank as places in its list; none empty, and as many on every rank.

    Raises ValueError for a sequence that is too long, or a rank with too few sequences.
    """
    plans = [micro_batches(lengths, max_tokens) for lengths in lengths_per_rank]
    count = max(fewest, *map(len, plans))
    interleaved = count == fewest > 1
    why = f"{count} interleaved stages require as many" if interleaved else f"another rank needs {count}"
    for rank, (plan, lengths) in enumerate(zip(plans, lengths_per_rank, strict=True)):
        if len(lengths) < count:
            raise ValueError(
                f"data-parallel rank {rank} has {len(lengths)} sequences, but {why} micro-batches: make the "
                "number of sequences a larger multiple of the data-parallel size"
            )
        while len(plan) < count:  # halve the micro-batch of most tokens that has several sequences
            batch = max((b for b in plan if len(b) > 1), key=lambda b: sum(lengths[i] for i in b))
            plan.remove(batch)
            plan.extend([batch[i] for i in half] for half in balance([lengths[i] for i in batch], 2))
    return plans


def plan_sequences(
    sequences: Sequence[SequencePlace],
    config: PolicyConfig,
    hidden_size: int,
    num_ranks: int,
    num_minibatches: int,
    *,
    on_gpu: bool = False,
) -> BatchPlan:
    layout = config.layout
    fewest = layout.pipeline_parallel_size if layout.virtual_pipeline_parallel_size > 1 else 1
    units = [-place if s.compared is None else s.compared.unit for place, s in enumerate(sequences, 1)]
    # As `MicroBatchMaker`.
    shares = config.share_prefixes and config.multi_token_prediction is None
    shares = shares and not (on_gpu and config.precision == "float32")
    shortest = shortest_run(layout.context_parallel_size)
    runs = [tuple(run for run in s.runs if shares and run.length >= shortest) for s in sequences]
    return plan_batch(
        [s.num_tokens for s in sequences],
        *(num_ranks, num_minibatches, config.micro_batch_tokens, hidden_size, fewest),
        units,
        [s.store for s in sequences],
        runs,
    )


def rows_of(batch: PackedBatch, field: Field) -> list[TokenArray]:
    """A field as an array for each sequence: a row for each token, or each chunk of aligned examples."""
    values: torch.Tensor | None = getattr(batch, field)
    if values is None:
        raise RuntimeError(f"the batch has no {field}: they are computed before they are shared")
    if batch.chunks is not None:
        return [part.numpy() for part in values[batch.chunk_ends()].split(_rows_per_sequence(batch))]
    return [part.numpy() for part in values.split(batch.lengths)]


def with_rows(batch: PackedBatch, field: Field, rows: Sequence[TokenArray]) -> PackedBatch:
    """The batch with a field from an array for each sequence. Raises ValueError for other lengths."""
    lengths, expected = [len(row) for row in rows], _rows_per_sequence(batch)
    if lengths != expected:
        what = "tokens" if batch.chunks is None else "chunks"
        there = f"those of the batch have {expected}"
        raise ValueError(f"the {field} are of sequences of {lengths} {what}, and {there}")
    values = torch.cat([torch.from_numpy(row.copy()) for row in rows])
    if batch.chunks is not None:
        zeros = values.new_zeros(batch.num_tokens, *values.shape[1:])
        values = zeros.index_copy(0, batch.chunk_ends(), values)
    return replace(batch, **{field: values})


def _rows_per_sequence(batch: PackedBatch) -> list[int]:
    """Tokens of each sequence, or chunks of aligned examples."""
    if batch.chunks is None:
        return batch.lengths
    return [int(part.amax()) + 1 for part in batch.chunks.split(batch.lengths)]
