"""A served model: a tiny random one with a ChatML template that knows tools, behind a router."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import torch

from nemorl.config.generation import EndpointConfig, TorchGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import Tokenizer, load_tokenizer
from nemorl.generation.router import Replica, Router
from nemorl.generation.torch_engine.engine import TorchHost
from nemorl.generation.types import EngineOptions
from nemorl.serve.app import Listening, listening
from nemorl.serve.sampling import Served
from tests.data.tokenizers import save_tokenizer

TOOLS_CHATML = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t.function.name }}{% endfor %} "
    "in <tool_call>\n<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.a }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH = 128


def save_model(folder: Path, seed: int, architecture: str = "LlamaForCausalLM", **fields: object) -> Path:
    """A tiny Llama with a chat template, and weights so large that every draw depends on its number."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=263, max_position_embeddings=LENGTH,
        bos_token_id=None, eos_token_id=0, **fields,
    )  # fmt: skip
    network = getattr(transformers, architecture)(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    network.save_pretrained(folder)
    end_tokens = (folder / "config.json").read_text()
    save_tokenizer(folder, TOOLS_CHATML)
    (folder / "config.json").write_text(end_tokens)
    return folder


@pytest.fixture(scope="session")
def served_model(tmp_path_factory) -> Path:
    """A policy to be served."""
    return save_model(tmp_path_factory.mktemp("served"), 3, tie_word_embeddings=True, pad_token_id=None)


@pytest.fixture(scope="session")
def served_tokenizer(served_model) -> Tokenizer:
    return load_tokenizer(PolicyConfig(model_path=served_model))


def engine(folder: Path, **config) -> TorchHost:
    """The torch engine of a folder, in this process."""
    return TorchHost(
        TorchGenerationConfig(**config),
        EngineOptions(folder, folder, LENGTH, threads=1, commit_seconds=60),
    )


@dataclass
class Endpoint:
    """A listening endpoint and a client of it."""

    at: Listening
    http: aiohttp.ClientSession

    async def post(self, path: str, body: object, key: str | None = None) -> tuple[int, dict]:
        """Status and JSON of an answer."""
        headers = {"Authorization": f"Bearer {self.at.api_key if key is None else key}"}
        sent = {"json": body} if not isinstance(body, bytes) else {"data": body}
        async with self.http.post(f"{self.at.url}{path}", headers=headers, **sent) as response:
            return response.status, await response.json()


Open = Callable[..., "AsyncIterator[Endpoint]"]


@pytest.fixture
def endpoint(served_model, served_tokenizer):
    """Open an endpoint over replicas, or over one torch engine, on a free port."""

    @asynccontextmanager
    async def open_endpoint(
        *replicas: Replica, timeout: float = 60.0, tokenizer: Tokenizer = served_tokenizer, **config
    ) -> AsyncIterator[Endpoint]:
        worker = None
        if not replicas:
            worker = engine(served_model)
            replicas = (Replica("torch", worker.generate_batches, worker.abort),)
        served = Served(Router(replicas), tokenizer, "tiny", LENGTH, timeout)
        try:
            async with (
                listening(EndpointConfig(port=0, **config), served) as at,
                aiohttp.ClientSession() as http,
            ):
                yield Endpoint(at, http)
        finally:
            if worker is not None:
                worker.close()

    return open_endpoint
