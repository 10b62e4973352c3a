"""Reward models: a scalar head that learns to separate better answers, or right steps, from others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemorl.config.algorithm import Aggregation, ProcessLossConfig, RewardModelConfig
from nemorl.config.algorithm.offline import BradleyTerryLossConfig, LogExpLossConfig
from nemorl.data.examples import Example
from nemorl.data.losses import Loss, LossOutput
from nemorl.data.packed import PackedBatch

from .offline import Unit
from .pair_losses import at_ends, find_pairs


@dataclass(frozen=True)
class ScorePairLoss:
    """The mean over pairs of what their scores cost; the score of an answer is that of its last token."""

    config: BradleyTerryLossConfig | LogExpLossConfig
    num_pairs: int  # of the whole optimizer step
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, values: Tensor, entropy: Tensor | None) -> LossOutput:
        """Needs `units` and `labels`."""
        pairs, scores = find_pairs(batch), at_ends(values, batch)
        chosen, rejected = scores[pairs.chosen], scores[pairs.rejected]
        ahead = chosen - rejected
        if not isinstance(self.config, LogExpLossConfig):
            ahead = ahead - self.config.margin_scale * pairs.margins
        # log(1 + exp(-ahead)), which a sum of parts that have a kink at 0 would teach a fresh head nothing by
        preference = F.softplus(-ahead).sum() / self.num_pairs
        center = (chosen + rejected).square().sum() / self.num_pairs
        loss = preference + self.config.center_coefficient * center
        sums = {
            "loss/total": loss,
            "loss/preference": preference,
            "loss/center": center,
            "compared": torch.tensor(float(len(pairs)), device=loss.device),
            "accuracy": (chosen > rejected).sum(),
            "score/chosen": chosen.sum(),
            "score/rejected": rejected.sum(),
            "score/margin": (chosen - rejected).sum(),
        }
        return LossOutput(loss, {name: value.detach().float() for name, value in sums.items()}, {})


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
        costs = -right * F.logsigmoid(values) - wrong * F.logsigmoid(-values)
        loss = (batch.weights * costs).sum()
        sums = {
            "loss/total": loss,
            "compared": (mask & (labels != 0)).sum(),
            "accuracy": ((labels * values > 0) & mask).sum(),
            "score/margin": (labels * values * mask).sum(),
        }
        return LossOutput(loss, {name: value.detach().float() for name, value in sums.items()}, {})


@dataclass(frozen=True)
class RewardModel:
    """Learning scores."""

    config: RewardModelConfig

    @property
    def aggregation(self) -> Aggregation:
        """Of steps."""
        loss = self.config.loss
        by_answer = isinstance(loss, ProcessLossConfig) and loss.aggregation == "answer-mean"
        return "seq-mean-token-mean" if by_answer else "token-mean"

    def contrast(self, units: Sequence[Unit]) -> list[Example]:
        """There is no reference."""
        return []

    def loss(self, num_units: int, divergence: float) -> Loss:
        """The loss of a step of `num_units` pairs, or of answers in steps."""
        config = self.config.loss
        return StepLoss() if isinstance(config, ProcessLossConfig) else ScorePairLoss(config, num_units)

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        """Losses; accuracy and scores are means over pairs, or over the steps that are
        more likely right or wrong, and absent where there are none.
        """
        compared = sums["compared"]
        losses = {name: value for name, value in sums.items() if name.startswith("loss/")}
        if not compared:
            return losses
        others = sums.keys() - losses.keys() - {"compared"}
        return losses | {name: value / compared for name, value in sums.items() if name in others}
