"""Which modules compute with other memory than their parameters, as post-processing of weights left them.

A kernel may want weights in an order of its own: vLLM then replaces the parameter, changes it in place, or
keeps a copy beside it. Writing into such a parameter afterwards would not be seen, or would be wrong.
"""

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 1 << 20
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by element size
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type)
_DEEPEST = 4  # objects in objects that are looked into


@dataclass(frozen=True)
class _State:
    """A parameter: where it lies, how, and what is in it."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    digest: int


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, by the first of its names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@contextmanager
def watching(model: nn.Module, changed: dict[str, str]) -> Iterator[None]:
    """Around the post-processing: puts into `changed` the parameters of modules that it touched, and why."""
    before = {name: (_states(module), _attributes(module)) for name, module in model.named_modules()}
    yield
    for name, module in model.named_modules():
        states, attributes = before.get(name, ({}, {}))
        reason = _difference(module, states, attributes)
        if reason is not None:
            own = {*states, *dict(module.named_parameters(recurse=False))}
            changed.update({f"{name}.{parameter}".lstrip("."): reason for parameter in own})


def _difference(
    module: nn.Module, states: Mapping[str, _State], attributes: Mapping[str, object]
) -> str | None:
    now = _states(module)
    if now.keys() != states.keys():
        return "post-processing gave the module other parameters"
    for name, state in now.items():
        if state != states[name]:
            return f"post-processing changed {name}"
    own = {state.storage for state in now.values()} | {_storage(b) for b in module.buffers(recurse=False)}
    for name, value in _attributes(module).items():
        if attributes.get(name) is not value and _other_memory(value, own, _DEEPEST):
            return f"post-processing keeps memory of its own in {name}"
    return None


def _states(module: nn.Module) -> dict[str, _State]:
    return {
        name: _State(_storage(p), tuple(p.shape), p.stride(), p.dtype, _digest(p))
        for name, p in module.named_parameters(recurse=False)
    }


def _attributes(module: nn.Module) -> dict[str, object]:
    """What hangs on the module and on its quantisation method."""
    kept = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    method = getattr(module, "quant_method", None)
    if method is not None and hasattr(method, "__dict__"):
        kept |= {f"quant_method.{name}": value for name, value in vars(method).items()}
    return kept


def _other_memory(value: object, own: set[int], depth: int) -> bool:
    """Whether tensors other than `own` are reachable; what lies too deep counts as such."""
    if value is None or isinstance(value, _PLAIN):
        return False
    if isinstance(value, Tensor):
        return value.numel() > 1 and _storage(value) not in own
    if isinstance(value, nn.Module):
        return False  # it is looked at by itself
    if depth == 0:
        return True
    return any(_other_memory(part, own, depth - 1) for part in _parts(value))


def _parts(value: object) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
        return [*cells, *(value.__defaults__ or ())]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _digest(parameter: Tensor) -> int:
    """A number that changes with any element and with their order."""
    flat = parameter.detach().reshape(-1)
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].contiguous()
        bits = chunk.view(_INTEGERS[chunk.element_size()]).to(torch.int64)
        weights = torch.arange(2 * start + 1, 2 * (start + bits.numel()) + 1, 2, device=bits.device)
        total += int((bits * weights).sum())
    return total


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
