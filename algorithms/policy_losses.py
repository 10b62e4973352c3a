"""Losses of a policy on its samples and of its critic, and supervised fine-tuning's.

A policy loss is one pure function: from the tensors of a packed micro-batch, [N] float32 each, to the loss of
each token. `PolicyLoss` corrects and masks these, adds divergence and entropy terms (`objective.py`) and sums
all with the weights of the batch. A new built-in loss is a config in `nemorl/config/algorithm/losses.py`, a
function here and a line in `_LOSSES`; custom losses are in `custom.py`.

Some losses choose tokens among all sampled tokens of an update: `prepared` does this once, over all
data-parallel ranks, and the result decides for every token separately, so that no split into micro-batches or
ranks changes it. `least_entropy` selects those of the highest entropy. Clip-Cov and KL-Cov (Cui et al. 2025,
"The Entropy Mechanism", arXiv 2505.22617) select by `cov_t = (log p_t - mean of log p) (A_t - mean of A)`,
since the entropy falls most by the tokens of a high one. The logprobs are the old ones: before the first
update of a step these are the current ones, as in the paper.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemorl.config.algorithm import CorrectionConfig, KLConfig, NoCorrectionConfig, PolicyLossConfig
from nemorl.config.algorithm import losses as configs
from nemorl.data.losses import LossOutput, TrainStats
from nemorl.data.packed import PackedBatch

from . import objective
from .custom import custom_loss
from .metrics import guard_metrics
from .objective import OverRanks, TokenLoss, bounded_exp, log_ratio, loss_output, sequence_means


@dataclass(frozen=True)
class Tokens:
    batch: PackedBatch
    logprobs: Tensor  # [N] of the policy that learns
    old: Tensor  # [N] of the policy that the ratio is relative to; no gradient
    advantages: Tensor  # [N]
    choice: "Choice | None" = None  # of losses that select tokens

    @property
    def log_ratio(self) -> Tensor:  # [N]
        return log_ratio(self.batch, self.logprobs, self.old)

    @property
    def ratio(self) -> Tensor:  # [N], bounded
        return bounded_exp(self.log_ratio)

    @property
    def chosen(self) -> Tensor:  # [N] bool
        if self.choice is None:
            return torch.zeros_like(self.batch.loss_mask)
        return self.choice.of(self.batch, self.old, self.advantages)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` [N], and where clipping took the gradient away."""
    low, high = 1 - clip_low, 1 + clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    cut_low, cut_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    return TokenLoss(loss, ratio, {"clip_fraction/low": cut_low, "clip_fraction/high": cut_high})


def gspo(x: Tokens, config: configs.GspoLossConfig) -> TokenLoss:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071).

    The clipped surrogate of `s = exp(mean of logprobs - old)` over the sampled tokens of a sequence. Each
    token carries its sequence's loss, so with `seq-mean-token-mean` the whole is the paper's mean over
    sequences. The gradient goes through s; for advantages that are equal within a sequence it is also that
    of `gspo_token`, which is verl's form. The mean logarithm is clamped at ±20 (verl: at most 10).
    """
    ratio = bounded_exp(sequence_means(x.log_ratio, x.batch))
    return clipped_surrogate(ratio, x.advantages, config.clip_low, config.clip_high)


def gspo_token(x: Tokens, config: configs.GspoTokenLossConfig) -> TokenLoss:
    """GSPO-token (arXiv 2507.18071), for advantages of tokens: `gspo` with `s_t = sg[s] p_t / sg[p_t]`."""
    sequence = bounded_exp(sequence_means(x.log_ratio.detach(), x.batch))
    ratio = sequence * (x.logprobs - x.logprobs.detach()).exp()
    return clipped_surrogate(ratio, x.advantages, config.clip_low, config.clip_high)


def gmpo(x: Tokens, config: configs.GmpoLossConfig) -> TokenLoss:
    """GMPO (Zhao et al. 2025, arXiv 2507.20673): the geometric mean of clipped token ratios.

    `-A exp(mean of x_t)`, where `x_t = min(log r_t, clip_high)` if `A > 0`, else `max(log r_t, -clip_low)`:
    the bounds are of the logarithm, so 0.4 is the paper's (e^-0.4, e^0.4). Clipping is of tokens. Where the
    advantages of tokens differ, each keeps its own as in `gspo` (verl takes their mean).
    """
    log, positive = x.log_ratio, x.advantages > 0
    clipped = torch.where(positive, log.clamp(max=config.clip_high), log.clamp(min=-config.clip_low))
    ratio = bounded_exp(sequence_means(clipped, x.batch))
    cut_low, cut_high = (log < -config.clip_low) & (x.advantages < 0), (log > config.clip_high) & positive
    metrics = {"clip_fraction/low": cut_low, "clip_fraction/high": cut_high}
    return TokenLoss(-ratio * x.advantages, ratio, metrics)


def clip(x: Tokens, config: configs.ClipLossConfig) -> TokenLoss:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347) of `r = exp(logprobs - old)`.

    Different bounds are DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476). With `dual_clip` c, where
    `A < 0`, the loss is at most `-c A`, and has no gradient there (Ye et al. 2020, arXiv 1912.09729; verl's
    `clip_ratio_c`, TRL's `delta`).
    """
    surrogate = clipped_surrogate(x.ratio, x.advantages, config.clip_low, config.clip_high)
    if config.dual_clip is None:
        return surrogate
    cut = (x.ratio > config.dual_clip) & (x.advantages < 0)
    loss = torch.where(cut, -config.dual_clip * x.advantages, surrogate.loss)
    return replace(surrogate, loss=loss, metrics={**surrogate.metrics, "clip_fraction/dual": cut})


def cispo(x: Tokens, config: configs.CispoLossConfig) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    `-sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprob`, where sg stops the gradient. As in the paper there
    is no lower bound unless `clip_low` is given. verl's bounds are ours; TRL's `epsilon_high` is `1 +
    clip_high`.
    """
    ratio = x.ratio.detach()
    low = 0.0 if config.clip_low is None else 1 - config.clip_low
    high = 1 + config.clip_high
    metrics = {"clip_fraction/low": ratio < low, "clip_fraction/high": ratio > high}
    return TokenLoss(-ratio.clamp(low, high) * x.advantages * x.logprobs, ratio, metrics)


def dppo(x: Tokens, config: configs.DppoLossConfig) -> TokenLoss:
    """DPPO (arXiv 2602.04879, with binary divergences): tokens beyond a bound have no loss.

    `-sg[min(r, max_ratio)] A logprob` where the token, with the probability p and before q, is within it: by
    `tv` `p - q <= clip_high` if A > 0, else `q - p <= clip_low`; by `kl` `q log(q / p) + (1 - q) log((1 - q)
    / (1 - p))` at most the same bounds, or a change against the advantage. As in verl, 1e-8 is added to 1 - p
    and 1 - q.
    """
    new, old = x.logprobs.detach(), x.old
    p, q = new.exp(), old.exp()
    if config.divergence == "tv":
        above, below = p - q > config.clip_high, q - p > config.clip_low
    else:
        others = torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
        divergence = q * (old - new) + (1 - q) * others
        above, below = (divergence > config.clip_high) & (p > q), (divergence > config.clip_low) & (p < q)
    high, low = above & (x.advantages > 0), below & (x.advantages <= 0)
    ratio = x.ratio.detach()
    terms = -ratio.clamp(max=config.max_ratio) * x.advantages * x.logprobs * ~(high | low)
    return TokenLoss(terms, ratio, {"clip_fraction/low": low, "clip_fraction/high": high})


def sapo(x: Tokens, config: configs.SapoLossConfig) -> TokenLoss:
    """SAPO (Gao et al. 2025, arXiv 2511.20347): a gate whose gradient fades with the distance from r = 1.

    `-(4 / t) sigmoid(t (r - 1)) A`, with t of the advantage's sign; the gate's slope at r = 1 is 1, so that
    the gradient is the policy gradient's on policy.
    """
    ratio = x.ratio
    temperature = torch.where(x.advantages > 0, config.temperature_positive, config.temperature_negative)
    return TokenLoss(-4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * x.advantages, ratio)


def reinforce(x: Tokens, config: configs.ReinforceLossConfig) -> TokenLoss:
    """`-A logprob` (Williams 1992): no ratio, so `old` is not used; later minibatches are off policy.

    What papers with a plain policy gradient have: RLOO (Ahmadian et al. 2024, arXiv 2402.14740), ReMax (Li
    et al. 2023, arXiv 2310.10505), GPG (Chu et al. 2025, arXiv 2504.02546), OPO (Hao et al. 2025, arXiv
    2505.23585).
    """
    return TokenLoss(-x.advantages * x.logprobs)


def clip_cov(x: Tokens, config: configs.ClipCovLossConfig) -> TokenLoss:
    """PPO's clipped surrogate (`clip`), but 0 and without gradient for the chosen tokens.

    These count among the tokens that divide the sum. The draw is among all tokens within the bounds, also
    those that PPO clips already; verl draws among the others. In a step's first update both are the same.
    """
    surrogate = clipped_surrogate(x.ratio, x.advantages, config.clip_low, config.clip_high)
    chosen = x.chosen
    loss = torch.where(chosen, torch.zeros_like(surrogate.loss), surrogate.loss)
    return replace(surrogate, loss=loss, metrics={**surrogate.metrics, "selected_fraction": chosen})


def kl_cov(x: Tokens, config: configs.KlCovLossConfig) -> TokenLoss:
    """`-r A`, not clipped, and for the chosen tokens `-r A + coefficient |logprob - old|`.

    The paper writes the divergence of the old policy from the current one; its code, verl and this take the
    absolute difference of the logprobs for it. It has no gradient at r = 1, a step's first minibatch.
    """
    ratio, chosen = x.ratio, x.chosen
    loss = -ratio * x.advantages + config.coefficient * x.log_ratio.abs() * chosen
    return TokenLoss(loss, ratio, {"selected_fraction": chosen})


_LOSSES: Mapping[type[configs.PolicyLossBase], Callable[..., TokenLoss]] = {
    configs.ClipLossConfig: clip,
    configs.GspoLossConfig: gspo,
    configs.GspoTokenLossConfig: gspo_token,
    configs.GmpoLossConfig: gmpo,
    configs.CispoLossConfig: cispo,
    configs.DppoLossConfig: dppo,
    configs.SapoLossConfig: sapo,
    configs.ReinforceLossConfig: reinforce,
    configs.ClipCovLossConfig: clip_cov,
    configs.KlCovLossConfig: kl_cov,
    configs.CustomLossConfig: lambda x, config: custom_loss(config, x.batch, x.logprobs, x.old, x.advantages),
}


def token_loss(
    config: configs.PolicyLossBase,
    batch: PackedBatch,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    choice: "Choice | None" = None,
) -> TokenLoss:
    """The loss that the config names; `choice` is the result of `choose` for losses that select tokens."""
    return _LOSSES[type(config)](Tokens(batch, logprobs, old, advantages, choice), config)


@dataclass(frozen=True)
class Choice:
    """The chosen tokens of an update: of a covariance within bounds, and the first of these by `draws`."""

    mean_logprob: float
    mean_advantage: float
    low: float  # least covariance
    high: float  # largest covariance
    last_draw: int | None = None  # the largest draw that is chosen; None takes all

    def of(self, batch: PackedBatch, old: Tensor, advantages: Tensor) -> Tensor:  # [N] bool
        covariance = _covariance(old, advantages, self.mean_logprob, self.mean_advantage)
        chosen = batch.loss_mask & (covariance >= self.low) & (covariance <= self.high)
        return chosen if self.last_draw is None else chosen & (draws(batch) <= self.last_draw)


def choose(
    batch: PackedBatch, old: Tensor, config: configs.PolicyLossBase, over_ranks: OverRanks
) -> Choice | None:
    """From this rank's part of an update; None where no token is chosen at all.

    At most `fraction` of all sampled tokens, rounded down, but one at least as in the paper's code and verl.
    Clip-Cov draws among the tokens within its bounds; the paper draws at random, here a token's draw is made
    of the tokens up to it, so that it is the same under every layout and after a resume. KL-Cov takes the
    highest, of positive ones alone: where all advantages are equal there are none.
    """
    assert isinstance(config, configs.ClipCovLossConfig | configs.KlCovLossConfig), f"{config} selects none"
    assert batch.advantages is not None, "a choice by covariance requires advantages"
    mask = batch.loss_mask
    logprobs, advantages = over_ranks(old[mask].double()), over_ranks(batch.advantages[mask].double())
    if len(logprobs) == 0:
        return None
    count = max(1, int(config.fraction * len(logprobs)))
    means = float(logprobs.mean()), float(advantages.mean())
    covariance = _covariance(logprobs, advantages, *means)
    if isinstance(config, configs.KlCovLossConfig):
        least_positive, border = math.ulp(0.0), float(covariance.topk(count).values[-1])
        return Choice(*means, low=max(border, least_positive), high=math.inf)
    drawn = over_ranks(draws(batch)[mask])
    within = drawn[(covariance >= config.covariance_low) & (covariance <= config.covariance_high)]
    if len(within) == 0:
        return None
    last = int(within.sort().values[min(count, len(within)) - 1])
    return Choice(*means, low=config.covariance_low, high=config.covariance_high, last_draw=last)


def draws(batch: PackedBatch) -> Tensor:
    """[N] int64: a number for each token, as if drawn, made of the tokens of its sequence up to it alone."""
    terms = _mixed(batch.tokens * _ODD + batch.position_ids)
    sums = terms.cumsum(0)
    before = (sums - terms)[batch.cu_seqlens[:-1].long()]
    lengths = torch.diff(batch.cu_seqlens).long()
    return _mixed(sums - before.repeat_interleave(lengths, output_size=batch.num_tokens))


_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number: 2^64 over the golden ratio


def _mixed(x: Tensor) -> Tensor:
    """Integers whose bits all depend on all bits of `x`; 64-bit arithmetic that wraps around."""
    for bits, factor in ((30, _ODD), (27, _ODD), (31, 1)):
        # Zeros come from the left, which torch's own shift of signed numbers does not bring.
        shifted = (x >> bits) & ((1 << (64 - bits)) - 1)
        x = (x ^ shifted) * factor
    return x


def _covariance(logprobs: Tensor, advantages: Tensor, mean_logprob: float, mean_advantage: float) -> Tensor:
    """In float64, so that a token has the same one on every rank."""
    return (logprobs.double() - mean_logprob) * (advantages.double() - mean_advantage)


def least_entropy(batch: PackedBatch, quantile: float, over_ranks: OverRanks) -> float:
    """The smallest entropy among the `quantile` of an update's tokens that has the highest ones.

    "Beyond the 80/20 rule" (Wang et al. 2025, arXiv 2506.01939); `batch` is this rank's part. Of n different
    tokens `1 + floor(quantile (n - 1))` are at least as high, as in TRL's `top_entropy_quantile`. Its border
    is a micro-batch's; ours is the update's, by the entropies before the updates of the step.
    """
    assert batch.old_entropies is not None, "a choice by entropy requires those before the updates"
    entropies = over_ranks(batch.old_entropies[batch.loss_mask])
    if len(entropies) == 0:
        return 0.0
    return float(entropies.topk(1 + int(quantile * (len(entropies) - 1))).values[-1])


@dataclass(frozen=True)
class PolicyLoss:
    """`correction * policy loss + kl.coefficient * divergence - entropy_coefficient * entropy` of each token.

    And `likelihood_coefficient * likelihood_weights * -logprob` (VAPO, Yue et al. 2025, arXiv 2504.05118).
    With `loss.top_entropy_quantile` only the tokens of the highest entropy have a policy loss. With
    `correction.divisor: kept` the tokens that a correction leaves out have no term at all, and the others
    share the weight; with `correction.normalize` its weights are divided by their mean (`prepared`).

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
    divisor: objective.Divisor | None = None  # of tokens that the correction keeps; None: the batch's weights
    mean_weight: float = 1.0  # that weights of the correction are divided by; metrics are of those before
    ages: objective.Ages | None = None  # of runs that train on stale samples
    needs_entropy: bool = True  # also a metric: a collapsing policy shows there first

    def prepared(
        self, batch: PackedBatch, over_ranks: OverRanks, step: PackedBatch | None = None
    ) -> "PolicyLoss":
        """The loss for all micro-batches of an update; `batch` and `step` are this rank's parts.

        Without a `step` the update is all of it.
        """
        loss, quantile = self, self.config.top_entropy_quantile
        if quantile < 1:
            loss = replace(loss, least_entropy=least_entropy(batch, quantile, over_ranks))
        if self.correction.divisor == "kept":
            counts = over_ranks(objective.totals(objective.kept(batch, self.correction).double(), batch))
            loss = replace(loss, divisor=objective.Divisor.of(counts.tolist()))
        if self.correction.normalize:
            mean = objective.mean_weight(batch if step is None else step, self.correction, over_ranks)
            loss = replace(loss, mean_weight=mean)
        if self.config.selects_tokens:
            old = batch.logprobs if self.correction.form == "bypass" else batch.old_logprobs
            assert old is not None, "a choice by covariance requires old logprobs"
            loss = replace(loss, choice=choose(batch, old, self.config, over_ranks))
        return loss

    @property
    def needs_unfiltered(self) -> bool:
        """True if the divergence of the loss, whose reference keeps all tokens, needs those of the policy."""
        return self.kl.coefficient > 0 and self.kl.placement == "loss"

    def __call__(
        self,
        batch: PackedBatch,
        logprobs: Tensor,
        entropy: Tensor | None,
        unfiltered: Tensor | None = None,
    ) -> LossOutput:
        """Sums over a micro-batch; metrics that are means over tokens are divided by `finish_metrics`."""
        assert batch.advantages is not None, "the policy loss requires advantages"
        assert entropy is not None, "the policy loss requires the entropy"
        old = batch.logprobs if self.correction.form == "bypass" else batch.old_logprobs
        if old is None:
            assert self.correction.form == "decoupled", "the bypass form requires the engine's logprobs"
            old = logprobs.detach()
        weights = batch.weights
        if self.divisor is not None:
            mask = objective.kept(batch, self.correction)
            counts = objective.totals(mask.double(), batch).tolist()
            aggregation, length = self.config.aggregation, self.config.aggregation_length
            of_kept = objective.sequence_weights(counts, aggregation, length, self.divisor)
            weights = of_kept.to(mask.device)[objective.sequence_of(batch)] * mask

        # The policy's loss of each token, corrected and masked.
        found = token_loss(self.config, batch, logprobs, old, batch.advantages, self.choice)
        gaps, largest = objective.engine_gap(batch, logprobs)
        terms, metrics = found.loss, {**found.metrics, **gaps, "entropy": entropy}
        corrected = objective.correct(batch, logprobs, old, self.correction, self.config.has_ratio)
        if corrected is not None:
            terms = terms * corrected.weight / self.mean_weight
            metrics, largest = metrics | corrected.metrics, largest | corrected.largest
        if self.ages is not None:
            weight, gap = None if corrected is None else corrected.weight, gaps.get("logprob_gap/mean")
            metrics |= self.ages.metrics(batch, gap, weight)
            if gap is not None:
                largest |= self.ages.largest(batch, gap)
        if self.least_entropy is not None:
            assert batch.old_entropies is not None, "a choice by entropy requires those before the updates"
            metrics["top_entropy_fraction"] = batch.old_entropies >= self.least_entropy
            terms = terms * metrics["top_entropy_fraction"]
        if found.ratio is not None:
            metrics |= {"ratio/mean": found.ratio, "ratio/square": found.ratio.square()}
            metrics["kl/old"] = objective.kl_divergence(old, logprobs, "k3")
            largest["ratio/max"] = found.ratio
        losses = {"loss/policy": (weights * terms).sum()}

        # The terms of other objectives.
        if self.entropy_coefficient:  # else a gradient of zeros would come back
            terms = terms - self.entropy_coefficient * entropy
        if batch.reference_logprobs is not None:
            reference, policy = batch.reference_logprobs, logprobs if unfiltered is None else unfiltered
            metrics["kl/reference"] = objective.kl_divergence(policy, reference, self.kl.estimator)
            if self.kl.placement == "loss":
                sampler = {"old": old, "engine": batch.logprobs, "current": policy.detach()}
                taken = sampler[self.kl.sampled_by]
                assert taken is not None, "a divergence relative to the engine requires its logprobs"
                ratio = bounded_exp(log_ratio(batch, policy, taken))
                penalty = objective.kl_penalty(policy, reference, self.kl, ratio)
                terms = terms + self.kl.coefficient * penalty
        loss = (weights * terms).sum()
        if self.likelihood_coefficient > 0:
            assert batch.likelihood_weights is not None, "the likelihood term requires its weights"
            losses["loss/likelihood"] = -(batch.likelihood_weights * logprobs).sum()
            loss = loss + self.likelihood_coefficient * losses["loss/likelihood"]
        return objective.token_loss_output(batch, loss, losses, metrics, largest)


@dataclass(frozen=True)
class CrossEntropyLoss:
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor | None) -> LossOutput:
        loss = -(batch.weights * logprobs).sum()
        nll = -(logprobs * batch.loss_mask).sum()
        return loss_output(loss, {"loss/sft": loss, "tokens": batch.loss_mask.sum(), "nll": nll})


@dataclass(frozen=True)
class ValueLoss:
    """`s max((V - R)^2, (clip(V, old - c, old + c) - R)^2) / 2`, summed with the weights of the batch.

    As in PPO's implementation; Schulman et al. 2017 name the plain error only.
    """

    config: configs.CriticLearningConfig
    needs_entropy: bool = False

    def __call__(self, batch: PackedBatch, values: Tensor, entropy: Tensor | None) -> LossOutput:
        assert batch.values is not None, "the value loss requires the values before the step"
        assert batch.returns is not None, "the value loss requires returns"
        mask, returns, clip = batch.loss_mask, batch.returns, self.config.value_clip
        # The state in which a token is chosen is what the critic has read before it. No sequence begins with
        # a token of the mask, so nothing comes from the sequence before.
        now, old = values.roll(1), batch.values.roll(1)
        errors, clipped = (now - returns).square(), torch.zeros_like(mask)
        if clip is not None:
            bounded = (torch.minimum(torch.maximum(now, old - clip), old + clip) - returns).square()
            errors, clipped = torch.maximum(errors, bounded), bounded > errors
        loss = self.config.loss_scale * (batch.weights * errors / 2).sum()
        metrics = {
            "value": old,
            "return": returns,
            "return_squared": returns.square(),
            "error": returns - old,
            "error_squared": (returns - old).square(),
            "clip_fraction": clipped,
        }
        sums = {name: (value * mask).sum() for name, value in metrics.items()}
        return loss_output(loss, {"loss/total": loss, "tokens": mask.sum(), **sums})


def value_metrics(updates: Sequence[TrainStats]) -> dict[str, float]:
    """Metrics of a step's updates of the critic.

    The loss is the mean over updates. The values are those before the step: `critic/explained_variance` is
    `1 - Var[R - V] / Var[R]`, 1 where they were the returns, 0 where they explain no more than a constant;
    it is 0 where the returns do not vary.
    """
    sums = {name: sum(update.sums[name] for update in updates) for name in updates[0].sums}
    mean = {name: value / max(sums["tokens"], 1.0) for name, value in sums.items()}
    of_returns = mean["return_squared"] - mean["return"] ** 2
    of_errors = mean["error_squared"] - mean["error"] ** 2
    # Sums are of float32, so that a difference of this size says nothing.
    varies = of_returns > 1e-6 * mean["return_squared"]
    return {
        "critic/loss": sums["loss/total"] / len(updates),
        **{f"critic/{name}": mean[name] for name in ("value", "return", "clip_fraction")},
        "critic/explained_variance": 1 - of_errors / of_returns if varies else 0.0,
        "critic/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "critic/lr": updates[-1].lr,
        "critic/skipped_updates": float(sum(u.skipped for u in updates)),
        **{f"critic/{name}": count for name, count in guard_metrics(updates).items()},
    }
