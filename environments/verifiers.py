"""Environments of verifiers, which own their loop: they call the policy's endpoint for this episode.

    task ─▶ the environment's agents ─▶ the library's interception server ─▶ endpoint of the policy
                                                                          └▶ traces with rewards and metrics

The dataset `verifiers` names the task set. The reward `verifiers` is the sum of the weighted rewards of the
traces; `scores` names single rewards and metrics to show.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from verifiers import v1 as vf

from nemorl.config.library_environments import VerifiersEnvConfig
from nemorl.trajectories import EnvironmentFactory, Episode, EpisodeEnvironment, Model, Task


class VerifiersFailed(RuntimeError):
    """An episode of the library failed; the message has its errors."""


class Served:
    """An environment of the library with what its episodes share, such as servers of tools."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.env = vf.load_environment(vf.resolve_env_config(dict(section)))
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._owner = asyncio.create_task(self._serve())

    async def ready(self) -> None:
        """Raises what the start raised."""
        await asyncio.shield(self._ready)

    async def close(self) -> None:
        self._closing.set()
        await asyncio.gather(self._owner, return_exceptions=True)

    async def _serve(self) -> None:
        """In a task of its own: what it opens must end in the task that opened it."""
        try:
            async with self.env.serving():
                self._ready.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    def task_of(self, data: Mapping[str, Any]) -> Any:
        kind = type(self.env.taskset).task_type()
        return kind(kind.data_type().model_validate(data), self.env.config.taskset.task)


class VerifiersEnvironment(EpisodeEnvironment):
    def __init__(self, factory: "VerifiersFactory") -> None:
        self._factory = factory

    async def run(self, task: Task, model: Model) -> Episode:
        """Raises VerifiersFailed, and ValueError for a task of another dataset."""
        if "verifiers_taskset" not in task.columns:
            raise ValueError(f"task {task.index} is not of verifiers: set `data` to a verifiers dataset")
        served = await self._factory.served(task.columns["verifiers_taskset"])
        with _key_in_environment(model.api_key) as variable:
            client = vf.EvalClientConfig(base_url=model.base_url, api_key_var=variable)
            context = vf.ModelContext(model=model.name, client=client)
            episode = await served.env.run_episode(served.task_of(task.columns["verifiers_data"]), context)
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
        self._section = config.environment
        self._served: dict[str, Served] = {}

    def create(self) -> VerifiersEnvironment:
        return VerifiersEnvironment(self)

    async def served(self, taskset: Mapping[str, Any]) -> Served:
        """The environment with this task set, started once. Raises what the start raised."""
        key = json.dumps(taskset, sort_keys=True)
        if key not in self._served:
            self._served[key] = Served({**self._section, "taskset": taskset})
        served = self._served[key]
        try:
            await served.ready()
        except Exception:
            self._served.pop(key, None)  # the next episode tries again
            raise
        return served

    async def close(self) -> None:
        for served in self._served.values():
            await served.close()


@contextmanager
def _key_in_environment(key: str) -> Iterator[str]:
    """The variable that holds it: the library reads keys from variables only.

    It keeps those with API_KEY in their name from the programs that it starts.
    """
    variable = f"NEMORL_API_KEY_{secrets.token_hex(8).upper()}"
    os.environ[variable] = key
    try:
        yield variable
    finally:
        del os.environ[variable]
