"""Both sides of a refit into an engine of these tests."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape
from nemorl.weights.endpoints import WeightSender
from nemorl.weights.exchange import WeightExchange
from nemorl.weights.messages import (
    Part,
    ReceiveReport,
    ReceiverLayout,
    RefitSession,
    SenderLayout,
    SendReport,
)
from nemorl.weights.whole_tensors import whole_slices


class Sender:
    """A policy of one rank that holds every tensor of a checkpoint."""

    def __init__(self, folder: Path, parameters: dict[str, Tensor]) -> None:
        self.parameters = parameters
        self._own = WeightSender(whole_slices(_tensors(folder)), lambda: self.parameters)

    async def describe(self) -> Sequence[SenderLayout]:
        return [self._own.describe()]

    async def prepare(self, parts: Sequence[Part]) -> None:
        await asyncio.to_thread(self._own.prepare, parts[0])

    async def send(self, session: RefitSession) -> Sequence[SendReport]:
        return [await asyncio.to_thread(self._own.send, session)]


class Receivers:
    """All ranks of one engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.reports: list[ReceiveReport] = []  # of the last refit

    async def describe(self) -> Sequence[ReceiverLayout]:
        return list(self._engine.host.describe_weights())

    async def prepare(self, parts: Sequence[Part]) -> None:
        await asyncio.to_thread(self._engine.run, self._engine.host.prepare_refit(tuple(parts)))

    async def receive(self, session: RefitSession) -> Sequence[ReceiveReport]:
        self.reports = list(
            await asyncio.to_thread(self._engine.run, self._engine.host.receive_weights(session))
        )
        return self.reports

    async def commit(self, version: int) -> None:
        await asyncio.to_thread(self._engine.run, self._engine.host.commit_weights(version))

    async def abandon(self) -> None:
        await asyncio.to_thread(self._engine.run, self._engine.host.abandon_refit())


def checkpoint(folder: Path, scale: float = 1.0) -> dict[str, Tensor]:
    """The tensors of a folder, all of them times `scale`."""
    files = HfFolder(folder)
    return {name: files.tensor(name, size) * scale for name, size in _tensors(folder).items()}


def of_network(folder: Path, network: Any) -> dict[str, Tensor]:
    """The same of a dense network of transformers: its own memory, so that they change with it."""
    return {name: network.state_dict()[name] for name in _tensors(folder)}


def exchange_of(
    engine: Any, folder: Path, parameters: dict[str, Tensor], seconds: float = 60.0
) -> WeightExchange:
    return WeightExchange(Sender(folder, parameters), Receivers(engine), 2**14, seconds)


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    return hf_tensors(load_shape(folder))
