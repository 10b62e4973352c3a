"""Trial of an environment of the user's before a run: one episode with scripted answers."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemorl.config.base import NotImported
from nemorl.config.environment import CustomEnvConfig, EnvBase, ProgramEnvConfig
from nemorl.config.library_environments import OpenRLHFEnvConfig
from nemorl.data.tokenizer import Tokenizer, TokenizerError, prompts_of
from nemorl.errors import Problem
from nemorl.generation.types import SamplingParams
from nemorl.trajectories import (
    Action,
    Conversation,
    Episode,
    EpisodeEnvironment,
    Message,
    Model,
    StopReason,
    Task,
    is_number,
    opening_problem,
    shown,
    step_problem,
    stop_strings_problem,
)

from . import turn_loop

END_SECONDS = 1.0  # for a cancelled call to end
MAX_TURNS = 8  # of the scripted episode; an environment may continue for longer


class _Failed(Exception):
    """What the environment did wrong; the message names the call."""


class _Raised(_Failed):
    """An agent that raised, perhaps since it cannot read answers that no model gave."""


@dataclass
class Trial:
    """How the environments of a section are tried, and what was found besides problems."""

    task: Task | None  # None: only the factory is constructed
    seconds: float  # of each call, and of an agent between two calls of the model
    tokenizer: Tokenizer | None = None  # of the policy; each text of an episode is encoded
    chat: bool = True  # `data.chat`
    remarks: list[Problem] = field(default_factory=list)  # which may be due to the scripted answers


def program_problems(config: ProgramEnvConfig, trial: Trial) -> Iterator[Problem]:
    """Run an episode of a program, answered as `custom_environment_problems` answers agents."""
    calls, problem = _Calls(trial.seconds), None
    try:
        if trial.task is not None:
            _agent_episode(calls, config, config.make_factory(), trial.task)
    except _Raised as failure:
        trial.remarks.append(Problem("env.command", " ".join(config.command), str(failure)))
    except _Failed as failure:
        problem = f"{failure}; correct the program (docs/agents.md)"
    calls.end()
    if problem is not None:
        yield Problem("env.command", " ".join(config.command), problem)


def custom_environment_problems(
    config: CustomEnvConfig | OpenRLHFEnvConfig, trial: Trial
) -> Iterator[Problem]:
    """Construct the factory; with a task, run an episode: an empty answer, then the expected one repeated.

    Agents, which own their loop, are answered with the expected answer; one that raises then is tried with an
    empty answer before it. What it raises then, too, is in `trial.remarks`.
    """
    calls, task = _Calls(trial.seconds), trial.task
    if isinstance(config, CustomEnvConfig):
        name, value, problem = "env.factory", config.factory, None
    else:
        name, value, problem = "env.agent", config.agent, None
    try:
        factory = calls.run("the constructor", config.make_factory)
    except NotImported as error:
        problem = str(error)
    except _Failed as failure:
        problem = f"{failure}; correct the factory"
        if isinstance(config, CustomEnvConfig) and config.options:
            name, value = "env.options", config.options  # type: ignore[assignment]
            problem += " or its options"
    else:
        problem = _not_a_factory(factory)
        if problem is None and task is not None:
            try:
                _episode(calls, config, factory, task, trial)
            except _Raised as failure:
                trial.remarks.append(Problem(name, value, str(failure)))
            except _Failed as failure:
                problem = f"{failure}; correct the environment (docs/environments.md)"
        with suppress(_Failed):
            calls.run("factory.close()", getattr(factory, "close", lambda: None))
    calls.end()
    if problem is not None:
        yield Problem(name, value, problem)


def _not_a_factory(factory: Any) -> str | None:
    if problem := _lacks(factory, "an EnvironmentFactory", "create", "close"):
        return problem
    weights = getattr(factory, "reward_weights", None)
    if isinstance(weights, dict) and all(isinstance(k, str) and is_number(v) for k, v in weights.items()):
        return None
    fix = "set it to a dict of reward names and their weights, empty where the environment gives no rewards"
    return f"its reward_weights is {weights!r}; {fix}"


def _lacks(value: Any, what: str, *methods: str) -> str | None:
    if missing := [name for name in methods if not callable(getattr(value, name, None))]:
        return f"{type(value).__name__} is not {what}; add the methods {', '.join(missing)}"
    return None


def _episode(
    calls: "_Calls", config: CustomEnvConfig | OpenRLHFEnvConfig, factory: Any, task: Task, trial: Trial
) -> None:
    tokenizer = trial.tokenizer
    environment = calls.run("create()", factory.create)
    if hasattr(environment, "run") and not hasattr(environment, "step"):
        if problem := _lacks(environment, "an EpisodeEnvironment", "run", "close"):
            raise _Failed(problem)
        calls.run("close()", environment.close, awaits=True)
        if config.placement.name != "worker":
            called = "it runs its episodes itself and calls the model in its rollout worker"
            raise _Failed(f"{called}, so env.placement must be worker; remove that, or give it a `step`")
        _agent_episode(calls, config, factory, task)
        return
    if problem := _lacks(environment, "an Environment", "reset", "step", "close"):
        raise _Failed(problem)
    try:
        if tokenizer is not None:
            task = prompts_of(tokenizer, trial.chat, as_text=config.writes_text).given(task)
        opening = calls.run("reset()", environment.reset, task, awaits=True)
        if problem := opening_problem(opening):
            raise _Failed(f"reset() {problem}")
        _encode(tokenizer, opening, "reset()")
        _check_tools(tokenizer, getattr(environment, "tools", ()), chat=trial.chat)
        if problem := stop_strings_problem(getattr(environment, "stop_strings", ())):
            raise _Failed(f"after reset() its stop_strings are {problem}")
        for turn in range(MAX_TURNS):
            text = (task.answer or "") if turn else ""
            action = Action(text, np.zeros(1, dtype=np.int32), StopReason.STOP)
            called = f"step({text!r})"
            step = calls.run(called, environment.step, action, awaits=True)
            if problem := step_problem(step):
                raise _Failed(f"{called} {problem}")
            _encode(tokenizer, step.messages, called)
            for name in step.rewards:
                if name not in factory.reward_weights:
                    given = f"{called} gave the reward {name!r}, which has no weight"
                    raise _Failed(f"{given}; add it to the factory's reward_weights")
            if step.done:
                break
            if not step.messages:
                fix = "return a message that the policy can answer, or done=True"
                raise _Failed(f"{called} returned done=False and no messages; {fix}")
    except _Failed:
        with suppress(_Failed):
            calls.run("close()", environment.close)
        raise
    calls.run("close()", environment.close, awaits=True)


@dataclass
class _Watched(EpisodeEnvironment):
    """An environment, and what its methods raised."""

    environment: EpisodeEnvironment
    raised: Exception | None = None  # by `run`
    raised_at_close: Exception | None = None

    async def run(self, task: Task, model: Model) -> Episode:
        try:
            running = self.environment.run(task, model)
            if inspect.isawaitable(running):
                return await running
        except Exception as error:
            self.raised = error
            raise
        raise TypeError("it is not async; define it with `async def`")

    async def close(self) -> None:
        try:
            await self.environment.close()
        except Exception as error:
            self.raised_at_close = error
            raise


def _agent_episode(calls: "_Calls", config: EnvBase, factory: Any, task: Task) -> None:
    """Raises _Failed, and _Raised where `run` raised for each of the scripted agents."""
    from .agent_model import AgentModel, scripted_agent  # with a server

    async def run(watched: _Watched, texts: Sequence[str]) -> list[Conversation]:
        sampling = SamplingParams()
        model = AgentModel(config, factory.reward_weights, sampling, calls.seconds, MAX_TURNS)
        turn_loop.log.disabled = True  # what it says of failures is reported here
        try:
            return await model.run(0, task, watched, scripted_agent(texts), lambda _: None)
        finally:
            turn_loop.log.disabled = False
            await model.close()

    answer, conversations = task.answer or "", []
    for texts in ((answer,), ("", answer)):
        watched = _Watched(calls.run("create()", factory.create))
        conversations = calls.run("run()", run, watched, texts, awaits=True, limits_itself=True)
        error, at_close = conversations[0].trajectory.error, watched.raised_at_close
        if at_close is not None:
            raise _Failed(f"close() raised {type(at_close).__name__}: {at_close}")
        if error is not None and watched.raised is None:
            raise _Failed(error.removeprefix("environment "))
        if error is None:
            break
    else:
        said = " ".join(str(watched.raised).split())
        raise _Raised(f"its episode with scripted answers raised {type(watched.raised).__name__}: {said}")
    for conversation in conversations:
        for name in conversation.trajectory.rewards:
            if name not in factory.reward_weights:
                raise _Failed(f"run() gave the reward {name!r}, which has no weight; add its weight")


def _encode(tokenizer: Tokenizer | None, messages: Sequence[Message], called: str) -> None:
    if tokenizer is None:
        return
    fix = "return text that this tokenizer has tokens for"
    for message in messages:
        try:
            tokenizer.encode(message.content)
        except TokenizerError as error:
            returned = f"{called} returned the text {shown(message.content)}"
            raise _Failed(f"{returned}, but {error}; {fix}") from error


def _check_tools(tokenizer: Tokenizer | None, tools: Any, *, chat: bool) -> None:
    """Raises _Failed for tools that are no schemas, or that the model cannot be offered."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": …, "parameters": {…}}}'
            raise _Failed(f"its tools have {shown(tool)} after reset(); write each as {form}")
    if tokenizer is not None:
        try:
            prompts_of(tokenizer, chat).with_tools(tools)
        except TokenizerError as error:
            raise _Failed(f"it has tools, but {error}") from error


class _Calls:
    """Calls code of the user's in an event loop of another thread, each for a bounded time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._hangs = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(
        self,
        what: str,
        function: Callable[..., Any],
        *arguments: Any,
        awaits: bool = False,
        limits_itself: bool = False,
    ) -> Any:
        """Return what the function returns, awaited where it is a coroutine. Raises _Failed, NotImported.

        One that limits its time itself has failed only if it blocks the loop.
        """

        async def call() -> Any:
            try:
                answer = function(*arguments)
                if awaits and not inspect.isawaitable(answer):
                    raise _Failed(f"{what} is not async; define it with `async def`")
                return await answer if inspect.isawaitable(answer) else answer
            except (NotImported, _Failed):
                raise
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                raise _Failed(f"{what} raised {type(error).__name__}: {error}") from error
            finally:
                ended.set()

        ended = threading.Event()
        if self._hangs:
            raise _Failed(f"{what} was not called, since another call hangs")
        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            for _ in range(MAX_TURNS if limits_itself else 0):
                if futures.wait([future], self.seconds).done:
                    break
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(self.seconds)
            return future.result(self.seconds)
        except TimeoutError:
            self._hangs = True
            future.cancel()
            ended.wait(END_SECONDS)  # in vain where the call blocks the thread; else asyncio complains
            late = f"returned nothing within {self.seconds:g} s (cluster.deadlines.environment)"
            raise _Failed(f"{what} {late}") from None

    def end(self) -> None:
        """Cancel what is left and stop the loop; what blocks its thread is not waited for."""
        asyncio.run_coroutine_threadsafe(self._cancel_rest(), self._loop)

    async def _cancel_rest(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*rest, return_exceptions=True), END_SECONDS)
        self._loop.stop()
