"""A pretended accelerator: torch takes it for a device of its own, and its tensors have no data.

The device is torch's `PrivateUse1` under another name, so `torch.accelerator` reports it and autograd
runs on it. `torch.cuda` answers for it to code that names CUDA, which is Megatron's. All of this holds for
the rest of the process: rehearse in a process of its own.
"""

import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import backend_registration

DEVICE = "pretended"
_UUID = "GPU-pretended-0000"


@lru_cache(maxsize=1)
def install(record_wait: Callable[[], None]) -> None:
    """Register the device; `record_wait` is called where the host would wait for the whole device."""
    # It looks at functions that are replaced below. Nothing is compiled for the device.
    dynamo: Any = importlib.import_module("torch._dynamo")
    importlib.import_module("torch._dynamo.polyfills.loader")
    dynamo.config.disable = True
    importlib.import_module("megatron.core")
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    _answer_for_cuda(record_wait)
    _adapt_tensors()
    _adapt_storages()
    torch.nn.Module._apply = _move_module  # type: ignore[method-assign]
    _use_kernels_of_a_gpu()


def is_pretended(device: Any) -> bool:
    """True for the device, and for what names CUDA."""
    return getattr(device, "type", device) in (DEVICE, "cuda")


class _Stream:
    """A queue; there is nothing in it."""

    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True


def _answer_for_cuda(record_wait: Callable[[], None]) -> None:
    cuda: Any = torch.cuda
    state = torch.zeros(16, dtype=torch.uint8)

    def wait(self: Any = None, *_: Any, **__: Any) -> None:
        record_wait()

    _Stream.synchronize = _Event.synchronize = wait  # type: ignore[attr-defined]

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    # A function for each: dynamo looks them up as objects. The first is for factories that name CUDA, whose
    # tensors become pretended ones.
    for name in ("_lazy_init", "set_device", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.is_current_stream_capturing = lambda: False  # torch 2.11's optimizers ask
    cuda.current_device = lambda: 0
    cuda.synchronize = wait
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, stream
    cuda.current_stream = lambda *_: _Stream()
    cuda.default_stream = lambda *_: _Stream()
    accelerator: Any = torch.accelerator
    accelerator.current_stream = lambda *_: _Stream()
    # Generators of the device draw nothing.
    cuda.get_rng_state = lambda *_, **__: state.clone()
    cuda.set_rng_state = lambda *_, **__: None
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        uuid=_UUID, multi_processor_count=132, major=9, minor=0, name=DEVICE
    )
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: state.clone()
    random._set_cuda_rng_state = lambda *_, **__: None


def _adapt_tensors() -> None:
    tensor: Any = Tensor
    type_ = tensor.type

    def type_as_on_a_gpu(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_(self, *args, **kwargs)
        return answer.replace(f"torch.{DEVICE}.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    tensor.type = type_as_on_a_gpu
    to, make = tensor.to, torch.tensor
    tensor.cuda = lambda self, *_, **__: to(self, DEVICE)

    def own_device(device: Any) -> Any:
        is_cuda = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
        return torch.device(DEVICE, 0) if is_cuda else device

    def to_own(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs:
            kwargs["device"] = own_device(kwargs["device"])
        return to(self, *map(own_device, args), **kwargs)  # type: ignore[no-any-return]

    def make_own(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        return make(read_scalars(data), device=own_device(device), **kwargs)

    def read_scalars(data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return [read_scalars(one) for one in data]
        return data.item() if isinstance(data, Tensor) and is_pretended(data.device) else data

    setitem = tensor.__setitem__

    def setitem_as_on_a_gpu(self: Tensor, index: Any, value: Any) -> None:
        # For CUDA alone torch keeps a number on the host, which with a mask avoids a wait.
        is_number = isinstance(value, (bool, int, float)) and is_pretended(self.device)
        setitem(self, index, make(value, dtype=self.dtype) if is_number else value)

    tensor.__setitem__ = setitem_as_on_a_gpu
    tolist = tensor.tolist

    def tolist_at_once(self: Tensor) -> Any:
        return tolist(self.cpu() if is_pretended(self.device) else self)

    tensor.tolist = FakeTensor.tolist = tolist_at_once  # type: ignore[method-assign]
    # Those that would ask CUDA itself; other functions reach the operators with a device that names it.
    library: Any = torch
    tensor.to, library.tensor = to_own, make_own
    tensor.is_cuda = property(lambda self: self.device.type == DEVICE)
    tensor.record_stream = lambda *_: None
    # Addresses differ as storages do, which have no memory.
    tensor.data_ptr = lambda self: (
        self.untyped_storage().data_ptr() + (self.storage_offset() * self.element_size())
    )


def _adapt_storages() -> None:
    """Storages without data are those of the device, and each has an address of its own."""
    storage: Any = torch.UntypedStorage
    data_ptr, device = storage.data_ptr, storage.device

    def own_device(self: Any) -> torch.device:
        real = device.__get__(self)
        return torch.device(DEVICE, 0) if real.type == "meta" else real

    storage.device = property(own_device)
    storage.data_ptr = lambda self: self._cdata if device.__get__(self).type == "meta" else data_ptr(self)


def _move_module(self: torch.nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """`Module._apply`: on a GPU a parameter stays what it is, here a new one gets its attributes."""
    if recurse:
        for child in self.children():
            child._apply(function)
    with torch.no_grad():
        for name, parameter in self._parameters.items():
            if parameter is not None and (moved := function(parameter)) is not parameter:
                new = torch.nn.Parameter(moved, requires_grad=parameter.requires_grad)
                vars(new).update(vars(parameter))
                self._parameters[name] = new
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = function(buffer)
    return self


class _FusedNorm(torch.autograd.Function):
    """What CUDA's kernel of `rms_norm` allocates and keeps; elsewhere torch composes it of operators."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None) -> Tensor:
        inverse = input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(input, weight, inverse)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight)


def _use_kernels_of_a_gpu() -> None:
    """Where torch chooses a kernel by the device, choose as it does for CUDA, with that kernel's memory."""
    functional: Any = F
    composed_norm, composed_attention = functional.rms_norm, functional.scaled_dot_product_attention

    def rms_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if not is_pretended(input.device):
            return composed_norm(input, normalized_shape, weight, eps)  # type: ignore[no-any-return]
        return _FusedNorm.apply(input, weight)  # type: ignore[no-any-return]

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not is_pretended(query.device):
            return composed_attention(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
            if attn_mask.dtype == torch.bool:
                attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
        if query.dtype != torch.float32 and attn_mask is None:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        keeps = torch.is_grad_enabled() and query.requires_grad
        return efficient(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]

    functional.rms_norm, functional.scaled_dot_product_attention = rms_norm, attention
