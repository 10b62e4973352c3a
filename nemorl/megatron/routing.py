"""The router in reinforcement learning: replayed choices, an exact balance loss, tokens counted."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Module

from nemorl.config.policy import MoeConfig

from .packing import TokenRouting
from .stats import ExpertLoad


class _Choice:
    """In place of Megatron's `RouterReplay`, which knows one set of choices for all routers of a process."""

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
    """Megatron's router with the four things that reinforcement learning asks of it.

    - `freeze` keeps its weights; gradients go through them to what is below.
    - Choices of `TokenRouting.experts` take the place of its own (routing replay, arXiv 2510.11370); the
      experts' weights are those of the current router.
    - The balance loss is the sequence-wise one of DeepSeek-V3 (arXiv 2412.19437): for a
      sequence of T tokens, E / (top_k T^2) * sum_i counts_i * sum_t p_ti. A sum over sequences depends on no
      micro-batches and ranks, as one over batches would.
    - It counts the tokens of each expert in forward passes that a backward pass follows.
    """

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.freeze = False
        self.balance_scale = 0.0  # coefficient of the balance loss over the sequences of the optimizer step
        self.tokens: TokenRouting | None = None  # of the micro-batch that comes next
        self.moe_layer = 0  # number among the layers with experts
        self.tokens_per_expert = torch.zeros(self.num_experts, dtype=torch.int64)  # of this rank's tokens
        self.balance_loss = torch.zeros(())  # this rank's part, before the coefficient

    def gating(self, input: Tensor) -> Tensor:
        """Logits [n, 1, experts] of [n, 1, H]."""
        if not self.freeze:
            return super().gating(input)  # type: ignore[no-any-return]
        bias = None if self.bias is None else self.bias.detach()
        return router_gating_linear(input, self.weight.detach(), bias, torch.float32)  # type: ignore[no-any-return]

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Weights and choices, each [n, experts], of logits [n, 1, experts]."""
        assert self.tokens is not None, "the layer tells its router about the tokens"
        size = self.tp_group.size() if self.config.sequence_parallel else 1
        tokens = self.tokens.part(self.tp_group.rank() if size > 1 else 0, size)
        self.router_replay = None
        if tokens.experts is not None:
            self.router_replay = _Choice(tokens.experts[:, self.moe_layer].long())
        weights, chosen = super().routing(logits)
        if tokens.chosen is not None:
            tokens.chosen[self.moe_layer] = chosen.nonzero()[:, 1].view(len(chosen), -1)
        if torch.is_grad_enabled():
            counted = chosen & tokens.is_real.unsqueeze(1)
            counts = counted.sum(0)
            self.tokens_per_expert = self.tokens_per_expert.to(counts.device) + counts
            if self.balance_scale:
                loss = self._balance(logits.flatten(0, 1), counted, tokens)
                self.balance_loss = self.balance_loss.to(loss.device) + loss.detach()
                weights = MoEAuxLossAutoScaler.apply(weights, loss * self.balance_scale)
        return weights, chosen

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Nothing is counted for a bias that stays as it is."""

    def _balance(self, logits: Tensor, counted: Tensor, tokens: TokenRouting) -> Tensor:
        """This rank's part of the loss: probabilities of its tokens, counts of whole sequences."""
        if self.score_function == "sigmoid":
            scores = torch.sigmoid(logits.float())
            p = scores / scores.sum(-1, keepdim=True)
        else:
            p = torch.softmax(logits.float(), -1)
        size = (len(tokens.balance), self.num_experts)
        of_rank = torch.zeros(size, device=p.device)
        counts = of_rank.index_add(0, tokens.sequence, counted.float())
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        sums = of_rank.index_add(0, tokens.sequence, p * tokens.is_real.unsqueeze(1))
        by_sequence = (counts * sums).sum(1) * tokens.balance
        loss: Tensor = by_sequence.sum() * (self.num_experts / self.topk)
        return loss


class Routers:
    """All routers of a rank, over one optimizer step after another."""

    def __init__(self, modules: Iterable[Module], num_layers: int, config: MoeConfig) -> None:
        """`num_layers` are those with experts in the whole model; 0 makes all of this do nothing."""
        self._config = config
        self._num_layers = num_layers
        self._num_sequences = 0
        self._routers = [r for module in modules for r in module.modules() if isinstance(r, PolicyRouter)]
        for router in self._routers:
            router.freeze = config.freeze_router

    def begin_step(self, layouts: Iterable[TokenRouting | None], device: torch.device) -> None:
        """Of micro-batches whose tokens are routed so."""
        if not self._num_layers:
            return
        learned = sum((tokens.balance > 0).sum() for tokens in layouts if tokens is not None)
        num_sequences = torch.as_tensor(learned, device=device)
        dist.all_reduce(num_sequences, group=parallel_state.get_data_parallel_group())
        self._num_sequences = max(int(num_sequences), 1)
        for router in self._routers:
            router.balance_scale = self._config.load_balancing_loss_coefficient / self._num_sequences
            router.tokens_per_expert = torch.zeros_like(router.tokens_per_expert)
            router.balance_loss = torch.zeros_like(router.balance_loss)

    def load(self, num_experts: int, device: torch.device) -> ExpertLoad | None:
        """Of the step's tokens; equal on all ranks, which hold different tokens or different layers."""
        if not self._num_layers:
            return None
        counts = torch.zeros(self._num_layers, num_experts, dtype=torch.float64, device=device)
        balance = torch.zeros((), dtype=torch.float64, device=device)
        for router in self._routers:
            counts[router.moe_layer] = router.tokens_per_expert.to(device, torch.float64)
            balance += router.balance_loss.to(device, torch.float64)
        dist.all_reduce(counts)
        dist.all_reduce(balance)
        largest = counts.amax(1) / counts.mean(1).clamp(min=1 / num_experts)
        return ExpertLoad(
            largest=float(largest.mean()),
            largest_of_a_layer=float(largest.max()),
            idle=float((counts == 0).double().mean()),
            balance_loss=float(balance) / self._num_sequences
            if self._config.load_balancing_loss_coefficient
            else None,
        )
