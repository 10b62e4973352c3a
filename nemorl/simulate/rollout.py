"""Simulated rollout workers behind the real supervisor: conversations over a real router, in virtual time.

Collector ─▶ RolloutHandle ─▶ SimulatedWorker ─▶ SimulatedRolloutWorker ─▶ Router ─▶ engines
                         RolloutSupervisor ─▶ SimulatedRollouts ─┘
"""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from random import Random

import numpy as np

from nemorl.config.algorithm import OnlineBase
from nemorl.config.experiment import Experiment
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import GenerationRequest, Progress, SamplingParams
from nemorl.rollout.concurrency import Places
from nemorl.rollout.groups import (
    Dropped,
    GroupAssignment,
    GroupSummary,
    TrajectorySummary,
    misses_deadline,
)
from nemorl.rollout.turn_loop import PAST_DEADLINE, ConversationFailed, Record, SampleKey
from nemorl.rollout.worker import GroupRunner
from nemorl.trajectories import StopReason

from .engines import Scale
from .processes import Faults, SimulatedGroup, SimulatedProcess
from .workload import Workload

_PROGRESS_TOKENS = 64  # the router's own, in tokens
_SAMPLING = SamplingParams()
_ENVIRONMENT = 1  # in the seed of failures of environments, next to those of processes
_CONVERSATION = 2**20  # instead of a turn in the key of draws that belong to no turn


class SimulatedRolloutWorker(GroupRunner, SimulatedProcess):
    """A task is solved with a probability that is uniform; calls of environments fail at random."""

    def __init__(
        self,
        experiment: Experiment,
        workload: Workload,
        scale: Scale,
        replicas: Sequence[Replica],
        seed: int,
        faults: Random,
    ) -> None:
        generation, deadlines = experiment.generation, experiment.cluster.deadlines
        config = experiment.algorithm
        assert isinstance(config, OnlineBase)
        GroupRunner.__init__(self, Places.of_worker(generation, experiment.cluster.rollout_workers))
        SimulatedProcess.__init__(self)
        self._workload, self._scale, self._seed, self._faults = workload, scale, seed, faults
        self._turn_limit = scale.blocks(generation.max_new_tokens)
        self._limit = scale.blocks(experiment.policy.max_sequence_length)
        self._seconds, self._environment_seconds = deadlines.generation, deadlines.environment
        self._group_seconds, self._min_members = config.group_seconds, config.min_members
        # The first environment is used for all.
        self._environment = next(iter(experiment.env.environments.values()))
        self.router = Router(replicas, max(1, _PROGRESS_TOKENS // scale.block), waits=True)

    def _halt(self) -> None:
        """End its groups; engines end the requests of a caller that has left."""
        for groups in self._calls.values():
            for group in groups:
                group.cancel()
        self._calls.clear()

    async def _run_group(
        self, assignment: GroupAssignment, records: Sequence[Record]
    ) -> GroupSummary | Dropped:
        of_task = Random(hash((self._seed, assignment.task_index)))
        prompt, solved = self._scale.blocks(self._workload.prompt_tokens.draw(of_task)), of_task.random()
        samples = (self._run_sample(assignment, n, r, prompt, solved) for n, r in enumerate(records))
        trajectories = tuple(await asyncio.gather(*samples))
        members, greedy = trajectories[: assignment.num_samples], trajectories[assignment.num_samples :]
        lengths = tuple(record.num_sampled for record in records)
        if misses_deadline(members, self._min_members):
            return Dropped(assignment.group, "deadline", lengths)
        if self._environment.on_error == "drop_group" and any(record.failure for record in records):
            return Dropped(assignment.group, "failed", lengths)
        index, stored = assignment.task_index, [None] * assignment.num_samples  # in place of token arrays
        return GroupSummary(assignment.group, index, stored, members, greedy=next(iter(greedy), None))

    async def _run_sample(
        self, assignment: GroupAssignment, sample: int, record: Record, prompt: int, solved: float
    ) -> TrajectorySummary:
        """A sample, again with the same seeds if its environment fails, as `RolloutWorker` does."""
        key = SampleKey(self._seed, assignment.group, sample, assignment.validation, assignment.attempt)
        clock, environment = asyncio.get_running_loop().time, self._environment
        end = None if self._group_seconds is None else clock() + self._group_seconds
        while True:
            waits_since = clock()
            async with nullcontext() if self._places is None else self._places:
                began = clock()
                end = None if end is None else end + began - waits_since
                summary = await self._converse(key, record, prompt, solved, end)
            if record.failure is None or record.num_retries == environment.max_retries:
                break
            record.restart()
        if record.failure is not None and environment.on_error == "fail":
            raise ConversationFailed(f"sample {key} of task {assignment.task_index}: {summary.error}")
        if record.failure is not None and environment.on_error == "zero":
            summary = replace(summary, reward=0.0, error=None, trains=True)
        return replace(
            summary,
            row=sample,
            environment_failed=record.failure is not None,
            num_retries=record.num_retries,
            seconds_generation=clock() - began - summary.seconds_environment,
        )

    async def _converse(
        self, key: SampleKey, record: Record, prompt: int, solved: float, end: float | None
    ) -> TrajectorySummary:
        random = Random(key.seed(_CONVERSATION) + record.num_retries)
        tokens, newest, stop, turn, block = prompt, -1, StopReason.LENGTH, 0, self._scale.block
        error: str | None = None
        environment = 0.0

        def note(progress: Progress) -> None:
            nonlocal newest
            record.note(progress.versions)
            record.num_unfinished += (block - 1) * len(progress.versions)
            newest = max(newest, int(progress.versions.max(initial=-1)))

        try:
            async with asyncio.timeout_at(end):
                for turn in range(1, max(1, round(self._workload.turns.draw(random))) + 1):
                    if tokens >= self._limit:
                        break
                    request = GenerationRequest(
                        id=f"{key}/{turn}",
                        prompt=np.zeros(tokens, np.int32),
                        sampling=_SAMPLING,
                        max_new_tokens=min(self._turn_limit, self._limit - tokens),
                        seed=key.seed(turn),
                        deadline_seconds=self._seconds,
                        conversation=str(key),
                    )
                    completion = await self.router.generate(request, note)
                    tokens, stop = tokens + len(completion.tokens), completion.stop
                    if stop in (StopReason.ABORT, StopReason.ERROR):
                        error = f"generation of turn {turn}: ended with `{stop}`"
                        break
                    seconds = self._workload.environment.draw(random)
                    if spent := min(seconds, self._environment_seconds):
                        await asyncio.sleep(spent)
                        environment += spent
                    failed = self._faults.random() < self._workload.environment_failures
                    if failed or seconds > self._environment_seconds:
                        error = "the environment failed" if failed else "the environment did not answer"
                        record.failure = ConversationFailed(error)
                        break
                    if stop is StopReason.LENGTH:
                        break
        except TimeoutError:
            stop, error = StopReason.DEADLINE, PAST_DEADLINE
        return TrajectorySummary(
            row=0,
            reward=float(random.random() < solved),
            rewards={},
            num_tokens=prompt * block + record.num_sampled,
            num_sampled=record.num_sampled,
            num_turns=turn,
            stop=stop,
            min_version=-1 if record.oldest_version is None else record.oldest_version,
            max_version=newest,
            error=error,
            seconds_generation=0.0,
            seconds_environment=environment,
            trains=error is None,
        )


class SimulatedRollouts(SimulatedGroup[SimulatedRolloutWorker]):
    """The processes of all rollout workers."""

    def __init__(
        self,
        experiment: Experiment,
        workload: Workload,
        scale: Scale,
        replicas: Sequence[Replica],
        seed: int,
        faults: Faults,
    ) -> None:
        """`replicas`: those of the start of the run, which a process that is started later has at first."""
        self._arguments = experiment, workload, scale, replicas, seed
        super().__init__("rollout", experiment.cluster.rollout_workers, faults)

    def _make(self, rank: int) -> SimulatedRolloutWorker:
        of_environments = Random(hash((*self._faults.seed, rank, len(self.started), _ENVIRONMENT)))
        return SimulatedRolloutWorker(*self._arguments, of_environments)
