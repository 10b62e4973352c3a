"""How many episodes per second do environments of other libraries give through nemorl, and on their own?

    python benchmarks/libraries.py [--episodes 100] [--rounds 5] [--only gymnasium aviary]

For each installed library, with the same scripted actions and no model:

- own: the loop that the library's documentation shows, an episode after another
- nemorl: `create`, `reset`, `step` and `close` of its adapter, an episode after another
- nemorl, 16 at a time: the same with 16 episodes at a time in one event loop

Agents of verifiers and NeMo-Gym call an endpoint that answers at once, on both sides. A library that is a
server is run by the interpreter that `NEMORL_<MODULE>_PYTHON` names, if this one does not have it. With
`--only`, rows of other libraries are those of the call before, since some libraries cannot be installed
together. A row more is a `Library` more in `library_loops.py`.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from common import OUT, Timing, publish, table_of
from library_loops import LIBRARIES, SERVERS, Addresses, Library, says
from pydantic import TypeAdapter

from nemorl.config.data import DataConfig
from nemorl.config.environment import EnvBase, OneEnvConfig
from nemorl.data.datasets import load_tasks
from nemorl.trajectories import Answer, EnvironmentFactory, Message, Task, ToolSchemas

AT_A_TIME = 16


@dataclass(frozen=True)
class ScriptedModel:
    """A `Model` whose own calls are answered by the library's script."""

    base_url: str
    reply: Callable[[str], str]
    name: str = "policy"
    api_key: str = "none"

    def player(self, name: str) -> "ScriptedModel":
        return self

    async def chat(self, messages: Sequence[Message], tools: ToolSchemas = (), **_: object) -> Answer:
        action = says(self.reply(messages[-1].content))
        return Answer(**vars(action), id="0", message=Message("assistant", action.text))


async def answer(_: web.Request) -> web.Response:
    """What an endpoint says to each request."""
    message = {"role": "assistant", "content": "1"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    whole = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "policy"}
    return web.json_response({**whole, "choices": [choice], "usage": usage})


@asynccontextmanager
async def model_endpoint() -> AsyncIterator[str]:
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


async def episode(factory: EnvironmentFactory, library: Library, task: Task, endpoint: str) -> int:
    """Its number of turns; 0 if the environment owns its loop."""
    environment, turn, done = factory.create(), 0, False
    try:
        if hasattr(environment, "run"):
            await environment.run(task, ScriptedModel(endpoint, library.reply))
            return 0
        await environment.reset(task)
        while not done:
            done = (await environment.step(library.act(turn, task))).done
            turn += 1
    finally:
        await environment.close()
    return turn


async def measure(library: Library, count: int, rounds: int, server: str) -> dict[str, Any]:
    """A row of the table, with the seconds of each round. What episodes share has started before them."""
    address = {"url": server} if server else {}
    section: EnvBase = TypeAdapter(OneEnvConfig).validate_python(library.env | address)
    data = DataConfig.model_validate({"train": {**library.data, "size": count}})
    tasks = list(load_tasks(data.train, data))
    factory = section.make_factory()

    async def through(at_a_time: int, endpoint: str) -> None:
        places = asyncio.Semaphore(at_a_time)

        async def one(task: Task) -> None:
            async with places:
                await episode(factory, library, task, endpoint)

        await asyncio.gather(*map(one, tasks))

    seconds: dict[str, list[float]] = {"own": [], "nemorl": [], "nemorl_concurrent": []}
    async with model_endpoint() as endpoint:
        ways = {
            "own": lambda: library.own(tasks, Addresses(endpoint, server)),
            "nemorl": lambda: through(1, endpoint),
            "nemorl_concurrent": lambda: through(AT_A_TIME, endpoint),
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
        "version": library.version(),
        "ran": library.ran,
        "episodes": count,
        **{f"{name}_episodes_per_second": count / timing.median for name, timing in timings.items()},
        "nemorl_milliseconds_more_per_episode": 1e3 * more / count,
        "seconds": seconds,
    }


@contextmanager
def task_sets() -> Iterator[None]:
    """With the task set of verifiers as a module."""
    sys.path.insert(0, str(SERVERS))
    try:
        yield
    finally:
        sys.path.remove(str(SERVERS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="MODULE", help="modules of libraries (default: all)")
    arguments = parser.parse_args()
    chosen = [one for one in LIBRARIES if not arguments.only or one.module in arguments.only]
    missing = [one.package for one in chosen if one.python is None]
    rows = []
    with task_sets():
        for one in (one for one in chosen if one.python is not None):
            with one.serving() as server:
                rows.append(asyncio.run(measure(one, arguments.episodes, arguments.rounds, server)))
    if not rows:
        parser.error(f"none of these libraries is installed: {', '.join(missing)}")
    if arguments.only and (before := OUT / "libraries.json").exists():
        measured = {row["library"] for row in rows}
        rows += [row for row in json.loads(before.read_text())["rows"] if row["library"] not in measured]
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
