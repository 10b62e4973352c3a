"""The embedded engine and its process: continuous batching over a network of its own, and weight updates.

Sequences in flight continue with new weights and keep their keys and values; pause with `wait` before an
update for sequences of one version, with `keep` to hold sampling still while weights travel.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.batching import BatchingEngine
from nemorl.generation.step_driver import StepDriver
from nemorl.generation.tokens import Decode, RequestLimits, load_decoder
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.weights.endpoints import WeightReceiver
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout, RefitDeadline, RefitSession

from .model import ModelRunner

_END_SECONDS = 10.0  # for the step during which the engine is closed


class TorchEngine(BatchingEngine):
    """Continuous batching over `model`, which takes new weights between two steps."""

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
        self.model = ModelRunner(
            shape,
            max_kv_tokens=config.max_kv_tokens,
            max_positions=max_sequence_length,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            self.model,
            RequestLimits(shape.vocab_size, max_sequence_length, config.max_kv_tokens, decode is not None),
            max_batch_size=config.max_batch_size,
            device=device,
            decode=decode,
            clock=clock,
        )

    def commit(self, version: int) -> None:
        """Sample with the staged weights of `model` from the next step on."""
        self.model.commit()
        self.weights_changed(version)


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
        dtype=getattr(torch, config.precision or precision),
        max_sequence_length=max_sequence_length,
        decode=load_decoder(tokenizer_path),
    )
    engine.model.load(model_path)
    return engine


class TorchHost(StepDriver):
    """A rank of the embedded engine as the driver and the rollout workers call it."""

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
        commit_seconds: float,
    ) -> None:
        """Load the model and start the engine's thread. `threads`: CPU threads of the engine.

        `commit_seconds` limits how long the swap of staged weights waits for the engine's step.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self.engine = create_engine(
            config,
            Path(model_path),
            device=device,
            precision=precision,
            tokenizer_path=Path(tokenizer_path),
            max_sequence_length=max_sequence_length,
        )
        super().__init__(self.engine, f"generation engine {rank}")
        self._rank, self._num_threads, self._commit_seconds = rank, threads, commit_seconds
        model = self.engine.model
        self._receiver = WeightReceiver(model.slices(), model.staging_parameters, self._commit)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

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
        """Sample with what was received, from a step on; raises RefitDeadline for an engine that hangs."""
        await asyncio.to_thread(self._receiver.commit, version)

    def abandon_refit(self) -> None:
        """Stay on the version in use."""
        self._receiver.abandon()

    def close(self) -> None:
        """End the engine after the current step; pending requests get EngineFailed."""
        super().close()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # applies to the calling thread only
        self.run()

    def _commit(self, version: int) -> None:
        swap = self.post(lambda: self.engine.commit(version))
        try:
            swap.result(self._commit_seconds)
        except TimeoutError as error:
            swap.cancel()
            raise RefitDeadline(
                f"refit to version {version}: generation rank {self._rank} has received the weights, and its "
                f"engine has not taken them within {self._commit_seconds:g} s (cluster.deadlines.refit)"
            ) from error
