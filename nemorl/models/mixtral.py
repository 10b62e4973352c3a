"""Mixtral (arXiv 2401.04088): Mistral with experts in every layer.

The rules of routers and gated experts are shared with the other families that have experts.
"""

from .family import HfTensor, LayerKind, ModelFamily, Split, WeightRule
from .hf_config import HfConfig, decoder_shape
from .llama import ATTENTION, EMBEDDINGS
from .shape import Dim, ModelShape, MoeShape

EXPERT = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
ROUTER = "decoder.layers.{layer}.mlp.router."


def softmax_top_k(config: HfConfig, num_experts: int) -> int:
    """`num_experts_per_tok` of a router whose weights are a softmax over the chosen experts."""
    top_k = config.integer("num_experts_per_tok")
    if not 2 <= top_k <= num_experts:
        raise config.unsupported(
            "num_experts_per_tok",
            f"a softmax over the chosen experts requires 2 to {num_experts} of them",
        )
    return top_k


def router_weight(name: str) -> WeightRule:
    """The rule of a router's weight, under a checkpoint's own name."""
    return WeightRule(
        ROUTER + "weight",
        (HfTensor(name, (Dim.EXPERTS, Dim.HIDDEN)),),
        Split.REPLICATED,
        layers=LayerKind.MOE,
    )


def gated_experts(router: str, gate: str, up: str, down: str) -> tuple[WeightRule, ...]:
    """Rules of a router and of experts that have three tensors each, under a checkpoint's own names."""
    return (
        router_weight(router),
        WeightRule(
            EXPERT + "linear_fc1.weight",
            (
                HfTensor(gate, (Dim.EXPERT_FFN, Dim.HIDDEN)),
                HfTensor(up, (Dim.EXPERT_FFN, Dim.HIDDEN)),
            ),
            Split.ROWS,
            layers=LayerKind.MOE,
            experts=True,
        ),
        WeightRule(
            EXPERT + "linear_fc2.weight",
            (HfTensor(down, (Dim.HIDDEN, Dim.EXPERT_FFN)),),
            Split.COLUMNS,
            layers=LayerKind.MOE,
            experts=True,
        ),
    )


_MLP = "model.layers.{layer}.block_sparse_moe."
_EXPERT = _MLP + "experts.{expert}."
EXPERTS = gated_experts(
    router=_MLP + "gate.weight",
    gate=_EXPERT + "w1.weight",
    up=_EXPERT + "w3.weight",
    down=_EXPERT + "w2.weight",
)


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", router_jitter_noise=0.0)
    num_experts = config.integer("num_local_experts")
    moe = MoeShape(
        num_experts=num_experts,
        top_k=softmax_top_k(config, num_experts),
        ffn_hidden_size=config.integer("intermediate_size"),
    )
    window = config.get("sliding_window")
    windows = (window,) * config.integer("num_hidden_layers") if window else ()
    return decoder_shape(config, "mixtral", windows=windows, moe=moe)


MIXTRAL = ModelFamily(
    "mixtral", ("MixtralForCausalLM",), _read, lambda shape: (*EMBEDDINGS, *ATTENTION, *EXPERTS)
)
