"""What votes: the answer as the environment reads it, or the whole of the last message."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nemorl.config.environment import CalculatorEnvConfig, ReasoningGymEnvConfig, SingleTurnEnvConfig
from nemorl.environments.math_answers import found_answer
from nemorl.rollout.groups import last_answer
from nemorl.trajectories import Message

PLAIN = SingleTurnEnvConfig()
CALCULATOR = CalculatorEnvConfig(name="calculator")
GYM = ReasoningGymEnvConfig(name="reasoning_gym", answer_tag="answer")


def answered(config: Any, *texts: str, error: str | None = None) -> str | None:
    async def ask() -> str | None:
        exchange = [m for text in texts for m in (Message("assistant", text), Message("tool", "12"))]
        conversation: Any = SimpleNamespace(trajectory=SimpleNamespace(error=error), exchange=tuple(exchange))
        factory = config.make_factory()
        try:
            return await last_answer(conversation, factory)
        finally:
            await factory.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("config", "texts", "expected"),
    [
        (PLAIN, ("046",), "046"),
        (PLAIN, ("first", "  the\n last "), "the last"),
        (PLAIN, ("  ",), None),
        (PLAIN, (), None),
        (CALCULATOR, ("<tool>4*3</tool>", "so <answer>12</answer>"), "12.0"),
        (CALCULATOR, ("<answer>1.2e1</answer>",), "12.0"),
        (CALCULATOR, ("<answer>none</answer>",), "none"),
        (CALCULATOR, ("<tool>4*3</tool>",), None),
        (GYM, ("I think <answer> b </answer>.",), "b"),
        (GYM, ("I think b.",), None),
    ],
)
def test_the_answer_that_votes(config: Any, texts: tuple[str, ...], expected: str | None) -> None:
    assert answered(config, *texts) == expected


def test_a_failed_conversation_does_not_vote() -> None:
    assert answered(PLAIN, "046", error="the environment hung") is None


def test_long_answers_vote_by_their_hash() -> None:
    one, other = answered(PLAIN, "x" * 1000), answered(PLAIN, "x" * 1001)
    assert one is not None
    assert len(one) == 64
    assert one == answered(PLAIN, "x" * 1000) != other
    assert answered(PLAIN, "x" * 200) == "x" * 200
    assert answered(PLAIN, "x" * 201) != "x" * 201


@pytest.mark.parametrize(
    ("one", "other"),
    [("so 1/2", "it is 0.5"), (r"$\frac{1}{2}$", r"\boxed{0.5}"), ("$x^2+1$", "$1+x^2$")],
)
def test_equal_mathematics_votes_together(one: str, other: str) -> None:
    assert found_answer(one) == found_answer(other) != None  # noqa: E711
    assert found_answer("no idea") is None
