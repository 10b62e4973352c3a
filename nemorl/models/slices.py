"""Weights in one coordinate system: the names and shapes of the Hugging Face checkpoint.

Holders of weights (policy ranks, engines, files) describe them as `TensorSlice`s. Loading, exporting
and the exchange with generation are then one operation: copy a box of a tensor from one holder to another.
"""

from dataclasses import dataclass


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

    @property
    def num_elements(self) -> int:
        n = 1
        for extent in self.size:
            n *= extent
        return n

    @property
    def box(self) -> tuple[slice, ...]:
        """Indices of the box in the whole HF tensor."""
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.size, strict=True))
