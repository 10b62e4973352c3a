"""Random runs, simulated: no deadlock, no task lost or trained on twice, none too old, every drop counted.

Each seed is a run: staleness, sizes, lengths, filters, lost engines, and resumes from checkpoints of earlier
steps. A failure names its seed; `REPLAY=SEED .venv/bin/pytest tests/simulate/test_schedules.py` repeats it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, get_args

import pytest

from nemorl.config.algorithm.online import FiltersConfig, RefillConfig
from nemorl.config.experiment import Experiment
from nemorl.config.generation import OnUpdate
from nemorl.errors import RunError
from nemorl.generation.types import NoReplicaLeft
from nemorl.rollout.groups import Dropped, GroupSummary
from nemorl.rollout.schedule import DataPlace
from nemorl.simulate.simulation import Simulation, open_simulation, run_in_virtual_time
from nemorl.simulate.workload import LogNormal, Workload
from tests.simulate.experiments import experiment

REPLAY = os.environ.get("REPLAY")
MAX_STARTS = 6  # of one run


@dataclass(frozen=True)
class Scenario:
    experiment: Experiment
    workload: Workload
    seed: int
    num_steps: int
    checkpoint_period: int
    crashes: tuple[int, ...]  # the number of steps after which each start of the run ends

    @classmethod
    def draw(cls, base: Experiment, seed: int) -> "Scenario":
        random = Random(seed)
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
            }
        )
        generation = base.generation.model_copy(
            update={
                "replicas": random.randint(1, 4),
                "max_batch_size": random.choice((2, 8, 64)),
                "on_update": random.choice(get_args(OnUpdate)),
            }
        )
        cluster = base.cluster.model_copy(update={"rollout_workers": random.randint(1, 3)})
        sections = {"algorithm": algorithm, "generation": generation, "cluster": cluster}
        workload = Workload(
            prompt_tokens=LogNormal(8, random.choice((0.0, 0.5))),
            turn_tokens=LogNormal(random.choice((4, 32)), random.choice((0.0, 1.0, 2.0))),
            turns=LogNormal(random.choice((1, 3)), random.choice((0.0, 0.5))),
            environment=LogNormal(random.choice((0.0, 1.0, 5.0)), random.choice((0.0, 1.5))),
            decode_base=random.choice((0.05, 0.5)),
            training=random.choice((0.0, 0.001, 0.1)),
            refit=random.choice((0.0, 1.0, 10.0)),
            engine_failures=random.choice((1e12, 1e12, 100.0, 400.0)),
            engine_start=random.choice((1.0, 60.0)),
        )
        num_steps = random.randint(2, 8)
        crashes = tuple(random.randint(1, num_steps) for _ in range(random.choice((0, 0, 1, 2))))
        return cls(base.model_copy(update=sections), workload, seed, num_steps, random.randint(1, 3), crashes)


@dataclass
class History:
    """What a run has trained on; a resume forgets the steps after its checkpoint."""

    batches: list[list[int]] = field(default_factory=list)  # groups of each step
    given_up: list[list[int]] = field(default_factory=list)  # after each step, since the one before
    places: list[DataPlace] = field(default_factory=list)  # after each step


async def run(scenario: Scenario, history: History, steps: int) -> None:
    """Continue to a number of steps, and check everything on the way."""
    done = len(history.batches)
    place = history.places[-1] if done else DataPlace()
    opened = open_simulation(
        scenario.experiment,
        scenario.workload,
        scenario.seed,
        done=done,
        place=place,
        num_steps=scenario.num_steps,
    )
    async with opened as simulation:
        watch = Watch(simulation, history)
        while len(history.batches) < steps:
            await simulation.step()
            watch.check_step()


class Watch:
    """Checks the groups of one start of a run."""

    def __init__(self, simulation: Simulation, history: History) -> None:
        self.simulation, self.history = simulation, history
        self.schedule, collector = simulation.schedule, simulation.algorithm.collector
        self.started = 0
        self.num_dropped = 0
        self.attempts: set[tuple[int, int]] = set()
        self.batch: list[GroupSummary] = []
        start, next_batch, take_dropped = self.schedule.start, collector.next_batch, collector.take_dropped
        self.counted: list[Dropped] = []

        def counting_start() -> list[Any]:
            assignments = start()
            for one in assignments:
                key = (one.group, one.attempt)
                assert key not in self.attempts, f"attempt {key} was started twice"
                self.attempts.add(key)
            self.started += len(assignments)
            return assignments

        async def recorded_batch(*arguments: Any) -> list[GroupSummary]:
            self.batch = await next_batch(*arguments)
            return self.batch

        def counting_dropped() -> tuple[list[Dropped], int]:
            self.counted += self.schedule.dropped
            return take_dropped()

        changed: Any = collector
        changed.next_batch, changed.take_dropped = recorded_batch, counting_dropped
        self.schedule.start = counting_start  # type: ignore[method-assign]
        self.taken = 0
        self.given_up: list[int] = []
        hand_out = self.schedule._hand_out

        def noting(groups: Any) -> None:
            handed = list(groups)
            self.last_handed += handed
            hand_out(handed)

        self.last_handed: list[int] = []
        self.schedule._hand_out = noting  # type: ignore[method-assign]

    def check_step(self) -> None:
        schedule, history, plan = self.schedule, self.history, self.schedule.plan
        number = len(history.batches) + 1
        groups = [group.group for group in self.batch]
        before = {group for batch in (*history.batches, *history.given_up) for group in batch}
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
        ages = [number - 1 - t.min_version for g in trained for t in g.trajectories if t.min_version >= 0]
        assert max(ages, default=0) <= plan.max_staleness, "a sample is too old"
        assert min(ages, default=0) >= 0, "a sample is of a version that does not exist yet"
        given_up = [group for group in self.last_handed if group not in groups]
        self.last_handed = []
        history.batches.append(groups)
        history.given_up.append(given_up)
        history.places.append(schedule.place)
        # Every attempt is running, ready, trained on, refused or dropped.
        self.taken += len(groups)
        dropped = len(self.counted) + len(schedule.dropped)
        held = len(schedule.running) + schedule.num_ready + schedule.num_refused
        assert self.started == held + self.taken + dropped, "an attempt is missing"
        # What is handed out is what the place says, so that a resume samples all the rest.
        place = schedule.place
        handed_out = before | set(groups) | set(given_up)
        assert handed_out == {*range(place.position), *place.beyond}
        if schedule.refill is None:
            allowed = (
                schedule._version + plan.max_staleness + 1 - schedule.steps_taken
            ) * plan.groups_per_step
            assert len(schedule.running) + schedule.num_ready <= allowed, "too much is in flight"


def check(scenario: Scenario) -> None:
    """Run to the last step, over crashes, and lost engines where none can be restarted."""
    history = History()
    ends = [*scenario.crashes, scenario.num_steps]
    for start in range(MAX_STARTS):
        steps = ends[min(start, len(ends) - 1)]
        if steps < len(history.batches):
            continue
        try:
            run_in_virtual_time(run(scenario, history, steps))
        except NoReplicaLeft:  # with which a real run ends, and resumes
            pass
        except RunError as error:
            if "trajectories of a step failed" not in str(error):
                raise
        if len(history.batches) == scenario.num_steps:
            return
        kept = len(history.batches) // scenario.checkpoint_period * scenario.checkpoint_period
        for steps_of_it in (history.batches, history.given_up, history.places):
            del steps_of_it[kept:]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return experiment(tmp_path_factory.mktemp("base"), max_new_tokens=128)


def seeds(first: int, count: int) -> Iterator[int]:
    return iter([int(REPLAY)] if REPLAY else range(first, first + count))


def check_all(base: Experiment, numbers: Iterator[int]) -> None:
    for seed in numbers:
        try:
            check(Scenario.draw(base, seed))
        except (AssertionError, RunError, RuntimeError) as error:
            raise AssertionError(f"seed {seed} (repeat with REPLAY={seed}): {error}") from error


def test_random_runs_keep_their_promises(base: Experiment) -> None:
    check_all(base, seeds(0, 100))


@pytest.mark.slow
def test_thousands_of_random_runs_keep_their_promises(base: Experiment) -> None:
    check_all(base, seeds(100, 5000))
