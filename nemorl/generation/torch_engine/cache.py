"""The KV cache: one row per running sequence, rows 0..n-1 in use, every row as long as the longest needs.

Dense rows let the attention kernel read keys and values in place, without the gather that pages would cost
at every step. The price is the room behind short sequences, so admission counts rows times the longest row.
Storage starts small and grows by reallocation, one layer at a time; it never exceeds `max_tokens`.
"""

from collections.abc import Sequence

import torch

# Numbers of keys that the attention kernel reads, within each of its blocks of 512. The CPU kernel sums a row
# over all keys that are read, those beyond the row's end as zeros; with 256 or 320 keys its matrix product
# splits the sum elsewhere, and a sequence's rounding would depend on the longest one in the batch (seen
# with MKL 2024.2 on x86-64; elsewhere the only loss is the bit).
_KEY_BLOCK = 512
_KEYS_IN_BLOCK = (64, 128, 192, 384, 448, 512)


def keys_to_read(length: int) -> int:
    """The least number of keys, at least `length`, for which every row sums in the same order."""
    whole, rest = divmod(length - 1, _KEY_BLOCK)
    return whole * _KEY_BLOCK + next(keys for keys in _KEYS_IN_BLOCK if keys > rest)


class KVCache:
    """Keys and values of `rows x length` tokens for every layer; `layers[i]` is [2, rows, length, width]."""

    def __init__(
        self, num_layers: int, width: int, max_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`width` is key-value heads times their dimension."""
        self._max_tokens = max_tokens
        self._width = width
        self._rows = 0
        self._length = 0
        # Zeros, not garbage: masked keys and values still enter the products, where a NaN would spread.
        self.layers = [torch.zeros(2, 0, 0, width, device=device, dtype=dtype) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens a row has room for."""
        return self._length

    @property
    def num_tokens(self) -> int:
        """Tokens for which memory is held."""
        return self._rows * self._length

    def fits(self, rows: int, length: int) -> bool:
        """Whether `rows` sequences of which the longest has `length` tokens can be held at one time."""
        return rows * length <= self._max_tokens

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens, keeping what the first `rows` hold.

        Raises ValueError when that is more than the cache may hold.
        """
        if rows <= self._rows and length <= self._length:
            return
        if not self.fits(rows, length):
            raise ValueError(
                f"the KV cache may hold {self._max_tokens} tokens, and {rows} rows of {length} tokens are"
                " wanted; raise generation.max_kv_tokens"
            )
        kept_rows, kept_length = min(self._rows, rows), min(self._length, length)
        self._rows, self._length = self._new_size(rows, length)
        for index, old in enumerate(self.layers):
            new = old.new_zeros(2, self._rows, self._length, self._width)
            new[:, :kept_rows, :kept_length] = old[:, :kept_rows, :kept_length]
            self.layers[index] = new

    def _new_size(self, rows: int, length: int) -> tuple[int, int]:
        """The wanted size, with what it may grow into where the limit leaves room for that."""
        if self._rows > rows and self.fits(self._rows, length):
            rows = self._rows
        grown = max(length, self._length + self._length // 2)
        for roomy in (keys_to_read(grown), max(keys_to_read(length), self._length), keys_to_read(length)):
            if self.fits(rows, roomy):
                return rows, roomy
        return rows, self._max_tokens // rows

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""
        if not sources:
            return
        device = self.layers[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for layer in self.layers:
            layer[:, target, :length] = layer[:, source, :length]
