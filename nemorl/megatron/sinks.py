"""Attention with sinks: a learned logit per head, to which a query may turn instead of to any token.

With the logits S of a query and the sink s, a token's share is exp(S) / (exp(s) + sum exp(S)): that of the
softmax without the sink, times sigmoid(lse - s), where lse = log sum exp(S). Flash attention returns lse with
its output, and its backward pass recomputes the shares as exp(S - lse). Given log(exp(lse) + exp(s)) in its
place, and the output with the sink, it therefore computes the gradients with the sink. The sink's own is the
share it takes, times what it would add to the output (nothing) less the output.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.attention.varlen  # registers the operators of `PackedKernel`
from torch import Tensor

from .device import KernelRows


class FlashKernel(Protocol):
    """Attention without sinks, forward and backward apart."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and lse of its shape without the last dimension."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        ...


@dataclass(frozen=True)
class DenseKernel:
    """Rows of equal length on a CPU: query [rows, heads, n, dim], key and value [rows, heads, m, dim]."""

    sees: Tensor | None  # bool, broadcast to [rows, heads, n, m]; None is causal with n = m
    scale: float | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, heads, n, dim] and [rows, heads, n]"""
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return forward(query, key, value, 0.0, self.sees is None, **self._options(query))  # type: ignore[no-any-return]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the shapes of query, key and value."""
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        causal, options = self.sees is None, self._options(query)
        return backward(grad, query, key, value, out, lse, 0.0, causal, **options)  # type: ignore[no-any-return]

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
        """[n, heads, dim] and [n, heads]"""
        grouped = query.shape[1] != key.shape[1]
        out, lse, _ = torch.ops.torch_attn._varlen_attn(
            query, key, value, *self._sizes(), self._causal, self.scale, self._window_size, grouped
        )
        return out, lse.t()

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the shapes of query, key and value."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return torch.ops.torch_attn._varlen_attn_backward(  # type: ignore[no-any-return]
            grad.contiguous(),
            query,
            key,
            value,
            out,
            lse.t().contiguous(),
            *self._sizes(),
            self._causal,
            no_dropout,
            self.scale,
            self._window_size,
        )

    @property
    def _causal(self) -> bool:
        return self.window is None

    @property
    def _window_size(self) -> list[int]:
        return [-1 if self.window is None else self.window - 1, 0]

    def _sizes(self) -> tuple[Tensor, Tensor, int, int]:
        rows = self.rows
        return rows.cu_queries, rows.cu_keys, rows.max_queries, rows.max_keys


def attend(kernel: FlashKernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """What the kernel computes, with sinks that broadcast to its lse: [heads, 1] dense, [heads] packed."""
    return _Attend.apply(kernel, query, key, value, sinks)  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: FlashKernel, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor
    ) -> Tensor:
        out, lse = kernel.forward(query, key, value)
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
