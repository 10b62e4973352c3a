"""Matrix products with weights that change only between steps."""

import torch
from torch import Tensor
from torch.nn import functional

# Rows of `x` are padded to a multiple of this by the callers: with fewer or ragged rows the CPU libraries
# take other kernels, whose sums round otherwise, and a sequence would then depend on who shares its batch.
ROW_MULTIPLE = 4
_TYPICAL_ROWS = 16  # what the packed layout is chosen for; any number of rows works


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed weights are used: for few rows they are twice as fast as torch's default."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """`x W^T + b` from a private copy of the weights, in the layout that is fastest on their device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy `weight` [out, in] and `bias` [out]; later writes to them are not seen."""
        self._bias = None if bias is None else bias.clone()
        self._packed = packs(weight.device, weight.dtype)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS) if self._packed else weight.clone()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]
        return functional.linear(x, self._weight, self._bias)
