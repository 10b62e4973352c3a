from pathlib import Path

import pytest

from nemorl.slurm.errors import SlurmError
from nemorl.slurm.sweep import table, tasks


def test_all_combinations_the_last_field_changing_first() -> None:
    found = tasks(["policy.optimizer.lr=1e-4,3e-4", "seed=1, 2"])

    assert [task.overrides for task in found] == [
        ["policy.optimizer.lr=1e-4", "seed=1"],
        ["policy.optimizer.lr=1e-4", "seed=2"],
        ["policy.optimizer.lr=3e-4", "seed=1"],
        ["policy.optimizer.lr=3e-4", "seed=2"],
    ]
    assert [task.index for task in found] == [0, 1, 2, 3]


def test_values_may_have_commas_of_their_own() -> None:
    found = tasks(['policy.optimizer={name: adam, lr: 1e-4},{name: sgd},"a,b"'])

    assert [task.overrides for task in found] == [
        ["policy.optimizer={name: adam, lr: 1e-4}"],
        ["policy.optimizer={name: sgd}"],
        ['policy.optimizer="a,b"'],
    ]


def test_every_task_has_a_folder_of_its_own() -> None:
    found = tasks(["policy.optimizer.lr=1e-4,3e-4", "algorithm.name=grpo"])

    assert [str(task.run_dir(Path("runs/s"))) for task in found] == [
        "runs/s/00_lr=1e-4_name=grpo",
        "runs/s/01_lr=3e-4_name=grpo",
    ]
    assert "/" not in tasks(["a={b: c/d e}"])[0].run_dir(Path("s")).name


def test_the_table_has_a_line_for_each_task() -> None:
    lines = list(table(tasks(["seed=1,2"]), Path("runs/s")))

    assert lines == ["task\trun_dir\tseed", "0\truns/s/00_seed=1\t1", "1\truns/s/01_seed=2\t2"]


@pytest.mark.parametrize("text", ["seed", "seed=", "=1,2", "seed=[1,2"])
def test_what_is_no_list_of_values_is_refused(text: str) -> None:
    with pytest.raises(SlurmError, match="--sweep"):
        tasks([text])


def test_the_run_folder_is_not_swept() -> None:
    """Its values would be dropped for the tasks' own folders."""
    with pytest.raises(SlurmError, match="--sweep run_dir: each task has a folder of its own"):
        tasks(["seed=1,2", "run_dir=a,b"])


def test_a_field_is_swept_once() -> None:
    with pytest.raises(SlurmError, match="--sweep names seed twice"):
        tasks(["seed=1", "seed=2"])
