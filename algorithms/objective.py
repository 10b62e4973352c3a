"""Parts that policy losses share: aggregation, divergence, entropy, off-policy correction, metrics.

Aggregation is a weight for the sampled tokens of each sequence, computed from counts of the complete
optimizer step. The loss is then a plain sum of `weight * token_loss`, which no split into micro-batches or
ranks changes. A micro-batch has complete sequences, and under context parallelism every rank has the logprobs
of all tokens and takes its part of the gradient (`nemorl.megatron.model`), so means over a sequence need no
communication.

Divergence: with `x = log policy - log reference` of a token that the policy sampled, KL(policy || reference)
per token is estimated (Schulman 2020, "Approximating KL divergence") by

                            gradient in a loss    its expectation           gradient's expectation in a reward
    k1 = x                  1                     0                         that of KL(policy || reference)
    k2 = x^2 / 2            x                     KL(policy || reference)   as k3, to the lowest order in x
    k3 = exp(-x) - 1 + x    1 - exp(-x)           KL(reference || policy)   vanishes for small x

k1 and k3 are unbiased, k2 and k3 have a low variance; gradients are factors of the gradient of the logprob.
In a loss the samples are given (Tang and Munos 2025, arXiv 2506.09477); in a reward the estimate multiplies
the gradients as a number. So the config refuses k1 in the loss unless `straight_through` takes the gradient
of k2 (verl: `k1+`, `k3+`), and k2 and k3 in the reward.

Correction (docs/off_policy.md): three policies have a part in a token: the engine's, which sampled it; the
trainer's before the updates of the step (old); and the current one. The ratio of the losses is current over
old. The difference between old and engine (other kernels, precision or older weights) is corrected by a
weight for the loss of each token.

    decoupled   weight of old / engine; ratio = current / old       (Hilton et al. 2021, arXiv 2110.00641)
    bypass      old := engine, so the ratio corrects both at once; masks compare current / engine

Masked tokens still count in the divisor: a mask makes a term 0 and the others no larger. Divergence and
entropy terms are neither weighted nor masked. verl removes masked tokens from the divisor, the divergence and
the entropy too: `divisor: kept`. With `normalize` the weights are divided by their mean over the step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from nemorl.config.algorithm import (
    Aggregation,
    CorrectionConfig,
    EntropyConfig,
    KLConfig,
    SequenceMaskConfig,
)
from nemorl.data.losses import LossOutput, TrainStats
from nemorl.data.packed import PackedBatch
from nemorl.rollout.versions import UNBROKEN, Lineage

OverRanks = Callable[[Tensor], Tensor]  # from values [n] of this rank to those of all data-parallel ranks
MIN_MEAN_WEIGHT = 1e-8  # below it weights are not divided by their mean (verl)
MAX_LOG_RATIO = 20.0  # beyond it a ratio carries no information and its exponential overflows in float32


def log_ratio(batch: PackedBatch, logprobs: Tensor, old: Tensor) -> Tensor:
    """`logprobs - old` [N], and 0 outside the loss mask."""
    return torch.where(batch.loss_mask, logprobs - old, torch.zeros_like(logprobs))


def bounded_exp(log: Tensor) -> Tensor:
    """The exponential of what is clamped to ±MAX_LOG_RATIO, without gradient beyond, as verl and OpenRLHF."""
    return log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class Divisor:
    """What an optimizer step has of that which enters the loss; at least 1, so that nothing divides by 0."""

    tokens: float
    sequences: int  # with any such token

    @classmethod
    def of(cls, sampled: Sequence[float]) -> Self:
        return cls(max(sum(sampled), 1), max(sum(count > 0 for count in sampled), 1))


def sequence_weights(
    sampled: Sequence[float],
    aggregation: Aggregation,
    length: int | None = None,
    divisor: Divisor | None = None,
) -> Tensor:
    """Weight of each sampled token, one per sequence: [S] float32.

    `sampled` [S] counts the tokens that enter the loss; a sequence without any has weight 0 and does not
    count as a sequence. `length` is the fixed divisor of `seq-mean-token-sum-norm` (Dr. GRPO, Liu et al.
    2025, arXiv 2503.20783). The `divisor` is the whole step's where `sampled` is a part of it.
    """
    counts = torch.tensor(sampled, dtype=torch.float64)
    whole = divisor or Divisor.of(sampled)
    match aggregation:
        case "token-mean":
            weights = torch.full_like(counts, 1 / whole.tokens)
        case "token-sum":
            weights = torch.ones_like(counts)
        case "seq-mean-token-mean":
            weights = 1 / (counts.clamp(min=1) * whole.sequences)
        case "seq-mean-token-sum":
            weights = torch.full_like(counts, 1 / whole.sequences)
        case "seq-mean-token-sum-norm":
            if length is None:
                raise ValueError(f"{aggregation} divides by a fixed length: set loss.aggregation_length")
            weights = torch.full_like(counts, 1 / (whole.sequences * length))
    return (weights * (counts > 0)).float()


def sequence_of(batch: PackedBatch) -> Tensor:
    """[N] int64: the number of each token's sequence."""
    numbers = torch.arange(batch.num_sequences, device=batch.tokens.device)
    return numbers.repeat_interleave(torch.diff(batch.cu_seqlens).long(), output_size=batch.num_tokens)


def totals(values: Tensor, batch: PackedBatch) -> Tensor:
    """[S]: the sum of `values` [N] over the loss mask of each sequence."""
    masked = torch.where(batch.loss_mask, values, torch.zeros_like(values))
    return values.new_zeros(batch.num_sequences).index_add(0, sequence_of(batch), masked)


def averages(values: Tensor, batch: PackedBatch) -> Tensor:
    """[S]: the mean of `values` [N] over the loss mask of each sequence; 0 of none."""
    return totals(values, batch) / totals(torch.ones_like(values), batch).clamp(min=1)


def sequence_means(values: Tensor, batch: PackedBatch) -> Tensor:
    """[N]: `averages` at all tokens of each sequence."""
    return averages(values, batch).index_select(0, sequence_of(batch))


def kl_divergence(
    logprobs: Tensor,
    reference: Tensor,
    estimator: Literal["k1", "k2", "k3"],
    max_log_ratio: float | None = MAX_LOG_RATIO,
) -> Tensor:
    """The estimate of each token [N]; `x` is clamped to ± the maximum, without gradient beyond."""
    x = logprobs - reference
    if max_log_ratio is not None:
        x = x.clamp(-max_log_ratio, max_log_ratio)
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return (-x).exp() - 1 + x


def kl_penalty(logprobs: Tensor, reference: Tensor, config: KLConfig, ratio: Tensor | None = None) -> Tensor:
    """What enters the loss, or is taken from the reward, for each token [N], without the coefficient.

    `max_log_ratio` clamps `x` (verl: of k3 to ±20, NeMo-RL: to ±20 or not at all), and `max_value` the
    estimate (verl clamps k3 and OpenRLHF all of them to ±10, TRL none). A clamped token has no gradient, with
    `straight_through` too (in verl's `k3+` it has).

    With `importance_weighted` the estimate is multiplied by `ratio`, of the current policy to the one that is
    taken for the sampling one, with its gradient. Of k3 the gradient is then exactly `ratio * x` times that
    of the logprob, and of k1 the same in expectation: that of the divergence, for stale samples too
    (DeepSeek-V3.2, arXiv 2512.02556; TRL's `use_bias_correction_kl`). The gradient of k2, and of
    `straight_through`, is right without it and the ratio weighs it as a constant.

    Of `sampled_by` engine or current the ratio always has its gradient, and `max_value` clamps the product:
    NeMo-RL's term, whose gradient for a ratio of 1 is that of the estimate plus the estimate times that of
    the logprob.
    """
    largest = config.max_log_ratio
    estimate = kl_divergence(logprobs, reference, config.estimator, largest)
    if config.straight_through:
        pull = kl_divergence(logprobs, reference, "k2", largest)
        estimate = estimate.detach() + (pull - pull.detach())
    if config.importance_weighted and config.sampled_by != "old":
        assert ratio is not None, "a divergence weighted by the ratio requires one"
        if largest is not None:
            ratio = torch.where((logprobs - reference).abs() <= largest, ratio, ratio.detach())
        estimate = estimate * ratio
    if config.max_value is not None:
        estimate = estimate.clamp(-config.max_value, config.max_value)
    if not config.importance_weighted or config.sampled_by != "old":
        return estimate
    assert ratio is not None, "a divergence weighted by the ratio requires one"
    unweighted_is_right = config.estimator == "k2" or config.straight_through
    return estimate * (ratio.detach() if unweighted_is_right else ratio)


Metrics = dict[str, Tensor]  # by name; [N] where each token has a value


@torch.no_grad()
def engine_gap(batch: PackedBatch, logprobs: Tensor) -> tuple[Metrics, Metrics]:
    """Means over tokens, with k1 and k3 of KL(engine || trainer before the update), and maxima."""
    if batch.logprobs is None:
        return {}, {}
    gap = (logprobs - batch.logprobs).abs()
    trainer = logprobs if batch.old_logprobs is None else batch.old_logprobs
    k1, k3 = (kl_divergence(batch.logprobs, trainer, kind) for kind in ("k1", "k3"))
    return {"logprob_gap/mean": gap, "logprob_gap/k1": k1, "logprob_gap/k3": k3}, {"logprob_gap/max": gap}


@dataclass(frozen=True)
class Ages:
    """Which ages the tokens of a step may have: updates between the weights that sampled and the trained."""

    version: int  # of the weights before the step
    oldest: int  # age; older tokens count as this old
    lineage: Lineage = UNBROKEN

    def metrics(self, batch: PackedBatch, gap: Tensor | None, weight: Tensor | None) -> Metrics:
        """Of each age its tokens, the gap to the trainer's logprobs and the weights of the correction.

        `finish_metrics` makes of them `staleness/share_k`, `staleness/gap_k` and `staleness/ess_k`.
        """
        age, metrics = self._of(batch), {}
        for k in range(self.oldest + 1):
            of_age = (age == k).float()
            metrics[f"age_{k}/share"] = of_age
            if gap is not None:
                metrics[f"age_{k}/gap"] = of_age * gap
            if weight is not None:
                metrics[f"age_{k}/weight"], metrics[f"age_{k}/square"] = of_age * weight, of_age * weight**2
        return metrics

    def largest(self, batch: PackedBatch, gap: Tensor) -> Metrics:
        """The gap to the trainer's logprobs at the tokens of each age, and 0 at the others."""
        age = self._of(batch)
        return {f"staleness/gap_max_{k}": (age == k) * gap for k in range(self.oldest + 1)}

    def _of(self, batch: PackedBatch) -> Tensor:
        """`Lineage.age` of each token [N], without a look at the values."""
        assert batch.versions is not None, "ages require the versions that sampled"
        ages = torch.zeros_like(batch.versions)
        for first, offset, fork in self.lineage.pieces():
            steps = batch.versions + offset
            shared = steps if fork is None else steps.clamp(max=fork)
            of_piece = self.lineage.step(self.version) + steps - 2 * shared
            ages = torch.where(batch.versions >= first, of_piece, ages)
        return ages.clamp(max=self.oldest)


def _of_ages(means: Mapping[str, float]) -> dict[str, float]:
    """Means over all tokens, as `Ages.metrics` gives them, to means over those of each age."""
    found = {}
    for name, share in means.items():
        age, _, kind = name.partition("/")
        if kind != "share" or not age.startswith("age_"):
            continue
        k = age.removeprefix("age_")
        found[f"staleness/share_{k}"] = share
        if share and f"{age}/gap" in means:
            found[f"staleness/gap_{k}"] = means[f"{age}/gap"] / share
        if share and (square := means.get(f"{age}/square", 0.0)):
            found[f"staleness/ess_{k}"] = means[f"{age}/weight"] ** 2 / (share * square)
    return found


def loss_output(
    loss: Tensor, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None
) -> LossOutput:
    metrics = ({name: v.detach().float() for name, v in each.items()} for each in (sums, maxima or {}))
    return LossOutput(loss, *metrics)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and its metrics; values outside the loss mask are ignored."""

    loss: Tensor  # [N] float32, differentiable
    ratio: Tensor | None = None  # [N] current policy over old one, as the loss takes it
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # [N] each: reported as means over tokens


def token_loss_output(
    batch: PackedBatch, loss: Tensor, losses: Metrics, metrics: Metrics, largest: Metrics
) -> LossOutput:
    """The output of a loss per token: metrics are summed over the loss mask, or the largest there counts."""
    mask = batch.loss_mask
    sums = {name: (value.detach() * mask).sum() for name, value in metrics.items()}
    maxima = {name: (value.detach() * mask).max() for name, value in largest.items()}
    return loss_output(loss, {"loss/total": loss, **losses, "tokens": mask.sum(), **sums}, maxima)


def means_over(count: str, sums: Mapping[str, float]) -> dict[str, float]:
    """Losses as they are; the rest over the sum named `count`, which is left out."""
    number = max(sums[count], 1.0)
    return {k: v if k.startswith("loss/") else v / number for k, v in sums.items() if k != count}


def finish_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics of one optimizer step from global sums: losses stay sums, the rest are means over tokens.

    Of weights `x/mean` and `x/square` become `x/ess`, the effective sample size as a share of the tokens:
    `(sum of w)^2 / (n sum of w^2)`, 1 for equal weights.
    """
    means = means_over("tokens", sums)
    of_ages = _of_ages(means)
    means = {name: value for name, value in means.items() if not name.startswith("age_")} | of_ages
    for square in [name for name in means if name.endswith("/square")]:
        of, mean_square = square.removesuffix("square"), means.pop(square)
        means[f"{of}ess"] = means[f"{of}mean"] ** 2 / mean_square if mean_square > 0 else 0.0
    return {**means, **maxima}


def metrics_of_updates(updates: Sequence[TrainStats]) -> dict[str, float]:
    """Metrics of a step: means over its updates, and maxima."""
    of_updates = [finish_metrics(u.sums, u.maxima) for u in updates]
    # Compared with the policy that sampled, before later updates change the weights.
    compared = ("logprob_gap/", "staleness/")
    first = {key: value for key, value in of_updates[0].items() if key.startswith(compared)}
    averaged = [key for key in of_updates[0] if key not in first]
    metrics = {key: sum(m[key] for m in of_updates) / len(of_updates) for key in averaged}
    metrics |= {key: max(u.maxima[key] for u in updates) for key in updates[0].maxima}
    return metrics | first


@dataclass
class EntropyWeight:
    """Fixed, or after Skywork-OR1's adaptive control (He et al. 2025, arXiv 2505.22312).

    After a step of mean entropy e per token the coefficient c becomes `c + change` if e is below the target,
    `c - change` if it is above, and stays between 0 and its limit. The bonus counts only while the entropy
    is not above the target. The paper takes the entropy of a step's samples before its updates; here it is
    that during the updates of the step before, which costs no pass of its own.
    """

    config: EntropyConfig
    coefficient: float
    entropy: float | None = None  # of the step before; None before the first

    @classmethod
    def of(
        cls, config: EntropyConfig, coefficient: float | None = None, entropy: float | None = None
    ) -> Self:
        """The weight of the first step, or of a resumed run from the values of its checkpoint."""
        if config.name == "bonus":
            return cls(config, config.coefficient)
        return cls(config, config.initial if coefficient is None else coefficient, entropy)

    @property
    def weight(self) -> float:  # of the step to come
        if self.config.name == "bonus" or self.entropy is None:
            return self.coefficient
        return self.coefficient if self.entropy <= self.config.target else 0.0

    def update(self, entropy: float) -> dict[str, float]:
        """Take the mean entropy of a step; return the metric of the coefficient that the step used."""
        if self.config.name == "bonus":
            return {}
        used = self.weight
        if not math.isfinite(entropy):  # of an update that was skipped
            return {"entropy/coefficient": used}
        if entropy != self.config.target:
            change = self.config.change if entropy < self.config.target else -self.config.change
            self.coefficient = min(max(self.coefficient + change, 0.0), self.config.max_coefficient)
        self.entropy = entropy
        return {"entropy/coefficient": used}


@dataclass(frozen=True)
class Corrected:
    weight: Tensor  # [N] float32 of each token in the policy's loss, without gradient
    metrics: Metrics  # reported as means over tokens
    largest: Metrics  # reported as maxima


@torch.no_grad()
def correct(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, config: CorrectionConfig, has_ratio: bool = True
) -> Corrected | None:
    """Weights for a loss of `logprobs` [N] whose ratio, if it `has_ratio`, is taken against `old` [N].

    A loss whose ratio is current over engine already (bypass) takes from the weight only what is left out.
    None if the config neither weighs nor leaves out.
    """
    masks = config.sequence_mask, config.off_policy_threshold
    if not config.weighs and masks == (None, None):
        return None
    assert batch.logprobs is not None, "a correction requires the engine's logprobs"
    bypass = config.form == "bypass"
    token_log = log_ratio(batch, logprobs if bypass else old, batch.logprobs)
    weight = torch.ones_like(token_log)
    metrics, largest = Metrics(), Metrics()
    if config.name != "none":
        level_log = token_log
        if config.level == "sequence":
            level_log = totals(token_log, batch).index_select(0, sequence_of(batch))
        elif config.level == "geometric":
            level_log = sequence_means(token_log, batch)
        ratio = bounded_exp(level_log)
        # tis: Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
        # training". mis: Liu et al. 2025, "When speed kills stability". icepop: arXiv 2510.18855.
        outside = (ratio < config.low) | (ratio > config.high)
        weight = ratio * ~outside if config.bounds_leave_out else ratio.clamp(config.low, config.high)
        if bypass and has_ratio:
            weight = (weight > 0).float()
        metrics = {"correction/ratio_mean": ratio, config.weight_metric: outside}
        largest = {"correction/ratio_max": ratio}
    if config.sequence_mask is not None:
        out = _left_out(token_log, batch, config.sequence_mask)
        weight = weight * ~out
        metrics["correction/masked_sequences"] = out
    if config.off_policy_threshold is not None:
        # DeepSeek-V3.2's sequence mask (arXiv 2512.02556, equation 9): tokens of negative advantage in
        # sequences that became unlikelier than this per token, by the engine's own logprobs.
        assert batch.advantages is not None, "the off-policy mask requires advantages"
        drift = sequence_means(log_ratio(batch, batch.logprobs, logprobs), batch)
        out = (batch.advantages < 0) & (drift > config.off_policy_threshold)
        weight = weight * ~out
        metrics["correction/masked_off_policy"] = out
    metrics |= {"correction/mean": weight, "correction/square": weight.square()}
    return Corrected(weight, metrics, largest)


def _left_out(token_log: Tensor, batch: PackedBatch, mask: SequenceMaskConfig) -> Tensor:
    """[N] bool: tokens of sequences that are left out by the logarithms of their ratios [N]."""
    mean = bounded_exp(averages(token_log, batch))
    out = torch.zeros_like(mean, dtype=torch.bool)
    if mask.low is not None:
        out |= mean < mask.low
    if mask.high is not None:
        out |= mean > mask.high
    if mask.max_difference is not None:
        out |= totals((token_log.abs() > mask.max_difference).float(), batch) > 0
    if mask.max_mean_factor is not None:
        out |= averages(bounded_exp(token_log.abs()), batch) > mask.max_mean_factor
    return out.index_select(0, sequence_of(batch))


def weights_before(batch: PackedBatch, config: CorrectionConfig) -> Tensor:
    """[N] weights by bounds and sequence mask with the old policy, known before the updates of a step."""
    assert batch.old_logprobs is not None, "weights before the updates require old logprobs"
    of_old = config.model_copy(update={"off_policy_threshold": None})
    corrected = correct(batch, batch.old_logprobs, batch.old_logprobs, of_old, has_ratio=False)
    return torch.ones_like(batch.old_logprobs) if corrected is None else corrected.weight


def kept(batch: PackedBatch, config: CorrectionConfig) -> Tensor:
    """[N] bool: sampled tokens that bounds and sequence mask keep."""
    return batch.loss_mask & (weights_before(batch, config) > 0)


def mean_weight(batch: PackedBatch, config: CorrectionConfig, over_ranks: OverRanks) -> float:
    """Mean of the weights before the updates, of a step's sampled tokens, or by level of its sequences.

    Also of those that the sequence mask leaves out; `batch` is this rank's part. 1 where all weights are 0.
    verl: `rollout_is_batch_normalize`.
    """
    weights = weights_before(batch, config.model_copy(update={"sequence_mask": None})).double()
    counts = totals(torch.ones_like(weights), batch)
    if getattr(config, "level", "token") == "token":
        sums = totals(weights, batch)
    else:
        sums, counts = averages(weights, batch), (counts > 0).double()
    total, count = float(over_ranks(sums).sum()), float(over_ranks(counts).sum())
    mean = total / max(count, 1)
    return mean if mean > MIN_MEAN_WEIGHT else 1.0
