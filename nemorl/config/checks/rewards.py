"""What the policy is paid for."""

from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.data import DataConfig
from nemorl.config.env import CalculatorEnvConfig, EnvConfig, SingleTurnEnvConfig
from nemorl.config.rewards import RewardConfig
from nemorl.errors import Violation

from .facts import generates
from .figures import reward_names


def something_is_rewarded(
    env: EnvConfig, rewards: tuple[RewardConfig, ...], algorithm: AlgorithmConfig
) -> Iterator[Violation]:
    """`single_turn` pays nothing of its own."""
    if isinstance(env, SingleTurnEnvConfig) and not rewards and generates(algorithm):
        yield Violation(
            "rewards",
            [],
            "the environment `single_turn` pays nothing itself, so every reward would be 0: name a reward "
            "function, such as `[{function: exact_match}]`, or take another env",
        )


def reward_names_differ(env: EnvConfig, rewards: tuple[RewardConfig, ...]) -> Iterator[Violation]:
    """A metric can hold one reward; without a name a function is called by what stands after the colon."""
    taken = set(reward_names(env, ()))
    for place, reward in enumerate(rewards):
        name = reward.metric
        if name in taken:
            mend = f"another reward is named `{name}` already: remove one, or give it another `name`"
            yield Violation(f"rewards.{place}.{reward.field}", getattr(reward, reward.field), mend)
        taken.add(name)


def calculator_wants_chat(env: EnvConfig, data: DataConfig) -> Iterator[Violation]:
    """The calculator answers with messages of a tool, which plain text cannot tell from the policy's own."""
    if isinstance(env, CalculatorEnvConfig) and not data.chat:
        mend = "the environment `calculator` answers in messages of its own: set data.chat to true"
        yield Violation("data.chat", False, mend)
