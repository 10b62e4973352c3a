"""`nemorl env`: act in an environment without a model, and measure it."""

import asyncio
import json
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import yaml

from nemorl.config.base import NotImported, counted, suggestion
from nemorl.config.environment import EnvBase, FunctionRewardConfig, OneEnvConfig, ServerPlacement
from nemorl.config.experiment import Experiment
from nemorl.config.load import SUFFIXES, load_experiment
from nemorl.config.schema import names, variants
from nemorl.config.shipped import is_name
from nemorl.errors import NemorlError, UsageError
from nemorl.run.stop import run_to_end

from .terminal import (
    Commands,
    ExitCode,
    add_command,
    add_group,
    add_overrides,
    complain,
    notes,
    output,
    positive_integer,
    say,
    show_message,
    table,
)

if TYPE_CHECKING:
    from nemorl.rollout.agent_model import Agent, AgentModel, Show
    from nemorl.trajectories import (
        Conversation,
        Environment,
        EnvironmentFactory,
        Message,
        Step,
        Task,
        ToolSchemas,
        Trajectory,
    )

T = TypeVar("T")
MAX_TURNS = 100  # of an episode, or calls of the model, for environments that do not end
_SIZES = ("num_prompts_per_step", "num_generations_per_prompt")
_SAMPLED = frozenset({"completion_ids", "sampled_ids"})  # what rewards take that no text has


class EpisodeFailed(NemorlError):
    """An environment failed; the message names the call."""


def register(commands: Commands) -> None:
    group = add_group(commands, "env", "act in an environment without a model, and measure it")
    trying = add_command(group, "try", _try, "run one episode and print its transcript and rewards")
    benching = add_command(group, "bench", _bench, "run many episodes with random turns and measure them")
    for command in (trying, benching):
        _add_target(command)
    agents = ["random", "scripted", "human"]
    agent_help = "who acts: random turns, given texts (--say), or you at the terminal (default: random)"
    trying.add_argument("--agent", choices=agents, default="random", help=agent_help)
    say_help = "a turn of the scripted agent; the last one is repeated (default: the task's answer)"
    trying.add_argument("--say", action="append", default=[], metavar="TEXT", help=say_help)
    trying.add_argument("--task", type=int, default=0, metavar="N", help="index of the task (default: 0)")
    for name, default, what in (("episodes", 200, "episodes"), ("concurrency", 16, "episodes at a time")):
        help_text = f"number of {what} (default: {default})"
        benching.add_argument(
            f"--{name}", type=positive_integer, default=default, metavar="N", help=help_text
        )


def _add_target(command: ArgumentParser) -> None:
    help_text = "name of an environment, or experiment (a file or a name of `nemorl recipes list`), of which "
    help_text += "only `data` and `env` are used"
    command.add_argument("target", metavar="NAME|CONFIG", help=help_text)
    add_overrides(command)
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random turns (default: 0)")


def experiment_of(target: str, overrides: Sequence[str]) -> Experiment:
    """Of a file, or with an environment by its name and tasks that it supports. Raises ConfigError."""
    sections = (variant for variant in variants(OneEnvConfig) if issubclass(variant, EnvBase))
    known = {name: section for section in sections for name in names(section)}
    if target.endswith(SUFFIXES) or (target not in known and is_name(Path(target))):
        return load_experiment(Path(target), overrides)
    if target not in known:
        hint = suggestion(target, sorted(known))
        problem = "no environment and no shipped experiment has this name, and it is no .yaml file"
        raise UsageError(f"{target}: {problem}; {hint}")
    if target in ("custom", "openrlhf"):
        raise UsageError(f"{target}: its code is your own; name an experiment file that names it")
    datasets: dict[str, dict[str, Any]] = {
        "reasoning_gym": {"task": "chain_sum"},
        "seeds": {"size": 10_000},
        "aviary": {"dataset": "dummy", "size": 1000},
        "verifiers": {"taskset": "textarena", "options": {"game": "Wordle-v0"}, "size": 10},
    }
    dataset = known[target].dataset or "arithmetic"
    tree = {
        "run_dir": "runs/env",
        "policy": {"model_path": "models/none", "max_sequence_length": 2048, "micro_batch_tokens": 4096},
        "data": {"train": {"name": dataset, **datasets.get(dataset, {})}},
        "env": {"name": target, **known[target].example},
        "rewards": [] if target != "single_turn" else [{"function": "exact_match"}],
        "algorithm": {
            "name": "grpo",
            "num_steps": 1,
            "num_prompts_per_step": 1,
            "num_generations_per_prompt": 2,
        },
    }
    with tempfile.TemporaryDirectory(prefix="nemorl-env-") as scratch:
        file = Path(scratch) / "experiment.yaml"
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return load_experiment(file, overrides)


@dataclass
class Episode:
    """One episode, as far as it went."""

    seconds: float  # of each call at most
    show: "Show" = lambda _: None
    num_turns: int = 0
    # Of reset and of each step; of an environment that owns its loop, all outside of calls of the model.
    call_seconds: list[float] = field(default_factory=list)
    conversations: "list[Conversation]" = field(default_factory=list)  # one for each player and fork

    async def run(self, kind: "_Kind", task: "Task", agent: "Agent", number: int = 0) -> "Episode":
        """Until the environment is done, or after `MAX_TURNS`. Raises EpisodeFailed."""
        from nemorl.trajectories import created  # with numpy

        try:
            environment = created(kind.factory)
        except Exception as error:
            raise EpisodeFailed(f"create() raised {type(error).__name__}: {error}") from error
        if hasattr(environment, "step"):
            await self._take_steps(environment, task, agent)
            return self
        found = await kind.model.run(number, task, environment, agent, self.show)
        if (problem := found[0].trajectory.error) is not None:
            raise EpisodeFailed(problem)
        self.conversations = found
        self.num_turns = sum(len(one.turns) for c in found for one in (*c.earlier, c.trajectory))
        self.call_seconds.append(sum(c.trajectory.seconds_environment for c in found))
        return self

    async def _take_steps(self, environment: "Environment", task: "Task", agent: "Agent") -> None:
        import numpy as np

        from nemorl.rewards.compose import scripted
        from nemorl.trajectories import (
            Action,
            Message,
            StopReason,
            add_rewards,
            called,
            opening_problem,
            step_problem,
        )

        from .env_agents import read_turn

        opening: tuple[Message, ...] = ()
        exchange: list[Message] = []
        rewards: dict[str, float] = {}
        try:
            opening = await self._call(called(environment.reset, task, problem_of=opening_problem), "reset()")
            for message in opening:
                self.show(message)
            tools = getattr(environment, "tools", ())
            while self.num_turns < MAX_TURNS:
                text = await agent([*opening, *exchange], tools, environment)
                reply, message = read_turn(text, tools, self.num_turns)
                self.num_turns += 1
                exchange.append(message)
                self.show(Message("assistant", text))
                # A token a character, and the end token.
                action = Action(text, np.zeros(len(text) + 1, dtype=np.int32), StopReason.STOP, reply)
                answer = called(environment.step, action, problem_of=step_problem)
                step: Step = await self._call(answer, f"step({text!r})")
                add_rewards(step.rewards, rewards)
                if step.done:
                    break
                for message in step.messages:
                    self.show(message)
                exchange += step.messages
        finally:
            self.conversations = [scripted(task, opening, exchange, rewards)]
            await self._call(called(environment.close), "close()")

    async def _call(self, call: Coroutine[Any, Any, T], name: str) -> T:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.seconds):
                return await call
        except TimeoutError:
            late = f"returned nothing within {self.seconds:g} s (cluster.deadlines.environment)"
            raise EpisodeFailed(f"{name} {late}") from None
        except Exception as error:
            raise EpisodeFailed(f"{name} raised {type(error).__name__}: {error}") from error
        finally:
            self.call_seconds.append(time.perf_counter() - began)


class _Kind:
    """The environments of one section."""

    def __init__(self, experiment: Experiment, config: EnvBase) -> None:
        self._experiment, self._config, self.factory = experiment, config, factory_of(config)

    @cached_property
    def model(self) -> "AgentModel":
        """Of environments that own their loop."""
        from nemorl.generation.types import SamplingParams
        from nemorl.rollout.agent_model import AgentModel

        sampling, seconds = (
            self._experiment.generation.sampling,
            self._experiment.cluster.deadlines.environment,
        )
        params = SamplingParams(**sampling.model_dump())
        return AgentModel(self._config, self.factory.reward_weights, params, seconds, MAX_TURNS)

    async def close(self) -> None:
        if "model" in vars(self):
            await self.model.close()
        await self.factory.close()


class _Kinds:
    """The environments of an experiment: one, or several by task."""

    def __init__(self, experiment: Experiment) -> None:
        from nemorl.data.datasets import load_tasks  # with numpy

        self._env = experiment.env
        self.tasks = load_tasks(experiment.data.train, experiment.data)
        self._kinds = {name: _Kind(experiment, one) for name, one in experiment.env.environments.items()}

    def kind_for(self, task: "Task") -> _Kind:
        try:
            return self._kinds[self._env.name_for(task.columns)]
        except ValueError as error:
            raise EpisodeFailed(f"task {task.index}: {error}") from error

    async def close(self) -> None:
        for kind in self._kinds.values():
            await kind.close()


def factory_of(env: EnvBase, *, here: bool = False) -> "EnvironmentFactory":
    """Where the section places it, or `here`. Raises UsageError."""
    if isinstance(env.placement, ServerPlacement) and not here:
        from nemorl.rollout.remote_environments import factory_behind_server

        return factory_behind_server(env, env.placement)
    try:
        return env.make_factory()  # type: ignore[no-any-return]
    except NotImported as error:
        raise UsageError(f"env.factory: {error}") from error


def _try(arguments: Namespace) -> int:
    from nemorl.rollout.agent_model import scripted_agent  # with numpy

    from .env_agents import human_agent, random_agent

    experiment = experiment_of(arguments.target, arguments.overrides)
    kinds = _Kinds(experiment)
    if not 0 <= arguments.task < len(kinds.tasks):
        raise UsageError(f"--task {arguments.task}: there are {len(kinds.tasks)} tasks, numbered from 0")
    task = kinds.tasks[arguments.task]
    agent: Agent = human_agent
    if arguments.say or arguments.agent == "scripted":
        texts = arguments.say or ([] if task.answer is None else [task.answer])
        if not texts:
            raise UsageError(f"--agent scripted: task {task.index} has no answer; give turns with --say")
        agent = scripted_agent(texts)
    elif arguments.agent == "random":
        agent = random_agent(task, f"{arguments.seed} {task.index}")
    seconds = experiment.cluster.deadlines.environment
    episode = Episode(seconds, _show_message)

    async def run() -> None:
        try:
            await episode.run(kinds.kind_for(task), task, _showing_tools(agent))
        except EOFError:
            notes().print("the episode was ended", markup=False)
        finally:
            await kinds.close()

    run_to_end(run())
    return _show_rewards(experiment, task, episode)


def _show_message(message: "Message | None") -> None:
    if message is None:
        say("")
    else:
        show_message(message.role, message.content)


def _showing_tools(agent: "Agent") -> "Agent":
    """The agent, before whose first turn the tools are printed, and again when they are others."""
    shown: ToolSchemas = ()

    async def act(messages: "Sequence[Message]", tools: "ToolSchemas", environment: object) -> str:
        nonlocal shown
        if tools and list(tools) != list(shown):
            functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
            show_message("tools", "\n".join(functions))
        shown = tools
        return await agent(messages, tools, environment)

    return act


def _show_rewards(experiment: Experiment, task: "Task", episode: Episode) -> int:
    """The environment's rewards, and those of `rewards` that require neither a service nor sampled tokens."""
    if not episode.conversations:  # it was ended before it had any
        return ExitCode.WELL
    from nemorl.rewards.compose import Rewards  # with numpy
    from nemorl.rewards.find import RewardError, find_reward

    weights = dict(experiment.env.reward_weights)
    given = {name for one in episode.conversations for name in one.trajectory.rewards}
    for name in given - weights.keys():
        raise EpisodeFailed(f"the environment gave the reward `{name}`, which has no weight")
    computed: list[FunctionRewardConfig] = []
    for config in experiment.rewards:
        try:
            if isinstance(config, FunctionRewardConfig) and not find_reward(config).takes & _SAMPLED:
                computed.append(config)
        except RewardError as error:
            raise UsageError(str(error)) from error
    left_out = [config.metric for config in experiment.rewards if config not in computed]

    async def score() -> "Sequence[Trajectory]":
        seconds = experiment.cluster.deadlines.environment
        rewards = Rewards(computed, weights, experiment.data.chat, seconds)
        return (await rewards.apply(task, episode.conversations)).trajectories

    try:
        scored = asyncio.run(score())
    except RewardError as error:
        raise EpisodeFailed(str(error)) from error
    weights |= {config.metric: config.weight for config in computed}
    for one in scored:
        if one.error is not None:
            raise EpisodeFailed(one.error)
        parts = (one.player, f"fork {one.fork}" if one.fork else "")
        whose = "".join(f"{part} " for part in parts if part)
        for name, value in one.rewards.items():
            say(f"{whose}reward {name}: {value:g} (weight {weights[name]:g})")
        turns = counted(episode.num_turns, "turn")
        say(f"{whose}reward: {one.reward:g}{f' after {turns}' if len(scored) == 1 else ''}")
    if left_out:
        reason = "they require a model, a server or sampled tokens"
        notes().print(f"not computed: {', '.join(left_out)}, since {reason}", markup=False)
    return ExitCode.WELL


@dataclass(frozen=True)
class HeldResources:
    """What this process holds."""

    tasks: int  # of asyncio
    processes: int  # children, and theirs
    threads: int
    files: int  # open descriptors
    megabytes: float  # resident, of this process

    @classmethod
    def now(cls) -> "HeldResources":
        process = psutil.Process()
        return cls(
            len(asyncio.all_tasks()),
            len(_descendants()),
            threading.active_count(),
            process.num_fds(),
            process.memory_info().rss / 1e6,
        )


def _descendants() -> set[psutil.Process]:
    """Processes below this one, without the one that Python starts with the first shared object and keeps."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                found.add(process)
    return found


def _bench(arguments: Namespace) -> int:
    experiment = experiment_of(arguments.target, arguments.overrides)
    return run_to_end(_measure(experiment, arguments.episodes, arguments.concurrency, arguments.seed))


async def _measure(experiment: Experiment, count: int, concurrency: int, seed: int) -> int:
    """Run the episodes after one that is not measured, which starts what they share."""
    from .env_agents import random_agent  # with numpy

    before, others = HeldResources.now(), _descendants()
    kinds, seconds = _Kinds(experiment), experiment.cluster.deadlines.environment
    episodes: list[Episode] = []
    errors: list[str] = []
    places = asyncio.Semaphore(concurrency)

    async def run_one(number: int) -> None:
        task = kinds.tasks[number % len(kinds.tasks)]
        async with places:
            try:
                agent, episode = random_agent(task, f"{seed} {number}"), Episode(seconds)
                episodes.append(await episode.run(kinds.kind_for(task), task, agent, number))
            except EpisodeFailed as error:
                errors.append(str(error))

    try:
        await run_one(0)
        episodes.clear()
        errors.clear()  # it is the first one again
        warm, began = HeldResources.now(), time.perf_counter()
        await asyncio.gather(*map(run_one, range(count)))
        elapsed, after = time.perf_counter() - began, HeldResources.now()
    finally:
        await kinds.close()
    await asyncio.sleep(0)  # for what ends with the factory
    closed = HeldResources.now()
    _show(episodes, elapsed)
    rows = table("", ["held", "before", "first episode", "last episode", "closed"])
    for name in ("tasks", "processes", "threads", "files", "megabytes"):
        values = [getattr(at, name) for at in (before, warm, after, closed)]
        rows.add_row(name, *(f"{value:.0f}" for value in values))
    output().print(rows)
    problems = [f"{counted(len(errors), 'episode')} failed; the first: {errors[0]}"] if errors else []
    end = "left after the factory was closed; end them in `close`"
    if closed.tasks > before.tasks:
        problems.append(f"{closed.tasks - before.tasks} tasks were {end}")
    if left := [f"{process.pid} ({process.name()})" for process in _descendants() - others]:
        problems.append(f"processes {', '.join(left)} were {end}")
    if after.files - warm.files >= count:
        problems.append("each episode left an open file; close it in the environment's `close`")
    for problem in problems:
        complain(problem)
    return ExitCode.FAILED if problems else ExitCode.WELL


def _show(episodes: Sequence[Episode], elapsed: float) -> None:
    turns = sum(episode.num_turns for episode in episodes)
    calls = sorted(call for episode in episodes for call in episode.call_seconds)
    rows = table("", ["measured", "value"])
    rows.add_row("episodes", str(len(episodes)))
    rows.add_row("episodes/s", f"{len(episodes) / elapsed:.4g}")
    rows.add_row("turns/s", f"{turns / elapsed:.4g}")
    if episodes:
        rows.add_row("turns of an episode", f"{turns / len(episodes):.4g}")
        rows.add_row("milliseconds of a call, median", f"{1e3 * calls[len(calls) // 2]:.4g}")
        rows.add_row("milliseconds of the slowest call", f"{1e3 * calls[-1]:.4g}")
    given = [one.trajectory.rewards for episode in episodes for one in episode.conversations]
    for name in sorted({name for rewards in given for name in rewards}):
        values = [rewards[name] for rewards in given if name in rewards]
        rows.add_row(f"reward {name}, mean", f"{sum(values) / len(values):.4g}")
    output().print(rows)
