"""`nemorl slurm` with stubs of Slurm's commands."""

import fcntl
import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import pytest

from nemorl.slurm.node import Ports
from nemorl.slurm.start import Plan
from nemorl.slurm.submission import lock_run_folder
from tests.cli.conftest import Nemorl

SBATCH = """\
#!/bin/sh
test -f refuse && { echo "sbatch: error: Batch job submission failed: $(cat refuse)" >&2; exit 1; }
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


def test_submit_prints_the_job_and_the_next_commands(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("slurm", "submit", experiment, "--nodes", 2, "--time", 30, "seed=7")

    assert outcome.status == 0
    assert "submitted: job 12" in outcome.out
    assert "next: nemorl slurm status|logs|attach|cancel runs/sums" in outcome.out
    called = Path("sbatch.called").read_text().splitlines()
    assert {"--nodes=2", "--time=30", "--exclusive"} <= set(called)
    assert "seed: 7" in Path("runs/sums/slurm/config.yaml").read_text()


def test_a_dry_run_shows_the_script_and_the_command(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("slurm", "submit", experiment, "--dry-run")

    assert outcome.status == 0
    assert outcome.out.startswith("#!/bin/bash")
    assert "sbatch --parsable --job-name=sums" in outcome.out.splitlines()[-1]
    assert not Path("runs").exists()
    assert not Path("sbatch.called").exists()


def test_an_image_in_the_environment_is_checked_too(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMORL_CONTAINER", "a.sqsh")

    assert "a.sqsh: no such file" in nemorl("slurm", "submit", experiment, "--dry-run").err
    Path("a.sqsh").touch()
    outcome = nemorl("slurm", "submit", experiment, "--dry-run").out
    assert f"NEMORL_CONTAINER={Path.cwd()}/a.sqsh " in outcome


@pytest.mark.parametrize(
    ("variable", "options", "refusal"),
    [
        ("NEMORL_ENV=/nope", [], "NEMORL_ENV = /nope: no bin/nemorl in it"),
        ("NEMORL_PORTS=30000-20000", [], "NEMORL_PORTS = 30000-20000: expected the first and the last port"),
        ("NEMORL_MAX_RESTARTS=zero", [], "NEMORL_MAX_RESTARTS = zero: expected a number of restarts"),
        ("", ["--sbatch=--array=0-2"], "--sbatch=--array=0-2: its tasks would share one run folder"),
        ("", ["--cpu-nodes", "-1"], "--cpu-nodes: '-1': expected an integer of at least 1"),
        ("", ["--sweep", "seed=1,2", "--at-once", "0"], "--at-once: '0': expected an integer of at least 1"),
        ("", ["--time", "4h"], "--time 4h: expected minutes"),
    ],
)
def test_an_invalid_option_is_refused(
    nemorl: Nemorl,
    experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    options: list[str],
    refusal: str,
) -> None:
    if variable:
        monkeypatch.setenv(*variable.split("=", 1))

    outcome = nemorl("slurm", "submit", experiment, "--nodes", 1, *options)

    assert outcome.status == 2
    assert refusal in outcome.err
    assert not Path("runs").exists()


def test_an_image_has_packages_of_its_own(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    options = ("--gpus-per-node", 2, "generation.backend=trtllm", "policy.precision=bfloat16", "--dry-run")

    outcome = nemorl("slurm", "submit", experiment, *options)
    assert (outcome.status, "tensorrt_llm is not installed" in outcome.err) == (2, True)
    outcome = nemorl("slurm", "submit", experiment, *options, "--container", "nvcr.io#nvidia/x:1")
    assert (outcome.status, outcome.err.count("not installed")) == (0, 0), outcome.err


def test_an_experiment_that_cannot_run_is_not_submitted(nemorl: Nemorl, experiment: Path) -> None:
    """Sixteen ranks on two nodes of four GPUs."""
    words = (
        "--nodes",
        2,
        "--gpus-per-node",
        4,
        "policy.layout.data_parallel_size=16",
        "policy.precision=bfloat16",
    )

    outcome = nemorl("slurm", "submit", experiment, *words)

    assert outcome.status == 2
    assert "8 GPUs are too few" in outcome.err
    assert not Path("sbatch.called").exists()


def test_more_processes_than_cpus_are_not_submitted(nemorl: Nemorl, experiment: Path) -> None:
    """A policy rank, an engine and six rollout workers; Slurm's nodes have two and three CPUs."""
    Path("cpus").write_text("2\n3\n")

    outcome = nemorl("slurm", "submit", experiment, "--nodes", 2, "cluster.rollout_workers=6")

    assert outcome.status == 2
    assert "cluster.rollout_workers = 6\n" in outcome.err
    assert "the job has 6 (node 1 3, node 2 3)" in outcome.err
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

    outcome = nemorl("slurm", "submit", experiment)

    assert outcome.status == 2
    assert "run_dir = runs/sums: job 12, submitted at" in outcome.err
    Path("state").unlink()
    assert nemorl("slurm", "submit", experiment).status == 0


@pytest.mark.parametrize("sweep", [[], ["--sweep", "seed=1,2"]])
def test_a_refused_sbatch_leaves_nothing_behind(nemorl: Nemorl, experiment: Path, sweep: list[str]) -> None:
    Path("refuse").write_text("Invalid account")

    outcome = nemorl("slurm", "submit", experiment, *sweep)

    assert outcome.status == 1
    assert "`sbatch` failed: Batch job submission failed: Invalid account" in outcome.err
    assert not Path("runs/sums").exists()


def test_a_refused_sbatch_leaves_the_earlier_submission_as_it_was(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment, "seed=7")
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    Path("refuse").write_text("Invalid account")

    assert nemorl("slurm", "submit", experiment, "seed=8").status == 1

    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == before


def test_concurrent_submissions_wait_for_each_other(nemorl: Nemorl, experiment: Path) -> None:
    """The second looks for a job after the first has recorded its own."""
    order: list[str] = []

    def second() -> None:
        with lock_run_folder(Path("runs/sums")):
            order.append("second")

    with lock_run_folder(Path("runs/sums")):
        other = Thread(target=second)
        other.start()
        other.join(0.1)
        order.append("first")
    other.join()

    assert order == ["first", "second"]
    assert nemorl("slurm", "submit", experiment).status == 0
    with Path("runs/sums/slurm/submit.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was released


def test_each_task_of_a_sweep_is_checked_and_listed(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl(
        "slurm", "submit", experiment, "--sweep", "policy.optimizer.lr=1e-4,3e-4", "--sweep", "seed=1,2"
    )

    assert outcome.status == 0
    assert "4 tasks, listed in runs/sums/tasks.tsv" in outcome.out
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
    assert (
        f"run_dir = {task}: job 12_0, submitted at"
        in nemorl("slurm", "submit", experiment, f"run_dir={task}").err
    )
    outcome = nemorl("slurm", "cancel", task).out
    assert "continue with: nemorl slurm submit --resume runs/sums/slurm/tasks/0.yaml --nodes=1\n" in outcome


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
    outcome = nemorl("slurm", "cancel", here / "runs/sums")

    assert outcome.status == 0
    assert "12_0: ended; newest checkpoint: step 2" in outcome.out
    assert (
        f"continue with: cd {here} && nemorl slurm submit --resume runs/sums/slurm/tasks/0.yaml"
        in outcome.out
    )


def test_a_sweep_with_a_wrong_value_is_refused_whole(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("slurm", "submit", experiment, "--sweep", "seed=1,-1")

    assert outcome.status == 2
    assert "seed = -1" in outcome.err
    assert not Path("runs").exists()


def test_a_reason_is_that_of_the_job(nemorl: Nemorl, experiment: Path) -> None:
    """An earlier job left its own in the folder."""
    nemorl("slurm", "submit", experiment)
    for job, why in (("11", "of another"), ("12", "of this one")):
        folder = Path(f"runs/sums/slurm/{job}.0")
        folder.mkdir()
        record = {"code": 1, "reason": why, "step_before": 0, "step": 0}
        (folder / "exit.json").write_text(json.dumps(record))
        assert (why in nemorl("slurm", "status", experiment).out) is (job == "12")


def test_a_job_without_an_exit_record_has_slurms_reason(nemorl: Nemorl, experiment: Path) -> None:
    """A missing shell, a failed exec: no launcher started."""
    nemorl("slurm", "submit", experiment)
    failed = "JobId=12 JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0 NodeList=n1 Restarts=0"
    Path("state").write_text(f"{failed}\n")

    outcome = nemorl("slurm", "status", experiment).out

    assert "exit status 2, Slurm's reason: NonZeroExitCode; see runs/sums/slurm/12.log" in outcome


def test_status_shows_step_and_restarts(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment)
    Path("state").write_text(RUNNING)
    Path("runs/sums/metrics.jsonl").write_text('{"step": 3}\n')

    outcome = nemorl("slurm", "status", experiment)

    assert outcome.out.splitlines()[1].split() == ["12", "RUNNING", "n[1-2]", "3/10", "1", "runs/sums"]


def test_a_run_that_was_not_submitted_has_no_status(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("slurm", "status", experiment)

    assert outcome.status == 1
    assert "runs/sums was not submitted with `nemorl slurm submit`" in outcome.err


def test_logs_are_named(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment)
    Path("runs/sums/logs").mkdir()
    Path("runs/sums/logs/policy-0.log").write_text("hello\n")

    assert nemorl("slurm", "logs", experiment, "--list").out.splitlines() == [
        "job: runs/sums/slurm/12.log",
        "policy-0: runs/sums/logs/policy-0.log",
    ]
    assert "it has job, policy-0" in nemorl("slurm", "logs", experiment, "policy-9").err
    assert "12.log does not exist yet" in nemorl("slurm", "logs", experiment).err


def test_cancel_prints_the_state_and_how_to_continue(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment, "--time", 30, "--sbatch=--qos=high")
    Path("state").write_text(RUNNING)
    Path("runs/sums/checkpoints/step_00000004").mkdir(parents=True)

    outcome = nemorl("slurm", "cancel", experiment)

    assert outcome.status == 0
    assert "12: cancelled; newest checkpoint: step 4" in outcome.out
    again = "nemorl slurm submit --resume runs/sums/slurm/config.yaml --nodes=1 --time=30 --sbatch=--qos=high"
    assert f"continue with: {again}\n" in outcome.out


def test_a_cancelled_job_has_that_as_its_reason(nemorl: Nemorl, experiment: Path) -> None:
    """Not the reason for which its last start was requeued."""
    nemorl("slurm", "submit", experiment)
    assert "no checkpoint" in nemorl("slurm", "cancel", experiment).out
    assert "cancelled before it started" in nemorl("slurm", "status", experiment).out

    Path("runs/sums/slurm/12.0").mkdir()
    record = {"code": 75, "reason": "node n2 is lost", "step_before": 0, "step": 0}
    Path("runs/sums/slurm/12.0/exit.json").write_text(json.dumps(record))
    Path("state").write_text("JobId=12 JobState=PENDING Reason=BeginTime Restarts=1\n")
    assert "BeginTime" in nemorl("slurm", "status", experiment).out

    outcome = nemorl("slurm", "cancel", experiment).out + nemorl("slurm", "status", experiment).out

    assert "cancelled before its next start" in outcome
    assert "node n2 is lost" not in outcome


def test_cancel_marks_the_running_start(nemorl: Nemorl, experiment: Path) -> None:
    """Its launcher finds the mark and records the reason."""
    nemorl("slurm", "submit", experiment)
    Path("state").write_text(RUNNING)
    folder = Path("runs/sums/slurm/12.1")
    folder.mkdir()
    plan = Plan("10.0.0.1", {"n1": Ports(20000, 20099)}, {"n1": "a"})
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))

    assert nemorl("slurm", "cancel", experiment).status == 0

    assert (folder / "cancelled").exists()


def test_without_slurm_it_names_the_machine_to_use(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    outcome = nemorl("slurm", "submit", experiment)

    assert outcome.status == 1
    assert "`sbatch` is not installed here" in outcome.err


def test_attaching_to_a_job_that_does_not_run_is_refused(nemorl: Nemorl, experiment: Path) -> None:
    nemorl("slurm", "submit", experiment)
    Path("state").write_text("JobId=12 JobState=PENDING Reason=Resources\n")

    assert "job 12 is pending" in nemorl("slurm", "attach", experiment).err


@pytest.mark.parametrize(("node", "group"), [("n1", 0), ("c1", 1)])
def test_a_shell_finds_the_ray_of_its_job(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch, node: str, group: int
) -> None:
    """The newest start of this job, in the component of the node, and with no other token."""
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
