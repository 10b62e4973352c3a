"""Adapters merged into weights: the formula, and the same bits for every division of a matrix."""

import pytest
import torch

from nemorl.models.tensors import merge_adapter


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight of more than one chunk, and its pair of rank 7."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1001, 513), (7, 513), (1001, 7))
    weight, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return weight, a, b


def test_it_is_the_weight_and_the_scaled_product() -> None:
    weight, a, b = matrices(torch.float32)
    expected = weight.double() + 0.5 * b.double() @ a.double()
    merge_adapter(weight, a, b, 0.5)
    torch.testing.assert_close(weight.double(), expected, atol=1e-5, rtol=0)


def test_bfloat16_is_rounded_once() -> None:
    weight, a, b = matrices(torch.bfloat16)
    exact = weight.float()
    merge_adapter(exact, a, b, 0.5)
    merge_adapter(weight, a, b, 0.5)
    assert torch.equal(weight, exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    """Also where a part lies in another parameter's rows, as q, k and v do."""
    whole, a, b = matrices(dtype)
    fused = torch.zeros(1001, 1100, dtype=dtype)
    parts = [(slice(0, 3), slice(0, 513)), (slice(3, 1001), slice(0, 129)), (slice(3, 1001), slice(129, 513))]
    for rows, columns in parts:
        fused[rows, columns] = whole[rows, columns]
        merge_adapter(fused[rows, columns], a[:, columns], b[rows], 2.0)
    merge_adapter(whole, a, b, 2.0)
    assert torch.equal(fused[:, :513], whole)
    assert not fused[:, 513:].any()
