"""A policy loss of your own: a function found by its import path, and tried before a run starts."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemorl.data.packed import PackedBatch
from nemorl.errors import NemorlError

from .tokens import TokenLoss

LossFunction = Callable[..., TokenLoss]
F = TypeVar("F", bound=LossFunction)

_WANTED = "(batch, logprobs, old, advantages, **arguments) -> TokenLoss"


class PolicyLossError(NemorlError):
    """A policy loss that cannot be found, called or used; the message names the function and the mend."""


def policy_loss(function: F) -> F:
    """Mark a function as a policy loss; its signature is checked where it is defined.

    It is called as `function(batch, logprobs, old, advantages, **arguments)`, the tensors [N] float32 of one
    micro-batch, and returns a `TokenLoss`. `logprobs` are of the policy that learns; `old` has no gradient
    and is of the one that the ratio is taken against. It must be pure: it runs once for every micro-batch, on
    every rank that computes losses. Raises PolicyLossError.
    """
    positional = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(positional) < 4:
        raise _error(
            function.__qualname__,
            f"it takes {len(positional)} positional arguments: a policy loss is called as {_WANTED}",
        )
    return function


@cache
def resolve(name: str) -> LossFunction:
    """The function that `package.module:function` names. Raises PolicyLossError."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(import_module(module), attribute, None)
    except PolicyLossError:
        raise
    except (Exception, SystemExit) as error:  # whatever a module of the user's may raise
        raise _error(name, f"{module} cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise _error(name, f"{module} has no function {attribute}")
    return function  # type: ignore[no-any-return]


def try_out(name: str, arguments: Mapping[str, Any]) -> None:
    """Call a function as training would, on a batch of two sequences. Raises PolicyLossError.

    What it returns must have a finite loss [N], a gradient that reaches the logprobs of sampled tokens, and
    figures [N].
    """
    function = resolve(name)
    batch = _tiny_batch()
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    logprobs = (batch.old_logprobs + 0.1).requires_grad_()
    given = (batch, logprobs, batch.old_logprobs, batch.advantages)
    try:
        inspect.signature(function).bind(*given, **arguments)
    except TypeError as error:
        raise _error(
            name, f"it cannot be called as {_WANTED} with algorithm.loss.arguments: {error}"
        ) from error
    try:
        found = function(*given, **arguments)
    except Exception as error:
        raise _error(
            name, f"on a tiny batch it raised {type(error).__name__}: {error}; let it take packed tensors [N]"
        ) from error
    problem = _problem(found, logprobs, batch.loss_mask)
    if problem:
        raise _error(name, problem)


def _problem(found: object, logprobs: Tensor, mask: Tensor) -> str | None:
    if not isinstance(found, TokenLoss):
        return f"it returned {type(found).__name__}: return a TokenLoss (nemorl.algorithms.policy_losses)"
    for what, values in {"loss": found.loss, **{f"figure {k}": v for k, v in found.figures.items()}}.items():
        if values.shape != logprobs.shape:
            shape = list(values.shape)
            return f"its {what} has the shape {shape} of {list(logprobs.shape)}: give a value for each token"
    if not bool(found.loss[mask].isfinite().all()):
        return (
            "its loss is not finite where logprobs are near the old ones: look for logarithms and divisions"
        )
    if not found.loss.requires_grad:
        return (
            "no gradient reaches the logprobs: compute the loss from `logprobs`, without detaching all of it"
        )
    (gradient,) = torch.autograd.grad(found.loss[mask].sum(), logprobs, allow_unused=True)
    if gradient is None or not bool(gradient[mask].any()):
        return "its gradient is 0 at every sampled token: compute the loss from `logprobs`"
    return None


def _tiny_batch() -> PackedBatch:
    """Two sequences, of three and two tokens, whose first tokens are prompts."""
    mask = torch.tensor([False, True, True, False, True])
    return PackedBatch(
        tokens=torch.arange(5),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        position_ids=torch.tensor([0, 1, 2, 0, 1]),
        loss_mask=mask,
        weights=mask / 3,
        advantages=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5]) * mask,
        logprobs=torch.full((5,), -1.0) * mask,
        old_logprobs=torch.full((5,), -1.0) * mask,
    )


def _error(name: str, problem: str) -> PolicyLossError:
    return PolicyLossError(f"policy loss `{name}`: {problem}")
