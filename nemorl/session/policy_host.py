"""What runs in a policy process: the Megatron worker, its batches and its side of the weight exchange.

What runs in a policy process that samples too.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemorl.cluster.placement import own_gpus
from nemorl.config.auxiliary import EndpointTeacherConfig
from nemorl.config.generation import MegatronGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.batches import pack_examples, pack_trajectories, with_likelihood
from nemorl.data.losses import Loss, SequenceMetric, TokenEstimator
from nemorl.data.packed import with_compared, with_turns
from nemorl.generation.front import PauseMode
from nemorl.generation.megatron_engine import PolicySampler
from nemorl.generation.types import Completion, EngineHealth, EngineStats, GenerationRequest, Report
from nemorl.megatron.stats import Evaluation, TrainStats
from nemorl.megatron.worker import PolicyWorker
from nemorl.weights.endpoints import WeightSender
from nemorl.weights.messages import Part, SenderLayout, SendReport
from nemorl.weights.session import RefitSession

from .endpoints import EndpointTeacher
from .shard import ColumnShard, Field, Shard, rows_of, with_rows


class PolicyHost(PolicyWorker):
    """A policy rank as the driver calls it."""

    def __init__(self, config: PolicyConfig, *, rank: int, **options: Any) -> None:
        super().__init__(config, rank=rank, **options)
        self.load_hf(config.model_path)
        self._shared: dict[Field, ray.ObjectRef | None] = {}  # references that are held for their readers
        # Engines take weights with adapters in them, or adapters: what one does not ask for is not computed.
        self._sender = WeightSender((*self.slices(), *self.adapter_slices()), self.merged_parameters)

    def gpus(self) -> tuple[str, ...]:
        """What this process computes on, by the names that CUDA_VISIBLE_DEVICES takes."""
        return own_gpus()

    def load_trajectories(self, shard: Shard) -> None:
        """Pack and keep this rank's trajectories; the shard's references have been resolved."""
        batch = pack_trajectories(shard.sequences(), shard.advantages, shard.weights)
        if shard.likelihood is not None:
            batch = with_likelihood(batch, shard.likelihood)
        if shard.rewards is not None:
            batch = with_turns(batch, shard.sequences(), shard.rewards)
        self.load_batch(batch if shard.compared is None else with_compared(batch, shard.compared))

    def load_examples(self, shard: Shard) -> None:
        """Pack and keep this rank's examples."""
        self.load_batch(pack_examples(shard.sequences(), shard.weights, shard.compared))

    def train_on(self, micro_batches: list[list[int]], loss: Loss) -> TrainStats:
        """`train` with this rank's share of the minibatch first, as sharded calls give it."""
        return self.train(loss, micro_batches)

    def evaluate_on(self, micro_batches: list[list[int]], loss: Loss) -> Evaluation:
        """`evaluate` with this rank's share first."""
        return self.evaluate(loss, micro_batches)

    def take_advantages(self, shard: Shard) -> None:
        """New advantages for the batch that was loaded; the rest of it stays as it is."""
        batch = pack_trajectories(shard.sequences(), shard.advantages, shard.weights)
        self._batch = replace(self.batch, advantages=batch.advantages)

    def share(self, mine: bool, field: Field) -> ray.ObjectRef | None:
        """Store a field of the batch for other groups; a reference to its list of arrays, if `mine`."""
        self._shared[field] = ray.put(rows_of(self.batch, field)) if mine else None
        return self._shared[field]

    def take(self, shard: ColumnShard, field: Field) -> None:
        """Fill a field of the batch with what another group has shared."""
        self._batch = with_rows(self.batch, field, shard.rows())

    def estimate(self, estimator: TokenEstimator) -> dict[str, float]:
        """Fill `advantages`, and `returns` for a critic; metrics of the estimator."""
        found = estimator(self.batch, self._sum_over_copies)
        self._batch = replace(self.batch, advantages=found.advantages, returns=found.returns)
        return found.metrics

    def ask_teacher(
        self,
        sequences: list[int],
        config: EndpointTeacherConfig,
        name: str,
        top_k: int | None,
        seconds: float,
    ) -> None:
        """Fill the teacher's fields of these sequences of the batch with what a server says."""
        if sequences:
            teacher = EndpointTeacher(config, name)
            scored = asyncio.run(teacher.score(self.batch, sequences, top_k, seconds))
            self._batch = replace(self.batch, **scored)

    def sequence_metrics(self, metric: SequenceMetric) -> list[float]:
        """[S] a number for each sequence of this data-parallel rank."""
        return metric(self.batch).tolist()

    def _sum_over_copies(self, values: Tensor) -> Tensor:
        total = values.to(self.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.cpu()

    def describe_weights(self) -> SenderLayout:
        """What this rank holds, for the plan of the exchange."""
        return self._sender.describe()

    def prepare_refit(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._sender.prepare(part)

    def send_weights(self, session: RefitSession) -> SendReport:
        """This rank's side of a refit."""
        return self._sender.send(session)


class SamplingPolicyHost(PolicyHost):
    """A policy rank whose copy samples while `serve` runs.

    The leader of a copy answers requests, in its process's event loop while `serve` runs in the thread of the
    other methods; the other ranks only follow.
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
        """Sample with the weights in place, of `version`, until the leaders receive the stop request."""
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
        """See `EngineFront`; what arrives between stages waits for the next one."""
        async with aclosing(self._sampler.generate_batches(requests)) as batches:
            async for batch in batches:
                yield batch

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Completion, None]:
        """See `EngineFront`."""
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
        """Continue sampling."""
        await self._sampler.resume()

    async def stats(self) -> EngineStats:
        """What was done since the last call."""
        return await self._sampler.stats()

    async def health(self) -> EngineHealth:
        """State of the engine. Raises EngineFailed, with its cause, if it is dead."""
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
