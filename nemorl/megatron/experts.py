"""Layers with experts: what Megatron is told about them, and what it forgets to tell itself."""

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module

from nemorl.config.policy import PolicyConfig
from nemorl.models.shape import ModelShape

from .packing import PackedLayout, TokenRouting
from .routing import PolicyRouter


def expert_arguments(shape: ModelShape, policy: PolicyConfig) -> dict[str, Any]:
    """Fields of Megatron's configuration for a model with experts; none for another."""
    moe, layout = shape.moe, policy.layout
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": [int(shape.is_moe(layer)) for layer in range(shape.num_layers)],
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.scores,
        # A softmax over the chosen experts' logits is the normalised softmax over all.
        "moe_router_pre_softmax": moe.scores == "softmax" and not moe.normalize,
        "moe_router_topk_scaling_factor": moe.scaling if moe.scaling != 1 else None,
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.groups_per_token if moe.num_groups > 1 else None,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": layout.expert_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
    }


def _recomputed(config: TransformerConfig) -> list[str]:
    return list(config.recompute_modules or []) if config.recompute_granularity == "selective" else []


class RoutedLayer(TransformerLayer):
    """A layer that tells its router about the tokens, also where it is computed again."""

    def forward(self, *args: Any, packed_seq_params: PackedLayout, **options: Any) -> Any:
        """Megatron's."""
        self.mlp.tokens = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


class ExpertLayer(MoELayer):
    """Our router and Megatron's experts: one after another, or all at once with Transformer Engine."""

    router: PolicyRouter

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        grouped = config.transformer_impl == "transformer_engine"
        spec = get_moe_module_spec(
            use_te=grouped, num_experts=config.num_moe_experts, moe_grouped_gemm=grouped
        ).submodules
        super().__init__(config, MoESubmodules(spec.experts, spec.shared_experts, PolicyRouter), **options)
        self.tokens: TokenRouting | None = None
        # Done below instead, where the tokens are known.
        self._is_recomputed: bool = "moe" in _recomputed(config)
        self.moe_layer_recompute = False
        self._mark_experts()

    def set_layer_number(self, layer_number: int) -> None:
        """Of the layer in the whole model, from 1."""
        super().set_layer_number(layer_number)
        self.router.moe_layer = sum(self.config.moe_layer_freq[: layer_number - 1])

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: None = None
    ) -> tuple[Tensor, None]:
        """[n, 1, H] -> [n, 1, H] and no bias; of n tokens of this rank."""
        tokens = self.tokens

        def compute(hidden: Tensor) -> tuple[Tensor, None]:
            # Under pipelining another micro-batch may have come by before this one is computed again.
            self.router.tokens = tokens
            output = MoELayer.forward(self, hidden)
            self._forget_graph()
            return output  # type: ignore[no-any-return]

        if self._is_recomputed:
            return tensor_parallel.checkpoint(compute, False, hidden_states)  # type: ignore[no-any-return]
        return compute(hidden_states)

    def _forget_graph(self) -> None:
        """Let go of what the dispatcher keeps of the forward pass.

        Its weights of the experts lead by way of autograd to Megatron's gradient hooks, which hold the model:
        a cycle through C++ that is never collected. A worker would keep its memory and threads after `close`.
        """
        kept: dict[str, Any] = self.token_dispatcher.__dict__
        kept.update(
            {name: None for name, value in kept.items() if isinstance(value, Tensor) and value.requires_grad}
        )

    def _mark_experts(self) -> None:
        """Say of the experts' parameters what Megatron says only of some layouts'.

        Experts are divided, reduced and counted over their own groups, whatever the layout. Megatron takes
        them for ordinary parameters when EP is 1, so that with TP of 2 and ETP of 1 their gradients are not
        summed over the TP ranks; and it sums the biases of different experts over the TP ranks under SP.
        """
        experts: Module = self.experts
        for parameter in experts.parameters():
            marks: Any = parameter
            marks.allreduce = False
            marks.sequence_parallel = False
            marks.tensor_model_parallel = True  # no TP rank holds a copy: the gradient norm counts each
        for module in experts.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                # The dispatcher has moved the tokens already. Without this, a bias is added in place to a
                # view of what a collective of one rank returned, which autograd refuses.
                module.explicit_expert_comm = True
