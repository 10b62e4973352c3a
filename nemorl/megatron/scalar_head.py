"""One number after each token instead of the vocabulary: the head of a critic or a reward model."""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ScalarHead(torch.nn.Module):
    """A linear layer to one number, the same on all tensor-parallel ranks.

    Zero until weights are loaded, so that a fresh critic expects nothing of any state.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self._sequence_parallel = config.sequence_parallel
        # Then a rank multiplies it with its own tokens only, and Megatron sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [n] float32, from hidden states [n, 1, H], of n / TP tokens under sequence parallelism."""
        values = F.linear(hidden, self.weight).float().flatten()
        if not self._sequence_parallel:
            return values
        # All ranks compute the same loss from the values, so each has the whole gradient of its own.
        return tensor_parallel.gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            values, tensor_parallel_output_grad=False
        )
