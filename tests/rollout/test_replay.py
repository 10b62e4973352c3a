"""What does not fit stored groups is refused before anything starts."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.rollout.collector import RolloutFailed
from nemorl.rollout.groups import GroupAssignment
from nemorl.rollout.replay import ReplayedGroups, replay_problems
from nemorl.rollout.stored import RolloutFiles, SampledBy
from nemorl.trajectories import Trajectory
from tests.rollout.stored import stored, trajectory
from tests.run.runs import tiny_model, write_experiment

SAMPLES = 4
QUIET = "algorithm.validation={period: null, at_start: false, at_end: false}"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    return write_experiment(folder, tiny_model(folder / "model"), "run", algorithm={"num_steps": 2})


def experiment(config: Path, *overrides: str) -> Experiment:
    return load_experiment(config, [QUIET, *overrides])


def groups_of(*samples: Trajectory, count: int = 8) -> list[Any]:
    return [stored(number, [[each] for each in samples]) for number in range(count)]


def write(folder: Path, config: Path, *steps: list[Any], **origin: Any) -> RolloutFiles:
    files = RolloutFiles(folder / "trajectories")
    files.begin(replace(SampledBy.of(experiment(config)), **origin))
    for number, groups in enumerate(steps, start=1):
        files.write(number, groups)
    return files


GOOD = [trajectory(2)] * SAMPLES
TWO_STEPS = ["algorithm.max_staleness=1"]  # of which the second trains on groups of the first weights


def test_groups_that_fit_are_accepted(tmp_path: Path, config: Path) -> None:
    files = write(tmp_path, config, groups_of(*GOOD))
    assert list(replay_problems(experiment(config, *TWO_STEPS), files)) == []
    newer = groups_of(*[trajectory(2, version=1)] * SAMPLES, count=4)
    files = write(tmp_path / "of_run", config, groups_of(*GOOD, count=4), newer)
    assert list(replay_problems(experiment(config), files)) == []


NO_LOGPROB = replace(trajectory(2), logprobs=np.full(4, np.nan, dtype=np.float32))


@pytest.mark.parametrize(
    ("origin", "groups", "overrides", "field", "fix"),
    [
        ({"tokenizer": "x", "model": "m"}, GOOD, [], "policy.model_path", "another tokenizer, that of m"),
        (
            {"temperature": 0.5},
            GOOD,
            [],
            "generation.sampling.temperature",
            "temperature 0.5; set that",
        ),
        ({"filters": {"top_k": 5}}, GOOD, [], "generation.sampling", "samples with top_k 5; set that"),
        (
            {},
            GOOD,
            ["generation.sampling.top_p=0.9"],
            "generation.sampling",
            "samples with no top_k, top_p and min_p",
        ),
        ({"reward_weights": {"a": 2.0}}, GOOD, [], "rewards", "have the weights a 2; set env and rewards"),
        ({"data": {}}, GOOD, [], "data.train", "of another dataset"),
        (
            {"turn_flags": {"env": {}}},
            GOOD,
            ["env.turn_flags={loud: {texts: ['!']}}", "algorithm.flagged_advantages={loud: -1.0}"],
            "algorithm.flagged_advantages",
            "the stored turns have other flags (env.turn_flags); set turn_flags to those",
        ),
        (
            {},
            GOOD,
            ["algorithm.num_steps=3"],
            "algorithm.num_steps",
            "12 groups are required and 8",
        ),
        ({}, GOOD[1:], [], "algorithm.num_generations_per_prompt", "stored groups have 3; set that"),
        (
            {},
            [*GOOD[1:], trajectory(20)],
            [],
            "policy.max_sequence_length",
            "has 22 tokens; set it to",
        ),
        ({}, [*GOOD[1:], NO_LOGPROB], [], "--replay", "group 0 of step 1 has tokens without a logprob"),
        ({}, GOOD, ["algorithm.max_staleness=0"], "algorithm.max_staleness", "up to 1 update older"),
        ({}, [trajectory(2, version=1)] * 4, [], "--replay", "step 1 would train on tokens of version 1"),
        ({}, GOOD, ["algorithm.validation.at_end=true"], "algorithm.validation", "no engine is started"),
        (
            {},
            GOOD,
            ["algorithm.filters={drop_equal_rewards: true, refill: {max_batches: 2}}"],
            "algorithm.filters.refill",
            "no other groups can be sampled",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path,
    config: Path,
    origin: dict[str, Any],
    groups: list[Trajectory],
    overrides: list[str],
    field: str,
    fix: str,
) -> None:
    files = write(tmp_path, config, groups_of(*groups), **origin)
    problems = list(replay_problems(experiment(config, *TWO_STEPS, *overrides), files))
    assert [problem.field for problem in problems] == [field]
    assert fix in problems[0].fix


def test_runs_without_stored_groups_and_without_sampling_are_refused(tmp_path: Path, config: Path) -> None:
    (problem,) = replay_problems(experiment(config), RolloutFiles(tmp_path / "trajectories"))
    assert (problem.field, problem.value) == ("--replay", str(tmp_path))
    assert "holds no stored groups; name a run folder of `nemorl rollout`" in problem.fix
    sft = ["algorithm={name: sft, num_steps: 2, batch_size: 4}", "algorithm.validation.at_end=true"]
    offline = load_experiment(config, [*sft, "algorithm.validation.period=null"])
    (problem,) = replay_problems(offline, write(tmp_path, config, groups_of(*GOOD)))
    assert (problem.field, problem.value) == ("algorithm.name", "sft")


def test_stored_groups_are_handed_out_in_their_order(tmp_path: Path, config: Path) -> None:
    first = [stored(number, [[trajectory(2, group=number)]]) for number in (30, 31)]
    files = write(tmp_path, config, first, [stored(7, [[trajectory(3, group=7)]])])
    put: list[list[Trajectory]] = []

    def store(sequences: Any) -> int:
        put.append(list(sequences))
        return len(put)

    async def hand_out(*assignments: GroupAssignment) -> list[Any]:
        return [group async for group in ReplayedGroups(files, store).run_groups(list(assignments))]

    groups = asyncio.run(hand_out(*(GroupAssignment(number, 0, 1) for number in range(3))))
    assert [(group.group, group.task_index, group.reference) for group in groups] == [
        (0, 130, 1),
        (1, 131, 2),
        (2, 107, 3),
    ]
    assert [[each.num_sampled for each in sequences] for sequences in put] == [[2], [2], [3]]
    with pytest.raises(RolloutFailed, match="group 3 is not stored, and nothing is sampled with --replay"):
        asyncio.run(hand_out(GroupAssignment(3, 0, 1)))
    with pytest.raises(RolloutFailed, match="group 1 was not accepted"):
        asyncio.run(hand_out(GroupAssignment(1, 0, 1, attempt=1)))
