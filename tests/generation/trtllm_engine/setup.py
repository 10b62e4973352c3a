"""A replica over the stand-in, with its event loop in a thread, and policies that hand it weights."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import hf_tensors, policy_rank, policy_slices
from nemorl.models.shape import ModelShape
from nemorl.models.tensors import local_view
from nemorl.weights.endpoints import WeightSender
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout, RefitSession
from tests.generation.examples import GREEDY, Prompts, completions, request
from tests.weights.ranks import Threads, allocate, box

T = TypeVar("T")
SECONDS = 60.0
BUCKET_BYTES = 8192


class Loop:
    """An event loop that lives as long as the tests of a module."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SECONDS)


class PolicySide:
    """One rank of a tensor-parallel policy."""

    def __init__(self, shape: ModelShape, rank: int) -> None:
        layout = LayoutConfig(tensor_parallel_size=2)
        self._slices = policy_slices(shape, policy_rank(layout, rank))
        self._parameters = allocate(self._slices, torch.float32)
        self.exchange = WeightSender(self._slices, lambda: self._parameters)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        for part in self._slices:
            local_view(self._parameters, part).copy_(tensors[part.name][box(part)])


class Receivers:
    """The replica as the driver calls it."""

    def __init__(self, loop: Loop, host: Any) -> None:
        self._loop, self._host = loop, host

    async def describe(self) -> Sequence[ReceiverLayout]:
        return await asyncio.to_thread(self._loop.run, self._host.describe_weights())

    async def prepare(self, parts: Sequence[Part]) -> None:
        await asyncio.to_thread(self._loop.run, self._host.prepare_refit(tuple(parts)))

    async def receive(self, session: RefitSession) -> Sequence[ReceiveReport]:
        return await asyncio.to_thread(self._loop.run, self._host.receive_weights(session))

    async def commit(self, version: int) -> None:
        await asyncio.to_thread(self._loop.run, self._host.commit_weights(version))

    async def abandon(self) -> None:
        await asyncio.to_thread(self._loop.run, self._host.abandon_refit())


class Setup:
    """A replica of TensorRT-LLM and a policy of TP2."""

    def __init__(self, loop: Loop, host: Any, shape: ModelShape) -> None:
        self.loop, self.host, self.shape = loop, host, shape
        self.policy = [PolicySide(shape, rank) for rank in range(2)]
        self.version = 0
        self.rewire()

    def rewire(self, options: TransportOptions | None = None) -> None:
        """As after a change of the layout."""
        receivers = Receivers(self.loop, self.host)
        self.exchange = WeightExchange(Threads(self.policy), receivers, BUCKET_BYTES, SECONDS / 2, options)

    def configure(self, **fields: Any) -> None:
        """Other settings, where they do not concern how the engine was started."""
        self.host._config = self.host._config.model_copy(update=fields)
        self.rewire()

    def refit(self, tensors: Mapping[str, Tensor]) -> int:
        """Hand the policy's weights over; their version."""
        for rank in self.policy:
            rank.take(tensors)
        asyncio.run(self.exchange.refit(self.version + 1))
        self.version += 1
        return self.version

    def weights(self, seed: int) -> dict[str, Tensor]:
        """HF tensors whose greedy answers differ from seed to seed."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(extents, generator=generator) * 0.3 + (1.0 if len(extents) == 1 else 0.0)
            for name, extents in hf_tensors(self.shape).items()
        }

    def serve(self, requests: Sequence[Any]) -> dict[str, Any]:
        return self.submit(requests).result(SECONDS)

    def submit(self, requests: Sequence[Any]) -> "Future[dict[str, Any]]":
        async def collect() -> dict[str, Any]:
            return {one.id: one async for one in completions(self.host, requests)}

        return asyncio.run_coroutine_threadsafe(collect(), self.loop.loop)


def group(name: str, count: int = 3, max_new_tokens: int = 8, **fields: Any) -> list[Any]:
    prompts = Prompts(5).several(count, 3, 12)
    return [
        request(prompt, f"{name}{number}", fields.get("sampling", GREEDY), max_new_tokens, seed=number)
        for number, prompt in enumerate(prompts)
    ]
