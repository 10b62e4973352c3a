"""The engines of the generation benchmark: each samples the same work, greedy, and says how long it took."""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from common import ragged_length

from nemorl.config.generation import MegatronGenerationConfig, TorchGenerationConfig, VllmGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.generation.torch_engine.engine import TorchHost
from nemorl.generation.types import Completion, EngineOptions, GenerationRequest, SamplingParams
from nemorl.generation.vllm_engine.arguments import (
    LEARNED_LAYOUT,
    ONE_PROCESS,
    engine_arguments,
    environment,
)

MAX_LENGTH = 512  # tokens of prompt and completion


@dataclass(frozen=True)
class Setting:
    """What all engines share."""

    model: Path
    device: Literal["cpu", "cuda"]
    precision: Literal["float32", "bfloat16"]
    threads: int
    max_batch: int
    speculation: dict[str, Any] | None = None  # a section of our configuration


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
    """Lengths of at most five medians."""
    draw = random.Random(seed + 1)
    lengths = (ragged_length(draw, median, 5 * median) for _ in range(batch))
    return Work("ragged", _prompts(batch, vocab_size, seed), tuple(lengths))


_PHRASES = 4  # of a prompt


def phrase_work(batch: int, tokens: int, vocab_size: int, seed: int = 0) -> Work:
    """Prompts that repeat a phrase several times, which a model continues or ends."""
    draw = random.Random(seed + 2)
    prompts = []
    for _ in range(batch):
        phrase = [draw.randrange(vocab_size) for _ in range(draw.randint(6, 16))]
        prompts.append(tuple(phrase * _PHRASES))
    return Work("phrases", tuple(prompts), (2 * tokens,) * batch)


def repetitive_work(candidates: Work, sampled: Sampled, batch: int) -> Work:
    """Those of `phrase_work` whose completions, as `sampled`, repeat their phrase the most."""
    rows = zip(candidates.prompts, candidates.lengths, sampled.tokens, strict=True)
    repeated = [(_repeated(prompt, tokens), prompt, length) for prompt, length, tokens in rows]
    best = sorted(repeated, key=lambda row: -row[0])[:batch]
    return Work("repetitive", tuple(prompt for _, prompt, _ in best), tuple(length for _, _, length in best))


def _repeated(prompt: tuple[int, ...], completion: tuple[int, ...]) -> float:
    """Share of the completion's tokens that equal the token one phrase before."""
    period, text = len(prompt) // _PHRASES, prompt + completion
    same = [text[i] == text[i - period] for i in range(len(prompt), len(text))]
    return sum(same) / len(same)


def start(setting: Setting, engine: str) -> Callable[[Work], Sampled]:
    """An engine that is ready to sample."""
    torch.set_num_threads(setting.threads)
    sides: dict[str, Callable[[Setting], Callable[[Work], Sampled]]] = {
        "transformers": Transformers,
        "transformers-batching": TransformersBatching,
        "vllm-bare": BareVllm,
    }
    return sides[engine](setting) if engine in sides else Engine(setting, engine)


def _load(setting: Setting) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=getattr(torch, setting.precision))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(setting.device).eval()


class Transformers:
    """`generate` on a left-padded batch, in which a row that has its tokens is done."""

    def __init__(self, setting: Setting) -> None:
        self._model = _load(setting)

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


class TransformersBatching:
    """transformers' continuous batching, over a paged cache with room for the largest batch."""

    def __init__(self, setting: Setting) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        page = 16
        batching = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=setting.max_batch * (MAX_LENGTH // page),
            max_batch_tokens=max(MAX_LENGTH, setting.max_batch),
            use_async_batching=False,
        )
        self._manager = _load(setting).init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0), batching
        )
        self._manager.start()

    def __call__(self, work: Work) -> Sampled:
        found: dict[str, tuple[int, ...]] = {}
        began = time.perf_counter()
        names = [
            self._manager.add_request(list(prompt), max_new_tokens=tokens)
            for prompt, tokens in zip(work.prompts, work.lengths, strict=True)
        ]
        while len(found) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = tuple(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching has ended")
        seconds = time.perf_counter() - began
        return Sampled(tuple(found[name] for name in names), seconds)

    def close(self) -> None:
        """End its thread."""
        self._manager.stop(block=True)


class BareVllm:
    """vLLM's offline interface with the arguments of our back end, in the processes that vLLM chooses."""

    def __init__(self, setting: Setting) -> None:
        config = VllmGenerationConfig(backend="vllm", max_num_seqs=setting.max_batch)
        options = _options(setting)
        self._folder = tempfile.TemporaryDirectory()
        os.environ |= environment(config, options, Path(self._folder.name))
        del os.environ[LEARNED_LAYOUT]
        os.environ.pop(ONE_PROCESS, None)
        from vllm import LLM
        from vllm import SamplingParams as Params

        arguments = engine_arguments(config, options)
        del arguments["worker_extension_cls"]
        self._llm, self._params = LLM(**arguments), Params

    def __call__(self, work: Work) -> Sampled:
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in work.prompts]
        params = [
            self._params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
            for tokens in work.lengths
        ]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return Sampled(tuple(tuple(output.outputs[0].token_ids) for output in outputs), seconds)

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.llm_engine.engine_core.shutdown()
        self._folder.cleanup()


class Engine:
    """One of ours, by the interface that all have, on an event loop of its own."""

    def __init__(self, setting: Setting, backend: str) -> None:
        self._runner = asyncio.Runner()
        backend, _, drafts = backend.partition("+")
        if drafts == "lookup":
            setting = replace(setting, speculation={"method": "prompt_lookup"})
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
    config = TorchGenerationConfig(max_batch_size=setting.max_batch, speculation=setting.speculation)
    return TorchHost(config, _options(setting)), nullcontext


async def _vllm(setting: Setting) -> tuple[Any, Stage]:
    from nemorl.generation.vllm_engine.host import VllmHost

    config = VllmGenerationConfig(backend="vllm", max_num_seqs=setting.max_batch)
    host = VllmHost(config, _options(setting))
    await host.start()
    return host, nullcontext


async def _megatron(setting: Setting) -> tuple[Any, Stage]:
    """A policy of one process; `stage` is as long as its rank samples."""
    from policies import start_policy

    from nemorl.generation.megatron_engine import PolicySampler

    policy = PolicyConfig(
        model_path=setting.model, precision=setting.precision, max_sequence_length=MAX_LENGTH
    )
    worker = start_policy(policy, setting.device, threads=setting.threads)
    config = MegatronGenerationConfig(
        backend="megatron", max_batch_size=setting.max_batch, speculation=setting.speculation
    )
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
