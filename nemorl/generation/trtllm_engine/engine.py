"""TensorRT-LLM's AsyncLLM behind `AsyncEngine`: our settings in its words, and calls of its workers.

host process ── generate_async ──▶ worker 0 ─ PyExecutor (steps)
     └──────── collective_rpc ──▶ workers 0..n ─ extension: hold, load, finish, release
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorrt_llm import AsyncLLM, SamplingParams
from tensorrt_llm.executor import RequestError
from tensorrt_llm.llmapi import (
    DraftTargetDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
)
from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType, SleepConfig
from tensorrt_llm.sampling_params import LogprobMode

from nemorl.config.generation import (
    DraftModelConfig,
    MtpConfig,
    PromptLookupConfig,
    SpeculationConfig,
    TrtllmGenerationConfig,
)
from nemorl.generation.request_driver import Chunk
from nemorl.generation.tokens import RequestLimits, StopStringFinder, engine_seed
from nemorl.generation.types import EngineFailed, EngineOptions, GenerationRequest
from nemorl.trajectories import StopReason

logger = logging.getLogger(__name__)

_EXTENSION = "nemorl.generation.trtllm_engine.host.NemorlExtension"  # mixed into the engine's workers
_NO_TOKEN = -1  # we say which tokens end a turn, the engine adds none
_STOPS = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "timeout": StopReason.ABORT,
    "cancelled": StopReason.ABORT,
}


def engine_arguments(config: TrtllmGenerationConfig, options: EngineOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(options.model_path),
        "backend": "pytorch",
        "dtype": config.precision or options.precision,
        "skip_tokenizer_init": True,  # token ids in and out
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        "max_seq_len": options.max_sequence_length,
        "max_input_len": options.max_sequence_length,  # else 1024
        "kv_cache_config": KvCacheConfig(
            free_gpu_memory_fraction=config.kv_cache_fraction,
            enable_block_reuse=config.prefix_caching,
            dtype=config.kv_cache_dtype,
        ),
        "sleep_config": SleepConfig(),
        "ray_worker_extension_cls": _EXTENSION,
        **config.trtllm_kwargs,
    }
    if config.speculation is not None:
        arguments["speculative_config"] = _speculation(config.speculation)
        # As its documentation sets it for these; and a step's drafts would be counted in the next.
        arguments["disable_overlap_scheduler"] = True
    if config.on_update != "finish":  # of a step that overlaps with the next one no count has the tokens
        arguments["disable_overlap_scheduler"] = True
    names = ("moe_tensor_parallel_size", "moe_expert_parallel_size")
    return arguments | {name: size for name in names if (size := getattr(config, name)) is not None}


def _speculation(config: SpeculationConfig) -> Any:
    """The drafts in its words; without `use_rejection_sampling` it accepts those that its own draws equal."""
    # Earlier releases draw greedily with drafts unless this is set, later ones ignore it.
    common: dict[str, Any] = {"max_draft_len": config.max_tokens, "allow_advanced_sampling": True}
    match config:
        case PromptLookupConfig():
            # A pool of each request: what others sampled would make a draft depend on the batch.
            return NGramDecodingConfig(
                **common, max_matching_ngram_size=config.max_match, is_public_pool=False, is_use_oldest=False
            )
        case DraftModelConfig():
            return DraftTargetDecodingConfig(**common, speculative_model=str(config.model_path))
        case MtpConfig():
            return MTPDecodingConfig(**common)


def sampling_params(request: GenerationRequest, max_sequence_length: int) -> SamplingParams:
    """A request's own. Stop strings are looked for by us: the engine would look for them as token ids."""
    sampling, greedy = request.sampling, request.sampling.temperature == 0
    return SamplingParams(
        max_tokens=min(request.max_new_tokens, max_sequence_length - len(request.prompt)),
        temperature=sampling.temperature,
        top_k=1 if greedy else sampling.top_k or 0,
        top_p=sampling.top_p,  # always given: without top-p and top-k the engine is greedy
        min_p=sampling.min_p,
        seed=engine_seed(request),
        end_id=_NO_TOKEN,
        stop_token_ids=sorted(request.stop_token_ids) or None,
        include_stop_str_in_output=True,
        detokenize=False,
        logprobs=1,
        # Of the distribution sampled; greedy has none, and takes the model's own.
        logprobs_mode=LogprobMode.RAW if greedy else LogprobMode.PROCESSED,
    )


def memory_tags(tags: Sequence[str]) -> list[str]:
    """The engine's names for `weights` and `kv_cache`; both, where none is given."""
    cache = ExecutorMemoryType.KV_CACHE.value
    others = [tag.value for tag in ExecutorMemoryType if not tag.value.startswith("_") and tag.value != cache]
    by_ours = {"weights": others, "kv_cache": [cache]}
    return [name for tag in tags or by_ours for name in by_ours[tag]]


@dataclass(eq=False)
class _Flight:
    versions: list[tuple[int, int]]  # (first token, version) of each version that samples it
    received: int = 0  # tokens
    finder: StopStringFinder | None = None

    def take(self, sample: Any) -> Chunk:
        """What has come since, cut behind the token that completes a stop string."""
        first = self.received
        tokens = list(sample.token_ids[first:])
        # For each position a number, or several by token.
        at = zip(tokens, sample.logprobs[first : first + len(tokens)], strict=True)
        logprobs = [float(found[token].logprob if isinstance(found, dict) else found) for token, found in at]
        stop = None if sample.finish_reason is None else _STOPS[sample.finish_reason]
        if self.finder is not None and (end := self.finder.find(tokens)) is not None:
            tokens, logprobs, stop = tokens[:end], logprobs[:end], StopReason.STOP
        self.received += len(tokens)
        versions = [
            next(version for start, version in reversed(self.versions) if index >= start)
            for index in range(first, self.received)
        ]
        return Chunk(tokens, logprobs, versions, stop)


class TrtllmEngine:
    """One engine with all its workers. Belongs to one event loop."""

    def __init__(
        self, config: TrtllmGenerationConfig, limits: RequestLimits, name: str, arguments: Mapping[str, Any]
    ) -> None:
        self.version = 0
        self.config, self.limits, self.name = config, limits, name
        self.llm = AsyncLLM(**arguments)
        self._flights: dict[int, _Flight] = {}  # by the engine's id of the request
        self._counts: dict[int, int] = {}  # tokens of each when the engine was last held
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self, request: GenerationRequest) -> None:
        self.limits.check(request)

    async def sample(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks of a request; an error of this request alone ends it with stop reason `error`."""
        output, stop = None, None
        try:
            params = sampling_params(request, self.limits.max_sequence_length)
            prompt = {"prompt_token_ids": request.prompt.tolist()}
            output = self.llm.generate_async(prompt, params, streaming=True)
            flight = _Flight([(0, self.version)], finder=self.limits.stop_finder(request))
            self._flights[output.request_id] = flight
            async for partial in output:
                chunk = flight.take(partial.outputs[0])
                stop = chunk.stop
                if chunk.tokens or stop is not None:
                    yield chunk
                if stop is not None:
                    return
        except (RequestError, ValueError) as error:
            logger.warning("%s: request %s failed: %s", self.name, request.id, error)
            yield Chunk([], [], [], StopReason.ERROR)
        finally:
            if output is not None:
                del self._flights[output.request_id]
                if stop is None or not output.finished:
                    # Without waiting: the call blocks while the engine is paused.
                    task = asyncio.create_task(asyncio.to_thread(output.abort))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def freeze(self) -> None:
        self._counts = (await self.call("nemorl_hold"))[0]

    async def thaw(self) -> None:
        await self.call("nemorl_release")

    def switch(self, version: int) -> None:
        """What is sampled after the engine's pause comes from weights of `version`."""
        self.version = version
        for number, flight in self._flights.items():
            # What a request that is not active had sampled has come while the engine was paused.
            flight.versions.append((self._counts.get(number, flight.received), version))

    async def call(self, method: str, *args: Any) -> list[Any]:
        """A method on every worker; answers by rank. Raises EngineFailed, which names dead ranks."""
        try:
            return list(await self.llm.collective_rpc(method, args=args))
        except Exception as error:
            ranks = range(self.config.ranks_per_replica)
            asked = (self.llm.collective_rpc("nemorl_device", unique_reply_rank=rank) for rank in ranks)
            answers = await asyncio.gather(*asked, return_exceptions=True)
            dead = [str(rank) for rank in ranks if isinstance(answers[rank], BaseException)]
            failed = f"worker{'s' * (len(dead) > 1)} of rank {', '.join(dead)} of {len(ranks)} died"
            cause = getattr(error, "cause", error)  # Ray's wrapping has the complete stack
            problem = f"{failed if dead else 'its workers failed'} in {method}"
            raise EngineFailed(f"{self.name}: {problem}: {type(cause).__name__}: {cause}") from error
