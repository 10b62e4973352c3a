"""The web app cancels jobs of a real Slurm."""

import json
from pathlib import Path

import pytest

from nemorl.slurm.submission import Submission
from tests.slurm.cluster import SlurmCluster
from tests.slurm.jobs import Place, until
from tests.ui.folders import make_run
from tests.ui.requests import KEY, Client, asked, get


def cancelled(root: Path, run: str) -> dict[str, object]:
    """The answer to *Cancel job*."""

    async def work(client: Client) -> dict[str, object]:
        answer = await client.post("/api/control/cancel", headers=KEY, json={"run": run})
        assert answer.status == 200, await answer.text()
        return dict(json.loads(await answer.text()))

    return asked(root, work)


@pytest.mark.ci
def test_the_job_of_a_run_on_another_host_is_cancelled(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job only sleeps in place of a run, whose folder names another host as that of its driver."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    folder = make_run(tmp_path / "run", pid=1, host="elsewhere", live={})
    job = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 1000").strip()
    words = ("sbatch", f"--output={tmp_path}/job.log", "config.yaml")
    Submission(words, {}, str(tmp_path), (str(folder),), job=job).record(folder)

    def state() -> str:
        facts = slurm.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(fact.partition("=")[2] for fact in facts if fact.startswith("JobState="))

    until(lambda: state() == "RUNNING", "a job that runs")
    head = get(tmp_path, "/api/watch/state", run="run")[1]["head"]
    assert (head["is_job"], head["is_here"]) == (True, False)

    assert cancelled(tmp_path, "run") == {"jobs": [f"job {job}: CANCELLED"]}
    assert state() == "CANCELLED"


@pytest.mark.slow
def test_a_run_saves_its_last_step_when_its_job_is_cancelled(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    job = place.submit(place.config("from-the-web-app", "algorithm: {num_steps: 2000}"), "--nodes", "2")
    job.reaches_step(2)
    assert cancelled(place.folder, "runs/from-the-web-app") == {"jobs": [f"job {job.number}: CANCELLED"]}
    assert job.ends() == "CANCELLED"
    job.leaves_nothing()
    saved = max(int(path.name.removeprefix("step_")) for path in (job.run_dir / "checkpoints").glob("step_*"))
    assert saved == job.step
