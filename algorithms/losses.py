"""Losses of a micro-batch of the policy and of the critic: sums of token terms with the weights of the batch.

The weights come from `aggregation.py`, the terms of the policy from `policy_losses.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemorl.config.algorithm import (
    CorrectionConfig,
    KLConfig,
    NoCorrectionConfig,
    PolicyLossConfig,
)
from nemorl.config.algorithm.losses import CriticLearningConfig
from nemorl.data.losses import LossOutput
from nemorl.data.packed import PackedBatch

from .objective import (
    Divisor,
    bounded_exp,
    correct,
    gap_divergence,
    kept,
    kl_divergence,
    kl_penalty,
    log_ratio,
    sequence_of,
    sequence_weights,
    totals,
)
from .policy_losses import Choice, choose, least_entropy, token_loss


@dataclass(frozen=True)
class PolicyLoss:
    """`correction * policy loss + kl.coefficient * divergence - entropy_coefficient * entropy` of each token.

    And `likelihood_coefficient * likelihood_weights * -logprob` (VAPO, Yue et al. 2025, arXiv 2504.05118).
    With `loss.top_entropy_quantile` only the tokens of the highest entropy have a policy loss. With
    `correction.divisor: kept` the tokens that a correction leaves out have no term at all, and the others
    share the weight (`prepared`).

    Needs `advantages`. The `old` logprobs are the engine's in the bypass form of the correction, otherwise
    the batch's `old_logprobs`, or where it has none the current ones: with one update in a step the ratio is
    1, and its gradient the policy gradient's.
    """

    config: PolicyLossConfig
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = NoCorrectionConfig()
    entropy_coefficient: float = 0.0
    likelihood_coefficient: float = 0.0
    choice: Choice | None = None  # of losses that choose among all tokens of an update
    least_entropy: float | None = None  # of tokens with a policy loss; None takes all
    divisor: Divisor | None = None  # of the tokens that the correction keeps; None leaves the batch's weights
    needs_entropy: bool = True  # also a metric: a collapsing policy shows there first

    def prepared(self, batch: PackedBatch, over_ranks: Callable[[Tensor], Tensor]) -> "PolicyLoss":
        """The loss for all micro-batches of an update, of which `batch` is this rank's part."""
        loss = self
        if self.config.selects_by_entropy:
            border = least_entropy(batch, self.config.top_entropy_quantile, over_ranks)
            loss = replace(loss, least_entropy=border)
        if self.correction.divisor == "kept":
            counts = over_ranks(totals(kept(batch, self.correction).double(), batch))
            loss = replace(loss, divisor=Divisor.of(counts.tolist()))
        if not self.config.selects_tokens:
            return loss
        old = batch.logprobs if self.correction.form == "bypass" else batch.old_logprobs
        assert old is not None, "a choice by covariance requires old logprobs"
        return replace(loss, choice=choose(batch, old, self.config, over_ranks))

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """Sums over a micro-batch; metrics that are means over tokens are divided by `finish_metrics`."""
        assert batch.advantages is not None, "the policy loss requires advantages"
        assert entropy is not None, "the policy loss requires the entropy"
        old = self._old(batch, logprobs)
        weights = batch.weights if self.divisor is None else self._weights_of_kept(batch, self.divisor)
        found = token_loss(self.config, batch, logprobs, old, batch.advantages, self.choice)
        terms, metrics = found.loss, dict(found.metrics)
        largest: dict[str, Tensor] = {}
        if self.correction.changes_terms:
            corrected = correct(batch, logprobs, old, self.correction, has_ratio=self.config.has_ratio)
            terms = terms * corrected.weight
            metrics |= corrected.metrics
            largest |= corrected.largest
        if self.least_entropy is not None:
            assert batch.old_entropies is not None, "a choice by entropy requires those before the updates"
            chosen = batch.old_entropies >= self.least_entropy
            terms = terms * chosen
            metrics["top_entropy_fraction"] = chosen
        policy = (weights * terms).sum()
        if found.ratio is not None:
            metrics |= {
                "ratio/mean": found.ratio,
                "ratio/square": found.ratio.square(),
                "kl/old": kl_divergence(old, logprobs, "k3"),
            }
            largest["ratio/max"] = found.ratio
        if batch.logprobs is not None:
            gap = (logprobs - batch.logprobs).abs()
            trainer = logprobs if batch.old_logprobs is None else batch.old_logprobs
            k1, k3 = gap_divergence(batch.logprobs, trainer)
            metrics |= {"logprob_gap/mean": gap, "logprob_gap/k1": k1, "logprob_gap/k3": k3}
            largest["logprob_gap/max"] = gap
        metrics["entropy"] = entropy
        terms = terms - self.entropy_coefficient * entropy
        if batch.reference_logprobs is not None:
            metrics["kl/reference"] = kl_divergence(logprobs, batch.reference_logprobs, self.kl.estimator)
            if self.kl.placement == "loss":
                ratio = bounded_exp(log_ratio(batch, logprobs, old))
                penalty = kl_penalty(logprobs, batch.reference_logprobs, self.kl, ratio)
                terms = terms + self.kl.coefficient * penalty
        loss = (weights * terms).sum()
        mask = batch.loss_mask
        sums = {"loss/policy": policy, "tokens": mask.sum()}
        if self.likelihood_coefficient > 0:
            assert batch.likelihood_weights is not None, "the likelihood term requires its weights"
            sums["loss/likelihood"] = -(batch.likelihood_weights * logprobs).sum()
            loss = loss + self.likelihood_coefficient * sums["loss/likelihood"]
        sums["loss/total"] = loss
        sums |= {name: (values * mask).sum() for name, values in metrics.items()}
        return LossOutput(
            loss, _detached(sums), _detached({name: (v * mask).max() for name, v in largest.items()})
        )

    def _weights_of_kept(self, batch: PackedBatch, divisor: Divisor) -> Tensor:
        """[N] as `batch.weights`, of the tokens that the correction keeps; the others have 0."""
        mask = kept(batch, self.correction)
        counts = totals(mask.double(), batch).tolist()
        weights = sequence_weights(counts, self.config.aggregation, self.config.aggregation_length, divisor)
        return weights.to(mask.device)[sequence_of(batch)] * mask

    def _old(self, batch: PackedBatch, logprobs: Tensor) -> Tensor:
        if self.correction.form == "bypass":
            assert batch.logprobs is not None, "the bypass form requires the engine's logprobs"
            return batch.logprobs
        return logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Negative logprob of the data: supervised fine-tuning."""

    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        """Sum of `-weight * logprob` over the tokens of the loss mask."""
        loss = -(batch.weights * logprobs).sum()
        sums = {"loss/sft": loss, "tokens": batch.loss_mask.sum(), "nll": -(logprobs * batch.loss_mask).sum()}
        return LossOutput(loss, _detached(sums), {})


def finish_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics of one optimizer step from global sums: losses stay sums, the rest are means over tokens.

    Of weights `x/mean` and `x/square` become `x/ess`, the effective sample size as a share of the tokens:
    `(sum of w)^2 / (n sum of w^2)`, 1 for equal weights.
    """
    tokens = max(sums["tokens"], 1.0)
    means = {k: v if k.startswith("loss/") else v / tokens for k, v in sums.items() if k != "tokens"}
    for square in [name for name in means if name.endswith("/square")]:
        of, mean_square = square.removesuffix("square"), means.pop(square)
        means[f"{of}ess"] = means[f"{of}mean"] ** 2 / mean_square if mean_square > 0 else 0.0
    return {**means, **maxima}


def _detached(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().float() for name, value in values.items()}


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
        assert batch.values is not None, "the value loss requires the values before the step"
        assert batch.returns is not None, "the value loss requires returns"
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


def value_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step's updates of the critic, from the global sums of each.

    The loss is the mean over updates. The values are those before the step: `critic/explained_variance` is
    `1 - Var[R - V] / Var[R]`, 1 where they were the returns, 0 where they explain no more than a constant;
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
