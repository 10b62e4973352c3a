"""Losses of answers that are compared: pairs (DPO and its variants), single answers (KTO), reward models.

`pair_loss` is a pure function of `chosen` and `rejected`, [P] float32: an answer's logprob, summed over its
tokens or their mean, less the reference's if the loss has one; `delta` is their difference. The formulas and
their papers are in `nemorl.config.algorithm.losses`. A pair is in one micro-batch, so the loss is a plain sum
over micro-batches and ranks, as every other.

KTO (Ethayarajh et al. 2024, arXiv 2402.01306) compares single answers, good or not, with the divergence of
the policy from the reference: the mean of `log policy - log reference` over prompts joined to answers of
other prompts of the batch, at least 0. It is measured before the step, over the whole batch, so that the loss
does not depend on how the batch is split; the paper takes a micro-batch's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemorl.config.algorithm import KtoConfig
from nemorl.config.algorithm.offline import BradleyTerryLossConfig, LogExpLossConfig
from nemorl.config.algorithm.pair_losses import PairLossConfig
from nemorl.data.losses import LossOutput
from nemorl.data.packed import PackedBatch

from .objective import averages, loss_output, means_over, totals

_MIN_SURPRISE = 1e-6  # a mean logprob of 0 would have infinite odds


def pair_loss(chosen: Tensor, rejected: Tensor, margins: Tensor, config: PairLossConfig) -> Tensor:
    """The loss of each pair [P]; `margins` [P] are the data's own."""
    won = config.beta * (chosen - rejected)
    if config.name == "logistic":
        won, wrong = won - config.gamma - config.margin_scale * margins, config.label_smoothing
        return -(1 - wrong) * F.logsigmoid(won) - wrong * F.logsigmoid(-won)
    if config.name == "robust":
        # Its expectation under flipped labels is the loss of true ones.
        wrong = config.label_smoothing
        return (-(1 - wrong) * F.logsigmoid(won) + wrong * F.logsigmoid(-won)) / (1 - 2 * wrong)
    if config.name == "squared":
        return (chosen - rejected - 1 / (2 * config.beta)).square()
    if config.name == "hinge":
        return F.relu(config.margin - won)
    if config.name == "odds_ratio":
        return -config.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    if config.anchor == "zero":
        return 1 - torch.sigmoid(config.beta * chosen) + torch.sigmoid(config.beta * rejected)
    return torch.sigmoid(config.beta * chosen) + 1 - torch.sigmoid(won)


def _log_odds(mean: Tensor) -> Tensor:
    """`log(p / (1 - p))` of `p = exp(mean)`, which is at most a millionth below 1."""
    mean = mean.clamp(max=-_MIN_SURPRISE)
    return mean - torch.log(-torch.expm1(mean))


@dataclass(frozen=True)
class Pairs:
    """P pairs of a micro-batch, by their places among its sequences."""

    chosen: Tensor  # [P] int64
    rejected: Tensor  # [P] int64
    margins: Tensor  # [P] float32, by how much the chosen is better; 0 if the data do not say

    @property
    def number(self) -> Tensor:
        return torch.tensor(float(len(self.chosen)), device=self.chosen.device)


def find_pairs(batch: PackedBatch) -> Pairs:
    """The pairs, which the planner has kept together; sequences without a label are left out."""
    assert batch.units is not None, "pairs require `units`"
    units, labels = at_starts(batch.units, batch), sequence_labels(batch)
    places = [selected.nonzero().squeeze(1) for selected in (labels > 0, labels < 0)]
    chosen, rejected = (own[units[own].argsort()] for own in places)
    if not torch.equal(units[chosen], units[rejected]):
        raise ValueError("a pair was split: its sequences lie in different micro-batches")
    margins = torch.zeros_like(labels) if batch.margins is None else at_starts(batch.margins, batch)
    return Pairs(chosen, rejected, margins[chosen])


def sequence_labels(batch: PackedBatch) -> Tensor:  # [S] 1, -1, or 0 for neither
    assert batch.labels is not None, "compared sequences require `labels`"
    return at_starts(batch.labels, batch)


def at_starts(values: Tensor, batch: PackedBatch) -> Tensor:
    """[S]: `values` [N] at the first token of each sequence."""
    return values[batch.cu_seqlens[:-1].long()]


@dataclass(frozen=True)
class PreferenceLoss:
    """The mean loss of the pairs, with the chosen answers' cross entropy if it has a coefficient."""

    config: PairLossConfig
    num_pairs: int  # of the whole optimizer step
    sft_coefficient: float = 0.0
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """Needs `units` and `labels`, and `reference_logprobs` where the loss keeps a reference.

        `weights` are those of the cross entropy: they add up to 1 over the chosen answers of the step.
        """
        of_answers = averages if self.config.logprobs == "mean" else totals
        pairs, answers = find_pairs(batch), of_answers(logprobs, batch)  # [S]
        relative = answers
        if self.config.keeps_reference:
            assert batch.reference_logprobs is not None, "this loss requires the reference's logprobs"
            relative = answers - of_answers(batch.reference_logprobs, batch)
        chosen, rejected = relative[pairs.chosen], relative[pairs.rejected]
        preference = pair_loss(chosen, rejected, pairs.margins, self.config).sum() / self.num_pairs
        assert batch.labels is not None, "pairs have labels"
        sft = -(batch.weights * (batch.labels > 0) * logprobs).sum()
        loss = preference + self.sft_coefficient * sft
        sums = {
            "loss/total": loss,
            "loss/preference": preference,
            "loss/sft": sft,
            "pairs": pairs.number,
            "rewards/chosen": self.config.beta * chosen.sum(),
            "rewards/rejected": self.config.beta * rejected.sum(),
            "rewards/margin": self.config.beta * (chosen - rejected).sum(),
            "rewards/accuracy": (chosen > rejected).sum(),
            "logprobs/chosen": answers[pairs.chosen].sum(),
            "logprobs/rejected": answers[pairs.rejected].sum(),
        }
        return loss_output(loss, sums)


@dataclass(frozen=True)
class KtoLoss:
    config: KtoConfig
    num_examples: int  # of the whole optimizer step
    divergence: float  # of the policy from the reference, in nats an answer; counts from 0 on
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        assert batch.reference_logprobs is not None, "KTO requires the reference's logprobs"
        config, labels = self.config, sequence_labels(batch)  # [S]
        relative = totals(logprobs - batch.reference_logprobs, batch)
        good, bad = labels > 0, labels < 0
        won = config.beta * labels * (relative - max(self.divergence, 0.0))
        weights = config.desirable_weight * good + config.undesirable_weight * bad
        loss = (weights * (1 - torch.sigmoid(won))).sum() / self.num_examples
        sums = {
            "loss/preference": loss,
            "examples/desirable": good.sum(),
            "examples/undesirable": bad.sum(),
            "rewards/desirable": config.beta * (relative * good).sum(),
            "rewards/undesirable": config.beta * (relative * bad).sum(),
            "rewards/accuracy": ((won > 0) & (labels != 0)).sum(),
        }
        return loss_output(loss, sums)


def kto_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The loss, implicit rewards of both kinds, and how many lie on their side of the divergence."""
    good, bad = sums["examples/desirable"], sums["examples/undesirable"]
    desirable = sums["rewards/desirable"] / max(good, 1.0)
    undesirable = sums["rewards/undesirable"] / max(bad, 1.0)
    return {
        "loss/preference": sums["loss/preference"],
        "rewards/desirable": desirable,
        "rewards/undesirable": undesirable,
        "rewards/margin": desirable - undesirable,
        "rewards/accuracy": sums["rewards/accuracy"] / max(good + bad, 1.0),
        "examples/desirable": good / max(good + bad, 1.0),
    }


@dataclass(frozen=True)
class ScorePairLoss:
    """The mean loss of pairs' scores; the score of an answer is that of its last token."""

    config: BradleyTerryLossConfig | LogExpLossConfig
    num_pairs: int  # of the whole optimizer step
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, values: Tensor, entropy: Tensor | None) -> LossOutput:
        pairs, scores = find_pairs(batch), values[batch.cu_seqlens[1:].long() - 1]  # [S]
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        ahead = chosen - rejected - self.config.scale_of_margins * pairs.margins
        # log(1 + exp(-ahead)); as a sum of parts with a kink at 0 it would have no gradient for a new head.
        preference = F.softplus(-ahead).sum() / self.num_pairs
        center = (chosen + rejected).square().sum() / self.num_pairs
        loss = preference + self.config.center_coefficient * center
        sums = {
            "loss/total": loss,
            "loss/preference": preference,
            "loss/center": center,
            "compared": pairs.number,
            "accuracy": (chosen > rejected).sum(),
            "score/chosen": chosen.sum(),
            "score/rejected": rejected.sum(),
            "score/margin": (chosen - rejected).sum(),
        }
        return loss_output(loss, sums)


@dataclass(frozen=True)
class StepLoss:
    """Cross entropy of right and wrong at the end of each step, weighed by the batch's `weights`.

    A step that is right with probability p costs `-p log s(value) - (1 - p) log s(-value)`.
    """

    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, values: Tensor, entropy: Tensor | None) -> LossOutput:
        """Needs `labels`, which are `2 p - 1` where the loss mask is set: 1 right, -1 wrong."""
        assert batch.labels is not None, "steps have labels"
        mask, labels = batch.loss_mask, batch.labels
        right, wrong = (1 + labels) / 2, (1 - labels) / 2
        loss = (batch.weights * (-right * F.logsigmoid(values) - wrong * F.logsigmoid(-values))).sum()
        sums = {
            "loss/total": loss,
            "compared": (mask & (labels != 0)).sum(),
            "accuracy": ((labels * values > 0) & mask).sum(),
            "score/margin": (labels * values * mask).sum(),
        }
        return loss_output(loss, sums)


def score_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Accuracy and scores are means over pairs or over labeled steps, and absent where there are none."""
    means = means_over("compared", sums)
    return {name: value for name, value in means.items() if name.startswith("loss/") or sums["compared"]}
