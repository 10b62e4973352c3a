"""vLLM's host in refits that fail, over a stand-in for the engine whose weights are written in place."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nemorl.config.generation_vllm import VllmGenerationConfig
from nemorl.generation.async_engine import Chunk
from nemorl.generation.errors import EngineFailed
from nemorl.generation.types import Completion, GenerationRequest
from nemorl.models.create import create_arithmetic_model
from nemorl.rollout.types import StopReason
from nemorl.session import vllm_host
from nemorl.session.vllm_host import VllmHost
from nemorl.session.vllm_wire import LAYOUT, PARTS, REPORT, SESSION
from nemorl.weights.messages import ReceiveReport
from nemorl.weights.session import RefitFailed
from tests.generation.examples import Prompts, request
from tests.weights.ranks import EngineSide

WATCHED = "model.norm.weight"


class Engine:
    """A `VllmBackend` of one worker, in this process; a token is the version in use, its logprob a weight."""

    def __init__(self, *_: Any, name: str, **options: Any) -> None:
        self._name = name
        self.version = 0
        self.side = EngineSide(torch.float32, in_place=True)
        self.rank = 0  # in the numbering of the exchange
        self.broken: str | None = None  # a call that raises
        self._going = asyncio.Event()
        self._going.set()
        self._on_death: Callable[[str], None] = lambda failure: None
        self._failure = ""

    async def start(self) -> None:
        pass

    def check(self, request: GenerationRequest) -> None:
        pass

    async def sample(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        for number in range(1, request.max_new_tokens + 1):
            await self._going.wait()
            stop = StopReason.LENGTH if number == request.max_new_tokens else None
            yield Chunk([self.version], [float(self.side.weights[WATCHED][0])], [self.version], stop)
            await asyncio.sleep(0.001)

    async def freeze(self) -> None:
        self._going.clear()

    async def thaw(self) -> None:
        self._going.set()

    async def switch(self, version: int) -> None:
        if self.broken == "switch":
            raise RuntimeError("the prefix cache could not be reset")
        self.version = version

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self, method)(*arguments)]

    def nemorl_open(self, update: str, owner: int) -> str:
        layout = LAYOUT.dump_python(self.side.exchange.describe(), mode="json")
        return json.dumps({"process": os.getpid(), "engine": os.getpid(), "layout": layout, "reasons": {}})

    def nemorl_prepare(self, parts: str) -> None:
        (part,) = PARTS.validate_json(parts)
        self.rank = part.rank
        self.side.exchange.prepare(part)

    def nemorl_receive(self, session: str, reports: str) -> None:
        receive = self.side.exchange.begin(SESSION.validate_json(session))
        threading.Thread(target=self._receive, args=(receive, reports), daemon=True).start()

    def nemorl_commit(self, version: int) -> None:
        self.side.exchange.commit(version)

    def nemorl_abandon(self) -> str | None:
        self.side.exchange.abandon()
        return self.side.exchange.torn

    def watch(self, processes: Mapping[int, str], on_death: Callable[[str], None]) -> None:
        self._on_death = on_death

    def die(self) -> None:
        self._failure = f"{self._name} has ended: worker 0 ended"
        self._on_death(self._failure)

    def failure(self) -> str:
        return self._failure

    def unwatch(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _receive(self, receive: Callable[[], ReceiveReport], reports: str) -> None:
        answer: dict[str, Any] = {"rank": 0}
        try:
            answer["report"] = REPORT.dump_python(receive(), mode="json")
        except RefitFailed as error:
            answer |= {"error": type(error).__name__, "message": str(error)}
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.connect(reports)
            connection.sendall(json.dumps(answer).encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vllm_host") / "model"
    create_arithmetic_model(made, hidden=32, ffn=32, layers=1, heads=2, kv_heads=2)
    return made


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_host, "VllmBackend", Engine)


async def start(folder: Path, rank: int) -> VllmHost:
    host = VllmHost(
        folder, VllmGenerationConfig(backend="vllm", update="in_place"), rank=rank, device="cpu",
        threads=None, tokenizer_path=folder, max_sequence_length=200, precision="float32", commit_seconds=20,
    )  # fmt: skip
    await host.start()
    return host


def engine_of(host: VllmHost) -> Engine:
    engine = host._vllm
    assert isinstance(engine, Engine)
    return engine


async def sample(host: VllmHost, name: str, tokens: int = 4) -> Completion:
    return await anext(host.generate_many([request(Prompts().one(3), name, max_new_tokens=tokens)]))


def test_an_engine_that_fails_to_switch_answers_nothing(folder: Path) -> None:
    """Its weights are of the new version, and it would say the old one."""

    async def main() -> None:
        host = await start(folder, 0)
        engine = engine_of(host)
        in_flight = asyncio.create_task(sample(host, "before", tokens=10**6))
        await asyncio.sleep(0)
        engine.side.exchange._received = 2
        engine.broken = "switch"
        with pytest.raises(RefitFailed, match="version 2: the prefix cache could not be reset"):
            await host.commit_weights(2)
        with pytest.raises(EngineFailed, match="failed to take version 2"):
            await in_flight
        with pytest.raises(EngineFailed, match="failed to take version 2"):
            await sample(host, "after")
        with pytest.raises(EngineFailed, match="failed to take version 2"):
            host.health()

    asyncio.run(asyncio.wait_for(main(), 60))
