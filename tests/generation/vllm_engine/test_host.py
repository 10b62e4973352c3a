"""vLLM's host in refits that fail, over a stand-in for the engine whose weights are written in place."""

import asyncio
import inspect
import json
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from nemorl.cluster.actor import Invocation
from nemorl.cluster.errors import WorkerFailed
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.worker import outcomes
from nemorl.config.generation import VllmGenerationConfig
from nemorl.config.run import ClusterConfig
from nemorl.generation.request_driver import Chunk
from nemorl.generation.types import Completion, EngineFailed, EngineHealth, EngineOptions, GenerationRequest
from nemorl.generation.vllm_engine import host
from nemorl.generation.vllm_engine.host import LAYOUT, PARTS, REPORT, SESSION, VllmHost
from nemorl.models.create import create_tiny_model
from nemorl.session.handles import GenerationReceivers
from nemorl.session.session import Session
from nemorl.session.supervisor import ReplicaSupervisor, hanging
from nemorl.trajectories import StopReason
from nemorl.weights.exchange import WeightExchange
from nemorl.weights.messages import ReceiveReport, RefitDeadline, RefitFailed, RefitSession, receiver_name
from nemorl.weights.shared_memory import SocketReceiver
from tests.generation.examples import Prompts, completions, request
from tests.weights.ranks import TP2_PP2, EngineSide, PolicySide, Threads, model

WATCHED = "model.norm.weight"


class Engine:
    """A `VllmBackend` of one worker, in this process; a token is the version in use, its logprob a weight."""

    def __init__(
        self, arguments: object, environment: Mapping[str, str], *_: Any, name: str, **options: Any
    ) -> None:
        self.environment = environment
        self.memory: list[str] = []  # what was asked of it
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

    async def sleep(self, level: int) -> None:
        assert not self._going.is_set()
        self.memory.append(f"sleep {level}")

    async def wake(self, tags: Sequence[str]) -> None:
        self.memory.append(f"wake {tags}")

    async def switch(self, version: int) -> None:
        if self.broken == "switch":
            raise RuntimeError("the prefix cache could not be reset")
        self.version = version

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        if self.broken == "core":
            await asyncio.Event().wait()
        return [getattr(self, method)(*arguments)]

    def nemorl_open(self, update: str, lora: str | None) -> str:
        layout = LAYOUT.dump_python(self.side.exchange.describe(), mode="json")
        own = os.getpid()
        return json.dumps(
            {"process": own, "engine": own, "layout": layout, "reasons": {}, "meeting": "/no/such/file"}
        )

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
        return self.side.exchange.corruption

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
    create_tiny_model(made, hidden=32, ffn=32, layers=1, heads=2, kv_heads=2)
    return made


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "VllmBackend", Engine)


async def start(folder: Path, rank: int, device: Literal["cpu", "cuda"] = "cpu", **options: Any) -> VllmHost:
    host = VllmHost(
        VllmGenerationConfig(backend="vllm", update="in_place"),
        EngineOptions(folder, folder, 200, rank=rank, device=device, commit_seconds=20),
        **options,
    )
    await host.start()
    return host


def engine_of(host: VllmHost) -> Engine:
    engine = host._vllm
    assert isinstance(engine, Engine)
    return engine


async def sample(host: VllmHost, name: str, tokens: int = 4) -> Completion:
    return await anext(completions(host, [request(Prompts().one(3), name, max_new_tokens=tokens)]))


def test_a_long_request_is_no_hindrance_to_sleep(folder: Path) -> None:
    """As a caller of the endpoint may have one: it leaves the engine, whatever the weights become."""

    async def main() -> None:
        host = await start(folder, 0, device="cuda", gpus=("3", "1"))
        engine = engine_of(host)
        assert engine.environment["CUDA_VISIBLE_DEVICES"] == "3,1"
        long = asyncio.create_task(sample(host, "long", tokens=200))
        while host.health().running == 0:
            await asyncio.sleep(0)
        await host.sleep(1)
        late = asyncio.create_task(sample(host, "late"))
        assert engine.memory == ["sleep 1"]
        engine.side.exchange._received = 2
        await host.wake(("weights",))
        await host.commit_weights(2)
        await asyncio.sleep(0.02)
        assert (host.health().running, host.health().waiting) == (0, 2)
        assert hanging(host.health(), 0.0) is None
        await host.wake(())
        assert engine.memory == ["sleep 1", "wake ('weights',)", "wake ()"]
        versions = (await long).versions.tolist()
        assert versions == sorted(versions)
        assert (versions[-1], len(versions)) == (2, 200)
        assert (await late).versions.tolist() == [2] * 4

    asyncio.run(asyncio.wait_for(main(), 60))


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
        with pytest.raises(EngineFailed, match="did not complete the update to version 2"):
            await in_flight
        with pytest.raises(EngineFailed, match="did not complete the update to version 2"):
            await sample(host, "after")
        with pytest.raises(EngineFailed, match="did not complete the update to version 2"):
            host.health()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("call", ["receive", "abandon"])
def test_an_engine_that_does_not_answer_in_a_refit_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Its host answers health checks, and without a sequence no step is late."""
    monkeypatch.setattr(host, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(host, "_ABANDON_SECONDS", 0.2)

    async def main() -> None:
        hung = await start(folder, 0)
        engine_of(hung).broken = "core"
        session = RefitSession(2, "shared_memory", "nowhere", 0.1)
        work = {"receive": lambda: hung.receive_weights(session), "abandon": hung.abandon_refit}
        hung.health()
        problem = rf"hangs: no answer of its workers to nemorl_{call} within 0\.2 s"
        with pytest.raises(RefitDeadline, match=problem):
            await work[call]()
        with pytest.raises(EngineFailed, match=problem):
            hung.health()
        await hung.abandon_refit()  # which has nothing to wait for
        with pytest.raises(RefitFailed, match=problem):
            await hung.receive_weights(session)

    asyncio.run(asyncio.wait_for(main(), 60))


@dataclass(eq=False)
class Replica:
    """A host as the worker of a group that lives in this event loop."""

    rank: int
    host: VllmHost

    async def call(self, method: str, *arguments: Any, stage: str, seconds: float) -> Any:
        try:
            answer = getattr(self.host, method)(*arguments)
            return await answer if inspect.isawaitable(answer) else answer
        except EngineFailed as error:
            raise WorkerFailed(
                "generation",
                self.rank,
                stage,
                "nemorl.generation.types.EngineFailed",
                str(error),
                Path("log"),
            ) from error


class Group:
    """A stand-in for the group of engines. No one comes back."""

    def __init__(self, hosts: Sequence[VllmHost]) -> None:
        self.workers = tuple(Replica(rank, host) for rank, host in enumerate(hosts))

    async def call(
        self,
        method: str,
        *arguments: Any,
        stage: str,
        seconds: float,
        shards: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[Any]:
        given = [arguments] * len(self.workers) if shards is None else [(shard,) for shard in shards]
        return await asyncio.gather(
            *(
                worker.call(method, *of_worker, stage=stage, seconds=seconds)
                for worker, of_worker in zip(self.workers, given, strict=True)
            )
        )

    async def ask(self, method: str, *arguments: Any, stage: str, seconds: float) -> dict[int, Any]:
        return await outcomes(cast(Any, self.workers), Invocation(method, stage, seconds), arguments)

    def drop(self, worker: Replica) -> None:
        self.workers = tuple(one for one in self.workers if one is not worker)

    async def restart(self, rank: int, deadline_seconds: float) -> Replica:
        return await asyncio.Future()


def test_engines_that_a_dead_one_left_partial_take_the_repeated_refit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are written in place; only the one that was killed is lost."""
    told: list[EngineHealth] = []

    async def main() -> None:
        hosts = [await start(folder, rank) for rank in range(2)]
        killed, other = map(engine_of, hosts)
        loop = asyncio.get_running_loop()
        taken = SocketReceiver.taken

        def kill_once_both_are_written_to(receiver: SocketReceiver) -> None:
            its_own = not killed.failure() and receiver._peer.waiting._refit.endswith(
                receiver_name(killed.rank)
            )
            if its_own and other.side.exchange.corruption is not None:
                loop.call_soon_threadsafe(killed.die)
                raise RefitFailed("this process was killed")
            taken(receiver)

        class Pool(ReplicaSupervisor):
            async def lost_in_refit(self) -> bool:
                await asyncio.sleep(0.05)
                told.append(hosts[1].health())
                return await super().lost_in_refit()

        group = Group(hosts)
        pool = Pool(cast(WorkerGroup, group), ClusterConfig())
        policy = [PolicySide(layout) for layout in TP2_PP2]
        receivers = GenerationReceivers(cast(WorkerGroup, group), 30.0)
        exchange = WeightExchange(Threads(policy), receivers, 4096, 30.0)
        pool.on_change = exchange.layout_changed
        session = Session(exchange=exchange, replicas=pool)
        for rank in policy:
            rank.train(1)
        await session.update_weights(1)
        in_flight = asyncio.create_task(sample(hosts[1], "in flight", tokens=2000))
        while hosts[1].health().running == 0:
            await asyncio.sleep(0.01)
        for rank in policy:
            rank.train(2)
        monkeypatch.setattr(SocketReceiver, "taken", kill_once_both_are_written_to)
        await session.update_weights(2)

        assert [name for name, _ in pool.losses] == ["generation replica 0"]
        assert [worker.rank for worker in group.workers] == [1]
        (health,) = told
        assert health.corruption is not None
        assert "was being brought to version 2 in place" in health.corruption
        assert (health.version, health.running, hanging(health, 0.0)) == (1, 1, None)
        assert hosts[1].health().corruption is None
        expected = {version: float(model(version)[WATCHED][0]) for version in (1, 2)}
        for answer in (await in_flight, await sample(hosts[1], "after")):
            for version, logprob in zip(answer.versions.tolist(), answer.logprobs.tolist(), strict=True):
                assert logprob == pytest.approx(expected[version])
            assert answer.versions[-1] == 2
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))
