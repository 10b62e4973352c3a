"""An advantage estimator of your own: a function found by its import path, and tried before a run starts.

Functions of your own in place of built-in parts: found by their import path.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from nemorl.config.algorithm.advantages import CustomAdvantageConfig
from nemorl.config.base import NotImported, function_at
from nemorl.data.packed import Advantage
from nemorl.errors import NemorlError
from nemorl.rollout.collector import GroupSummary, TrajectorySummary
from nemorl.trajectories import StopReason


class CustomFunctionError(NemorlError):
    """A function of the user's cannot be found, called or used; the message names it and the fix."""


def find(what: str, name: str) -> Callable[..., Any]:
    """The function that `package.module:function` names, as a `what`. Raises CustomFunctionError."""
    try:
        return function_at(name)
    except NotImported as error:
        raise CustomFunctionError(f"{what} `{name}`: {error}") from error.__cause__


def tried(
    function: Callable[..., Any],
    given: Sequence[Any],
    arguments: Mapping[str, Any],
    *,
    called: str,
    signature: str,
    where: str,
) -> Any:
    """Return `function(*given, **arguments)`; messages call these arguments `where`.

    `called` is the function in messages, `signature` how it is called. Raises CustomFunctionError.
    """
    try:
        inspect.signature(function).bind(*given, **arguments)
    except TypeError as error:
        raise CustomFunctionError(f"{called}: it cannot be called as {signature}: {error}") from error
    try:
        found = function(*given, **arguments)
    except CustomFunctionError:
        raise
    except (Exception, SystemExit) as error:
        raise CustomFunctionError(
            f"{called}: on {where} it raised {type(error).__name__}: {error}"
        ) from error
    if inspect.iscoroutine(found):
        found.close()  # else Python warns that it was never awaited
        raise CustomFunctionError(f"{called}: it is an async function: make it a plain one, `def`")
    return found


def num_positional(function: Callable[..., Any]) -> int:
    """How many positional arguments a function has by name."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds for p in inspect.signature(function).parameters.values())


F = TypeVar("F", bound=Callable[..., Sequence[Sequence[Advantage]]])

_ADVANTAGE_SIGNATURE = "(groups, **arguments)"


def advantage(function: F) -> F:
    """Mark a function as an advantage estimator; its signature is checked where it is defined.

    It is called as `function(groups, **arguments)` with the `GroupSummary`s of a batch, which hold the
    trajectories that count, and returns a list for each of them: a number for each trajectory, or a tuple
    with one for each of its turns. It must be pure. Raises CustomFunctionError.
    """
    if not num_positional(function):
        raise CustomFunctionError(
            f"advantage `{function.__qualname__}`: it takes no positional argument; "
            f"it is called as {_ADVANTAGE_SIGNATURE}"
        )
    return function


def own_advantages(
    config: CustomAdvantageConfig,
) -> Callable[[Sequence[GroupSummary]], list[list[Advantage]]]:
    """The estimator that a config names; what it answers is checked. Raises CustomFunctionError."""
    function = find("advantage", config.function)

    def estimate(groups: Sequence[GroupSummary]) -> list[list[Advantage]]:
        answer = function(groups, **config.arguments)
        if problem := _advantage_problem(answer, groups):
            raise CustomFunctionError(f"advantage `{config.function}`: {problem}")
        return [list(row) for row in answer]

    return estimate


def smoke_test_advantage(config: CustomAdvantageConfig, reward_names: Iterable[str]) -> None:
    """Call a function as training would, on two groups with the rewards of an experiment.

    Raises CustomFunctionError when it cannot be found or called, fails, or does not answer as it must.
    """
    groups = _tiny_groups(list(reward_names))
    answer = tried(
        find("advantage", config.function),
        [groups],
        config.arguments,
        called=f"advantage `{config.function}`",
        signature=f"{_ADVANTAGE_SIGNATURE} with algorithm.advantage.arguments",
        where="two small groups",
    )
    if problem := _advantage_problem(answer, groups):
        raise CustomFunctionError(f"advantage `{config.function}`: {problem}")


def _advantage_problem(answer: Any, groups: Sequence[GroupSummary]) -> str | None:
    if not isinstance(answer, Sequence) or len(answer) != len(groups):
        return f"it returned {_describe(answer)} for {len(groups)} groups: return a list with a list for each"
    for row, group in zip(answer, groups, strict=True):
        members = group.trajectories
        if not isinstance(row, Sequence) or len(row) != len(members):
            return f"it returned {_describe(row)} for a group of {len(members)}: return a number for each"
        for value, member in zip(row, members, strict=True):
            if isinstance(value, tuple) and len(value) != member.num_turns:
                return (
                    f"it returned {_describe(value)} for {member.num_turns} turns: return a number for each"
                )
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, int | float) or not math.isfinite(number):
                    return f"it returned {number!r} for a trajectory: return finite numbers"
    return None


def _describe(answer: Any) -> str:
    return f"{len(answer)} values" if isinstance(answer, Sequence) else type(answer).__name__


def _tiny_groups(reward_names: Sequence[str]) -> list[GroupSummary]:
    """A group of two and one of three, of one and two turns, the second with equal rewards."""
    return [
        GroupSummary(0, 0, None, tuple(_tiny_trajectory(row, float(row), reward_names) for row in range(2))),
        GroupSummary(1, 1, None, tuple(_tiny_trajectory(row, 1.0, reward_names) for row in range(3))),
    ]


def _tiny_trajectory(row: int, reward: float, reward_names: Sequence[str]) -> TrajectorySummary:
    num_turns = 1 + row % 2
    return TrajectorySummary(
        row=row,
        reward=reward * len(reward_names),
        rewards=dict.fromkeys(reward_names, reward),
        num_tokens=12 + row,
        num_sampled=4 + row,
        num_turns=num_turns,
        stop=StopReason.STOP,
        min_version=0,
        max_version=0,
        error=None,
        seconds_generation=1.0,
        seconds_environment=0.0,
        turn_rewards=(0.0,) * num_turns,
    )
