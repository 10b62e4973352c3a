"""Functions of the user's in place of built-in parts: policy losses and advantage estimators."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemorl.config.algorithm.advantages import CustomAdvantageConfig
from nemorl.config.algorithm.losses import CustomLossConfig
from nemorl.config.base import NotImported, function_at
from nemorl.data.packed import Advantage, PackedBatch
from nemorl.errors import NemorlError
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.trajectories import StopReason

from .objective import TokenLoss


class CustomFunctionError(NemorlError):
    """A function of the user's cannot be found, called or used; the message names it and the fix."""


def _find(what: str, name: str) -> Callable[..., Any]:
    try:
        return function_at(name)
    except NotImported as error:
        raise CustomFunctionError(f"{what} `{name}`: {error}") from error.__cause__


def _tried(
    what: str, config: CustomAdvantageConfig | CustomLossConfig, given: Sequence[Any], called_as: str, on: str
) -> Any:
    """Return what the function answers to `given`, which messages call `on`. Raises CustomFunctionError."""
    function, called = _find(what, config.function), f"{what} `{config.function}`"
    try:
        inspect.signature(function).bind(*given, **config.arguments)
    except TypeError as error:
        raise CustomFunctionError(f"{called}: it cannot be called as {called_as}: {error}") from error
    try:
        answer = function(*given, **config.arguments)
    except CustomFunctionError:
        raise
    except (Exception, SystemExit) as error:
        raise CustomFunctionError(f"{called}: on {on} it raised {type(error).__name__}: {error}") from error
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns that it was never awaited
        raise CustomFunctionError(f"{called}: it is an async function: make it a plain one, `def`")
    return answer


def _require_arguments(what: str, function: Callable[..., Any], least: int, called_as: str) -> None:
    """Raise CustomFunctionError for a function with fewer named positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = sum(p.kind in kinds for p in inspect.signature(function).parameters.values())
    if given < least:
        takes = f"it takes {given or 'no'} positional argument{'s' * (given > 1)}"
        raise CustomFunctionError(f"{what} `{function.__qualname__}`: {takes}; it is called as {called_as}")


L = TypeVar("L", bound=Callable[..., TokenLoss])

_SUMS = frozenset({"tokens", "ratio/square"})  # parts of metrics
_LOSS_SIGNATURE = "(batch, logprobs, old, advantages, **arguments) -> TokenLoss"


def policy_loss(function: L) -> L:
    """Mark a function as a policy loss; its signature is checked where it is defined.

    It is called as `function(batch, logprobs, old, advantages, **arguments)`, the tensors [N] float32 of one
    micro-batch, and returns a `TokenLoss`. `logprobs` are of the policy that learns; `old` has no gradient
    and is of the one that the ratio is taken against. It must be pure. Raises CustomFunctionError.
    """
    _require_arguments("policy loss", function, 4, _LOSS_SIGNATURE)
    return function


def custom_loss(
    config: CustomLossConfig, batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor
) -> TokenLoss:
    """Raises CustomFunctionError if the function does not return tensors [N], or raises SystemExit."""
    function, called = _find("policy loss", config.function), f"policy loss `{config.function}`"
    try:
        answer: TokenLoss = function(batch, logprobs, old, advantages, **config.arguments)
    except SystemExit as error:  # which would end the worker without a message
        message = f"{called}: it raised SystemExit: {error} (algorithm.loss.function)"
        raise CustomFunctionError(message) from error
    if problem := _form_problem(answer, logprobs):
        raise CustomFunctionError(f"{called}: {problem} (algorithm.loss.function)")
    return answer


def smoke_test_loss(config: CustomLossConfig, taken: Collection[str] = ()) -> None:
    """Call a function as training would, on a batch of two sequences, of three and two tokens.

    Raises CustomFunctionError if it cannot be found or called, fails, or does not return a finite loss [N], a
    gradient that reaches the logprobs of sampled tokens, and metrics [N] with names that are not `taken`.
    """
    mask = torch.tensor([False, True, True, False, True])  # the first tokens are prompts
    old, advantages = torch.full((5,), -1.0) * mask, torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5]) * mask
    batch = PackedBatch(
        tokens=torch.arange(5),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        position_ids=torch.tensor([0, 1, 2, 0, 1]),
        loss_mask=mask,
        weights=mask / 3,
        advantages=advantages,
        logprobs=old.clone(),
        old_logprobs=old,
    )
    logprobs = (old + 0.1).requires_grad_()
    called_as = f"{_LOSS_SIGNATURE} with algorithm.loss.arguments"
    given = [batch, logprobs, old, advantages]
    answer = _tried("policy loss", config, given, called_as, "a tiny batch of packed tensors [N]")
    problem = _form_problem(answer, logprobs) or _gradient_problem(answer.loss[mask], logprobs, mask)
    if not problem and (names := [name for name in answer.metrics if name in taken or name in _SUMS]):
        problem = f"its metric {names[0]} has the name of a metric of the run: rename it"
    if problem:
        raise CustomFunctionError(f"policy loss `{config.function}`: {problem}")


def _gradient_problem(loss: Tensor, logprobs: Tensor, mask: Tensor) -> str | None:
    if not bool(loss.isfinite().all()):
        return "its loss is not finite for logprobs near the old ones: look for logarithms and divisions"
    if not loss.requires_grad:
        return "no gradient reaches the logprobs: compute the loss from `logprobs`, not detached as a whole"
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs, allow_unused=True)
    if gradient is None or not bool(gradient[mask].any()):
        return "its gradient is 0 at every sampled token: compute the loss from `logprobs`"
    return None


def _form_problem(answer: object, logprobs: Tensor) -> str | None:
    if not isinstance(answer, TokenLoss):
        return f"it returned {type(answer).__name__}: return a TokenLoss (nemorl.algorithms.policy_losses)"
    parts: dict[str, object] = {"loss": answer.loss, **{f"metric {k}": v for k, v in answer.metrics.items()}}
    if answer.ratio is not None:
        parts["ratio"] = answer.ratio
    for what, values in parts.items():
        if not isinstance(values, Tensor):
            return f"its {what} is of the type {type(values).__name__}: give a tensor [N]"
        if values.shape != logprobs.shape:
            shape, expected = list(values.shape), list(logprobs.shape)
            return f"its {what} has the shape {shape} instead of {expected}: give a value for each token"
    return None


A = TypeVar("A", bound=Callable[..., Sequence[Sequence[Advantage]]])

_ADVANTAGE_SIGNATURE = "(groups, **arguments)"


def advantage(function: A) -> A:
    """Mark a function as an advantage estimator; its signature is checked where it is defined.

    It is called as `function(groups, **arguments)` with the `GroupSummary`s of a batch, which hold the
    trajectories that count, and returns a list for each of them: a number for each trajectory, or a tuple
    with one for each of its turns. It must be pure. Raises CustomFunctionError.
    """
    _require_arguments("advantage", function, 1, _ADVANTAGE_SIGNATURE)
    return function


def own_advantages(
    config: CustomAdvantageConfig,
) -> Callable[[Sequence[GroupSummary]], list[list[Advantage]]]:
    """The estimator that a config names; what it answers is checked. Raises CustomFunctionError."""
    function = _find("advantage", config.function)
    return lambda groups: _checked(function(groups, **config.arguments), groups, config)


def smoke_test_advantage(config: CustomAdvantageConfig, reward_names: Iterable[str]) -> None:
    """Call a function as training would, on two groups, the second with equal rewards.

    Raises CustomFunctionError when it cannot be found or called, fails, or does not answer as it must.
    """
    names = list(reward_names)
    groups = [
        GroupSummary(0, 0, None, tuple(_tiny_trajectory(row, float(row), names) for row in range(2))),
        GroupSummary(1, 1, None, tuple(_tiny_trajectory(row, 1.0, names) for row in range(3))),
    ]
    signature = f"{_ADVANTAGE_SIGNATURE} with algorithm.advantage.arguments"
    _checked(_tried("advantage", config, [groups], signature, "two small groups"), groups, config)


def _checked(
    answer: Any, groups: Sequence[GroupSummary], config: CustomAdvantageConfig
) -> list[list[Advantage]]:
    if problem := _advantage_problem(answer, groups):
        raise CustomFunctionError(f"advantage `{config.function}`: {problem}")
    return [list(row) for row in answer]


def _advantage_problem(answer: Any, groups: Sequence[GroupSummary]) -> str | None:
    def returned(value: Any, expected: str) -> str:
        shown = f"{len(value)} values" if isinstance(value, Sequence) else type(value).__name__
        return f"it returned {shown} for {expected} for each"

    if not isinstance(answer, Sequence) or len(answer) != len(groups):
        return returned(answer, f"{len(groups)} groups: return a list with a list")
    for row, group in zip(answer, groups, strict=True):
        members = group.trajectories
        if not isinstance(row, Sequence) or len(row) != len(members):
            return returned(row, f"a group of {len(members)}: return a number")
        for value, member in zip(row, members, strict=True):
            if isinstance(value, tuple) and len(value) != member.num_turns:
                return returned(value, f"{member.num_turns} turns: return a number")
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, int | float) or not math.isfinite(number):
                    return f"it returned {number!r} for a trajectory: return finite numbers"
    return None


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
