"""Rollout worker: samples groups, scores them, keeps the trajectories and returns summaries."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from nemorl.config.algorithm import OnlineBase
from nemorl.config.experiment import Experiment
from nemorl.config.generation import SamplingConfig
from nemorl.data.datasets import load_tasks
from nemorl.data.tokenizer import load_tokenizer, prompts_of
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import Generator, SamplingParams
from nemorl.rewards.compose import Rewards
from nemorl.rewards.scored import Attempts, Service
from nemorl.trajectories import Conversation, EnvironmentFactory, EnvironmentLost, Task, Trajectory

from .concurrency import Places, PlacesUse, share_of_worker
from .groups import (
    Dropped,
    DropReason,
    GroupAssignment,
    GroupSummary,
    SampleText,
    last_answer,
    misses_deadline,
    summarize,
)
from .turn_loop import ConversationFailed, Record, SampleKey, TurnLimits, TurnLoop

Store = Callable[[list[Trajectory]], Any]


@dataclass(eq=False)
class _Running:
    assignment: GroupAssignment
    records: Sequence[Record]
    work: asyncio.Task[GroupSummary | Dropped]
    dropped_for: DropReason | None = None  # and is cancelled for it

    def drop(self, reason: DropReason) -> None:
        self.dropped_for = reason
        self.work.cancel()


class GroupRunner(ABC):
    """Samples groups in one event loop, and ends those that became too old."""

    is_up = True  # in the process of its caller

    def __init__(self) -> None:
        self._running: set[_Running] = set()
        self._num_stale = 0  # groups that were ended for their age since the last report

    async def run_groups(
        self, assignments: Sequence[GroupAssignment]
    ) -> AsyncGenerator[GroupSummary | Dropped, None]:
        """Yield each group's summary when it has ended. Raises RewardError, or a failure of the generator."""
        groups = [asyncio.ensure_future(self._run_or_drop(a)) for a in assignments]
        try:
            for finished in asyncio.as_completed(groups):
                yield await finished
        finally:
            for group in groups:
                group.cancel()

    async def abort_stale(self, oldest: int) -> None:
        """Drop the training groups with a token that was sampled by weights older than version `oldest`."""
        for running in self._training_groups():
            versions = [r.oldest_version for r in running.records if r.oldest_version is not None]
            if min(versions, default=oldest) < oldest:
                running.drop("aborted")
                self._num_stale += 1

    async def abort_groups(self, groups: Collection[int]) -> None:
        """Drop these training groups, as far as they run."""
        for running in self._training_groups():
            if running.assignment.group in groups:
                running.drop("cut_off")

    def _training_groups(self) -> list[_Running]:
        return [running for running in self._running if not running.assignment.validation]

    def queues(self) -> dict[str, float]:
        """What is in progress here, for a stall report; called from any thread."""
        running = tuple(self._running)
        tokens = sum(record.num_sampled for one in running for record in one.records)
        return {"groups": len(running), "tokens_sampled": tokens}

    async def _run_or_drop(self, assignment: GroupAssignment) -> GroupSummary | Dropped:
        # The additional sample is greedy.
        records = [Record() for _ in range(assignment.num_samples + assignment.greedy_baseline)]
        work = asyncio.ensure_future(self._run_group(assignment, records))
        running = _Running(assignment, records, work)
        self._running.add(running)
        try:
            return await work
        except asyncio.CancelledError:
            if running.dropped_for is None:
                raise
            return Dropped(assignment.group, running.dropped_for, tuple(r.num_sampled for r in records))
        finally:
            self._running.discard(running)

    @abstractmethod
    async def _run_group(
        self, assignment: GroupAssignment, records: Sequence[Record]
    ) -> GroupSummary | Dropped:
        """Sample and score a group; `records` are its conversations while they grow."""


class RolloutWorker(GroupRunner):
    """Runs turn loops, environments and rewards in one event loop; imports neither torch nor Ray."""

    def __init__(self, experiment: Experiment, generator: Generator, store: Store) -> None:
        """`store` keeps trajectories by reference. Raises DatasetError, TokenizerError or RewardError."""
        super().__init__()
        self._seed, self._store, data = experiment.seed, store, experiment.data
        self._tasks = load_tasks(data.train, data)
        held_out = ({} if data.validation is None else {"": data.validation}) | data.validation_sets
        self._held_out = {name: load_tasks(dataset, data) for name, dataset in held_out.items()}
        sampling, validation = experiment.generation.sampling, experiment.algorithm.validation
        self._votes = bool(validation.cons_at_k)
        self._sampling = {False: _params(sampling), True: _params(validation.sampling or sampling)}
        self._tokenizer = load_tokenizer(experiment.policy)
        self._env, deadlines = experiment.env, experiment.cluster.deadlines
        self._environments: EnvironmentFactory = experiment.env.make_factory()
        weights, outage_seconds = self._environments.reward_weights, deadlines.outage_seconds
        self._rewards = Rewards(experiment.rewards, weights, data.chat, deadlines.environment, outage_seconds)
        limits = TurnLimits(
            max_sequence_length=experiment.policy.max_sequence_length,
            max_new_tokens=experiment.generation.max_new_tokens,
            stop_token_ids=self._tokenizer.end_token_ids | set(experiment.generation.stop_token_ids),
            stop_strings=experiment.generation.stop_strings,
            generation_seconds=deadlines.generation,
            environment_seconds=deadlines.environment,
        )
        algorithm = experiment.algorithm
        self._group_seconds = algorithm.group_seconds if isinstance(algorithm, OnlineBase) else None
        self._min_members = algorithm.min_members if isinstance(algorithm, OnlineBase) else 1
        generation, num_workers = experiment.generation, experiment.cluster.rollout_workers
        self._places: Places | None = None  # without a limit
        if (per_engine := generation.initial_concurrency) is not None:
            self._places = Places(share_of_worker(per_engine * generation.replicas, num_workers))
        self._calls = Service(f"environment `{experiment.env.name}`")  # single ones, for stall reports
        self._episodes = Service(self._calls.name, outage_seconds)
        prompts = prompts_of(self._tokenizer, data.chat)
        self._turns = TurnLoop(generator, self._tokenizer, prompts, limits, self._calls)

    async def set_concurrency(self, limit: int) -> PlacesUse:
        """Set the trajectories of training that are sampled at a time, and report them."""
        assert self._places is not None, "generation.concurrency sets no limit"
        self._places.resize(limit)
        num_stale, self._num_stale = self._num_stale, 0
        return replace(self._places.use, num_stale=num_stale)

    def service_calls(self) -> list[tuple[str, int, float]]:
        """Of each service with calls: their number, and seconds without an answer; from any thread."""
        states = [(one.name, *one.waits()) for one in (self._calls, *self._rewards.services)]
        return [state for state in states if state[1]]

    async def close(self) -> None:
        await self._rewards.close()
        await self._environments.close()

    async def _run_group(
        self, assignment: GroupAssignment, records: Sequence[Record]
    ) -> GroupSummary | Dropped:
        tasks = self._held_out[assignment.validation_set] if assignment.validation else self._tasks
        task, seconds = tasks[assignment.task_index], None if assignment.validation else self._group_seconds
        samples = (self._run_sample(task, assignment, n, record, seconds) for n, record in enumerate(records))
        conversations = await asyncio.gather(*samples)
        members = [c.trajectory for c in conversations[: assignment.num_samples]]
        lengths = tuple(record.num_sampled for record in records)
        if misses_deadline(members, self._min_members):
            return Dropped(assignment.group, "deadline", lengths)
        drops = not assignment.validation  # if anything failed
        if drops and self._env.on_error == "drop_group" and any(record.failure for record in records):
            return Dropped(assignment.group, "failed", lengths)
        scored = await self._rewards.apply(task, conversations)
        if drops and scored.is_dropped:
            return Dropped(assignment.group, "failed", lengths)
        rows = enumerate(zip(scored.trajectories, records, strict=True))
        summaries = [
            replace(
                summarize(trajectory, row, record.num_unfinished),
                environment_failed=record.failure is not None,
                num_retries=record.num_retries,
            )
            for row, (trajectory, record) in rows
        ]
        summaries, greedy = summaries[: assignment.num_samples], summaries[assignment.num_samples :]
        if assignment.validation and self._votes:
            sampled = conversations[: assignment.num_samples]
            answers = await asyncio.gather(*(last_answer(c, self._environments) for c in sampled))
            summaries = [replace(s, answer=answer) for s, answer in zip(summaries, answers, strict=True)]
        texts, decode = [], self._tokenizer.decode
        for row, c in enumerate(conversations[: assignment.num_texts]):
            tokens, split = c.trajectory.tokens.tolist(), c.num_prompt_tokens
            texts.append(SampleText(row, decode(tokens[:split]), decode(tokens[split:]), task.answer))
        return GroupSummary(
            group=assignment.group,
            task_index=assignment.task_index,
            reference=self._store(scored.trajectories[: assignment.num_samples]),
            trajectories=tuple(summaries),
            texts=tuple(texts),
            greedy=greedy[0] if greedy else None,
            scoring=scored.scoring,
        )

    async def _run_sample(
        self, task: Task, assignment: GroupAssignment, sample: int, record: Record, seconds: float | None
    ) -> Conversation:
        key = SampleKey(self._seed, assignment.group, sample, assignment.validation, assignment.attempt)
        greedy = sample == assignment.num_samples
        sampling = SamplingParams(temperature=0.0) if greedy else self._sampling[assignment.validation]
        async with nullcontext() if assignment.validation or self._places is None else self._places:
            conversation = await self._converse(task, key, sampling, record, seconds)
        if record.failure is None:
            return conversation
        error = conversation.trajectory.error
        if self._env.on_error == "fail":
            raise ConversationFailed(f"sample {key} of task {task.index}: {error}")
        if self._env.on_error == "zero" and record.turns:
            record.rewards = dict.fromkeys(self._environments.reward_weights, 0.0)
            record.turns = [replace(turn, rewards={}) for turn in record.turns]
            return record.finish(key.group, task.index, None)
        return conversation

    async def _converse(
        self, task: Task, key: SampleKey, sampling: SamplingParams, record: Record, seconds: float | None
    ) -> Conversation:
        """A conversation, sampled again if its environment fails, with the same seeds."""
        attempts, began, num_retries = Attempts(self._episodes), time.monotonic(), 0
        while True:
            left = None if seconds is None else max(0.0, began + seconds - time.monotonic())
            environment = self._environments.create()
            conversation = await self._turns.run(task, environment, key, sampling, record, left)
            if record.failure is None:
                self._episodes.answered()
                return conversation
            if isinstance(record.failure, EnvironmentLost) and await attempts.repeat(
                conversation.trajectory.error or ""
            ):
                record.restart()
                continue
            if num_retries == self._env.max_retries:
                return conversation
            num_retries += 1
            record.restart()


def _params(config: SamplingConfig) -> SamplingParams:
    return SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p)


class RayRolloutWorker(RolloutWorker):
    """In an actor whose methods run in an event loop; samples from engines in other processes."""

    def __init__(self, experiment: Experiment, engines: Sequence[Replica]) -> None:
        self.router = Router(list(engines), waits=experiment.generation.has_engines)
        super().__init__(experiment, self.router, store=lambda trajectories: trajectories)

    async def stream_groups(self, assignments: Sequence[GroupAssignment]) -> AsyncIterator[Any]:
        """Each group's trajectories, then its summary: as separate items they belong to the reader's process.

        A reference in the summary would belong to this process, which may drop it before the reader has it.
        """
        async with aclosing(self.run_groups(assignments)) as summaries:
            async for outcome in summaries:
                if isinstance(outcome, Dropped):
                    yield None
                    yield outcome
                else:
                    yield outcome.reference
                    yield replace(outcome, reference=None)
