"""Losses of a policy on its own samples, one pure function each.

They take a packed micro-batch with the logprobs of the policy that learns, `old` ones that the ratio is
taken against, and advantages, all [N] float32, and give the loss of each token. What is left out, weighed and
summed is said elsewhere: `correction.py`, `aggregation.py`, `losses.py`.
"""

from torch import Tensor

from nemorl.config.algorithm import (
    CispoLossConfig,
    ClipCovLossConfig,
    ClipLossConfig,
    CustomLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    GspoTokenLossConfig,
    KlCovLossConfig,
    PolicyLossConfig,
    ReinforceLossConfig,
    SapoLossConfig,
)
from nemorl.data.packed import PackedBatch

from .by_entropy import least_entropy
from .covariance import Choice, choose, clip_cov, kl_cov
from .custom import called, policy_loss, try_out
from .sequence_level import gmpo, gspo, gspo_token
from .token_level import cispo, clip, reinforce, sapo
from .tokens import MAX_LOG_RATIO, TokenLoss, bounded_exp, log_ratio

__all__ = [
    "MAX_LOG_RATIO",
    "Choice",
    "TokenLoss",
    "bounded_exp",
    "choose",
    "least_entropy",
    "log_ratio",
    "policy_loss",
    "token_loss",
    "try_out",
]


def token_loss(
    config: PolicyLossConfig,
    batch: PackedBatch,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    choice: Choice | None = None,
) -> TokenLoss:
    """The loss that the config names; `choice` is what the losses by covariance found for this update."""
    given = batch, logprobs, old, advantages
    match config:
        case ClipLossConfig():
            return clip(*given, config)
        case GspoLossConfig():
            return gspo(*given, config)
        case GspoTokenLossConfig():
            return gspo_token(*given, config)
        case GmpoLossConfig():
            return gmpo(*given, config)
        case CispoLossConfig():
            return cispo(*given, config)
        case SapoLossConfig():
            return sapo(*given, config)
        case ReinforceLossConfig():
            return reinforce(*given, config)
        case ClipCovLossConfig():
            return clip_cov(*given, config, choice)
        case KlCovLossConfig():
            return kl_cov(*given, config, choice)
        case CustomLossConfig():
            return called(config, *given)
