"""Mixtral (arXiv 2401.04088): Mistral with experts in every layer; families with experts share its rules."""

from typing import Any

from .family import HfTensor, LayerKind, ModelFamily, Split, WeightRule, layer_rule, layer_tensor
from .hf_config import HfConfig, decoder_shape
from .llama import ATTENTION, EMBEDDINGS
from .shape import Dim, ModelShape, MoeShape


def softmax_moe(config: HfConfig, *, experts: str, ffn: str, **changes: Any) -> MoeShape:
    """Experts weighted by a softmax over those chosen; `experts` and `ffn` name fields."""
    num_experts, top_k = config.integer(experts), config.integer("num_experts_per_tok")
    if not 2 <= top_k <= num_experts:
        reason = f"a softmax over the chosen experts requires 2 to {num_experts} of them"
        raise config.unsupported("num_experts_per_tok", reason)
    return MoeShape(num_experts, top_k, config.integer(ffn), **changes)


def router(param: str, name: str, *dims: Dim, learns: bool = True) -> WeightRule:
    """The rule of a router's parameter, under a checkpoint's own name."""
    tensor = layer_tensor(name, *dims)
    return layer_rule(f"mlp.router.{param}", Split.REPLICATED, tensor, layers=LayerKind.MOE, learns=learns)


def expert(param: str, split: Split, *tensors: HfTensor) -> WeightRule:
    name = f"mlp.experts.local_experts.{{expert}}.{param}"
    return layer_rule(name, split, *tensors, layers=LayerKind.MOE, experts=True)


def gated_experts(
    block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[WeightRule, ...]:
    """Rules of a router and of experts with three tensors each, under a checkpoint's own names."""
    prefix = block + ".experts.{expert}."
    first = (layer_tensor(f"{prefix}{name}.weight", Dim.EXPERT_FFN, Dim.HIDDEN) for name in (gate, up))
    second = layer_tensor(f"{prefix}{down}.weight", Dim.HIDDEN, Dim.EXPERT_FFN)
    return (
        router("weight", f"{block}.gate.weight", Dim.EXPERTS, Dim.HIDDEN),
        expert("linear_fc1.weight", Split.ROWS, *first),
        expert("linear_fc2.weight", Split.COLUMNS, second),
    )


_WEIGHTS = (*EMBEDDINGS, *ATTENTION, *gated_experts("block_sparse_moe", gate="w1", up="w3", down="w2"))


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", router_jitter_noise=0.0)
    moe = softmax_moe(config, experts="num_local_experts", ffn="intermediate_size")
    window = config.get("sliding_window")
    windows = (window,) * config.integer("num_hidden_layers") if window else ()
    return decoder_shape(config, "mixtral", windows=windows, moe=moe)


MIXTRAL = ModelFamily(
    "mixtral", ("MixtralForCausalLM",), _read, lambda shape: _WEIGHTS, drafts_by_heads=False
)
