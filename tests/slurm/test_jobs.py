import subprocess

import pytest

from nemorl.slurm.jobs import OUT_OF_TIME, Job, find_jobs, lost_nodes

PENDING = (
    "JobId=5 ArrayJobId=5 ArrayTaskId=2-3,7%2 JobName=a b UserId=root(0) Priority=1 JobState=PENDING "
    "Reason=Resources Dependency=(null) Requeue=1 Restarts=2 NodeList=(null) NumNodes=2-2 NumCPUs=2 "
    "Command=/x/nemorl.sbatch c d=e TRES=cpu=2,node=2"
)


def test_a_record_of_scontrol_is_read_by_its_names() -> None:
    job = Job.parse(PENDING)

    assert (job.state, job.restarts, job.nodes) == ("PENDING", 2, "2")
    assert job.fields["JobName"] == "a b"
    assert job.fields["TRES"] == "cpu=2,node=2"
    assert job.reason == "Resources"


@pytest.mark.parametrize(("index", "expected"), [(1, False), (2, True), (3, True), (4, False), (7, True)])
def test_tasks_that_wait_share_a_record(index: int, expected: bool) -> None:
    assert Job.parse(PENDING).has_task(index) is expected


def test_a_running_job_has_its_nodes_and_no_reason() -> None:
    job = Job({"JobState": "RUNNING", "Reason": "None", "NodeList": "n[1-2]", "NumNodes": "2"})

    assert (job.is_active, job.nodes, job.reason) == (True, "n[1-2]", "")


@pytest.mark.parametrize(
    ("number", "out", "error"),
    [("99", "", "slurm_load_jobs error: Invalid job id specified\n"), ("4_3", "Job 4_3 not found\n", "")],
)
def test_a_job_that_slurm_has_forgotten_has_no_records(
    monkeypatch: pytest.MonkeyPatch, number: str, out: str, error: str
) -> None:
    """Slurm answers differently for a task of an array."""
    answer = subprocess.CompletedProcess([], 1, out, error)
    monkeypatch.setattr("nemorl.slurm.jobs.call", lambda *words, **options: answer)

    assert find_jobs(number) == []


@pytest.mark.parametrize("state", ["REQUEUE_HOLD", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT"])
def test_a_job_that_is_held_or_between_states_is_active(state: str) -> None:
    assert Job({"JobState": state}).is_active
    assert not Job({"JobState": "TIMEOUT"}).is_active


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"JobState": "PENDING", "Reason": "BeginTime"}, "BeginTime"),
        ({"JobState": "PENDING", "Reason": "None"}, ""),
        (
            {"JobState": "FAILED", "Reason": "NonZeroExitCode", "ExitCode": "2:0"},
            "exit status 2, Slurm's reason: NonZeroExitCode",
        ),
        (
            {"JobState": "NODE_FAIL", "Reason": "NodeDown", "ExitCode": "0:9"},
            "signal 9, Slurm's reason: NodeDown",
        ),
        ({"JobState": "CANCELLED", "Reason": "None", "ExitCode": "0:15"}, ""),
    ],
)
def test_the_reason_is_slurms_own(fields: dict[str, str], reason: str) -> None:
    assert Job(fields).reason == reason


def test_nodes_that_slurm_cannot_use_are_lost() -> None:
    output = (
        "n1|allocated|none\nn1|allocated|none\nn2|down*|Not responding\nn3|completing*|none\nn4|mixed|none\n"
    )

    assert lost_nodes(output) == ["n2 (down*: Not responding)", "n3 (completing*: none)"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"JobState": "COMPLETING", "Reason": "TimeLimit", "Restarts": "1"}, OUT_OF_TIME),
        ({"JobState": "RUNNING", "PreemptTime": "2026-11-21T23:41:13", "Restarts": "1"}, "pre-empted"),
        ({"JobState": "COMPLETING", "Restarts": "2"}, "pre-empted, or requeued by hand"),
        ({"JobState": "COMPLETING", "PreemptTime": "None", "Restarts": "1"}, "cancelled"),
        ({"JobState": "RUNNING", "PreemptTime": "None", "Restarts": "1"}, "signal sent by a user"),
    ],
)
def test_why_a_start_was_terminated(fields: dict[str, str], why: str) -> None:
    assert Job(fields).why_terminated(restart=1) == why
