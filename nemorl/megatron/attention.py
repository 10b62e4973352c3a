"""Core attention over packed sequences, which Megatron's own `DotProductAttention` refuses.

It runs a variable-length kernel where the device has one, else dense buckets of sequences of similar length.
Under context parallelism a rank has the queries of its share of every sequence, and collects all keys and
values.

Sinks: a learned logit s per head, to which a query may turn instead of to any token. With the logits S of a
query, a token's share is exp(S) / (exp(s) + sum exp(S)): that of the softmax without the sink, times
sigmoid(lse - s), where lse = log sum exp(S). Flash attention's backward pass recomputes the shares as
exp(S - lse): given log(exp(lse) + exp(s)) for lse, and the output with the sink, it computes the gradients
with the sink. The sink's own is its share, times what it adds to the output (nothing) less the output.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operators of `PackedKernel`
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .device import KernelRows, grouped, takes_groups, window_size
from .packing import Bucket, PackedLayout

Grads = tuple[Tensor, Tensor, Tensor]  # of query, key and value


@dataclass(frozen=True)
class DenseKernel:
    """Attention without sinks on a CPU: query [rows, heads, n, dim], key and value [rows, heads, m, dim]."""

    sees: Tensor | None  # bool, broadcast to [rows, heads, n, m]; None is causal with n = m
    scale: float | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return forward(query, key, value, 0.0, self.sees is None, **self._options(query))  # type: ignore[no-any-return]

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        causal, options = self.sees is None, self._options(q)
        return backward(grad, q, k, v, out, lse, 0.0, causal, **options)  # type: ignore[no-any-return]

    def _options(self, query: Tensor) -> dict[str, Any]:
        mask = None
        if self.sees is not None:
            mask = query.new_zeros(self.sees.shape).masked_fill(~self.sees, -torch.inf)
            mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
        return {"attn_mask": mask, "scale": self.scale}


@dataclass(frozen=True)
class PackedKernel:
    """torch's variable-length kernel of a GPU: query [n, heads, dim], key and value [m, kv_heads, dim]."""

    rows: KernelRows
    scale: float | None
    window: int | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        operator, window = torch.ops.torch_attn._varlen_attn, list(window_size(self.window))
        options = grouped(query, key, takes_groups(operator))
        out, lse, _ = operator(
            query, key, value, *self.rows, self.window is None, self.scale, window, **options
        )
        return out, lse.t()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.torch_attn._varlen_attn_backward(  # type: ignore[no-any-return]
            *(grad.contiguous(), q, k, v, out, lse.t().contiguous(), *self.rows),
            *(self.window is None, no_dropout, self.scale, list(window_size(self.window))),
        )


class _AttendWithSinks(torch.autograd.Function):
    """Output of a kernel with sinks that broadcast to its lse: [heads, 1] dense, [heads] packed."""

    @staticmethod
    def forward(
        ctx: Any, kernel: DenseKernel | PackedKernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value)  # lse without the last dimension of the output
        sinks = sinks.float()
        tokens = torch.sigmoid(lse - sinks)  # what is left for them
        out = out * tokens.unsqueeze(-1).type_as(out)
        ctx.save_for_backward(query, key, value, sinks, out, torch.logaddexp(lse, sinks.expand_as(lse)))
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        (grad,) = grads
        of_tokens = ctx.kernel.backward(grad, query, key, value, out, lse)
        of_sinks = -(sinks - lse).exp() * (grad.float() * out.float()).sum(-1)
        return None, *of_tokens, of_sinks.sum_to_size(sinks.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs `(i, i + dim / 2)` of `x` [N, heads, dim] by the angles of `RotaryTable.at`."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    """Saves only the angles: the inverse of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        return (grad * cos).addcmul_(grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None


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
        """A query sees `window` tokens, itself included, or all before it.

        `rotates` is False where queries and keys come with their positions; `local_rope` takes the layout's
        second angles. `sinks` adds a parameter for each head.
        """
        super().__init__()
        self.softmax_scale, self.layer_number, self.window = softmax_scale, layer_number, window
        self.rotates, self.local_rope = rotates, local_rope
        self.softmax_offset: torch.nn.Parameter | None = None  # Megatron's name for the sinks
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
        self, query: Tensor, key: Tensor, value: Tensor, *_: None, packed_seq_params: PackedLayout, **__: Any
    ) -> Tensor:
        """`query` [N, heads, dim], `key` [N, kv_heads, dim], `value` [N, kv_heads, d] -> [N, heads * d]."""
        layout = packed_seq_params
        if self.rotates:
            angles = layout.local_rotary if self.local_rope else layout.rotary
            assert angles is not None, "a packed layout carries the angles that its layers need"
            query, key = rotate(query, *angles), rotate(key, *angles)
        if layout.key_order is not None:
            # Of whole sequences; in backward each rank gets the sum of its own tokens' gradients.
            both = tensor_parallel.gather_from_sequence_parallel_region(
                torch.cat((key, value), -1), group=layout.share.group
            ).index_select(0, layout.key_order)
            key, value = both.split((key.shape[-1], value.shape[-1]), -1)
        width = value.shape[-1]
        if key.shape[-1] > width:  # kernels require values as wide as keys; zeros give columns of zeros
            value = F.pad(value, (0, key.shape[-1] - width))
        scale, window, sinks = self.softmax_scale, self.window, self.softmax_offset
        if layout.cached is not None:
            layout.cached.keep(self.layer_number, key, value)
        if layout.cached is not None and layout.cached.step is not None:
            out = layout.cached.attend(self.layer_number, query, scale, window, sinks)
        elif layout.kernel is not None:
            rows = layout.kernel_rows
            assert rows is not None, "rows come with a kernel"
            if layout.kernel_keys is not None:
                key, value = (x.index_select(0, layout.kernel_keys) for x in (key, value))
            if sinks is not None:
                out = _AttendWithSinks.apply(PackedKernel(rows, scale, window), query, key, value, sinks)
            else:
                out = layout.kernel(query, key, value, rows, scale, window)
        else:
            parts = [self._dense(query, key, value, bucket) for bucket in layout.buckets]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out[..., :width].flatten(1)  # of [N, heads, dim]

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, bucket: Bucket) -> Tensor:
        """[tokens of the bucket, heads, dim], by blocks of queries with no more keys than they see."""
        q, k, v = bucket.queries.dense(query), bucket.keys.dense(key), bucket.keys.dense(value)
        window = self.window if self.window is not None and self.window < k.shape[2] else None
        parts = []
        for span in bucket.spans:
            if window is None and span.starts is None:
                # Rows begin with their first query, so the causal mask is all the mask there is.
                of_span = q[:, :, span.first : span.first + span.length]
                parts.append(self._masked(of_span, k, v, None))
                continue
            size = span.length if window is None else max(window, BLOCK)
            for first in range(0, span.length, size):
                block = range(first, min(first + size, span.length))
                start = 0 if window is None else max(span.min_start + first - window + 1, 0)
                keys = range(start, min(span.largest_start + block.stop, k.shape[2]))
                seen = slice(keys.start, keys.stop)
                of_block = q[:, :, span.first + block.start : span.first + block.stop]
                sees = span.sees(block, keys, window, q.device)
                parts.append(self._masked(of_block, k[:, :, seen], v[:, :, seen], sees))
        return bucket.queries.packed(parts[0] if len(parts) == 1 else torch.cat(parts, 2))

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None) -> Tensor:
        """[count, heads, queries, dim]; causal where `sees` is None."""
        groups = q.shape[1] // k.shape[1]
        if self.softmax_offset is None:
            return F.scaled_dot_product_attention(
                q, k, v, sees, is_causal=sees is None, scale=self.softmax_scale, enable_gqa=groups > 1
            )
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        kernel = DenseKernel(sees, self.softmax_scale)
        return _AttendWithSinks.apply(kernel, q, k, v, self.softmax_offset.unsqueeze(1))  # type: ignore[no-any-return]


# DeepSeek's norms of the latents have this epsilon whatever `rms_norm_eps` says; transformers follows it.
LATENT_NORM_EPS = 1e-6

if not isinstance(multi_latent_attention.TELinear, type):
    # Without Transformer Engine, Megatron defines placeholders, which this module takes for its classes.
    multi_latent_attention.HAVE_TE = False


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over packed tokens, with our rotary angles.

    Megatron's own forward pass turns positions by the place in the packed batch, and without sequence
    parallelism it does not sum the gradient of the shared key over the tensor-parallel ranks.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Megatron knows a scale of its own yarn's only.
        self.core_attention.softmax_scale = self.config.softmax_scale
        for module in self.children():
            if hasattr(module, "eps"):  # a norm, or a projection with the norm before it
                module.eps = LATENT_NORM_EPS

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedLayout | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Queries, keys [N, heads, dim + rotary dim] and values [N, heads, value dim] of this rank's heads.

        `hidden_states` [N, 1, H], of N / TP tokens under sequence parallelism.
        """
        assert packed_seq_params is not None, "tokens come packed"
        assert packed_seq_params.rotary is not None, "a packed layout carries its rotary angles"
        # All channels [N, 1, C], of which each tensor-parallel rank computes some.
        joint = mappings.gather_from_tensor_model_parallel_region(self.linear_kv_down_proj(hidden_states)[0])
        latent, shared_key = joint.split((self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim), -1)
        shared_key = mappings.copy_to_tensor_model_parallel_region(shared_key)  # sums the gradient over ranks
        query_input = hidden_states
        if self.config.q_lora_rank is not None:
            partial = self.linear_q_down_proj(hidden_states)[0]
            query_latent = mappings.gather_from_tensor_model_parallel_region(partial)
            query_input = self.q_layernorm(self._own_tokens(query_latent))
        normed = self.kv_layernorm(self._own_tokens(latent))
        inputs = (query_input, normed, shared_key, *packed_seq_params.rotary)
        if not self.recompute_up_proj:
            return *self._project_up(*inputs), None, None
        # Megatron's forward frees the outputs once attention has taken them.
        self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput()
        return *self.qkv_up_checkpoint.checkpoint(self._project_up, *inputs), None, None

    def _project_up(
        self, query_input: Tensor, latent: Tensor, shared_key: Tensor, *angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, heads = self.config, (self.num_attention_heads_per_partition, -1)
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = project(query_input)[0].squeeze(1).unflatten(-1, heads)
        plain, positioned = query.split((config.qk_head_dim, config.qk_pos_emb_head_dim), -1)
        both = self.linear_kv_up_proj(latent)[0].squeeze(1).unflatten(-1, heads)
        key, value = both.split((config.qk_head_dim, config.v_head_dim), -1)
        turned = _rotate_pairs(shared_key, angles).expand(-1, key.shape[1], -1)
        query = torch.cat((plain, _rotate_pairs(positioned, angles)), -1)
        return query, torch.cat((key, turned), -1), value.contiguous()

    def _own_tokens(self, latent: Tensor) -> Tensor:
        """This rank's tokens: the projections up collect those of all ranks."""
        if not self.config.sequence_parallel:
            return latent
        return mappings.scatter_to_sequence_parallel_region(latent)  # type: ignore[no-any-return]


def _rotate_pairs(x: Tensor, angles: tuple[Tensor, ...]) -> Tensor:
    """Rotate neighboring channels [N, heads, dim]; they end up as halves, both in queries and keys."""
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(halves, *angles)
