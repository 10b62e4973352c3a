"""What a pair of answers costs, from one number for each: what its logprob is relative to the reference.

All are pure functions of `chosen` and `rejected`, [P] float32: an answer's logprob, summed over its tokens or
their mean, less the reference's where the loss keeps one; `delta` is their difference. The formulas and
their papers stand in `nemorl.config.algorithm.losses`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nemorl.config.algorithm.losses import (
    AnchoredLossConfig,
    HingeLossConfig,
    LogisticLossConfig,
    OddsRatioLossConfig,
    PairLossConfig,
    RobustLossConfig,
    SquaredLossConfig,
)

# A mean logprob of 0 would have infinite odds.
_LEAST_SURPRISE = 1e-6


def pair_loss(chosen: Tensor, rejected: Tensor, margins: Tensor, config: PairLossConfig) -> Tensor:
    """The loss of each pair [P]; `margins` [P] are the data's own."""
    match config:
        case LogisticLossConfig():
            return _logistic(chosen - rejected, margins, config)
        case RobustLossConfig():
            return _robust(chosen - rejected, config)
        case SquaredLossConfig():
            return (chosen - rejected - 1 / (2 * config.beta)).square()
        case HingeLossConfig():
            return F.relu(config.margin - config.beta * (chosen - rejected))
        case OddsRatioLossConfig():
            return -config.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
        case AnchoredLossConfig():
            return _anchored(chosen, rejected, config)


def _logistic(delta: Tensor, margins: Tensor, config: LogisticLossConfig) -> Tensor:
    won = config.beta * delta - config.gamma - config.margin_scale * margins
    wrong = config.label_smoothing
    return -(1 - wrong) * F.logsigmoid(won) - wrong * F.logsigmoid(-won)


def _robust(delta: Tensor, config: RobustLossConfig) -> Tensor:
    """`E[loss] under flipped labels` is that of the true ones: the flipped part is taken off and rescaled."""
    won, wrong = config.beta * delta, config.label_smoothing
    return (-(1 - wrong) * F.logsigmoid(won) + wrong * F.logsigmoid(-won)) / (1 - 2 * wrong)


def _log_odds(mean: Tensor) -> Tensor:
    """`log(p / (1 - p))` of `p = exp(mean)`, which is at most a millionth below 1."""
    mean = mean.clamp(max=-_LEAST_SURPRISE)
    return mean - torch.log(-torch.expm1(mean))


def _anchored(chosen: Tensor, rejected: Tensor, config: AnchoredLossConfig) -> Tensor:
    if config.anchor == "zero":
        return 1 - torch.sigmoid(config.beta * chosen) + torch.sigmoid(config.beta * rejected)
    return torch.sigmoid(config.beta * chosen) + 1 - torch.sigmoid(config.beta * (chosen - rejected))
