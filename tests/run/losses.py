"""A policy loss by import path."""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from nemorl.algorithms.custom import policy_loss
from nemorl.algorithms.objective import TokenLoss
from nemorl.data.packed import PackedBatch


@policy_loss
def poisoned(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, versions: Collection[int] = ()
) -> TokenLoss:
    """REINFORCE, but NaN at the tokens that weights of these versions have sampled."""
    factors = torch.ones_like(logprobs)
    if batch.versions is not None:
        for version in versions:
            factors[batch.versions == version] = math.nan
    return TokenLoss(-advantages * logprobs * factors)
