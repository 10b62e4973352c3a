"""What a model family declares: how to recognise it, what Megatron is told, and where its weights go.

A family is data. Everything that follows from it (slices of a rank, the tensors of a folder, the checks of a
config.json) is computed from these declarations, so that a new family is one short file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # shape.py reads config.json by the families' declarations, so it imports this module
    from .shape import Llama3RopeScaling, ModelShape


class Dim(Enum):
    """Extents of weight tensors, by name; `ModelShape.extent` gives their numbers."""

    HIDDEN = "hidden"
    FFN = "ffn"
    VOCABULARY = "vocabulary"
    HEAD = "head"
    QUERY = "query"  # all query heads
    KEY_VALUE = "key_value"  # all key (or value) heads


class Split(Enum):
    """How tensor parallelism divides one Megatron parameter; tensors of one rule lie behind one another."""

    REPLICATED = "replicated"
    ROWS = "rows"  # Megatron's column-parallel linear: each rank holds its rows of each tensor in turn
    COLUMNS = "columns"  # Megatron's row-parallel linear
    VOCABULARY = "vocabulary"  # rows, after padding the vocabulary to a multiple of the ranks
    HEAD_GROUPS = "head_groups"  # rows interleaved per key-value head: its query heads, its key, its value


class Stage(Enum):
    """Pipeline stages that hold a parameter."""

    FIRST = "first"
    LAYERS = "layers"  # each stage, for its own layers; `{layer}` stands in the names
    LAST = "last"


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the HF checkpoint."""

    name: str  # `{layer}` is the layer's number in the whole model
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter and the HF tensors that lie in it."""

    param: str  # `{layer}` is the layer's number in its stage
    tensors: tuple[HfTensor, ...]
    split: Split
    stage: Stage = Stage.LAYERS


@dataclass(frozen=True)
class MegatronArguments:
    """What Megatron is told of a model: fields of `TransformerConfig`, then arguments of `GPTModel`."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    layernorm_epsilon: float
    add_qkv_bias: bool
    qk_layernorm: bool
    normalization: Literal["RMSNorm"]
    activation: Literal["silu"]
    gated_linear_unit: bool
    add_bias_linear: bool
    vocab_size: int  # not padded
    max_sequence_length: int
    rotary_base: float
    rope_scaling: Llama3RopeScaling | None
    share_embeddings_and_output_weights: bool


@dataclass(frozen=True)
class ModelFamily:
    """A family of dense decoders with RMSNorm, rotary positions, grouped queries and a SwiGLU MLP."""

    name: str
    architectures: tuple[str, ...]  # of config.json
    weights: tuple[WeightRule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None  # where config.json names none; hidden size / heads if None
    fixed_fields: tuple[tuple[str, object], ...] = ()  # of config.json: absent, or of the one supported value

    def megatron_arguments(self, shape: ModelShape) -> MegatronArguments:
        """Megatron's words for a model of this family."""
        return MegatronArguments(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            ffn_hidden_size=shape.ffn_hidden_size,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_key_value_heads,
            kv_channels=shape.head_dim,
            layernorm_epsilon=shape.rms_norm_eps,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.qk_norm,
            normalization="RMSNorm",
            activation="silu",
            gated_linear_unit=True,
            add_bias_linear=False,
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_position_embeddings,
            rotary_base=shape.rope_theta,
            rope_scaling=shape.rope_scaling,
            share_embeddings_and_output_weights=shape.tied_embeddings,
        )
