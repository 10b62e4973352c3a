"""What a critic learns: the returns of the states in which tokens were chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.config.algorithm.online import CriticLearningConfig
from nemorl.data.losses import LossOutput
from nemorl.data.packed import PackedBatch


def squared_error(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Loss per token, and where clipping changed it, both [N].

    `max((V - R)^2, (clip(V, old - c, old + c) - R)^2) / 2` (PPO's implementation; Schulman et al. 2017 name
    the plain error only): a value that has left the surroundings of the old one is not pulled further.
    """
    errors = (values - returns).square()
    if clip is None:
        return errors / 2, torch.zeros_like(values, dtype=torch.bool)
    clipped = (torch.minimum(torch.maximum(values, old - clip), old + clip) - returns).square()
    return torch.maximum(errors, clipped) / 2, clipped > errors


@dataclass(frozen=True)
class ValueLoss:
    """Of a critic on one micro-batch, summed with the weights of the batch (`aggregation.py`)."""

    config: CriticLearningConfig
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, values: Tensor, entropy: Tensor | None) -> LossOutput:
        """Needs `values`, those before the step, and `returns`."""
        assert batch.values is not None, "the value loss wants the values before the step"
        assert batch.returns is not None, "the value loss wants returns"
        mask, returns = batch.loss_mask, batch.returns
        # The state in which a token is chosen is what the critic has read before it. No sequence begins with
        # a token of the mask, so nothing comes from the sequence before.
        now, old = values.roll(1), batch.values.roll(1)
        losses, clipped = squared_error(now, old, returns, self.config.value_clip)
        loss = (batch.weights * losses).sum()
        sums = {
            "loss": loss,
            "tokens": mask.sum(),
            "value": (old * mask).sum(),
            "return": (returns * mask).sum(),
            "return_squared": (returns.square() * mask).sum(),
            "error": ((returns - old) * mask).sum(),
            "error_squared": ((returns - old).square() * mask).sum(),
            "clip_fraction": (clipped & mask).sum(),
        }
        return LossOutput(loss, {name: value.detach().float() for name, value in sums.items()}, {})


def value_figures(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step's updates of the critic, from the global sums of each.

    The loss is the mean over updates. The values are those before the step: `critic/explained_variance` is
    `1 - Var[R - V] / Var[R]`, 1 where they were the returns, 0 where they told no more than a constant would;
    it is 0 where the returns do not vary.
    """
    sums = {name: sum(update[name] for update in updates) for name in updates[0]}
    tokens = max(sums["tokens"], 1.0)
    mean = {name: value / tokens for name, value in sums.items() if name not in ("loss", "tokens")}
    of_returns = mean["return_squared"] - mean["return"] ** 2
    of_errors = mean["error_squared"] - mean["error"] ** 2
    # Sums are of float32, so that a difference of this size says nothing.
    varies = of_returns > 1e-6 * mean["return_squared"]
    return {
        "critic/loss": sums["loss"] / len(updates),
        "critic/value": mean["value"],
        "critic/return": mean["return"],
        "critic/clip_fraction": mean["clip_fraction"],
        "critic/explained_variance": 1 - of_errors / of_returns if varies else 0.0,
    }
