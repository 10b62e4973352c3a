"""Find the function of a reward and the signature by which it is called.

trl        `f(completions, prompts, **columns) -> [number or None]`, once for a group
openrlhf   `f(queries, prompts, labels) -> [number], a tensor, or {"rewards": ...}`, once for a group
verl       `f(data_source, solution_str, ground_truth, extra_info) -> number or {"score": ...}`, per answer

All are called by keyword, and each gets those columns of the task too that it has parameters for.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from nemorl.config.base import NotImported, did_you_mean, function_at
from nemorl.config.environment import FunctionRewardConfig, Signature

from .functions import BUILT_IN, PACKAGES

# What a signature gives in addition to the columns of the task.
GIVEN: dict[Signature, frozenset[str]] = {
    "trl": frozenset({"completions", "prompts", "completion_ids", "sampled_ids", "answer"}),
    "openrlhf": frozenset({"queries", "prompts", "labels"}),
    "verl": frozenset({"solution_str", "ground_truth", "extra_info"}),
}
FORMS: dict[Signature, str] = {
    "trl": "(completions, **columns)",
    "openrlhf": "(queries, prompts, labels)",
    "verl": "(data_source, solution_str, ground_truth, extra_info)",
}
# A function without `**columns` uses the answers if it has all parameters of one of these sets.
_USES_ANSWERS: dict[Signature, tuple[frozenset[str], ...]] = {
    "trl": (frozenset({"completions"}), frozenset({"completion_ids"}), frozenset({"sampled_ids"})),
    "openrlhf": (GIVEN["openrlhf"],),
    "verl": (frozenset({"solution_str", "ground_truth"}),),
}


class RewardError(RuntimeError):
    """A reward that cannot be found, called or used; the message names it."""


@dataclass(frozen=True)
class FoundReward:
    """A function, which is called with keyword arguments only."""

    function: Callable[..., Any]
    signature: Signature
    takes: frozenset[str]  # names of its parameters
    takes_any: bool  # **columns
    needs: frozenset[str]  # further columns that it requires, which its signature does not give


def find_reward(config: FunctionRewardConfig) -> FoundReward:
    """Import the function. Raises RewardError when there is none or it cannot be called as rewards are."""
    name = f"reward `{config.function}`"
    function: Callable[..., Any] | None = BUILT_IN.get(config.function)
    if ":" in config.function:
        try:
            function = function_at(config.function)
        except NotImported as error:
            raise RewardError(f"{name}: {error}") from error.__cause__
    if function is None:
        built_in = ", ".join(sorted(BUILT_IN))
        fix = "write `package.module:function` for one of your own"
        near = did_you_mean(config.function, sorted(BUILT_IN))
        raise RewardError(f"unknown {name}; {near}built-in rewards: {built_in}; {fix}")
    if (package := PACKAGES.get(config.function)) is not None and find_spec(package) is None:
        fix = "install it with `pip install 'nemorl[rewards]'`"
        raise RewardError(f"{name} uses the package {package}, which is missing; {fix}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RewardError(f"{name} yields: return a list with a number for each completion")
    parameters = inspect.signature(function).parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = frozenset(p.name for p in by_name)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    signature: Signature = config.signature or "trl"
    if config.signature is None and takes & {"solution_str", "queries"}:
        signature = "verl" if "solution_str" in takes else "openrlhf"
    uses_answers = takes_any or any(names <= takes for names in _USES_ANSWERS[signature])
    if nameless or not uses_answers:
        accepted = f"({', '.join(map(str, parameters))})" if parameters else "no parameters"
        expected = f"`{signature}` functions receive keyword arguments: `{FORMS[signature]}`"
        raise RewardError(f"{name} accepts {accepted}; {expected}")
    if not takes_any and (unknown := sorted(config.arguments.keys() - takes)):
        raise RewardError(f"{name} takes no argument {', '.join(unknown)}")
    required = frozenset(p.name for p in by_name if p.default is p.empty)
    needs = required - config.arguments.keys() - GIVEN[signature]
    return FoundReward(function, signature, takes, takes_any and signature == "trl", needs)
