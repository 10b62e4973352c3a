"""Views as boxes, against torch: what is copied by the box is what is copied by the view."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemorl.generation.vllm_engine.trace import NotABox, box_of, contiguous_strides


def copied(whole: torch.Tensor, view: torch.Tensor, strides: tuple[int, ...], size: int) -> torch.Tensor:
    """Memory of `size` elements after the box was copied to it."""
    box = box_of(whole, view, strides)
    memory = torch.full((size,), -1.0)
    source = whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))]
    memory.as_strided(box.size, box.strides).copy_(source)
    return memory


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.tuples(*(st.tuples(st.integers(0, n - 1), st.integers(1, n)) for n in shape)),
            st.permutations(range(len(shape))),
        )
    )
)
def test_slices_and_transposes_are_boxes(case: tuple[list[int], list[tuple[int, int]], list[int]]) -> None:
    shape, cuts, order = case
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shown = whole[tuple(slice(first, first + count) for first, count in cuts)].permute(order)
    target = torch.full((shown.numel(),), -1.0)
    target.view(shown.shape).copy_(shown)
    strides = contiguous_strides(tuple(shown.shape))
    assert torch.equal(copied(whole, shown, strides, shown.numel()), target)


def test_axes_run_through_as_one_are_boxes() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    flat = whole.view(-1)
    assert torch.equal(copied(whole, flat, (1,), 24), flat)
    rows = whole.view(6, 4)
    assert torch.equal(copied(whole, rows, (4, 1), 24), flat)


def test_every_second_row_is_no_box() -> None:
    whole = torch.zeros(6, 4)
    with pytest.raises(NotABox):
        box_of(whole, whole[::2], (4, 1))
