"""Counts of a model's work: the products of a layer, and what ranks send each other. Imports no torch.

A product multiplies the row of a token by a matrix; each of its elements takes two operations.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from nemorl.config.policy import (
    ChosenRecompute,
    LayoutConfig,
    NoRecompute,
    PolicyConfig,
    SelectiveRecompute,
)
from nemorl.models.shape import ModelShape

_OF_NORM = 8  # operations for each element that a norm reads


@dataclass(frozen=True)
class Product:
    """A product of a layer with a matrix of `inner` x `columns` elements."""

    module: Literal["projections", "mla_up_proj", "mlp", "shared_experts", "experts"]
    inner: int
    columns: int
    split: Literal["columns", "inner", None] = None  # the extent that tensor parallelism divides
    copies: int = 1  # of a token, each with a matrix of its own: experts

    @property
    def operations(self) -> int:
        """For a token."""
        return 2 * self.inner * self.columns * self.copies

    def on_rank(self, tensor_parallel: int) -> "Product":
        """The part of one rank."""
        inner = self.inner // (tensor_parallel if self.split == "inner" else 1)
        columns = self.columns // (tensor_parallel if self.split == "columns" else 1)
        return Product(self.module, max(1, inner), max(1, columns), self.split, self.copies)


@lru_cache(maxsize=256)
def layer_products(shape: ModelShape, layer: int) -> tuple[Product, ...]:
    """Without the router, which is small."""
    return (*_attention_products(shape), *_mlp_products(shape, layer))


def attention_width(shape: ModelShape) -> int:
    """Elements of a query and of a value, of all heads: a key that a token sees takes two operations each."""
    if shape.mla is None:
        return 2 * shape.num_attention_heads * shape.head_dim
    return shape.num_attention_heads * (shape.mla.head_dim + shape.mla.rotary_dim + shape.mla.value_dim)


def cached_width(shape: ModelShape) -> int:
    """Elements that generation keeps of a token in each layer: keys and values, or MLA's latents."""
    if shape.mla is None:
        return 2 * shape.num_key_value_heads * shape.head_dim
    return shape.mla.key_value_rank + shape.mla.rotary_dim


@lru_cache(maxsize=16)
def forward_products(shape: ModelShape) -> int:
    """Operations of a forward pass for a token in all products, with the head's and without attention."""
    layers = range(shape.num_layers)
    head = 2 * shape.hidden_size * shape.vocab_size
    return head + sum(product.operations for layer in layers for product in layer_products(shape, layer))


def mtp_products(shape: ModelShape) -> int:
    """Operations of a forward pass for a token in one layer for further tokens, without the head's."""
    projection = 2 * 2 * shape.hidden_size * shape.hidden_size
    return projection + sum(product.operations for product in layer_products(shape, shape.num_layers))


def forward_attention(shape: ModelShape, seen: float) -> float:
    """Operations of attention in a forward pass, in all layers, for a token that sees `seen` others."""
    windows = (shape.window(layer) for layer in range(shape.num_layers))
    return sum(2 * attention_width(shape) * min(seen, window or seen) for window in windows)


def forward_operations(shape: ModelShape, policy: PolicyConfig, recompute: ChosenRecompute) -> float:
    """Operations for a token that the backward pass repeats, in all layers. Products count twice."""
    if isinstance(recompute, NoRecompute):
        return 0.0
    modules = _of_modules(shape, policy.max_sequence_length)
    if isinstance(recompute, SelectiveRecompute):
        return sum(modules.get(name, 0.0) for name in recompute.modules)
    work = sum(work for name, work in modules.items() if name != "shared_experts")
    if recompute.method == "block":
        layout = policy.layout
        runs = layout.pipeline_parallel_size * layout.virtual_pipeline_parallel_size
        work *= min(1.0, recompute.num_layers * runs / shape.num_layers)
    return work


@lru_cache(maxsize=16)
def _of_modules(shape: ModelShape, max_sequence_length: int) -> Mapping[str, float]:
    """Operations of a forward pass for a token in all layers, by module; `moe` includes `shared_experts`."""
    found: dict[str, float] = defaultdict(float)
    for layer in range(shape.num_layers):
        for product in layer_products(shape, layer):
            found[product.module] += product.operations
        found["layernorm"] += 2 * _OF_NORM * shape.hidden_size
        seen = min(max_sequence_length / 2, shape.window(layer) or max_sequence_length)
        found["core_attn"] += 2 * seen * attention_width(shape)
    if "experts" in found:
        found["moe"] = found.pop("experts") + found["shared_experts"]
    return found


def _attention_products(shape: ModelShape) -> Iterator[Product]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    if (mla := shape.mla) is None:
        columns = (heads + 2 * shape.num_key_value_heads) * shape.head_dim
        yield Product("projections", hidden, columns, "columns")
        yield Product("projections", heads * shape.head_dim, hidden, "inner")
        return
    query = heads * (mla.head_dim + mla.rotary_dim)
    if mla.query_rank:
        yield Product("projections", hidden, mla.query_rank)
        yield Product("mla_up_proj", mla.query_rank, query, "columns")
    else:
        yield Product("projections", hidden, query, "columns")
    yield Product("projections", hidden, mla.key_value_rank + mla.rotary_dim)
    yield Product("mla_up_proj", mla.key_value_rank, heads * (mla.head_dim + mla.value_dim), "columns")
    yield Product("projections", heads * mla.value_dim, hidden, "inner")


def _mlp_products(shape: ModelShape, layer: int) -> Iterator[Product]:
    hidden = shape.hidden_size
    if shape.moe is None or not shape.is_moe(layer):
        yield Product("mlp", hidden, 2 * shape.ffn_hidden_size, "columns")
        yield Product("mlp", shape.ffn_hidden_size, hidden, "inner")
        return
    if shared := shape.moe.shared_ffn_hidden_size:
        yield Product("shared_experts", hidden, 2 * shared, "columns")
        yield Product("shared_experts", shared, hidden, "inner")
    ffn, copies = shape.moe.ffn_hidden_size, shape.moe.top_k
    yield Product("experts", hidden, 2 * ffn, "columns", copies)
    yield Product("experts", ffn, hidden, "inner", copies)


Axis = Literal["tensor", "context", "expert", "pipeline"]


def sent_elements(shape: ModelShape, layout: LayoutConfig) -> dict[Axis, float]:
    """Sent by a process for a token of its copy, in one forward and backward pass, by axis.

    Rings: a gathering or scattering of n elements over r ranks makes each send (r - 1) / r of them. Every
    layer gathers and scatters the hidden state twice under TP, in both directions; gathers keys and values
    under CP, and scatters their gradients; brings tokens to experts and back under EP and ETP, in both
    directions. A stage hands a hidden state on and a gradient back, once for each of its runs of layers.
    """
    hidden = shape.hidden_size
    tensor, context = layout.tensor_parallel_size, layout.context_parallel_size
    own = 1 / context  # of a token: ranks of CP have their own
    layers = shape.num_layers / layout.pipeline_parallel_size
    keys_and_values = 2 * shape.num_key_value_heads * shape.head_dim
    if shape.mla is not None:
        keys_and_values = attention_width(shape)
    sent: dict[Axis, float] = {
        "tensor": layers * 8 * hidden * own * _others(tensor),
        "context": layers * 2 * keys_and_values / tensor * _others(context),
        "expert": 0.0,
        "pipeline": 0.0,
    }
    if shape.moe is not None:
        with_experts = sum(map(shape.is_moe, range(shape.num_layers))) / layout.pipeline_parallel_size
        sharing = layout.expert_parallel_size * layout.expert_tensor_parallel_size
        copies = shape.moe.top_k * layout.expert_tensor_parallel_size
        sent["expert"] = with_experts * 4 * copies * hidden * own / tensor * _others(sharing)
    if layout.pipeline_parallel_size > 1:
        sent["pipeline"] = 2 * layout.virtual_pipeline_parallel_size * hidden * own / tensor
    return sent


def _others(ranks: int) -> float:
    """Of what ranks share, the part that one of them has to get from or send to the others."""
    return (ranks - 1) / ranks
