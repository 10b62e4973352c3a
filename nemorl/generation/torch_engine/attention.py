"""How queries meet keys and values: a prefill attends within its prompts, a decoding step to the cache."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .cache import KVCache, keys_to_read

_QUERY_MULTIPLE = 4  # query rows of one kernel call; see `DecodeAttention`


class Attention(Protocol):
    """Attention of one forward pass over `N` packed tokens."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, heads, D], key and value [N, kv_heads, D], rotated -> [N, heads * D]."""
        ...


class PrefillAttention:
    """Causal attention within `prompts` right-padded to one length; keys and values go to the cache.

    `owners[i]` is the prompt whose keys and values the cache row `rows[i]` gets: identical prompts are
    computed once. Padding sits behind every real token, so the causal mask alone keeps it out; what it leaves
    in the cache is overwritten before a step can see it.
    """

    def __init__(self, cache: KVCache, num_prompts: int, rows: Tensor, owners: Tensor) -> None:
        self._cache = cache
        self._num_prompts = num_prompts
        self._rows = rows  # [R]
        self._owners = owners  # [R]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (heads.unflatten(0, (self._num_prompts, -1)) for heads in (query, key, value))
        stored = self._cache.layers[layer]
        length = min(q.shape[1], self._cache.length)  # padding may reach beyond the rows
        stored[0, self._rows, :length] = k[:, :length].flatten(2)[self._owners]
        stored[1, self._rows, :length] = v[:, :length].flatten(2)[self._owners]
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(len(query), -1)


class DecodeAttention:
    """One new token for each of the cache rows 0..n-1, attending to its row up to itself.

    The query heads that share a key-value head are the query rows of one kernel call, so grouped-query
    attention needs no copy of the keys. They are padded to a multiple of four: with fewer, the CPU kernel's
    rounding depends on the other rows of the batch.
    """

    def __init__(self, cache: KVCache, positions: Tensor, longest: int, dtype: torch.dtype) -> None:
        """`positions` [n] of the new tokens; the largest of them is `longest - 1`."""
        self._cache = cache
        self._num_rows = len(positions)
        device = positions.device
        self._keys = min(keys_to_read(longest), cache.length)
        self._slots = torch.arange(self._num_rows, device=device) * cache.length + positions
        visible = torch.arange(self._keys, device=device) <= positions.unsqueeze(1)
        mask = torch.zeros(visible.shape, device=device, dtype=dtype).masked_fill_(~visible, float("-inf"))
        self._mask = mask[:, None, None, :]  # [n, 1, 1, keys], added to the scores

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n, kv_heads = self._num_rows, key.shape[1]
        stored = self._cache.layers[layer]
        stored[0].flatten(0, 1).index_copy_(0, self._slots, key[:n].flatten(1))
        stored[1].flatten(0, 1).index_copy_(0, self._slots, value[:n].flatten(1))
        keys, values = stored[:, :n, : self._keys].unflatten(-1, (kv_heads, -1)).transpose(2, 3)

        q = query[:n].unflatten(1, (kv_heads, -1))  # [n, kv_heads, group, D]
        group = q.shape[2]
        q = functional.pad(q, (0, 0, 0, -group % _QUERY_MULTIPLE))
        out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask)
        attended = out[:, :, :group].reshape(n, -1)
        return functional.pad(attended, (0, 0, 0, len(query) - n))
