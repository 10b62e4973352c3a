"""The engines of the generation benchmark: each samples the same work, greedy, and says how long it took."""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nemorl.config.generation import MegatronGenerationConfig, TorchGenerationConfig, VllmGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.generation.torch_engine.engine import TorchHost
from nemorl.generation.types import Completion, EngineOptions, GenerationRequest, SamplingParams

MAX_LENGTH = 512  # tokens of prompt and completion


@dataclass(frozen=True)
class Setting:
    """What all engines share."""

    model: Path
    device: Literal["cpu", "cuda"]
    precision: Literal["float32", "bfloat16"]
    threads: int
    max_batch: int


@dataclass(frozen=True)
class Work:
    """Prompts, and the number of tokens to sample after each; no token ends a completion earlier."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens to sample."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Sampled:
    """Tokens of each completion, and the seconds that all took."""

    tokens: tuple[tuple[int, ...], ...]
    seconds: float


def _prompts(batch: int, vocab_size: int, seed: int) -> tuple[tuple[int, ...], ...]:
    draw = random.Random(seed)
    return tuple(tuple(draw.randrange(vocab_size) for _ in range(draw.randint(16, 48))) for _ in range(batch))


def equal_work(batch: int, tokens: int, vocab_size: int, seed: int = 0) -> Work:
    """Completions of one length."""
    return Work("equal", _prompts(batch, vocab_size, seed), (tokens,) * batch)


def ragged_work(batch: int, median: int, vocab_size: int, seed: int = 0) -> Work:
    """Log-normal lengths (sigma 0.8) of at most five medians, as rollouts have them."""
    draw = random.Random(seed + 1)
    lengths = (round(min(5 * median, max(4, median * draw.lognormvariate(0, 0.8)))) for _ in range(batch))
    return Work("ragged", _prompts(batch, vocab_size, seed), tuple(lengths))


def start(setting: Setting, engine: str) -> Callable[[Work], Sampled]:
    """An engine that is ready to sample."""
    torch.set_num_threads(setting.threads)
    return Transformers(setting) if engine == "transformers" else Engine(setting, engine)


class Transformers:
    """`generate` on a left-padded batch, in which a row that has its tokens is done."""

    def __init__(self, setting: Setting) -> None:
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, setting.precision)
        model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=dtype)
        self._model: Any = model.to(setting.device).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    @torch.no_grad()
    def __call__(self, work: Work) -> Sampled:
        device = self._model.device
        longest = max(map(len, work.prompts))
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in work.prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts]
        ends = torch.tensor(work.lengths, device=device) + longest

        def is_done(tokens: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return tokens.shape[1] >= ends

        began = time.perf_counter()
        output = self._model.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            do_sample=False,
            max_new_tokens=max(work.lengths),
            stopping_criteria=[is_done],
        )
        seconds = time.perf_counter() - began
        completions = [row[longest:] for row in output.tolist()]
        tokens = (tuple(row[:n]) for row, n in zip(completions, work.lengths, strict=True))
        return Sampled(tuple(tokens), seconds)


class Engine:
    """One of ours, by the interface that all have, on an event loop of its own."""

    def __init__(self, setting: Setting, backend: str) -> None:
        self._runner = asyncio.Runner()
        make = {"torch": _torch, "vllm": _vllm, "megatron": _megatron}[backend]
        self._service, self._stage = self._runner.run(make(setting))
        self._count = 0

    def __call__(self, work: Work) -> Sampled:
        return self._runner.run(self._sample(work))

    async def _sample(self, work: Work) -> Sampled:
        requests = []
        for prompt, tokens in zip(work.prompts, work.lengths, strict=True):
            self._count += 1
            requests.append(
                GenerationRequest(
                    id=str(self._count),
                    prompt=np.array(prompt, np.int32),
                    sampling=SamplingParams(temperature=0.0),
                    max_new_tokens=tokens,
                    seed=0,
                )
            )
        found: dict[str, tuple[int, ...]] = {}
        async with self._stage():
            began = time.perf_counter()
            async for reports in self._service.generate_batches(requests):
                found |= {r.id: tuple(r.tokens.tolist()) for r in reports if isinstance(r, Completion)}
            seconds = time.perf_counter() - began
        return Sampled(tuple(found[request.id] for request in requests), seconds)

    def close(self) -> None:
        """End the engine and the loop."""
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        closing = self._service.close()  # of some it takes a while
        if closing is not None:
            await closing


Stage = Callable[[], AbstractAsyncContextManager[Any]]  # inside, the engine samples


async def _torch(setting: Setting) -> tuple[Any, Stage]:
    config = TorchGenerationConfig(max_batch_size=setting.max_batch)
    return TorchHost(config, _options(setting)), nullcontext


async def _vllm(setting: Setting) -> tuple[Any, Stage]:
    from nemorl.generation.vllm_engine.host import VllmHost

    config = VllmGenerationConfig(backend="vllm", max_num_seqs=setting.max_batch)
    host = VllmHost(config, _options(setting))
    await host.start()
    return host, nullcontext


async def _megatron(setting: Setting) -> tuple[Any, Stage]:
    """A policy of one process; `stage` is as long as its rank samples."""
    from nemorl.generation.megatron_engine import PolicySampler
    from nemorl.megatron.worker import PolicyWorker

    policy = PolicyConfig(
        model_path=setting.model, precision=setting.precision, max_sequence_length=MAX_LENGTH
    )
    worker = PolicyWorker(
        policy,
        rank=0,
        world_size=1,
        rendezvous=f"file://{tempfile.mkdtemp()}/rendezvous",
        device=setting.device,
        threads=setting.threads,
        temperature=1.0,
        keep_reference=False,
        deadline_seconds=600,
    )
    worker.load_hf(setting.model)
    config = MegatronGenerationConfig(backend="megatron", max_batch_size=setting.max_batch)
    sampler = PolicySampler(
        worker.decoding_copy(config.max_kv_tokens),
        policy,
        config,
        name="megatron",
        tokenizer_path=setting.model,
        device=torch.device(setting.device),
    )

    @asynccontextmanager
    async def stage() -> AsyncIterator[None]:
        serving = asyncio.create_task(asyncio.to_thread(sampler.serve, 0))
        yield
        await sampler.stop()
        await serving

    return sampler, stage


def _options(setting: Setting) -> EngineOptions:
    return EngineOptions(
        setting.model,
        setting.model,
        MAX_LENGTH,
        device=setting.device,
        precision=setting.precision,
        threads=setting.threads,
        commit_seconds=60.0,
    )
