"""`env`: what the policy acts in."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Config, default_variant


class SingleTurnEnvConfig(Config):
    """One answer, scored by `rewards` alone."""

    name: Literal["single_turn"] = "single_turn"

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name: none."""
        return {}


class MathEnvConfig(Config):
    """One answer, compared with the task's by the math-verify library."""

    name: Literal["math"]
    weight: float = 1.0
    """Weight of the reward `math` in the sum."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name."""
        return {self.name: self.weight}


class ReasoningGymEnvConfig(Config):
    """One answer, scored by the reasoning-gym dataset that made the task."""

    name: Literal["reasoning_gym"]
    answer_tag: str | None = "answer"
    """Score what stands in `<answer>...</answer>`, an empty answer if missing; null scores the whole text."""
    weight: float = 1.0
    """Weight of the reward `reasoning_gym` in the sum."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name."""
        return {self.name: self.weight}


class CalculatorEnvConfig(Config):
    """Several turns: the policy may call a calculator before it answers; the final answer is compared."""

    name: Literal["calculator"]
    max_turns: int = Field(4, ge=1)
    """Turns of the policy before the conversation ends without an answer."""
    weight: float = 1.0
    """Weight of the reward `calculator` in the sum."""
    call_weight: float = 0.0
    """Weight of the reward `calculator_call`, which pays each turn whose call the calculator can work out."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name."""
        of_calls = {"calculator_call": self.call_weight} if self.call_weight else {}
        return {self.name: self.weight, **of_calls}


class ChainedSumsEnvConfig(Config):
    """Several turns that a tiny model can do: sums of which each goes on from the answer before it."""

    name: Literal["chained_sums"]
    num_sums: int = Field(2, ge=2)
    """Turns of the policy, a sum each."""
    weight: float = 1.0
    """Weight of the reward `chained_sums`, which pays the last sum."""
    turn_weight: float = Field(1.0, gt=0)
    """Weight of the reward `chained_sums_turn`, which pays each sum before the last one."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name."""
        return {self.name: self.weight, "chained_sums_turn": self.turn_weight}


EnvConfig = Annotated[
    SingleTurnEnvConfig | MathEnvConfig | ReasoningGymEnvConfig | CalculatorEnvConfig | ChainedSumsEnvConfig,
    Field(discriminator="name"),
    default_variant(SingleTurnEnvConfig),
]
