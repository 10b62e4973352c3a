"""One step of every online algorithm.

    Collector ─groups─▶ filter ─▶ prepare ─Batch─▶ train ─version n+1─▶ engines ─┐
        ▲                                                                        │
        └────────────── may start groups of the next step ◀──────────────────────┘

With `max_staleness` 0 the collector starts nothing before the engines have the new weights; a larger number
lets it run ahead. Token arrays go from process to process; this module has handles and metrics. A reference
without processes of its own is the policy with its first weights.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from nemorl.cluster.errors import ClusterError
from nemorl.config.algorithm import OnlineBase
from nemorl.data.losses import Loss, TrainStats
from nemorl.data.shards import Column, Field, SequencePlace
from nemorl.data.trained import Trained
from nemorl.errors import RunError
from nemorl.observe.observer import Observer
from nemorl.observe.timeline import Stage
from nemorl.plan.utilization import ModelWork
from nemorl.rollout.collector import Collector
from nemorl.rollout.groups import GroupSummary
from nemorl.rollout.schedule import DataPlace
from nemorl.rollout.stored import SequenceKey, TrajectoryLog, sequence_rows
from nemorl.rollout.versions import Lineage
from nemorl.session.session import Session

from .filters import filter_groups, with_truncated_rewards
from .metrics import (
    LogprobGate,
    Sources,
    dropped_metrics,
    environment_share,
    optimizer_metrics,
    rollout_metrics,
    rows_of,
    samples_of,
)
from .policy_losses import value_metrics
from .teachers import Answer, TeacherCalls, Teachers
from .token_advantages import SequenceKL, TokenEstimator

logger = logging.getLogger(__name__)

T = TypeVar("T")
Groups = list[GroupSummary]
Fields = list[tuple[Field, Column]]  # of other models, for the policy's batch


@dataclass(frozen=True)
class RewardPenalty:
    divergence: SequenceKL  # subtracted from rewards before advantages are estimated
    estimate: Callable[[Sequence[float]], Sequence[SequencePlace]]  # from the divergence of each sequence


@dataclass(frozen=True)
class Batch:
    """What one step trains on: handles of the sequences with their weights, and what is to be computed."""

    sequences: Sequence[SequencePlace]
    sampled_by: range  # versions of the weights that sampled the tokens
    losses: Mapping[str, Loss]  # by model, in the order of training: "critic", "policy"
    schedule: Sequence[int]  # the minibatch of each update; empty if nothing trains
    num_updates: int  # of a step of which everything trains
    num_minibatches: int = 1  # equal parts of the sequences
    critic_sequences: Sequence[SequencePlace] = ()  # the same sequences with the weights of the critic's loss
    needs_reference: bool = False
    needs_old_logprobs: bool = False
    needs_old_entropies: bool = False
    needs_old_collisions: bool = False
    token_estimator: TokenEstimator | None = None  # of advantages that differ between tokens
    penalty: RewardPenalty | None = None
    teachers: Sequence[str] = ()  # the teacher of each sequence, for distillation
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def left_out(self) -> int:  # updates that are not made because nothing in their minibatch trains
        return self.num_updates - len(self.schedule)


class Update(Protocol):
    """What differs between online algorithms: what is learned from a step's groups."""

    def prepare(self, groups: Sequence[GroupSummary], number: int, lineage: Lineage, /) -> Batch:
        """The batch of a step; filters and errors may leave nothing that trains."""

    def metrics(self, updates: Sequence[TrainStats], /) -> dict[str, float]:
        """Metrics of the policy's loss over the updates of a step, at least one."""


@dataclass
class OnlineAlgorithm:
    config: OnlineBase
    session: Session
    collector: Collector
    update: Update
    gate: LogprobGate
    observer: Observer
    cancellable: Callable[[Coroutine[Any, Any, Groups]], Awaitable[Groups]]  # by a stop request of the run
    teachers: Teachers | None = None
    sources: Sources | None = None  # of a mixture
    trajectories: TrajectoryLog | None = None
    work: ModelWork | None = None  # of the policy, where its engines sample
    _warned: bool = field(default=False, init=False)  # of a trajectory's error

    @property
    def place(self) -> DataPlace:
        return self.collector.place

    def rewind(self, step: int, place: DataPlace) -> None:
        """Continue after an earlier step, whose weights the models and the engines have again."""
        self.collector.rewind(step, place, self.session.lineage)
        if self.trajectories is not None:
            self.trajectories.files.remove_after(step)

    async def step(self, number: int) -> dict[str, float]:
        """Sample, learn, update the engines; metrics. Raises RunError if a limit of the config is passed."""
        async with self.session.generating():
            self.collector.advance(number - 1)
            groups = await self.cancellable(self._sample())
        filtered = filter_groups(groups, self.config.filters, self.config.num_prompts_per_step)
        lineage = self.session.lineage
        kept = with_truncated_rewards(filtered.groups, self.config.truncated_reward)
        batch = self.update.prepare(kept, number, lineage)
        metrics = rollout_metrics(groups, lineage.version(number - 1), lineage) | filtered.metrics
        if self.work is not None:
            sampled = [[(t.num_tokens, t.num_sampled) for t in g.sequences] for g in groups]
            metrics["flops/generation"] = self.work.generation(sampled)
        metrics |= await self.train(batch, number)
        async with _while_running(self._store(number, groups, batch)) as storing:
            if self.session.pinned.locked():
                with self.observer.stage("validation_wait", waits_for="validation"):
                    async with self.session.pinned:
                        pass  # a validation samples with the version before
            with self.observer.stage("refit"):
                metrics |= await self.session.update_weights(number)
            with self.observer.stage("recording"):
                stored, trained = await storing
        metrics |= await self.session.generation_metrics()
        # Last, so that a step that fails leaves them to its repetition.
        metrics |= self.collector.take_order_metrics()
        if self.sources is not None:
            metrics |= self.sources.metrics(groups)
        dropped, num_given_up = self.collector.take_dropped()
        if self.config.max_staleness or self.config.oversampling > 1 or self.config.group_seconds or dropped:
            metrics |= dropped_metrics(dropped, num_given_up, groups)
        self.observer.samples(list(samples_of(number, groups, "training")))
        rows = rows_of(number, groups, "training", trained=trained, stored=stored)
        self.observer.trajectories(list(rows))
        return metrics

    async def _store(
        self, number: int, groups: Groups, batch: Batch
    ) -> tuple[set[int], dict[SequenceKey, Trained] | None]:
        """Write a step's trajectories; numbers of the groups that are stored, and what was trained.

        What cannot be written costs a warning.
        """
        if (log := self.trajectories) is None:
            return set(), None
        kept = log.kept(groups)
        estimated = batch.sequences if batch.token_estimator is None else ()
        advantages = {(s.store, s.row): s.advantage for s in estimated}
        written, trained = await asyncio.gather(
            log.write(number, kept, advantages), self._record_trained(number, kept, batch, log)
        )
        return {group.group for group in kept} if written else set(), trained

    async def _record_trained(
        self, number: int, stored: Groups, batch: Batch, log: TrajectoryLog
    ) -> dict[SequenceKey, Trained]:
        """What was trained of the batch's sequences; nothing if the policy's processes do not answer."""
        if not batch.schedule:
            return {}
        names = {
            (group.reference, row): f"{group.group}/{place}"
            for group in stored
            for place, row in enumerate(sequence_rows(group))
        }
        keys = [(s.store, s.row) for s in batch.sequences]
        kept = {place: names[key] for place, key in enumerate(keys) if key in names}
        trained: Sequence[Trained] = ()
        try:
            trained, problem = await self.session.learner.record(kept, log.files.folder.absolute(), number)
        except ClusterError:  # the next call to them reports the cause
            problem = "the policy's processes did not answer"
        if problem:
            logger.warning("What was trained in step %d was not stored: %s", number, problem)
        return dict(zip(keys, trained, strict=bool(trained)))

    async def train(self, batch: Batch, number: int) -> dict[str, float]:
        """All updates of a step; returns their metrics. No model is called if nothing trains."""
        metrics = dict(batch.metrics)
        if not batch.schedule:
            return metrics | (optimizer_metrics([], batch.left_out) if "policy" in batch.losses else {})
        policy, models, stage = self.session.learner, self.session.models, self.observer.stage
        version = self.session.lineage.version(number - 1)
        with stage("loading"):
            loaded = [name for name in ("policy", "critic") if name in models]
            await asyncio.gather(*(self._load(name, batch) for name in loaded))
        gap = await self._compute_fields(batch, number)
        if batch.token_estimator is not None:
            with stage("advantages"):
                metrics |= await policy.estimate(batch.token_estimator)
                if batch.critic_sequences:
                    await models["critic"].take("returns", await policy.share("returns"))
        if batch.penalty is not None:
            with stage("advantages"):
                divergences = await policy.sequence_metrics(batch.penalty.divergence)
                await policy.take_advantages(batch.penalty.estimate(divergences))
                trained = sum(sequence.weight > 0 for sequence in batch.sequences)
                coefficient = batch.penalty.divergence.kl.coefficient
                metrics["kl/penalty"] = coefficient * sum(divergences) / max(1, trained)
        total = len(batch.losses) * len(batch.schedule)
        with stage("training", total=total, unit="updates") as progress:
            updates = await self._updates(batch, progress)
        if "critic" in updates:
            metrics |= value_metrics(updates["critic"])
        if "policy" in updates:
            metrics |= self.update.metrics(updates["policy"])
            if "logprob_gap/mean" in metrics:
                self.gate.check(metrics, batch.sampled_by, version)
            metrics |= optimizer_metrics(updates["policy"], batch.left_out) | policy.packing_metrics()
        return metrics | gap

    async def _compute_fields(self, batch: Batch, number: int) -> dict[str, float]:
        """Logprobs and values before the update, of all models at the same time.

        Returns the policy's logprob gap, and the operations of these passes.
        """
        policy, models, stage = self.session.learner, self.session.models, self.observer.stage
        has_reference = batch.needs_reference and "reference" in models
        version = self.session.lineage.version(number - 1)
        gap: dict[str, float] = {}
        flops = dict.fromkeys(("flops/logprobs", "flops/reference", "flops/values"), 0.0)

        async def logprobs() -> Fields:
            with stage("logprobs"):
                if batch.needs_old_logprobs or self.gate.due(number):
                    compared = await policy.logprobs(
                        old=True,
                        reference=False,
                        entropy=batch.needs_old_entropies,
                        collision=batch.needs_old_collisions,
                    )
                    gap["logprob_gap/mean"], gap["logprob_gap/max"] = compared.gap_mean, compared.gap_max
                    flops["flops/logprobs"] = compared.flops
                    if batch.sampled_by.start >= version:  # else the update shows the gap by age
                        self.gate.check(gap, batch.sampled_by, version)
                    if not batch.needs_old_logprobs:
                        await self._load("policy", batch)  # without the old logprobs, as in every other step
                if batch.needs_reference and not has_reference:
                    scored = await policy.logprobs(old=False, reference=True)
                    flops["flops/reference"] = scored.reference_flops
            return []

        async def of_reference() -> Fields:
            await self._load("reference", batch)
            scored = await models["reference"].logprobs(old=True, reference=False)
            flops["flops/reference"] = scored.flops
            return [("reference_logprobs", await models["reference"].share("old_logprobs"))]

        async def reference_logprobs() -> Fields:
            with stage("reference"):
                return await models["reference"].outlasting(of_reference)

        async def values() -> Fields:
            with stage("values"):
                flops["flops/values"] = (await models["critic"].values()).flops
                return [("values", await models["critic"].share("values"))]

        async def answer(call: Callable[[], Awaitable[Answer]]) -> Answer:
            with stage("teachers"):
                return await call()

        work: list[tuple[str, Callable[[], Awaitable[Any]]]] = [("policy", logprobs)]
        work += [("reference", reference_logprobs)] if has_reference else []
        work += [("critic", values)] if batch.critic_sequences else []
        num_models, asked = len(work), TeacherCalls()
        if self.teachers is not None:
            asked = self.teachers.asked(batch.sequences, batch.teachers, "trajectories")
        work += [(name, partial(answer, call)) for name, call in asked.calls]

        async def take(results: Sequence[Any]) -> None:
            columns = asked.columns(results[num_models:])
            for name, column in itertools.chain(*results[:num_models], columns):
                await policy.take(name, column)

        await self.session.run_and_take(work, take)
        return gap | {name: count for name, count in flops.items() if count}

    async def _sample(self) -> Groups:
        count = self.config.num_prompts_per_step
        waiting = self.observer.stage("generation", total=count, unit="groups", waits_for="generation")
        with waiting as stage:
            groups = await self.collector.next_batch(stage.advance)
            stage.share("environment", environment_share(groups))
        errors = [t.error for group in groups for t in group.trajectories]
        if all(errors):
            problem = f"all {len(errors)} trajectories of a step failed, so there is nothing to learn from"
            raise RunError(f"{problem}. The first error: {errors[0]}")
        first = next((error for error in errors if error is not None), None)
        if first is not None and not self._warned:
            self._warned = True  # the number of errors is in every step's line
            count = sum(error is not None for error in errors)
            logger.warning("%d of %d trajectories failed. The first error: %s", count, len(errors), first)
        return groups

    async def _load(self, name: str, batch: Batch) -> None:
        parts = batch.num_minibatches
        sequences = batch.critic_sequences if name == "critic" else batch.sequences
        await self.session.models[name].load(sequences, kind="trajectories", num_minibatches=parts)

    async def _updates(self, batch: Batch, progress: Stage) -> dict[str, list[TrainStats]]:
        """The updates by model."""

        async def train(name: str, loss: Loss) -> list[TrainStats]:
            updates = []
            for place, minibatch in enumerate(batch.schedule):
                is_first = minibatch not in batch.schedule[:place]
                keep = self.trajectories is not None and name == "policy" and is_first
                updates.append(await self.session.models[name].train(loss, minibatch, keep=keep))
                progress.advance(tokens=updates[-1].num_tokens if name == "policy" else 0)
            return updates

        work = [(name, partial(train, name, loss)) for name, loss in batch.losses.items()]
        updates = await self.session.run_models(work)
        return dict(zip(batch.losses, updates, strict=True))


@asynccontextmanager
async def _while_running(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Do this work at the same time; it is cancelled if the block fails."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
