"""Random runs, simulated: no deadlock, no task lost or trained on twice, none too old, every drop counted.

A seed and the kind of its faults are a run: staleness, sizes, lengths, filters, over-sampling, deadlines of
groups, limits of concurrency, and faults. Other faults than those of its kind are rarer. The driver that
recovers is the real one: `Recovery` restores a lost policy, and a lost driver resumes from a checkpoint.
Every run reaches its last step, over the errors that may end a start of it, and no others.
"""

import asyncio
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, get_args

import pytest

from nemorl.config.algorithm.online import (
    FiltersConfig,
    NoCorrectionConfig,
    RefillConfig,
    TruncatedCorrectionConfig,
)
from nemorl.config.experiment import Experiment
from nemorl.config.generation import OnUpdate
from nemorl.data.losses import TrainStats
from nemorl.errors import NemorlError, RunError
from nemorl.generation.types import NoReplicaLeft
from nemorl.rollout.collector import RolloutFailed, SamplingStalled
from nemorl.rollout.concurrency import share_of_worker
from nemorl.rollout.groups import Dropped, DropReason, GroupAssignment, GroupSummary
from nemorl.run.checkpoints import Progress, SavedState
from nemorl.run.recovery import Recovery
from nemorl.session.handles import TooManySkippedSteps
from nemorl.session.supervisor import NoRolloutWorkerLeft
from nemorl.simulate.simulation import Simulation, open_simulation, run_in_virtual_time
from nemorl.simulate.workload import LogNormal, Workload
from tests.simulate.experiments import experiment

REPLAY = os.environ.get("REPLAY")
MAX_STARTS = 20  # of one run
FAULTS = {  # that the runs of a kind have together
    "driver": ("restarts",),
    "engines": ("engines lost",),
    "policy": ("policy restarts",),
    "guards": ("rollbacks",),
    "long tails": ("cut_off", "deadline"),
    "rollout workers": ("workers lost", "lost"),
    "environments": ("failed",),
    "scaling": ("engines joined", "engines left"),
    "concurrency": ("limited",),
}
MAX_STALLED = 0.02  # share of the runs that may never end, because no group meets its deadline
Weights = frozenset[int]  # the updates that led to them, each with a number of its own


@dataclass(frozen=True)
class Scenario:
    experiment: Experiment
    workload: Workload
    seed: int
    num_steps: int
    checkpoint_period: int
    crashes: tuple[int, ...]  # the number of steps after which each start of the run ends
    policy_losses: frozenset[int]  # numbers of the policy's calls in which it is lost, in each start
    rollbacks: frozenset[int]  # numbers of its updates that guards refuse, so that the run goes back
    scaling: tuple[tuple[float, int], ...]  # seconds of each start, and the number of engines from then on

    @classmethod
    def draw(cls, base: Experiment, kind: str, seed: int) -> "Scenario":
        random = Random(f"{kind} {seed}")

        def has(fault: str) -> bool:
            return random.random() < 0.2 or fault == kind

        filters = FiltersConfig()
        if random.random() < 0.4:
            refill = RefillConfig(max_batches=random.randint(2, 4)) if random.random() < 0.8 else None
            filters = FiltersConfig(drop_equal_rewards=True, refill=refill)
        algorithm = base.algorithm.model_copy(
            update={
                "max_staleness": random.randint(0, 4),
                "num_prompts_per_step": random.randint(1, 6),
                "num_generations_per_prompt": random.randint(2, 4),
                "filters": filters,
                "correction": random.choice((NoCorrectionConfig(), TruncatedCorrectionConfig(name="tis"))),
                "oversampling": random.choice((1.25, 1.5, 2.0)) if has("long tails") else 1.0,
            }
        )
        limits = has("concurrency")
        generation = base.generation.model_copy(
            update={
                "replicas": random.randint(1, 4),
                "max_batch_size": random.choice((2, 8, 64)),
                "on_update": random.choice(get_args(OnUpdate)),
                "concurrency": random.choice((1, 4, 16)) if limits else None,
                "adaptive_concurrency": limits and random.random() < 0.5,
            }
        )
        cluster = base.cluster.model_copy(
            update={
                "rollout_workers": random.randint(1, 3),
                "max_model_restarts": 100,
                "max_worker_restarts": random.choice((3, 10)),
            }
        )
        guards = base.policy.guards.model_copy(update={"max_rollbacks": 100})
        policy = base.policy.model_copy(update={"guards": guards})
        workload = Workload(
            prompt_tokens=LogNormal(8, random.choice((0.0, 0.5))),
            turn_tokens=LogNormal(random.choice((4, 32)), random.choice((0.0, 1.0, 2.0))),
            turns=LogNormal(random.choice((1, 3)), random.choice((0.0, 0.5))),
            environment=LogNormal(random.choice((0.0, 1.0, 5.0)), random.choice((0.0, 1.5))),
            decode_base=random.choice((0.05, 0.5)),
            training=random.choice((0.0, 0.001, 0.1)),
            refit=random.choice((0.0, 1.0, 10.0)),
            engine_failures=random.choice((100.0, 400.0)) if has("engines") else math.inf,
            engine_start=random.choice((1.0, 60.0)),
            worker_failures=random.choice((70.0, 200.0)) if has("rollout workers") else math.inf,
            worker_start=random.choice((1.0, 60.0)),
            environment_failures=random.choice((0.01, 0.1)) if has("environments") else 0.0,
        )
        on_error = random.choice(("skip", "drop_group", "zero"))
        env = base.env.model_copy(update={"on_error": on_error, "max_retries": random.randint(0, 2)})
        if has("long tails"):
            seconds = random.choice((2.0, 8.0)) * _usual_seconds(algorithm, generation, workload)
            algorithm = algorithm.model_copy(update={"group_seconds": seconds})
            # Soon, if no group is fast enough; but not before lost processes have returned.
            deadlines = cluster.deadlines.model_copy(update={"generation": max(600.0, 10 * seconds)})
            cluster = cluster.model_copy(update={"deadlines": deadlines})
        sections = {
            "algorithm": algorithm,
            "generation": generation,
            "cluster": cluster,
            "policy": policy,
            "env": env,
        }
        num_steps = random.randint(2, 8)
        num_crashes = random.choice((1, 2)) if has("driver") else 0
        crashes = tuple(random.randint(1, num_steps) for _ in range(num_crashes))
        losses = random.sample(range(4 * num_steps), random.randint(1, 3)) if has("policy") else []
        rollbacks = random.sample(range(num_steps), random.randint(1, 2)) if has("guards") else []
        scaling = [(random.uniform(0, 100), random.randint(1, 6)) for _ in range(3 if has("scaling") else 0)]
        experiment = base.model_copy(update=sections)
        period = random.randint(1, 3)
        faults = crashes, frozenset(losses), frozenset(rollbacks), tuple(sorted(scaling))
        return cls(experiment, workload, seed, num_steps, period, *faults)

    @property
    def most_in_flight(self) -> float:
        """Trajectories of one rollout worker at a time."""
        generation, workers = self.experiment.generation, self.experiment.cluster.rollout_workers
        if generation.concurrency is None or generation.adaptive_concurrency:
            return math.inf
        engines = max((generation.replicas, *(number for _, number in self.scaling)))
        # The share of a worker grows when others stay lost.
        num_workers = workers if self.workload.worker_failures == math.inf else 1
        return share_of_worker(generation.concurrency * engines, num_workers)

    def ends_with(self, error: NemorlError) -> str:
        """The kind of an error that may end a start of this run; raises others."""
        workload, environment = self.workload, self.experiment.env
        match error:
            case NoReplicaLeft() if workload.engine_failures < math.inf:
                return "no engine left"
            case NoRolloutWorkerLeft() if workload.worker_failures < math.inf:
                return "no rollout worker left"
            case SamplingStalled() if self.experiment.algorithm.group_seconds is not None:
                return "no group met its deadline"  # as `Watch.explain_stall` has checked
            case RolloutFailed() if environment.on_error == "drop_group" and "in a row" in str(error):
                return "environments failed"
            case RunError() if "trajectories of a step failed" in str(error):
                return "all trajectories failed"
        raise error


def _usual_seconds(algorithm: Any, generation: Any, workload: Workload) -> float:
    """Of a conversation, with what waits before it in engines."""
    groups = algorithm.num_prompts_per_step * (algorithm.max_staleness + 1) * algorithm.oversampling
    in_flight = groups * algorithm.num_generations_per_prompt / generation.replicas
    together = min(in_flight, generation.max_batch_size)
    turn = workload.turn_tokens.mean * workload.step_seconds(round(together)) + workload.environment.mean
    return workload.turns.mean * turn * max(1.0, in_flight / together)


@dataclass
class History:
    """What a run has trained on; a restart from a checkpoint forgets the steps after it."""

    batches: list[list[int]] = field(default_factory=list)  # groups of each step
    given_up: list[list[int]] = field(default_factory=list)  # after each step, since the one before
    passed_over: set[int] = field(default_factory=set)  # groups of updates that guards refused
    checkpoints: list[Progress] = field(default_factory=lambda: [Progress()])
    passed_over_at: list[set[int]] = field(default_factory=lambda: [set()])  # each checkpoint
    seconds: list[float] = field(default_factory=list)  # that each start took
    ends: list[str] = field(default_factory=list)  # of starts that an error ended
    faults: Counter[str] = field(default_factory=Counter)  # of all starts

    @property
    def handed_out(self) -> set[int]:
        of_steps = {group for groups in (*self.batches, *self.given_up) for group in groups}
        return of_steps | self.passed_over

    def forget_after(self, step: int) -> None:
        del self.batches[step:], self.given_up[step:]
        at = next(n for n, checkpoint in enumerate(self.checkpoints) if checkpoint.step == step)
        self.passed_over = set(self.passed_over_at[at])


class Watch:
    """The records and checkpoints of one start of a run, for `Recovery`, and the checks of every step."""

    def __init__(self, simulation: Simulation, history: History, scenario: Scenario) -> None:
        self.simulation, self.history, self.scenario = simulation, history, scenario
        self.schedule, self.session = simulation.schedule, simulation.session
        collector: Any = simulation.algorithm.collector
        self.started = self.taken = self.num_calls = self.num_trained = self.num_updates = 0
        self.rollbacks = 0
        self.restores = False
        self.attempts: set[tuple[int, int]] = set()
        self.batch: list[GroupSummary] = []
        self.handed_out: list[int] = []  # since the last step
        self.counted: list[Dropped] = []
        self.drops: list[tuple[float, DropReason]] = []  # of attempts that were running, with their times
        # Weights as their updates, so that ages follow without the arithmetic of `Lineage`.
        # Those of earlier starts have negative numbers.
        self.weights_of_step = {step: frozenset(range(-step, 0)) for step in range(self.done + 1)}
        restored = self.session.lineage.version(self.done)
        self.weights: dict[int, Weights] = {restored: self.weights_of_step[self.done]}
        start, next_batch, take_dropped = self.schedule.start, collector.next_batch, collector.take_dropped
        hand_out, drop = self.schedule._hand_out, self.schedule.drop
        check, train = simulation.policy.check, simulation.policy.train

        def started() -> list[GroupAssignment]:
            assignments = start()
            for one in assignments:
                key = (one.group, one.attempt)
                assert key not in self.attempts, f"attempt {key} was started twice"
                self.attempts.add(key)
            self.started += len(assignments)
            return assignments

        async def took(*arguments: Any) -> list[GroupSummary]:
            self.batch = await next_batch(*arguments)
            self.taken += len(self.batch)
            return self.batch

        def counted() -> tuple[list[Dropped], int]:
            self.counted += self.schedule.dropped
            return take_dropped()

        def handed_out(groups: Any, *results: Any) -> None:
            self.handed_out += (handed := list(groups))
            hand_out(handed, *results)

        def dropped(one: Dropped) -> None:
            self.drops.append((asyncio.get_running_loop().time(), one.reason))
            drop(one)

        def checked(stage: str) -> None:
            if self.num_calls in self.scenario.policy_losses and not self.restores:
                simulation.policy.failure = "the process vanished"
            self.num_calls += not self.restores
            check(stage)

        async def trained(*arguments: Any, **options: Any) -> TrainStats:
            self.num_trained += 1
            if self.num_trained - 1 in self.scenario.rollbacks:
                raise TooManySkippedSteps("updates were skipped")
            return await train(*arguments, **options)

        collector.next_batch, collector.take_dropped = took, counted
        changed: Any = self.schedule
        changed.start, changed._hand_out, changed.drop = started, handed_out, dropped
        changed = simulation
        changed.policy.train = trained
        changed.policy.check = changed.exchange.check_sender = checked

    # --- As the recorder and the checkpoints of a run.

    @property
    def done(self) -> int:
        return len(self.history.batches)

    @property
    def done_before_row(self) -> int:
        return max(0, self.done - 1)

    async def settle(self) -> None: ...

    async def newest_state(self, before: float = math.inf) -> SavedState | None:
        self.restores = True
        folder: Mapping[str, Any] = {}
        found = [progress for progress in self.history.checkpoints if progress.step < before]
        return SavedState(found[-1], folder) if found else None

    async def remove_after(self, step: int) -> None:
        kept = sum(progress.step <= step for progress in self.history.checkpoints)
        del self.history.checkpoints[kept:], self.history.passed_over_at[kept:]

    def rewind(self, start: Progress) -> None:
        schedule, self.restores = self.schedule, False
        self.history.faults["rollbacks" if start.rollbacks > self.rollbacks else "policy restarts"] += 1
        self.history.forget_after(start.step)
        if start.rollbacks > self.rollbacks:  # which keeps the place in the data
            self.rollbacks = start.rollbacks
            in_data = {*range(start.position), *start.beyond}
            assert self.history.handed_out <= in_data
            self.history.passed_over |= in_data - self.history.handed_out
        self.handed_out = []
        held = schedule.running | {g.group for g in (*schedule._ready, *schedule._refused)}
        self.attempts = {key for key in self.attempts if key[0] in held}
        restored = self.session.lineage.version(start.step)
        assert restored not in self.weights, "a version repeats"
        self.weights[restored] = self.weights_of_step[start.step]

    # --- Checks.

    def begin(self) -> None:
        number = self.done + 1
        self.num_updates += 1
        version = self.session.lineage.version(number)
        assert version not in self.weights, "a version repeats"
        self.weights[version] = self.weights_of_step[number - 1] | {self.num_updates}

    def explain_stall(self) -> None:
        """Only deadlines of groups may keep groups from ending in time."""
        since = asyncio.get_running_loop().time() - self.scenario.experiment.cluster.deadlines.generation
        recent = {reason for at, reason in self.drops if at >= since}
        assert "deadline" in recent, f"sampling stalled, and the drops do not explain it: {recent}"

    def count_faults(self) -> None:
        """Of a start that ends."""
        replicas, rollouts, faults = self.session.replicas, self.session.rollouts, self.history.faults
        assert replicas is not None
        assert rollouts is not None
        faults["restarts"] += bool(self.history.seconds)
        faults["engines lost"] += len(replicas.losses)
        faults["engines joined"] += replicas._num_joined
        faults["engines left"] += replicas._num_left
        faults["workers lost"] += len(rollouts.losses)
        faults.update(one.reason for one in self.counted)

    def finish(self) -> None:
        schedule, history, plan = self.schedule, self.history, self.schedule.plan
        number = self.done + 1
        groups = [group.group for group in self.batch]
        before = history.handed_out
        assert len(set(groups)) == len(groups), "a group is in a step twice"
        assert not before & set(groups), "a group was trained on before"
        trained = [g for g in self.batch if schedule.refill is None or schedule.refill.accepts(g)]
        if schedule.refill is None:
            assert len(groups) == plan.groups_per_step
        else:
            # What was sampled for later steps and refused counts for the next one too.
            ahead = plan.max_staleness * plan.groups_per_step
            assert len(groups) <= schedule.refill.max_groups + ahead
            assert len(trained) == plan.groups_per_step or len(groups) >= schedule.refill.max_groups
        present = self.weights_of_step[number - 1]
        for version in {v for g in trained for t in g.trajectories for v in t.versions}:
            sampled = self.weights[version]
            assert len(sampled ^ present) <= plan.max_staleness, "a sample is too old"
            assert plan.trains_discarded or sampled <= present, "a sample is of discarded updates"
        given_up = [group for group in self.handed_out if group not in groups]
        self.handed_out = []
        # Every attempt is running, ready, trained on, refused or dropped.
        dropped = len(self.counted) + len(schedule.dropped)
        held = len(schedule.running) + schedule.num_ready + schedule.num_refused
        assert self.started == held + self.taken + dropped, "an attempt is missing"
        in_metrics = sum(self.simulation.dropped[reason] for reason in get_args(DropReason))
        assert in_metrics == len(self.counted), "a drop is not counted"
        # What is handed out is what the place says, so that a resume samples all the rest.
        place = schedule.place
        handed_out = before | set(groups) | set(given_up)
        assert handed_out == {*range(place.position), *place.beyond}
        if schedule.refill is None:
            steps = schedule._version + plan.max_staleness + 1 - schedule.steps_taken
            allowed = steps * plan.groups_per_step + plan.extra_groups
            assert len(schedule.running) + schedule.num_ready <= allowed, "too much is in flight"
        for handle in self.session.rollout:
            places = handle.worker.actor._places
            if places is not None:
                running = [one for one in handle.worker.actor._running if not one.work.done()]
                assert places.use.in_use <= sum(len(one.records) for one in running), "a place was not left"
                assert places.use.in_use <= self.scenario.most_in_flight, "too many places were taken"
                history.faults["limited"] += places.use.num_waiting
        history.batches.append(groups)
        history.given_up.append(given_up)
        version = self.session.lineage.version(number)
        assert self.session.version == version
        self.weights_of_step[number] = self.weights[version]
        if number % self.scenario.checkpoint_period == 0:
            history.checkpoints.append(
                Progress(number, place.position, beyond=place.beyond, extra_versions=version - number)
            )
            history.passed_over_at.append(set(history.passed_over))


async def run(scenario: Scenario, history: History, steps: int) -> None:
    """Continue to a number of steps."""
    start = history.checkpoints[-1]
    opened = open_simulation(
        scenario.experiment,
        scenario.workload,
        scenario.seed,
        done=start.step,
        place=start.place,
        num_steps=scenario.num_steps,
        lineage=start.lineage,
        start=len(history.seconds),
    )
    async with opened as simulation:
        watch: Any = Watch(simulation, history, scenario)
        observer: Any = simulation.observer
        parts = simulation.session, observer, watch, watch, simulation.algorithm
        recovery = Recovery(scenario.experiment, *parts)
        scaling = asyncio.create_task(scale(simulation, scenario))
        try:
            while watch.done < steps:
                watch.begin()
                try:
                    await simulation.step()
                    watch.finish()
                except NemorlError as error:
                    if isinstance(error, SamplingStalled):
                        watch.explain_stall()
                    await recovery.recover(watch.done + 1, error)
        finally:
            scaling.cancel()
            watch.count_faults()
            history.seconds.append(simulation.snapshot().seconds)


async def scale(simulation: Simulation, scenario: Scenario) -> None:
    """As `nemorl scale` during the run."""
    replicas = simulation.session.replicas
    assert replicas is not None
    for at, number in scenario.scaling:
        await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
        await replicas.scale(number)


def check(scenario: Scenario) -> History:
    """Run to the last step, over crashes, and over faults that end a start, after which the run resumes.

    It ends before the last step only where every start since the last checkpoint stalls.
    """
    history = History()
    ends = [*scenario.crashes, scenario.num_steps]
    for start in range(MAX_STARTS):
        steps = ends[min(start, len(ends) - 1)]
        if steps < len(history.batches):
            continue
        try:
            run_in_virtual_time(run(scenario, history, steps))
        except NemorlError as error:
            history.ends.append(scenario.ends_with(error))
        if len(history.batches) == scenario.num_steps:
            break
        history.forget_after(history.checkpoints[-1].step)
    if len(history.batches) < scenario.num_steps:
        assert set(history.ends[-3:]) == {"no group met its deadline"}, f"it has no end: {history.ends}"
    return history


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return experiment(tmp_path_factory.mktemp("base"), max_new_tokens=128)


def check_all(base: Experiment, kind: str, seeds: range) -> None:
    test = f'"tests/simulate/test_schedules.py::test_random_runs_keep_their_promises[{kind}]"'
    stalled, faults = [], Counter[str]()
    for seed in [int(REPLAY)] if REPLAY else seeds:
        scenario = Scenario.draw(base, kind, seed)
        try:
            history = check(scenario)
            if seed % 20 == 0 or REPLAY:
                assert check(Scenario.draw(base, kind, seed)) == history, "a seed gives two runs"
        except (AssertionError, NemorlError, RuntimeError) as error:
            repeat = f"REPLAY={seed} .venv/bin/pytest {test}"
            raise AssertionError(f"{kind}, seed {seed}: {error!r}\nRepeat with: {repeat}") from error
        faults += history.faults
        stalled += [seed] * (len(history.batches) < scenario.num_steps)
    assert REPLAY or all(faults[name] for name in FAULTS[kind]), f"{kind}: {faults}"
    assert len(stalled) <= MAX_STALLED * len(seeds), f"{kind}, seeds {stalled}: no group met its deadline"


@pytest.mark.parametrize("kind", FAULTS)
def test_random_runs_keep_their_promises(base: Experiment, kind: str) -> None:
    check_all(base, kind, range(25))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_thousands_of_random_runs_keep_their_promises(base: Experiment, kind: str) -> None:
    check_all(base, kind, range(25, 125))
