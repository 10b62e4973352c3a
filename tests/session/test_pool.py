"""Engines that die, hang and come back, in real processes."""

import asyncio
import os
import signal
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from nemorl.cluster.errors import ClusterError
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.placement import WorkerRequest
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.cluster.worker import Worker
from nemorl.config.generation import TorchGenerationConfig
from nemorl.config.run import ClusterConfig, DeadlineConfig
from nemorl.generation.router import Router, RouterFigures
from nemorl.generation.types import EngineHealth
from nemorl.models.create import create_arithmetic_model
from nemorl.rollout.ray_replica import ray_replica
from nemorl.session.pool import GenerationPool, hanging
from tests.generation.examples import Prompts, request

TOKENS = 200


@dataclass
class RouterHere:
    """Stands in for the group of rollout workers: one router, in this process."""

    router: Router
    came: list[int] = field(default_factory=list)

    async def call_async(self, method: str, *args: Any, stage: str, deadline_seconds: float) -> list[Any]:
        if method == "take_router_figures":
            return [self.router.take_figures(), RouterFigures(moved_requests=1)]  # as if there were two
        if method == "lost_replicas":
            return [self.router.lost, {}]
        (engine,) = args
        self.came.append(engine.rank)
        self.router.add(ray_replica(engine))
        return [None]


def process_of(worker: Worker) -> int:
    """The process that a worker's log names in its last first line."""
    return int(worker.log.read_text().rpartition("process ")[2].split()[0])


def differing(left: list[list[int]], right: list[list[int]]) -> int:
    """Samples that differ, as rarely they do: a prompt that is read anew rounds differently."""
    assert [len(tokens) for tokens in left] == [len(tokens) for tokens in right]
    return sum(a != b for a, b in zip(left, right, strict=True))


async def until_running(worker: Worker) -> None:
    """Return when an engine is in the middle of its work."""
    while (await worker.call_async("health", stage="test", deadline_seconds=20)).running == 0:
        await asyncio.sleep(0.005)


async def until_back(pool: GenerationPool, number: int) -> None:
    while len(pool.group.workers) < number:
        await pool.check()
        await asyncio.sleep(0.2)


def test_engines_die_hang_and_come_back(tmp_path, monkeypatch):
    model = tmp_path / "model"
    create_arithmetic_model(model, hidden=64, ffn=128, layers=4, heads=4, kv_heads=2)
    deadlines = DeadlineConfig(health=3.0, start=120.0)
    one = {
        "model_path": model, "config": TorchGenerationConfig(max_batch_size=64), "device": "cpu",
        "threads": 1, "tokenizer_path": model, "max_sequence_length": 256, "precision": "float32",
        "commit_seconds": 10.0,
    }  # fmt: skip
    prompts = [prompt % 10 for prompt in Prompts(1).several(8, 4, 8)]

    async def sample(router: Router, series: str) -> list[list[int]]:
        asked = [request(p, f"{series}{i}", max_new_tokens=TOKENS, seed=i) for i, p in enumerate(prompts)]
        return [c.tokens.tolist() for c in await asyncio.gather(*map(router.generate, asked))]

    async def main(placement) -> None:
        group = await WorkerGroup.start_async(
            "generation",
            "nemorl.session.generation_host:GenerationHost",
            [{**one, "rank": rank} for rank in range(2)],
            placement=placement, threads=1, run_dir=tmp_path, deadline_seconds=120, concurrent=True,
        )  # fmt: skip
        router = Router([ray_replica(worker) for worker in group.workers], progress_tokens=16)
        here, changes = RouterHere(router), []
        pool = GenerationPool(group, deadlines)
        pool.serve(here)
        pool.on_change(lambda: changes.append(len(group.workers)))
        expected = await sample(router, "undisturbed")

        # Killed in the middle of its work: nobody has asked the pool yet, the router sees it by itself.
        first = group.workers[0]
        disturbed = asyncio.create_task(sample(router, "killed"))
        await until_running(first)
        os.kill(process_of(first), signal.SIGKILL)
        assert differing(await disturbed, expected) <= 1
        assert router.living == ["generation replica 1"]
        assert "the process vanished" in router.lost["generation replica 0"]
        assert await pool.check() == 1
        assert [name for name, _ in pool.losses] == ["generation replica 0"]
        figures = await pool.figures()
        assert figures["generation/replicas"] == figures["generation/replicas_lost"] == 1
        assert 1 < figures["generation/requests_moved"] <= 9
        await until_back(pool, 2)
        assert (here.came, router.lost) == ([0], {})
        assert (await pool.figures())["generation/replicas_restarted"] == 1

        # Stopped, so that it answers nothing: the pool gives it up, and the router goes on from what it has.
        second = group.workers[1]
        disturbed = asyncio.create_task(sample(router, "stopped"))
        await until_running(second)
        os.kill(process_of(second), signal.SIGSTOP)
        assert await pool.check() == 1
        assert differing(await disturbed, expected) <= 1
        assert "does not respond; its process is stopped" in pool.losses[1][1]
        assert changes == [1, 2, 1]  # left, came, left

        # A refit takes in what was started again, and announces it only when it has the weights.
        while not all(task.done() for task in pool._coming):
            await asyncio.sleep(0.1)
        async with pool.refitting():
            assert [w.rank for w in group.workers] == [0, 1]
            assert here.came == [0]
        assert here.came == [0, 1]
        assert differing(await sample(router, "whole again"), expected) <= 1

        # What a router has given up does not stand idle, however well it feels.
        router.lose("generation replica 0", "the router's own reason")
        assert await pool.check() == 1
        assert pool.losses[2] == ("generation replica 0", "the router's own reason")
        assert [w.rank for w in group.workers] == [1]
        await pool.close()
        await group.shutdown_async()

    with ClusterRuntime(
        ClusterConfig(object_store_megabytes=100), [WorkerRequest("generation", 2)]
    ) as runtime:

        async def with_places() -> None:
            await main(await runtime.reserve())

        asyncio.run(with_places())


@dataclass(eq=False)
class Engine:
    """Stands in for the process of an engine."""

    rank: int
    dead: bool = False

    async def call_async(self, method: str, *, stage: str, deadline_seconds: float) -> EngineHealth:
        if self.dead:
            raise ClusterError("the process vanished")
        return EngineHealth(0, running=0, waiting=0, paused=False, seconds_since_step=0.0)


class Engines:
    """Stands in for their group; whoever was dropped comes back at once."""

    def __init__(self, *workers: Engine) -> None:
        self.workers = workers

    def drop(self, worker: Engine) -> None:
        self.workers = tuple(w for w in self.workers if w is not worker)

    def admit(self, worker: Engine) -> None:
        self.workers = (*self.workers, worker)

    async def restart_async(self, rank: int, deadline_seconds: float) -> Engine:
        return Engine(rank)


def test_who_came_back_and_is_lost_again_in_the_refit_is_not_announced():
    async def main() -> None:
        group = Engines(Engine(0, dead=True), Engine(1))
        here = RouterHere(Router([]))
        pool = GenerationPool(cast(WorkerGroup, group), DeadlineConfig())
        pool.serve(here)
        async with pool.refitting():
            pass  # without engine 0, which is only now being started again
        assert [w.rank for w in group.workers] == [1]
        await asyncio.gather(*pool._coming)
        async with pool.refitting():
            came = next(w for w in group.workers if w.rank == 0)
            came.dead = True
            assert await pool.lost_in_refit()
        assert here.came == []
        assert [w.rank for w in group.workers] == [1]
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("health", "lost"),
    [
        (EngineHealth(1, running=4, waiting=2, paused=False, seconds_since_step=70.0), True),
        (EngineHealth(1, running=0, waiting=1, paused=False, seconds_since_step=70.0), True),
        (EngineHealth(1, running=4, waiting=0, paused=False, seconds_since_step=50.0), False),
        (EngineHealth(1, running=4, waiting=2, paused=True, seconds_since_step=70.0), False),
        (EngineHealth(1, running=0, waiting=0, paused=False, seconds_since_step=70.0), False),
    ],
)
def test_an_engine_hangs_when_it_has_work_and_makes_no_step(health, lost):
    cause = hanging(health, 60.0)
    assert (cause is not None) == lost
    if cause and health.running:
        assert cause == (
            "no step for 70 s, while 4 sequences run and 2 wait (cluster.deadlines.engine_step is 60)"
        )
