"""Versions over restarts, compared with a history of updates that is written out."""

import numpy as np
import pytest

from nemorl.rollout.versions import Epoch, Lineage


def test_without_a_loss_a_version_is_a_number_of_steps() -> None:
    lineage = Lineage()
    assert [lineage.version(step) for step in range(5)] == [0, 1, 2, 3, 4]
    assert [lineage.age(version, 4) for version in range(5)] == [4, 3, 2, 1, 0]
    assert not any(lineage.discarded(version) for version in range(5))


def test_the_history_of_the_module() -> None:
    lineage = Lineage().restored(step=2, newest=4)
    assert lineage.epochs == (Epoch(0, 0), Epoch(5, 2))
    assert [lineage.version(step) for step in (2, 3, 4)] == [5, 6, 7]
    assert [version for version in range(8) if lineage.discarded(version)] == [3, 4]
    # Versions 2 and 5 are the same weights: two updates from version 4 back to them, and two to version 7.
    assert [lineage.age(version, 7) for version in range(8)] == [4, 3, 2, 3, 4, 2, 1, 0]


def test_a_second_restart_may_go_back_further() -> None:
    lineage = Lineage().restored(step=4, newest=5).restored(step=2, newest=8)
    assert lineage.version(2) == 9
    assert [version for version in range(10) if lineage.discarded(version)] == [3, 4, 5, 6, 7, 8]
    assert lineage.age(7, 9) == 3  # step 5 of the second epoch, which began at step 4


def test_an_engine_that_never_changes_has_an_age_after_a_resume() -> None:
    assert Lineage((Epoch(7, 5),)).age(0, 9) == 7  # two versions are of restarts
    assert not Lineage((Epoch(7, 5),)).discarded(0)


@pytest.mark.parametrize("seed", range(100))
def test_ages_are_paths_in_the_tree_of_updates(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lineage, version, step = Lineage(), 0, 0
    parents: dict[int, int] = {}  # of each version, over one update
    at: dict[int, int] = {0: 0}  # the version after each step of the present branch
    same: dict[int, int] = {}  # restored versions, and those that they are restored from
    for _ in range(40):
        if draw.random() < 0.15:
            newest, step = version + int(draw.integers(2)), int(draw.integers(step + 1))
            lineage = lineage.restored(step, newest)
            version = lineage.version(step)
            assert version > newest
            same[version] = same.get(at[step], at[step])
            at = {s: v for s, v in at.items() if s < step} | {step: version}
        else:
            parents[version + 1] = same.get(version, version)
            version, step = version + 1, step + 1
            at[step] = version
        assert lineage.version(step) == version

        def ancestors(of: int) -> list[int]:
            path = [same.get(of, of)]
            while path[-1] in parents:
                path.append(parents[path[-1]])
            return path

        ours = ancestors(version)
        for other in {*parents, *same, 0}:
            theirs = ancestors(other)
            common = next(v for v in theirs if v in ours)
            assert lineage.discarded(other) == (common != theirs[0])
            assert lineage.age(other, version) == theirs.index(common) + ours.index(common)
