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

# Sequences share a bucket while the shortest is at least this fraction of the longest: padding is computed
# for nothing, but each bucket costs several kernel launches per layer.
SIMILAR = 0.75
# Below this many tokens the launches always cost more than the padding.
SHORT = 32


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
    rotary: tuple[Tensor, Tensor] | None = None  # cosines and signed sines, each [N, 1, head_dim]
    buckets: list[Bucket] = field(default_factory=list)  # empty where a variable-length kernel is used
    kernel: AttentionKernel | None = None


def packed_layout(
    lengths: list[int],
    rotary: tuple[Tensor, Tensor],
    kernel: AttentionKernel | None,
) -> PackedLayout:
    """Layout of sequences laid end to end; neighbours should be of similar length (sort them).

    `kernel(q, k, v, cu_seqlens, max_seqlen)` is a causal variable-length attention; without one buckets are
    made.
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

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        attn_mask_type: Any,
        attention_bias: None,
        packed_seq_params: PackedLayout,
    ) -> Tensor:
        """`query` [N, heads, dim], `key` and `value` [N, kv_heads, dim] -> [N, heads * dim]."""
        layout = packed_seq_params
        assert layout.rotary is not None, "a packed layout carries its rotary angles"
        query, key = rotate(query, *layout.rotary), rotate(key, *layout.rotary)
        if layout.kernel is not None:
            out: Tensor = layout.kernel(query, key, value, layout.cu_seqlens_q, layout.max_seqlen_q)
            return out.flatten(1)
        parts = [_dense_attention(query, key, value, bucket) for bucket in layout.buckets]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, bucket: Bucket) -> Tensor:
    """Attention of one bucket -> [its tokens, heads * dim].

    Padding stands at the end of a row, where no real query looks, so the causal mask is all the mask there
    is.
    """
    q, k, v = (_to_dense(x[bucket.start : bucket.end], bucket) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    packed = out.transpose(1, 2).reshape(bucket.count * bucket.length, -1)
    return packed if bucket.index is None else packed.index_select(0, bucket.index)


def _to_dense(x: Tensor, bucket: Bucket) -> Tensor:
    """[tokens, heads, dim] -> [count, heads, length, dim]."""
    if bucket.index is not None:
        x = x.new_zeros(bucket.count * bucket.length, *x.shape[1:]).index_copy(0, bucket.index, x)
    return x.reshape(bucket.count, bucket.length, *x.shape[1:]).transpose(1, 2)
