"""Distillation: losses, and the update of a policy that samples (docs/distillation.md)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.config.algorithm import DistillationLossConfig, OnPolicyDistillationConfig, TopLossConfig
from nemorl.data.losses import Loss, LossOutput, TrainStats
from nemorl.data.packed import PLACEHOLDER_TOKENS, PackedBatch
from nemorl.data.shards import SequencePlace
from nemorl.rollout.groups import GroupSummary
from nemorl.rollout.versions import UNBROKEN, Lineage

from .metrics import versions_of
from .objective import engine_gap, finish_metrics, kl_divergence, sequence_weights, token_loss_output
from .online import Batch

_SMALLEST_REST = 1e-6  # the least probability of all that is not among the top, known up to rounding


@dataclass(frozen=True)
class SampledReverseKL:
    """KL(policy || teacher) of each sampled token, in the loss; the batch's reference is the teacher.

    The value is k1, `x = log policy - log teacher`, which has no bias; the gradient is k2's, `x` times that
    of the logprob, which is that of the divergence here (`objective.py`). It is also that of a policy
    gradient with advantage `-x` in an on-policy step, as others write it (Lu 2025, "On-Policy Distillation").
    The effect of a token on the divergence of later ones is left out, as in GKD (arXiv 2306.13649). `x` is
    clamped to ±20 in value and gradient.
    """

    needs_entropy: bool = True  # a metric, as in every online algorithm

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """`sum of weight * x`; metrics that are means over tokens are divided by `finish_metrics`."""
        assert batch.reference_logprobs is not None, "the loss requires the teacher's logprobs"
        assert entropy is not None, "the loss requires the entropy"
        x = kl_divergence(logprobs, batch.reference_logprobs, "k1").detach()
        terms = x + x * (logprobs - logprobs.detach())
        gaps, largest = engine_gap(batch, logprobs)
        metrics = {"distillation/reverse_kl": terms, "entropy": entropy, **gaps}
        return token_loss_output(batch, (batch.weights * terms).sum(), {}, metrics, largest)


@dataclass(frozen=True)
class TopDivergence:
    """A divergence over the teacher's likeliest tokens; `batch` has `top_ids` and `top_logprobs`."""

    config: TopLossConfig
    needs_entropy: bool = True

    def candidates(self, batch: PackedBatch) -> Tensor:
        assert batch.top_ids is not None, "the loss requires the teacher's likeliest tokens"
        return batch.top_ids.long()

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """`logprobs` [N, 1 + k]: of the sampled token, and of the teacher's."""
        assert batch.top_logprobs is not None, "the loss requires the teacher's logprobs"
        assert entropy is not None, "the loss requires the entropy"
        places = batch.loss_mask.nonzero().squeeze(1)
        teacher, policy = outcomes(batch.top_logprobs[places], logprobs[places, 1:], self.config.rest)
        terms = forward_kl(teacher, policy)
        covered = batch.top_logprobs[places].exp().sum(-1)
        masked = {"distillation/forward_kl": terms, "distillation/covered": covered}
        if self.config.name == "jsd":
            terms = masked["distillation/jsd"] = jensen_shannon(teacher, policy, self.config.beta)
        gaps, largest = engine_gap(batch, logprobs[:, 0])
        metrics = {"entropy": entropy, **gaps}
        for name, values in masked.items():
            metrics[name] = values.new_zeros(batch.num_tokens).index_copy(0, places, values.detach())
        return token_loss_output(batch, (batch.weights[places] * terms).sum(), {}, metrics, largest)


def outcomes(teacher: Tensor, policy: Tensor, rest: str) -> tuple[Tensor, Tensor]:
    """Two distributions [m, k + 1] or [m, k] as logprobs, from logprobs [m, k] of the same tokens.

    `one_outcome`: all other tokens together are one more. The divergence is one of coarser distributions:
    never negative, at most that of the whole vocabulary, and equal to it where k is all of it. `leave_out`:
    both are scaled to sum to 1, as several projects do; mass that the policy gives to other tokens costs
    nothing then.
    """
    if rest == "leave_out":
        return teacher - teacher.logsumexp(-1, keepdim=True), policy - policy.logsumexp(-1, keepdim=True)

    def with_rest(logprobs: Tensor) -> Tensor:
        remaining = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_REST)
        return torch.cat((logprobs, remaining.log()), dim=-1)

    return with_rest(teacher), with_rest(policy)


def forward_kl(teacher: Tensor, policy: Tensor) -> Tensor:
    """KL(teacher || policy) [m] of logprobs [m, outcomes]."""
    return (teacher.exp() * (teacher - policy)).sum(-1)


def jensen_shannon(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """`beta KL(teacher || m) + (1 - beta) KL(policy || m)`, `m = beta teacher + (1 - beta) policy`: [m].

    GKD's (arXiv 2306.13649) with the teacher first, as in the paper; TRL's `beta` is the same number.
    """
    weights = torch.tensor([beta, 1 - beta], device=policy.device).log()
    mixture = torch.logaddexp(teacher + weights[0], policy + weights[1])
    return beta * forward_kl(teacher, mixture) + (1 - beta) * forward_kl(policy, mixture)


def distillation_loss(config: DistillationLossConfig) -> Loss:
    return SampledReverseKL() if config.name == "reverse_kl" else TopDivergence(config)


@dataclass
class DistillationUpdate:
    config: OnPolicyDistillationConfig
    task_teachers: Sequence[str]  # the teacher of each training task
    multiple: int  # of sequences into which a batch is laid over ranks and stages

    def prepare(self, groups: Sequence[GroupSummary], number: int, lineage: Lineage = UNBROKEN) -> Batch:
        members = [(group, t) for group in groups for t in group.trajectories]
        weights = sequence_weights([t.num_trained for _, t in members], self.config.aggregation).tolist()
        sequences = []
        for (group, t), weight in zip(members, weights, strict=True):
            for one in t.sequences:
                size, runs = (one.num_tokens, one.runs) if weight > 0 else (PLACEHOLDER_TOKENS, ())
                sequences.append(SequencePlace(group.reference, one.row, size, weight=weight, runs=runs))
        teachers = [self.task_teachers[group.task_index] for group, t in members for _ in t.sequences]
        missing = -len(sequences) % self.multiple
        placeholder = SequencePlace(groups[0].reference, 0, PLACEHOLDER_TOKENS, weight=0.0)
        return Batch(
            sequences + [placeholder] * missing,
            versions_of(groups),
            {"policy": distillation_loss(self.config.loss)},
            schedule=[0] if any(weights) else [],
            num_updates=1,
            teachers=teachers + teachers[:1] * missing,
        )

    def metrics(self, updates: Sequence[TrainStats]) -> dict[str, float]:
        return finish_metrics(updates[0].sums, updates[0].maxima)
