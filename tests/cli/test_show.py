"""`nemorl show` on a run folder with stored trajectories."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nemorl.rollout.stored import RolloutFiles, SampledBy
from tests.cli.conftest import Nemorl
from tests.rollout.stored import failed, stored, trajectory
from tests.run.runs import tiny_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two groups of step 3; token 2 is `0`, 3 is `1` and so on."""
    folder = tmp_path / "run"
    files = RolloutFiles(folder / "trajectories")
    files.begin(SampledBy("model", "abc", 1.0, {"point": 1.0}))
    two = trajectory(2, 3, version=2)
    two = replace(two, turns=(two.turns[0], replace(two.turns[1], flags=("loud",))))
    one = stored(8, [[two], [failed(trajectory(1), "it fell")]])
    files.write(3, [one, stored(9, [[trajectory(2), trajectory(1)]])])
    model = tiny_model(tmp_path / "model")
    (folder / "config.yaml").write_text(yaml.safe_dump({"policy": {"model_path": str(model)}}))
    return folder


def test_all_trajectories_are_listed(nemorl: Nemorl, run: Path) -> None:
    rows = [line.split() for line in nemorl("show", run).out.splitlines()]
    assert rows[1:] == [
        ["3/8/0", "108", "1", "2", "5", "8", "stop"],
        ["3/8/1", "108", "0", "1", "1", "3", "stop,", "it", "fell"],
        ["3/9/0", "109", "1", "2", "3", "7", "stop"],
    ]


def test_a_trajectory_is_printed_turn_by_turn(nemorl: Nemorl, run: Path) -> None:
    assert nemorl("show", run, "3/8/0").out.splitlines() == [
        "step 3, group 8, sample 0, task 108",
        "reward point: 1",
        "reward: 1, ended by stop",
        "prompt    01  [2 tokens]",
        "policy    23  [2 tokens, logprob -0.09, version 2, advantage 0.5, point 1]",  # 4 / 100 + 5 / 100
        "given     4  [1 token]",
        "policy    567  [3 tokens, logprob -0.24, version 2, advantage 0.5, point 1, flagged loud]",
    ]
    errors = nemorl("show", run, "3/8/1").out
    assert "reward: 0, ended by stop: it fell" in errors
    assert "[1 token, 0 trained, logprob" in errors


def test_branches_and_tokens(nemorl: Nemorl, run: Path) -> None:
    rows = [line.split() for line in nemorl("show", run, "3/9/0", "--tokens").out.splitlines()]
    assert [row for row in rows if row[0] == "branch"] == [["branch", "0"], ["branch", "1"]]
    assert ["1", "3", "'1'", "0"] in rows
    assert ["2", "4", "'2'", "1", "-0.0400", "0", "0.5"] in rows


def test_without_its_tokenizer_tokens_are_numbers(nemorl: Nemorl, run: Path) -> None:
    (run / "config.yaml").unlink()
    outcome = nemorl("show", run, "3/8/0")
    assert "policy    4 5  [2 tokens" in outcome.out
    assert "the tokenizer of the run was not found" in outcome.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["8"], "8: expected STEP/GROUP/SAMPLE"),
        (["4/8/0"], "4/8/0: no trajectory of step 4 is stored; there are steps 3"),
        (["3/7/0"], "3/7/0: no such trajectory; step 3 has the groups 8, 9"),
        (["3/8/2"], "3/8/2: no such trajectory"),
    ],
)
def test_what_is_not_there_is_refused(nemorl: Nemorl, run: Path, words: list[str], problem: str) -> None:
    outcome = nemorl("show", run, *words)
    assert outcome.status == 2
    assert problem in outcome.err


def test_a_run_without_trajectories_is_refused(nemorl: Nemorl, tmp_path: Path) -> None:
    outcome = nemorl("show", tmp_path)
    assert outcome.status == 2
    assert "holds no stored groups; runs store trajectories with logger.trajectories" in outcome.err
