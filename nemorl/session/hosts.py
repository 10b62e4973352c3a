"""What runs in the process of an `openai` replica: a client of a server that somebody else runs.

What runs in a generation process: the engine's worker and its side of the weight exchange.

The policy's own processes as a generation back end, as one of their leaders sees it.

callers ─▶ EngineService ─▶ EngineLoop, in the thread that serves ─▶ BatchingEngine ─▶ LeadingRunner ─▶ all
ranks of the copy
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from nemorl.config.generation import MegatronGenerationConfig, OpenAIGenerationConfig, TorchGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.generation.async_engine import AsyncEngineWorker
from nemorl.generation.backends import text_of
from nemorl.generation.engine_thread import EngineLoop
from nemorl.generation.openai_client import OpenAIClient
from nemorl.generation.openai_engine import OpenAIBackend
from nemorl.generation.torch_engine.batching import BatchingEngine, RequestLimits
from nemorl.generation.types import EngineFailed, EngineHealth, EngineStats
from nemorl.generation.worker import EngineService, GenerationWorker
from nemorl.megatron.decode import DecodingCopy, LeadingRunner
from nemorl.models.shape import ModelShape
from nemorl.weights.endpoints import WeightReceiver
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout
from nemorl.weights.session import RefitDeadline, RefitSession


class GenerationHost(GenerationWorker):
    """A generation rank as the driver and the rollout workers call it. Lives in an event loop."""

    def __init__(
        self, config: TorchGenerationConfig, *, rank: int, commit_seconds: float, **options: Any
    ) -> None:
        """`commit_seconds` is the most that the swap of staged weights may wait for the engine's step."""
        super().__init__(config=config, rank=rank, **options)
        loop = asyncio.get_running_loop()

        def commit(version: int) -> None:
            # The receiver commits from a thread of its own, so that sampling goes on until the swap.
            swap = asyncio.run_coroutine_threadsafe(self.commit(version), loop)
            try:
                swap.result(commit_seconds)
            except TimeoutError as error:
                swap.cancel()
                raise RefitDeadline(
                    f"refit to version {version}: generation rank {rank} has received the weights, and its "
                    f"engine has not taken them within {commit_seconds:g} s (cluster.deadlines.refit)"
                ) from error

        self._receiver = WeightReceiver(self.slices(), self.staging_parameters, commit)

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        """What this engine's one rank needs, for the plan of the exchange."""
        return (self._receiver.describe(),)

    def prepare_refit(self, parts: tuple[Part, ...]) -> None:
        """Keep this rank's part of the plan."""
        (part,) = parts
        self._receiver.prepare(part)

    async def receive_weights(self, session: RefitSession) -> tuple[ReceiveReport, ...]:
        """This rank's side of a refit; the event loop goes on serving meanwhile."""
        return (await asyncio.to_thread(self._receiver.begin(session)),)

    async def commit_weights(self, version: int) -> None:
        """Sample with what was received."""
        await asyncio.to_thread(self._receiver.commit, version)

    def abandon_refit(self) -> None:
        """Stay on the version in use."""
        self._receiver.abandon()


class OpenAIHost(AsyncEngineWorker):
    """An `openai` replica as the driver and the rollout workers call it. Lives in an event loop."""

    def __init__(
        self,
        config: OpenAIGenerationConfig,
        *,
        rank: int,
        tokenizer_path: Path,
        max_sequence_length: int,
        **of_engines: Any,  # that have weights and devices here
    ) -> None:
        """Connects with the first request. Raises MissingKey, or EngineFailed without a tokenizer."""
        file = Path(tokenizer_path) / "tokenizer.json"
        if not file.is_file():
            raise EngineFailed(f"{tokenizer_path} holds no tokenizer.json, which text is encoded with")
        tokenizer = Tokenizer.from_file(str(file))
        self._client = OpenAIClient(
            config.base_url,
            api_key_env=config.api_key_env,
            max_concurrent=config.max_concurrent_requests,
            max_retries=config.max_retries,
        )
        backend = OpenAIBackend(
            config,
            self._client,
            encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False)),
            max_sequence_length=max_sequence_length,
        )
        super().__init__(backend, f"generation client {rank} of {config.base_url}")

    def health(self) -> EngineHealth:
        """Where the client stands. An answer comes in one piece, so that long ones are no hanging engine: a
        server that hangs is noticed by the deadlines of requests.
        """
        return replace(super().health(), seconds_since_step=0.0)

    async def stats(self) -> EngineStats:
        """What was done since the last call, with the retries."""
        return replace(await super().stats(), retries=self._client.take_metrics().retries)

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        """No weights are wanted."""
        return ()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class PolicySampler(EngineService):
    """Samples with a data-parallel copy of the policy, stage by stage; between stages requests wait."""

    def __init__(
        self,
        copy: DecodingCopy,
        policy: PolicyConfig,
        config: MegatronGenerationConfig,
        *,
        name: str,
        tokenizer_path: Path,
        device: torch.device,
    ) -> None:
        """In the process that leads `copy`; `name` is what errors call it."""
        shape = ModelShape.load(policy.model_path)
        decode = text_of(tokenizer_path)
        self._runner = LeadingRunner(copy, prefill_tokens=policy.micro_batch_tokens)
        self._engine = BatchingEngine(
            self._runner,
            RequestLimits(
                shape.vocab_size, policy.max_sequence_length, config.max_kv_tokens, decode is not None
            ),
            max_batch_size=config.max_batch_size,
            device=device,
            decode=decode,
            experts=self._runner.experts if policy.moe.router_replay else None,
        )
        super().__init__(self._engine, EngineLoop(self._engine, name, rest=self._runner.rest))

    def serve(self, version: int) -> None:
        """Sample in this thread with the weights in place, which are of `version`, until `stop`.

        What is still in flight then stays where it is until the next stage. Raises what ends the engine.
        """
        self._engine.weights_changed(version)
        self._loop.run()
        if not self._engine.num_running:
            self._runner.cache.release()
        self._runner.end()

    async def stop(self) -> None:
        """End the stage after the present step."""
        await asyncio.wrap_future(self._loop.leave())
