"""Layers with experts, and their router in reinforcement learning: replay, an exact balance loss, counts."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from nemorl.config.policy import MoeConfig, PolicyConfig
from nemorl.models.shape import ModelShape

from .compatibility import expert_parts
from .packing import MicroBatch, PackedLayout, TokenRouting


class _Choice:
    """In place of Megatron's `RouterReplay`, which has one set of choices for all routers of a process."""

    def __init__(self, experts: Tensor) -> None:
        self._experts = experts  # [n, top_k]

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers [n, top_k] of the given experts, or of those that `choose` finds."""
        _, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = torch.where(self._experts >= 0, self._experts, own)
        return scores.gather(1, experts), experts


class PolicyRouter(TopKRouter):
    """Megatron's router, with frozen weights (`freeze`) and counts of each expert's tokens.

    - Choices of `TokenRouting.experts` take the place of its own (routing replay, arXiv 2510.11370); the
      experts' weights are those of the current router.
    - The balance loss is the sequence-wise one of DeepSeek-V3 (arXiv 2412.19437), whose sum depends on no
      micro-batches and ranks: for a sequence of T tokens, E / (top_k T^2) * sum_i counts_i * sum_t p_ti.
    """

    def __init__(self, config: Any, pg_collection: Any = None, **options: Any) -> None:
        """Megatron gives `options` from 0.17 on."""
        super().__init__(config=config, pg_collection=pg_collection, **options)
        self.freeze = False
        self.balance_scale = 0.0  # coefficient of the balance loss over the sequences of the optimizer step
        self.tokens: TokenRouting | None = None  # of the micro-batch that comes next
        self.moe_layer = 0  # number among the layers with experts
        self.tokens_per_expert = torch.zeros(self.num_experts, dtype=torch.int64)  # of this rank's tokens
        self.balance_loss = torch.zeros(())  # this rank's part, before the coefficient
        self.z_scale = 0.0  # coefficient of the z-loss over the tokens of the optimizer step
        self.z_loss = torch.zeros(())  # this rank's sum, before the coefficient

    def gating(self, input: Tensor) -> Tensor:
        if not self.freeze:
            return super().gating(input)  # type: ignore[no-any-return]
        bias = None if self.bias is None else self.bias.detach()
        return router_gating_linear(input, self.weight.detach(), bias, torch.float32)  # type: ignore[no-any-return]

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Weights and choices, each [n, experts], of logits [n, 1, experts]."""
        assert self.tokens is not None, "the layer passes the tokens to its router"
        size = self.tp_group.size() if self.config.sequence_parallel else 1
        tokens = self.tokens.part(self.tp_group.rank() if size > 1 else 0, size)
        self.router_replay = None
        # Engines return no choices of layers for further tokens.
        if tokens.experts is not None and self.moe_layer < tokens.experts.shape[1]:
            self.router_replay = _Choice(tokens.experts[:, self.moe_layer].long())
        weights, chosen = super().routing(logits)
        if tokens.chosen is not None:
            tokens.chosen[self.moe_layer] = chosen.nonzero()[:, 1].view(len(chosen), -1)
        if torch.is_grad_enabled():
            counted = chosen & (tokens.uses > 0).unsqueeze(1)
            counts = (counted * tokens.uses.unsqueeze(1)).sum(0)
            self.tokens_per_expert = self.tokens_per_expert.to(counts.device) + counts
            if self.balance_scale:
                loss = self._balance(logits.flatten(0, 1), counted, tokens)
                self.balance_loss = self.balance_loss.to(loss.device) + loss.detach()
                weights = MoEAuxLossAutoScaler.apply(weights, loss * self.balance_scale)
            if self.z_scale:
                squares = torch.logsumexp(logits.flatten(0, 1).float(), -1).square()
                loss = (squares * tokens.uses).sum()
                self.z_loss = self.z_loss.to(loss.device) + loss.detach()
                weights = MoEAuxLossAutoScaler.apply(weights, loss * self.z_scale)
        return weights, chosen

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Nothing: `tokens_per_expert` has the counts, and `Routers` updates the bias."""

    def _balance(self, logits: Tensor, counted: Tensor, tokens: TokenRouting) -> Tensor:
        """This rank's part of the loss: probabilities of its tokens, counts of whole sequences."""
        if self.score_function == "sigmoid":
            scores = torch.sigmoid(logits.float())
            p = scores / scores.sum(-1, keepdim=True)
        else:
            p = torch.softmax(logits.float(), -1)
        of_rank = torch.zeros(tokens.paths.shape[1], self.num_experts, device=p.device)
        counts = of_rank.index_add(0, tokens.segment, counted.float())
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        sums = of_rank.index_add(0, tokens.segment, p * (tokens.uses > 0).unsqueeze(1))
        by_sequence = ((tokens.paths @ counts) * (tokens.paths @ sums)).sum(1) * tokens.balance
        return by_sequence.sum() * (self.num_experts / self.topk)  # type: ignore[no-any-return]


def experts_of_rank(
    routing: TokenRouting, num_tokens: int, size: tuple[int, int], *, sequence_parallel: bool
) -> Tensor:
    """[num_tokens, MoE layers, top_k] int32: what the routers chose for a rank's tokens in a recorded pass.

    `size` (MoE layers, top_k). Tokens and layers are spread over the ranks of the copy, which all call it.
    """
    device = routing.uses.device
    experts = torch.full((num_tokens, *size), -1, dtype=torch.int32, device=device)
    rank = parallel_state.get_tensor_model_parallel_rank() if sequence_parallel else 0
    for layer, chosen in (routing.chosen or {}).items():
        experts[len(chosen) * rank : len(chosen) * (rank + 1), layer] = chosen.to(torch.int32)
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        dist.all_reduce(experts, op=dist.ReduceOp.MAX, group=group)
    return experts


class Routers:
    """All routers of a rank, over one optimizer step after another."""

    def __init__(self, modules: Iterable[torch.nn.Module], shape: ModelShape, config: MoeConfig) -> None:
        assert shape.moe is not None, "a model without experts has no routers"
        self._config = config
        self._num_layers, self._num_experts = shape.num_moe_layers, shape.moe.num_experts
        self._size = shape.num_moe_layers, shape.moe.top_k
        further = range(shape.num_layers, shape.num_layers + shape.num_mtp_layers)
        self._num_layers += sum(map(shape.is_moe, further))
        self._num_sequences = self._num_tokens = 1
        self._routers = [r for module in modules for r in module.modules() if isinstance(r, PolicyRouter)]
        for router in self._routers:
            router.freeze = config.freeze_router

    def begin_step(self, layouts: Iterable[TokenRouting | None], device: torch.device) -> None:
        """Reset the counts before a step on micro-batches with these tokens."""
        known = [tokens for tokens in layouts if tokens is not None]

        # A rank of context parallelism has all of its copy's sequences, and a part of their tokens.
        def total(ours: Tensor | int, *, split: bool) -> Tensor:
            size = torch.as_tensor(ours, device=device)
            dist.all_reduce(size, group=parallel_state.get_data_parallel_group(with_context_parallel=split))
            return size

        num_sequences = total(sum((tokens.balance > 0).sum() for tokens in known), split=False)
        self._num_sequences = max(int(num_sequences), 1)
        if self._config.z_loss_coefficient:
            num_tokens = total(sum(tokens.uses.sum() for tokens in known), split=True)
            self._num_tokens = max(int(num_tokens), 1)
        for router in self._routers:
            router.z_scale = self._config.z_loss_coefficient / self._num_tokens
            router.z_loss = torch.zeros_like(router.z_loss)
            router.balance_scale = self._config.load_balancing_loss_coefficient / self._num_sequences
            router.tokens_per_expert = torch.zeros_like(router.tokens_per_expert)
            router.balance_loss = torch.zeros_like(router.balance_loss)

    def record(self, made: Sequence[MicroBatch]) -> None:
        """Keep what the routers choose in the next pass over these micro-batches."""
        for micro in made:
            assert micro.layout.routing is not None, "a model with experts routes"
            micro.layout.routing = replace(micro.layout.routing, chosen={})

    def recorded(self, num_tokens: int, made: Sequence[MicroBatch], *, sequence_parallel: bool) -> Tensor:
        """[num_tokens, MoE layers, top_k] int16 on the CPU, of the batch of the recorded micro-batches.

        -1 for tokens that are in none. All ranks that share the batch call it.
        """
        experts = torch.full((num_tokens, *self._size), -1, dtype=torch.int16)
        group = parallel_state.get_context_parallel_group()
        for micro in made:
            assert micro.layout.routing is not None, "a model with experts routes"
            of_rank = experts_of_rank(
                *(micro.layout.routing, micro.tokens.numel(), self._size), sequence_parallel=sequence_parallel
            )
            of_all = of_rank.new_full((micro.batch.num_tokens, *self._size), -1)
            of_all[micro.own] = of_rank[micro.local_positions]
            if group.size() > 1:
                dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=group)
            experts[micro.places] = of_all.to(torch.int16).cpu()
        return experts

    @torch.no_grad()
    def end_step(self, device: torch.device, updated: bool) -> dict[str, float]:
        """Metrics of the step, equal on all ranks; after an update of the weights the biases have theirs."""
        counts = torch.zeros(self._num_layers, self._num_experts, dtype=torch.float64, device=device)
        losses = torch.zeros(2, dtype=torch.float64, device=device)
        for router in self._routers:
            counts[router.moe_layer] = router.tokens_per_expert.to(device, torch.float64)
            losses += torch.stack([router.balance_loss, router.z_loss]).to(device, torch.float64)
        dist.all_reduce(counts)
        dist.all_reduce(losses)
        if updated and self._config.bias_update_rate:
            missing = counts.mean(1, keepdim=True) - counts
            for router in self._routers:
                change = self._config.bias_update_rate * missing[router.moe_layer].sign()
                router.expert_bias += change.to(router.expert_bias)
        largest = counts.amax(1) / counts.mean(1).clamp(min=1 / self._num_experts)
        metrics = {
            # Tokens of the busiest expert over the mean, averaged over the layers; the least even layer's.
            "experts/load_max": float(largest.mean()),
            "experts/load_max_of_a_layer": float(largest.max()),
            "experts/idle": float((counts == 0).double().mean()),
        }
        if self._config.load_balancing_loss_coefficient:
            metrics["loss/balance"] = float(losses[0]) / self._num_sequences
        if self._config.z_loss_coefficient:
            metrics["loss/router_z"] = float(losses[1]) / self._num_tokens
        return metrics


def expert_arguments(shape: ModelShape, policy: PolicyConfig) -> dict[str, Any]:
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
        # Else over the chosen experts' logits, which is the normalized softmax over all.
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


class RoutedLayer(TransformerLayer):
    """A layer that passes the tokens to its router, also when it is recomputed."""

    def forward(self, *args: Any, packed_seq_params: PackedLayout, **options: Any) -> Any:
        self.mlp.tokens = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


class ExpertLayer(MoELayer):
    """Our router and Megatron's experts: sequential, or grouped with Transformer Engine."""

    router: PolicyRouter

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        grouped = config.transformer_impl == "transformer_engine"
        parts = expert_parts(config.num_moe_experts, PolicyRouter, grouped=grouped)
        super().__init__(config, parts, **options)
        self.tokens: TokenRouting | None = None
        # Done below instead, where the tokens are known.
        modules = config.recompute_modules or []
        self._is_recomputed: bool = config.recompute_granularity == "selective" and "moe" in modules
        self.moe_layer_recompute = False
        # Experts are divided, reduced and counted over their own groups, whatever the layout. Megatron takes
        # them for ordinary parameters when EP is 1, so that with TP of 2 and ETP of 1 their gradients are not
        # summed over the TP ranks; and it sums the biases of different experts over the TP ranks under SP.
        experts: torch.nn.Module = self.experts
        for parameter in experts.parameters():
            marks: Any = parameter
            marks.allreduce = False
            marks.sequence_parallel = False
            marks.tensor_model_parallel = True  # no TP rank holds a copy: the gradient norm counts each
        for module in experts.modules():
            if isinstance(module, (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)):
                # The dispatcher has moved the tokens already. Without this, a bias is added in place to a
                # view of what a collective of one rank returned, which autograd refuses.
                module.explicit_expert_comm = True

    def set_layer_number(self, layer_number: int) -> None:
        super().set_layer_number(layer_number)
        before = layer_number - 1
        self.router.moe_layer = sum(self.config.moe_layer_freq[:before])
        self.router.moe_layer += max(0, before - self.config.num_layers)  # those for further tokens

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[n, 1, H] -> [n, 1, H] and no bias; of n tokens of this rank."""
        tokens = self.tokens

        def compute(hidden: Tensor) -> tuple[Tensor, None]:
            # Under pipelining another micro-batch may have come by before this one is computed again.
            self.router.tokens = tokens
            output = MoELayer.forward(self, hidden)
            # Release what the dispatcher keeps of the forward pass: it leads, by autograd and Megatron's
            # gradient hooks, to the model: a cycle through C++ that outlives the worker's `close`.
            kept: dict[str, Any] = self.token_dispatcher.__dict__
            for name, value in list(kept.items()):
                if isinstance(value, Tensor) and value.requires_grad:
                    kept[name] = None
            return output  # type: ignore[no-any-return]

        if self._is_recomputed:
            return tensor_parallel.checkpoint(compute, False, hidden_states)  # type: ignore[no-any-return]
        return compute(hidden_states)
