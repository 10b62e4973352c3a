"""Environments of verifiers, which own their loop: they call the policy's endpoint for this episode.

    task ─▶ the environment's agents ─▶ the library's interception server ─▶ endpoint of the policy
                                                                          └▶ traces with rewards and metrics

The environment runs in this process, or in the library's environment server. The dataset `verifiers` names
the task set. The reward `verifiers` is the sum of the weighted rewards of the traces; `scores` names single
rewards and metrics to show.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol

import zmq
from verifiers import v1 as vf
from verifiers.v1.serve import EnvClient
from zmq.utils.monitor import recv_monitor_message

from nemorl.config.library_environments import VerifiersEnvConfig
from nemorl.trajectories import (
    EnvironmentFactory,
    EnvironmentLost,
    Episode,
    EpisodeEnvironment,
    Model,
    Task,
)

_ANSWER_SECONDS = 30.0  # of a server to a call for its health, which its event loop may delay


class VerifiersFailed(RuntimeError):
    """An episode of the library failed; the message has its errors."""


class Runner(Protocol):
    """What runs episodes of the library. Belongs to one event loop."""

    async def run(self, data: Mapping[str, Any], context: vf.ModelContext) -> vf.Episode:
        """The episode of the task with this data."""

    async def close(self) -> None: ...


class InProcess:
    """An environment of the library with what its episodes share, such as servers of tools."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._section = section
        self._started: asyncio.Future[vf.Env] | None = None
        self._owner: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def run(self, data: Mapping[str, Any], context: vf.ModelContext) -> vf.Episode:
        """Raises what the start raised; the next episode tries again."""
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._serve(self._started))
        started = self._started
        try:
            env = await asyncio.shield(started)
        except Exception:
            if self._started is started:
                self._started = None
            raise
        kind = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), env.config.taskset.task)
        return await env.run_episode(task, context)

    async def close(self) -> None:
        self._closing.set()
        if self._owner is not None:
            await asyncio.gather(self._owner, return_exceptions=True)

    async def _serve(self, started: "asyncio.Future[vf.Env]") -> None:
        """In a task of its own: what it opens must end in the task that opened it."""
        try:
            env = vf.load_environment(vf.resolve_env_config(dict(self._section)))
            async with env.serving():
                started.set_result(env)
                await self._closing.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)


class Server:
    """An environment server of the library; its episodes are lost with the connection."""

    def __init__(self, url: str) -> None:
        self._url, self._client = url, EnvClient(url)
        self._monitor = self._client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._disconnected = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch())

    async def run(self, data: Mapping[str, Any], context: vf.ModelContext) -> vf.Episode:
        """Raises EnvironmentLost, and VerifiersFailed for a request that the server refuses."""
        if not await self._client.health(timeout=_ANSWER_SECONDS):
            raise EnvironmentLost(f"the server {self._url} does not answer within {_ANSWER_SECONDS:g} s")
        asked = self._client.run(context.client, context.model, context.sampling, dict(data))
        running, disconnected = asyncio.ensure_future(asked), self._disconnected
        try:
            await asyncio.wait({running, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()  # which the client sends to the server; nothing when it is done
        if not running.done():
            raise EnvironmentLost(f"the server {self._url} closed the connection")
        if error := running.exception():
            raise VerifiersFailed(f"the server {self._url} refuses the episode: {error}") from error
        return running.result()

    async def close(self) -> None:
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        self._client.socket.disable_monitor()
        self._monitor.close(linger=0)
        await self._client.close()

    async def _watch(self) -> None:
        while True:
            await recv_monitor_message(self._monitor)
            self._disconnected.set_result(None)
            self._disconnected = asyncio.get_running_loop().create_future()


class VerifiersEnvironment(EpisodeEnvironment):
    def __init__(self, factory: "VerifiersFactory") -> None:
        self._factory = factory

    async def run(self, task: Task, model: Model) -> Episode:
        """Raises VerifiersFailed, EnvironmentLost, and ValueError for a task of another dataset."""
        if "verifiers_taskset" not in task.columns:
            raise ValueError(f"task {task.index} is not of verifiers: set `data` to a verifiers dataset")
        # Its key is a header, since the library reads keys from variables only.
        client = vf.EvalClientConfig(
            base_url=model.base_url, api_key_var="", headers={"X-API-Key": model.api_key}
        )
        context = vf.ModelContext(model=model.name, client=client)
        runner = self._factory.runner(task.columns["verifiers_taskset"])
        episode = await runner.run(task.columns["verifiers_data"], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise VerifiersFailed("; ".join(f"{one.type}: {one.message}" for one in errors) or "it is not ok")
        found: dict[str, float] = {}
        for trace in episode.traces:
            scores = {name: one.score for name, one in trace.rewards.items() if one is not None}
            for name, value in (scores | trace.metrics).items():
                if value is not None:
                    found[name] = found.get(name, 0.0) + value
        rewards = {name: found[name] for name in self._factory.scores if name in found}
        rewards["verifiers"] = sum(trace.reward for trace in episode.traces)
        return Episode(rewards, columns={"verifiers": found})


class VerifiersFactory(EnvironmentFactory):
    def __init__(self, config: VerifiersEnvConfig) -> None:
        self.reward_weights, self.scores = config.reward_weights, config.scores
        self._section, self._url = config.environment, config.url
        self._runners: dict[str, Runner] = {}

    def create(self) -> VerifiersEnvironment:
        return VerifiersEnvironment(self)

    def runner(self, taskset: Mapping[str, Any]) -> Runner:
        """What runs the episodes of this task set; a server has its own."""
        key = json.dumps(taskset, sort_keys=True) if self._url is None else ""
        if key not in self._runners:
            section = {**self._section, "taskset": taskset}
            self._runners[key] = InProcess(section) if self._url is None else Server(self._url)
        return self._runners[key]

    async def close(self) -> None:
        for runner in self._runners.values():
            await runner.close()
