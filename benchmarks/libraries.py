"""How many episodes per second do environments of other libraries give through nemorl, and on their own?

    python benchmarks/libraries.py [--episodes 100] [--rounds 5] [--only gymnasium aviary]

For each installed library, with the same scripted turns and no model:

- own: the loop that the library's documentation shows, an episode after another
- nemorl: a rollout worker whose engine answers at once, an episode after another: chat template, tokens, turn
  loop, adapter, rewards and summaries
- nemorl, 16 at a time: the same with 16 episodes in flight

Agents of verifiers and NeMo-Gym call an endpoint: in their own loop one that answers at once, in a rollout
worker the one that records their tokens. A library that is a server is run by the interpreter that
`NEMORL_<MODULE>_PYTHON` names, if this one does not have it. With `--only`, rows of other libraries are those
of the call before, since some libraries cannot be installed together; after `make libraries`:

    PYTHONPATH=.venv-openenv/lib/python3.11/site-packages python benchmarks/libraries.py --only openenv
    NEMORL_NEMO_GYM_PYTHON=.venv-nemo-gym/bin/python python benchmarks/libraries.py --only nemo_gym

A row more is a `Library` more in `library_loops.py`.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from common import OUT, Timing, publish, table_of
from library_loops import LIBRARIES, SERVERS, Addresses, Library

from nemorl.config.experiment import Experiment
from nemorl.data.datasets import load_tasks
from nemorl.data.tokenizer import Tokenizer, load_tokenizer
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import Completion, GenerationRequest
from nemorl.models.create import CHAT, EOS, create_tiny_model
from nemorl.rollout.groups import GroupAssignment, GroupSummary
from nemorl.rollout.worker import RolloutWorker
from nemorl.trajectories import StopReason, Task

AT_A_TIME = 16
IN_FLIGHT = {"nemorl": 1, "nemorl_concurrent": AT_A_TIME}
# Of what environments write: a token for each character.
VOCABULARY = replace(CHAT, characters="\n\t" + "".join(map(chr, range(0x20, 0x3000))))


@dataclass(frozen=True)
class ScriptedEngine:
    """An engine replica that answers each request at once with the library's script."""

    library: Library
    tokenizer: Tokenizer
    tasks: Sequence[Task]

    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[list[Completion], None]:
        yield [self.answer(request) for request in requests]

    def answer(self, request: GenerationRequest) -> Completion:
        conversation, _, turn = request.id.rpartition("/")
        task = self.tasks[int(conversation.partition("/")[0].partition(".")[0]) % len(self.tasks)]
        text = self.library.says(task, int(turn), lambda: self.tokenizer.decode(request.prompt.tolist()))
        tokens = np.array(self.tokenizer.encode(text + EOS), dtype=np.int32)
        logprobs, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
        return Completion(request.id, tokens, logprobs, versions, StopReason.STOP)


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


def experiment(model: Path, library: Library, count: int, in_flight: int, server: str) -> Experiment:
    return Experiment.model_validate(
        {
            "run_dir": "runs/bench/libraries",
            "policy": {"model_path": str(model), "max_sequence_length": 16_384, "micro_batch_tokens": 16_384},
            "generation": {"max_new_tokens": 256, "concurrency": in_flight},
            "data": {"chat": True, "train": {**library.data, "size": count}},
            "env": library.env | ({"url": server} if server else {}),
            "algorithm": {
                "name": "grpo",
                "num_steps": 1,
                "num_prompts_per_step": 2,
                "num_generations_per_prompt": 2,
            },
        }
    )


async def run_episodes(worker: RolloutWorker, count: int, number: int) -> None:
    """An episode of each task, in groups that no round before had. Raises RuntimeError for one that fails."""
    groups = [GroupAssignment(number * count + task, task, num_samples=1) for task in range(count)]
    async for group in worker.run_groups(groups):
        errors = [one.error for one in group.trajectories] if isinstance(group, GroupSummary) else [group]
        if any(errors):
            raise RuntimeError(f"an episode failed: {errors}")


async def measure(library: Library, model: Path, count: int, rounds: int, server: str) -> dict[str, Any]:
    """A row of the table, with the seconds of each round. What episodes share has started before them."""
    configs = {name: experiment(model, library, count, n, server) for name, n in IN_FLIGHT.items()}
    config = configs["nemorl"]
    tasks = list(load_tasks(config.data.train, config.data))
    engine = ScriptedEngine(library, load_tokenizer(config.policy), tasks)
    workers = {
        name: RolloutWorker(config, Router([Replica("scripted", engine.generate)]), store=len)
        for name, config in configs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("own", *workers)}

    async def episodes(name: str, number: int, endpoint: str) -> None:
        if name == "own":
            await library.own(tasks, Addresses(endpoint, server))
        else:
            await run_episodes(workers[name], count, number)

    async with model_endpoint() as endpoint:
        try:
            for number in range(rounds + 1):  # the first one warms up
                for name, measured in seconds.items():
                    start = time.perf_counter()
                    await episodes(name, number, endpoint)
                    if number:
                        measured.append(time.perf_counter() - start)
        finally:
            for worker in workers.values():
                await worker.close()
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
    with task_sets(), tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        create_tiny_model(model, VOCABULARY, hidden=8, ffn=8, layers=1, heads=1, kv_heads=1)
        for one in (one for one in chosen if one.python is not None):
            with one.serving() as server:
                rows.append(asyncio.run(measure(one, model, arguments.episodes, arguments.rounds, server)))
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
