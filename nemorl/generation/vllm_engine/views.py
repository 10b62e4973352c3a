"""From views of a tensor, as a loader makes them, to boxes of it. Integers only; imports no torch."""

import math
from dataclasses import dataclass


class NotABox(ValueError):
    """A view whose elements are no box of the tensor it looks at."""


@dataclass(frozen=True)
class View:
    """Some elements of a contiguous tensor of `shape`, as `torch.as_strided` takes them."""

    shape: tuple[int, ...]
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Placed:
    """A box of the tensor, and the distance in the other tensor of a step along each of its axes."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    strides: tuple[int, ...]


def placed(view: View, strides: tuple[int, ...]) -> Placed:
    """The box that a view shows, where element for element it is copied to memory with `strides`.

    Transposed views, slices and flattened axes are boxes. Raises NotABox for others: every second row, say.
    """
    own = contiguous_strides(view.shape)
    start, left = [], view.offset
    for stride in own:
        first, left = divmod(left, stride)
        start.append(first)
    size, steps = [1] * len(own), [0] * len(own)
    for count, stride, step in zip(view.size, view.strides, strides, strict=True):
        _place(count, stride, step, view.shape, own, size, steps)
    if any(first + count > whole for first, count, whole in zip(start, size, view.shape, strict=True)):
        raise NotABox(f"{view} leaves the tensor")
    return Placed(tuple(start), tuple(size), tuple(steps))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbours along each axis."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _place(
    count: int,
    stride: int,
    step: int,
    shape: tuple[int, ...],
    own: tuple[int, ...],
    size: list[int],
    steps: list[int],
) -> None:
    """Lay one axis of a view over the axes of the tensor, the innermost of which it may run through whole."""
    while count > 1:
        axis = next((a for a, s in enumerate(own) if s == stride and shape[a] > 1 and size[a] == 1), None)
        if axis is None:
            raise NotABox(f"no axis of {shape} has steps of {stride} elements")
        here = min(count, shape[axis])
        if count % here or (count > here and axis == 0):
            raise NotABox(f"{count} steps of {stride} elements are no box of {shape}")
        size[axis], steps[axis] = here, step
        count, stride, step = count // here, stride * here, step * here
