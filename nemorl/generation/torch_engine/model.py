"""The decoder of the Llama, Qwen2 and Qwen3 families, written for sampling only.

One forward pass takes `N` tokens of any sequences, packed; where their keys and values lie is the business of
the `Attention` it is given.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from nemorl.models.rope import RotaryTable
from nemorl.models.shape import ModelShape

from .attention import Attention
from .linear import Linear
from .rope import Rotation


class _Layer:
    def __init__(self, shape: ModelShape, index: int, weights: Mapping[str, Tensor]) -> None:
        def weight(name: str) -> Tensor | None:
            return weights.get(f"layers.{index}.{name}")

        def linear(name: str) -> Linear:
            return Linear(weights[f"layers.{index}.{name}.weight"], weight(f"{name}.bias"))

        self._index = index
        self._heads, self._kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self._head_dim, self._epsilon = shape.head_dim, shape.rms_norm_eps
        self._attention_norm = weights[f"layers.{index}.attention_norm.weight"].clone()
        self._mlp_norm = weights[f"layers.{index}.mlp_norm.weight"].clone()
        self._qkv, self._attention_output = linear("qkv"), linear("attention_output")
        self._gate_up, self._down = linear("gate_up"), linear("down")
        q_norm, k_norm = weight("q_norm.weight"), weight("k_norm.weight")
        self._qk_norm: Tensor | None = None  # [heads + kv_heads, head_dim]
        if q_norm is not None and k_norm is not None:
            self._qk_norm = torch.cat((q_norm.expand(self._heads, -1), k_norm.expand(self._kv_heads, -1)))

    def __call__(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        x = x + self._attend(rms_norm(x, self._attention_norm, self._epsilon), rotation, attention)
        gate, up = self._gate_up(rms_norm(x, self._mlp_norm, self._epsilon)).chunk(2, dim=-1)
        return x + self._down(functional.silu(gate) * up)

    def _attend(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        heads = self._qkv(x).unflatten(-1, (-1, self._head_dim))  # [N, heads + 2 kv_heads, D]
        query_key, value = heads[:, : -self._kv_heads], heads[:, -self._kv_heads :]
        if self._qk_norm is not None:
            query_key = rms_norm(query_key, None, self._epsilon) * self._qk_norm
        query_key = rotation.apply(query_key)
        query, key = query_key[:, : self._heads], query_key[:, self._heads :]
        return self._attention_output(attention(self._index, query, key, value))


class Decoder:
    """The network with one version of the weights; new weights make a new decoder."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor], table: RotaryTable) -> None:
        """Copy `weights`, named as in `parameters.py`; later writes to them are not seen."""
        self._table = table
        self._epsilon = shape.rms_norm_eps
        self._embedding = weights["embedding.weight"].clone()
        self._layers = [_Layer(shape, index, weights) for index in range(shape.num_layers)]
        self._norm = weights["norm.weight"].clone()
        head = "embedding.weight" if shape.tied_embeddings else "head.weight"
        self._head = Linear(weights[head])

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states [N, hidden], normalised, of `tokens` [N] at `positions` [N]."""
        rotation = Rotation(*self._table.at(positions))
        x = functional.embedding(tokens, self._embedding)
        for layer in self._layers:
            x = layer(x, rotation, attention)
        return rms_norm(x, self._norm, self._epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocabulary] in float32."""
        return self._head(hidden).float()


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)
