"""Weights in one coordinate system: the names and shapes of the Hugging Face checkpoint.

Holders of weights (policy ranks, engines, files) describe them as `TensorSlice`s, and loading, exporting and
the exchange with generation copy boxes from one holder to another.
"""

import math
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class TensorSlice:
    """A box of one HF tensor, and where its elements lie in a local parameter.

    The local elements are `param.as_strided(size, strides, param.storage_offset() + offset)`: this covers
    rows of a fused qkv, halves of a gate-up matrix, column shards and transposed storage.
    """

    name: str  # HF tensor
    shape: tuple[int, ...]  # of the whole HF tensor
    start: tuple[int, ...]  # first corner of the box in the HF tensor
    size: tuple[int, ...]  # extent of the box
    param: str  # local parameter that holds it
    offset: int  # elements from the parameter's first element
    strides: tuple[int, ...]  # elements, one per dimension of the box

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Self:
        """A whole HF tensor that lies in a contiguous parameter of the same name."""
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return cls(name, shape, (0,) * len(shape), shape, name, 0, strides)

    @property
    def num_elements(self) -> int:
        return math.prod(self.size)

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.size, strict=True))
