"""Adapters added to the weights beside which they were trained."""

import torch
from torch import Tensor

# Elements of the product that exist at one time; 4 MB stay in the caches of a CPU.
_CHUNK_ELEMENTS = 2**20


@torch.no_grad()
def merge_adapter(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Add `scale * b @ a` to `weight` [out, in] in place, in float32; `a` [rank, in], `b` [out, rank].

    Only products and sums of single elements in a fixed order are used, no matrix product: whoever merges a
    part of a matrix, on whatever device, gets the same bits as those who merge all of it.
    """
    a, b = a.float(), b.float()
    for rows in torch.arange(weight.shape[0]).split(max(1, _CHUNK_ELEMENTS // weight.shape[1])):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        delta = torch.zeros_like(weight[part], dtype=torch.float32, memory_format=torch.contiguous_format)
        product = torch.empty_like(delta)
        for k in range(a.shape[0]):
            torch.mul(b[part, k : k + 1], a[k], out=product)
            delta += product
        weight[part] = (weight[part].float() + delta.mul_(scale)).to(weight.dtype)
