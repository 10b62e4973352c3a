"""Random layouts: HF tensors cut into a grid, dealt to ranks, and laid into parameters with gaps."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from nemorl.models.slices import TensorSlice
from nemorl.weights.messages import ReceiverLayout, SenderLayout
from nemorl.weights.plan import TransferPlan, plan_transfers

Tensors = dict[str, tuple[int, ...]]  # shape of each HF tensor


def whole(name: str, shape: tuple[int, ...], param: str | None = None) -> TensorSlice:
    """A whole tensor in a parameter of its own."""
    return part(name, shape, (0,) * len(shape), shape, param or name)


def part(
    name: str,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    size: tuple[int, ...],
    param: str,
    offset: int = 0,
) -> TensorSlice:
    """A box that lies contiguous in its parameter."""
    strides = tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))
    return TensorSlice(name, shape, start, size, param, offset, strides)


def plan_of(
    senders: Sequence[Sequence[TensorSlice]],
    receivers: Sequence[Sequence[TensorSlice]],
    bucket_bytes: int,
    dtype: str = "float32",
    node_of_sender: Callable[[int], str] = lambda rank: "",
    node_of_receiver: Callable[[int], str] = lambda rank: "",
) -> TransferPlan:
    """A plan with one type for everything."""
    return plan_transfers(
        [SenderLayout(tuple(slices), node_of_sender(rank)) for rank, slices in enumerate(senders)],
        [
            ReceiverLayout(tuple(slices), (dtype,) * len(slices), node_of_receiver(rank))
            for rank, slices in enumerate(receivers)
        ],
        bucket_bytes,
    )


tensors = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    min_size=1,
)


@dataclass(frozen=True)
class Case:
    tensors: Tensors
    senders: list[list[TensorSlice]]
    receivers: list[list[TensorSlice]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Senders that together hold every element, some in overlapping boxes; receivers that request any."""
    shapes: Tensors = draw(tensors)
    return Case(
        shapes,
        senders=draw(_layout(shapes, complete=True)),
        receivers=draw(_layout(shapes, complete=False)),
    )


@st.composite
def _layout(draw: st.DrawFn, shapes: Tensors, complete: bool) -> list[list[TensorSlice]]:
    num_ranks = draw(st.integers(1, 4))
    slices: list[list[TensorSlice]] = [[] for _ in range(num_ranks)]
    offsets = [0] * num_ranks
    for name, shape in shapes.items():
        certain = [(cell, 1 if complete else 0) for cell in draw(_grid(shape))]
        overlapping = [(cell, 0) for cell in draw(_grid(shape))]
        for (start, size), least in certain + overlapping:
            holders = draw(st.sets(st.integers(0, num_ranks - 1), min_size=least))
            for rank in holders:
                offsets[rank] += draw(st.integers(0, 3))
                slices[rank].append(part(name, shape, start, size, "flat", offsets[rank]))
                offsets[rank] += math.prod(size)
    return slices


@st.composite
def many_ranks(draw: st.DrawFn) -> Case:
    """Up to hundreds of ranks: copies of a few layouts on each side, dealt in turns."""
    case = draw(cases())
    copies = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    return Case(case.tensors, case.senders * copies[0], case.receivers * copies[1])


@st.composite
def _grid(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start and size of the boxes between random cuts of every axis."""
    spans = []
    for extent in shape:
        cuts = draw(st.sets(st.integers(1, extent - 1))) if extent > 1 else set()
        edges = [0, *sorted(cuts), extent]
        spans.append(list(itertools.pairwise(edges)))
    return [
        (tuple(first for first, _ in cell), tuple(last - first for first, last in cell))
        for cell in itertools.product(*spans)
    ]
