"""Elements of slices in memory, adapters merged into them, and tensors that are computed on demand."""

from collections import UserDict
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from .slices import TensorSlice


def local_view(parameters: Mapping[str, Tensor], part: TensorSlice) -> Tensor:
    """A slice's elements as a view of `part.size`. Raises ValueError if its parameter lacks some of them."""
    parameter = parameters.get(part.param)
    if parameter is None:
        raise ValueError(f"{part.name}: there is no local parameter {part.param!r} to hold it")
    last = part.offset + sum((n - 1) * stride for n, stride in zip(part.size, part.strides, strict=True))
    if last >= parameter.numel():
        size = f"{parameter.numel()} elements (shape {tuple(parameter.shape)})"
        reach = f"the slice reaches element {last} of {part.param!r}, which has only {size}"
        raise ValueError(f"{part.name}: {reach}; model and layout do not agree")
    return parameter.detach().as_strided(part.size, part.strides, parameter.storage_offset() + part.offset)


# Elements of the product that exist at one time: 1 MB stays in a CPU's caches, which doubles the speed; a
# share of a large matrix, so that a GPU does not wait for thousands of small kernels.
_CHUNK_ELEMENTS, _CHUNKS = 2**18, 16


class ComputedTensors(UserDict[str, Tensor]):
    """Tensors of which some are computed when one is asked for.

    Keeps the last of these: parts of a tensor are requested in turn.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], names: Container[str], compute: Callable[[str], Tensor]
    ) -> None:
        """`compute` gives those with these `names`."""
        super().__init__(tensors)
        self._names, self._compute = names, compute
        self._last: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            return self.data[name]
        if name not in self._last:
            self._last = {}  # before the next one takes memory
            self._last = {name: self._compute(name)}
        return self._last[name]


@torch.no_grad()
def merge_adapter(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Add `scale * b @ a` to `weight` [out, in] in place, in float32; `a` [rank, in], `b` [out, rank].

    Only products and sums of single elements in a fixed order are used, no matrix product: a process that
    merges a part of a matrix, on any device, gets the same bits as one that merges all of it.
    """
    a, b = a.float(), b.float()
    rows = max(1, max(_CHUNK_ELEMENTS, weight.numel() // _CHUNKS) // weight.shape[1])
    for first in range(0, weight.shape[0], rows):
        part = slice(first, min(first + rows, weight.shape[0]))
        delta = torch.zeros_like(weight[part], dtype=torch.float32, memory_format=torch.contiguous_format)
        product = torch.empty_like(delta)
        for k in range(a.shape[0]):
            torch.mul(b[part, k : k + 1], a[k], out=product)
            delta += product
        weight[part] = (weight[part].float() + delta.mul_(scale)).to(weight.dtype)
