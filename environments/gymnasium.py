"""Environments of gymnasium, with observations and actions as text.

    env      An action is an integer from 0 to 3. Write it as <action>...</action>.
             0
    policy   <action>2</action>
    env      1

The task's seed is that of `reset`; the reward `gymnasium` is the sum of the environment's.
"""

import random
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Env, spaces

from nemorl.config.base import NotImported, function_at
from nemorl.config.library_environments import GymnasiumEnvConfig
from nemorl.errors import Problem
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

from .openings import opened, seed_of
from .own_thread import OwnThread
from .tags import last_tagged

Observe = Callable[[Any, Env[Any, Any]], str]
Act = Callable[[str, Env[Any, Any]], Any]
_MAX_NUMBERS = 1000  # of an observation; of larger ones the middle is left out


class GymnasiumEnvironment(Environment):
    """All calls of an episode run in one thread."""

    def __init__(self, config: GymnasiumEnvConfig, observe: Observe, act: Act) -> None:
        self._config, self._observe, self._act = config, observe, act
        self._turns_left = config.max_turns
        self._thread = OwnThread()
        self._env: Env[Any, Any] | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Raises ValueError for a task without a seed."""
        return opened(task, await self._thread.call(self.begin, seed_of(task)))

    async def step(self, action: Action) -> Step:
        tag = self._config.action_tag
        text = action.content.strip() if tag is None else last_tagged(action.content, tag) or ""
        return await self._thread.call(self._play, text)

    async def close(self) -> None:
        await self._thread.end(self.end)

    def begin(self, seed: int) -> str:
        """Instructions and first observation."""
        config = self._config
        self._env = gymnasium.make(config.id, **config.options)
        observation, _ = self._env.reset(seed=seed)
        instructions, tag = config.instructions, config.action_tag
        if instructions is None:
            instructions = "" if config.act else f"{rule_of(self._env.action_space)}\n"
            instructions += "" if tag is None else f"Write it as <{tag}>...</{tag}>.\n"
        return f"{instructions}{self._observe(observation, self._env)}"

    def _play(self, text: str) -> Step:
        assert self._env is not None, "step before reset"
        self._turns_left -= 1
        try:
            action = self._act(text, self._env)
        except ValueError as error:
            return Step((Message("user", str(error)),), done=self._turns_left == 0)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        rewards = {"gymnasium": float(reward)}
        if terminated or truncated or self._turns_left == 0:
            return Step(rewards=rewards)
        return Step((Message("user", self._observe(observation, self._env)),), rewards, done=False)

    def end(self) -> None:
        if self._env is not None:
            self._env.close()

    def example_turn(self, draws: random.Random) -> str:
        """A random action, for `nemorl env`; its text is right where `act` is null."""
        assert self._env is not None, "a turn before reset"
        space, tag = self._env.action_space, self._config.action_tag
        space.seed(draws.randrange(2**31))
        text = written(space, space.sample())
        return text if tag is None else f"<{tag}>{text}</{tag}>"


class GymnasiumFactory(EnvironmentFactory):
    def __init__(self, config: GymnasiumEnvConfig) -> None:
        """Raises NotImported for a function that cannot be imported."""
        self.reward_weights, self._config = config.reward_weights, config
        self._observe = observed if config.observe is None else function_at(config.observe)
        self._act = read if config.act is None else function_at(config.act)

    def create(self) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(self._config, self._observe, self._act)


def problems_of(config: GymnasiumEnvConfig) -> list[Problem]:
    """Make the environment and its first observation."""
    for field, path in (("observe", config.observe), ("act", config.act)):
        try:
            if path is not None:
                function_at(path)
        except NotImported as error:
            return [Problem(field, path, str(error))]
    environment = GymnasiumFactory(config).create()
    try:
        environment.begin(0)
    except UnknownSpace as error:
        return [Problem(error.field, None, str(error))]
    except Exception as error:  # noqa: BLE001  gymnasium's own classes, and those of environments
        problem = f"its first observation failed: {type(error).__name__}: {error}"
        return [Problem("id", config.id, f"{problem}; correct the id, the options or observe")]
    finally:
        environment.end()
    return []


class UnknownSpace(TypeError):
    """A space that has no text by default."""

    def __init__(self, space: Any, field: str) -> None:
        super().__init__(f"the space {space} has no text by default; name a function")
        self.field = field


def observed(observation: Any, env: Env[Any, Any]) -> str:
    """Raises UnknownSpace."""
    return written(env.observation_space, observation)


def written(space: Any, value: Any) -> str:
    """A value of a space as text. Raises UnknownSpace."""
    match space:
        case spaces.Text():
            return str(value)
        case spaces.Tuple():
            return ", ".join(written(part, item) for part, item in zip(space.spaces, value, strict=True))
        case spaces.Dict():
            return "\n".join(f"{name}: {written(part, value[name])}" for name, part in space.spaces.items())
        case spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary() | spaces.Box():
            forms: Any = {"int_kind": "{:d}".format, "float_kind": "{:.4g}".format}
            return np.array2string(np.asarray(value), separator=", ", threshold=_MAX_NUMBERS, formatter=forms)
    raise UnknownSpace(space, "observe")


def rule_of(space: Any) -> str:
    """What an action of a space is, in words. Raises UnknownSpace."""
    if isinstance(space, spaces.Text):
        length, characters = f"{space.min_length} to {space.max_length}", "".join(sorted(space.characters))
        return f"An action is a text of {length} of the characters {characters}."
    low, high = (written(space, bound) for bound in _bounds(space))
    if space.shape:
        return f"An action is numbers, separated by commas, from {low} to {high}."
    return f"An action is an integer from {low} to {high}."


def read(text: str, env: Env[Any, Any]) -> Any:
    """The action that a text is. Raises ValueError, with what an action is."""
    space = env.action_space
    value: Any = text
    if not isinstance(space, spaces.Text):
        number = int if np.issubdtype(space.dtype, np.integer) else float
        try:
            numbers = [number(part) for part in text.strip("[]").split(",")]
            value = np.array(numbers, space.dtype).reshape(space.shape)[()]  # a number where it has no shape
        except (ValueError, OverflowError):
            raise ValueError(rule_of(space)) from None
    if not space.contains(value):
        raise ValueError(rule_of(space))
    return value


def _bounds(space: Any) -> tuple[Any, Any]:
    """Smallest and largest action."""
    match space:
        case spaces.Discrete():
            return space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case spaces.MultiBinary():
            return np.zeros(space.shape, int), np.ones(space.shape, int)
        case spaces.Box():
            return space.low, space.high
    raise UnknownSpace(space, "act")
