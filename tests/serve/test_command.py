"""`nemorl serve` as people use it: a process of its own, and OpenAI's client."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest


@dataclass
class Server:
    """A running `nemorl serve`."""

    process: "subprocess.Popen[str]"
    logs: Path
    client: openai.OpenAI
    model: str

    def engine(self, rank: int) -> int:
        """The process of an engine, as its log names it."""
        return int((self.logs / f"generation-{rank}.log").read_text().rpartition("process ")[2].split()[0])


@pytest.fixture(scope="module")
def server(served_model, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "nemorl.cli", "serve", str(served_model), "generation.replicas=2",
            "generation.endpoint={port: 0}", "generation.threads=1", "cluster.deadlines.health=2",
        ],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    told: dict[str, str] = {}
    assert process.stdout is not None
    said = []
    while "key" not in told:
        line = process.stdout.readline()
        assert line, "".join(said)
        said.append(line)
        name, _, value = line.strip().partition(": ")
        told[name] = value
    client = openai.OpenAI(base_url=told["endpoint"], api_key=told["key"], max_retries=0, timeout=60)
    try:
        yield Server(process, folder / "runs/serve/serve/logs", client, served_model.name)
    finally:
        client.close()
        process.kill()
        process.wait()


def test_openais_client_is_at_home(server):
    client, model = server.client, server.model
    assert [m.id for m in client.models.list()] == [model]
    asked = {"model": model, "prompt": [70, 71, 72], "max_tokens": 20, "seed": 5, "n": 2, "logprobs": 1}
    whole = client.completions.create(**asked, extra_body={"return_token_ids": True})
    assert [len(c.token_ids) for c in whole.choices] == [len(c.logprobs.tokens) for c in whole.choices]
    parts = list(client.completions.create(**asked, stream=True))
    for choice in whole.choices:
        text = "".join(c.text for part in parts for c in part.choices if c.index == choice.index)
        assert text == choice.text
    assert whole.usage.completion_tokens == sum(len(c.token_ids) for c in whole.choices)


def test_a_chat_with_tools_by_openais_client(server):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    asked = {
        "model": server.model, "messages": [{"role": "user", "content": "ab?"}], "tools": [tool],
        "max_completion_tokens": 8, "seed": 1, "logprobs": True,
    }  # fmt: skip
    answer = server.client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason in ("stop", "length")
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = server.client.chat.completions.create(**asked, **options)
    assert "".join(p.choices[0].delta.content for p in parts) == choice.message.content
    assert last.usage == answer.usage


def test_refusals_are_the_clients_own_exceptions(server):
    with pytest.raises(openai.NotFoundError, match="is not served"):
        server.client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="best_of is not served here"):
        server.client.completions.create(model=server.model, prompt="ab", best_of=3)
    stranger = server.client.with_options(api_key="guess")
    with pytest.raises(openai.AuthenticationError, match="The key is not valid here"):
        stranger.models.list()


def test_who_asks_does_not_notice_that_an_engine_dies(server):
    asked = {
        "model": server.model,
        "prompt": [70, 71, 72],
        "max_tokens": 120,
        "seed": 7,
        "n": 32,
    }
    asked["extra_body"] = {"return_token_ids": True}
    whole = server.client.completions.create(**asked)
    stream = server.client.completions.create(**asked, stream=True)
    streamed: dict[int, list[int]] = {}
    for number, part in enumerate(stream):
        if number == 40:
            os.kill(server.engine(0), signal.SIGKILL)
        for choice in part.choices:
            streamed.setdefault(choice.index, []).extend(choice.token_ids)
    expected = {c.index: c.token_ids for c in whole.choices}
    assert streamed.keys() == expected.keys()
    # A prompt that is read again rounds differently, so here and there a draw falls on the other side.
    assert sum(streamed[i] != expected[i] for i in range(32)) <= 4


def test_it_ends_in_order_when_it_is_asked_to(server):
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.append(server.process.communicate()[0]))
    server.process.terminate()
    reader.start()
    reader.join(60)
    assert server.process.returncode == 0, said
    assert "generation replica 0 is lost: " in said[0]
    assert "Traceback" not in said[0]
