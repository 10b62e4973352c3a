"""The policy's own processes as a generation back end.

callers ─▶ StepDriver, in the thread that serves ─▶ BatchingEngine ─▶ LeadingRunner ─▶ all ranks of the copy
"""

from pathlib import Path
from typing import Any

import torch

from nemorl.config.generation import MegatronGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.megatron.decode import DecodingCopy, LeadingRunner
from nemorl.megatron.worker import PolicyWorker
from nemorl.models.registry import load_shape

from .batching import BatchingEngine
from .step_driver import StepDriver
from .tokens import RequestLimits, load_decoder


class PolicySampler(StepDriver):
    """Samples with a data-parallel copy of the policy, stage by stage; between stages sequences wait."""

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
        """In the process that leads `copy`; `name` is its name in errors."""
        vocabulary, decode = load_shape(policy.model_path).vocab_size, load_decoder(tokenizer_path)
        runner = self._runner = LeadingRunner(copy, prefill_tokens=policy.micro_batch_tokens)
        limits = RequestLimits(vocabulary, policy.max_sequence_length, config.max_kv_tokens, decode)
        experts = runner.experts if policy.moe.router_replay else None
        engine = BatchingEngine(runner, limits, config, device=device, experts=experts)
        super().__init__(engine, name, rest=runner.rest)

    def serve(self, version: int) -> None:
        """Sample in this thread with the weights in place, which are of `version`, until `stop`."""
        self._engine.revive(version)
        self.run()
        self._engine.suspend()
        self._runner.cache.release()
        self._runner.end()


class SamplingPolicyWorker(PolicyWorker):
    """A policy rank whose data-parallel copy samples while `serve` runs: the leader has the `sampler`."""

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
        self.sampler: PolicySampler | None = None
        if self._decoding.leads:
            self.sampler = PolicySampler(
                self._decoding,
                config,
                generation,
                name=f"generation by policy rank {rank}",
                tokenizer_path=tokenizer_path,
                device=self.device,
            )

    def serve(self, version: int) -> None:
        with self.sampling():
            if self.sampler is None:
                self._decoding.follow()
            else:
                self.sampler.serve(version)
