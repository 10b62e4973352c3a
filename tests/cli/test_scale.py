"""`nemorl scale` where it is refused; tests/run has runs that are scaled."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from time import sleep

import pytest

from nemorl.config.load import load_experiment, to_yaml
from tests.cli.conftest import Nemorl


@pytest.fixture
def run_folder(experiment: Path, tmp_path: Path) -> Callable[..., Path]:
    """Make the folder of a run, of which this process is the driver, with fields set."""

    def make(*overrides: str, runs: bool = True) -> Path:
        folder = tmp_path / "runs" / "one"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(to_yaml(load_experiment(experiment, overrides)))
        lock = (folder / ".lock").open("w")
        lock.write(f"{os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        if runs:
            fcntl.flock(lock, fcntl.LOCK_EX)
        folders.append(lock)
        return folder

    folders: list[object] = []
    return make


def test_a_folder_without_a_run_and_one_that_is_not_being_run(nemorl: Nemorl, run_folder) -> None:
    outcome = nemorl("scale", "nowhere", "--replicas", 2)
    assert (outcome.status, "holds no run" in outcome.err) == (2, True)
    outcome = nemorl("scale", run_folder(runs=False), "--replicas", 2)
    assert (outcome.status, "is not being run" in outcome.err) == (2, True)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["generation={backend: megatron, max_new_tokens: 8}"], "number is policy.layout.data_parallel_size"),
        (
            ["generation={backend: vllm, colocated: true, max_new_tokens: 8}"],
            "engines on the policy's devices are as many as those",
        ),
    ],
)
def test_engines_whose_number_is_fixed(nemorl: Nemorl, run_folder, overrides: list[str], fix: str) -> None:
    outcome = nemorl("scale", run_folder(*overrides), "--replicas", 2)
    assert outcome.status == 2
    assert "generation.max_replicas = 2" in outcome.err
    assert fix in outcome.err


def test_what_the_run_reports_is_shown_until_it_is_complete_or_has_failed(nemorl: Nemorl, run_folder) -> None:
    folder = run_folder()
    up, first, second = {"state": "up"}, "generation replica 0", "generation replica 1"
    stages = [
        {first: up, second: {"state": "waiting"}},
        {first: up, second: {"state": "lost", "cause": "its port is taken"}},
    ]

    def answer() -> None:
        while not (folder / "scale.json").exists():
            sleep(0.01)
        request = json.loads((folder / "scale.json").read_text())
        assert request["number"] == 2
        for replicas in stages:
            report = {"number": 2, "request": request["id"], "replicas": replicas}
            (folder / "new").write_text(json.dumps(report))
            (folder / "new").replace(folder / "replicas.json")
            sleep(1)

    driver = Thread(target=answer)
    driver.start()
    outcome = nemorl("scale", folder, "--replicas", 2)
    driver.join()
    assert outcome.status == 1
    shown = outcome.out.splitlines()
    assert shown[0] == f"{first}: up"
    assert shown[-1] == f"{second}: given up: its port is taken"
    assert "continues with 1 of 2 generation replicas" in outcome.err


def test_a_driver_that_does_not_answer_is_waited_for_no_longer_than_asked(nemorl: Nemorl, run_folder) -> None:
    folder = run_folder()
    outcome = nemorl("scale", folder, "--replicas", 2, "--wait", 0.3)
    assert outcome.status == 1
    assert "does not have 2 generation replicas after 0.3 s; it continues to try" in outcome.err
