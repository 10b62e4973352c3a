"""A run's engine that another process has started: a real `vllm serve` on the CPU, weights over HTTP."""

import asyncio
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from nemorl.config.generation import VllmServerGenerationConfig
from nemorl.generation.openai_client import OpenAIClient
from nemorl.generation.tokens import RequestLimits
from nemorl.generation.types import Completion, EngineFailed, EngineOptions
from nemorl.generation.vllm_engine.server import VllmServerBackend, VllmServerHost
from nemorl.trajectories import StopReason
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import RefitFailed
from tests.generation.examples import Prompts, completions, request
from tests.generation.vllm_engine.exchange import Receivers
from tests.generation.vllm_engine.models import VOCABULARY
from tests.generation.vllm_engine.policy import Policy, changed
from tests.required import require_module
from tests.selection import in_all
from tests.weights.store_server import StoreServer, serving

KEY = "VLLM_API_KEY"
CPU_COMMAND = Path(__file__).with_name("serve_cpu.py")  # `vllm`
PLUG_IN = "nemorl.generation.vllm_engine"
START_SECONDS = 240.0


class Client:
    """A host in an event loop of its own, as `Running` has one."""

    def __init__(self, url: str, folder: Path, **config: Any) -> None:
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        section = VllmServerGenerationConfig(backend="vllm_server", base_urls=(url,), **config)
        self.host = self.run(self._make(section, folder))

    async def _make(self, section: VllmServerGenerationConfig, folder: Path) -> VllmServerHost:
        host = VllmServerHost(section, EngineOptions(folder, folder, 200, commit_seconds=60))
        await host.start()
        return host

    def run(self, work: Any, seconds: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def close(self) -> None:
        self.run(self.host.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def sample(self, prompts: Sequence[Any], max_new_tokens: int = 12, **fields: Any) -> list[Completion]:
        return self.submit(prompts, max_new_tokens, **fields).result(120)

    def submit(
        self, prompts: Sequence[Any], max_new_tokens: int, **fields: Any
    ) -> "Future[list[Completion]]":
        asked = [
            request(prompt, str(next(self._ids)), max_new_tokens=max_new_tokens, seed=number, **fields)
            for number, prompt in enumerate(prompts)
        ]

        async def collect() -> list[Completion]:
            found = [one async for one in completions(self.host, asked)]
            return sorted(found, key=lambda one: int(one.id))

        return asyncio.run_coroutine_threadsafe(collect(), self._loop)


@dataclass
class Served:
    url: str
    model: Path
    network: Any
    weights: Path  # where the policy writes
    store: StoreServer  # over which the server reads
    log: Path


@pytest.fixture(scope="module")
def served(dense: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(dense, tmp_path_factory.mktemp("served")) as server:
        yield server


@contextmanager
def serve(model: tuple[Path, Any], folder: Path, *, ranks: int = 1) -> Iterator[Served]:
    """A server of its own with that many ranks (TP)."""
    require_module("watchfiles")  # of vLLM's server, not of its engine
    weights, log = folder / "weights", folder / "log"
    weights.mkdir()
    with socket.socket() as free:
        # Below the ports that the system gives to others while the server starts.
        port = random.randint(20000, 29999)
        free.bind(("127.0.0.1", port))
    with serving(weights) as store, log.open("wb") as output, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("VLLM_", "NEMORL_VLLM_"))]:
            patch.delenv(name)  # of engines that have run in this process
        patch.setenv(KEY, "a key of this test")
        variables = {
            "NEMORL_WEIGHTS_URL": store.url,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        arguments = {
            **{"host": "127.0.0.1", "port": str(port), "dtype": "float32", "max-model-len": "200"},
            **{"max-num-seqs": "8", "max-num-batched-tokens": "2048", "logprobs-mode": "processed_logprobs"},
            "worker-extension-cls": f"{PLUG_IN}.served_worker.ServedWorker",
            "middleware": f"{PLUG_IN}.served.WeightRoutes",
            "tensor-parallel-size": str(ranks),
        }
        command = [sys.executable, str(CPU_COMMAND), "serve", str(model[0]), "--tokens-only"]
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        for name, value in arguments.items():
            command += [f"--{name}", value]
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait_until_it_answers(process, port, log)
            yield Served(f"http://127.0.0.1:{port}", *model, weights, store, log)
        finally:
            if process.poll() is not None:  # the message of a test that could not connect
                sys.stdout.write(f"the server has ended: {log.read_text()[-3000:]}")
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_it_answers(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        # Not a connection alone: until the server listens, another process may have the port for a moment.
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0) as answer:
            if answer.status == HTTPStatus.OK:
                return
        time.sleep(0.5)
    pytest.fail(f"the server did not start in {START_SECONDS:g} s: {log.read_text()[-3000:]}")


def exchange_of(client: Client, served: Served, policy: Policy) -> WeightExchange:
    options = TransportOptions("files", str(served.weights), delta=True, full_version_every=3)
    return WeightExchange(policy, Receivers(client), 2**14, 60.0, options)


def assert_sampled_by(
    network: Any, prompts: Sequence[Any], found: Sequence[Completion], version: int
) -> None:
    """Logprobs are those of a network of transformers."""
    for prompt, one in zip(prompts, found, strict=True):
        assert set(one.versions.tolist()) == {version}
        with torch.no_grad():
            tokens = [*prompt.tolist(), *one.tokens.tolist()]
            logprobs = network(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = logprobs[range(len(prompt) - 1, len(tokens) - 1), one.tokens.tolist()]
        assert np.abs(expected.numpy() - one.logprobs).max() < 1e-4


def check_updates(
    client: Client,
    served: Served,
    policy: Policy,
    exchange: WeightExchange,
    prompts: Sequence[Any],
    after: Path,
) -> tuple[int, Any]:
    """A complete version, then changes from the folder `after`; bytes of the first, network of the second."""
    whole = asyncio.run(exchange.refit(1))
    assert_sampled_by(served.network, prompts, client.sample(prompts), 1)
    policy.load(changed(served.model, after))
    stats = asyncio.run(exchange.refit(2))
    assert 0 < stats.num_bytes < 0.05 * whole.num_bytes
    network = type(served.network).from_pretrained(after).eval()
    assert_sampled_by(network, prompts, client.sample(prompts), 2)
    return whole.num_bytes, network


@pytest.mark.ci
@pytest.mark.parametrize("update", ["staged", *in_all("in_place")])
def test_a_server_samples_with_the_weights_of_a_run(served: Served, tmp_path: Path, update: Any) -> None:
    prompts = Prompts().several(4)
    client = Client(served.url, served.model, update=update)
    policy = Policy(served.model)
    exchange = exchange_of(client, served, policy)
    whole, network = check_updates(client, served, policy, exchange, prompts, tmp_path / "after")
    assert whole == sum(p.numel() for p in served.network.parameters()) * 4
    # an object is lost: the server keeps what it has, and the next version is a full one
    policy.load(served.model)
    served.store.fails = lambda path: 404 if path.endswith(".bin") else None
    with pytest.raises(RefitFailed, match=r"version 3 of the weights lacks .*\.bin"):
        asyncio.run(exchange.refit(3))
    served.store.fails = lambda path: None
    assert_sampled_by(network, prompts, client.sample(prompts), 2)
    assert asyncio.run(exchange.refit(4)).num_bytes == whole
    assert_sampled_by(served.network, prompts, client.sample(prompts), 4)
    client.close()


@pytest.mark.slow
def test_the_ranks_of_a_server_read_their_parts(dense: tuple[Path, Any], tmp_path: Path) -> None:
    """Complete versions and changes, of a server with two ranks."""
    with serve(dense, tmp_path, ranks=2) as server:
        client, policy = Client(server.url, server.model), Policy(server.model)
        exchange, prompts = exchange_of(client, server, policy), Prompts().several(4)
        check_updates(client, server, policy, exchange, prompts, tmp_path / "after")
        client.close()


@pytest.mark.ci
def test_tokens_have_the_versions_that_sampled_them(served: Served, tmp_path: Path) -> None:
    """An update in the middle of answers, which continue with a cache of the new weights."""
    client, policy = Client(served.url, served.model), Policy(served.model)
    exchange = exchange_of(client, served, policy)
    asyncio.run(exchange.refit(1))
    after = changed(served.model, tmp_path / "after")
    networks = {1: served.network, 2: type(served.network).from_pretrained(after).eval()}
    prompts = Prompts(seed=1).several(64)  # the server samples eight at a time
    policy.load(after)
    first = prompts[:7]
    waiting: list[tuple[Sequence[Any], Future[list[Completion]]]] = [(first, client.submit(first, 150))]
    client.submit(prompts[:1], 1).result(120)  # the others are being sampled

    async def refit_while_sampling() -> None:
        refit = asyncio.create_task(exchange.refit(2))
        while not refit.done():
            answers = client.submit(prompts, 150)
            waiting.append((prompts, answers))
            await asyncio.wait({refit, asyncio.wrap_future(answers)}, return_when=asyncio.FIRST_COMPLETED)
        await refit

    asyncio.run(refit_while_sampling())
    found = [
        (prompt, one)
        for asked, answers in waiting
        for prompt, one in zip(asked, answers.result(120), strict=True)
    ]
    assert any(set(one.versions.tolist()) == {1, 2} for _, one in found)
    for prompt, one in found:
        assert one.versions.tolist() == sorted(one.versions.tolist())
        tokens = [*prompt.tolist(), *one.tokens.tolist()]
        for version, network in networks.items():
            with torch.no_grad():
                logprobs = network(torch.tensor([tokens])).logits[0].log_softmax(-1)
            expected = logprobs[range(len(prompt) - 1, len(tokens) - 1), one.tokens.tolist()].numpy()
            own = one.versions == version
            assert np.abs(expected - one.logprobs)[own].max(initial=0.0) < 1e-4
    client.close()


@pytest.mark.ci
def test_a_server_with_another_key_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "another key")
    with pytest.raises(EngineFailed, match=r"does not take weights .*401.*: start it with the plug-in"):
        Client(served.url, served.model)


# Answers, without a server


def backend(
    answer: dict[str, Any], newest: int | None, bodies: list[Any], **config: Any
) -> VllmServerBackend:
    """Of a server that gives this answer."""
    section = VllmServerGenerationConfig(backend="vllm_server", base_urls=("http://127.0.0.1:1",), **config)
    client = OpenAIClient("http://127.0.0.1:1")

    async def post(path: str, body: Any) -> dict[str, Any]:
        bodies.append((path, body))
        return answer

    client.post = post  # type: ignore[method-assign, assignment]
    found = VllmServerBackend(
        section, client, RequestLimits(VOCABULARY, 200, 200, lambda tokens: "".join(map(chr, tokens)))
    )
    found.newest = found.version = newest  # type: ignore[assignment]
    return found


def answer(tokens: Sequence[int], *spans: tuple[str, int, int], **fields: Any) -> dict[str, Any]:
    choice = {
        "token_ids": list(tokens),
        "logprobs": {"content": [{"token_id": token, "logprob": -token / 8} for token in tokens]},
        "weight_versions": [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans],
        "finish_reason": "length",
    }
    return {"choices": [choice | fields]}


def chunk_of(of: VllmServerBackend, **fields: Any) -> Any:
    async def first() -> Any:
        return await anext(of.sample(request(np.array([3, 4], np.int32), **fields)))

    return asyncio.run(first())


def test_an_answer_is_a_chunk_with_the_version_of_each_token() -> None:
    bodies: list[Any] = []
    chunk = chunk_of(backend(answer([8, 16, 24], ("5", 0, 1), ("7", 1, 3)), 7, bodies), seed=9)
    assert (chunk.tokens, chunk.logprobs, chunk.versions) == ([8, 16, 24], [-1.0, -2.0, -3.0], [5, 7, 7])
    assert chunk.stop == StopReason.LENGTH
    ((path, body),) = bodies
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [3, 4]
    assert body["sampling_params"]["max_tokens"] == 8
    assert "cache_salt" not in body


def test_with_continue_the_cache_of_other_weights_is_not_used() -> None:
    bodies: list[Any] = []
    chunk_of(backend(answer([8], ("7", 0, 1)), 7, bodies, on_update="continue"))
    assert bodies[0][1]["cache_salt"] == "version 7"


def test_a_stop_string_ends_an_answer_at_its_token() -> None:
    given = answer([65, 66, 67, 68], ("2", 0, 4))
    chunk = chunk_of(backend(given, 2, []), stop_strings=("BC",))
    assert (chunk.tokens, chunk.versions, chunk.stop) == ([65, 66, 67], [2, 2, 2], StopReason.STOP)


@pytest.mark.parametrize("version", ["default", "8"])
def test_weights_that_the_run_did_not_send_are_an_error(version: str) -> None:
    given = answer([8], (version, 0, 1))
    with pytest.raises(
        EngineFailed, match=f"version {version}, and this run sent version 7: it was restarted"
    ):
        chunk_of(backend(given, 7, []))
    assert chunk_of(backend(given, None, [])).versions == [0]  # before the first update, and in `nemorl eval`


@pytest.mark.parametrize(
    "wrong",
    [{"token_ids": None}, {"logprobs": None}, {"weight_versions": None}, {"weight_versions": []}],
    ids=str,
)
def test_an_incomplete_answer_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineFailed, match="/inference/v1/generate answered"):
        chunk_of(backend(answer([8], ("1", 0, 1), **wrong), 1, []))
