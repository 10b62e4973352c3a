"""What a device can do and which sizes suit it. Code asks here instead of testing the type of a device.

`nemorl.megatron.device` adapts Megatron to a CPU. What is said of GPUs here was not run on hardware.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike


def _is_gpu(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


def gpu(rank: int) -> torch.device | None:
    """The GPU of a process, the only one it sees or the one of its rank; None if it sees none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    return torch.device(accelerator.type, rank % torch.accelerator.device_count())


def prefill_tokens(device: torch.device) -> int:
    """Tokens of one forward pass over prompts, padding included, which bound the activations.

    A GPU needs many of them to be busy.
    """
    return 16384 if _is_gpu(device) else 2048


def cheap_rows(device: torch.device) -> int:
    """Rows of a product whose arithmetic takes as long as reading its weights: up to these, more cost little.

    Of a CPU as measured with SmolLM2 in float32; of a GPU about its operations per byte in bfloat16.
    """
    return 256 if _is_gpu(device) else 8


def pins_memory(device: torch.device) -> bool:
    """True if copies to the device need pinned memory of the host, or the host waits for them."""
    return _is_gpu(device)


def smallest_offload(device: torch.device) -> int:
    """Bytes from which a copy to the host takes longer than its launch, of a GPU some 10 microseconds."""
    return 1 << (20 if _is_gpu(device) else 10)


def upload(device: torch.device, *arrays: ArrayLike) -> tuple[torch.Tensor, ...]:
    """Rows of integers as int64 on the device, in one copy that the host does not wait for."""
    parts = [np.asarray(array, dtype=np.int64) for array in arrays]
    together = torch.from_numpy(np.concatenate(parts))
    if pins_memory(device):
        together = together.pin_memory()
    uploaded: tuple[torch.Tensor, ...] = together.to(device, non_blocking=True).split([*map(len, parts)])
    return uploaded


def captures_graphs(device: torch.device) -> bool:
    """True if a sequence of kernels can be captured once and launched as one (CUDA graphs)."""
    return device.type == "cuda"


def takes_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the kernels of flash-attn, where they are installed, compute in this type."""
    return _is_gpu(device) and dtype in (torch.bfloat16, torch.float16)


def sums_in_order(device: torch.device) -> bool:
    """True if cumulative sums add one element after the other, so that they never decrease by rounding."""
    return not _is_gpu(device)


def has_packed_linear(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a linear layer of few rows is faster with weights in oneDNN's packed layout."""
    if _is_gpu(device) or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def has_int8_products() -> bool:
    """True if oneDNN's products of int8 are right on this processor.

    On x86 without VNNI it adds products in 16 bits, in which they saturate.
    """
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") != "x86_64":
        return True
    return bool(capabilities.get("avx512_vnni") or capabilities.get("avx_vnni"))


def packs_loaded_weights(device: torch.device) -> bool:
    """True if vLLM keeps loaded weights in a layout of its kernels, and computes with that copy."""
    return not _is_gpu(device)


def make_current(device: torch.device) -> None:
    """Make a GPU that of this thread, whose current one is otherwise the first that the process sees."""
    if _is_gpu(device):
        torch.accelerator.set_device_index(device)


def current_gpu() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "a process of a GPU sees one"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def wait_for_queue(device: torch.device) -> None:
    """Wait until the device has done what this thread queued; a CPU queues nothing."""
    if _is_gpu(device):
        torch.accelerator.current_stream(device).synchronize()


def gpu_identity(device: torch.device) -> str:
    """Name of a GPU for processes that number those they see; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if _is_gpu(device) else ""


def has_dense_attention_with_lse(device: torch.device) -> bool:
    """True if dense attention can return the log-sum-exps that join its outputs over blocks of keys."""
    return not _is_gpu(device)


def has_float32_products(device: torch.device) -> bool:
    """True if a product of half-precision matrices can be returned as it is summed, in float32."""
    return _is_gpu(device)


def approximation_dtype(device: torch.device) -> torch.dtype:
    """The type for products of which only an approximation is needed: bfloat16 where it is far faster."""
    return torch.bfloat16 if _is_gpu(device) else torch.float32
