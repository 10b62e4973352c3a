"""Do the quantizers give the same bits on a GPU as on a CPU, and as modelopt's own kernels?"""

import importlib

import torch
from gpu_setting import Row, Setting, per_second
from meter import now

from nemorl.config.quantization import QuantizationFormat
from nemorl.models.quantized import dequantize, quantize

FORMATS: tuple[QuantizationFormat, ...] = ("int8", "fp8", "fp8_channel", "fp8_block", "int4", "nvfp4")
ROUNDS = 5


def measure(setting: Setting) -> tuple[list[Row], Row]:
    """Bits of a matrix of every format, and gigabytes of weights a second."""
    size = (128, 256) if setting.small else (8960, 1536)
    weight = 0.02 * torch.randn(size, generator=torch.Generator().manual_seed(0))
    rows = []
    for format in FORMATS:
        for dtype in (torch.bfloat16, torch.float32):
            here, there = weight.to(dtype), weight.to(dtype).to(setting.torch_device)
            expected, found = quantize(format, "w.weight", here), quantize(format, "w.weight", there)
            equal = all(torch.equal(bits(found[name].cpu()), bits(expected[name])) for name in expected)
            began = now(setting.device).seconds
            for _ in range(ROUNDS):
                quantize(format, "w.weight", there)
            seconds = (now(setting.device).seconds - began) / ROUNDS
            rows.append(
                {
                    "format": format,
                    "type": str(dtype).removeprefix("torch."),
                    "equal_to_cpu": "yes" if equal else "NO",
                    "milliseconds": 1e3 * seconds,
                    "gigabytes_per_second": per_second(there.nbytes / 1e9, seconds),
                }
            )
    return rows, {"modelopt": modelopt(setting, weight)}


def bits(values: torch.Tensor) -> torch.Tensor:
    """Numbers that have no comparison of their own, such as float8, as bytes."""
    return values.contiguous().view(torch.uint8) if values.dim() else values.reshape(1).view(torch.uint8)


def modelopt(setting: Setting, weight: torch.Tensor) -> str:
    """How the values of NVFP4 compare with those of modelopt's kernel, or why they were not compared."""
    if setting.device == "cpu":
        return "not compared: its kernel for NVFP4 requires a GPU"
    try:
        importlib.import_module("modelopt.torch.quantization.tensor_quant")  # defines its operators
    except ImportError as error:
        return f"not compared: {error}"
    there = weight.to(setting.torch_device)
    # Blocks of 16, values of 4 bits with 2 for the exponent, scales of 8 bits with 4 for the exponent.
    theirs = torch.ops.tensorrt.dynamic_block_quantize_op(there, 16, there.abs().amax(), 4, 2, 8, 4)
    ours = dequantize("nvfp4", "w.weight", quantize("nvfp4", "w.weight", there))
    differences = int((theirs != ours).sum())
    return "equal to the bit" if not differences else f"{differences} of {ours.numel()} values differ"
