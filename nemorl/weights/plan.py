"""Which box goes from whom to whom: a pure, deterministic function of both sides' layouts.

    slices of senders and receivers
      -> pieces: each needed box, cut where its holders change and to at most a bucket
      -> cargoes: pieces of one type with the same holders, up to a bucket of them
      -> one holder for each cargo and receiver: one on the receiver's machine if there is any, and of these
         the least loaded; cargoes with the fewest holders choose first
      -> buckets, in the order in which all ranks take part

Ranks with equal layouts (replicas of an engine, copies of a policy) are cut and packed once, so that what
grows with the number of ranks is only the choice of a sender for each bucket. Imports no torch.
"""

import gc
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter

from nemorl.models.slices import TensorSlice

from .boxes import box_of, narrow
from .messages import ITEM_BYTES, Part, PartBucket, ReceiverLayout, SenderLayout
from .regions import Holdings, Region, UnservedBox, classes_of

__all__ = ["Bucket", "Transfer", "TransferPlan", "UnservedBox", "plan_files", "plan_transfers"]


@dataclass(frozen=True)
class Transfer:
    """One box on its way: the same elements, as the sender and as the receiver hold them."""

    source: TensorSlice
    target: TensorSlice


@dataclass(frozen=True)
class Cargo:
    """Transfers that travel together: the same for all senders of one class and all receivers of another."""

    dtype: str  # of all elements on the wire
    transfers: tuple[Transfer, ...]

    @cached_property
    def sources(self) -> tuple[TensorSlice, ...]:
        """As the senders hold them."""
        return tuple(transfer.source for transfer in self.transfers)

    @cached_property
    def targets(self) -> tuple[TensorSlice, ...]:
        """As the receivers hold them."""
        return tuple(transfer.target for transfer in self.transfers)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all transfers."""
        return ITEM_BYTES[self.dtype] * sum(source.num_elements for source in self.sources)


@dataclass(frozen=True)
class Bucket:
    """A cargo on its way from one sender to one receiver."""

    sender: int
    receiver: int
    cargo: Cargo

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What travels."""
        return self.cargo.transfers

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return self.cargo.num_bytes


@dataclass(frozen=True)
class TransferPlan:
    """All buckets, in the one order in which every rank handles its own.

    The common order is what rules out a deadlock: the first bucket that is not yet taken waits for nobody,
    since its sender and its receiver have finished everything before it.
    """

    buckets: tuple[Bucket, ...]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @cached_property
    def num_transfers(self) -> int:
        """Boxes that travel."""
        return sum(len(bucket.transfers) for bucket in self.buckets)

    def sender_part(self, rank: int) -> Part:
        """What one sender has to do."""
        return Part(
            rank,
            tuple(
                PartBucket(bucket.receiver, bucket.cargo.dtype, bucket.cargo.sources)
                for bucket in self._of_senders.get(rank, ())
            ),
        )

    def receiver_part(self, rank: int) -> Part:
        """What one receiver has to do."""
        return Part(
            rank,
            tuple(
                PartBucket(bucket.sender, bucket.cargo.dtype, bucket.cargo.targets)
                for bucket in self._of_receivers.get(rank, ())
            ),
        )

    def sender_parts(self, count: int) -> list[Part]:
        """What each of `count` senders has to do."""
        with _nothing_is_garbage():
            return [self.sender_part(rank) for rank in range(count)]

    def receiver_parts(self, count: int) -> list[Part]:
        """What each of `count` receivers has to do."""
        with _nothing_is_garbage():
            return [self.receiver_part(rank) for rank in range(count)]

    @cached_property
    def _of_senders(self) -> dict[int, list[Bucket]]:
        found: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            found[bucket.sender].append(bucket)
        return found

    @cached_property
    def _of_receivers(self) -> dict[int, list[Bucket]]:
        found: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            found[bucket.receiver].append(bucket)
        return found


@dataclass(frozen=True)
class _Piece:
    """A box that receivers of one class need, and who holds it."""

    target: TensorSlice
    region: Region

    def transfer(self, sender_class: int) -> Transfer:
        """The box's way from senders of a class."""
        source = narrow(self.region.sources[sender_class], box_of(self.target))
        return Transfer(source, self.target)


@dataclass
class _Load:
    """Pieces with the same holders, which receivers of one class get in one bucket."""

    dtype: str
    region: Region  # one of the regions; all have the same holders
    pieces: list[_Piece] = field(default_factory=list)
    num_bytes: int = 0
    _cargoes: dict[int, Cargo] = field(default_factory=dict)  # by class of sender

    def cargo(self, sender_class: int) -> Cargo:
        """What travels from senders of a class."""
        cargo = self._cargoes.get(sender_class)
        if cargo is None:
            transfers = tuple(piece.transfer(sender_class) for piece in self.pieces)
            cargo = self._cargoes[sender_class] = Cargo(self.dtype, transfers)
        return cargo


def plan_transfers(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], bucket_bytes: int
) -> TransferPlan:
    """Plan every element that a receiver needs, once, from one of its holders, in buckets of `bucket_bytes`.

    Raises `UnservedBox` naming the tensor and the box that nobody holds, and ValueError for a bucket that
    holds no element.
    """
    if bucket_bytes < max(ITEM_BYTES.values()):
        raise ValueError(f"bucket_bytes is {bucket_bytes}, less than one element: give more")
    with _nothing_is_garbage():
        return _plan(senders, receivers, bucket_bytes)


def plan_files(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], bucket_bytes: int
) -> TransferPlan:
    """Plan that every tensor of which some receiver needs a part is written whole, each element once.

    A tensor that is wanted in several types is written in each.
    """
    wanted = {
        (part.name, part.shape, dtype): None
        for layout in receivers
        for part, dtype in zip(layout.slices, layout.dtypes, strict=True)
    }
    slices = tuple(
        TensorSlice(name, shape, (0,) * len(shape), shape, name, 0, (0,) * len(shape))
        for name, shape, _ in wanted
    )
    folder = ReceiverLayout(slices, tuple(dtype for _, _, dtype in wanted))
    return plan_transfers(senders, [folder], bucket_bytes)


def _plan(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], bucket_bytes: int
) -> TransferPlan:
    holdings = Holdings(senders)
    loads: dict[tuple[int, tuple[str, ...]], list[_Load]] = {}
    wanted = []
    classes = classes_of(receiver.slices for receiver in receivers)
    for rank, (number, layout) in enumerate(zip(classes, receivers, strict=True)):
        key = number, layout.dtypes
        if key not in loads:
            loads[key] = _loads(rank, layout, holdings, bucket_bytes)
        wanted.append(loads[key])
    buckets = _choose_senders(wanted, [receiver.node for receiver in receivers], holdings)
    return TransferPlan(tuple(_ordered(buckets, len(senders), len(receivers))))


def _loads(receiver: int, layout: ReceiverLayout, holdings: Holdings, bucket_bytes: int) -> list[_Load]:
    """What receivers of a class need, in buckets; those with the fewest holders first."""
    found: list[_Load] = []
    open_loads: dict[tuple[str, tuple[int, ...]], _Load] = {}  # by type and classes of holders
    for need, dtype in zip(layout.slices, layout.dtypes, strict=True):
        itemsize = ITEM_BYTES[dtype]
        for box, region in holdings.cut(need, receiver, bucket_bytes // itemsize):
            piece, num_bytes = _Piece(narrow(need, box), region), box.num_elements * itemsize
            key = dtype, tuple(region.sources)
            load = open_loads.get(key)
            if load is None or load.num_bytes + num_bytes > bucket_bytes:
                load = open_loads[key] = _Load(dtype, region)
                found.append(load)
            load.pieces.append(piece)
            load.num_bytes += num_bytes
    return sorted(found, key=lambda load: len(load.region.ranks))


def _choose_senders(
    wanted: Sequence[Sequence[_Load]], nodes: Sequence[str], holdings: Holdings
) -> Iterator[Bucket]:
    """A sender for what each receiver wants: the holder with the least to send, the lowest rank of these."""
    sent = [0] * len(holdings.nodes)
    shared_nodes = (
        set(holdings.nodes) & set(nodes) if len(set(holdings.nodes) | set(nodes)) > 1 else set[str]()
    )
    for receiver, load in _by_choice(wanted):
        ranks, node = load.region.ranks, nodes[receiver]
        if node in shared_nodes:
            ranks = load.region.on_node(node, holdings.nodes) or ranks
        sender = min(ranks, key=sent.__getitem__)
        sent[sender] += load.num_bytes
        yield Bucket(sender, receiver, load.cargo(holdings.class_of[sender]))


def _by_choice(wanted: Sequence[Sequence[_Load]]) -> Iterator[tuple[int, _Load]]:
    """All loads with their receivers, those with the fewest holders first."""
    runs: dict[int, dict[int, list[_Load]]] = {}  # by identity of the loads, by number of holders
    for loads in wanted:
        if id(loads) not in runs:
            by_number = itertools.groupby(loads, key=lambda load: len(load.region.ranks))
            runs[id(loads)] = {count: list(run) for count, run in by_number}
    for count in sorted({count for run in runs.values() for count in run}):
        for receiver, loads in enumerate(wanted):
            for load in runs[id(loads)].get(count, ()):
                yield receiver, load


def _ordered(buckets: Iterator[Bucket], num_senders: int, num_receivers: int) -> list[Bucket]:
    """Buckets of all pairs in rounds; within a round, each sender begins with another receiver."""
    rounds: dict[tuple[int, int], int] = defaultdict(int)
    numbered = []
    for bucket in buckets:
        sender, receiver = pair = bucket.sender, bucket.receiver
        turn = rounds[pair] * num_receivers + (receiver - sender) % num_receivers
        numbered.append((turn * num_senders + sender, bucket))
        rounds[pair] += 1
    return [bucket for _, bucket in sorted(numbered, key=itemgetter(0))]


@contextmanager
def _nothing_is_garbage() -> Iterator[None]:
    """Millions of objects come to stay; the collector would look through all of them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
