"""How many episodes per second do environments of other libraries give through nemorl, and on their own?

    python benchmarks/libraries.py [--episodes 100] [--rounds 5] [--only gymnasium aviary]

For each installed library, with the same scripted actions and no model:

- own: the loop that the library's documentation shows, an episode after another
- nemorl: `create`, `reset`, `step` and `close` of its adapter, an episode after another
- nemorl, 16 at a time: the same with 16 episodes at a time in one event loop

The agents of verifiers call an endpoint that answers at once, on both sides. A row more is a `Library` more.
"""

import argparse
import asyncio
import importlib.metadata
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from common import Timing, publish, table_of
from pydantic import TypeAdapter

from nemorl.config.data import DataConfig
from nemorl.config.environment import EnvBase, OneEnvConfig
from nemorl.data.datasets import load_tasks
from nemorl.trajectories import Action, EnvironmentFactory, Reply, StopReason, Task, ToolCall

TASKSETS = Path(__file__).parents[1] / "tests" / "environments"  # with `verifiers_sums`
AT_A_TIME = 16


def says(text: str, *calls: str, **arguments: Any) -> Action:
    """A turn with calls of these tools."""
    made = tuple(ToolCall(f"call-{at}", name, arguments) for at, name in enumerate(calls))
    return Action(text, np.zeros(1, np.int32), StopReason.STOP, Reply(text, tool_calls=made))


@dataclass(frozen=True)
class Library:
    package: str  # as it is installed
    module: str
    ran: str  # what was run, for the table
    env: dict[str, Any]
    data: dict[str, Any]
    own: Callable[[Sequence[Task], str], Awaitable[None]]  # episodes of these tasks; the url of an endpoint
    act: Callable[[int, Task], Action] = field(default=lambda turn, task: says(""))  # turn by turn


@dataclass(frozen=True)
class Endpoint:
    """A `Model` without calls of its own."""

    base_url: str
    name: str = "policy"
    api_key: str = "none"


async def reasoning_gym_own(tasks: Sequence[Task], _: str) -> None:
    from reasoning_gym import create_dataset

    data = create_dataset("chain_sum", size=len(tasks), seed=0)
    for task in tasks:
        data.score_answer(str(task.answer), data[task.index])


async def gymnasium_own(tasks: Sequence[Task], _: str) -> None:
    import gymnasium

    for task in tasks:
        env = gymnasium.make("CartPole-v1")
        env.reset(seed=task.columns["seed"])
        turn, over = 0, False
        while not over:
            _, _, terminated, truncated, _ = env.step(turn % 2)
            turn, over = turn + 1, terminated or truncated
        env.close()


async def skyrl_gym_own(tasks: Sequence[Task], _: str) -> None:
    import skyrl_gym

    for task in tasks:
        extras = {"max_turns": 5, "reward_spec": {"method": "rule", "ground_truth": task.answer}}
        env = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)
        env.init([message.as_dict() for message in task.messages])
        while not env.step("#### none")["done"]:
            pass
        env.close()


async def aviary_own(tasks: Sequence[Task], _: str) -> None:
    from aviary.core import TaskDataset, ToolCall, ToolCallFunction, ToolRequestMessage

    dataset = TaskDataset.from_name("dummy")
    for task in tasks:
        env, turn, over = dataset.get_new_env(), 0, False
        await env.reset()
        while not over:
            calls = [
                ToolCall(id=call.id, function=ToolCallFunction(name=call.name, arguments=call.arguments))
                for call in aviary_turn(turn, task).tool_calls
            ]
            _, _, over, _ = await env.step(ToolRequestMessage(content="", tool_calls=calls))
            turn += 1
        await env.close()


def aviary_turn(turn: int, _: Task) -> Action:
    return says("", "get_random_int") if turn < 3 else says("", "print_story", story="x")


async def verifiers_own(tasks: Sequence[Task], url: str) -> None:
    from verifiers import v1 as vf

    section = {"taskset": {"id": "verifiers-sums", "number": 1000}, **VERIFIERS}
    env = vf.load_environment(vf.resolve_env_config(section))
    context = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
    async with env.serving():
        for task in env.taskset.take(len(tasks)):
            assert (await env.run_episode(task, context)).ok


VERIFIERS = {"agent": {"runtime": {"type": "subprocess"}}}
LIBRARIES = (
    Library(
        "reasoning-gym", "reasoning_gym", "chain_sum, one turn",
        env={"name": "reasoning_gym", "answer_tag": None},
        data={"name": "reasoning_gym", "task": "chain_sum"},
        own=reasoning_gym_own,
        act=lambda turn, task: says(str(task.answer)),
    ),
    Library(
        "gymnasium", "gymnasium", "CartPole-v1, actions 0 and 1 in turn",
        env={"name": "gymnasium", "id": "CartPole-v1", "action_tag": None, "max_turns": 500},
        data={"name": "seeds"},
        own=gymnasium_own,
        act=lambda turn, task: says(str(turn % 2)),
    ),
    Library(
        "skyrl-gym", "skyrl_gym", "gsm8k_multi_turn, five turns",
        env={"name": "skyrl_gym", "env": "gsm8k_multi_turn"},
        data={"name": "arithmetic"},
        own=skyrl_gym_own,
        act=lambda turn, task: says("#### none"),
    ),
    Library(
        "fhaviary", "aviary", "dummy, four turns with a call each",
        env={"name": "aviary"},
        data={"name": "aviary", "dataset": "dummy"},
        own=aviary_own,
        act=aviary_turn,
    ),
    Library(
        "verifiers", "verifiers", "an agent in the process, two calls of the endpoint",
        env={"name": "verifiers", "environment": VERIFIERS},
        data={"name": "verifiers", "taskset": "verifiers-sums", "options": {"number": 1000}},
        own=verifiers_own,
    ),
)  # fmt: skip


async def answer(_: web.Request) -> web.Response:
    """What an endpoint says to each request."""
    message = {"role": "assistant", "content": "1"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    whole = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "policy"}
    return web.json_response({**whole, "choices": [choice], "usage": usage})


@asynccontextmanager
async def endpoint() -> AsyncIterator[str]:
    """Its address."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def episode(factory: EnvironmentFactory, library: Library, task: Task, url: str) -> int:
    """Its number of turns; 0 if the environment owns its loop."""
    environment, turn, done = factory.create(), 0, False
    try:
        if hasattr(environment, "run"):
            await environment.run(task, Endpoint(url))
            return 0
        await environment.reset(task)
        while not done:
            done = (await environment.step(library.act(turn, task))).done
            turn += 1
    finally:
        await environment.close()
    return turn


async def measure(library: Library, count: int, rounds: int) -> dict[str, Any]:
    """A row of the table, with the seconds of each round. What episodes share has started before them."""
    section: EnvBase = TypeAdapter(OneEnvConfig).validate_python(library.env)
    data = DataConfig.model_validate({"train": {**library.data, "size": count}})
    tasks = list(load_tasks(data.train, data))
    factory = section.make_factory()

    async def through(at_a_time: int, url: str) -> None:
        places = asyncio.Semaphore(at_a_time)

        async def one(task: Task) -> None:
            async with places:
                await episode(factory, library, task, url)

        await asyncio.gather(*map(one, tasks))

    seconds: dict[str, list[float]] = {"own": [], "nemorl": [], "nemorl_concurrent": []}
    async with endpoint() as url:
        ways = {
            "own": lambda: library.own(tasks, url),
            "nemorl": lambda: through(1, url),
            "nemorl_concurrent": lambda: through(AT_A_TIME, url),
        }
        try:
            for number in range(rounds + 1):  # the first one warms up
                for name, way in ways.items():
                    start = time.perf_counter()
                    await way()
                    if number:
                        seconds[name].append(time.perf_counter() - start)
        finally:
            await factory.close()
    timings = {name: Timing(name, tuple(values)) for name, values in seconds.items()}
    more = statistics.median(b - a for a, b in zip(seconds["own"], seconds["nemorl"], strict=True))
    return {
        "library": library.package,
        "version": importlib.metadata.version(library.package),
        "ran": library.ran,
        "episodes": count,
        **{f"{name}_episodes_per_second": count / timing.median for name, timing in timings.items()},
        "nemorl_milliseconds_more_per_episode": 1e3 * more / count,
        "seconds": seconds,
    }


@contextmanager
def task_sets() -> Iterator[None]:
    """With the task set of verifiers as a module."""
    sys.path.insert(0, str(TASKSETS))
    try:
        yield
    finally:
        sys.path.remove(str(TASKSETS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="MODULE", help="modules of libraries (default: all)")
    arguments = parser.parse_args()
    chosen = [one for one in LIBRARIES if not arguments.only or one.module in arguments.only]
    missing = [one.package for one in chosen if find_spec(one.module) is None]
    with task_sets():
        rows = [
            asyncio.run(measure(one, arguments.episodes, arguments.rounds))
            for one in chosen
            if one.package not in missing
        ]
    if not rows:
        parser.error(f"none of these libraries is installed: {', '.join(missing)}")
    shown = [
        {
            "library": f"{row['library']} {row['version']}",
            "what was run": row["ran"],
            "own, episodes/s": row["own_episodes_per_second"],
            "nemorl": row["nemorl_episodes_per_second"],
            f"nemorl, {AT_A_TIME} at a time": row["nemorl_concurrent_episodes_per_second"],
            "ms more per episode": row["nemorl_milliseconds_more_per_episode"],
        }
        for row in rows
    ]
    publish(
        "libraries", {"not_installed": missing, "rows": rows}, table_of("Environments of libraries", shown)
    )


if __name__ == "__main__":
    main()
