"""What runs in a policy process that samples too."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from nemorl.config.generation import MegatronGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.generation.engine_thread import PauseMode
from nemorl.generation.types import Completion, EngineHealth, EngineStats, GenerationRequest, Report

from .megatron_generation import PolicySampler
from .policy_host import PolicyHost


class SamplingPolicyHost(PolicyHost):
    """A policy rank whose copy samples while `serve` runs.

    The leader of a copy answers requests, from an event loop beside the thread of its other methods (see
    `nemorl.cluster.actor.ServingHost`); the other ranks only follow.
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        rank: int,
        generation: MegatronGenerationConfig,
        tokenizer_path: Path,
        **options: Any,
    ) -> None:
        super().__init__(config, rank=rank, **options)
        self._decoding = self.decoding_copy(generation.max_kv_tokens)
        self._leader: PolicySampler | None = None
        if self._decoding.leads:
            self._leader = PolicySampler(
                self._decoding,
                config,
                generation,
                name=f"generation by policy rank {rank}",
                tokenizer_path=tokenizer_path,
                device=self.device,
            )

    def serve(self, version: int) -> None:
        """Sample with the weights in place, which are of `version`, until the leaders are told to stop."""
        if self._leader is None:
            self._decoding.follow()
        else:
            self._leader.serve(version)

    async def stop_serving(self) -> None:
        """End the stage; of leaders."""
        await self._sampler.stop()

    async def generate_batches(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[Sequence[Report], None]:
        """See `EngineService`; what arrives between stages waits for the next one."""
        async with aclosing(self._sampler.generate_batches(requests)) as batches:
            async for batch in batches:
                yield batch

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Completion, None]:
        """See `EngineService`."""
        async with aclosing(self._sampler.generate_many(requests)) as completions:
            async for completion in completions:
                yield completion

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; those in flight are answered with what they have and stop reason `abort`."""
        await self._sampler.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Return when no step runs or will run; requests that arrive meanwhile wait for `resume`."""
        await self._sampler.pause(mode)

    async def resume(self) -> None:
        """Go on sampling."""
        await self._sampler.resume()

    async def stats(self) -> EngineStats:
        """What was done since the last call."""
        return await self._sampler.stats()

    def health(self) -> EngineHealth:
        """Where the engine stands. Raises EngineFailed, with its cause, if it is dead."""
        return self._sampler.health()

    @property
    def version(self) -> int:
        """The version of the weights that sample."""
        return self._sampler.version

    @property
    def _sampler(self) -> PolicySampler:
        if self._leader is None:
            raise RuntimeError(f"policy rank {self._decoding.leader} leads this copy and answers for it")
        return self._leader
