"""Operators on the pretended device: shapes and types without data, on the same code that a GPU would run.

Tensors of the host are real. Those of the device are torch's fake tensors, with one exception: indices, masks
and counts keep their values, as long as all that they are computed from has values. A read of what has none
gives 1. Two things that a GPU makes expensive or refuses are found here:

- *host synchronization*: the host waits for the device, to read a value or the size of a result;
- *wrong device*: an operator gets tensors of the host and of the device; the rehearsal continues as if all of
  them were on the device.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .accelerator import DEVICE, install, is_pretended
from .collectives import Collectives, Others, use_pretended_groups
from .memory import DeviceMemory

aten, prim = torch.ops.aten, torch.ops.prim
# Elements up to which a tensor of the device keeps its values.
_MAX_KNOWN = {True: 2**22, False: 2**12}  # of integers, booleans and constants; of others
# Tensors of the host with more elements have no data either: copies of weights and of the optimizer's state.
_MAX_REAL = 2**22
_HERE = str(Path(__file__).parent)
_ROOT = Path(__file__).parents[2]
_PRODUCT = tuple(str(_ROOT / name) + "/" for name in ("nemorl", "algorithms"))
_TORCH = str(Path(torch.__file__).parent) + "/"


@dataclass(frozen=True)
class Event:
    """A wait of the host, a copy to the device, or an operator with tensors of several devices."""

    phase: str
    what: str  # the operator
    location: str  # file:line (function), of the product or of a library
    called_from: str = ""  # the place in the product, where `location` is in a library
    in_micro_batch: bool = False  # between the first and the last micro-batch of a call


@dataclass(frozen=True)
class Kernel:
    """An operator that computes on the device: most are one kernel, some a few."""

    phase: str
    operator: str
    in_backward: bool  # computed by autograd, recomputed activations included


@dataclass(frozen=True)
class _Place:
    file: str  # of the product
    location: str
    called_from: str


def _described(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    for root in (str(Path(_TORCH).parent) + "/", str(_ROOT) + "/"):
        path = path.removeprefix(root)
    return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def current_place() -> _Place:
    """Where the present operator was called: the innermost frame that is not torch's, and the product's."""
    innermost: FrameType | None = None
    for frame in _frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.startswith((_HERE, _TORCH, "<")):
            continue
        if innermost is None:
            innermost = frame
        if file.startswith(_PRODUCT):
            called_from = "" if frame is innermost else _described(frame)
            return _Place(file, _described(innermost), called_from)
    return _Place("", "" if innermost is None else _described(innermost), "")


def _in_micro_batch() -> bool:
    """True while Megatron's schedule runs, in which autograd may have threads of its own."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return any(
        frame.f_code.co_filename.endswith("pipeline_parallel/schedules.py")
        for own in (sys._getframe(1), main)
        for frame in _frames(own)
    )


class Execution(TorchDispatchMode):
    """Runs operators; those of the device as described above. One per process."""

    def __init__(self) -> None:
        super().__init__()
        install(lambda: self._synchronized("synchronize"))
        use_pretended_groups()
        self.others = Others()
        self.memory = DeviceMemory(lambda: (lambda p: (p.file, p.location))(current_place()))
        self.synchronizations: Counter[Event] = Counter()
        self.wrong_devices: Counter[Event] = Counter()
        self.uploads: Counter[Event] = Counter()  # from memory that is not pinned
        self.kernels: Counter[Kernel] = Counter()
        self._phase = ""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._collectives = Collectives(self.others, self._writable, self._forget)

    def __enter__(self) -> "Execution":
        # Else `torch.tensor(list, device=...)` would ask the device itself for a copy.
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside under this name."""
        before, self._phase = self._phase, name
        self.memory.begin(name)
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func.namespace == "c10d":
            return self._collectives.run(func, args)
        if func is aten.pin_memory.default:
            return self._pin(args[0])
        if _is_composed(func):  # in inference mode they come as they are
            with self:
                return func.decompose(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and is_pretended(device):
            kwargs = {**kwargs, "device": torch.device(DEVICE, 0)}
            if func is not aten._to_copy.default:
                kwargs.pop("pin_memory", None)
        tensors = list(_tensors((*args, *kwargs.values())))
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not is_fake and not is_pretended(device):
            return self._on_host(func, args, kwargs)
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        return self._on_device(func, args, kwargs, tensors)

    # Operators of the host

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._pin_memory.default:
            return self._pin(args[0])
        is_pinned = kwargs.pop("pin_memory", False)
        has_data = str(kwargs.get("device")) != "meta"
        is_large = has_data and func in _FACTORIES and _elements(args[0]) > _MAX_REAL
        result = self._fake_call(func, args, kwargs) if is_large else func(*args, **kwargs)
        if is_pinned:
            result._is_pinned = True
        return result

    def _pin(self, tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        pinned._is_pinned = True  # type: ignore[attr-defined]
        return pinned

    # Operators of the device

    def _on_device(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        if func not in _TAKES_HOST_INDICES and self._is_mixed(func, tensors):
            args, kwargs = tree_map(self._moved, (args, kwargs))
            tensors = list(_tensors((*args, *kwargs.values())))
        if not func.is_view and func not in _WITHOUT_KERNEL:
            in_backward = torch._C._current_autograd_node() is not None
            self.kernels[Kernel(self._phase, func._schema.name, in_backward)] += 1
        result = self._fake_call(func, args, kwargs)
        outputs = list(_tensors((result,)))
        if outputs:
            self._compute_values(func, args, kwargs, tensors, outputs)
            if func in _GUESSES:
                _GUESSES[func](args, kwargs, result)
        elif func._schema.is_mutable:  # an optimizer's step, which returns nothing
            for tensor in tensors:
                self._forget(tensor)
        return result

    def _fake_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._fake:
            result = func(*args, **kwargs)
        self.memory.note(_tensors((result,)))
        return result

    def _is_mixed(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        """Note an operator with tensors of several devices, which a GPU refuses; numbers may differ."""
        if len({_device(tensor) for tensor in tensors if tensor.dim()}) < 2:
            return False
        place = current_place()
        shapes = ", ".join(f"{tuple(tensor.shape)} on {tensor.device.type}" for tensor in tensors)
        what = f"{func._schema.name.removeprefix('aten::')} of {shapes}"
        self.wrong_devices[Event(self._phase, what, place.location, place.called_from)] += 1
        return True

    def _moved(self, leaf: Any) -> Any:
        """The rehearsal continues as if the tensor were on the device."""
        if not isinstance(leaf, Tensor) or not leaf.dim() or is_pretended(leaf.device):
            return leaf
        options = {"dtype": leaf.dtype, "device": torch.device(DEVICE, 0)}
        return self._fake_call(aten.empty_strided.default, [list(leaf.shape), list(leaf.stride())], options)

    def _compute_values(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], outputs: Any
    ) -> None:
        changed, is_constant = func._schema.is_mutable, func in _CONSTANTS
        if not (changed or is_constant) and any(
            isinstance(tensor, FakeTensor) and not hasattr(tensor, "_known") for tensor in tensors
        ):
            return
        if is_constant and outputs[0].is_floating_point() and not _keeps_value(outputs[0]):
            # Known whatever its arguments are, without memory of the host: not to be written to.
            if _keeps_value(outputs[0], is_constant):
                constant = torch.full((), _CONSTANTS[func], dtype=outputs[0].dtype)
                outputs[0]._known = constant.expand(outputs[0].shape)
            return
        values = [torch.empty(t.shape, dtype=t.dtype) if is_constant else self._value(t) for t in tensors]
        computable = all(value is not None for value in values) and not _is_random(func)
        if not changed and not all(_keeps_value(output, is_constant) for output in outputs):
            computable = False
        if not computable:
            if changed:
                for output in outputs:
                    self._forget(output)
            return
        by_tensor = {id(t): v for t, v in zip(tensors, values, strict=True)}
        host = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs

        def on_host(leaf: Any) -> Any:
            return by_tensor[id(leaf)] if isinstance(leaf, Tensor) else leaf

        try:
            computed = func(*tree_map(on_host, args), **tree_map(on_host, host))
        except (RuntimeError, NotImplementedError, IndexError):  # no such kernel on the host
            for output in outputs:
                self._forget(output)
            return
        if changed:
            return  # the values were changed in place
        of_values = [leaf for leaf in tree_leaves(computed) if isinstance(leaf, Tensor)]
        for output, value in zip(outputs, of_values, strict=True):
            output._known = value

    def _value(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, on the host; None if they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value: Tensor | None = getattr(tensor, "_known", None)
        if value is not None and hasattr(value.untyped_storage(), "_is_unknown"):
            return None
        return value

    def _writable(self, tensor: Tensor) -> Tensor | None:
        value = self._value(tensor)
        return None if value is None or (value.numel() > 1 and 0 in value.stride()) else value

    def _forget(self, tensor: Tensor) -> None:
        value: Tensor | None = getattr(tensor, "_known", None)
        if value is not None:
            value.untyped_storage()._is_unknown = True  # type: ignore[attr-defined]  # also of its views
            del tensor._known  # type: ignore[attr-defined]

    def read(self, tensor: Tensor) -> Tensor:
        """A copy on the host; 1 where nothing is known."""
        value = self._value(tensor)
        if value is not None:
            return value.clone()
        return torch.ones(tensor.shape, dtype=tensor.dtype)

    def _synchronized(self, operator: str) -> None:
        place = current_place()
        event = Event(self._phase, operator, place.location, place.called_from, _in_micro_batch())
        self.synchronizations[event] += 1

    # Operators that cross between host and device, or wait

    def _read_scalar(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_pretended(args[0].device):
            self._synchronized("item")
        return func(self.read(args[0]))

    def _to_copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        source, target = args[0], kwargs.get("device")
        if target is None or is_pretended(target) == is_pretended(source.device):
            return self._on_device(func, args, kwargs, [source])
        dtype = kwargs.get("dtype") or source.dtype
        if not is_pretended(target):
            if not kwargs.get("non_blocking"):  # else torch makes the copy in pinned memory
                self._synchronized("copy to the host")
            if source.numel() > _MAX_REAL:
                return self._fake_call(aten.empty.memory_format, [list(source.shape)], {"dtype": dtype})
            result = self.read(source).to(dtype)
            result._is_pinned = True  # type: ignore[attr-defined]
            return result
        self._uploaded(source, bool(kwargs.get("non_blocking")))
        return self._on_device_as(source, dtype)

    def _on_device_as(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the device with the values of one of the host."""
        options = {"dtype": dtype, "device": torch.device(DEVICE, 0)}
        result: Tensor = self._fake_call(
            aten.empty_strided.default, [list(source.shape), list(source.stride())], options
        )
        value = self._value(source)
        if value is not None and _keeps_value(result):
            result._known = value.to(dtype, copy=True)  # type: ignore[attr-defined]
        return result

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[0], args[1]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if is_pretended(target.device) == is_pretended(source.device):
            return self._on_device(func, args, kwargs, [target, source])
        if is_pretended(target.device):
            self._uploaded(source, not waits)
            value, known = self._value(source), self._writable(target)
            if value is None or known is None:
                self._forget(target)
            else:
                known.copy_(value)
            return target
        if waits or not _is_pinned(target):
            self._synchronized("copy to the host")
        if not isinstance(target, FakeTensor) and target.numel() <= _MAX_REAL:
            target.copy_(self.read(source))
        return target

    def _uploaded(self, source: Tensor, may_overlap: bool) -> None:
        if source.dim() and not (may_overlap and _is_pinned(source)):
            place = current_place()
            event = Event(self._phase, "copy to the device", place.location, place.called_from)
            self.uploads[event] += 1

    def _sized_by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The size of the result depends on values, for which the host waits."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._is_mixed(func, tensors)
        if not any(is_pretended(tensor.device) for tensor in tensors):
            return func(*tree_map(self._or_read, args), **kwargs)
        self._synchronized(func._schema.name.removeprefix("aten::"))
        computed = func(*tree_map(self._or_read, args), **tree_map(self._or_read, kwargs))

        def on_device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            options = {"dtype": value.dtype, "device": torch.device(DEVICE, 0)}
            result = self._fake_call(aten.empty.memory_format, [list(value.shape)], options)
            if all(self._value(tensor) is not None for tensor in tensors) and _keeps_value(result):
                result._known = value
            return result

        return tree_map(on_device, computed)

    def _or_read(self, leaf: Any) -> Any:
        return self.read(leaf) if isinstance(leaf, FakeTensor) else leaf

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A mask as an index is turned into places, for whose number the host waits."""
        source, given = args[0], [index for index in args[1] if index is not None]
        masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
        value = args[2] if func is not aten.index.Tensor else source
        if masks and len(args[1]) == 1 and not value.dim() and not is_pretended(value.device):
            # A number of the host under a mask is filled in, as torch does it on a GPU.
            mask = masks[0][(..., *[None] * (source.dim() - masks[0].dim()))]
            fill = aten.masked_fill_.Scalar
            return self._on_device(fill, (source, mask, value.item()), {}, [source, mask])
        if any(is_pretended(mask.device) for mask in masks):
            self._synchronized("index by a mask")
        if not is_pretended(source.device):  # a GPU takes indices of the host, and not the reverse
            self._is_mixed(func, [source, *given])
            source = self._moved(source)
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None:
                indices.append(None)
                continue
            if index.dim() and not is_pretended(index.device):
                self._uploaded(index, may_overlap=False)
            is_mask = any(index is mask for mask in masks)
            places = self.read(index).bool().nonzero(as_tuple=True) if is_mask else (index,)
            indices += [p if is_pretended(p.device) else self._on_device_as(p, p.dtype) for p in places]
        args = (source, indices, *args[2:])
        return self._on_device(func, args, kwargs, list(_tensors((*args, *kwargs.values()))))

    def _repeat_interleave(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("output_size") is None:
            return self._sized_by_values(func, args, kwargs)
        return self._on_device(func, args, kwargs, [args[0]])

    def _equal(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._is_mixed(func, args)
        self._synchronized("equal")
        return func(*map(self._or_read, args))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the arguments or results of an operator."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _device(tensor: Tensor) -> str:
    return tensor.fake_device.type if isinstance(tensor, FakeTensor) else "cpu"


def _elements(size: Any) -> int:
    count = 1
    for extent in size if isinstance(size, (list, tuple, torch.Size)) else [size]:
        count *= int(extent)
    return count


def _is_pinned(tensor: Tensor) -> bool:
    base = tensor._base if tensor._base is not None else tensor
    return bool(getattr(tensor, "_is_pinned", False) or getattr(base, "_is_pinned", False))


def _keeps_value(tensor: Tensor, is_constant: bool = False) -> bool:
    is_exact = is_constant or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return tensor.numel() <= _MAX_KNOWN[is_exact]


@cache
def _is_composed(func: Any) -> bool:
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        and func.namespace == "aten"
    )


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _spread_evenly(args: Any, kwargs: Any, result: Any) -> None:
    """Of indices of the largest, the most even ones: experts are equally busy."""
    indices = result[1]
    if indices.dim() and _keeps_value(indices):
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        extent = max(1, args[0].shape[dim])
        indices._known = (torch.arange(indices.numel()) % extent).view(indices.shape)


_FACTORIES = {
    aten.empty.memory_format,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
}
_WITHOUT_KERNEL = {
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_CONSTANTS = {aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.new_zeros.default: 0}
_TAKES_HOST_INDICES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_GUESSES = {aten.topk.default: _spread_evenly}
_RULES: dict[Any, Any] = {
    aten._local_scalar_dense.default: Execution._read_scalar,
    aten._to_copy.default: Execution._to_copy,
    aten.copy_.default: Execution._copy,
    aten.nonzero.default: Execution._sized_by_values,
    aten.masked_select.default: Execution._sized_by_values,
    aten._unique2.default: Execution._sized_by_values,
    aten.unique_consecutive.default: Execution._sized_by_values,
    aten.bincount.default: Execution._sized_by_values,
    aten.repeat_interleave.Tensor: Execution._repeat_interleave,
    aten.index.Tensor: Execution._index,
    aten.index_put_.default: Execution._index,
    aten.index_put.default: Execution._index,
    aten._index_put_impl_.default: Execution._index,
    aten.equal.default: Execution._equal,
}
