"""The generation worker: one engine in a thread of its own, and the service by which callers speak to it."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from nemorl.config.generation import TorchGenerationConfig
from nemorl.models.slices import TensorSlice

from .backends import Engine, SamplingEngine, create_engine
from .engine_thread import EngineLoop, EngineThread, PauseMode
from .types import Completion, EngineHealth, EngineStats, GenerationRequest, Report


class EngineService:
    """An engine in its loop, spoken to from an event loop."""

    def __init__(self, engine: SamplingEngine, loop: EngineLoop) -> None:
        self._sampler = engine
        self._loop = loop

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Completion, None]:
        """Completions as they finish, one by one; see `generate_batches`."""
        async with aclosing(self.generate_batches(requests)) as batches:
            async for batch in batches:
                for report in batch:
                    if isinstance(report, Completion):
                        yield report

    async def generate_batches(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[Sequence[Report], None]:
        """What finished together, as it finishes, and progress where a request asks for it; the requests join
        the batch together, in their order.

        Raises RequestRefused, before any of them begins, if one can never be served, and EngineFailed if the
        engine dies. A caller that stops reading ends what is left.
        """
        stream = _Stream()
        unanswered = len(requests)
        try:
            await asyncio.wrap_future(self._loop.submit(requests, stream))
            while unanswered:
                batch = await stream.next()
                unanswered -= sum(isinstance(report, Completion) for report in batch)
                yield batch
        finally:
            if unanswered:
                self._loop.abandon(stream)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; those in flight are answered with what they have and stop reason `abort`."""
        await asyncio.wrap_future(self._loop.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Return when no step runs or will run; requests that arrive meanwhile wait for `resume`."""
        await asyncio.wrap_future(self._loop.pause(mode))

    async def resume(self) -> None:
        """Go on sampling."""
        await asyncio.wrap_future(self._loop.resume())

    async def stats(self) -> EngineStats:
        """What was done since the last call."""
        return await asyncio.wrap_future(self._loop.call(self._sampler.take_stats))

    @property
    def version(self) -> int:
        """The version of the weights that sample."""
        return self._sampler.version

    def health(self) -> EngineHealth:
        """Where the engine stands. Raises EngineFailed, with its cause, if it is dead."""
        return self._loop.health()

    def close(self) -> None:
        """End the engine; whoever still waits gets EngineFailed."""
        self._loop.close()


class GenerationWorker(EngineService):
    """Samples for whoever asks, and takes new weights without losing what is in flight.

    A refit: write `staging_parameters()` (at any time, sampling goes on), then `commit(version)`. Sequences
    in flight go on with the new weights and keep their keys and values; pause with `wait` before it for
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
        self._engine: Engine = create_engine(
            config,
            Path(model_path),
            device=device,
            precision=precision,
            tokenizer_path=Path(tokenizer_path),
            max_sequence_length=max_sequence_length,
        )
        super().__init__(self._engine, EngineThread(self._engine, f"generation engine {rank}", threads))

    async def commit(self, version: int) -> None:
        """Take the staged weights whole, between two steps; tokens sampled from then on carry `version`."""
        await asyncio.wrap_future(self._loop.call(lambda: self._engine.commit(version)))

    def slices(self) -> list[TensorSlice]:
        """Which boxes of the HF checkpoint the engine holds."""
        return self._engine.slices()

    def staging_parameters(self) -> Mapping[str, Tensor]:
        """Where an exchange writes new weights, by parameter name; the same tensors every time."""
        return self._engine.staging_parameters()


class _Stream:
    """Completions on their way from the engine's thread to the event loop that made the stream."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Sequence[Report] | Exception] = asyncio.Queue()

    async def next(self) -> Sequence[Report]:
        """The next reports, in the order in which they were made."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def put(self, reports: Sequence[Report]) -> None:
        """Called from the engine's thread."""
        self._send(reports)

    def fail(self, error: Exception) -> None:
        """Called from the engine's thread."""
        self._send(error)

    def _send(self, item: Sequence[Report] | Exception) -> None:
        if not self._loop.is_closed():  # whose reader is gone with it
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
