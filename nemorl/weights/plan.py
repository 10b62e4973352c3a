"""Which box goes from whom to whom: a pure, deterministic function of both sides' layouts.

    slices of senders and receivers
      -> pieces: each needed box, cut where its holders change and to at most a bucket
      -> one holder for each piece, the least loaded; pieces with the fewest holders choose first
      -> buckets: pieces of one sender and one receiver, in the order in which all ranks take part

Imports no torch: thousands of ranks are planned in tests without any.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemorl.models.slices import TensorSlice

from .boxes import Box, box_of, difference, intersection, narrow, split
from .messages import ITEM_BYTES, Part, PartBucket, ReceiverLayout, SenderLayout


class UnservedBox(ValueError):
    """A receiver needs elements that no sender holds, or holds under another shape."""


@dataclass(frozen=True)
class Transfer:
    """One box on its way: the same elements, as the sender and as the receiver hold them."""

    source: TensorSlice
    target: TensorSlice


@dataclass(frozen=True)
class Bucket:
    """Transfers of one sender to one receiver that travel together."""

    sender: int
    receiver: int
    dtype: str  # of all elements on the wire
    transfers: tuple[Transfer, ...]

    @property
    def num_elements(self) -> int:
        """Elements of all transfers."""
        return sum(transfer.source.num_elements for transfer in self.transfers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all transfers."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TransferPlan:
    """All buckets, in the one order in which every rank handles its own.

    The common order is what rules out a deadlock: the first bucket that is not yet taken waits for nobody,
    since its sender and its receiver have finished everything before it.
    """

    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def sender_part(self, rank: int) -> Part:
        """What one sender has to do."""
        return Part(
            rank,
            tuple(
                PartBucket(bucket.receiver, bucket.dtype, tuple(moved.source for moved in bucket.transfers))
                for bucket in self.buckets
                if bucket.sender == rank
            ),
        )

    def receiver_part(self, rank: int) -> Part:
        """What one receiver has to do."""
        return Part(
            rank,
            tuple(
                PartBucket(bucket.sender, bucket.dtype, tuple(moved.target for moved in bucket.transfers))
                for bucket in self.buckets
                if bucket.receiver == rank
            ),
        )


@dataclass(frozen=True)
class _Region:
    """A box and every sender that holds the whole of it."""

    box: Box
    holders: tuple[tuple[int, TensorSlice], ...]


@dataclass(frozen=True)
class _Piece:
    receiver: int
    target: TensorSlice
    dtype: str
    holders: tuple[tuple[int, TensorSlice], ...]


def plan_transfers(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], bucket_bytes: int
) -> TransferPlan:
    """Plan every element that a receiver needs, once, from one of its holders, in buckets of `bucket_bytes`.

    Raises `UnservedBox` naming the tensor and the box that nobody holds, and ValueError for a bucket that
    holds no element.
    """
    if bucket_bytes < max(ITEM_BYTES.values()):
        raise ValueError(f"bucket_bytes is {bucket_bytes}, less than one element: give more")
    regions = _regions(senders)
    pieces = [
        piece
        for receiver, layout in enumerate(receivers)
        for need, dtype in zip(layout.slices, layout.dtypes, strict=True)
        for piece in _pieces(receiver, need, dtype, regions.get(need.name, []), bucket_bytes)
    ]
    chosen = _choose_holders(pieces, len(senders))
    transfers: dict[tuple[int, int, str], list[Transfer]] = defaultdict(list)
    for piece, (sender, source) in zip(pieces, chosen, strict=True):
        transfers[sender, piece.receiver, piece.dtype].append(
            Transfer(source=narrow(source, box_of(piece.target)), target=piece.target)
        )
    return TransferPlan(tuple(_ordered_buckets(transfers, bucket_bytes, len(receivers))))


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


def _regions(senders: Sequence[SenderLayout]) -> dict[str, list[_Region]]:
    """By tensor, the distinct boxes that senders hold."""
    holders: dict[str, dict[Box, list[tuple[int, TensorSlice]]]] = defaultdict(lambda: defaultdict(list))
    for sender, layout in enumerate(senders):
        for part in layout.slices:
            holders[part.name][box_of(part)].append((sender, part))
    return {
        name: [_Region(box, tuple(found)) for box, found in boxes.items()] for name, boxes in holders.items()
    }


def _pieces(
    receiver: int, need: TensorSlice, dtype: str, regions: list[_Region], bucket_bytes: int
) -> Iterator[_Piece]:
    """Cut a needed slice where its holders change, and to a bucket."""
    capacity = bucket_bytes // ITEM_BYTES[dtype]
    for region in regions:
        _check_same_tensor(need, region)
    open_boxes = [box_of(need)]
    for region in sorted(regions, key=lambda region: _preference(region, box_of(need))):
        still_open: list[Box] = []
        for box in open_boxes:
            shared = intersection(box, region.box)
            if shared is None:
                still_open.append(box)
                continue
            still_open += difference(box, shared)
            for part in split(shared, capacity):
                yield _Piece(receiver, narrow(need, part), dtype, region.holders)
        open_boxes = still_open
        if not open_boxes:
            return
    raise UnservedBox(
        f"no sender holds {need.name}{open_boxes[0]}, which receiver {receiver} needs; "
        "are both sides built from the same config.json?"
    )


def _preference(region: _Region, needed: Box) -> tuple[int, int, tuple[int, ...]]:
    """Large shares first, for few transfers; then many holders, to have a choice."""
    shared = intersection(needed, region.box)
    return (-shared.num_elements if shared else 0, -len(region.holders), region.box.start)


def _check_same_tensor(need: TensorSlice, region: _Region) -> None:
    sender, held = region.holders[0]
    if held.shape != need.shape:
        raise UnservedBox(
            f"{need.name} has shape {held.shape} at sender {sender} and {need.shape} at the receiver; "
            "both sides must be built from the same config.json"
        )


def _choose_holders(pieces: Sequence[_Piece], num_senders: int) -> list[tuple[int, TensorSlice]]:
    """A holder for each piece: the one with the least to send, the lowest rank among equals."""
    load = [0] * num_senders
    chosen: dict[int, tuple[int, TensorSlice]] = {}
    for number in sorted(range(len(pieces)), key=lambda number: len(pieces[number].holders)):
        piece = pieces[number]
        sender, source = min(piece.holders, key=lambda holder: (load[holder[0]], holder[0]))
        load[sender] += piece.target.num_elements
        chosen[number] = (sender, source)
    return [chosen[number] for number in range(len(pieces))]


def _ordered_buckets(
    transfers: dict[tuple[int, int, str], list[Transfer]], bucket_bytes: int, num_receivers: int
) -> list[Bucket]:
    """Buckets of all pairs in rounds; within a round, each sender begins with another receiver."""
    pairs: dict[tuple[int, int], list[Bucket]] = defaultdict(list)
    for (sender, receiver, dtype), items in transfers.items():
        pairs[sender, receiver] += _pack(sender, receiver, dtype, items, bucket_bytes)
    numbered = [
        (round_number, (receiver - sender) % num_receivers, sender, bucket)
        for (sender, receiver), buckets in pairs.items()
        for round_number, bucket in enumerate(buckets)
    ]
    return [entry[3] for entry in sorted(numbered, key=lambda entry: entry[:3])]


def _pack(
    sender: int, receiver: int, dtype: str, transfers: list[Transfer], bucket_bytes: int
) -> Iterator[Bucket]:
    capacity = bucket_bytes // ITEM_BYTES[dtype]
    packed: list[Transfer] = []
    free = capacity
    for transfer in transfers:
        size = transfer.target.num_elements
        if size > free:
            yield Bucket(sender, receiver, dtype, tuple(packed))
            packed, free = [], capacity
        packed.append(transfer)
        free -= size
    if packed:
        yield Bucket(sender, receiver, dtype, tuple(packed))
