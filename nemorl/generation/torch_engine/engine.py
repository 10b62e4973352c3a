"""The embedded engine: a dense decoder in plain torch, its weights and its staging."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.batching import BatchingEngine
from nemorl.generation.tokens import Decode, RequestLimits
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice

from .model import ModelRunner


class TorchEngine(BatchingEngine):
    """Continuous batching over a network of its own."""

    def __init__(
        self,
        shape: ModelShape,
        config: TorchGenerationConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_sequence_length: int,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`decode` turns tokens into text and is required for stop strings only; `clock` counts seconds."""
        self._model = ModelRunner(
            shape,
            max_kv_tokens=config.max_kv_tokens,
            max_positions=max_sequence_length,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            self._model,
            RequestLimits(
                shape.vocab_size, max_sequence_length, config.max_kv_tokens, can_decode=decode is not None
            ),
            max_batch_size=config.max_batch_size,
            device=device,
            decode=decode,
            clock=clock,
        )

    def load(self, folder: Path, version: int = 0) -> None:
        """Take the weights of an HF folder."""
        self._model.load(folder)
        self.weights_changed(version)

    def slices(self) -> list[TensorSlice]:
        """Which boxes of the HF checkpoint the engine holds."""
        return self._model.slices()

    def staging_parameters(self) -> Mapping[str, Tensor]:
        """Where an exchange writes new weights; the engine samples with the old ones until `commit`."""
        return self._model.staging_parameters()

    def commit(self, version: int) -> None:
        """Sample with the staged weights from the next step on."""
        self._model.commit()
        self.weights_changed(version)
