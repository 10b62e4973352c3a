"""Core attention over packed sequences, and the layout that all layers of a micro-batch share.

Megatron's own `DotProductAttention` refuses packed sequences. This one takes them in every back end: a
variable-length kernel where the device has one, else dense buckets of sequences of similar length. The rotary
embedding is applied here too, because here the packed positions are known once for all layers.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from .device import AttentionKernel
from .rotary import rotate

Angles = tuple[Tensor, Tensor]  # cosines and signed sines, each [N, 1, dim]

# Sequences share a bucket while the shortest is at least this fraction of the longest: padding is computed
# for nothing, but each bucket costs several kernel launches per layer.
SIMILAR = 0.75
# Below this many tokens the launches always cost more than the padding.
SHORT = 32
# Queries of a layer with a window are taken in blocks of at least this many, each with the keys they see.
BLOCK = 128


@dataclass(frozen=True)
class Bucket:
    """Neighbouring sequences of similar length, laid out densely as `count` rows of `length` tokens."""

    start: int  # first packed token
    end: int
    count: int
    length: int
    index: Tensor | None  # [end - start] dense place of each packed token; None when there is no padding


@dataclass
class PackedLayout(PackedSeqParams):
    """How a micro-batch is packed. Goes through Megatron's layers as its `packed_seq_params`."""

    qkv_format: str = "thd"
    rotary: Angles | None = None
    local_rotary: Angles | None = None  # of the layers with a window, where theirs are others
    buckets: list[Bucket] = field(default_factory=list)  # empty where a variable-length kernel is used
    kernel: AttentionKernel | None = None


def packed_layout(
    lengths: list[int],
    rotary: Angles,
    kernel: AttentionKernel | None,
    local_rotary: Angles | None = None,
) -> PackedLayout:
    """Layout of sequences laid end to end; neighbours should be of similar length (sort them).

    Without a kernel buckets are made.
    """
    device = rotary[0].device
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    return PackedLayout(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        rotary=rotary,
        local_rotary=local_rotary,
        buckets=[] if kernel else _buckets(lengths, starts, device),
        kernel=kernel,
    )


def _buckets(lengths: list[int], starts: list[int], device: torch.device) -> list[Bucket]:
    bounds, low, high = [0], lengths[0], lengths[0]
    for i, length in enumerate(lengths):
        low, high = min(low, length), max(high, length)
        if high > SHORT and low < SIMILAR * high:
            bounds.append(i)
            low = high = length
    bounds.append(len(lengths))
    return [_bucket(lengths[a:b], starts[a], starts[b], device) for a, b in pairwise(bounds)]


def _bucket(lengths: list[int], start: int, end: int, device: torch.device) -> Bucket:
    longest = max(lengths)
    index = None
    if min(lengths) < longest:
        rows = [torch.arange(n) + i * longest for i, n in enumerate(lengths)]
        index = torch.cat(rows).to(device)
    return Bucket(start, end, len(lengths), longest, index)


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention` of a layer: causal within each sequence, blind across sequences."""

    def __init__(
        self,
        *,
        softmax_scale: float | None = None,
        window: int | None = None,
        rotates: bool = True,
        local_rope: bool = False,
        **_: Any,
    ) -> None:
        """Of one layer: `window` tokens are seen, the querying one included, or all before it.

        `rotates` is False where queries and keys come with their positions; `local_rope` takes the layout's
        second angles. `softmax_scale` is 1 / sqrt(dim) if None.
        """
        super().__init__()
        self.softmax_scale = softmax_scale
        self.window = window
        self.rotates = rotates
        self.local_rope = local_rope

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        attn_mask_type: Any,
        attention_bias: None = None,
        packed_seq_params: PackedLayout,
    ) -> Tensor:
        """`query` [N, heads, dim], `key` [N, kv_heads, dim], `value` [N, kv_heads, d] -> [N, heads * d]."""
        layout = packed_seq_params
        if self.rotates:
            angles = layout.local_rotary if self.local_rope else layout.rotary
            assert angles is not None, "a packed layout carries the angles that its layers want"
            query, key = rotate(query, *angles), rotate(key, *angles)
        width = value.shape[-1]
        # Kernels want values as wide as keys; columns of zeros give columns of zeros.
        value = F.pad(value, (0, key.shape[-1] - width))
        return self._attend(query, key, value, layout)[..., :width].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        """[N, heads, dim]"""
        scale, window = self.softmax_scale, self.window
        if layout.kernel is not None:
            cu_seqlens, longest = layout.cu_seqlens_q, layout.max_seqlen_q
            return layout.kernel(query, key, value, cu_seqlens, longest, scale, window)
        parts = [_dense_attention(query, key, value, bucket, scale, window) for bucket in layout.buckets]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _dense_attention(
    query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scale: float | None, window: int | None
) -> Tensor:
    """Attention of one bucket -> [its tokens, heads, dim].

    Padding stands at the end of a row, where no real query looks, so the causal mask is all the mask there
    is.
    """
    q, k, v = (_to_dense(x[bucket.start : bucket.end], bucket) for x in (query, key, value))
    if window is None or window >= bucket.length:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        out = _windowed_attention(q, k, v, scale, window)
    packed = out.transpose(1, 2).reshape(bucket.count * bucket.length, *query.shape[1:])
    return packed if bucket.index is None else packed.index_select(0, bucket.index)


def _windowed_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
    """[count, heads, length, dim]: a block of queries sees at most a block and a window of keys."""
    length, size = q.shape[2], max(window, BLOCK)
    blocks = []
    for first in range(0, length, size):
        last, start = min(first + size, length), max(first - window + 1, 0)
        ahead = first - start  # keys before the block's first query
        sees = torch.ones(last - first, last - start, dtype=torch.bool, device=q.device)
        sees = sees.tril(ahead).triu(ahead - window + 1)
        keys, values = k[:, :, start:last], v[:, :, start:last]
        block = F.scaled_dot_product_attention(
            q[:, :, first:last], keys, values, sees, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        blocks.append(block)
    return torch.cat(blocks, 2)


def _to_dense(x: Tensor, bucket: Bucket) -> Tensor:
    """[tokens, heads, dim] -> [count, heads, length, dim]."""
    if bucket.index is not None:
        x = x.new_zeros(bucket.count * bucket.length, *x.shape[1:]).index_copy(0, bucket.index, x)
    return x.reshape(bucket.count, bucket.length, *x.shape[1:]).transpose(1, 2)
