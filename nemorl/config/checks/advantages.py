"""What estimators of advantages need."""

from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig, OnlineConfig
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
from nemorl.config.env import (
    CalculatorEnvConfig,
    EnvConfig,
    MathEnvConfig,
    ReasoningGymEnvConfig,
    SingleTurnEnvConfig,
)
from nemorl.config.environment import RewardConfig
from nemorl.errors import Violation

from .metrics import reward_names

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


def groups_can_be_compared(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """The baseline of a trajectory is made from the others of its task."""
    if not isinstance(algorithm, OnlineConfig) or algorithm.num_generations_per_prompt > 1:
        return
    if isinstance(algorithm.advantage, _WITHIN_A_GROUP):
        yield Violation(
            "algorithm.num_generations_per_prompt",
            1,
            "a trajectory alone in its group has advantage 0 and nothing is learnt: take 2 or more, or "
            "algorithm.advantage `reinforce`, which compares with the batch or takes the reward as it is",
        )


def advantage_settings_are_used(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """How to scale says nothing where nothing is scaled."""
    if not isinstance(algorithm, OnlineConfig):
        return
    advantage, field = algorithm.advantage, "algorithm.advantage"
    if isinstance(advantage, _SCALED_WHERE_ASKED) and not advantage.normalize and _set(advantage, "epsilon"):
        mend = f"{field}.normalize is false, so nothing is divided: set it to true, or remove this"
        yield Violation(f"{field}.epsilon", advantage.epsilon, mend)
    if isinstance(advantage, ReinforceAdvantageConfig):
        how = advantage.normalization
        if how != "whiten" and _set(advantage, "epsilon"):
            mend = f"{field}.normalization is `{how}`, so nothing is divided: take `whiten`, or remove this"
            yield Violation(f"{field}.epsilon", advantage.epsilon, mend)
        if how == "none" and _set(advantage, "over"):
            mend = f"{field}.normalization is `none`, so no mean is taken: take `mean`, or remove this"
            yield Violation(f"{field}.over", advantage.over, mend)


def passing_sets_differ(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """A group has several sets of k only where it has more than k members."""
    if not isinstance(algorithm, OnlineConfig) or not isinstance(algorithm.advantage, PassAtKAdvantageConfig):
        return
    k, members = algorithm.advantage.k, algorithm.num_generations_per_prompt
    if 1 < members <= k:
        mend = (
            f"all sets of {k} are paid alike in a group of {members} trajectories: take a smaller k, or "
            "raise algorithm.num_generations_per_prompt"
        )
        yield Violation("algorithm.advantage.k", k, mend)


def rewards_to_decouple(
    algorithm: AlgorithmConfig, env: EnvConfig, rewards: tuple[RewardConfig, ...]
) -> Iterator[Violation]:
    """GDPO is about several rewards."""
    if not isinstance(algorithm, OnlineConfig) or not isinstance(algorithm.advantage, GdpoAdvantageConfig):
        return
    names = list(reward_names(env, rewards))
    if len(names) == 1:
        mend = f"it keeps several rewards apart, and there is only `{names[0]}`: add one, or take `group`"
        yield Violation("algorithm.advantage.name", "gdpo", mend)


def turns_to_compare(algorithm: AlgorithmConfig, env: EnvConfig) -> Iterator[Violation]:
    """Advantages of turns are for conversations with several."""
    if not isinstance(algorithm, OnlineConfig) or not isinstance(algorithm.advantage, TurnAdvantageConfig):
        return
    if isinstance(env, CalculatorEnvConfig) and env.call_weight == 0:
        mend = "no turn before the last one is paid for: give env.call_weight, or take the advantage `group`"
        yield Violation("algorithm.advantage.name", "turn", mend)
    if isinstance(env, _ONE_TURN):
        mend = f"conversations in `{env.name}` have one turn: take another env, or the advantage `group`"
        yield Violation("algorithm.advantage.name", "turn", mend)


def divergence_reaches_advantages(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """What is taken from the sum of rewards is lost on who does not look at the sum."""
    if not isinstance(algorithm, OnlineConfig) or not algorithm.kl_in_reward:
        return
    if isinstance(algorithm.advantage, GdpoAdvantageConfig | PassAtKAdvantageConfig):
        why = (
            "compares each reward by itself"
            if isinstance(algorithm.advantage, GdpoAdvantageConfig)
            else "counts who passes"
        )
        mend = f"the advantage `{algorithm.advantage.name}` {why}: set it to loss, or take another advantage"
        yield Violation("algorithm.kl.placement", "reward", mend)
    if algorithm.filters.drop_truncated and not algorithm.estimates_tokens:
        mend = (
            "the divergence of what is left out is not computed, so it would be missing in the rewards that "
            "the group is compared with: set algorithm.kl.placement to loss, or remove this"
        )
        yield Violation("algorithm.filters.drop_truncated", True, mend)


def _set(
    advantage: GroupAdvantageConfig | GpgAdvantageConfig | TurnAdvantageConfig | ReinforceAdvantageConfig,
    name: str,
) -> bool:
    return bool(getattr(advantage, name) != type(advantage).model_fields[name].default)
