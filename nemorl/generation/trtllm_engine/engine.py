"""TensorRT-LLM's AsyncLLM behind `AsyncEngine`, and calls of the extension in its workers.

host process ── generate_async ──▶ worker 0 ─ PyExecutor (steps)
     └──────── collective_rpc ──▶ workers 0..n ─ extension: hold, load, finish, release
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from tensorrt_llm import AsyncLLM
from tensorrt_llm.executor import RequestError

from nemorl.config.generation import TrtllmGenerationConfig
from nemorl.generation.request_driver import Chunk
from nemorl.generation.tokens import RequestLimits, StopStringFinder
from nemorl.generation.types import EngineFailed, GenerationRequest
from nemorl.trajectories import StopReason

from .arguments import sampled_logprobs, sampling_params

logger = logging.getLogger(__name__)

_STOPS = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "timeout": StopReason.ABORT,
    "cancelled": StopReason.ABORT,
}


@dataclass(eq=False)
class _Flight:
    versions: list[tuple[int, int]]  # (first token, version) of each version that samples it
    received: int = 0  # tokens
    finder: StopStringFinder | None = None

    def take(self, sample: Any) -> Chunk:
        """What has come since, cut behind the token that completes a stop string."""
        first = self.received
        tokens = list(sample.token_ids[first:])
        logprobs = sampled_logprobs(tokens, sample.logprobs[first : first + len(tokens)])
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
    """One engine with all its workers. Belongs to one event loop; `start` comes first."""

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
        """Chunks of a request; closing the generator before its end aborts it.

        What the engine says is wrong with this request alone ends it with stop reason `error`.
        """
        prompt = {"prompt_token_ids": request.prompt.tolist()}
        output, stop = None, None
        try:
            params = sampling_params(request, self.limits.max_sequence_length)
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
            # A request that is not active has all its tokens from before, or none: what it had sampled has
            # come while the engine was paused.
            flight.versions.append((self._counts.get(number, flight.received), version))

    async def call(self, method: str, *args: Any) -> list[Any]:
        """A method on every worker; answers by rank. Raises EngineFailed, which names dead ranks."""
        try:
            answers: list[Any] = await self.llm.collective_rpc(method, args=args)
        except Exception as error:
            cause = getattr(error, "cause", error)  # Ray's wrapping has the complete stack
            raise EngineFailed(
                f"{self.name}: {await self._who_failed()} in {method}: {type(cause).__name__}: {cause}"
            ) from error
        return answers

    async def _who_failed(self) -> str:
        """The workers that do not answer any more, or all, where they do."""
        count = self.config.ranks_per_replica
        asked = (self.llm.collective_rpc("nemorl_device", unique_reply_rank=rank) for rank in range(count))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        dead = [rank for rank, answer in enumerate(answers) if isinstance(answer, BaseException)]
        if not dead:
            return "its workers failed"
        return f"worker{'s' * (len(dead) > 1)} of rank {', '.join(map(str, dead))} of {count} died"
