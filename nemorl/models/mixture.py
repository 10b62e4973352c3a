"""Rules of routers and gated experts, shared by families with a mixture of experts. Imports no torch."""

from .family import HfTensor, LayerKind, Split, WeightRule
from .hf_config import HfConfig
from .shape import Dim

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
