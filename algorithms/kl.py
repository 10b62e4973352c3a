"""Divergence of the policy from a reference, estimated from sampled tokens (docs/off_policy.md).

With `x = log policy - log reference` of a token that the policy sampled, KL(policy || reference) per token is
estimated (Schulman 2020, "Approximating KL divergence") by

    k1 = x                  no bias, high variance, may be negative
    k2 = x^2 / 2            biased, low variance
    k3 = exp(-x) - 1 + x    no bias, low variance, never negative

An estimator without bias need not have a gradient without bias. In a loss, where the samples are given, the
gradients are, as a factor of the gradient of the logprob,

    k1: 1             only noise: its expectation is 0
    k2: x             the gradient of KL(policy || reference)
    k3: 1 - exp(-x)   in expectation that of KL(reference || policy); near x for small x

(Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477.) So
k1 is refused in the loss unless `straight_through` takes the gradient of k2, which verl writes `k1+`, `k3+`.

In a reward an estimate k weighs the gradients of the logprobs as a number, and their expectations are

    k1: the gradient of KL(policy || reference)
    k2: as k3, to the lowest order in x
    k3: the gradient of KL(policy || reference) - KL(reference || policy), which vanishes for small x

So in the reward k2 and k3 are refused: near the reference they hold nothing.

The weight of the entropy bonus, from step to step.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nemorl.config.algorithm import AdaptiveEntropyConfig, EntropyConfig, KLConfig

from .policy_losses import MAX_LOG_RATIO


def kl_divergence(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """The estimate of each token [N]; `x` is clamped to ±20, without gradient beyond (verl: for k3)."""
    x = (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return (-x).exp() - 1 + x


def kl_penalty(logprobs: Tensor, reference: Tensor, config: KLConfig, ratio: Tensor | None = None) -> Tensor:
    """What enters the loss, or is taken from the reward, for each token [N], without the coefficient.

    `max_value` clamps the estimate (verl clamps k3 and OpenRLHF all of them to ±10, TRL none). A clamped
    token has no gradient, with `straight_through` too: otherwise the clamp would only change a metric
    there, which is what it does in verl's `k3+`, whose gradient is had by no `max_value`.

    With `importance_weighted` the estimate is multiplied by `ratio`, of the current policy to the one that is
    taken for the sampling one, with its gradient. Of k3 the gradient is then exactly `ratio * x` times that
    of the logprob, and of k1 the same in expectation: that of the divergence, for stale samples too
    (DeepSeek-V3.2, arXiv 2512.02556; TRL's `use_bias_correction_kl`). The gradient of k2, and of
    `straight_through`, is right without it and the ratio weighs it as a constant. Of a clamped k1 or k3 what
    is left is the ratio's own gradient, `max_value` times it.
    """
    estimate = kl_divergence(logprobs, reference, config.estimator)
    unweighted_is_right = config.estimator == "k2" or config.straight_through
    if config.straight_through:
        pull = kl_divergence(logprobs, reference, "k2")
        estimate = estimate.detach() + (pull - pull.detach())
    if config.max_value is not None:
        estimate = estimate.clamp(-config.max_value, config.max_value)
    if not config.importance_weighted:
        return estimate
    assert ratio is not None, "a divergence weighted by the ratio requires one"
    return estimate * (ratio.detach() if unweighted_is_right else ratio)


def gap_divergence(engine: Tensor, trainer: Tensor) -> tuple[Tensor, Tensor]:
    """k1 and k3 of KL(engine || trainer) for each token [N] that the engine sampled; no gradients."""
    return (
        kl_divergence(engine, trainer, "k1").detach(),
        kl_divergence(engine, trainer, "k3").detach(),
    )


@dataclass
class EntropyWeight:
    """Fixed, or after Skywork-OR1's adaptive control (He et al. 2025, arXiv 2505.22312).

    After a step of mean entropy e per token the coefficient c becomes `c + change` if e is below the target,
    `c - change` if it is above, and stays between 0 and its limit. The bonus counts, with c, only while the
    entropy is not above the target. The paper looks at the entropy of a step's samples before its updates;
    here it is the one during the updates of the step before, which costs no pass of its own.
    """

    config: EntropyConfig
    coefficient: float
    entropy: float | None = None  # of the step before; None before the first

    @classmethod
    def of(
        cls, config: EntropyConfig, coefficient: float | None = None, entropy: float | None = None
    ) -> "EntropyWeight":
        """The weight of the first step, or of a resumed run from the values of its checkpoint."""
        if not isinstance(config, AdaptiveEntropyConfig):
            return cls(config, config.coefficient)
        return cls(config, config.initial if coefficient is None else coefficient, entropy)

    @property
    def weight(self) -> float:
        """Of the step to come."""
        if not isinstance(self.config, AdaptiveEntropyConfig) or self.entropy is None:
            return self.coefficient
        return self.coefficient if self.entropy <= self.config.target else 0.0

    def update(self, entropy: float) -> dict[str, float]:
        """Update from the mean entropy of a step; return the metric of the coefficient that the step used."""
        if not isinstance(self.config, AdaptiveEntropyConfig):
            return {}
        used = self.weight
        if entropy != self.config.target:
            change = self.config.change if entropy < self.config.target else -self.config.change
            self.coefficient = min(max(self.coefficient + change, 0.0), self.config.max_coefficient)
        self.entropy = entropy
        return {"entropy/coefficient": used}
