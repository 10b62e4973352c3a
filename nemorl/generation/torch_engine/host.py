"""The process of an embedded engine: its front, and its side of the weight exchange.

The embedded engine: a dense decoder in plain torch, its weights and its staging.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.batching import BatchingEngine
from nemorl.generation.front import EngineFront
from nemorl.generation.step_driver import ThreadDriver
from nemorl.generation.tokens import Decode, RequestLimits, load_decoder
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.weights.endpoints import WeightReceiver
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout, RefitDeadline, RefitSession

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


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def create_engine(
    config: TorchGenerationConfig,
    model_path: Path,
    *,
    device: Literal["cpu", "cuda"],
    precision: Literal["float32", "bfloat16"],
    tokenizer_path: Path,
    max_sequence_length: int,
) -> TorchEngine:
    """The embedded engine, with the weights of `model_path` as version 0.

    `precision` is the policy's, taken where the config names none.
    """
    engine = TorchEngine(
        load_shape(model_path),
        config,
        device=torch.device(device),
        dtype=_DTYPES[config.precision or precision],
        max_sequence_length=max_sequence_length,
        decode=load_decoder(tokenizer_path),
    )
    engine.load(model_path)
    return engine


class GenerationWorker(EngineFront[ThreadDriver]):
    """Samples, and takes new weights without losing what is in flight.

    A refit: write `staging_parameters()` (at any time, sampling continues), then `commit(version)`. Sequences
    in flight continue with the new weights and keep their keys and values; pause with `wait` before it for
    sequences of one version, with `keep` to hold sampling still while weights travel.
    """

    def __init__(
        self,
        model_path: Path,
        config: TorchGenerationConfig,
        *,
        rank: int,
        device: Literal["cpu", "cuda"],
        threads: int | None,
        tokenizer_path: Path,
        max_sequence_length: int,
        precision: Literal["float32", "bfloat16"],
    ) -> None:
        """Load the model. `threads`: CPU threads of the engine; `precision`: the policy's, see the config."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._engine = create_engine(
            config,
            Path(model_path),
            device=device,
            precision=precision,
            tokenizer_path=Path(tokenizer_path),
            max_sequence_length=max_sequence_length,
        )
        super().__init__(ThreadDriver(self._engine, f"generation engine {rank}", threads))

    async def commit(self, version: int) -> None:
        """Take the staged weights whole, between two steps; tokens sampled from then on carry `version`."""
        await self.driver.call(lambda: self._engine.commit(version))

    def slices(self) -> list[TensorSlice]:
        """Which boxes of the HF checkpoint the engine holds."""
        return self._engine.slices()

    def staging_parameters(self) -> Mapping[str, Tensor]:
        """Where an exchange writes new weights, by parameter name; the same tensors every time."""
        return self._engine.staging_parameters()

    def close(self) -> None:
        """End the engine; pending requests get EngineFailed."""
        self.driver.close()


class GenerationHost(GenerationWorker):
    """A generation rank as the driver and the rollout workers call it. Lives in an event loop."""

    def __init__(
        self, config: TorchGenerationConfig, *, rank: int, commit_seconds: float, **options: Any
    ) -> None:
        """`commit_seconds` limits how long the swap of staged weights waits for the engine's step."""
        super().__init__(config=config, rank=rank, **options)
        loop = asyncio.get_running_loop()

        def commit(version: int) -> None:
            # The receiver commits from another thread, so that sampling continues until the swap.
            swap = asyncio.run_coroutine_threadsafe(self.commit(version), loop)
            try:
                swap.result(commit_seconds)
            except TimeoutError as error:
                swap.cancel()
                raise RefitDeadline(
                    f"refit to version {version}: generation rank {rank} has received the weights, and its "
                    f"engine has not taken them within {commit_seconds:g} s (cluster.deadlines.refit)"
                ) from error

        self._receiver = WeightReceiver(self.slices(), self.staging_parameters, commit)

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        """What this engine's one rank needs, for the plan of the exchange."""
        return (self._receiver.describe(),)

    def prepare_refit(self, parts: tuple[Part, ...]) -> None:
        """Keep this rank's part of the plan."""
        (part,) = parts
        self._receiver.prepare(part)

    async def receive_weights(self, session: RefitSession) -> tuple[ReceiveReport, ...]:
        """This rank's side of a refit; the event loop keeps serving meanwhile."""
        return (await asyncio.to_thread(self._receiver.begin(session)),)

    async def commit_weights(self, version: int) -> None:
        """Sample with what was received."""
        await asyncio.to_thread(self._receiver.commit, version)

    def abandon_refit(self) -> None:
        """Stay on the version in use."""
        self._receiver.abandon()
