"""Engines that die, hang and come back, in real processes."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray.util import placement_group_table

from nemorl.cluster.actor import Invocation
from nemorl.cluster.errors import ClusterError, DeadlineExceeded, PlacementFailed, RelayLost
from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.placement import ExtraRanks, WorkerRequest
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.cluster.worker import Worker, outcomes
from nemorl.config.generation import TorchGenerationConfig
from nemorl.config.run import ClusterConfig, DeadlineConfig
from nemorl.generation.router import Replica, Router, RouterMetrics
from nemorl.generation.types import EngineHealth, EngineOptions, EngineStats, NoReplicaLeft
from nemorl.models.create import create_tiny_model
from nemorl.session.handles import EngineHandle
from nemorl.session.session import Session
from nemorl.session.supervisor import ReplicaSupervisor, State, hanging
from nemorl.weights.exchange import RefitStats
from tests.generation.examples import Prompts, request

TOKENS = 200
CLUSTER = ClusterConfig(deadlines=DeadlineConfig(health=3.0, start=120.0))


@dataclass
class RouterHere:
    """A stand-in for the group of rollout workers: one router, in this process."""

    router: Router
    came: list[int] = field(default_factory=list)

    async def take_metrics(self, seconds: float) -> list[RouterMetrics]:
        return [self.router.take_metrics(), RouterMetrics(moved_requests=1)]  # as if there were two

    async def lost_replicas(self, seconds: float) -> list[dict[str, str]]:
        return [dict(self.router.lost), {}]

    async def add(self, replica: Replica, seconds: float) -> None:
        self.came.append(int(replica.name.rpartition(" ")[2]))
        self.router.add(replica)

    async def remove(self, name: str, seconds: float) -> None:
        self.router.remove(name)

    async def give_up(self, causes: Mapping[str, str], seconds: float) -> None:
        self.router.give_up(causes)


def process_of(worker: Worker) -> int:
    """The process that a worker's log names in its last first line."""
    return int(worker.log.read_text().rpartition("process ")[2].split()[0])


def differing(left: list[list[int]], right: list[list[int]]) -> int:
    """Samples that differ, as rarely they do: a prompt that is read again rounds differently."""
    assert [len(tokens) for tokens in left] == [len(tokens) for tokens in right]
    return sum(a != b for a, b in zip(left, right, strict=True))


async def until_running(worker: Worker) -> None:
    """Return when an engine is in the middle of its work."""
    while (await worker.call("health", stage="test", seconds=20)).running == 0:
        await asyncio.sleep(0.005)


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.005)


async def until_ready(pool: ReplicaSupervisor, number: int) -> None:
    while len(pool.in_state(State.READY)) < number:
        await asyncio.sleep(0.02)


async def until_back(pool: ReplicaSupervisor, number: int) -> None:
    while len(pool.group.workers) < number:
        await pool.check()
        await asyncio.sleep(0.2)


@dataclass
class Scene:
    """Two real engines under a pool, and what they sample undisturbed."""

    group: WorkerGroup
    router: Router
    here: RouterHere
    pool: ReplicaSupervisor
    changes: list[int] = field(default_factory=list)  # engines after each
    expected: list[list[int]] = field(default_factory=list)

    @classmethod
    async def begin(cls, group: WorkerGroup) -> "Scene":
        router = Router([EngineHandle(w).as_replica() for w in group.workers], progress_tokens=16)
        scene = cls(group, router, RouterHere(router), ReplicaSupervisor(group, CLUSTER))
        scene.pool.connect(scene.here)
        scene.pool.on_change = lambda: scene.changes.append(len(group.workers))
        scene.expected = await scene.sample("undisturbed")
        return scene

    async def sample(self, series: str) -> list[list[int]]:
        prompts = [prompt % 10 for prompt in Prompts(1).several(8, 4, 8)]
        asked = [request(p, f"{series}{i}", max_new_tokens=TOKENS, seed=i) for i, p in enumerate(prompts)]
        return [c.tokens.tolist() for c in await asyncio.gather(*map(self.router.generate, asked))]

    async def signal_amid_work(self, worker: Worker, number: int) -> asyncio.Task[list[list[int]]]:
        disturbed = asyncio.create_task(self.sample(f"signal {number}"))
        await until_running(worker)
        os.kill(process_of(worker), number)
        return disturbed

    async def one_is_killed(self) -> None:
        """No one has asked the pool yet: the router sees it on its own."""
        disturbed = await self.signal_amid_work(self.group.workers[0], signal.SIGKILL)
        assert differing(await disturbed, self.expected) <= 1
        assert self.router.living == ["generation replica 1"]
        assert "the process vanished" in self.router.lost["generation replica 0"]
        assert await self.pool.check() == 1
        assert [name for name, _ in self.pool.losses] == ["generation replica 0"]
        metrics = await self.pool.take_metrics()
        assert metrics["generation/replicas"] == metrics["generation/replicas_lost"] == 1
        assert 1 < metrics["generation/requests_moved"] <= 9
        await until_back(self.pool, 2)
        assert (self.here.came, self.router.lost) == ([0], {})
        assert (await self.pool.take_metrics())["generation/replicas_restarted"] == 1

    async def one_is_stopped(self) -> None:
        """It answers nothing: the pool gives it up, and the router continues from what it has."""
        disturbed = await self.signal_amid_work(self.group.workers[1], signal.SIGSTOP)
        assert await self.pool.check() == 1
        assert differing(await disturbed, self.expected) <= 1
        assert re.search(r"does not respond; its process \d+ is stopped", self.pool.losses[1][1])
        assert self.changes == [1, 2, 1]  # left, came, left

    async def a_refit_takes_it_in(self) -> None:
        """It is announced only when it has the weights."""
        await until_ready(self.pool, 1)
        async with self.pool.refitting():
            assert [w.rank for w in self.group.workers] == [0, 1]
            assert self.here.came == [0]
        assert self.here.came == [0, 1]
        assert differing(await self.sample("whole again"), self.expected) <= 1

    async def a_router_gives_one_up(self) -> None:
        """It is not idle, however well it feels."""
        self.router.lose("generation replica 0", "the router's own reason")
        assert await self.pool.check() == 1
        assert self.pool.losses[2] == ("generation replica 0", "the router's own reason")
        assert [w.rank for w in self.group.workers] == [1]

    async def one_joins_and_leaves(self) -> None:
        """Its requests continue on others with the same tokens, and nothing of it is left."""
        await self.pool.scale(3)
        await until_ready(self.pool, 2)
        async with self.pool.refitting():
            assert [w.rank for w in self.group.workers] == [0, 1, 2]
        assert self.here.came == [0, 1, 0, 2]
        last = self.group.workers[2]
        moved = asyncio.create_task(self.sample("one leaves"))
        await until_running(last)
        await self.pool.scale(2)
        assert differing(await moved, self.expected) <= 1
        metrics = await self.pool.take_metrics()
        names = "", "_lost", "_joined", "_left"
        assert [metrics[f"generation/replicas{name}"] for name in names] == [2, 3, 1, 1]
        assert metrics["generation/requests_failed"] == 0
        await until(lambda: not Path(f"/proc/{process_of(last)}").exists())
        left = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        assert [len(group["bundles"]) for group in left] == [2]


def test_engines_die_hang_come_back_join_and_leave(tmp_path):
    model = tmp_path / "model"
    create_tiny_model(model, hidden=64, ffn=128, layers=4, heads=4, kv_heads=2)

    def of_rank(rank: int) -> dict[str, Any]:
        options = EngineOptions(model, model, 256, threads=1, commit_seconds=10.0, rank=rank)
        return {"config": TorchGenerationConfig(max_batch_size=64), "options": options}

    async def main(runtime: ClusterRuntime) -> None:
        placement = await runtime.reserve()
        group = await WorkerGroup.start(
            "generation",
            "nemorl.generation.torch_engine.engine:TorchHost",
            [of_rank(0), of_rank(1)],
            placement=placement, threads=1, run_dir=tmp_path, deadline_seconds=120,
            concurrent=True, extra=ExtraRanks(placement, "generation", of_rank),
        )  # fmt: skip
        scene = await Scene.begin(group)
        await scene.one_is_killed()
        await scene.one_is_stopped()
        await scene.a_refit_takes_it_in()
        await scene.a_router_gives_one_up()
        await scene.one_joins_and_leaves()
        await scene.pool.close()
        await group.shutdown()

    requests = [WorkerRequest("generation", 2)]
    with ClusterRuntime(ClusterConfig(object_store_megabytes=100), requests, extra=1) as runtime:
        asyncio.run(main(runtime))


@dataclass(eq=False)
class Engine:
    """A stand-in for the process of an engine."""

    rank: int
    dead: bool = False
    silent: bool = False
    stays_awake: bool = False  # fails to sleep
    tokens: int = 0  # that it sampled
    told: list[str] = field(default_factory=list)
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, method: str, *args: Any, stage: str, seconds: float) -> Any:
        if self.dead or self.killed.is_set():
            raise ClusterError("the process vanished")
        if self.silent:
            await asyncio.sleep(seconds)
            raise DeadlineExceeded("generation", (self.rank,), stage, seconds, ("stopped",))
        if method == "health":
            return EngineHealth(0, running=0, waiting=0, paused=False, seconds_since_step=0.0)
        if method == "stats":
            return EngineStats(tokens_generated=self.tokens)
        self.told.append(f"{method} {args[0]}")
        if method == "sleep" and self.stays_awake:
            raise ClusterError("no room for the weights in host memory")
        return None

    async def stream(self, method: str, *args: Any, **options: Any) -> AsyncIterator[Any]:
        await self.killed.wait()
        raise ClusterError("the process vanished")
        yield


class Engines:
    """A stand-in for their group; a dropped one comes back at once, but for that number of failures."""

    name = "generation"

    def __init__(self, *workers: Engine, failures: int = 0) -> None:
        self.workers = workers
        self.failures = failures
        self.started: list[int] = []
        self.nodes: dict[int, str] = {}  # of those that joined
        self.error: Exception = ClusterError("its port is taken")
        self.has_room = asyncio.Event()  # for those whose node is lost
        self.has_room.set()

    async def ask(self, method: str, *args: Any, stage: str, seconds: float) -> dict[int, Any]:
        return await outcomes(cast(Any, self.workers), Invocation(method, stage, seconds), args)

    def kill(self, worker: Engine) -> None:
        worker.killed.set()

    def drop(self, worker: Engine) -> None:
        self.kill(worker)
        self.workers = tuple(w for w in self.workers if w is not worker)

    def admit(self, worker: Engine) -> None:
        self.workers = (*self.workers, worker)

    def release(self, rank: int) -> None:
        self.nodes.pop(rank, None)

    def extra_node(self, rank: int) -> str | None:
        return self.nodes.get(rank)

    def waits_for_place(self, rank: int) -> bool:
        return rank not in self.nodes

    async def await_place(self, rank: int) -> None:
        await self.has_room.wait()

    async def restart(self, rank: int, deadline_seconds: float) -> Engine:
        self.started.append(rank)
        self.nodes[rank] = f"node {len(self.started)}"
        if len(self.started) <= self.failures:
            raise self.error
        return Engine(rank)


QUICK = ClusterConfig(deadlines=DeadlineConfig(health=0.01))


def pool_of(group: Engines, **options: Any) -> ReplicaSupervisor:
    return ReplicaSupervisor(cast(WorkerGroup, group), QUICK, **options)


ERRORS = (ClusterError("its port is taken"), ray.exceptions.ActorPlacementGroupRemoved(), OSError("no space"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("failures", "comes"), [(2, True), (3, False)])
def test_a_restart_that_fails_is_tried_again_and_counted(failures: int, comes: bool, error: Exception):
    """Whatever it fails with, the first time too."""

    async def main() -> None:
        group = Engines(Engine(0, dead=True), Engine(1), failures=failures)
        group.error = error
        pool = pool_of(group)
        assert await pool.check() == 1
        await until(lambda: len(group.started) == 3 and not pool.in_state(State.STARTING))
        assert group.started == [0, 0, 0]
        await pool.check()
        assert [w.rank for w in group.workers] == ([1, 0] if comes else [1])
        assert (await pool.take_metrics())["generation/restarts_failed"] == failures
        assert not pool.exhausted
        group.failures = 99
        for worker in group.workers:
            worker.dead = True
        await pool.check()
        await until(lambda: pool.exhausted)
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_of_a_lost_node_waits_for_another_without_an_attempt_and_blocks_no_sleep():
    async def main() -> None:
        group = Engines(Engine(0, dead=True))
        group.has_room.clear()
        pool = pool_of(group, shares_devices=True)
        assert await pool.check() == 1
        await pool.sleep()  # which waits for engines that start
        assert (group.started, pool.members[0].attempts, pool.exhausted) == ([], 0, False)
        group.has_room.set()
        async with pool.awake():
            await until_ready(pool, 1)
        assert group.started == [0]
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_loss_is_reported_once_and_the_last_one_by_the_error(caplog):
    def logged() -> list[str]:
        messages = [record.message for record in caplog.records if " is lost: " in record.message]
        caplog.clear()
        return messages

    async def main() -> None:
        group = Engines(Engine(0, dead=True), last := Engine(1), failures=9)
        pool = pool_of(group)
        await pool.check()
        assert logged() == ["generation replica 0 is lost: the process vanished"]
        last.dead = True
        await pool.check()
        assert logged() == ["generation replica 1 is lost: the process vanished"]  # it may return
        await until(lambda: pool.exhausted)
        await pool.check()
        assert logged() == []
        with pytest.raises(
            NoReplicaLeft, match="replica 1: the process vanished\nand could not be restarted"
        ):
            async with pool.refitting():
                pass
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_requests_wait_for_the_only_engine_and_fail_when_it_does_not_return():
    async def main() -> None:
        group = Engines(Engine(0), failures=2)
        pool, router = pool_of(group), Router([], waits=True)
        pool.connect(RouterHere(router))
        asked = asyncio.create_task(router.generate(request(Prompts(1).several(1, 4, 8)[0], "r")))
        group.workers[0].dead = True
        await pool.check()
        await until_ready(pool, 1)
        assert group.started == [0, 0, 0]
        assert not asked.done()
        await pool.check()  # which admits it, with the weights of the model's folder
        assert router.living == ["generation replica 0"]
        router.lose("generation replica 0", "as another test says")
        await pool.check()
        await until(lambda: pool.exhausted)
        with pytest.raises(NoReplicaLeft, match="generation replica 0: as another test says"):
            await asked
        with pytest.raises(NoReplicaLeft):
            pool.require_return()
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_that_samples_again_has_its_attempts_back():
    async def main() -> None:
        group = Engines(Engine(0))
        pool = pool_of(group)
        for _ in range(2 * QUICK.max_worker_restarts):
            group.workers[0].dead = True
            await pool.check()
            await until_ready(pool, 1)
            await pool.check()
            group.workers[0].tokens = 7
            await pool.take_metrics()
        assert group.started == [0] * 2 * QUICK.max_worker_restarts
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_that_returns_while_none_is_up_waits_for_the_weights_in_use():
    async def main() -> None:
        group = Engines(first := Engine(0))
        pool, here = pool_of(group), RouterHere(Router([], waits=True))
        pool.connect(here)
        async with pool.refitting():
            first.dead = True
            assert await pool.lost_in_refit()
            assert pool.engines == []  # which ends the update
        await pool.starved.wait()
        await pool.check()
        assert here.came == []
        async with pool.refitting():
            assert [w.rank for w in group.workers] == [0]
        assert here.came == [0]
        assert not pool.starved.is_set()
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_last_engine_that_comes_back_is_reported_as_lost(caplog):
    async def main() -> None:
        pool = pool_of(Engines(Engine(0, dead=True)))
        pool.connect(RouterHere(Router([])))
        await pool.check()
        await until_ready(pool, 1)
        await pool.check()
        assert [record.message for record in caplog.records] == [
            "generation replica 0 is lost: the process vanished",
            "generation replica 0 restarted and back in rotation",
        ]
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_that_falls_silent_in_a_refit_is_ended_which_ends_the_refit():
    """The refit's own deadline, and those of the calls that give it up, are minutes."""

    async def main() -> None:
        group = Engines(first := Engine(0), Engine(1))
        pool = pool_of(group)
        async with pool.refitting():
            first.silent = True
            await first.killed.wait()
            assert first in group.workers  # in the middle of a call
            assert await pool.lost_in_refit()
        (loss,) = pool.losses
        assert "has not finished stage 'health check' in 0.01 s; no answer from rank 0" in loss[1]
        await until_ready(pool, 1)
        assert await pool.check() == 0
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_refit_that_loses_a_relay_is_repeated_with_the_same_engines():
    versions = []

    class Exchange:
        async def refit(self, version: int) -> RefitStats:
            versions.append(version)
            if len(versions) == 1:
                raise RelayLost("generation did not complete stage 'refit': generation-relay rank 0 died")
            return RefitStats(version, 1.0, 1.0, 8, 8, 1, 0, 0)

    async def main() -> None:
        pool = pool_of(Engines(Engine(0)))
        await Session(exchange=cast(Any, Exchange()), replicas=pool).update_weights(3)
        assert versions == [3, 3]
        assert pool.losses == []
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_engines_that_share_their_devices_have_them_by_turns():
    async def main() -> None:
        group = Engines(first := Engine(0), second := Engine(1, stays_awake=True))
        pool = pool_of(group, shares_devices=True)
        pool.connect(RouterHere(Router([])))
        await pool.sleep()  # as the session does once they have started
        assert (first.told, second.told) == (["sleep 1"], ["sleep 1"])
        assert pool.losses == [("generation replica 1", "no room for the weights in host memory")]
        assert second.killed.is_set()
        await asyncio.sleep(0.05)
        assert group.started == []  # the policy has the devices
        async with pool.awake():
            await until_ready(pool, 1)
            assert group.started == [1]
        back = pool.in_state(State.READY)[0].worker
        assert first.told[1:] == ["wake ()", "sleep 1"]
        assert back.told == ["sleep 1"]  # it samples when a refit has reached it, or only its weights
        first.told.clear()
        async with pool.refitting():
            assert [w.rank for w in group.workers] == [0, 1]
            assert first.told == ["wake ('weights',)"] == back.told[1:]
        async with pool.awake():
            assert first.told[1:] == ["wake ()"] == back.told[2:]
        with pytest.raises(RuntimeError, match="the run ends"):
            async with pool.awake():
                raise RuntimeError("the run ends")
        assert first.told[1:] == ["wake ()", "sleep 1", "wake ()"]
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_who_came_back_and_is_lost_again_in_the_refit_is_not_announced():
    async def main() -> None:
        group = Engines(Engine(0, dead=True), Engine(1))
        here = RouterHere(Router([]))
        pool = ReplicaSupervisor(cast(WorkerGroup, group), ClusterConfig())
        pool.connect(here)
        async with pool.refitting():
            pass  # without engine 0, which is only now being started again
        assert [w.rank for w in group.workers] == [1]
        await until_ready(pool, 1)
        async with pool.refitting():
            came = next(w for w in group.workers if w.rank == 0)
            came.dead = True
            assert await pool.lost_in_refit()
        assert here.came == []
        assert [w.rank for w in group.workers] == [1]
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_engines_join_with_the_next_weights_and_the_last_ones_leave_first():
    async def main() -> None:
        group = Engines(Engine(0))
        pool, here = pool_of(group), RouterHere(Router([], waits=True))
        pool.connect(here)
        async with pool.refitting():
            pass
        changes: list[int] = []
        pool.on_change = lambda: changes.append(len(group.workers))
        await pool.scale(3)
        assert {state.state for state in pool.states.values()} == {"up", "starting"}
        await until_ready(pool, 2)
        await pool.check()
        assert (here.came, changes) == ([], [])  # they have the weights of the model's folder
        assert [state.state for state in pool.states.values()] == ["up", "started", "started"]
        async with pool.refitting():
            assert [w.rank for w in group.workers] == [0, 1, 2]
        assert (here.came, changes) == ([1, 2], [2, 3])
        second = group.workers[1]
        second.dead, group.failures = True, 99  # it does not return
        await pool.check()
        await pool.scale(2)
        assert [w.rank for w in group.workers] == [0, 2]  # who works stays
        assert sorted(group.nodes) == [2]
        last = group.workers[1]
        await pool.scale(1)
        assert last.killed.is_set()
        assert changes == [2, 3, 2, 1]
        metrics = await pool.take_metrics()
        names = "", "_joined", "_left", "_lost"
        assert [metrics[f"generation/replicas{name}"] for name in names] == [1, 2, 2, 1]
        assert list(pool.states) == ["generation replica 0"]
        assert (group.nodes, here.router.lost) == ({}, {})
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_leaves_even_if_a_router_does_not_answer():
    class Silent(RouterHere):
        async def remove(self, name: str, seconds: float) -> None:
            raise ClusterError("the endpoint is gone")

    async def main() -> None:
        group = Engines(Engine(0), last := Engine(1))
        pool = pool_of(group)
        pool.connect(Silent(Router([], waits=True)))
        with pytest.raises(ClusterError):
            await pool.scale(1)
        assert last.killed.is_set()
        assert [w.rank for w in group.workers] == [0]
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_without_a_place_is_not_tried_again_until_it_is_asked_for_again():
    async def main() -> None:
        group = Engines(Engine(0), failures=1)
        group.error = PlacementFailed("0 GPU are free")
        pool = pool_of(group)
        await pool.scale(2)
        await until(lambda: pool.states["generation replica 1"].cause != "")
        assert "0 GPU are free" in pool.states["generation replica 1"].cause
        assert (await pool.take_metrics())["generation/restarts_failed"] == 0  # nothing was lost
        assert (group.started, pool.exhausted) == ([1], False)
        await pool.scale(2)
        await until_ready(pool, 1)
        assert group.started == [1, 1]
        await pool.check()
        assert [w.rank for w in group.workers] == [0, 1]
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_that_leaves_while_it_starts_is_ended_and_joins_elsewhere_if_its_node_goes():
    async def main() -> None:
        group = Engines(Engine(0))
        pool, here = pool_of(group), RouterHere(Router([], waits=True))
        pool.connect(here)
        await pool.scale(2)
        await until_ready(pool, 1)
        ready = pool.in_state(State.READY)[0].worker
        await pool.scale(1)
        assert ready.killed.is_set()
        assert (await pool.take_metrics())["generation/replicas_left"] == 0
        await pool.scale(2)
        await until_ready(pool, 1)
        await pool.check()
        assert pool.extra_nodes == {"node 2"}
        first = group.workers[1]
        await pool.leave_nodes({"node 2", "node 9"})
        assert first.killed.is_set()
        await until_ready(pool, 1)
        await pool.check()
        assert (pool.extra_nodes, here.router.living[-1]) == ({"node 3"}, "generation replica 1")
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
