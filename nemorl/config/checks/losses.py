"""Settings of the policy's loss, the divergence, the entropy and the correction that belong together."""

from collections.abc import Iterator

from nemorl.config.algorithm import (
    AdaptiveEntropyConfig,
    AlgorithmConfig,
    ClipCovLossConfig,
    KLConfig,
    KlCovLossConfig,
    LikelihoodConfig,
    MaskedCorrectionConfig,
    NoCorrectionConfig,
    OnlineConfig,
    TruncatedCorrectionConfig,
)
from nemorl.config.algorithm.advantages import TurnAdvantageConfig
from nemorl.config.algorithm.presets import presets
from nemorl.errors import Violation

_IN_LOSS = ("straight_through", "importance_weighted")


def divergence_has_a_gradient(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """k1 in the loss pushes nowhere: its gradient is 0 in expectation. In the reward others push wrongly."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.kl.coefficient == 0:
        return
    kl = algorithm.kl
    has_gradient = kl.straight_through or kl.importance_weighted
    if kl.placement == "loss" and kl.estimator == "k1" and not has_gradient:
        mend = (
            "in the loss k1 has no gradient but noise: take k2 or k3, set algorithm.kl.straight_through to "
            "true, or take algorithm.kl.placement `reward`"
        )
        yield Violation("algorithm.kl.estimator", kl.estimator, mend)
    if kl.placement == "reward" and kl.estimator != "k1":
        mend = (
            "in the reward only k1 pulls towards the reference, others have next to no gradient near it: "
            "take k1, or algorithm.kl.placement `loss`"
        )
        yield Violation("algorithm.kl.estimator", kl.estimator, mend)
    if kl.straight_through and kl.estimator == "k2":
        mend = "k2 has this gradient already: remove it, or take the value of k1 or k3"
        yield Violation("algorithm.kl.straight_through", True, mend)


def divergence_settings_are_used(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """How the divergence enters the loss says nothing where it does not."""
    if not isinstance(algorithm, OnlineConfig):
        return
    kl = algorithm.kl
    of_preset = presets()[algorithm.name].settings.get("kl", {})
    for name in ("estimator", *_IN_LOSS, "max_value"):
        value = getattr(kl, name)
        if value == of_preset.get(name, KLConfig.model_fields[name].default):
            continue
        if kl.coefficient == 0:
            mend = "algorithm.kl.coefficient is 0, so nothing is estimated: raise it, or remove this"
            yield Violation(f"algorithm.kl.{name}", value, mend)
        elif kl.placement == "reward" and name in _IN_LOSS:
            mend = "a reward has no gradient: take algorithm.kl.placement `loss`, or remove this"
            yield Violation(f"algorithm.kl.{name}", value, mend)


def loss_can_act(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Losses by covariance: bounds in order, and updates after the first where only these feel anything."""
    if not isinstance(algorithm, OnlineConfig):
        return
    loss = algorithm.loss
    if isinstance(loss, ClipCovLossConfig) and loss.covariance_low >= loss.covariance_high:
        mend = f"it must be less than algorithm.loss.covariance_high, {loss.covariance_high:g}"
        yield Violation("algorithm.loss.covariance_low", loss.covariance_low, mend)
    held = isinstance(loss, KlCovLossConfig) and algorithm.correction.form == "decoupled"
    if held and algorithm.updates_per_step == 1:
        mend = (
            "kl_cov holds tokens near the policy before the first update of a step, which a single update "
            "does not leave: take 2 or more"
        )
        yield Violation("algorithm.num_minibatches", algorithm.num_minibatches, mend)


def loss_fits_the_advantage(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """A loss of whole sequences wants one advantage for each."""
    if not isinstance(algorithm, OnlineConfig) or not algorithm.loss.whole_sequences:
        return
    if algorithm.estimates_tokens or isinstance(algorithm.advantage, TurnAdvantageConfig):
        mend = (
            f"its formula has one advantage for a sequence, and `{algorithm.advantage.name}` gives several: "
            "take `gspo_token`, or a loss of tokens such as `clip`"
        )
        yield Violation("algorithm.loss.name", algorithm.loss.name, mend)


def likelihood_settings_are_used(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Which samples are imitated says nothing where none is."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.likelihood.coefficient > 0:
        return
    if algorithm.likelihood.min_reward != LikelihoodConfig().min_reward:
        mend = "algorithm.likelihood.coefficient is 0, so nothing is imitated: raise it, or remove this"
        yield Violation("algorithm.likelihood.min_reward", algorithm.likelihood.min_reward, mend)


def entropy_settings_agree(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """The first weight is one that the weight may have."""
    if not isinstance(algorithm, OnlineConfig):
        return
    entropy = algorithm.entropy
    if isinstance(entropy, AdaptiveEntropyConfig) and entropy.initial > entropy.max_coefficient:
        mend = f"it must be at most algorithm.entropy.max_coefficient, {entropy.max_coefficient:g}"
        yield Violation("algorithm.entropy.initial", entropy.initial, mend)


def correction_has_bounds(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """A lower bound is below the upper one, and 1, what engine and trainer agree on, lies between."""
    if not isinstance(algorithm, OnlineConfig) or isinstance(algorithm.correction, NoCorrectionConfig):
        return
    correction = algorithm.correction
    low = 0.0 if isinstance(correction, MaskedCorrectionConfig) else correction.low
    if low >= correction.high:
        mend = f"it must be less than algorithm.correction.high, {correction.high:g}"
        yield Violation("algorithm.correction.low", low, mend)
    elif low > 1:
        yield Violation("algorithm.correction.low", low, "it is at most 1, the weight of a token seen alike")
    elif correction.high < 1:
        mend = "it is at least 1, the weight of a token seen alike"
        yield Violation("algorithm.correction.high", correction.high, mend)


def correction_fits_the_loss(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """In the bypass form a ratio corrects already; without one there must be something else to do."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.correction.form == "decoupled":
        return
    correction, loss = algorithm.correction, algorithm.loss
    if isinstance(correction, TruncatedCorrectionConfig) and loss.has_ratio:
        mend = (
            f"the bypass form takes the ratio of `{loss.name}` against the engine, which weighs each token "
            "already: take `mis` or `icepop`, which then only leave out, or algorithm.correction.form "
            "`decoupled`"
        )
        yield Violation("algorithm.correction.name", correction.name, mend)
    masks = correction.sequence_mask is not None or correction.off_policy_threshold is not None
    if isinstance(correction, NoCorrectionConfig) and not loss.has_ratio and not masks:
        mend = f"`{loss.name}` has no ratio, so nothing is taken against the engine: remove it, or take `tis`"
        yield Violation("algorithm.correction.form", correction.form, mend)


def divisor_differs(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """What is left out can leave the divisor where it is known before an update, and where there is any."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.correction.divisor == "all":
        return
    correction, field = algorithm.correction, "algorithm.correction.divisor"
    if correction.form == "bypass":
        mend = (
            "in the bypass form an update finds only by its own logprobs what it leaves out: take `all`, or "
            "algorithm.correction.form `decoupled`"
        )
        yield Violation(field, "kept", mend)
    elif not correction.leaves_out:
        mend = (
            f"`{correction.name}` keeps every token: remove this, take `mis` or `icepop`, or give "
            "algorithm.correction.sequence_mask"
        )
        yield Violation(field, "kept", mend)
