"""`env`: what the policy acts in."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Config, default_variant


class SingleTurnEnvConfig(Config):
    """One answer, scored by `rewards` alone."""

    name: Literal["single_turn"] = "single_turn"


class MathEnvConfig(Config):
    """One answer, compared with the task's by the math-verify library."""

    name: Literal["math"]
    weight: float = 1.0
    """Weight of the reward `math` in the sum."""


class ReasoningGymEnvConfig(Config):
    """One answer, scored by the reasoning-gym dataset that made the task."""

    name: Literal["reasoning_gym"]
    answer_tag: str | None = "answer"
    """Score what stands in `<answer>...</answer>`, an empty answer if missing; null scores the whole text."""
    weight: float = 1.0
    """Weight of the reward `reasoning_gym` in the sum."""


class CalculatorEnvConfig(Config):
    """Several turns: the policy may call a calculator before it answers; the final answer is compared."""

    name: Literal["calculator"]
    max_turns: int = Field(4, ge=1)
    """Turns of the policy before the conversation ends without an answer."""
    weight: float = 1.0
    """Weight of the reward `calculator` in the sum."""
    call_weight: float = 0.0
    """Weight of the reward `calculator_call`, which pays each turn whose call the calculator can work out."""


EnvConfig = Annotated[
    SingleTurnEnvConfig | MathEnvConfig | ReasoningGymEnvConfig | CalculatorEnvConfig,
    Field(discriminator="name"),
    default_variant(SingleTurnEnvConfig),
]
