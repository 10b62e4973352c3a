import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nemorl.config.load import load_experiment
from nemorl.config.sweep import parse_axes, sweep_points
from nemorl.slurm import SlurmError
from nemorl.slurm.submission import (
    SCRIPT,
    Options,
    Submission,
    config_files,
    latest_submission,
    lock_run_folder,
    parse_time_limit,
    prepare_submission,
    resolve_image,
    sweep_table,
    sweep_tasks,
    write_files,
)
from tests.config.experiments import GRPO, write


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("NEMORL_")]:
        monkeypatch.delenv(name)


def words(options: Options, tasks: int = 0) -> str:
    """For a run `sums`."""
    return " ".join(options.sbatch_arguments("sums", Path("runs/sums/slurm"), tasks))


def test_a_job_gets_whole_nodes() -> None:
    assert words(Options(nodes=2, gpus_per_node=8, time="4:00:00", partition="gpu", account="me")) == (
        "--job-name=sums --output=runs/sums/slurm/%j.log --nodes=2 --exclusive --mem=0 --ntasks-per-node=1 "
        "--export=ALL --time=4:00:00 --account=me --partition=gpu --gpus-per-node=8"
    )


def test_a_sweep_is_an_array() -> None:
    arguments = words(Options(nodes=1, at_once=2), tasks=4)

    assert "--array=0-3%2" in arguments
    assert "--output=runs/sums/slurm/%A_%a.log" in arguments


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
        Options(nodes=2, cpu_nodes=4, sbatch=("--constraint=h100",), cpu_sbatch=("--qos=cpu",))
    ).partition(" : ")
    assert ("h100" in gpu, "h100" in cpu, cpu.endswith("--qos=cpu")) == (True, False, True)


def test_further_options_are_handed_on() -> None:
    assert words(Options(nodes=1, sbatch=("--qos=high", "--constraint=a b"))).endswith(
        "--qos=high --constraint=a b"
    )


@pytest.mark.parametrize(("extra", "given"), [("", None), ("cluster: {gpus_per_node: 0}", 0)])
def test_the_config_omits_gpus_per_node_where_it_was_not_given(extra: str, given: int | None) -> None:
    experiment = load_experiment(write(Path(), GRPO + extra))

    ((written, text),) = config_files(experiment.run_dir, [experiment], is_sweep=False).items()

    assert written == Path("runs/sums/slurm/config.yaml")
    written.parent.mkdir(parents=True)
    written.write_text(text)
    assert yaml.safe_load(text)["cluster"].get("gpus_per_node") == given
    assert load_experiment(written) == experiment
    assert ("gpus_per_node" in load_experiment(written).cluster.model_fields_set) == (given is not None)


def test_a_sweep_writes_a_config_for_each_task() -> None:
    file = write(Path())
    experiments = [load_experiment(file, [f"seed={seed}"]) for seed in (1, 2)]

    files = config_files(Path("runs/sums"), experiments, is_sweep=True)

    assert {path: yaml.safe_load(text)["seed"] for path, text in files.items()} == {
        Path("runs/sums/slurm/tasks/0.yaml"): 1,
        Path("runs/sums/slurm/tasks/1.yaml"): 2,
    }


def prepared(
    run_dir: str = "runs/sums", container: str | None = None, mounts: str | None = None
) -> Submission:
    """A submission of a run on one node."""
    folder = Path(run_dir)
    options = Options(1, container=container, mounts=mounts)
    return prepare_submission(folder, options, [folder], is_sweep=False)


def test_it_runs_in_this_environment_or_in_a_container() -> None:
    bare, image = prepared(), prepared(container="a#b:c", mounts="/data:/data")

    assert bare.variables == {"NEMORL_ENV": sys.prefix}
    assert image.variables == {"NEMORL_CONTAINER": "a#b:c", "NEMORL_MOUNTS": "/data:/data"}
    assert bare.command[:2] == ("sbatch", "--parsable")
    assert bare.command[-2:] == (str(SCRIPT), "runs/sums/slurm/config.yaml")
    assert SCRIPT.is_file()


def test_the_newest_submission_is_read_back() -> None:
    made = prepared()
    assert latest_submission(Path("runs/sums")) is None

    made.record(Path("runs/sums"))

    assert latest_submission(Path("runs/sums")) == made


def test_a_folder_may_have_a_percent_sign() -> None:
    """Slurm takes it for the beginning of a pattern such as %j."""
    made = prepared("runs/a b ü, 100%j")

    assert "--output=runs/a b ü, 100%%j/slurm/%j.log" in made.command
    assert replace(made, job="12").log == Path("runs/a b ü, 100%j/slurm/12.log")


def test_a_task_of_a_sweep_is_a_submission_of_its_own() -> None:
    folders = [Path("runs/sums/00_a=1"), Path("runs/sums/01_a=2")]
    options = Options(1, sbatch=("--qos=high",))
    made = prepare_submission(Path("runs/sums"), options, folders, is_sweep=True)
    made = replace(made, job="12")

    made.record(Path("runs/sums"))

    assert latest_submission(Path("runs/sums")) == made
    task = latest_submission(folders[1])
    assert task is not None
    assert (task.job, task.is_sweep, task.run_dirs) == ("12_1", False, ("runs/sums/01_a=2",))
    assert task.log == Path("runs/sums/slurm/12_1.log")
    config = "runs/sums/slurm/tasks/1.yaml"
    assert task.resume_command == f"nemorl slurm submit --resume {config} --nodes=1 --sbatch=--qos=high"


def test_a_failure_restores_the_files_of_before() -> None:
    """And leaves nothing of a run folder that it made."""
    folder = Path("runs/sums")
    kept, added = folder / "slurm" / "config.yaml", folder / "slurm" / "tasks" / "0.yaml"

    def fail(*paths: Path) -> None:
        with suppress(SlurmError), lock_run_folder(folder), write_files(dict.fromkeys(paths, "new")):
            assert all(path.read_text() == "new" for path in paths)
            raise SlurmError("sbatch failed")

    fail(kept, added)
    assert not folder.exists()
    kept.parent.mkdir(parents=True)
    kept.write_text("old")
    fail(kept, added)
    assert [path.name for path in kept.parent.iterdir() if path.name != "submit.lock"] == ["config.yaml"]
    assert kept.read_text() == "old"


def test_an_image_that_is_a_file_has_to_be_there() -> None:
    """And is named from the root, else pyxis would ask a registry for it."""
    with pytest.raises(SlurmError, match=r"--container images/a.sqsh: no such file"):
        resolve_image("images/a.sqsh")
    assert resolve_image("nvcr.io#nvidia/pytorch:25.10-py3") == "nvcr.io#nvidia/pytorch:25.10-py3"
    Path("a.sqsh").touch()
    assert resolve_image("a.sqsh") == resolve_image("./a.sqsh") == str(Path.cwd() / "a.sqsh")


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
    assert parse_time_limit(text) == seconds


def test_an_invalid_time_limit_is_refused() -> None:
    with pytest.raises(SlurmError, match="--time 4h: expected minutes"):
        parse_time_limit("4h")


def test_a_short_limit_has_a_later_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's 300 s before the end would be before the beginning."""
    monkeypatch.delenv("SBATCH_SIGNAL", raising=False)
    assert "--signal" not in words(Options(nodes=1, time="4:00:00"))
    assert "--signal=USR1@75" in words(Options(nodes=1, time="5"))
    monkeypatch.setenv("SBATCH_SIGNAL", "USR1@30")
    assert "--signal" not in words(Options(nodes=1, time="5"))


def test_the_signal_leaves_the_time_of_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own seconds, and 30 for Ray and the launchers."""
    monkeypatch.delenv("SBATCH_SIGNAL", raising=False)
    assert "--signal=USR1@150" in words(Options(nodes=1, time="10", stop_seconds=120))
    assert "--signal=USR1@150" in words(Options(nodes=1, stop_seconds=119.5))
    given = words(Options(nodes=1, sbatch=("--signal=B:USR1@150",), stop_seconds=120))
    assert given.count("--signal") == 1
    with pytest.raises(SlurmError, match=r"stop_seconds = 121 and the job's end take 151 s; set USR1@151"):
        words(Options(nodes=1, sbatch=("--signal=USR1@150",), stop_seconds=121))
    with pytest.raises(SlurmError, match=r"--time 2: checkpointing.stop_seconds = 90 .* raise the limit"):
        words(Options(nodes=1, time="2", stop_seconds=90))
    monkeypatch.setenv("SBATCH_SIGNAL", "USR1")  # 60 s before the limit
    with pytest.raises(SlurmError, match=r"--signal=USR1: checkpointing.stop_seconds = 40"):
        words(Options(nodes=1, stop_seconds=40))


def test_the_table_has_a_line_for_each_task() -> None:
    table = sweep_table(sweep_points(parse_axes(["seed=1,2"])), Path("runs/s"))

    assert table.splitlines() == [
        "task\trun_dir\tseed",
        "0\truns/s/00_seed=1\t1",
        "1\truns/s/01_seed=2\t2",
    ]


def test_an_invalid_sweep_names_the_option() -> None:
    with pytest.raises(SlurmError, match="--sweep seed: given twice"):
        sweep_tasks(Path("x.yaml"), ["seed=1", "seed=2"], None, None)
