"""Attention of the next token of each running sequence to the keys and values in the cache.

They are kept rotated and, under MLA, projected up, so that one cache serves every family. Before its first
token a row has an empty place, whose key gives the logit 0, to which a layer with sinks adds the sink.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from nemorl.models.kv_cache import KVCache

EMPTY_PLACES = 1
EXPERTS = -1  # in the place of a layer


@dataclass
class NextTokens:
    """The places that the next token of each row 0..n-1 sees; the same for all layers of a window."""

    positions: Tensor  # [n] of the tokens in their sequences
    places: int  # that are read
    dtype: torch.dtype
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """[n, 1, 1, places] to be added to the logits; -inf also at the empty place."""
        if window not in self._masks:
            own = self.positions.unsqueeze(1)
            position = torch.arange(self.places, device=own.device) - EMPTY_PLACES
            sees = (position >= 0) & (position <= own)
            if window is not None:
                sees &= position > own - window
            mask = torch.zeros(sees.shape, device=own.device, dtype=self.dtype)
            self._masks[window] = mask.masked_fill_(~sees, -torch.inf)[:, None, None]
        return self._masks[window]


@dataclass
class CachedPass:
    """Access of a forward pass to the cache: it stores new keys and values and, in a step, reads them."""

    cache: KVCache
    sources: Tensor  # [m] packed tokens whose keys and values are kept; one may be kept in several rows
    slots: Tensor  # [m] where
    step: NextTokens | None  # None: prompts, whose tokens see one another only

    def keep(self, layer: int, *values: Tensor) -> None:
        """Store keys and values of a layer's packed tokens [N, kv_heads, dim], or their experts."""
        self.cache.keep(layer, self.slots, *(value.index_select(0, self.sources) for value in values))

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
