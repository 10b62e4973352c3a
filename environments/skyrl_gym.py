"""Environments of skyrl-gym, which read and write text.

The row of a task is the `extras` of its environment; without a column `reward_spec` the answer of the task is
the ground truth. The reward `skyrl_gym` is the sum of what the environment gives.
"""

from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv

from nemorl.config.base import function_at
from nemorl.config.library_environments import SkyrlGymEnvConfig
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

from .own_thread import OwnThread

_CLASS_KEY = "env_class"  # of rows, as SkyRL's datasets have it


class SkyrlGymEnvironment(Environment):
    """All calls of an episode run in one thread."""

    def __init__(self, config: SkyrlGymEnvConfig) -> None:
        self._config = config
        self._thread = OwnThread()
        self._env: BaseTextEnv | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Raises ValueError for a task that names no environment, and what the environment raises."""
        return await self._thread.call(self._begin, task)

    async def step(self, action: Action) -> Step:
        return await self._thread.call(self._play, action.text)

    async def close(self) -> None:
        await self._thread.end(self._end)

    def _begin(self, task: Task) -> tuple[Message, ...]:
        name = self._config.env or task.columns.get(_CLASS_KEY)
        if not isinstance(name, str):
            raise ValueError(f"task {task.index} has no text in column `{_CLASS_KEY}`: set env.env")
        self._env = made(name, extras_of(task, self._config.max_turns), self._config.options)
        prompt, _ = self._env.init([message.as_dict() for message in task.messages])
        return _messages(prompt)

    def _play(self, text: str) -> Step:
        assert self._env is not None, "step before reset"
        output = self._env.step(text)
        rewards = {"skyrl_gym": float(output["reward"])}
        return Step(_messages(output["observations"]), rewards, bool(output["done"]))

    def _end(self) -> None:
        if self._env is not None:
            self._env.close()


class SkyrlGymFactory(EnvironmentFactory):
    def __init__(self, config: SkyrlGymEnvConfig) -> None:
        self.reward_weights, self._config = config.reward_weights, config

    def create(self) -> SkyrlGymEnvironment:
        return SkyrlGymEnvironment(self._config)


def made(name: str, extras: dict[str, Any], options: dict[str, Any]) -> Any:
    """The environment of a registered id, or the class at an import path. Raises NotImported."""
    from omegaconf import OmegaConf  # of skyrl-gym, which reads its settings as attributes

    given = {"env_config": OmegaConf.create(options), "extras": extras}
    return function_at(name)(**given) if ":" in name else skyrl_gym.make(name, **given)


def extras_of(task: Task, max_turns: int) -> dict[str, Any]:
    """What the environment gets of a task."""
    extras = {"max_turns": max_turns, **task.columns}
    if "reward_spec" not in extras and task.answer is not None:
        extras["reward_spec"] = {"method": "rule", "ground_truth": task.answer}
    return extras


def _messages(conversation: list[dict[str, str]]) -> tuple[Message, ...]:
    return tuple(Message(one["role"], one["content"]) for one in conversation)  # type: ignore[arg-type]
