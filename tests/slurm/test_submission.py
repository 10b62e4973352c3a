import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nemorl.config.load import load_experiment
from nemorl.slurm.errors import SlurmError
from nemorl.slurm.submission import (
    SCRIPT,
    Options,
    image,
    latest,
    limit_seconds,
    submission,
    write_configs,
)
from tests.config.experiments import GRPO, write


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("NEMORL_")]:
        monkeypatch.delenv(name)


def words(options: Options, tasks: int = 0) -> str:
    """For a run `sums`."""
    return " ".join(options.words("sums", Path("runs/sums/slurm"), tasks))


def test_a_job_gets_whole_nodes() -> None:
    assert words(Options(nodes=2, gpus_per_node=8, time="4:00:00", partition="gpu", account="me")) == (
        "--job-name=sums --output=runs/sums/slurm/%j.log --nodes=2 --exclusive --mem=0 --ntasks-per-node=1 "
        "--export=ALL --time=4:00:00 --account=me --partition=gpu --gpus-per-node=8"
    )


def test_a_sweep_is_an_array() -> None:
    told = words(Options(nodes=1, at_once=2), tasks=4)

    assert "--array=0-3%2" in told
    assert "--output=runs/sums/slurm/%A_%a.log" in told


def test_cpu_nodes_are_a_component_of_their_own() -> None:
    gpu, _, cpu = words(Options(nodes=2, gpus_per_node=8, cpu_nodes=4, time="60", partition="big")).partition(
        " : "
    )

    assert "--gpus-per-node=8" in gpu
    assert "--nodes=4" in cpu
    assert "--time=60" in cpu
    assert "gpus" not in cpu
    assert "--partition=big" in cpu
    other = words(Options(nodes=2, cpu_nodes=4, partition="big", cpu_partition="small"))
    assert other.endswith("--partition=small")
    gpu, _, cpu = words(
        Options(nodes=2, cpu_nodes=4, more=("--constraint=h100",), cpu_more=("--qos=cpu",))
    ).partition(" : ")
    assert ("h100" in gpu, "h100" in cpu, cpu.endswith("--qos=cpu")) == (True, False, True)


def test_further_options_are_handed_on() -> None:
    assert words(Options(nodes=1, more=("--qos=high", "--constraint=a b"))).endswith(
        "--qos=high --constraint=a b"
    )


@pytest.mark.parametrize(("text", "given"), [("", None), ("cluster: {gpus_per_node: 0}", 0)])
def test_the_config_leaves_the_gpus_open_where_nobody_gave_them(text: str, given: int | None) -> None:
    experiment = load_experiment(write(Path(), GRPO + text))

    write_configs(experiment.run_dir, [experiment], sweep=False)

    written = Path("runs/sums/slurm/config.yaml")
    assert yaml.safe_load(written.read_text())["cluster"].get("gpus_per_node") == given
    assert load_experiment(written) == experiment
    assert ("gpus_per_node" in load_experiment(written).cluster.model_fields_set) == (given is not None)


def test_a_sweep_writes_a_config_for_each_task() -> None:
    file = write(Path())
    experiments = [load_experiment(file, [f"seed={seed}"]) for seed in (1, 2)]

    write_configs(Path("runs/sums"), experiments, sweep=True)

    assert [load_experiment(Path(f"runs/sums/slurm/tasks/{i}.yaml")).seed for i in (0, 1)] == [1, 2]


def test_it_runs_in_this_environment_or_in_a_container() -> None:
    experiment = load_experiment(write(Path()))

    bare = submission(experiment, Options(1), [experiment.run_dir], container=None, mounts=None, sweep=False)
    image = submission(
        experiment, Options(1), [experiment.run_dir], container="a#b:c", mounts="/data:/data", sweep=False
    )

    assert bare.variables == {"NEMORL_ENV": sys.prefix}
    assert image.variables == {"NEMORL_CONTAINER": "a#b:c", "NEMORL_MOUNTS": "/data:/data"}
    assert bare.command[:2] == ("sbatch", "--parsable")
    assert bare.command[-2:] == (str(SCRIPT), "runs/sums/slurm/config.yaml")
    assert SCRIPT.is_file()


def test_the_newest_submission_is_found_again() -> None:
    experiment = load_experiment(write(Path()))
    made = submission(experiment, Options(1), [experiment.run_dir], container=None, mounts=None, sweep=False)
    write_configs(experiment.run_dir, [experiment], sweep=False)
    assert latest(experiment.run_dir) is None

    made.keep(experiment.run_dir)

    assert latest(experiment.run_dir) == made


def test_a_folder_may_have_a_percent_sign() -> None:
    """Which Slurm takes for the beginning of a job's number."""
    experiment = load_experiment(write(Path()), ["run_dir='runs/a b ü, 100%j'"])
    made = submission(experiment, Options(1), [experiment.run_dir], container=None, mounts=None, sweep=False)

    assert "--output=runs/a b ü, 100%%j/slurm/%j.log" in made.command
    assert replace(made, job="12").log == Path("runs/a b ü, 100%j/slurm/12.log")


def test_a_task_of_a_sweep_is_a_submission_of_its_own() -> None:
    experiment = load_experiment(write(Path()))
    folders = [Path("runs/sums/00_a=1"), Path("runs/sums/01_a=2")]
    again = ["--nodes=1", "--sbatch=--qos=high"]
    made = submission(experiment, Options(1), folders, container=None, mounts=None, sweep=True, again=again)
    made = replace(made, job="12")

    made.keep(experiment.run_dir)

    assert latest(experiment.run_dir) == made
    task = latest(folders[1])
    assert task is not None
    assert (task.job, task.tasks, task.run_dirs) == ("12_1", False, ("runs/sums/01_a=2",))
    assert task.log == Path("runs/sums/slurm/12_1.log")
    config = "runs/sums/slurm/tasks/1.yaml"
    assert task.again == f"nemorl slurm submit --resume {config} --nodes=1 --sbatch=--qos=high"


def test_an_image_that_is_a_file_has_to_be_there() -> None:
    """And is named from the root, else pyxis would ask a registry for it."""
    with pytest.raises(SlurmError, match=r"--container images/a.sqsh: there is no such file"):
        image("images/a.sqsh")
    assert image("nvcr.io#nvidia/pytorch:25.10-py3") == "nvcr.io#nvidia/pytorch:25.10-py3"
    Path("a.sqsh").touch()
    assert image("a.sqsh") == image("./a.sqsh") == str(Path.cwd() / "a.sqsh")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:10", 1810),
        ("4:00:00", 14400),
        ("2-12", 216_000),
        ("1-0:30", 88_200),
        ("1-0:0:5", 86_405),
        ("UNLIMITED", 0),
    ],
)
def test_time_limits_are_read_as_slurm_does(text: str, seconds: int) -> None:
    assert limit_seconds(text) == seconds


def test_a_time_limit_that_is_none_is_refused() -> None:
    with pytest.raises(SlurmError, match="--time 4h: give minutes"):
        limit_seconds("4h")


def test_a_short_limit_has_its_signal_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's 300 s before the end would be before the beginning."""
    monkeypatch.delenv("SBATCH_SIGNAL", raising=False)
    assert "--signal" not in words(Options(nodes=1, time="4:00:00"))
    assert "--signal=USR1@75" in words(Options(nodes=1, time="5"))
    monkeypatch.setenv("SBATCH_SIGNAL", "USR1@30")
    assert "--signal" not in words(Options(nodes=1, time="5"))
