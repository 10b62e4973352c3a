"""The policy worker: one process of the policy, driven by method calls that all its processes receive.

load_hf ─▶ [ load_trajectories ─▶ compute_logprobs ─▶ train ... ─▶ sender.send ] ─▶ save_checkpoint
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemorl.data.batches import pack_examples, pack_trajectories, with_likelihood
from nemorl.data.losses import Loss, SequenceMetric, TokenEstimator, UpdateLoss
from nemorl.data.packed import PackedBatch, with_compared, with_turns
from nemorl.data.shards import ColumnShard, Field, Shard, TokenArray, rows_of, with_rows

from .model_rank import ModelRank
from .outputs import batch_outputs, batch_top, global_metrics, logprob_gap, over_data_parallel, value_metrics
from .packing import MicroBatch, check_batch
from .schedule import run_evaluation, run_training
from .stats import Evaluation, LogprobStats, TrainStats, ValueStats


class PolicyWorker(ModelRank):
    """A rank that trains on batches and evaluates them. Methods are collective unless they say otherwise."""

    _batch: PackedBatch | None = None

    # The batch

    def load_trajectories(self, shard: Shard) -> None:
        """Pack and keep this rank's trajectories; `shard.stores` are the lists themselves. Not collective."""
        batch = pack_trajectories(shard.sequences(), shard.advantages, shard.weights)
        if shard.likelihood is not None:
            batch = with_likelihood(batch, shard.likelihood)
        if shard.rewards is not None:
            batch = with_turns(batch, shard.sequences(), shard.rewards)
        self.load_batch(batch if shard.compared is None else with_compared(batch, shard.compared))

    def load_examples(self, shard: Shard) -> None:
        """Pack and keep this rank's examples. Not collective."""
        self.load_batch(pack_examples(shard.sequences(), shard.weights, shard.compared))

    def load_batch(self, batch: PackedBatch) -> None:
        """Keep this data-parallel rank's sequences; all its TP and PP ranks are given the same."""
        check_batch(batch, self._config.max_sequence_length)
        if not self._config.moe.router_replay:
            batch = replace(batch, routed_experts=None)
        elif batch.routed_experts is None and batch.loss_mask.any():
            raise ValueError(
                "policy.moe.router_replay is true, but the batch names no experts: the generation back end "
                "does not return them, so set it to false"
            )
        self._batch = batch.to(torch.device("cpu"))

    def take_advantages(self, shard: Shard) -> None:
        """Replace the advantages of the loaded batch. Not collective."""
        batch = pack_trajectories(shard.sequences(), shard.advantages, shard.weights)
        self._batch = replace(self.batch, advantages=batch.advantages)

    def share(self, required: bool, field: Field) -> list[TokenArray] | None:
        """A field of the batch as an array for each sequence, if `required`. Not collective."""
        return rows_of(self.batch, field) if required else None

    def take(self, shard: ColumnShard, field: Field) -> None:
        """Fill a field of the batch with what another group has shared. Not collective."""
        self._batch = with_rows(self.batch, field, shard.rows())

    def fill(
        self, sequences: list[int], compute: Callable[[PackedBatch, list[int]], Mapping[str, Tensor]]
    ) -> None:
        """Fill the fields that `compute` returns for these sequences of the batch. Not collective."""
        if sequences:
            self._batch = replace(self.batch, **compute(self.batch, sequences))

    def estimate(self, estimator: TokenEstimator) -> dict[str, float]:
        """Fill `advantages`, and `returns` for a critic; metrics of the estimator."""
        estimated = estimator(self.batch, self._sum_over_copies)
        self._batch = replace(self.batch, advantages=estimated.advantages, returns=estimated.returns)
        return estimated.metrics

    def sequence_metrics(self, metric: SequenceMetric) -> list[float]:
        """[S] a number for each sequence of this data-parallel rank. Not collective."""
        return metric(self.batch).tolist()

    # Computation

    def compute_logprobs(
        self, micro_batches: list[list[int]], *, old: bool, reference: bool, entropy: bool = False
    ) -> LogprobStats:
        """Fill `old_logprobs` (of the current weights) and `reference_logprobs`, where the mask is set.

        With `old` and `entropy` also `old_entropies`.

        The gap to the engine's logprobs is that of the current weights, so it is 0 without `old`.
        """
        self._offload.require_back()
        self._require_head("lm", "compute_logprobs")
        batch = self.batch
        made = self._make(batch, micro_batches)
        if reference:
            # The reference chooses experts by its own routers.
            own = replace(batch, routed_experts=None)
            made_of = made if batch.routed_experts is None else self._make(own, micro_batches)
            with self._kept_reference.in_place():
                batch = replace(batch, reference_logprobs=self._logprobs(batch, made_of))
        if old:
            logprobs, entropies = self._outputs(
                batch, made, [micro.scored for micro in made], entropy=entropy
            )
            batch = replace(batch, old_logprobs=logprobs, old_entropies=entropies)
        self._batch = batch
        return logprob_gap(batch, batch.old_logprobs if old else None, self._device)

    def compute_values(self, micro_batches: list[list[int]]) -> ValueStats:
        """Fill `values` of these sequences: what the scalar head says after each token."""
        self._offload.require_back()
        self._require_head("scalar", "compute_values")
        made = self._make(self.batch, micro_batches)
        everywhere = [torch.arange(micro.batch.num_tokens, device=self._device) for micro in made]
        values, _ = self._outputs(self.batch, made, everywhere)
        self._batch = replace(self.batch, values=values)
        return value_metrics(self._batch, self._device)

    def compute_top(self, micro_batches: list[list[int]], k: int) -> None:
        """Fill `top_ids` and `top_logprobs`: the k likeliest tokens at each place where the mask is set.

        All of them where there are no k.
        """
        self._offload.require_back()
        self._require_head("lm", "compute_top")
        ids, logprobs = batch_top(
            self._chunks,
            self.batch,
            self._make(self.batch, micro_batches),
            min(k, self._shape.vocab_size),
            temperature=self._temperature,
            device=self._device,
        )
        self._batch = replace(self.batch, top_ids=ids, top_logprobs=logprobs)

    def train(self, micro_batches: list[list[int]], loss: Loss) -> TrainStats:
        """One optimizer step over these sequences of the batch: a list of indices for each forward pass."""
        self._offload.require_back()
        batch = self.batch
        made = self._make(batch, micro_batches)
        self._routers.begin_step((micro.layout.routing for micro in made), self._device)
        self.optimizer.zero_grad()
        if loss.needs_entropy:
            self._require_head("lm", "a loss that needs the entropy")
        if isinstance(loss, UpdateLoss):
            minibatch = batch.select([sequence for micro in micro_batches for sequence in micro])
            loss = loss.prepared(minibatch, partial(over_data_parallel, device=self._device))
        outputs = run_training(self._chunks, made, loss, self._temperature)
        step = self.optimizer.step()
        sums, maxima = global_metrics(outputs, self._device)
        tokens = torch.tensor(
            [sum(micro.batch.num_tokens for micro in made), sum(micro.num_computed for micro in made)],
            device=self._device,
        )
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        num_tokens, num_computed = tokens.tolist()
        moe = self._shape.moe
        experts = self._routers.load(moe.num_experts, self._device) if moe else None
        return TrainStats(
            sums,
            maxima,
            step.grad_norm,
            step.lr,
            step.skipped,
            step.empty,
            num_tokens,
            num_computed,
            experts,
        )

    def evaluate(self, micro_batches: list[list[int]], loss: Loss) -> Evaluation:
        """The loss of these sequences under the current weights, which do not change."""
        self._offload.require_back()
        if loss.needs_entropy:
            self._require_head("lm", "a loss that needs the entropy")
        outputs = run_evaluation(self._chunks, self._make(self.batch, micro_batches), loss, self._temperature)
        return Evaluation(*global_metrics(outputs, self._device))

    def sequence_logprobs(self, micro_batches: list[list[int]], *, reference: bool) -> list[float]:
        """[S] sums of the logprobs of each sequence's masked tokens, of this data-parallel rank's batch.

        Under the weights as they are, or the reference's. Sequences that are not named have 0.
        """
        self._offload.require_back()
        self._require_head("lm", "sequence_logprobs")
        batch, made = self.batch, self._make(self.batch, micro_batches)
        with self._kept_reference.in_place() if reference else nullcontext():
            logprobs = self._logprobs(batch, made)
        return [float(part.double().sum()) for part in logprobs.split(batch.lengths)]

    @property
    def batch(self) -> PackedBatch:
        """The batch that was loaded, with the logprobs that were computed."""
        if self._batch is None:
            raise RuntimeError("no batch was loaded: call load_batch before compute_logprobs and train")
        return self._batch

    def _sum_over_copies(self, values: Tensor) -> Tensor:
        total = values.to(self._device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.cpu()

    def _make(self, batch: PackedBatch, micro_batches: list[list[int]]) -> list[MicroBatch]:
        return [self._maker.make(batch, sequences) for sequences in micro_batches]

    def _logprobs(self, batch: PackedBatch, made: list[MicroBatch]) -> Tensor:
        """Logprobs [N] under the weights in place, on the CPU; 0 in sequences that are not named."""
        return self._outputs(batch, made, [micro.scored for micro in made])[0]

    def _outputs(
        self, batch: PackedBatch, made: list[MicroBatch], positions: list[Tensor], *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return batch_outputs(
            self._chunks,
            batch,
            made,
            positions,
            temperature=self._temperature,
            device=self._device,
            entropy=entropy,
        )

    def _require_head(self, head: str, method: str) -> None:
        if self._shape.head != head:
            raise RuntimeError(
                f"{method} requires a model with policy.head {head!r}, and this one has {self._shape.head!r}"
            )
