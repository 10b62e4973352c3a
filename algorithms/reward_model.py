"""Reward models: a scalar head that learns to separate better answers, or right steps, from others."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nemorl.config.algorithm import Aggregation, RewardModelConfig
from nemorl.config.algorithm.offline import BradleyTerryLossConfig, LogExpLossConfig
from nemorl.data.losses import Loss, LossOutput
from nemorl.data.packed import PackedBatch

from .objective import loss_output, means_over
from .offline import Objective
from .pair_losses import find_pairs


@dataclass(frozen=True)
class ScorePairLoss:
    """The mean loss of pairs' scores; the score of an answer is that of its last token."""

    config: BradleyTerryLossConfig | LogExpLossConfig
    num_pairs: int  # of the whole optimizer step
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, values: Tensor, entropy: Tensor | None) -> LossOutput:
        """Needs `units` and `labels`."""
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


@dataclass(frozen=True)
class RewardModel(Objective):
    """Learning scores, of pairs or of steps."""

    config: RewardModelConfig

    @property
    def aggregation(self) -> Aggregation:
        """Of steps."""
        loss = self.config.loss
        by_answer = loss.name == "process" and loss.aggregation == "answer-mean"
        return "seq-mean-token-mean" if by_answer else "token-mean"

    def loss(self, num_units: int, divergence: float) -> Loss:
        """The loss of a step of `num_units` pairs, or of answers in steps."""
        loss = self.config.loss
        return StepLoss() if loss.name == "process" else ScorePairLoss(loss, num_units)

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        """Losses; accuracy and scores are means over pairs, or over the steps that are
        more likely right or wrong, and absent where there are none.
        """
        means = means_over("compared", sums)
        return {name: value for name, value in means.items() if name.startswith("loss/") or sums["compared"]}
