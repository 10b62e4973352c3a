"""Core attention over packed sequences.

Megatron's own `DotProductAttention` refuses packed sequences. This one takes them in every back end: a
variable-length kernel where the device has one, else dense buckets of sequences of similar length. The rotary
embedding is applied here too, because here the packed positions are known once for all layers.

Under context parallelism a rank has the queries of its share of every sequence, and collects the keys and
values of the other ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .packing import Bucket, PackedLayout, Span
from .rotary import rotate
from .sinks import DenseKernel, PackedKernel, attend

# Queries of a layer with a window are taken in blocks of at least this many, each with the keys they see.
BLOCK = 128


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention` of a layer: causal within each sequence, blind across sequences."""

    def __init__(
        self,
        *,
        softmax_scale: float | None = None,
        window: int | None = None,
        rotates: bool = True,
        local_rope: bool = False,
        sinks: bool = False,
        layer_number: int = 0,
        config: TransformerConfig | None = None,
        **_: Any,
    ) -> None:
        """Of one layer: `window` tokens are seen, the querying one included, or all before it.

        `rotates` is False where queries and keys come with their positions; `local_rope` takes the layout's
        second angles. `softmax_scale` is 1 / sqrt(dim) if None. `sinks` adds a parameter (sinks.py) for each
        head of the rank, of whose number and type Megatron's `config` tells.
        """
        super().__init__()
        self.softmax_scale = softmax_scale
        self.layer_number = layer_number
        self.window = window
        self.rotates = rotates
        self.local_rope = local_rope
        self.softmax_offset = None  # Megatron's name for the sinks
        if sinks:
            assert config is not None, "a layer with sinks is made from Megatron's config"
            if config.params_dtype == torch.float32 and not config.use_cpu_initialization:
                raise ValueError(
                    "policy.precision is float32: on a GPU the kernel for attention sinks takes bfloat16 only"
                )
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]

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
        if layout.key_order is not None:
            key, value = _of_all_ranks(key, value, layout)
        width = value.shape[-1]
        # Kernels want values as wide as keys; columns of zeros give columns of zeros.
        value = F.pad(value, (0, key.shape[-1] - width))
        return self._attend(query, key, value, layout)[..., :width].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout) -> Tensor:
        """[N, heads, dim]"""
        scale, window, sinks = self.softmax_scale, self.window, self.softmax_offset
        if layout.cached is not None:
            layout.cached.keep(self.layer_number, key, value)
            if layout.cached.step is not None:
                return layout.cached.attend(self.layer_number, query, scale, window, sinks)
        if layout.kernel is not None:
            rows = layout.kernel_rows
            if layout.kernel_keys is not None:
                key, value = (x.index_select(0, layout.kernel_keys) for x in (key, value))
            assert rows is not None, "rows come with a kernel"
            if sinks is not None:
                return attend(PackedKernel(rows, scale, window), query, key, value, sinks)
            return layout.kernel(query, key, value, rows, scale, window)
        parts = [
            _dense_attention(query, key, value, bucket, scale, window, sinks) for bucket in layout.buckets
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of_all_ranks(key: Tensor, value: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of whole sequences; in backward each rank gets the sum of its own tokens' gradients."""
    both = tensor_parallel.gather_from_sequence_parallel_region(
        torch.cat((key, value), -1), group=layout.share.group
    )
    whole = both.index_select(0, layout.key_order)
    return whole[..., : key.shape[-1]], whole[..., key.shape[-1] :]


def _dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bucket: Bucket,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one bucket -> [its tokens, heads, dim]."""
    q, k, v = bucket.queries.dense(query), bucket.keys.dense(key), bucket.keys.dense(value)
    parts: list[Tensor] = []
    for span in bucket.spans:
        queries = q[:, :, span.first : span.first + span.length]
        parts += _span_attention(queries, k, v, span, scale, window, sinks)
    return bucket.queries.packed(parts[0] if len(parts) == 1 else torch.cat(parts, 2))


def _span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Iterator[Tensor]:
    """[count, heads, queries, dim] of blocks of queries, each with no more keys than they see.

    The rows of one rank that holds whole sequences begin with their first query, so without a window the
    causal mask is all the mask there is.
    """
    if window is not None and window >= k.shape[2]:
        window = None
    if window is None and span.starts is None:
        yield _masked_attention(q, k, v, None, scale, sinks)
        return
    size = span.length if window is None else max(window, BLOCK)
    for first in range(0, span.length, size):
        block = range(first, min(first + size, span.length))
        start = 0 if window is None else max(span.least_start + first - window + 1, 0)
        keys = range(start, min(span.largest_start + block.stop, k.shape[2]))
        yield _masked_attention(
            q[:, :, block.start : block.stop],
            k[:, :, keys.start : keys.stop],
            v[:, :, keys.start : keys.stop],
            span.sees(block, keys, window, q.device),
            scale,
            sinks,
        )


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """[count, heads, queries, dim]; causal where `sees` is None."""
    groups = q.shape[1] // k.shape[1]
    if sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, sees, is_causal=sees is None, scale=scale, enable_gqa=groups > 1
        )
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return attend(DenseKernel(sees, scale), q, k, v, sinks.unsqueeze(1))
