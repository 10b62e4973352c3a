"""Core attention over packed sequences, which Megatron's own `DotProductAttention` refuses.

It runs a variable-length kernel where the device has one, else dense buckets of sequences of similar length.
Under context parallelism a rank has the queries of its share of every sequence, and collects all keys and
values. Tokens that several sequences begin with are there once: the kernel's rows then name their keys, and
outside of buckets what follows them attends to them in blocks (`TreeKernel`).

Sinks: a learned logit s per head, to which a query may turn instead of to any token. With the logits S of a
query, a token's share is exp(S) / (exp(s) + sum exp(S)): that of the softmax without the sink, times
sigmoid(lse - s), where lse = log sum exp(S). Flash attention's backward pass recomputes the shares as
exp(S - lse): given log(exp(lse) + exp(s)) for lse, and the output with the sink, it computes the gradients
with the sink. The sink's own is its share, times what it adds to the output (nothing) less the output.
"""

from collections.abc import Iterator
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


# In place of -infinity: a query that sees no key of a block has a finite lse for it, which counts as nothing.
HIDDEN = -1e30


@dataclass(frozen=True)
class DenseKernel:
    """Attention without sinks on a CPU: query [rows, heads, n, dim], key and value [rows, kv_heads, m, dim].

    Causal, with n = m, or where `sees` [n, m], or more dimensions, is True; with neither all sees all.
    """

    scale: float | None
    causal: bool = False
    sees: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return forward(query, key, value, 0.0, self.causal, **self._options(query))  # type: ignore[no-any-return]

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, self.causal, **self._options(q))  # type: ignore[no-any-return]

    def _options(self, query: Tensor) -> dict[str, Any]:
        mask = None
        if self.sees is not None:
            mask = query.new_zeros(self.sees.shape).masked_fill(~self.sees, HIDDEN)
            mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
        return {"attn_mask": mask, "scale": self.scale}


Block = tuple[slice, slice, Tensor | None]  # queries and keys of rows; which see which, None is causal


def blocks(bucket: Bucket, window: int | None, device: torch.device) -> Iterator[Block]:
    """All queries of a bucket, in their order, with no more keys than they see."""
    num_keys = bucket.keys.length
    if window is not None and window >= num_keys:
        window = None
    for span in bucket.spans:
        if window is None and span.starts is None:
            # Rows begin with their first query, so the causal mask is all the mask there is.
            yield slice(span.first, span.first + span.length), slice(0, num_keys), None
            continue
        size = span.length if window is None else max(window, BLOCK)
        for first in range(0, span.length, size):
            block = range(first, min(first + size, span.length))
            start = 0 if window is None else max(span.min_start + first - window + 1, 0)
            keys = range(start, min(span.largest_start + block.stop, num_keys))
            sees = span.sees(block, keys, window, device)
            yield slice(span.first + block.start, span.first + block.stop), slice(keys.start, keys.stop), sees


@dataclass(frozen=True)
class TreeKernel:
    """Attention of packed segments on a CPU: query [n, heads, dim], key and value [m, kv_heads, dim].

    Each segment attends to itself, in buckets, and all that follow it attend to it, in one block. Outputs
    are joined by lse. Given the joined output and lse, the backward pass of each block gives its part of the
    gradients.
    """

    layout: PackedLayout
    scale: float | None
    window: int | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        outs, all_lse = [], []
        for bucket in self.layout.buckets:
            q, (k, v) = bucket.queries.dense(query), (bucket.keys.dense(x) for x in (key, value))
            parts = [
                self._own(sees).forward(q[:, :, of_q], k[:, :, of_k], v[:, :, of_k])
                for of_q, of_k, sees in blocks(bucket, self.window, q.device)
            ]
            outs.append(bucket.queries.packed(torch.cat([out for out, _ in parts], 2)))
            lse = torch.cat([lse for _, lse in parts], 2).unsqueeze(-1)
            all_lse.append(bucket.queries.packed(lse).squeeze(-1))
        out, lse = torch.cat(outs), torch.cat(all_lse)
        for of_q, of_k, kernel in self._before():
            more, lse_of_more = kernel.forward(*(_row(x) for x in (query[of_q], key[of_k], value[of_k])))
            own, lse_of_more = lse[of_q], lse_of_more[0].t()
            joined = torch.logaddexp(own, lse_of_more)
            weights = ((part - joined).exp().unsqueeze(-1).type_as(out) for part in (own, lse_of_more))
            out[of_q].mul_(next(weights)).addcmul_(more[0].transpose(0, 1), next(weights))
            lse[of_q] = joined
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
        grads = tuple(torch.zeros_like(x) for x in (q, k, v))
        for bucket in self.layout.buckets:
            of_rows = [bucket.queries.dense(x) for x in (grad, q, out, lse.unsqueeze(-1))]
            of_rows += [bucket.keys.dense(x) for x in (k, v)]
            into = [torch.zeros_like(of_rows[place]) for place in (1, 4, 5)]
            for of_q, of_k, sees in blocks(bucket, self.window, q.device):
                of_out, query, joined, of_lse = (x[:, :, of_q] for x in of_rows[:4])
                key, value = (x[:, :, of_k] for x in of_rows[4:])
                lse_of_rows = of_lse.squeeze(-1).contiguous()
                parts = self._own(sees).backward(of_out, query, key, value, joined, lse_of_rows)
                for whole, part, place in zip(into, parts, (of_q, of_k, of_k), strict=True):
                    whole[:, :, place] += part
            for total, whole, rows in zip(grads, into, (bucket.queries, *[bucket.keys] * 2), strict=True):
                total[rows.start : rows.end] += rows.packed(whole)
        for of_q, of_k, kernel in self._before():
            row = [_row(x) for x in (grad[of_q], q[of_q], k[of_k], v[of_k], out[of_q])]
            row.append(lse[of_q].t().unsqueeze(0).contiguous())
            parts = kernel.backward(*row)
            for total, part, place in zip(grads, parts, (of_q, of_k, of_k), strict=True):
                total[place] += part[0].transpose(0, 1)
        return grads  # type: ignore[return-value]

    def _own(self, sees: Tensor | None) -> DenseKernel:
        return DenseKernel(self.scale, causal=sees is None, sees=sees)

    def _before(self) -> Iterator[tuple[slice, slice, DenseKernel]]:
        """Queries, the keys of a segment before them, as far as a window reaches, and their kernel."""
        positions = self.layout.positions
        for shared in self.layout.shared:
            keys, start, sees = shared.keys, shared.start, None
            if self.window is not None:
                hidden = max(0, keys.stop - keys.start - self.window + 1)
                keys, start = slice(keys.start + hidden, keys.stop), start + hidden
                if keys.start == keys.stop:
                    continue
                if shared.furthest - start >= self.window:
                    assert positions is not None, "shared keys come with positions"
                    of_keys = torch.arange(keys.stop - keys.start, device=positions.device) + start
                    sees = of_keys > positions[shared.queries].unsqueeze(1) - self.window
            yield shared.queries, keys, DenseKernel(self.scale, sees=sees)


def _row(x: Tensor) -> Tensor:
    """[n, heads, dim] -> [1, heads, n, dim]."""
    return x.transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True)
class PackedKernel:
    """torch's variable-length kernel of a GPU: query [n, heads, dim], key and value [m, kv_heads, dim].

    Rows have the keys at the places `keys`, some of them several times, or all in their order. They are
    collected again for the backward pass, so that no layer keeps them.
    """

    rows: KernelRows
    keys: Tensor | None
    scale: float | None
    window: int | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        operator, window = torch.ops.torch_attn._varlen_attn, list(window_size(self.window))
        key, value = self._of_rows(key), self._of_rows(value)
        options = grouped(query, key, takes_groups(operator))
        out, lse, _ = operator(
            query, key, value, *self.rows, self.window is None, self.scale, window, **options
        )
        return out, lse.t()

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        of_q, *of_rows = torch.ops.torch_attn._varlen_attn_backward(
            *(grad.contiguous(), q, self._of_rows(k), self._of_rows(v), out, lse.t().contiguous()),
            *(*self.rows, self.window is None, no_dropout, self.scale, list(window_size(self.window))),
        )
        if self.keys is not None:
            of_rows = [x.new_zeros(k.shape).index_add(0, self.keys, x) for x in of_rows]
        return of_q, *of_rows

    def _of_rows(self, x: Tensor) -> Tensor:
        return x if self.keys is None else x.index_select(0, self.keys)


class _Attend(torch.autograd.Function):
    """Output of a kernel, without sinks or with those that broadcast to its lse."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: DenseKernel | PackedKernel | TreeKernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value)  # lse without the last dimension of the output
        if sinks is not None:
            sinks = sinks.float()
            tokens = torch.sigmoid(lse - sinks)  # what is left for them
            out = out * tokens.unsqueeze(-1).type_as(out)
            lse = torch.logaddexp(lse, sinks.expand_as(lse))
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        (grad,) = grads
        of_tokens = ctx.kernel.backward(grad, query, key, value, out, lse)
        if sinks is None:
            return None, *of_tokens, None
        of_sinks = -(sinks - lse).exp() * (grad.float() * out.float()).sum(-1)
        return None, *of_tokens, of_sinks.sum_to_size(sinks.shape)


class JoinedAttention(torch.autograd.Function):
    """A kernel's attention, joined by lse with keys and values that one query each sees.

    `query` [n, heads, dim], `key` and `value` as the kernel has them; `own` are further keys, then as many
    values, each [n, kv_heads, dim], whose row i only the query i sees. Returns [n, heads, dim].
    """

    @staticmethod
    def forward(
        ctx: Any, kernel: PackedKernel | TreeKernel, query: Tensor, key: Tensor, value: Tensor, *own: Tensor
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value)
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        scores = [_own_scores(query, each) for each in keys]
        joined = torch.stack((lse, *scores)).logsumexp(0)
        out = out * (lse - joined).exp().unsqueeze(-1).type_as(out)
        for score, each in zip(scores, values, strict=True):
            out += (score - joined).exp().unsqueeze(-1).type_as(out) * _of_queries(each, query)
        ctx.save_for_backward(query, key, value, *own, out, joined)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *own, out, joined = ctx.saved_tensors
        (grad,) = grads
        of_query, of_key, of_value = ctx.kernel.backward(grad, query, key, value, out, joined)
        mean = (grad.float() * out.float()).sum(-1)  # of the gradients of all shares, by query
        of_keys, of_values = [], []
        for own_key, own_value in zip(own[: len(own) // 2], own[len(own) // 2 :], strict=True):
            share = (_own_scores(query, own_key) - joined).exp()
            gain = (grad.float() * _of_queries(own_value, query)).sum(-1) - mean
            of_score = (share * gain * query.shape[-1] ** -0.5).unsqueeze(-1).type_as(query)
            of_query = of_query + of_score * _of_queries(own_key, query)
            groups = own_key.shape[1], -1
            of_keys.append((of_score * query).unflatten(1, groups).sum(2))
            of_values.append((share.unsqueeze(-1).type_as(grad) * grad).unflatten(1, groups).sum(2))
        return None, of_query, of_key, of_value, *of_keys, *of_values


def _own_scores(query: Tensor, key: Tensor) -> Tensor:
    """[n, heads] float32 of each query with the key of its row."""
    scores: Tensor = (query.float() * _of_queries(key, query)).sum(-1) * query.shape[-1] ** -0.5
    return scores


def _of_queries(x: Tensor, query: Tensor) -> Tensor:
    """[n, heads, dim] from keys or values [n, kv_heads, dim], each for the queries of its group."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs `(i, i + dim / 2)` of `x` [N, heads, dim] by the angles of `RotaryTable.at`."""
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return]


class _Rotate(torch.autograd.Function):
    """Saves only the angles: the inverse of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    rotated, half = x * cos, x.shape[-1] // 2
    for own, other in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        rotated[..., own].addcmul_(x[..., other], sin[..., own], value=direction)
    return rotated


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
        if layout.cached is not None and layout.cached.continued:
            out = layout.cached.attend(self.layer_number, query, scale, window, sinks)
        elif layout.kernel is not None:
            rows, keys = layout.kernel_rows, layout.kernel_keys
            assert rows is not None, "rows come with a kernel"
            if sinks is not None or layout.is_tree:
                out = _Attend.apply(PackedKernel(rows, keys, scale, window), query, key, value, sinks)
            else:
                if keys is not None:
                    key, value = key.index_select(0, keys), value.index_select(0, keys)
                out = layout.kernel(query, key, value, rows, scale, window)
        elif layout.is_tree:
            out = _Attend.apply(TreeKernel(layout, scale, window), query, key, value, sinks)
        else:
            # Slices would each give a gradient of all tokens.
            queries = query.split([bucket.queries.num_tokens for bucket in layout.buckets])
            counts = [bucket.keys.num_tokens for bucket in layout.buckets]
            of_buckets = zip(queries, key.split(counts), value.split(counts), layout.buckets, strict=True)
            parts = [self._dense(q, k, v, bucket) for q, k, v, bucket in of_buckets]
            out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out[..., :width].flatten(1)  # of [N, heads, dim]

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, bucket: Bucket) -> Tensor:
        """[tokens of the bucket, heads, dim]."""
        q, k, v = bucket.queries.dense(query), bucket.keys.dense(key), bucket.keys.dense(value)
        parts = [
            self._masked(q[:, :, of_q], k[:, :, of_k], v[:, :, of_k], sees)
            for of_q, of_k, sees in blocks(bucket, self.window, q.device)
        ]
        return bucket.queries.packed(parts[0] if len(parts) == 1 else torch.cat(parts, 2))

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None) -> Tensor:
        """[count, heads, queries, dim]; causal where `sees` is None."""
        if self.softmax_offset is None:
            groups = q.shape[1] // k.shape[1]
            return F.scaled_dot_product_attention(
                q, k, v, sees, is_causal=sees is None, scale=self.softmax_scale, enable_gqa=groups > 1
            )
        kernel = DenseKernel(self.softmax_scale, causal=sees is None, sees=sees)
        return _Attend.apply(kernel, q, k, v, self.softmax_offset.unsqueeze(1))  # type: ignore[no-any-return]


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

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The parts of the spec; newer releases replace them by a config that has one flag for all norms."""
        parts: dict[str, Any] = vars(submodules)
        return parts

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
