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


def test_a_folder_that_is_not_there_does_not_continue(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("sweep", "runs/gone", "--resume")
    assert outcome.status == 2
    assert "runs/gone --resume: there is no such folder or file; name the folder of a sweep" in outcome.err


def test_values_of_a_sweep_file_are_named_with_its_line(nemorl: Nemorl, experiment: Path) -> None:
    text = (
        f"experiment: {experiment.name}\nparameters:\n  seed: [1, 2]\n  policy.optimizer.lr: [1e-4, -1.0]\n"
    )
    experiment.with_name("sweep.yaml").write_text(text, encoding="utf-8")
    outcome = nemorl("sweep", "sweep.yaml")
    assert outcome.status == 2
    assert (
        "policy.optimizer.lr = -1.0  (sweep.yaml:4, point 1 (seed=1, policy.optimizer.lr=-1.0)"
        in " ".join(outcome.err.split()).replace("= -1.0 (", "= -1.0  (")
    )
    assert "command line" not in outcome.err
    replaced = nemorl("sweep", "sweep.yaml", "policy.optimizer.lr=-2.0,-3.0")
    assert "command line" in replaced.err
    assert "sweep.yaml:4" not in replaced.err


def test_a_dry_run_lists_points_where_a_run_is(nemorl: Nemorl, experiment: Path) -> None:
    metrics = Path("runs/sums/metrics.jsonl")
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1}\n', encoding="utf-8")
    refused = nemorl("sweep", experiment, "seed=1,2")
    assert refused.status == 2
    assert "runs/sums holds a run. Set another --dir" in refused.err
    listed = nemorl("sweep", experiment, "seed=1,2", "--dry-run")
    assert listed.status == 0, listed.err
    assert "runs/sums/00_seed=1: seed=1" in listed.out
    assert "Before it starts: runs/sums holds a run. Set another --dir" in listed.err
