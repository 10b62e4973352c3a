"""Calls of environments: what they raise ends their conversation alone, and what they answer is verified."""

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from nemorl.trajectories import Episode, Message, Step

T = TypeVar("T")


async def called(
    function: Callable[..., Coroutine[Any, Any, T]],
    *arguments: Any,
    problem_of: Callable[[Any], str | None] = lambda answer: None,
) -> T:
    """The answer of an environment's coroutine function. Raises what it raises, and TypeError for a problem.

    SystemExit, which would end the event loop and with it all other conversations, becomes a RuntimeError.
    """
    try:
        answer = await function(*arguments)
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
    if (problem := problem_of(answer)) is not None:
        raise TypeError(problem)
    return answer


def opening_problem(opening: Any) -> str | None:
    """What is wrong with the answer of `reset`, if anything is."""
    if opening and _are_messages(opening):
        return None
    return f"returned {shown(opening)}; return a tuple of Messages, at least one"


def step_problem(step: Any) -> str | None:
    """What is wrong with the answer of `step`, if anything is."""
    if not isinstance(step, Step):
        return f"returned {shown(step)}; return a Step"
    if not _are_messages(step.messages):
        return f"returned the messages {shown(step.messages)}; return a tuple of Messages"
    if not isinstance(step.done, bool):
        return f"returned done={shown(step.done)}; return True or False"
    if problem := stop_strings_problem(step.stop_strings):
        return f"returned the stop_strings {problem}"
    return rewards_problem(step.rewards)


def episode_problem(episode: Any) -> str | None:
    """What is wrong with the answer of `run`, if anything is."""
    if not isinstance(episode, Episode):
        return f"it returned {shown(episode)}; return an Episode"
    of_parts = (*episode.player_rewards.values(), *episode.answer_rewards.values())
    problems = map(rewards_problem, (episode.rewards, *of_parts))
    return next((problem for problem in problems if problem is not None), None)


def rewards_problem(rewards: Any) -> str | None:
    if not isinstance(rewards, Mapping):
        return f"gave the rewards {shown(rewards)}; return a dict of names and numbers"
    for name, reward in rewards.items():
        if not is_number(reward):
            return f"gave the reward {name!r} the value {shown(reward)}; return a finite number"
    return None


def stop_strings_problem(value: Any) -> str | None:
    """For what is no collection of texts; a text alone would be one of letters."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) and one for one in value):
        return None
    return f"{shown(value)}; give a tuple of texts that are not empty"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(message, Message) for message in value)
