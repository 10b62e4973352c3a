"""A policy loss of your own: a function found by its import path, and tried before a run starts."""

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import Tensor

from nemorl.algorithms.own import OwnPartError, find, num_positional, tried
from nemorl.config.algorithm import CustomLossConfig
from nemorl.data.packed import PackedBatch

from .tokens import TokenLoss

LossFunction = Callable[..., TokenLoss]
F = TypeVar("F", bound=LossFunction)

_SUMS = frozenset({"tokens", "ratio/square"})  # that figures are made of, beside those that are told
_WANTED = "(batch, logprobs, old, advantages, **arguments) -> TokenLoss"


def policy_loss(function: F) -> F:
    """Mark a function as a policy loss; its signature is checked where it is defined.

    It is called as `function(batch, logprobs, old, advantages, **arguments)`, the tensors [N] float32 of one
    micro-batch, and returns a `TokenLoss`. `logprobs` are of the policy that learns; `old` has no gradient
    and is of the one that the ratio is taken against. It must be pure: it runs once for every micro-batch, on
    every rank that computes losses. Raises OwnPartError.
    """
    given = num_positional(function)
    if given < 4:
        raise _error(
            function.__qualname__,
            f"it takes {given} positional arguments: a policy loss is called as {_WANTED}",
        )
    return function


def own_loss(config: CustomLossConfig) -> LossFunction:
    """The function that a config names. Raises OwnPartError."""
    return find("policy loss", config.function)


def try_out(config: CustomLossConfig, taken: Collection[str] = ()) -> None:
    """Call a function as training would, on a batch of two sequences.

    What it returns must have a finite loss [N], a gradient that reaches the logprobs of sampled tokens, and
    figures [N] of other names than those `taken` by figures of the run. Raises OwnPartError when it cannot be
    found or called, fails, or does not answer so.
    """
    batch = _tiny_batch()
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    logprobs = (batch.old_logprobs + 0.1).requires_grad_()
    found = tried(
        own_loss(config),
        [batch, logprobs, batch.old_logprobs, batch.advantages],
        config.arguments,
        called=f"policy loss `{config.function}`",
        wanted=f"{_WANTED} with algorithm.loss.arguments",
        where="a tiny batch of packed tensors [N]",
    )
    if problem := _problem(found, logprobs, batch.loss_mask):
        raise _error(config.function, problem)
    for name in found.figures:
        if name in taken or name in _SUMS:
            problem = f"its figure {name} has the name of one that the run has already: give it another"
            raise _error(config.function, problem)


def called(config: CustomLossConfig, batch: PackedBatch, *tensors: Tensor) -> TokenLoss:
    """The loss of a batch; `tensors` are logprobs, old and advantages, [N] each.

    Raises OwnPartError where the function does not answer with tensors of that shape, or calls for the end.
    """
    try:
        found = own_loss(config)(batch, *tensors, **config.arguments)
    except SystemExit as error:  # which would end the worker without a word
        raise _error(config.function, f"it raised SystemExit: {error} (algorithm.loss.function)") from error
    if problem := _form(found, tensors[0]):
        raise _error(config.function, f"{problem} (algorithm.loss.function)")
    return found


def _problem(found: object, logprobs: Tensor, mask: Tensor) -> str | None:
    if problem := _form(found, logprobs):
        return problem
    assert isinstance(found, TokenLoss)
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


def _form(found: object, logprobs: Tensor) -> str | None:
    if not isinstance(found, TokenLoss):
        return f"it returned {type(found).__name__}: return a TokenLoss (nemorl.algorithms.policy_losses)"
    parts: dict[str, object] = {"loss": found.loss, **{f"figure {k}": v for k, v in found.figures.items()}}
    if found.ratio is not None:
        parts["ratio"] = found.ratio
    for what, values in parts.items():
        if not isinstance(values, Tensor):
            return f"its {what} is of the type {type(values).__name__}: give a tensor [N]"
        if values.shape != logprobs.shape:
            shape, wanted = list(values.shape), list(logprobs.shape)
            return f"its {what} has the shape {shape} instead of {wanted}: give a value for each token"
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


def _error(name: str, problem: str) -> OwnPartError:
    return OwnPartError(f"policy loss `{name}`: {problem}")
