"""Agent files of OpenRLHF, whose `reset` and `step` read and write one text.

    env      the prompt, as the chat template writes it, or what `reset` makes of it
    policy   a turn
    env      `environment_feedback`, as it is: the marks of the chat template are the agent's

The reward `openrlhf` is the sum of the steps' `rewards`. `openrlhf_score` is the newest of their `scores`, by
which OpenRLHF filters groups, or the sum so far where the agent gives none.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from nemorl.config.base import NotImported, function_at
from nemorl.config.library_environments import OpenRLHFEnvConfig
from nemorl.trajectories import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentLost,
    Message,
    Step,
    Task,
    shown,
)

_MODULE = "openrlhf.utils.agent"
_KEYS = ("rewards", "environment_feedback", "done")  # that each step has to return


class AgentExecutorBase(ABC):
    """Stand-in of OpenRLHF's base class, for agent files where its package is not installed."""

    @abstractmethod
    async def execute(self, *arguments: Any, **options: Any) -> Any: ...


class AgentInstanceBase(ABC):
    """Stand-in of OpenRLHF's base class: an agent in one conversation."""

    @abstractmethod
    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **options: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, state_dict: dict[str, Any], **options: Any) -> dict[str, Any]: ...


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Stand-in of OpenRLHF's loop over turns, which is that of the rollout workers here."""

    def __init__(self, agent_instance_cls: type) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("this is a stand-in of openrlhf, in which rollout workers run the turns")


@contextmanager
def openrlhf_package() -> Iterator[ModuleType]:
    """The module with the base classes of agents: OpenRLHF's, or while in this context the stand-in."""
    if find_spec("openrlhf") is not None:
        yield import_module(_MODULE)
        return
    *parents, stand_in = (ModuleType(name) for name in ("openrlhf", "openrlhf.utils", _MODULE))
    for base in (AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor):
        setattr(stand_in, base.__name__, base)
    modules = {module.__name__: module for module in (*parents, stand_in)}
    sys.modules |= modules
    try:
        yield stand_in
    finally:
        for name in modules:
            sys.modules.pop(name, None)


@dataclass
class SamplingParams:
    """Stand-in of vLLM's, in the states of a step: an agent may say which strings end its next turn."""

    stop: str | list[str] | None = field(default_factory=list)


class OpenRLHFEnvironment(Environment):
    """One conversation of an agent; the messages of a task are the one text of its prompt."""

    def __init__(self, agent: type, logs: tuple[str, ...]) -> None:
        """`logs` are entries of `extra_logs`, which become rewards."""
        self._name = f"{agent.__module__}:{agent.__name__}"
        with _named(f"{self._name}()"):
            self._agent = agent()
        self._sampling = SamplingParams()
        self._newest = dict.fromkeys(("openrlhf_score", *logs), 0.0)
        self._total = 0.0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Raises TypeError for what is no observation, and RuntimeError for what the agent raises."""
        prompt = "".join(message.content for message in task.messages)  # one, unless there is no tokenizer
        self._label = task.answer or ""
        with _named(f"{self._name}.reset"):
            states = await self._agent.reset({"observation": prompt, "label": self._label})
        text = states.get("observation") if isinstance(states, Mapping) else None
        if not isinstance(text, str):
            raise TypeError(f"{self._name}.reset returned {shown(states)}; return {{'observation': text}}")
        self._text = text
        return (Message("user", text),)

    async def step(self, action: Action) -> Step:
        """Raises TypeError and ValueError for an answer that cannot be used, and RuntimeError as `reset`."""
        states = {
            "observation_text": self._text,
            "action_text": action.text,
            "label": self._label,
            "sampling_params": self._sampling,
        }
        called = f"{self._name}.step"
        with _named(called):
            answer = await self._agent.step(states)
        if not isinstance(answer, Mapping) or (missing := [key for key in _KEYS if key not in answer]):
            lacks = f" without {', '.join(missing)}" if isinstance(answer, Mapping) else ""
            raise TypeError(
                f"{called} returned {shown(answer)}{lacks}; return a dict with {', '.join(_KEYS)}"
            )
        if answer.get("environment_images"):
            raise ValueError(f"{called} returned environment_images; only text is supported, remove them")
        feedback, logs = answer["environment_feedback"], answer.get("extra_logs") or {}
        if not isinstance(feedback, str):
            raise TypeError(f"{called} returned environment_feedback={shown(feedback)}; return text")
        if not isinstance(logs, Mapping):
            raise TypeError(f"{called} returned extra_logs={shown(logs)}; return a dict")
        reward = _number(answer["rewards"], f"{called} returned rewards")
        self._total += reward
        self._text += action.text + feedback
        newest = {**logs, "openrlhf_score": answer.get("scores", self._total)}
        rewards = {"openrlhf": reward}
        for name, before in self._newest.items():  # rewards are summed over turns, and these are replaced
            if name in newest:
                self._newest[name] = _number(newest[name], f"{called} returned {name}")
            rewards[name] = self._newest[name] - before
        if done := bool(answer["done"]):
            return Step((), rewards, done)
        stop_strings = self._stop_strings(answer.get("sampling_params"), called)
        return Step((Message("user", feedback),), rewards, done, stop_strings=stop_strings)

    def _stop_strings(self, returned: Any, called: str) -> tuple[str, ...]:
        """Those of the next turn. Raises ValueError for another way to sample."""
        if returned is not None and not isinstance(returned, SamplingParams):
            kind = type(returned).__name__
            raise ValueError(
                f"{called} returned sampling_params of the type {kind}; return those of its states"
            )
        self._sampling = returned or self._sampling
        if changed := sorted(vars(self._sampling).keys() - {"stop"}):
            fix = (
                "the run decides how tokens are sampled; set it in `generation`, where there is such a field"
            )
            raise ValueError(f"{called} set sampling_params.{changed[0]}; {fix}")
        stop = self._sampling.stop
        return (stop,) if isinstance(stop, str) else tuple(stop or ())


class OpenRLHFFactory(EnvironmentFactory):
    def __init__(self, config: OpenRLHFEnvConfig) -> None:
        """Raises NotImported for a class that is no step-based agent."""
        self.reward_weights, self._logs = config.reward_weights, config.logs
        self._agent = agent_at(config.agent)

    def create(self) -> OpenRLHFEnvironment:
        return OpenRLHFEnvironment(self._agent, self._logs)


def agent_at(path: str) -> type:
    """The class of the agent that the executor at an import path runs. Raises NotImported."""
    with openrlhf_package() as package:
        executor_class, base = function_at(path), package.MultiTurnAgentExecutor
        own_loop = "an executor with a loop of its own is an agent here (docs/agents.md)"
        if not (isinstance(executor_class, type) and issubclass(executor_class, base)):
            raise NotImported(f"{path} is not derived from MultiTurnAgentExecutor; derive it, or {own_loop}")
        if getattr(executor_class, "execute", None) is not base.execute:
            raise NotImported(f"{path} has an `execute` of its own; remove it, or {own_loop}")
        try:
            agent = executor_class().agent_instance_cls
        except Exception as error:
            raise NotImported(f"{path}() raised {type(error).__name__}: {error}; correct it") from error
        if not (isinstance(agent, type) and issubclass(agent, package.AgentInstanceBase)):
            raise NotImported(f"{path} runs {shown(agent)}; give it a class derived from AgentInstanceBase")
        return agent


@contextmanager
def _named(called: str) -> Iterator[None]:
    """Raise what the agent raises with the name of what was called, but for a service that is gone."""
    try:
        yield
    except EnvironmentLost:
        raise
    except Exception as error:
        raise RuntimeError(f"{called} raised {type(error).__name__}: {error}") from error


def _number(value: Any, what: str) -> float:
    """A number, or that in a tensor of one element."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{what}={shown(value)}; return a tensor with one number") from error
