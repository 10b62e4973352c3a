"""`nemorl sweep`: what is checked before anything starts."""

from pathlib import Path

import pytest

from tests.cli.conftest import Nemorl


def test_points_are_listed_without_a_start(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("sweep", experiment, "policy.optimizer.lr=1e-4,3e-4", "seed=1,2", "--dry-run")
    assert outcome.status == 0, outcome.err
    assert "runs/sums/02_lr=3e-4_seed=1: policy.optimizer.lr=3e-4 seed=1" in outcome.out
    assert "4 runs, up to" in outcome.out
    assert not Path("runs").exists()


def test_problems_name_their_points(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("sweep", experiment, "seed=1,-1", "algorithm.num_steps=5,0")
    assert outcome.status == 2
    assert "seed = -1" in outcome.err
    assert "point 2 (seed=-1, algorithm.num_steps=5), point 3 (seed=-1" in outcome.err
    assert not Path("runs").exists()


def test_a_problem_of_all_points_is_listed_once(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("sweep", experiment, "seed=1,2", "policy.micro_batch_tokens=0")
    assert outcome.status == 2
    assert outcome.err.count("policy.micro_batch_tokens = 0") == 1
    assert "all points" in outcome.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["seed=1,2", "--metric", "reward/maen"], "--metric reward/maen: the runs do not have it"),
        (["seed=1,2", "--oversubscribe"], "--oversubscribe: set the number of runs"),
        (["seed=1,2", "cluster.num_nodes=2"], "`nemorl slurm submit CONFIG --nodes 2`"),
        (["policy.optimizer.lr=log(1e-6,1e-4)"], "a range has no grid"),
        (["seed=1"], "needs a field with several values"),
    ],
)
def test_refused(nemorl: Nemorl, experiment: Path, words: list[str], problem: str) -> None:
    outcome = nemorl("sweep", experiment, *words)
    assert outcome.status == 2
    assert problem in outcome.err


def test_a_sweep_file(nemorl: Nemorl, experiment: Path) -> None:
    text = (
        f"experiment: {experiment.name}\nrandom: 3\nparameters: {{policy.optimizer.lr: 'log(1e-6, 1e-4)'}}\n"
    )
    experiment.with_name("sweep.yaml").write_text(text, encoding="utf-8")
    outcome = nemorl("sweep", "sweep.yaml", "--dry-run", "--dir", "other")
    assert outcome.status == 0, outcome.err
    assert outcome.out.count("other/0") == 3


def test_a_folder_without_a_sweep_does_not_continue(nemorl: Nemorl, tmp_path: Path) -> None:
    assert "holds no sweep" in nemorl("sweep", tmp_path, "--resume").err
