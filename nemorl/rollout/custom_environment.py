"""Trial of a custom environment before a run: one episode with scripted answers."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from nemorl.config.base import NotImported
from nemorl.config.environment import CustomEnvConfig
from nemorl.data.tokenizer import Tokenizer, TokenizerError, prompts_of
from nemorl.errors import Problem
from nemorl.trajectories import (
    Action,
    Message,
    StopReason,
    Task,
    is_number,
    opening_problem,
    shown,
    step_problem,
    stop_strings_problem,
)

END_SECONDS = 1.0  # for a cancelled call to end
MAX_TURNS = 8  # of the scripted episode; an environment may continue for longer


class _Failed(Exception):
    """What the environment did wrong; the message names the call."""


def custom_environment_problems(
    config: CustomEnvConfig,
    task: Task | None,
    seconds: float,
    tokenizer: Tokenizer | None = None,
    *,
    chat: bool = True,
) -> Iterator[Problem]:
    """Construct the factory; with a task, run an episode: an empty answer, then the expected one repeated.

    With the policy's tokenizer, each text of the episode is encoded; `chat` is `data.chat`.
    """
    calls = _Calls(seconds)
    field, value, problem = "env.factory", config.factory, None
    try:
        factory = calls.run("the constructor", config.make_factory)
    except NotImported as error:
        problem = str(error)
    except _Failed as failure:
        problem = f"{failure}; correct the factory"
        if config.options:
            field, value = "env.options", config.options  # type: ignore[assignment]
            problem += " or its options"
    else:
        problem = _not_a_factory(factory)
        if problem is None and task is not None:
            try:
                in_worker = config.placement.name == "worker"
                _episode(calls, factory, task, tokenizer, chat=chat, in_worker=in_worker)
            except _Failed as failure:
                problem = f"{failure}; correct the environment (docs/environments.md)"
        with suppress(_Failed):
            calls.run("factory.close()", getattr(factory, "close", lambda: None))
    calls.end()
    if problem is not None:
        yield Problem(field, value, problem)


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
    calls: "_Calls", factory: Any, task: Task, tokenizer: Tokenizer | None, *, chat: bool, in_worker: bool
) -> None:
    environment = calls.run("create()", factory.create)
    if hasattr(environment, "run") and not hasattr(environment, "step"):  # its episodes need a model
        if problem := _lacks(environment, "an EpisodeEnvironment", "run", "close"):
            raise _Failed(problem)
        calls.run("close()", environment.close, awaits=True)
        if not in_worker:
            called = "it runs its episodes itself and calls the model in its rollout worker"
            raise _Failed(f"{called}, so env.placement must be worker; remove that, or give it a `step`")
        return
    if problem := _lacks(environment, "an Environment", "reset", "step", "close"):
        raise _Failed(problem)
    try:
        opening = calls.run("reset()", environment.reset, task, awaits=True)
        if problem := opening_problem(opening):
            raise _Failed(f"reset() {problem}")
        _encode(tokenizer, opening, "reset()")
        _check_tools(tokenizer, getattr(environment, "tools", ()), chat=chat)
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
    except _Failed:
        with suppress(_Failed):
            calls.run("close()", environment.close)
        raise
    calls.run("close()", environment.close, awaits=True)


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
        self._seconds = seconds
        self._hangs = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, what: str, function: Callable[..., Any], *arguments: Any, awaits: bool = False) -> Any:
        """Return what the function returns, awaited where it is a coroutine. Raises _Failed, NotImported."""

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
            return future.result(self._seconds)
        except TimeoutError:
            self._hangs = True
            future.cancel()
            ended.wait(END_SECONDS)  # in vain where the call blocks the thread; else asyncio complains
            late = f"returned nothing within {self._seconds:g} s (cluster.deadlines.environment)"
            raise _Failed(f"{what} {late}") from None

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
