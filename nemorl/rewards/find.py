"""Find the function of a reward and the signature by which it is called. Imports no torch.

trl        `f(completions, prompts, **columns) -> [number or None]`, once for a group
openrlhf   `f(queries, prompts, labels) -> [number], a tensor, or {"rewards": ...}`, once for a group
verl       `f(data_source, solution_str, ground_truth, extra_info) -> number or {"score": ...}`, per answer

All are called by keyword, and each gets those columns of the task too that it has parameters for.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemorl.config.base import NotImported, function_at
from nemorl.config.environment import FunctionRewardConfig, Signature

from .functions import BUILT_IN

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


def fits(signature: Signature, parameters: frozenset[str]) -> bool:
    """Whether a function with these parameters looks at answers as this signature gives them."""
    match signature:
        case "trl":
            return bool(parameters & {"completions", "completion_ids", "sampled_ids"})
        case "openrlhf":
            return parameters >= {"queries", "prompts", "labels"}
        case "verl":
            return parameters >= {"solution_str", "ground_truth"}


def signature_of(parameters: frozenset[str]) -> Signature:
    """Recognized by names: `solution_str` is verl's, `queries` OpenRLHF's; all else is TRL's."""
    if "solution_str" in parameters:
        return "verl"
    return "openrlhf" if "queries" in parameters else "trl"


Function = Callable[..., Any]


class RewardError(RuntimeError):
    """A reward that cannot be found, called or used; the message names it."""


@dataclass(frozen=True)
class FoundReward:
    """A function, which is called with keyword arguments only."""

    function: Function
    signature: Signature
    takes: frozenset[str]  # names of its parameters
    takes_any: bool  # **columns
    needs: frozenset[str]  # further columns that it requires, which its signature does not give


def find_reward(config: FunctionRewardConfig) -> FoundReward:
    """Import the function. Raises RewardError when there is none or it cannot be called as rewards are."""
    function = _resolve(config.function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RewardError(
            f"reward `{config.function}` yields: return a list with a number for each completion"
        )
    parameters = inspect.signature(function).parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = frozenset(p.name for p in by_name)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    signature = config.signature or signature_of(takes)
    if nameless or not (takes_any or fits(signature, takes)):
        raise RewardError(
            f"reward `{config.function}` takes ({', '.join(map(str, parameters))}): rewards of the signature "
            f"`{signature}` are called by name, as `{FORMS[signature]}`"
        )
    unknown = sorted(config.arguments.keys() - takes) if not takes_any else []
    if unknown:
        raise RewardError(f"reward `{config.function}` takes no argument {', '.join(unknown)}")
    required = frozenset(p.name for p in by_name if p.default is p.empty)
    needs = required - config.arguments.keys() - GIVEN[signature]
    return FoundReward(function, signature, takes, takes_any and signature == "trl", needs)


def _resolve(name: str) -> Function:
    if ":" not in name:
        if name not in BUILT_IN:
            raise RewardError(
                f"no reward `{name}`: built in are {', '.join(sorted(BUILT_IN))}; "
                "write `package.module:function` for one of your own"
            )
        return BUILT_IN[name]
    try:
        return function_at(name)
    except NotImported as error:
        raise RewardError(f"reward `{name}`: {error}") from error.__cause__
