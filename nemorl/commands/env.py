"""`nemorl env`: act in an environment without a model, and measure it."""

import asyncio
import random
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import yaml

from nemorl.config.base import NotImported, counted, suggestion
from nemorl.config.environment import EnvBase, FunctionRewardConfig, OneEnvConfig, ServerPlacement
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.config.schema import names, variants
from nemorl.errors import NemorlError, UsageError

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
    from nemorl.trajectories import Environment, EnvironmentFactory, Message, Step, Task, Trajectory

T = TypeVar("T")
MAX_TURNS = 100  # of an episode, for environments that do not end
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
    help_text = "name of an environment, or experiment file (YAML), of which only `data` and `env` are used"
    command.add_argument("target", metavar="NAME|CONFIG", help=help_text)
    add_overrides(command)
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random turns (default: 0)")


def experiment_of(target: str, overrides: Sequence[str]) -> Experiment:
    """Of a file, or with an environment by its name and tasks that it supports. Raises ConfigError."""
    if target.endswith((".yaml", ".yml")):
        return load_experiment(Path(target), overrides)
    sections = (variant for variant in variants(OneEnvConfig) if issubclass(variant, EnvBase))
    known = {name: section for section in sections for name in names(section)}
    if target not in known:
        hint = suggestion(target, sorted(known))
        raise UsageError(f"{target}: no environment has this name, and it is no .yaml file; {hint}")
    if target == "custom":
        raise UsageError("custom: a custom environment has a factory; name an experiment file that names it")
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


# An agent makes a turn from the messages so far, and from the environment for what it accepts.
Agent = Callable[["Sequence[Message]", "Environment"], Awaitable[str]]


def random_agent(task: "Task", seed: str) -> Agent:
    """Turns that the environment offers, or words that it and the task have, and the task's answer."""
    draws = random.Random(seed)

    async def act(messages: "Sequence[Message]", environment: "Environment") -> str:
        if (example := getattr(environment, "example_turn", None)) is not None:
            return str(example(draws))
        words = " ".join(message.content for message in messages).split()
        return str(
            draws.choice(("", task.answer or "", " ".join(draws.choices(words, k=3)) if words else ""))
        )

    return act


def scripted_agent(texts: Sequence[str]) -> Agent:
    left = list(texts)

    async def act(_: "Sequence[Message]", __: "Environment") -> str:
        return left.pop(0) if len(left) > 1 else left[0]

    return act


async def human_agent(_: "Sequence[Message]", __: "Environment") -> str:
    notes().print("your turn (Ctrl-D ends the episode):", markup=False)
    line: str = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise EOFError
    return line.rstrip("\n")


@dataclass
class Episode:
    """One episode, as far as it went."""

    seconds: float  # of each call at most
    on_message: Callable[["Message"], None] = lambda message: None
    rewards: dict[str, float] = field(default_factory=dict)  # summed over turns
    opening: "tuple[Message, ...]" = ()
    exchange: "list[Message]" = field(default_factory=list)  # turns, and what was answered to them
    num_turns: int = 0
    call_seconds: list[float] = field(default_factory=list)  # of reset and of each step

    async def run(self, factory: "EnvironmentFactory", task: "Task", agent: Agent) -> "Episode":
        """Until the environment is done, or after `MAX_TURNS`. Raises EpisodeFailed."""
        import numpy as np

        from nemorl.trajectories import Action, Message, StopReason, add_rewards

        environment = factory.create()
        if not hasattr(environment, "step"):
            raise EpisodeFailed("this environment runs its episodes itself, with a model; it has no `step`")
        try:
            self.opening = await self._call(environment.reset(task), "reset()")
            for message in self.opening:
                self.on_message(message)
            while self.num_turns < MAX_TURNS:
                text = await agent([*self.opening, *self.exchange], environment)
                self.num_turns += 1
                self.exchange.append(Message("assistant", text))
                self.on_message(self.exchange[-1])
                # A token a character, and the end token.
                action = Action(text, np.zeros(len(text) + 1, dtype=np.int32), StopReason.STOP)
                step: Step = await self._call(environment.step(action), f"step({text!r})")
                add_rewards(step.rewards, self.rewards)
                if step.done:
                    break
                for message in step.messages:
                    self.on_message(message)
                self.exchange += step.messages
        finally:
            await self._call(environment.close(), "close()")
        return self

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


class _Kinds:
    """The environments of an experiment: one, or several by task."""

    def __init__(self, experiment: Experiment) -> None:
        from nemorl.data.datasets import load_tasks  # with numpy

        self._env = experiment.env
        self.tasks = load_tasks(experiment.data.train, experiment.data)
        self._factories = {name: factory_of(one) for name, one in experiment.env.environments.items()}

    def factory_for(self, task: "Task") -> "EnvironmentFactory":
        try:
            return self._factories[self._env.name_for(task.columns)]
        except ValueError as error:
            raise EpisodeFailed(f"task {task.index}: {error}") from error

    async def close(self) -> None:
        for factory in self._factories.values():
            await factory.close()


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
    episode = Episode(seconds, lambda message: show_message(message.role, message.content))

    async def run() -> None:
        try:
            await episode.run(kinds.factory_for(task), task, agent)
        except EOFError:
            notes().print("the episode was ended", markup=False)
        finally:
            await kinds.close()

    asyncio.run(run())
    return _show_rewards(experiment, task, episode)


def _show_rewards(experiment: Experiment, task: "Task", episode: Episode) -> int:
    """The environment's rewards, and those of `rewards` that require neither a service nor sampled tokens."""
    from nemorl.rewards.compose import Rewards, scripted  # with numpy
    from nemorl.rewards.find import RewardError, find_reward

    weights = dict(experiment.env.reward_weights)
    for name in episode.rewards.keys() - weights.keys():
        raise EpisodeFailed(f"the environment gave the reward `{name}`, which has no weight")
    computed: list[FunctionRewardConfig] = []
    for config in experiment.rewards:
        try:
            if isinstance(config, FunctionRewardConfig) and not find_reward(config).takes & _SAMPLED:
                computed.append(config)
        except RewardError as error:
            raise UsageError(str(error)) from error
    left_out = [config.metric for config in experiment.rewards if config not in computed]

    async def score() -> "Trajectory":
        seconds = experiment.cluster.deadlines.environment
        rewards = Rewards(computed, weights, experiment.data.chat, seconds)
        said = scripted(task, episode.opening, episode.exchange, episode.rewards)
        return (await rewards.apply(task, [said])).trajectories[0]

    try:
        scored = asyncio.run(score())
    except RewardError as error:
        raise EpisodeFailed(str(error)) from error
    if scored.error is not None:
        raise EpisodeFailed(scored.error)
    weights |= {config.metric: config.weight for config in computed}
    for name, value in scored.rewards.items():
        say(f"reward {name}: {value:g} (weight {weights[name]:g})")
    say(f"reward: {scored.reward:g} after {counted(episode.num_turns, 'turn')}")
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
    return asyncio.run(_measure(experiment, arguments.episodes, arguments.concurrency, arguments.seed))


async def _measure(experiment: Experiment, count: int, concurrency: int, seed: int) -> int:
    """Run the episodes after one that is not measured, which starts what they share."""
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
                episodes.append(await episode.run(kinds.factory_for(task), task, agent))
            except EpisodeFailed as error:
                errors.append(str(error))

    try:
        await run_one(0)
        episodes.clear()
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
    for name in sorted({name for episode in episodes for name in episode.rewards}):
        values = [episode.rewards[name] for episode in episodes if name in episode.rewards]
        rows.add_row(f"reward {name}, mean", f"{sum(values) / len(values):.4g}")
    output().print(rows)
