import subprocess

import pytest

from nemorl.slurm.jobs import OUT_OF_TIME, Job, jobs, lost_nodes, parsed

PENDING = (
    "JobId=5 ArrayJobId=5 ArrayTaskId=2-3,7%2 JobName=a b UserId=root(0) Priority=1 JobState=PENDING "
    "Reason=Resources Dependency=(null) Requeue=1 Restarts=2 NodeList=(null) NumNodes=2-2 NumCPUs=2 "
    "Command=/x/nemorl.sbatch c d=e TRES=cpu=2,node=2"
)


def test_a_record_of_scontrol_is_read_by_its_names() -> None:
    job = parsed(PENDING)

    assert (job.state, job.restarts, job.nodes) == ("PENDING", 2, "2")
    assert job.facts["JobName"] == "a b"
    assert job.facts["TRES"] == "cpu=2,node=2"
    assert job.reason == "waits until enough nodes are free"


@pytest.mark.parametrize(("index", "there"), [(1, False), (2, True), (3, True), (4, False), (7, True)])
def test_tasks_that_wait_share_a_record(index: int, there: bool) -> None:
    assert parsed(PENDING).is_task(index) is there


def test_a_running_job_has_its_nodes_and_no_reason() -> None:
    job = Job({"JobState": "RUNNING", "Reason": "None", "NodeList": "n[1-2]", "NumNodes": "2"})

    assert (job.active, job.nodes, job.reason) == (True, "n[1-2]", "")


@pytest.mark.parametrize(
    ("number", "out", "error"),
    [("99", "", "slurm_load_jobs error: Invalid job id specified\n"), ("4_3", "Job 4_3 not found\n", "")],
)
def test_what_slurm_has_forgotten_has_no_records(
    monkeypatch: pytest.MonkeyPatch, number: str, out: str, error: str
) -> None:
    """It says so of a task in another way than of a job."""
    told = subprocess.CompletedProcess([], 1, out, error)
    monkeypatch.setattr("nemorl.slurm.jobs.call", lambda *words, **options: told)

    assert jobs(number) == []


@pytest.mark.parametrize("state", ["REQUEUE_HOLD", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT"])
def test_a_job_that_is_held_or_between_states_is_not_over(state: str) -> None:
    assert Job({"JobState": state}).active
    assert not Job({"JobState": "TIMEOUT"}).active


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("BeginTime", "queued again"),
        ("ReqNodeNotAvail,_UnavailableNodes:n2", "nodes that it needs are down"),
        ("PartitionConfig", "lower --nodes or --time"),
        ("SomethingNew", "Slurm's reason is SomethingNew"),
    ],
)
def test_reasons_are_words(code: str, words: str) -> None:
    assert words in Job({"JobState": "PENDING", "Reason": code}).reason


def test_nodes_that_slurm_cannot_use_are_lost() -> None:
    told = (
        "n1|allocated|none\nn1|allocated|none\nn2|down*|Not responding\nn3|completing*|none\nn4|mixed|none\n"
    )

    assert lost_nodes(told) == ["n2 (down*: Not responding)", "n3 (completing*: none)"]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"JobState": "COMPLETING", "Reason": "TimeLimit", "Restarts": "1"}, OUT_OF_TIME),
        ({"JobState": "RUNNING", "PreemptTime": "2026-11-21T23:41:13", "Restarts": "1"}, "pre-empted"),
        ({"JobState": "COMPLETING", "Restarts": "2"}, "pre-empted, or queued again by hand"),
        ({"JobState": "COMPLETING", "PreemptTime": "None", "Restarts": "1"}, "cancelled"),
        ({"JobState": "RUNNING", "PreemptTime": "None", "Restarts": "1"}, "told to end, not by Slurm"),
    ],
)
def test_a_start_knows_why_it_was_terminated(facts: dict[str, str], why: str) -> None:
    assert Job(facts).why_terminated(restart=1) == why
