"""The shape of a model: everything that its config.json says about the network. Imports no torch."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Dim(Enum):
    """Extents of weight tensors, by name; `ModelShape.extent` gives their numbers."""

    ONE = "one"
    TWO = "two"
    HIDDEN = "hidden"
    TWICE_HIDDEN = "twice_hidden"
    FFN = "ffn"
    VOCABULARY = "vocabulary"
    HEAD = "head"
    HEADS = "heads"  # query heads, for one number a head
    QUERY = "query"  # all query heads
    KEY_VALUE = "key_value"  # all key (or value) heads
    VALUE = "value"  # all value heads, where they are as many as query heads (MLA)
    QUERY_LATENT = "query_latent"  # MLA's compressed query
    KEY_VALUE_LATENT = "key_value_latent"  # MLA's compressed key and value
    KEY_VALUE_LATENT_AND_ROTARY = "key_value_latent_and_rotary"  # the same and the key's shared rotary part
    KEY_VALUE_FROM_LATENT = "key_value_from_latent"  # keys (without the rotary part) and values of all heads
    EXPERTS = "experts"
    EXPERT_FFN = "expert_ffn"
    SHARED_FFN = "shared_ffn"  # of all shared experts together
    ADAPTER_RANK = "adapter_rank"


@dataclass(frozen=True)
class LinearRopeScaling:
    factor: float  # by which positions are divided


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Rotary frequencies stretched for long contexts, as Llama 3.1 does (arXiv 2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRopeScaling:
    """Frequencies stretched by parts, and attention sharpened (YaRN, arXiv 2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # of cosines and sines
    truncate: bool = True  # the band's borders are rounded to whole channels


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: angle of channel pair i at position p is `p * theta ** (-2 i / dim)`."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class MoeShape:
    num_experts: int
    top_k: int  # experts of each token
    ffn_hidden_size: int  # of one expert
    first_layer: int = 0  # layers before it have an ordinary MLP
    shared_ffn_hidden_size: int = 0  # of the experts that every token visits, together; 0 for none
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # the weights of a token's experts sum to 1 (before `scaling`)
    scaling: float = 1.0  # of the experts' weights
    num_groups: int = 1  # experts are chosen among those of the best groups only
    groups_per_token: int = 1
    expert_bias: bool = False  # a bias that counts in the choice and not in the weights
    router_bias: bool = False  # of the router's logits


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    query_rank: int | None  # of the compressed query; None where it is not compressed
    key_value_rank: int
    head_dim: int  # of queries and keys, without the rotary part
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True)
class MtpShape:
    """Layers that predict further tokens: multi-token prediction (arXiv 2412.19437, section 2.2).

    Each projects the embedding of a later token and the hidden state before it, both normed, to the input of
    an ordinary layer, the first ones to the hidden state of the model.
    """

    num_layers: int
    # The first columns of the projection are those of the hidden state, and not of the embedding.
    hidden_first: bool = False
    before_final_norm: bool = False  # the model's hidden state is taken before its last norm, not after it


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # as in the checkpoint, not padded
    tied_embeddings: bool
    rope: Rope
    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # generation_config.json's where it names any, as transformers does
    torch_dtype: str  # of the checkpoint: float32, bfloat16 or float16
    qkv_bias: bool = False
    linear_bias: bool = False  # of the attention's output and of the experts' matrices
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"  # of the gate
    windows: tuple[int | None, ...] = ()  # by layer: how many tokens it sees, itself included; () for all
    local_rope: Rope | None = None  # of the layers with a window, where it is another
    sinks: bool = False  # a learned logit a head, to which attention may go instead of a token
    softmax_scale: float | None = None  # of the attention's logits; 1 / sqrt(head_dim) if None
    zero_centered_norm: bool = False  # the norms' weights are kept less one
    post_norms: bool = False  # a norm also on what attention and MLP add to the residual stream
    embedding_scale: float | None = None
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    mtp: MtpShape | None = None  # None also where the layers of a checkpoint are left out
    head: Literal["lm", "scalar"] = "lm"
    value_mean: float = 0.0  # subtracted from what a scalar head says
    value_std: float = 1.0  # by which the rest is divided
    adapter_rank: int = 0  # of the adapters; 0 for none

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.mla is None else self.mla.rotary_dim

    @property
    def num_mtp_layers(self) -> int:
        """They are numbered after the others: from `num_layers` on."""
        return self.mtp.num_layers if self.mtp else 0

    def mtp_depth(self, depth: int | None) -> int:
        """Further tokens that are predicted, of the given `policy.multi_token_prediction.depth`."""
        return depth or self.num_mtp_layers

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_layer

    @property
    def num_moe_layers(self) -> int:
        return sum(self.is_moe(layer) for layer in range(self.num_layers))

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def extent(self, dim: Dim) -> int:
        """The number behind a named extent of a weight; KeyError for one that the model does not have."""
        heads, moe, mla = self.num_attention_heads, self.moe, self.mla
        extents = {
            Dim.ONE: 1,
            Dim.TWO: 2,
            Dim.HIDDEN: self.hidden_size,
            Dim.TWICE_HIDDEN: 2 * self.hidden_size,
            Dim.FFN: self.ffn_hidden_size,
            Dim.VOCABULARY: self.vocab_size,
            Dim.HEAD: self.head_dim,
            Dim.HEADS: heads,
            Dim.QUERY: heads * self.head_dim,
            Dim.KEY_VALUE: self.num_key_value_heads * self.head_dim,
            Dim.ADAPTER_RANK: self.adapter_rank,
        }
        if moe is not None:
            extents[Dim.EXPERTS] = moe.num_experts
            extents[Dim.EXPERT_FFN] = moe.ffn_hidden_size
            extents[Dim.SHARED_FFN] = moe.shared_ffn_hidden_size
        if mla is not None:
            extents[Dim.QUERY] = heads * (mla.head_dim + mla.rotary_dim)
            extents[Dim.VALUE] = heads * mla.value_dim
            extents[Dim.QUERY_LATENT] = mla.query_rank or 0
            extents[Dim.KEY_VALUE_LATENT] = mla.key_value_rank
            extents[Dim.KEY_VALUE_LATENT_AND_ROTARY] = mla.key_value_rank + mla.rotary_dim
            extents[Dim.KEY_VALUE_FROM_LATENT] = heads * (mla.head_dim + mla.value_dim)
        return extents[dim]
