"""Stored groups train as the run did that sampled them."""

from pathlib import Path

import pytest

from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.stored import RolloutFiles
from tests.run.runs import finish, lines, start, timeless, tiny_model, write_experiment

pytestmark = pytest.mark.ci
QUIET = {"period": None, "at_start": False, "at_end": False}
OF_ENGINES = ("refit/", "generation/", "logprob_gap/")


@pytest.mark.slow
def test_a_replay_repeats_the_run_and_rollouts_are_its_first_groups(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    algorithm = {"num_steps": 2, "validation": QUIET}
    sections = {"algorithm": algorithm, "policy": {"layout": {}}}
    first = write_experiment(tmp_path, model, "first", **sections, logger={"trajectories": 16})

    status, output = finish(start("train", first))
    assert status == 0, output
    stored = RolloutFiles(RunPaths(tmp_path / "first").trajectories)
    assert stored.steps() == [1, 2]
    kept = [group for _, group in stored.summaries()]
    assert [len(group.trajectories) for group in kept] == [4] * 8
    assert {t.max_version for group in kept[4:] for t in group.trajectories} == {1}

    again = write_experiment(tmp_path, model, "again", **sections)
    status, output = finish(start("train", again, "--replay", tmp_path / "first"))
    assert status == 0, output
    for mine, its in zip(lines(tmp_path / "again"), lines(tmp_path / "first"), strict=True):
        of_both = timeless(mine).keys() & timeless(its).keys()
        assert {"loss/policy", "reward/mean", "grad_norm"} & of_both
        for name in sorted(of_both):
            if not name.startswith(OF_ENGINES):
                assert mine.values[name] == pytest.approx(its.values[name], rel=1e-5, abs=1e-6), name
    assert not list((tmp_path / "again" / "logs").glob("rollout*"))  # nothing samples
    assert not list((tmp_path / "again" / "logs").glob("generation*"))

    sampled = write_experiment(tmp_path, model, "sampled", **sections)
    status, output = finish(start("rollout", sampled, "--n", "3"))
    assert status == 0, output
    files = RolloutFiles(RunPaths(tmp_path / "sampled").trajectories)
    assert len((tmp_path / "sampled" / "samples.jsonl").read_text().splitlines()) == 3 * 4
    for place in range(3):
        mine, its = files.group(0, place), stored.group(1, place)
        assert [t.tokens.tolist() for t in mine.sequences] == [t.tokens.tolist() for t in its.sequences]
        assert [t.reward for t in mine.sequences] == [t.reward for t in its.sequences]
    assert not list((tmp_path / "sampled" / "logs").glob("policy*"))  # nothing trains
    status, output = finish(start("rollout", sampled, "--n", "3"))
    assert status == 2
    assert "the folder contains a run" in output
