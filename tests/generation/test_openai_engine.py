"""The `openai` back end against our own endpoint, and servers that fail, refuse and return too little."""

# ruff: noqa: F811 (fixtures of another package are imported by their names)

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from aiohttp import web

from nemorl.config.generation import OpenAIGenerationConfig
from nemorl.generation.openai_client import MissingKey, OpenAIClient
from nemorl.generation.openai_engine import OpenAIBackend
from nemorl.generation.request_driver import RequestDriver
from nemorl.generation.types import EngineFailed, RequestRefused, SamplingParams
from nemorl.trajectories import StopReason
from tests.generation.examples import completions, request
from tests.serve.conftest import LENGTH, endpoint, engine, served_model, served_tokenizer  # noqa: F401

PROMPT = np.array([70, 71, 72], np.int32)


def worker_of(url: str, tokenizer, *, key_env: str | None = None, retries: int = 2, **config):
    client = OpenAIClient(url, api_key_env=key_env, max_retries=retries, first_wait_seconds=0.01)
    settings = OpenAIGenerationConfig(backend="openai", base_url=url, model="tiny", **config)
    backend = OpenAIBackend(settings, client, tokenizer.encode, tokenizer.decode, LENGTH)
    return RequestDriver(backend, "client"), client


async def collect(worker, requests):
    return {c.id: c async for c in completions(worker, requests)}


def test_our_own_endpoint_gives_what_its_engine_samples(
    endpoint,
    served_model,
    served_tokenizer,
    monkeypatch,
):
    sampling = SamplingParams(0.8, top_k=50, top_p=0.9, min_p=0.01)
    asked = [
        request(PROMPT + i, f"r{i}", sampling, 30, seed=i, stop_token_ids=frozenset({0, 2})) for i in range(5)
    ]
    asked.append(replace(asked[0], id="text", stop_strings=("a", "e", "o")))

    async def main():
        direct = engine(served_model)
        async with endpoint() as e:
            monkeypatch.setenv("TEST_KEY", e.at.api_key)
            worker, client = worker_of(e.at.url, served_tokenizer, key_env="TEST_KEY")
            try:
                served, expected = await collect(worker, asked), await collect(direct, asked)
            finally:
                await client.close()
                direct.close()
        assert worker.health().running == 0
        assert (await worker.stats()).tokens_generated == sum(len(c.tokens) for c in served.values())
        return served, expected

    served, expected = asyncio.run(main())
    assert served.keys() == expected.keys()
    for name, completion in served.items():
        assert completion.tokens.tolist() == expected[name].tokens.tolist()
        assert completion.logprobs.tolist() == expected[name].logprobs.tolist()
        assert completion.stop is expected[name].stop
        assert completion.versions.tolist() == [0] * len(completion.tokens)


@dataclass
class Server:
    """Answers /v1/completions as it is set: statuses in turn, then `answer`."""

    statuses: list[int] = field(default_factory=list)
    answer: dict = field(default_factory=dict)
    headers: dict = field(default_factory=dict)
    hangs: bool = False
    bodies: list[dict] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    async def completions(self, asked: web.Request) -> web.Response:
        self.bodies.append(await asked.json())
        self.keys.append(asked.headers.get("Authorization", ""))
        if self.hangs:
            await asyncio.Event().wait()
        if self.statuses:
            status = self.statuses.pop(0)
            if status == 0:
                asked.transport.close()
                raise ConnectionResetError
            body = {"error": {"message": f"the test says {status}"}}
            return web.json_response(body, status=status, headers=self.headers)
        return web.json_response(self.answer)

    @asynccontextmanager
    async def listening(self):
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self.completions)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        try:
            yield f"http://{host}:{port}/v1"
        finally:
            await runner.cleanup()


CHOICE = {
    "index": 0, "text": "ab", "finish_reason": "length", "token_ids": [5, 6],
    "logprobs": {"token_logprobs": [-0.5, -0.25]}, "prompt_token_ids": [70, 71, 72],
}  # fmt: skip
WHOLE = {"choices": [CHOICE]}


def ask(server: Server, tokenizer, asked=None, **options):
    """The one completion, or what it raises; and the worker."""

    async def main():
        async with server.listening() as url:
            worker, client = worker_of(url, tokenizer, **options)
            try:
                answers = await collect(worker, [asked or request(PROMPT, "r", max_new_tokens=4)])
                return answers["r"], client.take_retries()
            finally:
                await client.close()

    return asyncio.run(main())


def test_passing_failures_are_tried_again_and_counted(served_tokenizer, monkeypatch):
    monkeypatch.setenv("TEST_KEY", "secret")
    server = Server([429, 503, 0, 500], WHOLE, {"Retry-After": "0.01"})
    completion, retries = ask(server, served_tokenizer, retries=4, key_env="TEST_KEY")
    assert (completion.tokens.tolist(), completion.logprobs.tolist()) == ([5, 6], [-0.5, -0.25])
    assert (retries, len(server.bodies)) == (4, 5)
    assert set(server.keys) == {"Bearer secret"}
    assert server.bodies[0] == {
        "model": "tiny", "prompt": [70, 71, 72], "max_tokens": 4, "temperature": 1.0, "top_p": 1.0,
        "seed": 0, "logprobs": 0, "return_token_ids": True, "stop_token_ids": [],
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip


def test_retries_end_with_a_sentence(served_tokenizer):
    with pytest.raises(
        EngineFailed, match=r"not answered in 3 attempts; the last: status 503: the test says"
    ):
        ask(Server([503] * 9, WHOLE), served_tokenizer)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (Server([400] * 9), "answered status 400: the test says 400"),
        (Server([401] * 9), "answered status 401"),
        (Server(answer={"choices": [{**CHOICE, "token_ids": None}]}), "does not return token ids"),
        (Server(answer={"choices": [{**CHOICE, "logprobs": None}]}), "does not return token ids"),
        (Server(answer={"choices": [{**CHOICE, "token_ids": [5]}]}), "a logprob for each"),
        (Server(answer={"choices": [{**CHOICE, "prompt_token_ids": [1, 2]}]}), "read other tokens than"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_from_or_served_is_refused_at_once(served_tokenizer, server, says):
    with pytest.raises(RequestRefused, match=says):
        ask(server, served_tokenizer)
    assert len(server.bodies) == 1


def test_a_server_of_text_alone_serves_evaluation(served_tokenizer):
    server = Server(answer={"choices": [{"text": "ab12", "finish_reason": "stop"}]})
    completion, _ = ask(server, served_tokenizer, token_ids=False)
    assert served_tokenizer.decode(completion.tokens.tolist()) == "ab12"
    assert completion.stop is StopReason.STOP
    assert server.bodies[0]["prompt"] == served_tokenizer.decode(PROMPT.tolist())
    assert "return_token_ids" not in server.bodies[0]


def test_a_deadline_ends_the_wait(served_tokenizer):
    asked = request(PROMPT, "r", deadline_seconds=0.1)
    completion, _ = ask(Server(hangs=True), served_tokenizer, asked)
    assert (completion.stop, len(completion.tokens)) == (StopReason.ABORT, 0)


def test_a_refusal_leaves_the_others_and_the_worker_alone(served_tokenizer):
    async def main():
        server = Server([400], WHOLE)
        async with server.listening() as url:
            worker, client = worker_of(url, served_tokenizer)
            with pytest.raises(RequestRefused):
                await collect(worker, [request(PROMPT, "refused")])
            answers = await collect(worker, [request(PROMPT, "r")])
            await client.close()
            return worker.health(), answers

    health, answers = asyncio.run(main())
    assert (health.running, list(answers)) == (0, ["r"])


def test_a_key_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(MissingKey, match="NO_SUCH_KEY: this environment variable is not set"):
        OpenAIClient("http://127.0.0.1:1/v1", api_key_env="NO_SUCH_KEY")
