"""Groups in files are the groups that were written."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemorl.rollout.stored import (
    LocalWriter,
    RolloutFiles,
    SampledBy,
    StoredGroup,
    StoredRolloutError,
    TrajectoryLog,
    spread,
    validation_series,
)
from nemorl.trajectories import Trajectory
from tests.rollout.stored import failed, stored, trajectory

ORIGIN = SampledBy("models/tiny", "abc", 1.0, {"point": 2.0})


@pytest.fixture
def files(tmp_path: Path) -> RolloutFiles:
    made = RolloutFiles(tmp_path / "trajectories")
    made.begin(ORIGIN)
    return made


def equal(one: Trajectory, other: Trajectory) -> bool:
    arrays = ("tokens", "loss_mask", "logprobs", "versions", "routed_experts")
    without = [
        replace(t, **dict.fromkeys(arrays[:4], np.zeros(0)), routed_experts=None) for t in (one, other)
    ]
    for name in arrays:
        mine, its = getattr(one, name), getattr(other, name)
        if (mine is None) != (its is None) or (mine is not None and mine.dtype != its.dtype):
            return False
        if mine is not None and not np.array_equal(mine, its):
            return False
    return str(without[0]) == str(without[1])


def test_groups_are_read_as_they_were_written(files: RolloutFiles) -> None:
    first = stored(0, [[trajectory(2, 3), trajectory(1, experts=True)], [failed(trajectory(4), "it fell")]])
    second = stored(1, [[trajectory(3, reward=0.25, group=1, version=7)]], advantage=-1.5)
    files.write(1, [first, second])

    assert files.origin() == ORIGIN
    assert [(step, group) for step, group in files.summaries()] == [(1, first.summary), (1, second.summary)]
    for place, written in enumerate((first, second)):
        read = files.group(1, place)
        assert read.summary == written.summary
        assert all(map(equal, read.sequences, written.sequences))
        assert len(read.sequences) == len(written.sequences)
        assert [a.tolist() for a in read.advantages] == [a.tolist() for a in written.advantages]


def test_advantages_are_those_of_sampled_tokens() -> None:
    two = trajectory(2, 1)  # tokens: two of the prompt, two sampled, one between, one sampled
    assert spread(two, 0.5).tolist() == [0, 0, 0.5, 0.5, 0, 0.5]
    assert spread(two, (0.5, -1.0)).tolist() == [0, 0, 0.5, 0.5, 0, -1.0]
    assert np.isnan(spread(two, None)).all()


def test_steps_are_removed_that_a_run_takes_again(files: RolloutFiles) -> None:
    for step in (1, 2, 10):
        files.write(step, [stored(step, [[trajectory(2)]])])
    files.remove_after(2)
    assert files.steps() == [1, 2]
    assert sorted(path.name for path in files.folder.iterdir()) == [
        "rollout.json",
        "step_000001-0.json",
        "step_000001-0.safetensors",
        "step_000002-0.json",
        "step_000002-0.safetensors",
    ]


def test_files_that_cannot_be_read_are_named(files: RolloutFiles, tmp_path: Path) -> None:
    files.write(1, [stored(0, [[trajectory(2)]])])
    arrays = files.folder / "step_000001-0.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:40])
    with pytest.raises(StoredRolloutError, match=r"step_000001-0\.safetensors cannot be read"):
        files.group(1, 0)
    (files.folder / "step_000001-0.json").write_text('{"step": 1}')
    with pytest.raises(StoredRolloutError, match=r"step_000001-0\.json cannot be read"):
        list(files.summaries())
    with pytest.raises(StoredRolloutError, match="holds no stored groups"):
        RolloutFiles(tmp_path / "other").origin()
    files.begin(replace(ORIGIN, format=99))
    with pytest.raises(StoredRolloutError, match="format 99 is not 2"):
        files.origin()


@pytest.mark.parametrize(("count", "written"), [(0, []), (1, [5]), (2, [5]), (3, [5, 6]), (9, [5, 6, 7])])
def test_complete_groups_are_kept_until_there_are_as_many_samples(
    files: RolloutFiles, count: int, written: list[int]
) -> None:
    groups = [stored(number, [[trajectory(2)], [trajectory(3)]]) for number in (5, 6, 7)]
    behind: dict[str, StoredGroup] = {f"reference {group.summary.group}": group for group in groups}

    async def fetch(reference: Any) -> tuple[Trajectory, ...]:
        return behind[reference].sequences

    summaries = [replace(group.summary, reference=name) for name, group in behind.items()]
    log = TrajectoryLog(files, lambda: [LocalWriter(fetch)], count)
    advantages = {("reference 5", 0): 0.5, ("reference 5", 1): -0.5}
    asyncio.run(log.write(3, log.kept(summaries), advantages))

    assert [group.group for _, group in files.summaries()] == written
    if written:
        first, second = files.group(3, 0).advantages
        assert (first.max(), second.min()) == (0.5, -0.5)
    if len(written) > 1:
        assert np.isnan(files.group(3, 1).advantages[0]).all()  # of a group that does not train


def test_groups_behind_one_reference_are_stored_apart(files: RolloutFiles) -> None:
    groups = [stored(5, [[trajectory(2)], [trajectory(3)]]), stored(6, [[trajectory(4), trajectory(5)]])]
    asked: list[str] = []

    async def fetch(reference: str) -> list[Trajectory]:
        asked.append(reference)
        return [sequence for group in groups for sequence in group.sequences]

    summaries = [
        replace(group.summary.moved(rows), reference="both")
        for group, rows in zip(groups, (0, 2), strict=True)
    ]
    log = TrajectoryLog(files, lambda: [LocalWriter(fetch)], 3)
    asyncio.run(log.write(3, log.kept(summaries), {("both", 3): 0.5}))
    assert asked == ["both"]
    for place, group in enumerate(groups):
        found = files.group(3, place)
        assert found.summary.trajectories == group.summary.trajectories
        assert [t.tokens.tolist() for t in found.sequences] == [t.tokens.tolist() for t in group.sequences]
    assert np.nanmax(files.group(3, 1).advantages[1]) == 0.5
    assert np.isnan(files.group(3, 1).advantages[0]).all()


def test_writers_share_a_step_by_their_nodes(files: RolloutFiles) -> None:
    groups = [stored(number, [[trajectory(number % 3 + 1)]]) for number in range(6)]
    nodes = ["a", "b", "a", "a", "b", ""]
    behind = {f"reference {n}": group for n, group in enumerate(groups)}
    wrote: dict[str, list[str]] = {"a": [], "b": []}

    def writer(node: str) -> LocalWriter:
        async def fetch(reference: Any) -> tuple[Trajectory, ...]:
            wrote[node].append(reference)
            return behind[reference].sequences

        return LocalWriter(fetch, node)

    summaries = [
        replace(group.summary, reference=f"reference {n}", node=nodes[n]) for n, group in enumerate(groups)
    ]
    log = TrajectoryLog(files, lambda: [writer("a"), writer("b")], math.inf)
    asyncio.run(log.write(3, log.kept(summaries), {}))
    assert wrote == {
        "a": ["reference 0", "reference 2", "reference 3"],
        "b": ["reference 1", "reference 4", "reference 5"],
    }
    assert [group.group for _, group in files.summaries()] == list(range(6))
    for place, group in enumerate(groups):
        assert equal(files.group(3, place).sequences[0], group.sequences[0])
    assert len(list(files.folder.glob("step_000003-*.json"))) == 2


def test_a_validation_is_a_series_of_its_own(files: RolloutFiles) -> None:
    files.write(2, [stored(1, [[trajectory(2)]])])
    easy = RolloutFiles(files.folder, validation_series("easy_1"))
    easy.write(2, [stored(7, [[trajectory(3)]])])
    easy.write(4, [stored(8, [[trajectory(3)]])])
    assert [group.group for _, group in files.summaries()] == [1]
    assert [(step, group.group) for step, group in easy.summaries()] == [(2, 7), (4, 8)]
    files.remove_after(2)
    assert (files.steps(), easy.steps()) == ([2], [2])
