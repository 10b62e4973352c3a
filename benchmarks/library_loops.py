"""What `benchmarks/libraries.py` runs of each library, and the loop of the library's documentation."""

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp

from nemorl.trajectories import Task

SERVERS = Path(__file__).parents[1] / "tests" / "environments"
START_SECONDS = 120.0  # of a server


class Addresses(NamedTuple):
    endpoint: str  # that answers calls of a model at once, with /v1
    server: str  # of the library's environment; empty if it has none


@dataclass(frozen=True)
class Library:
    package: str  # as it is installed
    module: str
    ran: str  # what was run, for the table
    env: dict[str, Any]
    data: dict[str, Any]
    own: Callable[[Sequence[Task], Addresses], Awaitable[None]]  # episodes of these tasks
    says: Callable[[Task, int, Callable[[], str]], str]  # a turn of the policy: its number, what it reads
    server: tuple[str, ...] = ()  # a program of tests/environments, and its arguments after the port
    scheme: Literal["http", "tcp"] = "http"  # of the server's address
    imported: bool = True  # by its own loop, so that this interpreter must have it

    @property
    def python(self) -> str | None:
        """The interpreter that has the package: that of the variable, or this one; None if there is none."""
        named = os.environ.get(f"NEMORL_{self.module.upper()}_PYTHON")
        here = find_spec(self.module) is not None
        if named and (here or not self.imported):
            return named
        return sys.executable if here else None

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its server while it runs: the address; empty if it has none. Raises RuntimeError."""
        if not self.server:
            yield ""
            return
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        url, (program, *arguments) = f"{self.scheme}://127.0.0.1:{port}", self.server
        command = [self.python or sys.executable, str(SERVERS / program), str(port), *arguments]
        process = subprocess.Popen(command, start_new_session=True, stdout=sys.stderr)
        try:
            end = time.monotonic() + START_SECONDS
            while not answers(url, port):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server did not start: {shlex.join(command)}")
                time.sleep(0.2)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def version(self) -> str:
        program = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
        command = [self.python or sys.executable, "-c", program, self.package]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def answers(url: str, port: int) -> bool:
    try:
        if not url.startswith("http"):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return True
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


async def reasoning_gym_own(tasks: Sequence[Task], _: Addresses) -> None:
    from reasoning_gym import create_dataset

    data = create_dataset("chain_sum", size=len(tasks), seed=0)
    for task in tasks:
        data.score_answer(str(task.answer), data[task.index])


async def gymnasium_own(tasks: Sequence[Task], _: Addresses) -> None:
    import gymnasium

    for task in tasks:
        env = gymnasium.make("CartPole-v1")
        env.reset(seed=task.columns["seed"])
        turn, over = 0, False
        while not over:
            _, _, terminated, truncated, _ = env.step(turn % 2)
            turn, over = turn + 1, terminated or truncated
        env.close()


async def skyrl_gym_own(tasks: Sequence[Task], _: Addresses) -> None:
    import skyrl_gym

    for task in tasks:
        extras = {"max_turns": 5, "reward_spec": {"method": "rule", "ground_truth": task.answer}}
        env = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)
        env.init([message.as_dict() for message in task.messages])
        while not env.step("#### none")["done"]:
            pass
        env.close()


async def aviary_own(tasks: Sequence[Task], _: Addresses) -> None:
    from aviary.core import TaskDataset, ToolCall, ToolCallFunction, ToolRequestMessage

    dataset = TaskDataset.from_name("dummy")
    for _task in tasks:
        env, turn, over = dataset.get_new_env(), 0, False
        await env.reset()
        while not over:
            name, arguments = aviary_call(turn)
            call = ToolCall(id="0", function=ToolCallFunction(name=name, arguments=arguments))
            _, _, over, _ = await env.step(ToolRequestMessage(content="", tool_calls=[call]))
            turn += 1
        await env.close()


def aviary_call(turn: int) -> tuple[str, dict[str, str]]:
    return ("get_random_int", {}) if turn < 3 else ("print_story", {"story": "x"})


def written(name: str, arguments: Mapping[str, str]) -> str:
    """A call of a tool as the model of the benchmark writes it."""
    given = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({given})]<|tool_call_end|>"


async def verifiers_own(tasks: Sequence[Task], at: Addresses) -> None:
    from verifiers import v1 as vf

    section = {"taskset": {"id": "verifiers-sums", "number": 1000}, **VERIFIERS}
    env = vf.load_environment(vf.resolve_env_config(section))
    context = vf.ModelContext(
        model="policy", client=vf.EvalClientConfig(base_url=at.endpoint, api_key_var="NO_KEY")
    )
    async with env.serving():
        for task in env.taskset.take(len(tasks)):
            assert (await env.run_episode(task, context)).ok


async def verifiers_server_own(tasks: Sequence[Task], at: Addresses) -> None:
    from verifiers import v1 as vf
    from verifiers.v1.serve import EnvClient

    endpoint = vf.EvalClientConfig(base_url=at.endpoint, api_key_var="NO_KEY")
    client = EnvClient(at.server)
    try:
        for task in tasks:
            data = task.columns["verifiers_data"]
            assert (await client.run(endpoint, "policy", vf.SamplingConfig(), data)).ok
    finally:
        await client.close()


async def textarena_own(tasks: Sequence[Task], _: Addresses) -> None:
    import textarena

    for task in tasks:
        seed = task.columns["seed"]
        draws, env, over = random.Random(f"{seed} {1 - seed % 2}"), textarena.make("TicTacToe-v0"), False
        env.reset(num_players=2, seed=seed)
        while not over:
            seat, seen = env.get_observation()
            over, _ = env.step(first_move(seen) if seat == seed % 2 else draws.choice(moves_in(seen)))
        env.close()


def moves_in(seen: str) -> list[str]:
    return re.findall(r"\[\d\]", seen.rpartition("Available Moves")[2])


def first_move(seen: str) -> str:
    return moves_in(seen)[0]


async def openenv_own(tasks: Sequence[Task], at: Addresses) -> None:
    from openenv.core import GenericEnvClient

    for task in tasks:
        async with GenericEnvClient(at.server) as env:
            await env.reset(seed=task.columns["seed"])
            while not (await env.step({"count": 3})).done:
                pass


WEATHER: dict[str, Any] = {
    "type": "function", "name": "get_weather", "description": "", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip


def weather_rows() -> Iterator[dict[str, Any]]:
    """Tasks of the example of NeMo-Gym that its servers here run."""
    while True:
        parameters = {"input": [{"role": "user", "content": "How is it?"}], "tools": [WEATHER]}
        yield {"prompt": "How is it?", "nemo_gym_row": {"responses_create_params": parameters}}


async def nemo_gym_own(tasks: Sequence[Task], at: Addresses) -> None:
    """As `ng_collect_rollouts` with one row at a time."""
    address = {"nemorl_base_url": at.endpoint, "nemorl_api_key": "none"}
    async with aiohttp.ClientSession() as client:
        for task in tasks:
            row: Mapping[str, Any] = task.columns["nemo_gym_row"]
            parameters = row["responses_create_params"] | {"metadata": address}
            async with client.post(f"{at.server}/run", json={"responses_create_params": parameters}) as got:
                assert "reward" in await got.json()


VERIFIERS = {"agent": {"runtime": {"type": "subprocess"}}}
VERIFIERS_TASKS = {"name": "verifiers", "taskset": "verifiers-sums", "options": {"number": 1000}}
LIBRARIES = (
    Library(
        "reasoning-gym", "reasoning_gym", "chain_sum, one turn",
        env={"name": "reasoning_gym", "answer_tag": None},
        data={"name": "reasoning_gym", "task": "chain_sum"},
        own=reasoning_gym_own,
        says=lambda task, turn, seen: str(task.answer),
    ),
    Library(
        "gymnasium", "gymnasium", "CartPole-v1, actions 0 and 1 in turn",
        env={"name": "gymnasium", "id": "CartPole-v1", "action_tag": None, "max_turns": 500},
        data={"name": "seeds"},
        own=gymnasium_own,
        says=lambda task, turn, seen: str(turn % 2),
    ),
    Library(
        "skyrl-gym", "skyrl_gym", "gsm8k_multi_turn, five turns",
        env={"name": "skyrl_gym", "env": "gsm8k_multi_turn"},
        data={"name": "arithmetic"},
        own=skyrl_gym_own,
        says=lambda task, turn, seen: "#### none",
    ),
    Library(
        "fhaviary", "aviary", "dummy, four turns with a call each",
        env={"name": "aviary"},
        data={"name": "aviary", "dataset": "dummy"},
        own=aviary_own,
        says=lambda task, turn, seen: written(*aviary_call(turn)),
    ),
    Library(
        "verifiers", "verifiers", "an agent in the process, two calls of the endpoint",
        env={"name": "verifiers", "environment": VERIFIERS},
        data=VERIFIERS_TASKS,
        own=verifiers_own,
        says=lambda task, turn, seen: "1",
    ),
    Library(
        "verifiers", "verifiers", "the same agent in the library's environment server",
        env={"name": "verifiers"},
        data=VERIFIERS_TASKS,
        own=verifiers_server_own,
        says=lambda task, turn, seen: "1",
        server=("verifiers_server.py",),
        scheme="tcp",
    ),
    Library(
        "textarena", "textarena", "TicTacToe-v0, the first legal move against random ones",
        env={"name": "textarena", "game": "TicTacToe-v0", "opponent": {"name": "random"}},
        data={"name": "seeds"},
        own=textarena_own,
        says=lambda task, turn, seen: first_move(seen()),
    ),
    Library(
        "openenv", "openenv", "a server with typed actions over WebSocket, an action for three coins",
        env={"name": "openenv", "action_field": "count", "observation_field": "left"},
        data={"name": "seeds"},
        own=openenv_own,
        says=lambda task, turn, seen: "3",
        server=("openenv_server.py", "16"),
    ),
    Library(
        "nemo-gym", "nemo_gym", "simple_agent with its servers, one call of the endpoint",
        env={"name": "nemo_gym"},
        data={"name": "generator", "function": "library_loops:weather_rows", "answer_key": None},
        own=nemo_gym_own,
        says=lambda task, turn, seen: "1",
        server=("nemo_gym_servers.py",),
        imported=False,
    ),
)  # fmt: skip
