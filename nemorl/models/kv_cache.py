"""The keys and values of running sequences: one row for each, every row as long as the longest needs.

The attention kernel reads dense rows in place, without a gather of pages. The price is the room behind short
sequences, so admission counts rows times the longest. Storage grows by reallocation, layer by layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemorl.device import upload

# Numbers of places that the attention kernel reads, within each of its blocks of 512. With 256 or 320 the
# CPU's matrix product splits a row's sum elsewhere, and a sequence's rounding would depend on the longest one
# in the batch (seen with MKL 2024.2 on x86-64; elsewhere the only loss is the bit).
_BLOCK = 512
_READ_IN_BLOCK = (64, 128, 192, 384, 448, 512)


def whole_places(places: int) -> int:
    """The least number of places, at least `places`, for which every row sums in the same order."""
    blocks, rest = divmod(places - 1, _BLOCK)
    return blocks * _BLOCK + next(count for count in _READ_IN_BLOCK if count > rest)


class KVCache:
    """Rows 0..n-1 for each layer; keys are as attention sees them, rotated, so that any family can use it."""

    def __init__(self, max_tokens: int, first: int = 0) -> None:
        self._max_tokens = max_tokens  # rows times the longest
        self._first = first  # empty places before the first token of each
        self.rows = self.length = 0  # sequences, and tokens of each, for which there is room
        # [values, rows, places, *], two values for keys and values; each is made when it is first written
        self._layers: dict[int, Tensor] = {}

    @property
    def num_tokens(self) -> int:
        return self.rows * self.length

    def fits(self, rows: int, length: int) -> bool:
        return rows * length <= self._max_tokens

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens, keeping what they hold. Raises ValueError for too many."""
        if rows <= self.rows and length <= self.length:
            return
        if not self.fits(rows, length):
            problem = f"may hold {self._max_tokens} tokens, and {rows} rows of {length} tokens are requested"
            raise ValueError(f"the KV cache {problem}; raise generation.max_kv_tokens")
        kept_rows, kept_places = min(self.rows, rows), self.length + self._first
        if self.fits(self.rows, length):
            rows = max(rows, self.rows)
        # With what it may grow into where the limit leaves room for that.
        needed = whole_places(length + self._first) - self._first
        grown = whole_places(max(length, self.length * 3 // 2) + self._first) - self._first
        sizes = (grown, max(needed, self.length), needed, self._max_tokens // rows)
        self.rows, self.length = rows, next(size for size in sizes if self.fits(rows, size))
        kept_places = min(kept_places, self.length + self._first)
        for layer, old in self._layers.items():
            # Zeros, not garbage: masked keys and values still enter the products, where a NaN would spread.
            new = old.new_zeros(len(old), rows, self.length + self._first, *old.shape[3:])
            new[:, :kept_rows, :kept_places] = old[:, :kept_rows, :kept_places]
            self._layers[layer] = new

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""
        if not sources or not self._layers:
            return
        device = next(iter(self._layers.values())).device
        source, target = upload(device, sources, targets)
        end = length + self._first
        for stored in self._layers.values():
            stored[:, target, :end] = stored[:, source, :end]

    def release(self) -> None:
        self.rows = self.length = 0
        self._layers = {}

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows * (self.length + self._first) + positions + self._first

    def keep(self, layer: int, slots: Tensor, *values: Tensor) -> None:
        """Put keys and values, or others [n, *] of tokens, at their slots [n]."""
        if layer not in self._layers:
            size = (len(values), self.rows, self.length + self._first, *values[0].shape[1:])
            with torch.inference_mode(False):  # it is written in and outside of that mode
                self._layers[layer] = torch.zeros(size, dtype=values[0].dtype, device=values[0].device)
        for stored, value in zip(self._layers[layer].flatten(1, 2), values, strict=True):
            stored.index_copy_(0, slots, value)

    def places_read(self, longest: int) -> int:
        """Places that a step reads where the longest sequence has `longest` tokens."""
        return min(whole_places(longest + self._first), self.length + self._first)

    def read(self, layer: int, rows: int, places: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, places, dim] of the first rows and places."""
        key, value = self._layers[layer][:, :rows, :places].transpose(2, 3)
        return key, value

    def tokens(self, layer: int, row: int, first: int, end: int) -> Tensor:
        """[values, end - first, *] of the tokens at these positions of a row."""
        return self._layers[layer][:, row, first + self._first : end + self._first]
