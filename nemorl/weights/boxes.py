"""Boxes: axis-aligned parts of an HF tensor. Pure integer geometry; imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nemorl.models.slices import TensorSlice


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
