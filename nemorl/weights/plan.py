"""Plan of a weight transfer: a pure, deterministic function of the senders' and receivers' layouts.

    slices of senders and receivers
      -> pieces: each needed box, cut where its holders change and to at most a bucket, with its consumers
      -> loads: pieces of one type with the same holders and consumers, up to the size of a bucket
      -> one holder for each load and up to 16 of its consumers: on their machine if possible, and of these
         the one with the least to send; loads with the fewest holders choose first
      -> buckets, in the order in which all ranks take part

A box that several receivers need (replicas of an engine, attention next to sharded experts) is packed and
sent once for all of them; see `PartBucket`. Ranks with equal layouts (replicas, copies of a policy) are cut
once, so that only the choice of senders grows with the number of ranks. Imports no torch.

Who holds what, the distinct boxes of each tensor found by place, and who needs it. Imports no torch.

Boxes: axis-aligned parts of an HF tensor. Pure integer geometry; imports no torch.
"""

import gc
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter

from nemorl.models.slices import TensorSlice

from .messages import ITEM_BYTES, Part, PartBucket, ReceiverLayout, SenderLayout


@dataclass(frozen=True)
class Box:
    """The elements from `start` on, `size` along each axis."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements in the box."""
        return math.prod(self.size)

    def __str__(self) -> str:
        ranges = (f"{first}:{first + count}" for first, count in zip(self.start, self.size, strict=True))
        return f"[{', '.join(ranges)}]"


def box_of(part: TensorSlice) -> Box:
    """The box that a slice covers."""
    return Box(part.start, part.size)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None."""
    start = tuple(map(max, a.start, b.start))
    ends = (min(i + m, j + n) for i, m, j, n in zip(a.start, a.size, b.start, b.size, strict=True))
    size = tuple(end - first for end, first in zip(ends, start, strict=True))
    return Box(start, size) if all(extent > 0 for extent in size) else None


def difference(box: Box, hole: Box) -> Iterator[Box]:
    """`box` without `hole`, which lies inside it, as boxes that do not overlap."""
    start, size = list(box.start), list(box.size)
    for axis in range(len(size)):
        before = hole.start[axis] - start[axis]
        after = start[axis] + size[axis] - hole.start[axis] - hole.size[axis]
        for first, count in (
            (start[axis], before),
            (hole.start[axis] + hole.size[axis], after),
        ):
            if count > 0:
                yield Box(
                    (*start[:axis], first, *start[axis + 1 :]), (*size[:axis], count, *size[axis + 1 :])
                )
        start[axis], size[axis] = hole.start[axis], hole.size[axis]


def split(box: Box, max_elements: int) -> Iterator[Box]:
    """Boxes of at most `max_elements`, cut along the first axis, or a later one where a row is more."""
    if box.num_elements <= max_elements:
        yield box
        return
    axis = next(i for i in range(len(box.size)) if math.prod(box.size[i + 1 :]) <= max_elements)
    step = max_elements // math.prod(box.size[axis + 1 :])
    for outer in range(math.prod(box.size[:axis])):
        corner = _unravel(outer, box.size[:axis])
        for first in range(0, box.size[axis], step):
            offsets = (*corner, first, *(0,) * (len(box.size) - axis - 1))
            count = min(step, box.size[axis] - first)
            yield Box(
                tuple(map(sum, zip(box.start, offsets, strict=True))),
                (*(1,) * axis, count, *box.size[axis + 1 :]),
            )


def narrow(part: TensorSlice, box: Box) -> TensorSlice:
    """The part of a slice that lies in `box`, which is inside it."""
    if box.start == part.start and box.size == part.size:
        return part
    skipped = zip(box.start, part.start, part.strides, strict=True)
    offset = part.offset + sum((first - start) * stride for first, start, stride in skipped)
    return TensorSlice(part.name, part.shape, box.start, box.size, part.param, offset, part.strides)


def _unravel(index: int, extents: tuple[int, ...]) -> tuple[int, ...]:
    coordinates: list[int] = []
    for extent in reversed(extents):
        index, coordinate = divmod(index, extent)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


class UnservedBox(ValueError):
    """A receiver needs elements that no sender holds, or holds under another shape."""


@dataclass
class Region:
    """A box and every sender that holds the whole of it. Senders with equal slices are of one class."""

    box: Box
    ranks: list[int]  # of the holders, ascending
    sources: dict[int, TensorSlice] = field(default_factory=dict)  # by class of sender

    def on_node(self, node: str, nodes: Sequence[str]) -> list[int]:
        """The holders on a machine."""
        if self._by_node is None:
            self._by_node = defaultdict(list)
            for rank in self.ranks:
                self._by_node[nodes[rank]].append(rank)
        return self._by_node.get(node, [])

    _by_node: dict[str, list[int]] | None = None


class _TensorRegions:
    """The regions of one tensor, in the order of their first rows."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.by_box: dict[Box, Region] = {}

    @cached_property
    def _sorted(self) -> list[Region]:
        return sorted(self.by_box.values(), key=lambda region: region.box.start)

    @cached_property
    def _rows(self) -> list[int]:
        return [region.box.start[0] for region in self._sorted]

    @cached_property
    def _most_rows(self) -> int:
        return max(region.box.size[0] for region in self._sorted)

    def near(self, box: Box) -> list[Region]:
        """All regions that share an element with a box, and maybe others."""
        first, end = box.start[0], box.start[0] + box.size[0]
        begin = bisect_right(self._rows, first - self._most_rows)
        return self._sorted[begin : bisect_left(self._rows, end)]


class Holdings:
    """All that senders hold."""

    def __init__(self, senders: Sequence[SenderLayout]) -> None:
        self.nodes = [sender.node for sender in senders]
        self._machines = set(self.nodes)
        self.class_of = classes_of(sender.slices for sender in senders)
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, number in enumerate(self.class_of):
            ranks[number].append(rank)
        self._tensors: dict[str, _TensorRegions] = {}
        for number, members in ranks.items():
            for part in senders[members[0]].slices:
                self._add(number, members, part)
        for tensor in self._tensors.values():
            for region in tensor.by_box.values():
                region.ranks.sort()

    def are_on(self, node: str) -> bool:
        """Whether a sender is on a machine."""
        return node in self._machines

    def _add(self, number: int, members: list[int], part: TensorSlice) -> None:
        tensor = self._tensors.get(part.name)
        if tensor is None:
            tensor = self._tensors[part.name] = _TensorRegions(part.shape)
        elif part.shape != tensor.shape:
            raise UnservedBox(
                f"{part.name} has shape {part.shape} at sender {members[0]} and {tensor.shape} at another; "
                "all must be built from the same config.json"
            )
        region = tensor.by_box.setdefault(box_of(part), Region(box_of(part), []))
        if number not in region.sources:
            region.sources[number] = part
            region.ranks += members

    def cut(self, need: TensorSlice, receiver: int, capacity: int) -> Iterable[tuple[Box, Region]]:
        """Cut a needed slice where its holders change and to `capacity` elements.

        Raises `UnservedBox` with the receiver and the first box that no sender holds.
        """
        needed = box_of(need)
        tensor = self._tensors.get(need.name)
        if tensor is None:
            raise _unserved(need, needed, receiver)
        if tensor.shape != need.shape:
            raise UnservedBox(
                f"{need.name} has shape {tensor.shape} at senders and {need.shape} at receiver {receiver}; "
                "both sides must be built from the same config.json"
            )
        same = tensor.by_box.get(needed)
        if same is not None and needed.num_elements <= capacity:
            return [(needed, same)]
        return _covering(need, needed, tensor.near(needed), receiver, capacity)


class Consumers:
    """Receivers by class: those of one have equal slices and types."""

    def __init__(self, receivers: Sequence[ReceiverLayout]) -> None:
        numbers: dict[tuple[int, tuple[str, ...]], int] = {}
        self.class_of = [
            numbers.setdefault((number, layout.dtypes), len(numbers))
            for number, layout in zip(
                classes_of(layout.slices for layout in receivers), receivers, strict=True
            )
        ]
        self.nodes = [layout.node for layout in receivers]
        self._ranks: dict[int, list[int]] = defaultdict(list)
        for rank, number in enumerate(self.class_of):
            self._ranks[number].append(rank)
        self.layouts = {number: (ranks[0], receivers[ranks[0]]) for number, ranks in self._ranks.items()}
        self._by_node: dict[tuple[int, ...], Mapping[str, list[int]]] = {}

    def by_node(self, classes: tuple[int, ...]) -> Mapping[str, list[int]]:
        """The receivers of some classes on each machine."""
        if classes not in self._by_node:
            found: dict[str, list[int]] = defaultdict(list)
            for rank in sorted(rank for number in classes for rank in self._ranks[number]):
                found[self.nodes[rank]].append(rank)
            self._by_node[classes] = found
        return self._by_node[classes]


def _covering(
    need: TensorSlice, needed: Box, regions: list[Region], receiver: int, capacity: int
) -> list[tuple[Box, Region]]:
    found: list[tuple[Box, Region]] = []
    open_boxes = [needed]
    shares = [(shared, region) for region in regions if (shared := intersection(needed, region.box))]
    # large shares first, for few transfers; then many holders, to have a choice
    shares.sort(key=lambda share: (-share[0].num_elements, -len(share[1].ranks), share[1].box.start))
    for _, region in shares:
        still_open: list[Box] = []
        for box in open_boxes:
            shared = intersection(box, region.box)
            if shared is None:
                still_open.append(box)
                continue
            still_open += difference(box, shared)
            found += [(piece, region) for piece in split(shared, capacity)]
        open_boxes = still_open
        if not open_boxes:
            return found
    raise _unserved(need, open_boxes[0], receiver)


def _unserved(need: TensorSlice, box: Box, receiver: int) -> UnservedBox:
    return UnservedBox(
        f"no sender holds {need.name}{box}, which receiver {receiver} needs; "
        "are both sides built from the same config.json?"
    )


_PLACE = attrgetter("name", "start", "size", "param", "offset", "strides", "shape")


def classes_of(layouts: Iterable[tuple[TensorSlice, ...]]) -> list[int]:
    """A number for each layout, the same for equal ones."""
    by_identity: dict[int, int] = {}
    by_value: dict[tuple[object, ...], int] = {}
    found = []
    for slices in layouts:
        number = by_identity.get(id(slices))
        if number is None:
            # a tuple of plain tuples is hashed several times faster than one of dataclasses
            number = by_value.setdefault(tuple(map(_PLACE, slices)), len(by_value))
            by_identity[id(slices)] = number
        found.append(number)
    return found


__all__ = ["Bucket", "TransferPlan", "UnservedBox", "plan_files", "plan_transfers"]

_MAX_RECEIVERS = 16  # of a bucket: it is forwarded from one to the next, so more would delay the last one


@dataclass(frozen=True)
class Bucket:
    """Boxes sent by one sender to all receivers that get them from it."""

    sender: int
    receivers: tuple[int, ...]
    dtype: str  # of all elements on the wire
    num_bytes: int  # that each receiver gets
    sources: tuple[TensorSlice, ...]  # in the sender's layout
    targets: tuple[tuple[TensorSlice, ...], ...]  # the same boxes, in the layout of each receiver


@dataclass(frozen=True)
class TransferPlan:
    """All buckets, in the order in which every rank handles its part of them.

    The common order rules out a deadlock: the first bucket that has not reached all its receivers waits for
    no other rank, since its sender and its receivers have finished every bucket before it.
    """

    buckets: tuple[Bucket, ...]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes received by all receivers together."""
        return sum(bucket.num_bytes * len(bucket.receivers) for bucket in self.buckets)

    @cached_property
    def num_bytes_packed(self) -> int:
        """Bytes that senders put into buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @cached_property
    def num_transfers(self) -> int:
        """Boxes that come, over all receivers."""
        return sum(len(bucket.sources) * len(bucket.receivers) for bucket in self.buckets)

    def sender_part(self, rank: int) -> Part:
        """What one sender has to do."""
        return Part(
            rank,
            tuple(
                PartBucket(bucket.sender, bucket.receivers, bucket.dtype, bucket.sources)
                for bucket in self._of_senders.get(rank, ())
            ),
        )

    def receiver_part(self, rank: int) -> Part:
        """What one receiver has to do."""
        return Part(
            rank,
            tuple(
                PartBucket(bucket.sender, bucket.receivers, bucket.dtype, targets)
                for bucket, targets in self._of_receivers.get(rank, ())
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
    def _of_receivers(self) -> dict[int, list[tuple[Bucket, tuple[TensorSlice, ...]]]]:
        found: dict[int, list[tuple[Bucket, tuple[TensorSlice, ...]]]] = defaultdict(list)
        for bucket in self.buckets:
            for receiver, targets in zip(bucket.receivers, bucket.targets, strict=True):
                found[receiver].append((bucket, targets))
        return found


@dataclass
class _Piece:
    """A box, who holds it, and where each class of receivers that needs it puts it."""

    dtype: str
    region: Region
    targets: dict[int, TensorSlice] = field(default_factory=dict)

    def source(self, sender_class: int) -> TensorSlice:
        """The box in the layout of a class of senders."""
        return narrow(self.region.sources[sender_class], box_of(next(iter(self.targets.values()))))


@dataclass
class _Load:
    """Pieces with the same holders and the same consumers, sent in one bucket."""

    dtype: str
    holders: Region  # one of the regions; all have the same holders
    consumers: tuple[int, ...]  # classes of receivers
    pieces: list[_Piece] = field(default_factory=list)
    num_bytes: int = 0
    _sources: dict[int, tuple[TensorSlice, ...]] = field(default_factory=dict)  # by class of sender
    _targets: dict[int, tuple[TensorSlice, ...]] = field(default_factory=dict)  # by class of receiver

    def sources(self, sender_class: int) -> tuple[TensorSlice, ...]:
        """The boxes in the layout of a class of senders."""
        if sender_class not in self._sources:
            self._sources[sender_class] = tuple(piece.source(sender_class) for piece in self.pieces)
        return self._sources[sender_class]

    def targets(self, receiver_class: int) -> tuple[TensorSlice, ...]:
        """The boxes in the layout of a class of receivers."""
        if receiver_class not in self._targets:
            self._targets[receiver_class] = tuple(piece.targets[receiver_class] for piece in self.pieces)
        return self._targets[receiver_class]


def plan_transfers(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], bucket_bytes: int
) -> TransferPlan:
    """Plan each element that a receiver needs once, from one of its holders, in buckets of `bucket_bytes`.

    Raises `UnservedBox` with the tensor and the box that no sender holds, and ValueError for a bucket smaller
    than one element.
    """
    if bucket_bytes < max(ITEM_BYTES.values()):
        raise ValueError(f"bucket_bytes is {bucket_bytes}, less than one element; set a larger value")
    with _nothing_is_garbage():
        return _plan(senders, receivers, bucket_bytes)


def plan_files(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], bucket_bytes: int
) -> TransferPlan:
    """Plan to write each tensor that some receiver needs in part completely, each element once.

    A tensor required in several types is written in each of them.
    """
    required = {
        (part.name, part.shape, dtype): None
        for layout in receivers
        for part, dtype in zip(layout.slices, layout.dtypes, strict=True)
    }
    slices = tuple(
        TensorSlice(name, shape, (0,) * len(shape), shape, name, 0, (0,) * len(shape))
        for name, shape, _ in required
    )
    folder = ReceiverLayout(slices, tuple(dtype for _, _, dtype in required))
    return plan_transfers(senders, [folder], bucket_bytes)


def _plan(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], bucket_bytes: int
) -> TransferPlan:
    holdings, consumers = Holdings(senders), Consumers(receivers)
    loads = _loads(_pieces(consumers, holdings, bucket_bytes), bucket_bytes)
    buckets = _choose_senders(loads, consumers, holdings)
    return TransferPlan(tuple(_ordered(buckets, len(senders), len(receivers))))


def _pieces(consumers: Consumers, holdings: Holdings, bucket_bytes: int) -> Iterable[_Piece]:
    """Return each needed box once for all receivers; repeated if one receiver needs it repeatedly."""
    found: dict[tuple[object, ...], _Piece] = {}
    for number, (rank, layout) in consumers.layouts.items():
        times: Counter[tuple[object, ...]] = Counter()
        for need, dtype in zip(layout.slices, layout.dtypes, strict=True):
            for box, region in holdings.cut(need, rank, bucket_bytes // ITEM_BYTES[dtype]):
                key = need.name, box.start, box.size, dtype
                piece = found.setdefault((*key, times[key]), _Piece(dtype, region))
                piece.targets[number] = narrow(need, box)
                times[key] += 1
    return found.values()


def _loads(pieces: Iterable[_Piece], bucket_bytes: int) -> list[_Load]:
    """Group pieces into loads; those with the fewest holders come first."""
    found: list[_Load] = []
    open_loads: dict[tuple[object, ...], _Load] = {}
    for piece in pieces:
        holders, consumers = tuple(piece.region.sources), tuple(piece.targets)  # classes
        num_bytes = next(iter(piece.targets.values())).num_elements * ITEM_BYTES[piece.dtype]
        key = piece.dtype, holders, consumers
        load = open_loads.get(key)
        if load is None or load.num_bytes + num_bytes > bucket_bytes:
            load = open_loads[key] = _Load(piece.dtype, piece.region, consumers)
            found.append(load)
        load.pieces.append(piece)
        load.num_bytes += num_bytes
    return sorted(found, key=lambda load: len(load.holders.ranks))


def _choose_senders(loads: Iterable[_Load], consumers: Consumers, holdings: Holdings) -> Iterator[Bucket]:
    """Choose a sender for each load: the holder with the least to send, and of these the lowest rank."""
    sent = [0] * len(holdings.nodes)
    for load in loads:
        for holders, receivers in _served_together(load, consumers, holdings):
            sender = min(holders, key=sent.__getitem__)
            sent[sender] += load.num_bytes
            first = sender % len(receivers)  # so that all receivers forward the same amount
            order = (*receivers[first:], *receivers[:first])
            yield Bucket(
                sender,
                order,
                load.dtype,
                load.num_bytes,
                load.sources(holdings.class_of[sender]),
                tuple(load.targets(consumers.class_of[receiver]) for receiver in order),
            )


def _served_together(
    load: _Load, consumers: Consumers, holdings: Holdings
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield possible senders with the receivers of one of them; a holder on their machine is preferred."""
    far: list[int] = []
    for node, receivers in consumers.by_node(load.consumers).items():
        local = load.holders.on_node(node, holdings.nodes) if holdings.are_on(node) else []
        if local:
            yield from ((local, some) for some in _at_most(_MAX_RECEIVERS, receivers))
        else:
            far += receivers
    yield from ((load.holders.ranks, some) for some in _at_most(_MAX_RECEIVERS, far))


def _at_most(count: int, ranks: list[int]) -> Iterator[list[int]]:
    return (ranks[first : first + count] for first in range(0, len(ranks), count))


def _ordered(buckets: Iterator[Bucket], num_senders: int, num_receivers: int) -> list[Bucket]:
    """Buckets of a sender for the same receivers in rounds; in a round, each begins with another receiver."""
    rounds: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    numbered = []
    for bucket in buckets:
        sender, receivers = way = bucket.sender, bucket.receivers
        turn = rounds[way] * num_receivers + (receivers[0] - sender) % num_receivers
        numbered.append((turn * num_senders + sender, bucket))
        rounds[way] += 1
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
