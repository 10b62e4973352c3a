"""Who holds what, the distinct boxes of each tensor found by place, and who needs it. Imports no torch.

Boxes: axis-aligned parts of an HF tensor. Pure integer geometry; imports no torch.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from nemorl.models.slices import TensorSlice

from .messages import ReceiverLayout, SenderLayout


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
