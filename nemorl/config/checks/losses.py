"""Settings of the policy's loss, the divergence, the entropy and the correction that belong together.

What estimators of advantages need.

What can be filtered, and by what.
"""

import difflib
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
    OnlineBase,
    OnlineConfig,
    TruncatedCorrectionConfig,
)
from nemorl.config.algorithm.advantages import (
    GdpoAdvantageConfig,
    GpgAdvantageConfig,
    GroupAdvantageConfig,
    GroupThenBatchAdvantageConfig,
    OptimalBaselineAdvantageConfig,
    PassAtKAdvantageConfig,
    ReinforceAdvantageConfig,
    TurnAdvantageConfig,
)
from nemorl.config.algorithm.presets import PRESETS
from nemorl.config.environment import (
    CalculatorEnvConfig,
    EnvConfig,
    MathEnvConfig,
    ReasoningGymEnvConfig,
    RewardConfig,
    SingleTurnEnvConfig,
)
from nemorl.errors import Problem

from .metrics import reward_names

_IN_LOSS = ("straight_through", "importance_weighted")


def divergence_has_a_gradient(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """k1 in the loss pushes nowhere: its gradient is 0 in expectation. In the reward others push wrongly."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.kl.coefficient == 0:
        return
    kl = algorithm.kl
    has_gradient = kl.straight_through or kl.importance_weighted
    if kl.placement == "loss" and kl.estimator == "k1" and not has_gradient:
        fix = (
            "in the loss k1 has no gradient but noise: take k2 or k3, set algorithm.kl.straight_through to "
            "true, or take algorithm.kl.placement `reward`"
        )
        yield Problem("algorithm.kl.estimator", kl.estimator, fix)
    if kl.placement == "reward" and kl.estimator != "k1":
        fix = (
            "in the reward only k1 pulls towards the reference, others have next to no gradient near it: "
            "take k1, or algorithm.kl.placement `loss`"
        )
        yield Problem("algorithm.kl.estimator", kl.estimator, fix)
    if kl.straight_through and kl.estimator == "k2":
        fix = "k2 has this gradient already: remove it, or take the value of k1 or k3"
        yield Problem("algorithm.kl.straight_through", True, fix)


def divergence_settings_are_used(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """How the divergence enters the loss says nothing where it does not."""
    if not isinstance(algorithm, OnlineConfig):
        return
    kl = algorithm.kl
    of_preset = PRESETS[algorithm.name].settings.get("kl", {})
    for name in ("estimator", *_IN_LOSS, "max_value"):
        value = getattr(kl, name)
        if value == of_preset.get(name, KLConfig.model_fields[name].default):
            continue
        if kl.coefficient == 0:
            fix = "algorithm.kl.coefficient is 0, so nothing is estimated: raise it, or remove this"
            yield Problem(f"algorithm.kl.{name}", value, fix)
        elif kl.placement == "reward" and name in _IN_LOSS:
            fix = "a reward has no gradient: take algorithm.kl.placement `loss`, or remove this"
            yield Problem(f"algorithm.kl.{name}", value, fix)


def loss_can_act(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Losses by covariance: bounds in order, and updates after the first where only these feel anything."""
    if not isinstance(algorithm, OnlineConfig):
        return
    loss = algorithm.loss
    if isinstance(loss, ClipCovLossConfig) and loss.covariance_low >= loss.covariance_high:
        fix = f"it must be less than algorithm.loss.covariance_high, {loss.covariance_high:g}"
        yield Problem("algorithm.loss.covariance_low", loss.covariance_low, fix)
    held = isinstance(loss, KlCovLossConfig) and algorithm.correction.form == "decoupled"
    if held and algorithm.updates_per_step == 1:
        fix = (
            "kl_cov holds tokens near the policy before the first update of a step, which a single update "
            "does not leave: take 2 or more"
        )
        yield Problem("algorithm.num_minibatches", algorithm.num_minibatches, fix)


def loss_fits_the_advantage(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """A loss of whole sequences wants one advantage for each."""
    if not isinstance(algorithm, OnlineConfig) or not algorithm.loss.whole_sequences:
        return
    if algorithm.estimates_tokens or isinstance(algorithm.advantage, TurnAdvantageConfig):
        fix = (
            f"its formula has one advantage for a sequence, and `{algorithm.advantage.name}` gives several: "
            "take `gspo_token`, or a loss of tokens such as `clip`"
        )
        yield Problem("algorithm.loss.name", algorithm.loss.name, fix)


def likelihood_settings_are_used(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Which samples are imitated says nothing where none is."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.likelihood.coefficient > 0:
        return
    if algorithm.likelihood.min_reward != LikelihoodConfig().min_reward:
        fix = "algorithm.likelihood.coefficient is 0, so nothing is imitated: raise it, or remove this"
        yield Problem("algorithm.likelihood.min_reward", algorithm.likelihood.min_reward, fix)


def entropy_settings_agree(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The first weight is one that the weight may have."""
    if not isinstance(algorithm, OnlineConfig):
        return
    entropy = algorithm.entropy
    if isinstance(entropy, AdaptiveEntropyConfig) and entropy.initial > entropy.max_coefficient:
        fix = f"it must be at most algorithm.entropy.max_coefficient, {entropy.max_coefficient:g}"
        yield Problem("algorithm.entropy.initial", entropy.initial, fix)


def correction_has_bounds(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """A lower bound is below the upper one, and 1, what engine and trainer agree on, lies between."""
    if not isinstance(algorithm, OnlineConfig) or isinstance(algorithm.correction, NoCorrectionConfig):
        return
    correction = algorithm.correction
    low = 0.0 if isinstance(correction, MaskedCorrectionConfig) else correction.low
    if low >= correction.high:
        fix = f"it must be less than algorithm.correction.high, {correction.high:g}"
        yield Problem("algorithm.correction.low", low, fix)
    elif low > 1:
        yield Problem("algorithm.correction.low", low, "it is at most 1, the weight of a token seen alike")
    elif correction.high < 1:
        fix = "it is at least 1, the weight of a token seen alike"
        yield Problem("algorithm.correction.high", correction.high, fix)


def correction_fits_the_loss(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """In the bypass form a ratio corrects already; without one there must be something else to do."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.correction.form == "decoupled":
        return
    correction, loss = algorithm.correction, algorithm.loss
    if isinstance(correction, TruncatedCorrectionConfig) and loss.has_ratio:
        fix = (
            f"the bypass form takes the ratio of `{loss.name}` against the engine, which weighs each token "
            "already: take `mis` or `icepop`, which then only leave out, or algorithm.correction.form "
            "`decoupled`"
        )
        yield Problem("algorithm.correction.name", correction.name, fix)
    masks = correction.sequence_mask is not None or correction.off_policy_threshold is not None
    if isinstance(correction, NoCorrectionConfig) and not loss.has_ratio and not masks:
        fix = f"`{loss.name}` has no ratio, so nothing is taken against the engine: remove it, or take `tis`"
        yield Problem("algorithm.correction.form", correction.form, fix)


def divisor_differs(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """What is left out can leave the divisor where it is known before an update, and where there is any."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.correction.divisor == "all":
        return
    correction, field = algorithm.correction, "algorithm.correction.divisor"
    if correction.form == "bypass":
        fix = (
            "in the bypass form an update finds only by its own logprobs what it leaves out: take `all`, or "
            "algorithm.correction.form `decoupled`"
        )
        yield Problem(field, "kept", fix)
    elif not correction.leaves_out:
        fix = (
            f"`{correction.name}` keeps every token: remove this, take `mis` or `icepop`, or give "
            "algorithm.correction.sequence_mask"
        )
        yield Problem(field, "kept", fix)


_WITHIN_A_GROUP = (
    GroupAdvantageConfig,
    GroupThenBatchAdvantageConfig,
    OptimalBaselineAdvantageConfig,
    GpgAdvantageConfig,
    GdpoAdvantageConfig,
    PassAtKAdvantageConfig,
    TurnAdvantageConfig,
)
_SCALED_WHERE_ASKED = (GroupAdvantageConfig, GpgAdvantageConfig, TurnAdvantageConfig)
_ONE_TURN = (SingleTurnEnvConfig, MathEnvConfig, ReasoningGymEnvConfig)


def groups_can_be_compared(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The baseline of a trajectory is made from the others of its task."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.num_generations_per_prompt > 1:
        return
    if isinstance(algorithm.advantage, _WITHIN_A_GROUP):
        yield Problem(
            "algorithm.num_generations_per_prompt",
            1,
            "a trajectory alone in its group has advantage 0 and nothing is learnt: take 2 or more, or "
            "algorithm.advantage `reinforce`, which compares with the batch or takes the reward as it is",
        )


def advantage_settings_are_used(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """How to scale says nothing where nothing is scaled."""
    if not isinstance(algorithm, OnlineConfig):
        return
    advantage, field = algorithm.advantage, "algorithm.advantage"
    if isinstance(advantage, _SCALED_WHERE_ASKED) and not advantage.normalize and _set(advantage, "epsilon"):
        fix = f"{field}.normalize is false, so nothing is divided: set it to true, or remove this"
        yield Problem(f"{field}.epsilon", advantage.epsilon, fix)
    if isinstance(advantage, ReinforceAdvantageConfig):
        how = advantage.normalization
        if how != "whiten" and _set(advantage, "epsilon"):
            fix = f"{field}.normalization is `{how}`, so nothing is divided: take `whiten`, or remove this"
            yield Problem(f"{field}.epsilon", advantage.epsilon, fix)
        if how == "none" and _set(advantage, "over"):
            fix = f"{field}.normalization is `none`, so no mean is taken: take `mean`, or remove this"
            yield Problem(f"{field}.over", advantage.over, fix)


def passing_sets_differ(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """A group has several sets of k only where it has more than k members."""
    if not isinstance(algorithm, OnlineConfig) or not isinstance(algorithm.advantage, PassAtKAdvantageConfig):
        return
    k, members = algorithm.advantage.k, algorithm.num_generations_per_prompt
    if 1 < members <= k:
        fix = (
            f"all sets of {k} are paid alike in a group of {members} trajectories: take a smaller k, or "
            "raise algorithm.num_generations_per_prompt"
        )
        yield Problem("algorithm.advantage.k", k, fix)


def rewards_to_decouple(
    algorithm: AlgorithmConfig, env: EnvConfig, rewards: tuple[RewardConfig, ...]
) -> Iterator[Problem]:
    """GDPO is about several rewards."""
    if not isinstance(algorithm, OnlineConfig) or not isinstance(algorithm.advantage, GdpoAdvantageConfig):
        return
    names = list(reward_names(env, rewards))
    if len(names) == 1:
        fix = f"it keeps several rewards apart, and there is only `{names[0]}`: add one, or take `group`"
        yield Problem("algorithm.advantage.name", "gdpo", fix)


def turns_to_compare(algorithm: AlgorithmConfig, env: EnvConfig) -> Iterator[Problem]:
    """Advantages of turns are for conversations with several."""
    if not isinstance(algorithm, OnlineConfig) or not isinstance(algorithm.advantage, TurnAdvantageConfig):
        return
    if isinstance(env, CalculatorEnvConfig) and env.call_weight == 0:
        fix = "no turn before the last one is paid for: give env.call_weight, or take the advantage `group`"
        yield Problem("algorithm.advantage.name", "turn", fix)
    if isinstance(env, _ONE_TURN):
        fix = f"conversations in `{env.name}` have one turn: take another env, or the advantage `group`"
        yield Problem("algorithm.advantage.name", "turn", fix)


def divergence_reaches_advantages(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """What is taken from the sum of rewards is lost on who does not look at the sum."""
    if not isinstance(algorithm, OnlineConfig) or not algorithm.kl_in_reward:
        return
    if isinstance(algorithm.advantage, GdpoAdvantageConfig | PassAtKAdvantageConfig):
        why = (
            "compares each reward by itself"
            if isinstance(algorithm.advantage, GdpoAdvantageConfig)
            else "counts who passes"
        )
        fix = f"the advantage `{algorithm.advantage.name}` {why}: set it to loss, or take another advantage"
        yield Problem("algorithm.kl.placement", "reward", fix)
    if algorithm.filters.drop_truncated and not algorithm.estimates_tokens:
        fix = (
            "the divergence of what is left out is not computed, so it would be missing in the rewards that "
            "the group is compared with: set algorithm.kl.placement to loss, or remove this"
        )
        yield Problem("algorithm.filters.drop_truncated", True, fix)


def _set(
    advantage: GroupAdvantageConfig | GpgAdvantageConfig | TurnAdvantageConfig | ReinforceAdvantageConfig,
    name: str,
) -> bool:
    return bool(getattr(advantage, name) != type(advantage).model_fields[name].default)


_DROPPING = "drop_equal_rewards, min_mean_reward or max_mean_reward"


def filters_have_something_to_do(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Settings of dropping groups say nothing where none is dropped."""
    if not isinstance(algorithm, OnlineBase):
        return
    filters = algorithm.filters
    if filters.refill is not None and not filters.drops_groups:
        fix = f"no group is dropped that another could replace: set one of {_DROPPING}, or remove this"
        yield Problem("algorithm.filters.refill", filters.refill.model_dump(), fix)
    if filters.reward is not None and not filters.drops_groups and filters.keep_most_varied is None:
        fix = f"no group is dropped by it: set one of {_DROPPING} or keep_most_varied, or remove this"
        yield Problem("algorithm.filters.reward", filters.reward, fix)
    low, high = filters.min_mean_reward, filters.max_mean_reward
    if low is not None and high is not None and low > high:
        fix = f"algorithm.filters.max_mean_reward is {high:g}, so no group would be left: take less than that"
        yield Problem("algorithm.filters.min_mean_reward", low, fix)


def groups_can_vary(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The rewards of a group of one are all equal."""
    if not isinstance(algorithm, OnlineBase) or algorithm.num_generations_per_prompt > 1:
        return
    filters = algorithm.filters
    fix = "in a group of one no reward differs: raise algorithm.num_generations_per_prompt, or remove this"
    if filters.drop_equal_rewards:
        yield Problem("algorithm.filters.drop_equal_rewards", True, fix)
    if filters.keep_most_varied is not None:
        yield Problem("algorithm.filters.keep_most_varied", filters.keep_most_varied, fix)


def filtered_reward_is_paid(
    algorithm: AlgorithmConfig, env: EnvConfig, rewards: tuple[RewardConfig, ...]
) -> Iterator[Problem]:
    """The reward by which groups are dropped is one of those that are paid."""
    if not isinstance(algorithm, OnlineBase) or algorithm.filters.reward is None:
        return
    name, known = algorithm.filters.reward, sorted(reward_names(env, rewards))
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known) or 'no rewards'}"
        yield Problem("algorithm.filters.reward", name, f"no reward is called so: {fix}")
