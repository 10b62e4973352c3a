"""`nemorl slurm` with a stand-in for Slurm's commands."""

import fcntl
import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import pytest

from nemorl.slurm.ports import Ports
from nemorl.slurm.rendezvous import Plan
from nemorl.slurm.submission import alone
from tests.cli.conftest import Nemorl

SBATCH = """\
#!/bin/sh
printf '%s\\n' "$@" >> sbatch.called
echo 12
"""
SCONTROL = """\
#!/bin/sh
test -f state || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
cat state
"""
SCANCEL = """\
#!/bin/sh
echo "JobId=$1 JobState=CANCELLED Reason=None NodeList=n1 Restarts=0" > state
"""
SINFO = """\
#!/bin/sh
test -f cpus && cat cpus
"""
SRUN = """\
#!/bin/sh
echo "$@" "token=$RAY_AUTH_TOKEN $RAY_AUTH_TOKEN_PATH" > srun.called
"""
RUNNING = "JobId=12 JobState=RUNNING Reason=None Restarts=1 NodeList=n[1-2] NumNodes=2\n"


@pytest.fixture(autouse=True)
def _commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    commands = {"sbatch": SBATCH, "scontrol": SCONTROL, "scancel": SCANCEL, "sinfo": SINFO, "srun": SRUN}
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755 | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_submit_says_what_it_did_and_what_to_do_next(nemorl: Nemorl, experiment: Path) -> None:
    told = nemorl("slurm", "submit", experiment, "--nodes", 2, "--time", 30, "seed=7")

    assert told.status == 0
    assert "submitted: job 12" in told.out
    assert "next: nemorl slurm status|logs|attach|cancel runs/sums" in told.out
    called = Path("sbatch.called").read_text().splitlines()
    assert {"--nodes=2", "--time=30", "--exclusive"} <= set(called)
    assert "seed: 7" in Path("runs/sums/slurm/config.yaml").read_text()


def test_a_dry_run_shows_the_script_and_the_command(nemorl: Nemorl, experiment: Path) -> None:
    told = nemorl("slurm", "submit", experiment, "--dry-run")

    assert told.status == 0
    assert told.out.startswith("#!/bin/bash")
    assert "sbatch --parsable --job-name=sums" in told.out.splitlines()[-1]
    assert not Path("runs").exists()
    assert not Path("sbatch.called").exists()


def test_an_image_of_the_surroundings_is_looked_for_too(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMORL_CONTAINER", "a.sqsh")

    assert "a.sqsh: there is no such file" in nemorl("slurm", "submit", experiment, "--dry-run").err
    Path("a.sqsh").touch()
    told = nemorl("slurm", "submit", experiment, "--dry-run").out
    assert f"NEMORL_CONTAINER={Path.cwd()}/a.sqsh " in told


@pytest.mark.parametrize(
    ("variable", "options", "refusal"),
    [
        ("NEMORL_ENV=/nope", [], "NEMORL_ENV = /nope: there is no bin/nemorl in it"),
        ("NEMORL_PORTS=30000-20000", [], "NEMORL_PORTS = 30000-20000: name the first and the last port"),
        ("NEMORL_MAX_RESTARTS=zero", [], "NEMORL_MAX_RESTARTS = zero: give a number of restarts"),
        ("", ["--sbatch=--array=0-2"], "--sbatch=--array=0-2: its tasks would share one run folder"),
        ("", ["--cpu-nodes", "-1"], "--cpu-nodes: -1: give a number from 1"),
        ("", ["--sweep", "seed=1,2", "--at-once", "0"], "--at-once: 0: give a number from 1"),
        ("", ["--time", "4h"], "--time 4h: give minutes"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(
    nemorl: Nemorl,
    experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    options: list[str],
    refusal: str,
) -> None:
    if variable:
        monkeypatch.setenv(*variable.split("=", 1))

    told = nemorl("slurm", "submit", experiment, "--nodes", 1, *options)

    assert told.status == 2
    assert refusal in told.err
    assert not Path("runs").exists()


def test_an_image_has_packages_of_its_own(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemorl.plan.problems._installed", lambda package: False)
    options = ("--gpus-per-node", 2, "generation.backend=trtllm", "policy.precision=bfloat16", "--dry-run")

    told = nemorl("slurm", "submit", experiment, *options)
    assert (told.status, "tensorrt_llm is not installed" in told.err) == (2, True)
    told = nemorl("slurm", "submit", experiment, *options, "--container", "nvcr.io#nvidia/x:1")
    assert (told.status, told.err.count("not installed")) == (0, 0), told.err


def test_what_cannot_run_is_not_submitted(nemorl: Nemorl, experiment: Path) -> None:
    """Sixteen ranks on two nodes of four GPUs."""
    words = (
        "--nodes",
        2,
        "--gpus-per-node",
        4,
        "policy.layout.data_parallel_size=16",
        "policy.precision=bfloat16",
    )

    told = nemorl("slurm", "submit", experiment, *words)

    assert told.status == 2
    assert "8 GPUs are too few" in told.err
    assert not Path("sbatch.called").exists()


def test_what_no_node_has_the_cpus_for_is_not_submitted(nemorl: Nemorl, experiment: Path) -> None:
    """A policy rank, an engine and six rollout workers; Slurm's nodes have two and three CPUs."""
    Path("cpus").write_text("2\n3\n")

    told = nemorl("slurm", "submit", experiment, "--nodes", 2, "cluster.rollout_workers=6")

    assert told.status == 2
    assert "cluster.rollout_workers = 6 cpus" in told.err
    assert "there: node 1 3, node 2 3" in told.err
    assert not Path("sbatch.called").exists()
    assert nemorl("slurm", "submit", experiment, "--nodes", 2, "cluster.rollout_workers=4").status == 0


def test_cpu_nodes_are_nodes_of_the_run_too(nemorl: Nemorl, experiment: Path) -> None:
    """An address that only one of them reaches is refused before anything is queued."""
    words = ("slurm", "submit", experiment, "--nodes", 1, "--cpu-nodes", 1)

    assert nemorl(*words, "--cpu-sbatch=--qos=cpu").status == 0

    assert "num_nodes: 2" in Path("runs/sums/slurm/config.yaml").read_text()
    gpu, _, cpu = Path("sbatch.called").read_text().partition("\n:\n")
    assert ("--nodes=1" in gpu, "--nodes=1" in cpu, "--qos=cpu" in cpu) == (True, True, True)
    server = "generation={backend: openai, base_url: 'http://127.0.0.1:8000/v1', model: m}"
    assert "generation.base_url" in nemorl(*words, server).err


def test_a_folder_with_a_job_that_is_not_over_takes_no_other(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment)
    Path("state").write_text(RUNNING)

    told = nemorl("slurm", "submit", experiment)

    assert told.status == 1
    assert "run_dir = runs/sums: job 12 of" in told.err
    Path("state").unlink()
    assert nemorl("slurm", "submit", experiment).status == 0


def test_two_who_submit_at_once_wait_for_each_other(nemorl: Nemorl, experiment: Path) -> None:
    """The second looks for a job when the first has kept its own."""
    order: list[str] = []

    def second() -> None:
        with alone(Path("runs/sums")):
            order.append("second")

    with alone(Path("runs/sums")):
        other = Thread(target=second)
        other.start()
        other.join(0.1)
        order.append("first")
    other.join()

    assert order == ["first", "second"]
    assert nemorl("slurm", "submit", experiment).status == 0
    with Path("runs/sums/slurm/submit.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given back


def test_a_sweep_is_checked_task_by_task_and_listed(nemorl: Nemorl, experiment: Path) -> None:
    told = nemorl(
        "slurm", "submit", experiment, "--sweep", "policy.optimizer.lr=1e-4,3e-4", "--sweep", "seed=1,2"
    )

    assert told.status == 0
    assert "4 tasks, listed in runs/sums/tasks.tsv" in told.out
    assert "--array=0-3" in Path("sbatch.called").read_text()
    lines = Path("runs/sums/tasks.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["task", "run_dir", "policy.optimizer.lr", "seed"]
    assert lines[3].split("\t") == ["2", "runs/sums/02_lr=3e-4_seed=1", "3e-4", "1"]
    assert "run_dir: runs/sums/02_lr=3e-4_seed=1" in Path("runs/sums/slurm/tasks/2.yaml").read_text()
    Path("state").write_text(
        "JobId=13 ArrayJobId=12 ArrayTaskId=0 JobState=RUNNING Reason=None NodeList=n1 Restarts=0\n"
        "JobId=12 ArrayJobId=12 ArrayTaskId=1-3 JobState=PENDING Reason=Resources NumNodes=1 Restarts=0\n"
    )
    status = nemorl("slurm", "status", "runs/sums").out
    assert [line.split()[:2] for line in status.splitlines() if line.startswith("12_")] == [
        ["12_0", "RUNNING"],
        ["12_1", "PENDING"],
        ["12_2", "PENDING"],
        ["12_3", "PENDING"],
    ]
    assert "job-3: runs/sums/slurm/12_3.log" in nemorl("slurm", "logs", "runs/sums", "--list").out
    task = "runs/sums/00_lr=1e-4_seed=1"
    assert "job: runs/sums/slurm/12_0.log" in nemorl("slurm", "logs", task, "--list").out
    Path("state").write_text("JobId=13 ArrayJobId=12 ArrayTaskId=0 JobState=PENDING Reason=Resources\n")
    assert "job 12_0 is pending" in nemorl("slurm", "attach", task).err
    assert f"run_dir = {task}: job 12_0 of" in nemorl("slurm", "submit", experiment, f"run_dir={task}").err
    told = nemorl("slurm", "cancel", task).out
    assert "to go on: nemorl slurm submit --resume runs/sums/slurm/tasks/0.yaml --nodes=1\n" in told


def test_a_sweep_is_seen_from_another_folder(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nemorl("slurm", "submit", experiment, "--sweep", "seed=1,2")
    here = Path.cwd()
    Path("runs/sums/00_seed=1/metrics.jsonl").write_text('{"step": 3}\n')
    Path("runs/sums/00_seed=1/checkpoints/step_00000002").mkdir(parents=True)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    Path("state").write_text("JobId=12 ArrayJobId=12 ArrayTaskId=0-1 JobState=PENDING Reason=Resources\n")

    assert "12_0 PENDING 3" in " ".join(nemorl("slurm", "status", here / "runs/sums").out.split())
    told = nemorl("slurm", "cancel", here / "runs/sums")

    assert told.status == 0
    assert "12_0: ended; its newest checkpoint is of step 2" in told.out
    assert f"to go on: cd {here} && nemorl slurm submit --resume runs/sums/slurm/tasks/0.yaml" in told.out


def test_a_sweep_with_a_wrong_value_is_refused_whole(nemorl: Nemorl, experiment: Path) -> None:
    told = nemorl("slurm", "submit", experiment, "--sweep", "seed=1,-1")

    assert told.status == 2
    assert "seed = -1" in told.err
    assert not Path("runs").exists()


def test_a_reason_is_that_of_the_job(nemorl: Nemorl, experiment: Path) -> None:
    """The one before it left its own in the folder."""
    nemorl("slurm", "submit", experiment)
    for job, why in (("11", "of another"), ("12", "of this one")):
        folder = Path(f"runs/sums/slurm/{job}.0")
        folder.mkdir()
        ending = {"code": 1, "reason": why, "step_before": 0, "step": 0}
        (folder / "exit.json").write_text(json.dumps(ending))
        assert (why in nemorl("slurm", "status", experiment).out) is (job == "12")


def test_a_job_that_left_no_word_is_told_of_by_slurm(nemorl: Nemorl, experiment: Path) -> None:
    """A shell that is not there, an exec that fails: no launcher ever began."""
    nemorl("slurm", "submit", experiment)
    failed = "JobId=12 JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0 NodeList=n1 Restarts=0"
    Path("state").write_text(f"{failed}\n")

    told = " ".join(nemorl("slurm", "status", experiment).out.split())

    assert "exit status 2, Slurm's reason is NonZeroExitCode: see runs/sums/slurm/12.log" in told


def test_status_tells_step_and_restarts(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment)
    Path("state").write_text(RUNNING)
    Path("runs/sums/metrics.jsonl").write_text('{"step": 3}\n')

    told = nemorl("slurm", "status", experiment)

    assert told.out.splitlines()[1].split() == ["12", "RUNNING", "n[1-2]", "3/10", "1", "runs/sums"]


def test_a_run_that_was_not_submitted_has_no_status(nemorl: Nemorl, experiment: Path) -> None:
    told = nemorl("slurm", "status", experiment)

    assert told.status == 1
    assert "runs/sums was not submitted with `nemorl slurm submit`" in told.err


def test_logs_are_named(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment)
    Path("runs/sums/logs").mkdir()
    Path("runs/sums/logs/policy-0.log").write_text("hello\n")

    assert nemorl("slurm", "logs", experiment, "--list").out.splitlines() == [
        "job: runs/sums/slurm/12.log",
        "policy-0: runs/sums/logs/policy-0.log",
    ]
    assert "there are job, policy-0" in nemorl("slurm", "logs", experiment, "policy-9").err
    assert "12.log is not there yet" in nemorl("slurm", "logs", experiment).err


def test_cancel_says_what_became_of_it(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment, "--time", 30, "--sbatch=--qos=high")
    Path("state").write_text(RUNNING)
    Path("runs/sums/checkpoints/step_00000004").mkdir(parents=True)

    told = nemorl("slurm", "cancel", experiment)

    assert told.status == 0
    assert "12: cancelled; its newest checkpoint is of step 4" in told.out
    again = "nemorl slurm submit --resume runs/sums/slurm/config.yaml --nodes=1 --time=30 --sbatch=--qos=high"
    assert f"to go on: {again}\n" in told.out


def test_without_slurm_it_says_where_to_run(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    told = nemorl("slurm", "submit", experiment)

    assert told.status == 1
    assert "`sbatch` is not here" in told.err


def test_attaching_to_what_does_not_run_is_refused(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment)
    Path("state").write_text("JobId=12 JobState=PENDING Reason=Resources\n")

    assert "job 12 is pending" in nemorl("slurm", "attach", experiment).err


@pytest.mark.parametrize(("node", "group"), [("n1", 0), ("c1", 1)])
def test_a_shell_finds_the_ray_of_its_job(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch, node: str, group: int
) -> None:
    """The newest start of this job, in the part of it that the node belongs to; and nobody else's secret."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another's")
    nemorl("slurm", "submit", experiment, "--nodes", 1, "--cpu-nodes", 1)
    Path("state").write_text(RUNNING)
    ports = {"n1": Ports(20000, 20099), "c1": Ports(20000, 20099)}
    plan = Plan("10.0.0.1", ports, {"n1": "a", "c1": "b"})
    for start in ("12.1", "11.0"):  # the older one was written to last
        Path("runs/sums/slurm", start).mkdir()
        Path("runs/sums/slurm", start, "plan.json").write_text(json.dumps(asdict(plan)))

    assert nemorl("slurm", "attach", experiment, "--node", node, "--", "true").status == 0

    called = Path("srun.called").read_text()
    assert f"--jobid=12 --overlap --nodes=1 --ntasks=1 --nodelist={node} " in called
    assert f" --het-group={group} true" in called
    assert called.endswith(f"token= {Path.cwd()}/runs/sums/slurm/12.1/ray_token\n")


def test_a_command_for_a_node_may_have_options_of_its_own(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment)
    Path("state").write_text("JobId=12 JobState=PENDING Reason=Resources\n")

    assert "job 12 is pending" in nemorl("slurm", "attach", experiment, "--node", "n2", "--", "ls", "-l").err
    assert nemorl("slurm", "attach", experiment, "-l").status == 2
