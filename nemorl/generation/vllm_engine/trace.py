"""Learning from an engine's own loader which box of which HF tensor lands where.

The loader runs once with tensors that have a shape and no memory, and copies from them are recorded instead.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemorl.models.slices import TensorSlice


class NotABox(ValueError):
    """A view whose elements are no box of the tensor it looks at: every second row, say."""


class Box(NamedTuple):
    """A box of a tensor, and the distance in another tensor of a step along each of its axes."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    strides: tuple[int, ...]


def box_of(whole: Tensor, view: Tensor, strides: tuple[int, ...]) -> Box:
    """The box of a contiguous tensor that a view shows, copied to memory with `strides`. Raises NotABox."""
    shape = tuple(whole.shape)
    own = contiguous_strides(shape)
    start, left = [], int(view.storage_offset())
    for stride in own:
        first, left = divmod(left, stride)
        start.append(first)
    size, steps = [1] * len(own), [0] * len(own)
    for count, stride, step in zip(view.shape, view.stride(), strides, strict=True):
        # An axis of the view lies over axes of the tensor, the innermost of which it may run through whole.
        while count > 1:
            fits = (a for a, s in enumerate(own) if s == stride and shape[a] > 1 and size[a] == 1)
            axis = next(fits, None)
            if axis is None:
                raise NotABox(f"no axis of {shape} has steps of {stride} elements")
            here = min(count, shape[axis])
            if count % here or (count > here and axis == 0):
                raise NotABox(f"{count} steps of {stride} elements are no box of {shape}")
            size[axis], steps[axis] = here, step
            count, stride, step = count // here, stride * here, step * here
    if any(first + count > length for first, count, length in zip(start, size, shape, strict=True)):
        raise NotABox(f"from {start} on, {size} leaves {shape}")
    return Box(tuple(start), tuple(size), tuple(steps))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class LoaderTrace:
    slices: tuple[TensorSlice, ...]  # one for each copy
    unclear: Mapping[str, str]  # parameters that were filled in another way, and why that cannot be followed


def trace_loader(
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    tensors: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> LoaderTrace:
    """Run `load` over memory-less HF tensors; parameters keep their values. Raises what the loader raises."""
    recorder = _Recorder(parameters)
    with torch.no_grad(), recorder:
        load(recorder.feed(tensors, dtype))
    return LoaderTrace(tuple(recorder.slices), recorder.unclear)


def uncovered(trace: LoaderTrace, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Parameters of which some element comes from several HF tensors, or from none and is not zero."""
    by_parameter: dict[str, list[TensorSlice]] = defaultdict(list)
    for part in trace.slices:
        by_parameter[part.param].append(part)
    wrong = {}
    for name, parameter in parameters.items():
        counts = torch.zeros(parameter.numel(), dtype=torch.uint8)
        for part in by_parameter[name]:
            counts.as_strided(part.size, part.strides, part.offset).add_(1)
        free = counts.view(parameter.shape) == 0
        if int(counts.max()) > 1:
            wrong[name] = "elements of it come from several tensors of the checkpoint"
        elif bool((parameter.detach()[free.to(parameter.device)] != 0).any()):
            wrong[name] = "elements of it come from no tensor of the checkpoint and are not zero"
    return wrong


class _Recorder(TorchFunctionMode):
    """Records copies from memory-less tensors. Its storage identifies whose view a tensor is."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.slices: list[TensorSlice] = []
        self.unclear: dict[str, str] = {}
        self._targets = {storage_of(parameter): name for name, parameter in parameters.items()}
        self._firsts = {name: int(parameter.storage_offset()) for name, parameter in parameters.items()}
        self._sources: dict[int, tuple[str, Tensor]] = {}  # alive while their storage is a key

    def feed(
        self, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        for name, shape in tensors.items():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self._sources[storage_of(tensor)] = (name, tensor)
            yield name, tensor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            self._record(args[0], args[1])
            return args[0]
        if func is torch.Tensor.__setitem__ and isinstance(args[2], Tensor) and args[2].is_meta:
            self._record(args[0][args[1]], args[2])
            return None
        return func(*args, **(kwargs or {}))

    def _record(self, target: Tensor, source: Tensor) -> None:
        parameter = self._targets.get(storage_of(target))
        if parameter is None or target.numel() == 0:  # the loader's own scratch memory, or a rank of padding
            return
        found = self._sources.get(storage_of(source))
        if found is None:
            self.unclear[parameter] = "the loader computes it from tensors of the checkpoint"
            return
        name, whole = found
        shown = source.expand(target.shape) if source.dim() <= target.dim() else source.reshape(target.shape)
        try:
            box = box_of(whole, shown, target.stride())
        except NotABox as problem:
            self.unclear[parameter] = f"the loader takes parts of {name} that are no box: {problem}"
            return
        offset = int(target.storage_offset()) - self._firsts[parameter]
        shape = tuple(whole.shape)
        self.slices.append(TensorSlice(name, shape, box.start, box.size, parameter, offset, box.strides))


def storage_of(tensor: Tensor) -> int:
    """What a tensor shares with its views, memory or not."""
    return int(tensor.untyped_storage()._cdata)
