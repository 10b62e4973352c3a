"""Rollout worker: samples groups, scores them, keeps the trajectories and returns summaries."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.config.algorithm import OnlineBase
from nemorl.config.environment import ActorPlacement, EnvBase, ServerPlacement
from nemorl.config.experiment import Experiment
from nemorl.config.generation import SamplingConfig
from nemorl.data.datasets import DatasetError, load_tasks, reads
from nemorl.data.prefixes import shared_runs, token_rows
from nemorl.data.tokenizer import EXAMPLE_TOOLS, load_tokenizer, prompts_of
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import Generator, SamplingParams
from nemorl.rewards.compose import Rewards
from nemorl.rewards.scored import Attempts, Service
from nemorl.trajectories import (
    Conversation,
    EnvironmentFactory,
    EnvironmentLost,
    Task,
    Trajectory,
    created,
)

from .concurrency import Places, PlacesUse
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
from .stored import StepPart
from .turn_loop import ConversationFailed, Record, SampleKey, Sampler, TurnLimits, TurnLoop

if TYPE_CHECKING:
    from nemorl.cluster.worker import Worker  # with Ray

    from .episodes import EpisodeLoop
    from .remote_environments import ActorFactory, RemoteFactory

log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class EnvironmentKind:
    """The environments of one section of the config, and what their conversations share."""

    name: str  # by which tasks name it; empty for the only one
    config: EnvBase
    factory: EnvironmentFactory
    turns: TurnLoop
    calls: Service  # single ones, for stall reports
    episodes: Service
    remote: "RemoteFactory | None" = None  # the factory, if its environments run elsewhere


class GroupRunner(ABC):
    """Samples groups in one event loop, and ends those that became too old."""

    is_up = True  # in the process of its caller

    def __init__(self, places: Places | None = None) -> None:
        """`places` of trajectories of training; None: any number is sampled at a time."""
        self._places = places
        self._running: dict[_Running, None] = {}  # in their order
        self._calls: dict[int, list[asyncio.Task[GroupSummary | Dropped]]] = {}  # groups still to hand over
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

    async def run_more(
        self, call: int, assignments: Sequence[GroupAssignment], seconds: float
    ) -> tuple[list[Trajectory], list[GroupSummary | Dropped]]:
        """Begin these groups of a call from another process, and hand over those of it that have ended.

        At least one, unless none ends within `seconds`, and together what has ended until the caller asks,
        since each answer costs it a millisecond. The first value has the trajectories of all that are handed
        over: a value of its own belongs to the caller's process. A reference in a summary would belong to
        this one, which may drop it before the caller has it. Raises like `run_groups`; the caller then ends
        the call.
        """
        begun = [asyncio.ensure_future(self._run_or_drop(assignment)) for assignment in assignments]
        groups = self._calls.setdefault(call, [])
        groups += begun
        await asyncio.wait(groups, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if call not in self._calls:
            return [], []
        ended, left = [g for g in groups if g.done()], [g for g in groups if not g.done()]
        groups[:] = left
        if not left:
            del self._calls[call]
        trajectories: list[Trajectory] = []
        outcomes: list[GroupSummary | Dropped] = []
        for outcome in (group.result() for group in ended):
            if isinstance(outcome, Dropped):
                outcomes.append(outcome)
            else:
                outcomes.append(replace(outcome.moved(len(trajectories)), reference=None))
                trajectories += outcome.reference
        return trajectories, outcomes

    async def end_call(self, call: int) -> None:
        """End the groups of a call that were not handed over."""
        for group in self._calls.pop(call, []):
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

    async def set_concurrency(self, limit: int) -> PlacesUse:
        """Set the trajectories of training that are sampled at a time, and report them."""
        assert self._places is not None, "generation.concurrency sets no limit"
        self._places.resize(limit)
        num_stale, self._num_stale = self._num_stale, 0
        return replace(self._places.use, num_stale=num_stale)

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
        self._running[running] = None
        try:
            return await work
        except asyncio.CancelledError:
            if running.dropped_for is None:
                raise
            return Dropped(assignment.group, running.dropped_for, tuple(r.num_sampled for r in records))
        finally:
            self._running.pop(running, None)

    @abstractmethod
    async def _run_group(
        self, assignment: GroupAssignment, records: Sequence[Record]
    ) -> GroupSummary | Dropped:
        """Sample and score a group; `records` are its conversations while they grow."""


class RolloutWorker(GroupRunner):
    """Runs turn loops, environments and rewards in one event loop; imports neither torch nor Ray."""

    def __init__(
        self,
        experiment: Experiment,
        generator: Generator,
        store: Store,
        rank: int = 0,
        actors: "Mapping[str, Sequence[Worker]] | None" = None,
    ) -> None:
        """`store` keeps trajectories by reference; `actors` are those of environments, by name.

        Raises DatasetError, TokenizerError, RewardError or RunError.
        """
        super().__init__(Places.of_worker(experiment.generation, experiment.cluster.rollout_workers))
        self._seed, self._store, data = experiment.seed, store, experiment.data
        self._tasks = load_tasks(data.train, data)
        held_out = ({} if data.validation is None else {"": data.validation}) | data.validation_sets
        self._held_out = {name: load_tasks(dataset, data) for name, dataset in held_out.items()}
        sampling, validation = experiment.generation.sampling, experiment.algorithm.validation
        self._votes = bool(validation.cons_at_k)
        self._sampling = {False: _params(sampling), True: _params(validation.sampling or sampling)}
        self._tokenizer = load_tokenizer(experiment.policy)
        self._env, deadlines = experiment.env, experiment.cluster.deadlines
        self._remote: dict[str, RemoteFactory] = {}  # of environments that run elsewhere
        self._in_actors: dict[str, ActorFactory] = {}  # of those in actors
        factories = self._factories(experiment, rank, actors or {})
        weights = {n: weight for one in factories.values() for n, weight in one.reward_weights.items()}
        outage_seconds = deadlines.outage_seconds
        decode, seconds = self._tokenizer.decode, deadlines.environment
        self._rewards = Rewards(experiment.rewards, weights, data.chat, seconds, outage_seconds, decode)
        limits = TurnLimits(
            max_sequence_length=experiment.policy.max_sequence_length,
            max_new_tokens=experiment.generation.max_new_tokens,
            stop_token_ids=self._tokenizer.end_token_ids | set(experiment.generation.stop_token_ids),
            stop_strings=experiment.generation.stop_strings,
            generation_seconds=deadlines.generation,
            environment_seconds=deadlines.environment,
            max_prompt_tokens=data.max_prompt_tokens,
        )
        algorithm = experiment.algorithm
        self._group_seconds = algorithm.group_seconds if isinstance(algorithm, OnlineBase) else None
        self._min_members = algorithm.min_members if isinstance(algorithm, OnlineBase) else 1
        if any(one.has_tools for one in experiment.env.environments.values()):
            prompts_of(self._tokenizer, data.chat).with_tools(EXAMPLE_TOOLS)
        self._environments: dict[str, EnvironmentKind] = {}
        self._episode_loops: dict[str, EpisodeLoop] = {}  # of environments that own their loop
        for name, config in experiment.env.environments.items():
            label = f"environment `{name or config.name}`"
            calls, episodes = Service(label), Service(label, outage_seconds)
            of_kind = replace(limits, episode=config.limits)
            prompts = prompts_of(self._tokenizer, data.chat, as_text=config.writes_text)
            sampler = Sampler(generator, self._tokenizer, prompts, of_kind, calls, config.turn_flags)
            turns = TurnLoop(sampler)
            kind = EnvironmentKind(name, config, factories[name], turns, calls, episodes)
            self._environments[name] = replace(kind, remote=self._remote.get(name))

    def _factories(
        self, experiment: Experiment, rank: int, actors: "Mapping[str, Sequence[Worker]]"
    ) -> dict[str, EnvironmentFactory]:
        factories: dict[str, EnvironmentFactory] = {}
        process = f"{experiment.run_dir.absolute()} rollout {rank}"
        for name, config in experiment.env.environments.items():
            if isinstance(config.placement, ServerPlacement):
                from .remote_environments import factory_behind_server

                remote = factory_behind_server(config, config.placement, process, name)
                factories[name] = self._remote[name] = remote
            elif isinstance(config.placement, ActorPlacement):
                from .remote_environments import ActorFactory

                seconds = experiment.cluster.deadlines.environment
                pool = ActorFactory(config, actors[name], seconds, process, name)
                factories[name] = self._remote[name] = self._in_actors[name] = pool
            else:
                factories[name] = config.make_factory()
        return factories

    async def set_actors(self, environment: str, actors: "Sequence[Worker]") -> None:
        """The actors of an environment that are up now."""
        self._in_actors[environment].set_actors(actors)

    def service_calls(self) -> list[tuple[str, int, float]]:
        """Of each service with calls: their number, and seconds without an answer; from any thread."""
        kinds = self._environments.values()
        services = [kind.calls for kind in kinds] + [kind.remote.places for kind in kinds if kind.remote]
        states = [(one.name, *one.waits()) for one in (*services, *self._rewards.services)]
        return [state for state in states if state[1]]

    async def close(self) -> None:
        await self._rewards.close()
        for loop in self._episode_loops.values():
            await loop.close()
        for kind in self._environments.values():
            await kind.factory.close()

    async def _run_group(
        self, assignment: GroupAssignment, records: Sequence[Record]
    ) -> GroupSummary | Dropped:
        tasks = self._held_out[assignment.validation_set] if assignment.validation else self._tasks
        seconds = None if assignment.validation else self._group_seconds
        if reads(tasks):
            task = await asyncio.to_thread(getitem, tasks, assignment.task_index)
        else:
            task = tasks[assignment.task_index]
        kind = self._kind_for(task)
        samples = (
            self._run_sample(kind, task, assignment, n, record, seconds) for n, record in enumerate(records)
        )
        by_sample = await asyncio.gather(*samples)
        first = [of_players[0].trajectory for of_players in by_sample[: assignment.num_samples]]
        lengths = tuple(record.num_sampled for record in records)
        if misses_deadline(first, self._min_members):
            return Dropped(assignment.group, "deadline", lengths)
        drops = not assignment.validation  # if anything failed
        if drops and kind.config.on_error == "drop_group" and any(record.failure for record in records):
            return Dropped(assignment.group, "failed", lengths)
        forks = any(len(each) > 1 or each[0].trajectory.player for each in by_sample)
        if assignment.greedy_baseline and forks:
            fix = "there is none for each player and fork; set algorithm.advantage to another one"
            raise ConversationFailed(f"task {task.index}: its advantage compares with a greedy sample, {fix}")
        conversations = list(chain(*by_sample))
        scored = await self._rewards.apply(task, conversations)
        if drops and scored.is_dropped:
            return Dropped(assignment.group, "failed", lengths)
        sequences: list[Trajectory] = []
        summaries = []
        of_conversations = zip(scored.earlier, scored.trajectories, strict=True)
        for of_players, record in zip(by_sample, records, strict=True):
            num_unfinished, num_retries = record.num_unfinished, record.num_retries  # the first player's
            for earlier, last in islice(of_conversations, len(of_players)):
                summary = summarize((*earlier, last), len(sequences), num_unfinished)
                failed, truncated = record.failure is not None, record.truncated_by is not None
                summaries.append(
                    replace(summary, environment_failed=failed, num_retries=num_retries, truncated=truncated)
                )
                sequences += (*earlier, last)
                num_unfinished = num_retries = 0
        greedy = summaries.pop() if assignment.greedy_baseline else None
        sequences = sequences[: summaries[-1].row + 1]
        if not assignment.validation:
            rows = token_rows([t.tokens for t in sequences], [t.routed_experts for t in sequences])
            runs = shared_runs(rows)
            summaries = [summary.with_runs(runs) for summary in summaries]
        if assignment.validation and self._votes:
            answers = await asyncio.gather(*(last_answer(c, kind.factory) for c in conversations))
            summaries = [replace(s, answer=answer) for s, answer in zip(summaries, answers, strict=True)]
        texts, decode = [], self._tokenizer.decode
        for number, c in enumerate(chain(*by_sample[: assignment.num_texts])):
            tokens, split = c.trajectory.tokens.tolist(), c.num_prompt_tokens
            texts.append(SampleText(number, decode(tokens[:split]), decode(tokens[split:]), task.answer))
        return GroupSummary(
            group=assignment.group,
            task_index=assignment.task_index,
            reference=self._store(sequences),
            trajectories=tuple(summaries),
            texts=tuple(texts),
            greedy=greedy,
            scoring=scored.scoring,
            environment=kind.name,
            flags=tuple(kind.config.turn_flags),
        )

    def _kind_for(self, task: Task) -> EnvironmentKind:
        try:
            return self._environments[self._env.name_for(task.columns)]
        except ValueError as error:
            raise DatasetError(f"task {task.index}: {error}") from None

    async def _run_sample(
        self,
        kind: EnvironmentKind,
        task: Task,
        assignment: GroupAssignment,
        sample: int,
        record: Record,
        seconds: float | None,
    ) -> list[Conversation]:
        """The conversations of players and forks."""
        key = SampleKey(self._seed, assignment.group, sample, assignment.validation, assignment.attempt)
        greedy = sample == assignment.num_samples
        sampling = SamplingParams(temperature=0.0) if greedy else self._sampling[assignment.validation]
        conversations = await self._converse(kind, task, key, sampling, record, seconds)
        if record.failure is None:
            return conversations
        error = conversations[0].trajectory.error
        if kind.config.on_error == "fail":
            raise ConversationFailed(f"sample {key} of task {task.index}: {error}")
        if kind.config.on_error == "zero" and any(part.turns for part in record.parts):
            for part in record.parts:
                part.set_rewards(dict.fromkeys(kind.factory.reward_weights, 0.0))
            return record.finish(key.group, task.index, None)
        return conversations

    def _episode_loop(self, kind: EnvironmentKind) -> TurnLoop:
        if kind.name not in self._episode_loops:
            from .episodes import EpisodeLoop  # with a server

            weights, host = kind.factory.reward_weights, kind.config.endpoint_host
            self._episode_loops[kind.name] = EpisodeLoop(kind.turns.sampler, weights, host)
        return self._episode_loops[kind.name]

    async def _converse(
        self,
        kind: EnvironmentKind,
        task: Task,
        key: SampleKey,
        sampling: SamplingParams,
        record: Record,
        seconds: float | None,
    ) -> list[Conversation]:
        """The conversations of a sample, sampled again if its environment fails, with the same seeds."""
        began, num_retries = time.monotonic(), 0
        attempts: Attempts | None = None  # from the first one on, without the waits before it

        def left() -> float | None:
            return None if seconds is None else max(0.0, began + seconds - time.monotonic())

        while True:
            # An episode that waits for its environment has no place among those that are sampled.
            remote = None if kind.remote is None else kind.remote.create()
            async with nullcontext() if remote is None else remote.admitted(left()):
                waits_since = time.monotonic()
                async with nullcontext() if key.validation or self._places is None else self._places:
                    began += time.monotonic() - waits_since
                    attempts = attempts or Attempts(kind.episodes)
                    try:
                        environment = remote or created(kind.factory)
                    except Exception as error:  # noqa: BLE001  code of the user's
                        record.failure = error
                        failure = f"environment create: {type(error).__name__}: {error}"
                        log.warning("sample %s of task %d: %s", key, task.index, failure)
                        conversations = record.finish(key.group, task.index, failure)
                    else:
                        loop = kind.turns if hasattr(environment, "step") else self._episode_loop(kind)
                        conversations = await loop.run(task, environment, key, sampling, record, left())
            if record.failure is None:
                kind.episodes.answered()
                return conversations
            if isinstance(record.failure, EnvironmentLost) and await attempts.repeat(
                conversations[0].trajectory.error or ""
            ):
                record.restart()
                continue
            if num_retries == kind.config.max_retries:
                return conversations
            num_retries += 1
            record.restart()


def _params(config: SamplingConfig) -> SamplingParams:
    return SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p)


class RayRolloutWorker(RolloutWorker):
    """In an actor whose methods run in an event loop; samples from engines in other processes."""

    def __init__(
        self,
        experiment: Experiment,
        engines: Sequence[Replica],
        rank: int = 0,
        actors: "Mapping[str, Sequence[Worker]] | None" = None,
    ) -> None:
        self.router = Router(list(engines), waits=experiment.generation.has_engines)
        super().__init__(experiment, self.router, lambda trajectories: trajectories, rank, actors)

    async def write_part(self, folder: Path, part: StepPart) -> None:
        """Write groups of a step, which this or other workers sampled. Raises WriteError."""

        async def fetch(reference: Any) -> list[Trajectory]:
            return list(await reference)

        await part.write(folder, fetch)
