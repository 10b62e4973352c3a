"""vLLM's asynchronous engine behind `AsyncEngine`.

this process ── AsyncLLM ──▶ EngineCore (scheduler, steps) ──▶ workers 0..n (TP x PP), each with the extension

A worker without others is in the process of EngineCore.

Experts of routers are returned on GPUs only, and not run on hardware: vLLM 0.32 requires its Model Runner V2
for them, which requires Triton (`VllmConfig._verify_aux_output_compatibility`).
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nemorl.generation.request_driver import Chunk
from nemorl.generation.tokens import RequestLimits
from nemorl.generation.types import EngineFailed, GenerationRequest, RequestRefused
from nemorl.trajectories import Int16Array, StopReason

from .arguments import sampling_arguments
from .weights import ADAPTER, ADAPTER_ID

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class ExpertRows:
    """The experts that vLLM's routers chose for one request, in the rows that a trajectory has.

    vLLM 0.32 returns a row for every token that was taken in, also by another request (prefix cache), of all
    layers (zeros without experts), from `routed_experts_prompt_start` on. The last output has them all.
    """

    def __init__(self, moe_layers: Sequence[int], first: int) -> None:
        """`moe_layers` are the layers with experts, `first` the position of the first row."""
        self._layers, self._first = list(moe_layers), first
        self._num_taken = self._chunks = 0
        self._waiting: list[NDArray[Any]] = []  # rows beyond the tokens that were reported
        self._num_seen = 0  # rows taken or waiting

    def take(self, chunks: Sequence[NDArray[Any]], num_tokens: int) -> Int16Array | None:
        """New rows [m, layers with experts, experts of a token] of the first `num_tokens` tokens."""
        # `chunks` are all that came so far, [rows, layers, experts of a token] each.
        new, self._chunks = chunks[self._chunks :], len(chunks)
        return self._ready(new, num_tokens)

    def take_all(self, rows: NDArray[Any], num_tokens: int) -> Int16Array | None:
        """As `take`, of the last output, which has the rows of all chunks."""
        return self._ready([rows[self._num_seen :]], num_tokens)

    def _ready(self, new: Sequence[NDArray[Any]], num_tokens: int) -> Int16Array | None:
        self._waiting += new
        self._num_seen += sum(len(rows) for rows in new)
        room = num_tokens - self._first - self._num_taken
        if not self._waiting or room <= 0:
            return None
        rows = np.concatenate(self._waiting)
        self._waiting = [rows[room:]] if len(rows) > room else []
        self._num_taken += min(room, len(rows))
        return rows[:room, self._layers].astype(np.int16)


STOPS = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "repetition": StopReason.LENGTH,  # cut off, where `vllm_kwargs` ask for that
    "abort": StopReason.ABORT,
    "error": StopReason.ERROR,
}


class VllmBackend:
    """One engine with all its workers. Belongs to one event loop."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        limits: RequestLimits,
        *,
        name: str,
        recompute_kv_cache: bool,
        moe_layers: Sequence[int] = (),
        adapters: bool = False,
        last_words: Callable[[], str] = str,
    ) -> None:
        """`environment` is set in this process. Experts of `moe_layers` are reported with the tokens.

        With `adapters` the policy's, which the workers hold, sample. `last_words` ends messages of failure.
        """
        os.environ.update(environment)
        self.version = 0  # of the weights that sample
        self._arguments, self._limits, self._name = dict(arguments), limits, name
        self._recompute = recompute_kv_cache
        self._moe_layers, self._adapters, self._last_words = moe_layers, adapters, last_words
        self._engine: AsyncLLM | None = None
        self._processes: dict[int, str] = {}  # process ids that are watched, and what each is
        self._failure: str | None = None

    async def start(self) -> None:
        """Start the engine's processes and load the model as version 0. Raises EngineFailed."""
        from vllm.engine.arg_utils import AsyncEngineArgs  # seconds, and it reads the environment
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**self._arguments)
        try:
            self._engine = await asyncio.to_thread(lambda: AsyncLLM.from_engine_args(arguments))
        except RuntimeError as error:  # vLLM's processes have logged why
            raise EngineFailed(f"{self._name} did not start: {error}{self._last_words()}") from error
        await self._running.update_weight_version("0")

    def check(self, request: GenerationRequest) -> None:
        self._limits.check(request)

    async def sample(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        engine = self._running
        arguments = sampling_arguments(request, self._limits.max_sequence_length)
        params = SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        prompt = TokensPrompt(prompt_token_ids=request.prompt.tolist())
        if not self._recompute:  # else what comes after new weights might find the cache of the old ones
            prompt["cache_salt"] = f"version {self.version}"
        # Its path is never read: the workers have it from the beginning.
        adapter = LoRARequest(ADAPTER, ADAPTER_ID, ADAPTER) if self._adapters else None
        finder = self._limits.stop_finder(request)
        rows = ExpertRows(self._moe_layers, request.routed_experts_from) if self._moe_layers else None
        received = 0
        try:
            async with aclosing(engine.generate(prompt, params, request.id, lora_request=adapter)) as outputs:
                async for output in outputs:
                    new = output.outputs[0]
                    tokens, reason = list(new.token_ids), new.finish_reason
                    sampled = zip(tokens, new.logprobs or (), strict=True)
                    logprobs = [float(at[token].logprob) for token, at in sampled]
                    stop = None if reason is None else STOPS.get(reason, StopReason.ERROR)
                    if finder is not None and (end := finder.find(tokens)) is not None:
                        tokens, logprobs, stop = tokens[:end], logprobs[:end], StopReason.STOP
                    versions = self._versions_of(request.id, new, received, len(tokens))
                    received += len(tokens)
                    experts = self._experts_of(request.id, new, rows, len(request.prompt) + received)
                    yield Chunk(tokens, logprobs, versions, stop, experts)
                    if stop is not None:
                        return
        except ValueError as error:
            raise RequestRefused(f"request {request.id!r}: {error}") from error
        except EngineDeadError as error:
            raise EngineFailed(self.failure()) from error

    async def freeze(self) -> None:
        await self._running.pause_generation(mode="keep", clear_cache=False)

    async def thaw(self) -> None:
        await self._running.resume_generation()

    async def switch(self, version: int) -> None:
        """New weights are in use: forget what the old ones read. The engine is paused meanwhile."""
        engine = self._running
        await engine.reset_prefix_cache(reset_running_requests=self._recompute)
        await engine.update_weight_version(str(version))
        self.version = version

    async def call(self, method: str, *args: Any) -> list[Any]:
        return list(await self._running.collective_rpc(method, args=args))

    async def sleep(self, level: int) -> None:
        await self._running.sleep(level, mode="keep")

    async def wake(self, tags: Sequence[str]) -> None:
        await self._running.wake_up(list(tags) or None)

    def watch(self, processes: Mapping[int, str], on_death: Callable[[str], None]) -> None:
        """Call `on_death` with a message when the first of these processes ends: the others end with it."""
        loop = asyncio.get_running_loop()
        for process, role in processes.items():
            watched = os.pidfd_open(process)
            self._processes[watched] = f"{role} (process {process})"
            loop.add_reader(watched, self._ended, watched, on_death)

    def unwatch(self) -> None:
        for watched in self._processes:
            asyncio.get_running_loop().remove_reader(watched)
            os.close(watched)
        self._processes.clear()

    def failure(self, cause: str = "its EngineCore process failed") -> str:
        """Why the engine is dead; `cause` if nothing is known yet."""
        if self._failure is None:
            self._failure = f"{self._name} has ended: {cause}{self._last_words()}"
        return self._failure

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        # vLLM's own order ends the processes first, and its handler logs that as the engine's death.
        if engine.output_handler is not None:
            engine.output_handler.get_loop().call_soon_threadsafe(engine.output_handler.cancel)
        engine.shutdown()

    def _ended(self, watched: int, on_death: Callable[[str], None]) -> None:
        self._failure = None  # the process that ended says more
        failure = self.failure(f"{self._processes[watched]} ended")
        self.unwatch()
        on_death(failure)

    @property
    def _running(self) -> "AsyncLLM":
        if self._engine is None:
            raise EngineFailed(f"{self._name} has not been started")
        return self._engine

    def _versions_of(self, request_id: str, new: Any, first: int, count: int) -> list[int]:
        """Of the weights that sampled each of `count` tokens from `first` on."""
        if new.weight_versions is not None:
            starts = [(span.version, span.start) for span in new.weight_versions]
        else:  # the spans so far: only the last output has them
            starts = [start for state in self._states_of(request_id) for start in state.weight_version_starts]
        return [
            next((int(version) for version, start in reversed(starts) if start <= index), self.version)
            for index in range(first, first + count)
        ]

    def _experts_of(
        self, request_id: str, new: Any, rows: ExpertRows | None, num_tokens: int
    ) -> Int16Array | None:
        if rows is None:
            return None
        if new.routed_experts is not None:
            return rows.take_all(new.routed_experts, num_tokens)
        states = self._states_of(request_id)  # for the chunks so far
        return rows.take(states[0].routed_experts_chunks, num_tokens) if states else None

    def _states_of(self, request_id: str) -> list[Any]:
        """What vLLM's front keeps of a request until its last output is made."""
        processor = self._running.output_processor
        states = [processor.request_states.get(name) for name in processor.external_req_ids[request_id]]
        return [state for state in states if state is not None]
