"""The keys and values of running sequences, and how the next token of each attends to them.

They are kept as attention sees them, rotated and, under MLA, projected up, so that one cache serves every
family. A row holds one sequence; before its first token it has an empty place, whose key gives the logit 0,
to which a layer with sinks (sinks.py) adds the sink.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

# Places that are read are a multiple of this, so that a row sums in the same order whatever else is running.
PLACES = 64
_FIRST = 1  # place of a sequence's first token
_EXPERTS = -1  # in the place of a layer


class KeyValueCache:
    """Rows 0..n-1 for each layer of this rank, as long as the longest sequence needs."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: rows times the tokens of the longest."""
        self._max_tokens = max_tokens
        self._rows = self._length = 0
        # [2, rows, places, kv_heads, dim], and of experts [1, rows, places, MoE layers, top_k]; each is made
        # when it is first written
        self._layers: dict[int, Tensor] = {}

    @property
    def rows(self) -> int:
        """Sequences for which there is room."""
        return self._rows

    @property
    def length(self) -> int:
        """Tokens a row has room for."""
        return self._length

    @property
    def num_tokens(self) -> int:
        """Tokens for which memory is held."""
        return self._rows * self._length

    def fits(self, rows: int, length: int) -> bool:
        """True if `rows` sequences of which the longest has `length` tokens can be held at one time."""
        return rows * length <= self._max_tokens

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens and some more, keeping what the first `rows` hold."""
        if rows <= self._rows and length <= self._length:
            return
        roomy = max(length, min(self._length + self._length // 2, self._max_tokens // max(rows, 1)))
        kept, places = min(self._rows, rows), self._places
        self._rows = rows if not self.fits(self._rows, roomy) else max(rows, self._rows)
        self._length = -(-(roomy + _FIRST) // PLACES) * PLACES - _FIRST
        for layer, old in self._layers.items():
            new = old.new_zeros(len(old), self._rows, self._places, *old.shape[3:])
            kept_places = min(places, self._places)
            new[:, :kept, :kept_places] = old[:, :kept, :kept_places]
            self._layers[layer] = new

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""
        if not sources or not self._layers:
            return
        device = next(iter(self._layers.values())).device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for stored in self._layers.values():
            stored[:, target, : length + _FIRST] = stored[:, source, : length + _FIRST]

    def release(self) -> None:
        """Give the memory back; nothing is held any more."""
        self._rows = self._length = 0
        self._layers = {}

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[n] slots of the tokens of these rows and positions."""
        return rows * self._places + positions + _FIRST

    def keep(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put keys and values [n, kv_heads, dim] at their slots [n]."""
        self._keep(layer, slots, key, value)

    def keep_experts(self, slots: Tensor, experts: Tensor) -> None:
        """Put the experts [n, MoE layers, top_k] of tokens at their slots [n]."""
        self._keep(_EXPERTS, slots, experts)

    def experts(self, row: int, first: int, end: int) -> Tensor:
        """[end - first, MoE layers, top_k] of the tokens at these positions of a row, which were read."""
        return self._layers[_EXPERTS][0, row, first + _FIRST : end + _FIRST]

    def read(self, layer: int, rows: int, places: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, places, dim] of the first rows and places."""
        key, value = self._layers[layer][:, :rows, :places].transpose(2, 3)
        return key, value

    def _keep(self, layer: int, slots: Tensor, *values: Tensor) -> None:
        if layer not in self._layers:
            size = (len(values), self._rows, self._places, *values[0].shape[1:])
            self._layers[layer] = values[0].new_zeros(size)
        for stored, value in zip(self._layers[layer].flatten(1, 2), values, strict=True):
            stored.index_copy_(0, slots, value)

    @property
    def _places(self) -> int:
        return self._length + _FIRST


@dataclass
class NextTokens:
    """The places that the next token of each row 0..n-1 sees; the same for all layers of a window."""

    positions: Tensor  # [n] of the tokens in their sequences
    longest: int  # the largest of them
    dtype: torch.dtype
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def places(self) -> int:
        """Places that are read."""
        return -(-(self.longest + 1 + _FIRST) // PLACES) * PLACES

    def mask(self, window: int | None) -> Tensor:
        """[n, 1, 1, places] to be added to the logits; -inf also at the empty place."""
        if window not in self._masks:
            position = torch.arange(self.places, device=self.positions.device) - _FIRST
            own = self.positions.unsqueeze(1)
            sees = (position >= 0) & (position <= own)
            if window is not None:
                sees &= position > own - window
            mask = torch.zeros(sees.shape, device=own.device, dtype=self.dtype)
            self._masks[window] = mask.masked_fill_(~sees, -torch.inf)[:, None, None]
        return self._masks[window]


@dataclass
class CachedPass:
    """Access of a forward pass to the cache: it stores new keys and values and, in a step, reads them."""

    cache: KeyValueCache
    sources: Tensor  # [m] packed tokens whose keys and values are kept; one may be kept in several rows
    slots: Tensor  # [m] where
    step: NextTokens | None  # None: prompts, whose tokens see one another only

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values of a layer's packed tokens [N, kv_heads, dim]."""
        self.cache.keep(
            layer, self.slots, key.index_select(0, self.sources), value.index_select(0, self.sources)
        )

    def attend(
        self, layer: int, query: Tensor, scale: float | None, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """[N, heads, dim] of the next tokens' queries; 0 for those that pad. `sinks` [heads]."""
        assert self.step is not None, "prompts attend to themselves"
        n = len(self.step.positions)
        key, value = self.cache.read(layer, n, self.step.places)
        heads = query[:n].unflatten(1, (key.shape[1], -1))  # [n, kv_heads, queries of each, dim]
        mask = self.step.mask(window)
        if sinks is not None:
            mask = mask.repeat(1, *heads.shape[1:3], 1)
            mask[..., 0] = sinks.to(mask.dtype).view(heads.shape[1:3])
        out = F.scaled_dot_product_attention(heads, key, value, mask, scale=scale).flatten(1, 2)
        return F.pad(out, (0, 0, 0, 0, 0, len(query) - n))
