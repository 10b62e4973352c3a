"""Plan of a weight transfer: a pure, deterministic function of the senders' and receivers' layouts.

    slices of senders and receivers
      -> pieces: each needed box, cut where its holders change and to at most a bucket, with its consumers
      -> loads: pieces of one type with the same holders and consumers, up to the size of a bucket
      -> one holder for each load and up to 16 of its consumers: on their machine if possible, and of these
         the one with the least to send; loads with the fewest holders choose first
      -> buckets in rounds, in which all ranks take part in the same order

A box is packed and sent once for up to 16 receivers, which pass it on. Ranks with equal layouts are cut once:
only the choice of senders grows with the ranks.
"""

import gc
import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import TypeVar

from nemorl.models.slices import TensorSlice

from .messages import ITEM_BYTES, Part, PartBucket, ReceiverLayout, SenderLayout

K = TypeVar("K")


@dataclass(frozen=True)
class Box:
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    def __str__(self) -> str:
        ranges = (f"{first}:{first + count}" for first, count in zip(self.start, self.size, strict=True))
        return f"[{', '.join(ranges)}]"


def box_of(part: TensorSlice) -> Box:
    return Box(part.start, part.size)


def intersection(a: Box, b: Box) -> Box | None:
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
        for first, count in ((start[axis], before), (hole.start[axis] + hole.size[axis], after)):
            if count > 0:
                corner = (*start[:axis], first, *start[axis + 1 :])
                yield Box(corner, (*size[:axis], count, *size[axis + 1 :]))
        start[axis], size[axis] = hole.start[axis], hole.size[axis]


def split(box: Box, max_elements: int) -> Iterator[Box]:
    """Boxes of at most `max_elements`, cut along the first axis, or a later one where a row is more."""
    if box.num_elements <= max_elements:
        yield box
        return
    axis = next(i for i in range(len(box.size)) if math.prod(box.size[i + 1 :]) <= max_elements)
    rest = box.size[axis + 1 :]
    step = max_elements // math.prod(rest)
    outer = [range(box.start[i], box.start[i] + box.size[i]) for i in range(axis)]
    for corner in itertools.product(*outer):
        for offset in range(0, box.size[axis], step):
            start = (*corner, box.start[axis] + offset, *box.start[axis + 1 :])
            yield Box(start, (*(1,) * axis, min(step, box.size[axis] - offset), *rest))


def narrow(part: TensorSlice, box: Box) -> TensorSlice:
    if box.start == part.start and box.size == part.size:
        return part
    skipped = zip(box.start, part.start, part.strides, strict=True)
    offset = part.offset + sum((first - start) * stride for first, start, stride in skipped)
    return TensorSlice(part.name, part.shape, box.start, box.size, part.param, offset, part.strides)


class UnservedBox(ValueError):
    """A receiver needs elements that no sender holds, or only under another shape."""


@dataclass
class Region:
    """A box and every sender that holds the whole of it. Senders with equal slices are of one class."""

    box: Box
    ranks: list[int] = field(default_factory=list)  # of the holders, ascending
    sources: dict[int, TensorSlice] = field(default_factory=dict)  # by class of sender
    _by_node: dict[str, list[int]] | None = None

    def on_node(self, node: str, nodes: Sequence[str]) -> list[int]:
        if self._by_node is None:
            self._by_node = _grouped(self.ranks, nodes)
        return self._by_node.get(node, [])


class _TensorRegions:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.by_box: dict[Box, Region] = {}

    @cached_property
    def _by_row(self) -> tuple[list[Region], list[int], int]:
        regions = sorted(self.by_box.values(), key=lambda region: region.box.start)
        rows = [region.box.start[0] for region in regions]
        return regions, rows, max(region.box.size[0] for region in regions)

    def near(self, box: Box) -> list[Region]:
        """All regions that share an element with a box, and maybe others."""
        regions, rows, max_rows = self._by_row
        begin = bisect_right(rows, box.start[0] - max_rows)
        return regions[begin : bisect_left(rows, box.start[0] + box.size[0])]


class Holdings:
    def __init__(self, senders: Sequence[SenderLayout]) -> None:
        self.nodes = [sender.node for sender in senders]
        self.machines = set(self.nodes)
        self.class_of = classes_of(sender.slices for sender in senders)
        self._tensors: dict[str, _TensorRegions] = {}
        for number, ranks in _grouped(range(len(senders)), self.class_of).items():
            for part in senders[ranks[0]].slices:
                self._add(number, ranks, part)
        for tensor in self._tensors.values():
            for region in tensor.by_box.values():
                region.ranks.sort()

    def _add(self, number: int, ranks: list[int], part: TensorSlice) -> None:
        tensor = self._tensors.setdefault(part.name, _TensorRegions(part.shape))
        if part.shape != tensor.shape:
            shapes = f"{part.shape} at sender {ranks[0]} and {tensor.shape} at another"
            raise UnservedBox(f"{part.name} has shape {shapes}; all must be built from the same config.json")
        box = box_of(part)
        region = tensor.by_box.setdefault(box, Region(box))
        if number not in region.sources:
            region.sources[number] = part
            region.ranks += ranks

    def cut(self, need: TensorSlice, receiver: int, capacity: int) -> list[tuple[Box, Region]]:
        """Cut a slice where its holders change and to `capacity` elements. Raises `UnservedBox`."""
        needed = box_of(need)
        tensor = self._tensors.get(need.name, _TensorRegions(need.shape))
        if tensor.shape != need.shape:
            shapes = f"{tensor.shape} at senders and {need.shape} at receiver {receiver}"
            fix = "both sides must be built from the same config.json"
            raise UnservedBox(f"{need.name} has shape {shapes}; {fix}")
        same = tensor.by_box.get(needed)
        if same is not None and needed.num_elements <= capacity:
            return [(needed, same)]
        found: list[tuple[Box, Region]] = []
        open_boxes = [needed]
        regions = tensor.near(needed) if tensor.by_box else []
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
        problem = f"no sender holds {need.name}{open_boxes[0]}, which receiver {receiver} needs"
        raise UnservedBox(f"{problem}; are both sides built from the same config.json?")


class Consumers:
    """Receivers by class: those of one have equal slices and types."""

    def __init__(self, receivers: Sequence[ReceiverLayout]) -> None:
        numbers: dict[tuple[int, tuple[str, ...]], int] = {}
        by_slices = classes_of(layout.slices for layout in receivers)
        self.class_of = [
            numbers.setdefault((number, layout.dtypes), len(numbers))
            for number, layout in zip(by_slices, receivers, strict=True)
        ]
        self.nodes = [layout.node for layout in receivers]
        self._ranks = _grouped(range(len(receivers)), self.class_of)
        self.layouts = {number: (ranks[0], receivers[ranks[0]]) for number, ranks in self._ranks.items()}
        self._by_node: dict[tuple[int, ...], dict[str, list[int]]] = {}

    def by_node(self, classes: tuple[int, ...]) -> dict[str, list[int]]:
        if classes not in self._by_node:
            ranks = sorted(rank for number in classes for rank in self._ranks[number])
            self._by_node[classes] = _grouped(ranks, self.nodes)
        return self._by_node[classes]


def _grouped(ranks: Iterable[int], label: Sequence[K]) -> dict[K, list[int]]:
    found: dict[K, list[int]] = defaultdict(list)
    for rank in ranks:
        found[label[rank]].append(rank)
    return found


_PLACE = attrgetter("name", "start", "size", "param", "offset", "strides", "shape")
_EXTENT = attrgetter("name", "shape", "start", "size")


def classes_of(layouts: Iterable[tuple[TensorSlice, ...]]) -> list[int]:
    """A number for each layout, the same for equal ones."""
    by_identity: dict[int, int] = {}
    by_value: dict[tuple[object, ...], int] = {}
    found = []
    for slices in layouts:
        if id(slices) not in by_identity:
            # a tuple of plain tuples is hashed several times faster than one of dataclasses
            by_identity[id(slices)] = by_value.setdefault(tuple(map(_PLACE, slices)), len(by_value))
        found.append(by_identity[id(slices)])
    return found


MAX_STORED_BOXES = 2**19  # of a version in files: a manifest of about 100 MB, which each receiver parses
_MAX_RECEIVERS = 16  # of a bucket: it is forwarded from one to the next, so more would delay the last one


@dataclass(frozen=True)
class Bucket:
    """Boxes from one sender to all receivers that get them from it."""

    sender: int
    receivers: tuple[int, ...]  # in the order in which they pass it on
    dtype: str  # of all elements on the wire
    num_bytes: int  # that each receiver gets
    sources: tuple[TensorSlice, ...]  # in the sender's layout
    targets: tuple[tuple[TensorSlice, ...], ...]  # the same boxes, in the layout of each receiver
    round: int  # buckets of a round go to the same receivers, at the same time


@dataclass(frozen=True)
class TransferPlan:
    """All buckets, round by round.

    Every rank takes part in the rounds in this order. Within a round, a receiver first takes the bucket of
    which it is the first receiver, then the one of which it is the second, and so on. A round has one bucket
    of a sender, and at each place another receiver. So a bucket waits only for those of earlier rounds and
    places: there is no deadlock.
    """

    buckets: tuple[Bucket, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes * len(bucket.receivers) for bucket in self.buckets)

    def takes(self) -> Iterator[tuple[int, int]]:
        """The number of a bucket and the place of a receiver on its way, in the order of all receivers."""
        for _, same_round in itertools.groupby(enumerate(self.buckets), lambda numbered: numbered[1].round):
            numbers = [number for number, _ in same_round]
            for place in range(len(self.buckets[numbers[0]].receivers)):
                yield from ((number, place) for number in numbers)

    def sender_parts(self, count: int) -> list[Part]:
        return _parts(count, ((b, b.sender, b.sources) for b in self.buckets))

    def receiver_parts(self, count: int) -> list[Part]:
        takes = ((self.buckets[number], place) for number, place in self.takes())
        return _parts(count, ((b, b.receivers[place], b.targets[place]) for b, place in takes))


def _parts(count: int, shares: Iterable[tuple[Bucket, int, tuple[TensorSlice, ...]]]) -> list[Part]:
    with _without_garbage_collection():
        of_ranks: list[list[PartBucket]] = [[] for _ in range(count)]
        for bucket, rank, slices in shares:
            of_ranks[rank].append(PartBucket(bucket.sender, bucket.receivers, bucket.dtype, slices))
        return [Part(rank, tuple(buckets)) for rank, buckets in enumerate(of_ranks)]


@dataclass
class _Piece:
    """A box, who holds it, and where each class of receivers that needs it puts it."""

    box: Box
    dtype: str
    region: Region
    targets: dict[int, TensorSlice] = field(default_factory=dict)


@dataclass
class _Load:
    dtype: str
    holders: Region  # one of the regions; all have the same holders
    consumers: tuple[int, ...]  # classes of receivers
    pieces: list[_Piece] = field(default_factory=list)
    num_bytes: int = 0
    _sources: dict[int, tuple[TensorSlice, ...]] = field(default_factory=dict)  # by class of sender
    _targets: dict[int, tuple[TensorSlice, ...]] = field(default_factory=dict)  # by class of receiver

    def source(self, number: int) -> tuple[TensorSlice, ...]:
        if number not in self._sources:
            found = (narrow(piece.region.sources[number], piece.box) for piece in self.pieces)
            self._sources[number] = tuple(found)
        return self._sources[number]

    def target(self, number: int) -> tuple[TensorSlice, ...]:
        if number not in self._targets:
            self._targets[number] = tuple(piece.targets[number] for piece in self.pieces)
        return self._targets[number]


def plan_transfers(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], bucket_bytes: int
) -> TransferPlan:
    """Plan each needed element once, in buckets of `bucket_bytes`. Raises `UnservedBox` and ValueError."""
    if bucket_bytes < max(ITEM_BYTES.values()):
        raise ValueError(f"bucket_bytes is {bucket_bytes}, less than one element; set a larger value")
    with _without_garbage_collection():
        holdings, consumers = Holdings(senders), Consumers(receivers)
        loads = _loads(_pieces(consumers, holdings, bucket_bytes), bucket_bytes)
        groups = _choose_senders(loads, consumers, holdings)
        return TransferPlan(tuple(_ordered(groups, consumers, holdings)))


def plan_files(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], bucket_bytes: int
) -> TransferPlan:
    """Plan to write each tensor that a receiver needs in part completely, in each type, each element once.

    A receiver needs all of a box or nothing: it reads boxes completely to check them, and so reads its slices
    and nothing else. If these were more than `MAX_STORED_BOXES`, some are joined, and receivers read more.
    """
    with _without_garbage_collection():
        cuts = _cuts_between(Consumers(receivers))
        _join_boxes(cuts.values())
        slices, dtypes = [], []
        for (name, shape, dtype), axes in cuts.items():
            whole = TensorSlice.whole(name, shape)
            borders = ((0, *axis, extent) for axis, extent in zip(axes, shape, strict=True))
            for ranges in itertools.product(*map(itertools.pairwise, borders)):
                start, size = (first for first, _ in ranges), (end - first for first, end in ranges)
                slices.append(narrow(whole, Box(tuple(start), tuple(size))))
                dtypes.append(dtype)
        return plan_transfers(senders, [ReceiverLayout(tuple(slices), tuple(dtypes))], bucket_bytes)


def _cuts_between(consumers: Consumers) -> dict[tuple[str, tuple[int, ...], str], list[list[int]]]:
    """Ascending positions on each axis of each needed tensor and type, at which the receivers change."""
    found: dict[tuple[str, tuple[int, ...], str], list[dict[int, _Borders]]] = {}
    for number, (_, layout) in consumers.layouts.items():
        for (name, shape, start, size), dtype in zip(map(_EXTENT, layout.slices), layout.dtypes, strict=True):
            axes = found.setdefault((name, shape, dtype), [defaultdict(_Borders) for _ in shape])
            for axis, (first, count) in enumerate(zip(start, size, strict=True)):
                if count < shape[axis]:
                    cross_section = number, start[:axis], start[axis + 1 :], size[:axis], size[axis + 1 :]
                    axes[axis][first].begin.add(cross_section)
                    axes[axis][first + count].end.add(cross_section)
    return {
        (name, shape, dtype): [
            sorted(place for place, at in axis.items() if at.begin != at.end and 0 < place < extent)
            for axis, extent in zip(axes, shape, strict=True)
        ]
        for (name, shape, dtype), axes in found.items()
    }


@dataclass
class _Borders:
    """Slices that end and begin at a position of an axis: receivers and extents along the other axes."""

    end: set[tuple[object, ...]] = field(default_factory=set)
    begin: set[tuple[object, ...]] = field(default_factory=set)


def _join_boxes(tensors: Collection[list[list[int]]]) -> None:
    """Remove every second cut of the tensors with the most boxes, until there are `MAX_STORED_BOXES`."""

    def num_boxes(axes: list[list[int]]) -> int:
        return math.prod(len(axis) + 1 for axis in axes)

    while sum(counts := [num_boxes(axes) for axes in tensors]) > max(MAX_STORED_BOXES, len(tensors)):
        most = max(counts)
        for axes, count in zip(tensors, counts, strict=True):
            if 2 * count > most:
                longest = max(range(len(axes)), key=lambda axis: len(axes[axis]))
                axes[longest] = axes[longest][1::2]


def _pieces(consumers: Consumers, holdings: Holdings, bucket_bytes: int) -> Iterable[_Piece]:
    """Each needed box once for all receivers, more often only if one receiver needs it more often."""
    found: dict[tuple[object, ...], _Piece] = {}
    for number, (rank, layout) in consumers.layouts.items():
        times: Counter[tuple[object, ...]] = Counter()
        for need, dtype in zip(layout.slices, layout.dtypes, strict=True):
            for box, region in holdings.cut(need, rank, bucket_bytes // ITEM_BYTES[dtype]):
                key = need.name, box.start, box.size, dtype
                piece = found.setdefault((*key, times[key]), _Piece(box, dtype, region))
                piece.targets[number] = narrow(need, box)
                times[key] += 1
    return found.values()


def _loads(pieces: Iterable[_Piece], bucket_bytes: int) -> list[_Load]:
    found: list[_Load] = []
    open_loads: dict[tuple[object, ...], _Load] = {}
    for piece in pieces:
        holders, consumers = tuple(piece.region.sources), tuple(piece.targets)  # classes
        num_bytes = piece.box.num_elements * ITEM_BYTES[piece.dtype]
        key = piece.dtype, holders, consumers
        load = open_loads.get(key)
        if load is None or load.num_bytes + num_bytes > bucket_bytes:
            load = open_loads[key] = _Load(piece.dtype, piece.region, consumers)
            found.append(load)
        load.pieces.append(piece)
        load.num_bytes += num_bytes
    return sorted(found, key=lambda load: len(load.holders.ranks))


@dataclass
class _Group:
    """Receivers that take the same loads, each from the sender that was chosen for it."""

    total: int  # receivers of each load, with those of other groups
    receivers: tuple[int, ...]
    sent: list[tuple[_Load, int]] = field(default_factory=list)  # load and sender


def _choose_senders(loads: Iterable[_Load], consumers: Consumers, holdings: Holdings) -> Collection[_Group]:
    """Choose a sender for each load: the holder with the least to send, and of these the lowest rank."""
    sent = [0] * len(holdings.nodes)
    groups: dict[tuple[int, tuple[int, ...]], _Group] = {}
    for load in loads:
        total = sum(map(len, consumers.by_node(load.consumers).values()))
        for holders, receivers in _served_together(load, consumers, holdings):
            sender = min(holders, key=sent.__getitem__)
            sent[sender] += load.num_bytes
            key = total, tuple(receivers)
            groups.setdefault(key, _Group(*key)).sent.append((load, sender))
    return groups.values()


def _served_together(
    load: _Load, consumers: Consumers, holdings: Holdings
) -> Iterator[tuple[list[int], list[int]]]:
    far: list[int] = []
    served: list[tuple[list[int], list[int]]] = []
    for node, receivers in consumers.by_node(load.consumers).items():
        local = load.holders.on_node(node, holdings.nodes) if node in holdings.machines else []
        if local:
            served.append((local, receivers))
        else:
            far += receivers
    for holders, receivers in (*served, (load.holders.ranks, far)):
        for first in range(0, len(receivers), _MAX_RECEIVERS):
            yield holders, receivers[first : first + _MAX_RECEIVERS]


def _ordered(groups: Collection[_Group], consumers: Consumers, holdings: Holdings) -> Iterator[Bucket]:
    """All buckets. Those for the most receivers come first, so that all ranks pass them on at the same time.

    In a round, the receivers of a machine each begin with another bucket: a bucket enters the machine once,
    and all NICs of the machine are used.
    """
    rounds = []
    for number, group in enumerate(groups):
        blocks = [tuple(block) for block in _grouped(group.receivers, consumers.nodes).values()]
        for turn, sent in enumerate(_rounds(group, min(map(len, blocks)), len(holdings.nodes))):
            rounds.append(((-group.total, turn, number), blocks, sent))
    for number, (_, blocks, sent) in enumerate(sorted(rounds, key=itemgetter(0))):
        for first, (load, sender) in enumerate(sent):
            order = tuple(rank for block in blocks for rank in (*block[first:], *block[:first]))
            source = load.source(holdings.class_of[sender])
            targets = tuple(load.target(consumers.class_of[rank]) for rank in order)
            yield Bucket(sender, order, load.dtype, load.num_bytes, source, targets, number)


def _rounds(group: _Group, size: int, num_senders: int) -> Iterator[list[tuple[_Load, int]]]:
    """Up to `size` loads at a time, each from another sender. Groups begin with different senders."""
    turns: Counter[int] = Counter()
    numbered = []
    for load, sender in group.sent:
        numbered.append((turns[sender], (sender - group.receivers[0]) % num_senders, load, sender))
        turns[sender] += 1
    found: list[tuple[_Load, int]] = []
    for _, _, load, sender in sorted(numbered, key=itemgetter(0, 1)):
        if len(found) == size or any(other == sender for _, other in found):
            yield found
            found = []
        found.append((load, sender))
    yield found


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn the collector off: it would look through millions of objects that stay, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
