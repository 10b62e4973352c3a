"""Distillation: losses, and the update of a policy that samples (docs/distillation.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.config.algorithm import (
    CorrectionConfig,
    DistillationLossConfig,
    NoCorrectionConfig,
    OnPolicyDistillationConfig,
    ReverseKlLossConfig,
    TopLossConfig,
)
from nemorl.data.losses import Loss, LossOutput, TrainStats
from nemorl.data.packed import PackedBatch
from nemorl.data.shards import SequencePlace
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.rollout.versions import UNBROKEN, Lineage

from .metrics import versions_of
from .objective import (
    MAX_LOG_RATIO,
    correct,
    engine_gap,
    kl_divergence,
    metrics_of_updates,
    sequence_weights,
    token_loss_output,
)
from .online import Batch
from .policy_gradient import filled_up, minibatches, placeholder

_SMALLEST_REST = 1e-6  # the least probability of all that is not among the top, known up to rounding
_ABSENT = -100.0  # logprob of a token to which the teacher gives no probability


@dataclass(frozen=True)
class SampledReverseKL:
    """KL(policy || teacher) of each sampled token, in the loss; the batch's reference is the teacher.

    With `x = log policy - log teacher` the value of k1 is `x`, which has no bias; its gradient is k2's, `x`
    times that of the logprob, which is that of the divergence here (`objective.py`). It is also that of a
    policy gradient with advantage `-x` in an on-policy step, as others write it (Lu 2025, "On-Policy
    Distillation"). The effect of a token on the divergence of later ones is left out, as in GKD (arXiv
    2306.13649). `x` is clamped in value and gradient. k2 and k3 are the estimates with their own gradients,
    and without one where they are clamped.
    """

    config: ReverseKlLossConfig = ReverseKlLossConfig()
    correction: CorrectionConfig = NoCorrectionConfig()
    needs_entropy: bool = True  # a metric, as in every online algorithm

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """`sum of weight * correction * estimate`; metrics that are means are divided by `finish_metrics`."""
        assert batch.reference_logprobs is not None, "the loss requires the teacher's logprobs"
        assert entropy is not None, "the loss requires the entropy"
        terms = self._terms(logprobs, batch.reference_logprobs)
        gaps, largest = engine_gap(batch, logprobs)
        metrics = {"distillation/reverse_kl": terms, "entropy": entropy, **gaps}
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        if (corrected := correct(batch, logprobs, old, self.correction, has_ratio=False)) is not None:
            terms = corrected.weight * terms
            metrics, largest = metrics | corrected.metrics, largest | corrected.largest
        return token_loss_output(batch, (batch.weights * terms).sum(), {}, metrics, largest)

    def _terms(self, logprobs: Tensor, teacher: Tensor) -> Tensor:
        estimator, bound = self.config.estimator, self.config.max_value
        if estimator != "k1":
            estimate = kl_divergence(logprobs, teacher, estimator)
            return estimate if bound is None else estimate.clamp(max=bound)
        bound = MAX_LOG_RATIO if bound is None else bound
        x = (logprobs - teacher).detach().clamp(-bound, bound)
        return x + x * (logprobs - logprobs.detach())


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
        teacher = batch.top_logprobs[places]
        terms, values = self.terms(teacher, logprobs[places, 1:], entropy[places])
        values["covered"] = teacher.exp().sum(-1)
        gaps, largest = engine_gap(batch, logprobs[:, 0])
        metrics = {"entropy": entropy, **gaps}
        for name, of_places in values.items():
            zeros = of_places.new_zeros(batch.num_tokens)
            metrics[f"distillation/{name}"] = zeros.index_copy(0, places, of_places.detach())
        return token_loss_output(batch, (batch.weights[places] * terms).sum(), {}, metrics, largest)

    def terms(self, teacher: Tensor, policy: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The divergence [m] of each token, with its gradient, and divergences for metrics by name.

        Of logprobs [m, k] of teacher and policy, and the policy's entropy [m] over the whole vocabulary.
        """
        config = self.config
        if config.name == "forward_kl" and config.min_logprob is not None:
            teacher, policy = teacher.clamp(min=config.min_logprob), policy.clamp(min=config.min_logprob)
        p, q = outcomes(teacher, policy, config.rest)
        terms = forward_kl(p, q)
        values = {"forward_kl": terms}
        match config.name:
            case "forward_kl" if config.rest == "unscaled":
                terms = values["forward_kl"] = terms.clamp(min=0)
            case "jsd":
                terms = jensen_shannon(p, q, config.beta)
                if config.rest == "zero":
                    outside = 1 - q.exp().sum(-1)
                    terms = terms - (1 - config.beta) * math.log1p(-config.beta) * outside
                values["jsd"] = terms
            case "reverse_kl" | "mixed_kl":
                reverse = values["reverse_kl"] = forward_kl(q, p)
                if config.rest == "zero":
                    reverse = values["reverse_kl"] = reverse + outside_of_top(q, entropy)
                terms = reverse
                if config.name == "mixed_kl":
                    weight = config.forward_weight
                    terms = values["mixed_kl"] = weight * values["forward_kl"] + (1 - weight) * reverse
        if config.max_value is not None:
            terms = terms.clamp(max=config.max_value)
        return terms, values


def outcomes(teacher: Tensor, policy: Tensor, rest: str) -> tuple[Tensor, Tensor]:
    """Two distributions [m, k + 1] or [m, k] as logprobs, from logprobs [m, k] of the same tokens.

    `one_outcome`: all other tokens together are one more. The divergence is one of coarser distributions:
    never negative, at most that of the whole vocabulary, and equal to it where k is all of it. `leave_out`:
    both are scaled to sum to 1, as several projects do; mass that the policy gives to other tokens costs
    nothing then. `zero`: the teacher's are scaled to sum to 1, as nothing is left for other tokens.
    `unscaled`: as they are.
    """
    if rest == "unscaled":
        return teacher, policy
    scaled = teacher - teacher.logsumexp(-1, keepdim=True)
    if rest == "zero":
        return scaled, policy
    if rest == "leave_out":
        return scaled, policy - policy.logsumexp(-1, keepdim=True)

    def with_rest(logprobs: Tensor) -> Tensor:
        remaining = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_REST)
        return torch.cat((logprobs, remaining.log()), dim=-1)

    return with_rest(teacher), with_rest(policy)


def forward_kl(teacher: Tensor, policy: Tensor) -> Tensor:
    """KL(teacher || policy) [m] of logprobs [m, outcomes]."""
    return (teacher.exp() * (teacher - policy)).sum(-1)


def outside_of_top(policy: Tensor, entropy: Tensor) -> Tensor:
    """The terms of KL(policy || teacher) of tokens that the teacher gives no probability: [m].

    `sum of q log q - log p sum of q` over them, from the entropy over all tokens and logprobs [m, k] of those
    that the teacher has. `log p` is that of NeMo-RL's `zero_outside_topk`.
    """
    chances = policy.exp()
    of_top = (chances * policy).sum(-1)
    return -entropy - of_top - _ABSENT * (1 - chances.sum(-1))


def jensen_shannon(teacher: Tensor, policy: Tensor, beta: float) -> Tensor:
    """`beta KL(teacher || m) + (1 - beta) KL(policy || m)`, `m = beta teacher + (1 - beta) policy`: [m].

    GKD's (arXiv 2306.13649) with the teacher first, as in the paper; TRL's `beta` is the same number.
    """
    weights = policy.new_tensor([beta, 1 - beta]).log()
    mixture = torch.logaddexp(teacher + weights[0], policy + weights[1])
    return beta * forward_kl(teacher, mixture) + (1 - beta) * forward_kl(policy, mixture)


def distillation_loss(config: DistillationLossConfig, correction: CorrectionConfig | None = None) -> Loss:
    if config.name == "reverse_kl" and config.tokens is None:
        return SampledReverseKL(config, correction or NoCorrectionConfig())
    return TopDivergence(config)


_Taught = tuple[SequencePlace, str]  # a sequence and the name of its teacher


@dataclass
class DistillationUpdate:
    config: OnPolicyDistillationConfig
    task_teachers: Sequence[str]  # the teacher of each training task
    multiple: int  # of sequences into which a batch is laid over ranks and stages

    def prepare(self, groups: Sequence[GroupSummary], number: int, lineage: Lineage = UNBROKEN) -> Batch:
        members = [(group, t) for group in groups for t in group.trajectories]
        parts, trains = [], []
        for part in minibatches(members, self.config.num_minibatches):
            counts = [t.num_trained for _, t in part]
            weights = sequence_weights(counts, self.config.aggregation).tolist()
            trains.append(any(weights))
            parts.append([self._places(*one, weight) for one, weight in zip(part, weights, strict=True)])
        filled = filled_up(parts, lambda taught: (placeholder(taught[0]), taught[1]), self.multiple)
        sequences, teachers = zip(*filled, strict=True)
        return Batch(
            sequences,
            versions_of(groups),
            {"policy": distillation_loss(self.config.loss, self.config.correction)},
            schedule=[number for number, some in enumerate(trains) if some],
            num_updates=self.config.num_minibatches,
            num_minibatches=self.config.num_minibatches,
            needs_old_logprobs=self.config.needs_old_logprobs,
            teachers=teachers,
        )

    def _places(self, group: GroupSummary, t: TrajectorySummary, weight: float) -> list[_Taught]:
        """The sequences of a trajectory, each with its teacher."""
        store, teacher = group.reference, self.task_teachers[group.task_index]
        places = [
            SequencePlace(store, one.row, one.num_tokens, weight=weight, runs=one.runs) for one in t.sequences
        ]
        return [(place if weight > 0 else placeholder(place), teacher) for place in places]

    def metrics(self, updates: Sequence[TrainStats]) -> dict[str, float]:
        return metrics_of_updates(updates)
