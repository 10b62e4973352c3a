"""Environments behind a server: samples are those of the rollout worker, and faults stay where they are."""

import asyncio
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import numpy as np
import pytest

from nemorl.config.data import ArithmeticDataset, DataConfig, MixtureDataset
from nemorl.config.environment import ByTaskEnvConfig, ChainedSumsEnvConfig, ServiceEnvConfig
from nemorl.config.environment_base import ServerPlacement
from nemorl.config.generation import EndpointConfig
from nemorl.config.run import ClusterConfig, DeadlineConfig
from nemorl.generation.router import Replica, Router
from nemorl.rewards import scored
from nemorl.rollout.groups import GroupAssignment
from nemorl.rollout.remote_environments import factory_behind_server
from nemorl.rollout.worker import RolloutWorker
from nemorl.serve.app import answering
from nemorl.serve.environment_sessions import Caller, SessionFailed, Sessions
from nemorl.serve.environments import EnvironmentService
from nemorl.trajectories import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentLost,
    Message,
    Step,
    StopReason,
    Task,
)
from tests.data.tokenizers import ENDOFTEXT
from tests.rollout.stand_ins import EchoEngine
from tests.rollout.test_worker import experiment

KEY_ENV = "NEMORL_TEST_ENVIRONMENT_KEY"
ME = Caller("me", "1")
TASK = Task(0, (Message("user", "1+1="),), "2", {"seed": 3})
ACTION = Action("2", np.array([5], np.int32), StopReason.STOP)


class Scripted(Environment):
    def __init__(self, factory):
        self._factory = factory

    async def step(self, action):
        self._factory.running += 1
        self._factory.most_running = max(self._factory.most_running, self._factory.running)
        try:
            await self._factory.answer()
        finally:
            self._factory.running -= 1
        return Step(rewards={"done": 1.0})

    async def close(self):
        self._factory.num_closed += 1


class ScriptedFactory(EnvironmentFactory):
    """One turn, answered as the attributes say."""

    def __init__(self, seconds=0.0, error=None):
        self.reward_weights = {"done": 1.0}
        self.released = None  # an event that answers wait for
        self.running = self.most_running = self.num_closed = 0
        self._seconds, self._error = seconds, error

    async def answer(self):
        await asyncio.sleep(self._seconds)
        if self.released is not None:
            await self.released.wait()
        if self._error is not None:
            raise self._error

    def create(self):
        return Scripted(self)


@asynccontextmanager
async def serving(monkeypatch, max_sessions=8, idle_seconds=60.0, **factories):
    """Serve environments by name; yields the address and key."""
    sessions = {name: Sessions(one, max_sessions, idle_seconds) for name, one in factories.items()}
    async with answering(EndpointConfig(port=0), EnvironmentService(sessions).add_routes) as at:
        monkeypatch.setenv(KEY_ENV, at.api_key)
        yield at


def remote(at, name, **section):
    placement = ServerPlacement(name="server", url=f"{at.url}/{name}", api_key_env=KEY_ENV)
    return ServiceEnvConfig(name="service", weights={"done": 1.0}, placement=placement, **section)


def worker_of(model_folder, tokenizer, env, outage=60.0, deadline=30.0, **options):
    deadlines = DeadlineConfig(environment=deadline, outage=outage)
    config = experiment(
        model_folder, env=env, rewards=(), cluster=ClusterConfig(deadlines=deadlines), **options
    )

    def answer(request):
        return [*tokenizer.encode("12"), ENDOFTEXT]

    return RolloutWorker(config, Router([Replica("echo", EchoEngine(answer).generate)]), store=list)


async def sample(worker, assignments):
    try:
        return [outcome async for outcome in worker.run_groups(assignments)]
    finally:
        await worker.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(scored, "FIRST_WAIT_SECONDS", 0.05)


def test_samples_are_those_of_environments_in_the_worker(model_folder, tokenizer, monkeypatch):
    local = ChainedSumsEnvConfig(name="chained_sums", num_sums=3)

    async def both():
        async with serving(monkeypatch, sums=local.make_factory()) as at:
            placement = ServerPlacement(name="server", url=f"{at.url}/sums", api_key_env=KEY_ENV)
            envs = (local, local.model_copy(update={"placement": placement}))
            return [
                await sample(worker_of(model_folder, tokenizer, env), [GroupAssignment(3, 4, num_samples=2)])
                for env in envs
            ]

    (here,), (there,) = asyncio.run(both())
    for one, other in zip(here.reference, there.reference, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        assert (one.rewards, one.reward, len(one.turns)) == (other.rewards, other.reward, 3)
        assert [turn.rewards for turn in one.turns] == [turn.rewards for turn in other.turns]


def test_stop_strings_of_turns_cross_the_wire(monkeypatch):
    class Stops(ScriptedFactory):
        def create(self):
            environment = super().create()
            environment.stop_strings = ("</plan>",)
            environment.step = self.step
            return environment

        async def step(self, action):
            return Step(done=False, stop_strings=("</move>", "?"))

    async def run():
        async with serving(monkeypatch, stops=Stops()) as at:
            factory = factory_behind_server(remote(at, "stops"), remote(at, "stops").placement)
            environment = factory.create()
            await environment.reset(TASK)
            step = await environment.step(ACTION)
            await environment.close()
            await factory.close()
            return environment.stop_strings, step.stop_strings

    assert asyncio.run(run()) == (("</plan>",), ("</move>", "?"))


def test_the_wait_for_a_place_is_not_part_of_the_deadline(model_folder, tokenizer, monkeypatch):
    factory = ScriptedFactory(seconds=0.3)

    async def run():
        async with serving(monkeypatch, max_sessions=2, slow=factory) as at:
            worker = worker_of(model_folder, tokenizer, remote(at, "slow", max_retries=0), deadline=1.5)
            return await sample(worker, [GroupAssignment(0, 0, num_samples=12)])  # 1.8 s on two places

    (group,) = asyncio.run(run())
    assert [t.reward for t in group.trajectories] == [1.0] * 12
    assert factory.most_running == 2
    assert factory.num_closed == 12


def test_a_hanging_environment_delays_its_own_episodes_only(model_folder, tokenizer, monkeypatch):
    slow, fast = ScriptedFactory(), ScriptedFactory()
    sums = ArithmeticDataset(name="arithmetic", digits=1, size=10)
    sources = {name: {"dataset": sums} for name in ("slow", "fast")}

    async def run():
        slow.released = asyncio.Event()
        async with serving(monkeypatch, max_sessions=1, slow=slow, fast=fast) as at:
            env = ByTaskEnvConfig(
                name="by_task",
                key="source",
                environments={name: remote(at, name) for name in ("slow", "fast")},
            )
            data = DataConfig(train=MixtureDataset(name="mixture", sources=sources), chat=False)
            worker = worker_of(model_folder, tokenizer, env, data=data)
            ended = []
            assignments = [GroupAssignment(group, group, num_samples=2) for group in range(0, 20, 2)]
            try:
                async for outcome in worker.run_groups(assignments):
                    ended.append(outcome.environment)
                    if ended.count("fast") == 5:
                        slow.released.set()
            finally:
                await worker.close()
            return ended

    ended = asyncio.run(run())
    assert ended == ["fast"] * 5 + ["slow"] * 5


@pytest.mark.parametrize(
    ("error", "message"),
    [(ValueError("gone"), "status 500: ValueError: gone"), (EnvironmentLost("down"), "status 503: down")],
)
def test_errors_of_an_environment_cross_the_wire(model_folder, tokenizer, monkeypatch, error, message):
    async def run():
        async with serving(monkeypatch, broken=ScriptedFactory(error=error)) as at:
            worker = worker_of(model_folder, tokenizer, remote(at, "broken"), outage=0.0)
            return await sample(worker, [GroupAssignment(0, 0, num_samples=1)])

    (group,) = asyncio.run(run())
    assert message in group.trajectories[0].error
    assert group.trajectories[0].num_retries == 1


def test_access_requires_the_key(model_folder, tokenizer, monkeypatch):
    async def run():
        async with serving(monkeypatch, **{"": ScriptedFactory()}) as at, aiohttp.ClientSession() as http:
            answers = []
            for key in ("", "Bearer wrong", f"Bearer {at.api_key}"):
                body = {"client": {"name": "other", "start": "1"}}
                async with http.post(
                    f"{at.url}/sessions", json=body, headers={"Authorization": key}
                ) as answer:
                    answers.append(answer.status)
            async with http.get(at.url.removesuffix("/v1") + "/health") as answer:
                health = await answer.json()
            monkeypatch.setenv(KEY_ENV, "wrong")
            env = remote(at, "").model_copy(
                update={"placement": ServerPlacement(name="server", url=at.url, api_key_env=KEY_ENV)}
            )
            return (
                answers,
                health,
                await sample(worker_of(model_folder, tokenizer, env), [GroupAssignment(0, 0, num_samples=1)]),
            )

    answers, health, (group,) = asyncio.run(run())
    assert answers == [401, 401, 201]
    assert health["environments"][""] | {"max_open": 8} == health["environments"][""]
    assert (health["status"], health["environments"][""]["open"]) == ("ok", 1)
    assert "status 401: The key is not valid here" in group.trajectories[0].error
    assert group.trajectories[0].num_retries == 1  # it is not taken for an outage


def test_the_documented_messages(monkeypatch):
    """As a client in another language writes them: docs/environment_service.md."""

    async def run():
        async with serving(monkeypatch, max_sessions=1, **{"": ScriptedFactory()}) as at:
            headers, seen = {"Authorization": f"Bearer {at.api_key}"}, []
            async with aiohttp.ClientSession(headers=headers) as http:

                async def ask(method, path, body=None):
                    async with http.request(method, at.url + path, json=body) as answer:
                        seen.append(answer.status)
                        return await answer.json(), answer.headers

                opened, _ = await ask("POST", "/sessions", {"client": {"name": "go", "start": "1"}})
                full, headers = await ask("POST", "/sessions", {"client": {"name": "go", "start": "1"}})
                path = f"/sessions/{opened['id']}"
                task = {"index": 0, "messages": [{"role": "user", "content": "1+1="}], "later": 1}
                opening, _ = await ask("POST", f"{path}/reset", {"task": task})
                step, _ = await ask("POST", f"{path}/step", {"action": {"text": "2"}})
                await ask("DELETE", path)
                unknown, _ = await ask("POST", f"{path}/step", {"action": {"text": "2"}})
                wrong, _ = await ask("POST", "/sessions", {"client": {"name": "go"}})
                answer, _ = await ask("POST", "/answer", {"text": "it is 2"})
                return seen, headers, full, opening, step, unknown, wrong, answer

    seen, headers, full, opening, step, unknown, wrong, answer = asyncio.run(run())
    assert seen == [201, 429, 200, 200, 200, 404, 400, 200]
    assert headers["Retry-After"] == "1"
    assert (full["error"]["code"], unknown["error"]["code"]) == ("no_place", "session_unknown")
    assert [(m["role"], m["content"]) for m in opening["messages"]] == [("user", "1+1=")]
    common = {"num_retries": 0, "stop_strings": []}
    assert step == {"messages": [], "rewards": {"done": 1.0}, "done": True, **common}
    assert wrong["error"]["param"] == "client.start"
    assert answer == {"answer": "it is 2"}


def test_sessions_end_without_calls_and_with_an_earlier_start_of_their_caller():
    async def run():
        factory = ScriptedFactory()
        sessions = Sessions(factory, 4, idle_seconds=0.2)
        idle = sessions.open(ME)
        await sessions.reset(idle, TASK)
        while sessions.counts.open:
            await asyncio.sleep(0.05)
        with pytest.raises(SessionFailed, match="closed, idle or lost"):
            await sessions.step(idle, ACTION)
        factory.released = asyncio.Event()
        old, other = sessions.open(ME), sessions.open(Caller("other", "1"))
        hanging = asyncio.create_task(sessions.step(old, ACTION))
        await asyncio.sleep(0)
        new = sessions.open(replace(ME, start="2"))
        with pytest.raises(SessionFailed, match="closed during the call"):
            await hanging
        await asyncio.sleep(0.01)
        await sessions.reset(other, TASK)
        await sessions.reset(new, TASK)
        counts = sessions.counts
        await sessions.shut_down()
        return counts, factory.num_closed

    counts, num_closed = asyncio.run(run())
    assert (counts.open, counts.expired, counts.opened) == (2, 1, 4)
    assert num_closed == 4


def start_server(port, folder):
    command = [sys.executable, "-m", "nemorl.cli", "serve", "env", "chained_sums", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--api-key-env", KEY_ENV],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout.readline() == f"endpoint: http://127.0.0.1:{port}/v1\n"
    return process


def test_a_server_that_was_killed_answers_again(model_folder, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv(KEY_ENV, "secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start_server(port, tmp_path)
    placement = ServerPlacement(name="server", url=f"http://127.0.0.1:{port}/v1", api_key_env=KEY_ENV)
    env = ChainedSumsEnvConfig(name="chained_sums", num_sums=2, placement=placement)
    worker, calls = worker_of(model_folder, tokenizer, env), []
    generate = worker._environments[""].turns.sampler.generator.generate

    async def kill_once(*arguments):
        nonlocal server
        calls.append(arguments)
        if len(calls) == 1:
            server.kill()
            server.wait()
            server = await asyncio.to_thread(start_server, port, tmp_path)
        return await generate(*arguments)

    monkeypatch.setattr(worker._environments[""].turns.sampler.generator, "generate", kill_once)
    try:
        (group,) = asyncio.run(sample(worker, [GroupAssignment(0, 0, num_samples=3)]))
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
    assert [t.error for t in group.trajectories] == [None] * 3
    assert [t.num_turns for t in group.trajectories] == [2] * 3
    assert sum(t.num_retries for t in group.trajectories) >= 3
