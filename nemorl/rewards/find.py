"""Finding the function that an experiment names as a reward, and what it can be called with. No torch."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from nemorl.config.env import RewardConfig

from .functions import BUILT_IN

Scores = Sequence[float | None]
GIVEN = frozenset({"completions", "prompts", "completion_ids", "answer"})  # to every reward, by name


class RewardError(RuntimeError):
    """A reward that cannot be found, called or used; the message names the function."""


@dataclass(frozen=True)
class FoundReward:
    """A function, which is called with keyword arguments only."""

    function: Callable[..., Scores | Awaitable[Scores]]
    takes: frozenset[str]  # names of its parameters
    takes_any: bool  # **columns
    needs: frozenset[str]  # columns it cannot do without


def find_reward(config: RewardConfig) -> FoundReward:
    """Import the function. Raises RewardError when there is none or it cannot be called as rewards are."""
    function = _resolve(config.function)
    parameters = inspect.signature(function).parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = frozenset(p.name for p in by_name)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if nameless or not (takes_any or "completions" in takes):
        raise RewardError(
            f"reward `{config.function}` takes ({', '.join(map(str, parameters))}): rewards are called by "
            "name, as `(completions, **columns)`"
        )
    unknown = sorted(config.arguments.keys() - takes) if not takes_any else []
    if unknown:
        raise RewardError(f"reward `{config.function}` takes no argument {', '.join(unknown)}")
    needs = frozenset(p.name for p in by_name if p.default is p.empty) - config.arguments.keys()
    return FoundReward(function, takes, takes_any, needs)


def _resolve(name: str) -> Callable[..., Scores | Awaitable[Scores]]:
    module, colon, attribute = name.partition(":")
    if not colon:
        if name not in BUILT_IN:
            raise RewardError(
                f"no reward `{name}`: built in are {', '.join(sorted(BUILT_IN))}; "
                "write `package.module:function` for one of your own"
            )
        return BUILT_IN[name]
    try:
        function = getattr(import_module(module), attribute, None)
    except (Exception, SystemExit) as error:  # whatever a module of the user's may raise
        raise RewardError(
            f"reward `{name}`: cannot import {module}: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise RewardError(f"reward `{name}`: {module} has no function {attribute}")
    return function  # type: ignore[no-any-return]
