"""A wait and a tensor of the host in each phase of a rehearsal; the lines are looked up by their comments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemorl.config.experiment import Experiment
from nemorl.megatron import decode, head, model, optimizer
from nemorl.models.hf_folder import HfFolder
from nemorl.rehearsal.worker import RankReport, rehearse
from nemorl.weights import endpoints


def rehearse_with_faults(experiment: Experiment, rank: int) -> RankReport:
    """Plant all of them, then rehearse; for a process of its own."""
    _before(HfFolder, "load_into", _in_load)
    _before(model.RMSNorm, "forward", _in_logprobs)
    _before(head, "_grad_logits", _in_train)
    _before(endpoints, "queue_fingerprint", _in_refit)
    _before(optimizer, "release_memory", _in_offload)
    _before(decode.CachedModel, "_logits", _in_decode)
    return rehearse(experiment, rank)


def _before(owner: Any, name: str, fault: Callable[[list[Any]], None]) -> None:
    function = getattr(owner, name)

    def planted(*args: Any, **kwargs: Any) -> Any:
        fault(list(args))
        return function(*args, **kwargs)

    setattr(owner, name, planted)


def _on_device(values: list[Any]) -> Tensor:
    found = [value for value in values if isinstance(value, Tensor)]
    return found[0] if found else torch.ones(2, device="cuda")


def _in_load(values: list[Any]) -> None:
    weight = next(iter(values[1].values()))
    weight.sum().item()  # wait in load
    weight + torch.ones(weight.shape)  # device in load


def _in_logprobs(values: list[Any]) -> None:
    if not torch.is_grad_enabled():
        hidden = _on_device(values)
        hidden.sum().item()  # wait in logprobs
        hidden * torch.ones(hidden.shape)  # device in logprobs


def _in_train(values: list[Any]) -> None:
    shifted = _on_device(values)
    bool(shifted.isnan().any())  # wait in train
    shifted.sub(torch.ones(shifted.shape))  # device in train


def _in_refit(values: list[Any]) -> None:
    piece = _on_device(values)
    piece.flatten()[0].tolist()  # wait in refit
    torch.equal(piece, torch.ones(piece.shape, dtype=piece.dtype))  # device in refit


def _in_offload(values: list[Any]) -> None:
    some = _on_device(values)
    some.cpu()  # wait in offload
    torch.cat((some, torch.ones(2)))  # device in offload


def _in_decode(values: list[Any]) -> None:
    hidden = _on_device(values)
    hidden.nonzero()  # wait in decode
    hidden @ torch.ones(hidden.shape[1], 2, dtype=hidden.dtype)  # device in decode
