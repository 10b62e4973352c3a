"""Distillation: losses, and the update and the objective that train on a teacher (docs/distillation.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.config.algorithm import (
    Aggregation,
    DistillationConfig,
    DistillationLossConfig,
    JsdLossConfig,
    OnPolicyDistillationConfig,
    ReverseKlLossConfig,
    TopLossConfig,
)
from nemorl.data.examples import Example
from nemorl.data.losses import Loss, LossOutput, TrainStats
from nemorl.data.packed import PLACEHOLDER_TOKENS, PackedBatch
from nemorl.data.shards import SequencePlace
from nemorl.rollout.collector import GroupSummary

from .losses import finish_metrics
from .metrics import versions_of
from .objective import kl_divergence, sequence_weights
from .offline import Unit
from .online import Batch

# The probability of all that is not among the top is known up to rounding; below this it counts as this.
_SMALLEST_REST = 1e-6


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
        metrics = {"distillation/reverse_kl": terms, "entropy": entropy}
        gaps, largest = _gap(batch, logprobs)
        return _output(batch, (batch.weights * terms).sum(), metrics | gaps, largest)


@dataclass(frozen=True)
class TopDivergence:
    """A divergence over the teacher's likeliest tokens; `batch` has `top_ids` and `top_logprobs`."""

    config: TopLossConfig
    needs_entropy: bool = True

    def candidates(self, batch: PackedBatch) -> Tensor:
        """The teacher's tokens."""
        assert batch.top_ids is not None, "the loss requires the teacher's likeliest tokens"
        return batch.top_ids.long()

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """`logprobs` [N, 1 + k]: of the sampled token, and of the teacher's."""
        assert batch.top_logprobs is not None, "the loss requires the teacher's logprobs"
        assert entropy is not None, "the loss requires the entropy"
        places = batch.loss_mask.nonzero().squeeze(1)
        teacher, policy = outcomes(batch.top_logprobs[places], logprobs[places, 1:], self.config.rest)
        forward = forward_kl(teacher, policy)
        metrics = {
            "distillation/forward_kl": forward,
            "distillation/covered": batch.top_logprobs[places].exp().sum(-1),
        }
        terms = forward
        if isinstance(self.config, JsdLossConfig):
            terms = metrics["distillation/jsd"] = jensen_shannon(teacher, policy, self.config.beta)
        spread = {name: _at(places, value, batch.num_tokens) for name, value in metrics.items()}
        gaps, largest = _gap(batch, logprobs[:, 0])
        return _output(
            batch, (batch.weights[places] * terms).sum(), {**spread, "entropy": entropy, **gaps}, largest
        )


def outcomes(teacher: Tensor, policy: Tensor, rest: str) -> tuple[Tensor, Tensor]:
    """Two distributions [m, k + 1] or [m, k] as logprobs, from logprobs [m, k] of the same tokens.

    `one_outcome`: all other tokens together are one more. The divergence is one of coarser distributions:
    never negative, at most that of the whole vocabulary, and equal to it where k is all of it. `leave_out`:
    both are scaled to sum to 1, as several projects do; mass that the policy gives to other tokens costs
    nothing then.
    """
    if rest == "leave_out":
        return teacher - teacher.logsumexp(-1, keepdim=True), policy - policy.logsumexp(-1, keepdim=True)
    return _with_rest(teacher), _with_rest(policy)


def _with_rest(logprobs: Tensor) -> Tensor:
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_REST)
    return torch.cat((logprobs, rest.log()), dim=-1)


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


def _at(places: Tensor, values: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_copy(0, places, values.detach())


def _gap(batch: PackedBatch, logprobs: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gap between the engine that sampled and the trainer; empty for data."""
    if batch.logprobs is None:
        return {}, {}
    gap = (logprobs - batch.logprobs).abs() * batch.loss_mask
    k1, k3 = (kl_divergence(batch.logprobs, logprobs, kind) for kind in ("k1", "k3"))
    return {"logprob_gap/mean": gap, "logprob_gap/k1": k1, "logprob_gap/k3": k3}, {"logprob_gap/max": gap}


def _output(
    batch: PackedBatch, loss: Tensor, metrics: Mapping[str, Tensor], largest: Mapping[str, Tensor]
) -> LossOutput:
    mask = batch.loss_mask
    sums = {name: (value.detach() * mask).sum().float() for name, value in metrics.items()}
    sums |= {"loss/total": loss.detach().float(), "tokens": mask.sum().float()}
    return LossOutput(loss, sums, {name: value.detach().max().float() for name, value in largest.items()})


def distillation_loss(config: DistillationLossConfig) -> Loss:
    """The loss of one micro-batch."""
    return SampledReverseKL() if isinstance(config, ReverseKlLossConfig) else TopDivergence(config)


@dataclass(frozen=True)
class Distillation:
    """The objective of offline distillation: a teacher's distribution at the tokens of the data."""

    config: DistillationConfig

    @property
    def aggregation(self) -> Aggregation:
        """As the config says."""
        return self.config.aggregation

    def contrast(self, units: Sequence[Unit]) -> list[Example]:
        """There is no reference."""
        return []

    def loss(self, num_units: int, divergence: float) -> Loss:
        """Weights carry everything."""
        return distillation_loss(self.config.loss)

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        """The loss, and means over tokens."""
        return finish_metrics(sums, maxima)


@dataclass
class DistillationUpdate:
    """The update of on-policy distillation: the teachers score every token that the policy sampled."""

    config: OnPolicyDistillationConfig
    task_teachers: Sequence[str]  # the teacher of each training task
    multiple: int  # of sequences into which a batch is laid over ranks and stages

    def prepare(self, groups: Sequence[GroupSummary], number: int) -> Batch:
        """One update over every trajectory that trains."""
        members = [(group, t) for group in groups for t in group.trajectories]
        sampled = [t.num_sampled if t.trains else 0 for _, t in members]
        weights = sequence_weights(sampled, self.config.aggregation).tolist()
        sequences = [
            SequencePlace(
                group.reference, t.row, t.num_tokens if weight > 0 else PLACEHOLDER_TOKENS, weight=weight
            )
            for (group, t), weight in zip(members, weights, strict=True)
        ]
        teachers = [self.task_teachers[group.task_index] for group, _ in members]
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
        """Metrics of the only update."""
        return finish_metrics(updates[0].sums, updates[0].maxima)
