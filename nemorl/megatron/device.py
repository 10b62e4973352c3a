"""The device: the only module that asks about CUDA.

For a CPU functions of `torch.cuda` that would raise without a GPU are replaced, modules of Megatron that pass
`device="cuda"` get a view of `torch` that creates tensors on the CPU, and while a model is built two methods
of `Tensor` are replaced. A global `TorchFunctionMode` would slow every operation.
"""

import importlib
import inspect
import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from nemorl.device import gpu, make_current, pins_memory

from .kernels import AttentionName

DeviceKind = Literal["cpu", "cuda"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_MODULES_THAT_NAME_CUDA = (
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.utils",
)
_GROUPED = "enable_gqa"
_FACTORIES = ("zeros", "ones", "empty", "tensor")


def select_device(kind: DeviceKind, rank: int) -> torch.device:
    """The device of a process, made current: the only GPU it sees, the one of its rank, or the CPU.

    Raises `RuntimeError` when CUDA is requested and not available.
    """
    # Megatron overlaps tensor-parallel communication in the order of its issue, and warns if this is not set.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Its router asks whether a name is None that it imports only together with Transformer Engine.
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Its recomputation of norms asks for Transformer Engine's FP8 state also where there is no FP8.
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not random.HAVE_TE:
        random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda **_: nullcontext()
    if kind == "cpu":
        _patch_megatron_for_cpu()
        return torch.device("cpu")
    device = gpu(rank)
    if device is None:
        raise RuntimeError(
            f"policy rank {rank} was placed on a GPU but this process sees none: set cluster.gpus_per_node "
            "to 0 to run on the CPU, or check CUDA_VISIBLE_DEVICES and the driver"
        )
    make_current(device)
    # cuDNN builds a graph for each shape, which decoding changes all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


class KernelRows(NamedTuple):
    """Rows of queries and of the keys that they look at; the last query of a row sees its last key."""

    cu_queries: Tensor  # [rows + 1] int32
    cu_keys: Tensor
    max_queries: int
    max_keys: int


# (query, key, value, rows, scale, window) -> causal attention within each row; `window` as in PackedAttention
AttentionKernel = Callable[[Tensor, Tensor, Tensor, KernelRows, float | None, int | None], Tensor]


def packed_attention_kernel(name: AttentionName) -> AttentionKernel | None:
    """The variable-length attention of a name; None for the one in buckets, which needs no kernel."""
    if name == "torch_buckets":
        return None
    if name == "flash_attn":
        flash_attn = importlib.import_module("flash_attn").flash_attn_varlen_func
        return lambda q, k, v, rows, scale, window: flash_attn(
            q, k, v, *rows, causal=True, softmax_scale=scale, window_size=window_size(window)
        )
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    has_groups = _GROUPED in inspect.signature(varlen_attn).parameters
    return lambda q, k, v, rows, scale, window: varlen_attn(
        *(q, k, v, *rows), scale=scale, window_size=window_size(window), **grouped(q, k, has_groups)
    )


def grouped(query: Tensor, key: Tensor, is_argument: bool) -> dict[str, bool]:
    """The argument by which torch's variable-length attention allows fewer key than query heads.

    torch 2.11 has no such argument; its kernel takes them without being asked.
    """
    return {_GROUPED: query.shape[1] != key.shape[1]} if is_argument else {}


@lru_cache
def takes_groups(operator: Any) -> bool:
    """True if an operator of torch has the argument of `grouped`."""
    return any(argument.name == _GROUPED for argument in operator.default._schema.arguments)


def window_size(window: int | None) -> tuple[int, int]:
    """Tokens before and after itself that a query sees, as kernels say it: -1 for all."""
    return (-1 if window is None else window - 1), 0


@contextmanager
def building(kind: DeviceKind) -> Iterator[None]:
    """While Megatron builds something on a CPU, `Tensor.cuda` and `Tensor.type` answer as on a GPU."""
    if kind == "cuda":
        yield
        return
    tensor: Any = Tensor
    cuda, type_ = tensor.cuda, tensor.type

    def type_as_on_a_gpu(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    tensor.cuda = lambda self, *_, **__: self
    tensor.type = type_as_on_a_gpu
    try:
        yield
    finally:
        tensor.cuda, tensor.type = cuda, type_


def random_states(kind: DeviceKind) -> dict[str, Tensor]:
    """States of the random generators of this process, as byte tensors."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if kind == "cuda" else {})


def restore_random_states(kind: DeviceKind, states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if kind == "cuda":
        torch.cuda.set_rng_state(states["cuda"])


def host_buffer(kind: DeviceKind, like: Tensor) -> Tensor:
    """Memory of the host for a copy of a tensor; pinned where the copy comes from a GPU."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=pins_memory(torch.device(kind)))


def finish_copies(kind: DeviceKind) -> None:
    """Wait for copies between GPU and host that were issued without waiting."""
    if kind == "cuda":
        torch.cuda.current_stream().synchronize()


class CopyQueue:
    """Copies between GPU and host in a stream of their own, which no host waits for; on a CPU there is none,
    and copies are done when they return."""

    def __init__(self, kind: DeviceKind) -> None:
        self._stream = torch.cuda.Stream() if kind == "cuda" else None

    @contextmanager
    def after_computation(self) -> Iterator[None]:
        """Copies that are issued inside begin when what is queued for the GPU up to now is done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The end of the copies that were issued up to now."""
        return None if self._stream is None else self._stream.record_event()

    def computation_waits(self, mark: torch.cuda.Event | None) -> None:
        """What is queued for the GPU from now on begins when the copies up to `mark` are done."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


def release_memory(kind: DeviceKind) -> None:
    """Return memory that torch caches to the device."""
    if kind == "cuda":
        torch.cuda.empty_cache()


class _TorchOnCpu(types.ModuleType):
    """`torch`, except that factories put on the CPU what asks for CUDA."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return partial(_create_on_cpu, value) if name in _FACTORIES else value


def _create_on_cpu(factory: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if str(kwargs.get("device", "")).startswith("cuda"):
        kwargs["device"] = "cpu"
    return factory(*args, **kwargs)


class _Gloo(ProcessGroupGloo):
    """A group whose device is that of all groups of one member, if it has one member.

    Torch creates a device for each group, whose thread wakes up 100 times a second, and Megatron creates some
    twenty groups in every process, of which many have one member. Groups of several keep their own devices:
    over a shared one an all-reduce of 4 kB took 1.4 times as long.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if size > 1:
            super().__init__(store, rank, size, timeout)
            return
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._devices = timeout, [_shared_device()]
        super().__init__(store, rank, size, options)


@lru_cache(maxsize=1)
def _shared_device() -> Any:
    return ProcessGroupGloo.create_device(hostname="127.0.0.1")


@lru_cache(maxsize=1)
def _patch_megatron_for_cpu() -> None:
    groups: Any = importlib.import_module("torch.distributed.distributed_c10d")
    groups.ProcessGroupGloo = _Gloo
    # Or torch.compile makes kernels of Megatron's small functions: 10 to 30 s a process, with a C++ compiler.
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.config.disable = True
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: None  # kept by newer releases for CUDA graphs alone
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    optimizer.USING_PYTORCH_OPTIMIZER = True  # also if kernels for a GPU are installed
    view = _TorchOnCpu("torch")
    for name in _MODULES_THAT_NAME_CUDA:
        module: Any = importlib.import_module(name)
        module.torch = view
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    mappings._gather_along_first_dim = _uneven_gather(gather)
    mappings._reduce_scatter_along_first_dim = _uneven_reduce_scatter(reduce_scatter)
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"  # or it would make one
    dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _counts_on_cpu


def _uneven_gather(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """gloo gathers only tensors of equal size: pad those that expert tensor parallelism gathers unevenly."""

    def gather_along_first_dim(
        tensor: Tensor, group: Any, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if group.size() == 1 or sizes is None or len(set(sizes)) == 1:
            return gather(tensor, group, sizes, use_global_buffer)
        padded = _padded(tensor, max(sizes))
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather_along_first_dim


def _uneven_reduce_scatter(reduce_scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The reverse of `_uneven_gather`, for its gradient and for the experts' outputs."""

    def reduce_scatter_along_first_dim(
        tensor: Tensor, group: Any, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if group.size() == 1 or sizes is None or len(set(sizes)) == 1:
            return reduce_scatter(tensor, group, sizes, use_global_buffer)
        parts = [_padded(part, max(sizes)) for part in tensor.split(list(sizes))]
        output = torch.empty_like(parts[0])
        torch.distributed.reduce_scatter(output, parts, group=group)
        return output[: sizes[group.rank()]]

    return reduce_scatter_along_first_dim


def _padded(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])))


def _counts_on_cpu(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Replaces copies from device to host: the counts are on the host and are needed as numpy arrays."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(counts := getattr(self, name), Tensor):
                setattr(self, name, counts.numpy())
    return tokens_per_expert
