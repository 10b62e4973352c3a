"""What a device can do and which sizes suit it. Code asks here instead of testing the type of a device.

`nemorl.megatron.device` adapts Megatron to a CPU. What is said of GPUs here was not run on hardware.
"""

import torch


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def elements_per_pass(device: torch.device) -> int:
    """Elements that one kernel of a long sum reads: on a CPU, what stays in a core's cache as int64 (512 KB).

    On a GPU the launches cost more than the memory that the products take (128 MB).
    """
    return 1 << (24 if _is_gpu(device) else 16)
