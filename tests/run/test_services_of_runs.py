"""Runs whose rewards, reference and scoring process are killed or stopped: nothing changes but the time.

The reward service is restarted by a thread, as a supervisor would, the processes of the run by the run.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemorl.config.load import load_experiment
from nemorl.rollout.collector import Collector
from nemorl.run.train import train
from nemorl.session.handles import ModelHandle
from tests.run.faults import Faults, processes
from tests.run.runs import lines, timeless, tiny_model, write_experiment
from tests.run.test_reward_runs import reward_model

SETTINGS: dict[str, Any] = {
    "env": {"name": "math"},
    "policy": {"layout": {}},
    "reference": {},
    "algorithm": {"num_steps": 4, "num_prompts_per_step": 2, "validation": {}},
    "checkpointing": {"period": 4},
    # A call of a scoring process imports a large library first, on a busy machine.
    "cluster": {"policy_threads": 1, "deadlines": {"health": 5.0, "environment": 20.0}},
    "generation": {"threads": 1},
}


class RewardService:
    """A server in a process of its own, started again when it is gone."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._closed = False
        self.process = self._start()
        self._supervisor = threading.Thread(target=self._supervise)
        self._supervisor.start()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-m", "tests.run.reward_service", str(self.port)])

    def _supervise(self) -> None:
        while not self._closed:
            if self.process.poll() is not None:
                time.sleep(1.0)
                self.process = self._start()
            time.sleep(0.1)

    def close(self) -> None:
        self._closed = True
        self._supervisor.join()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def service() -> Iterator[RewardService]:
    service = RewardService()
    yield service
    service.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, service: RewardService) -> Path:
    folder = tmp_path_factory.mktemp("services")
    model = tiny_model(folder / "model")
    taste = {"kind": "local_model", "name": "taste", "layout": {"tensor_parallel_size": 2}}
    taste |= {"model_path": str(reward_model(folder / "taste", model))}
    digits = {"kind": "model", "name": "digits", "model": "digits", "deadline": 5.0}
    digits |= {"url": f"http://127.0.0.1:{service.port}/v1", "max_retries": 0}
    for name in ("undisturbed", "killed", "stopped"):
        write_experiment(folder, model, name, rewards=[taste, digits], **SETTINGS)
    train(load_experiment(folder / "undisturbed.yaml"))
    return folder


def scoring_process(run: Path) -> int:
    """The child of the rollout worker in which answers are compared."""
    children = psutil.Process(processes(run, "rollout-0")[-1]).children(recursive=True)
    return next(child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))


def struck(folder: Path, service: RewardService, name: str, number: signal.Signals, patch: Any) -> Path:
    """A run in which each of these processes once receives the signal."""
    run = folder / name
    faults = Faults(run, patch)

    def of_service() -> None:
        os.kill(service.process.pid, number)
        if number == signal.SIGSTOP:  # the supervisor looks less often than calls are repeated
            threading.Timer(12.0, service.process.kill).start()

    faults.before(Collector, "advance", 2, lambda: os.kill(scoring_process(run), number))  # as step 2 begins
    faults.before(Collector, "advance", 3, of_service)
    faults.at(ModelHandle, "values", 3, number, process="reward_0-1", group="reward_0")
    faults.at(ModelHandle, "logprobs", 3, number, process="reference-0", group="reference")
    train(load_experiment(folder / f"{name}.yaml"))
    assert sorted(faults.sent) == ["advance", "advance", "logprobs", "values"]
    return run


def assert_same(run: Path, other: Path) -> None:
    """Up to the last digits of float32: which answers share a batch of the engine or of the reward model
    depends on when they come, and kernels round batches of other sizes otherwise."""
    retries = "reward_retries/digits", "reward_retries/taste", "environment/retries"
    for ours, theirs in zip(lines(run), lines(other), strict=True):
        mine, its = timeless(ours), timeless(theirs)
        for name in retries:
            mine.pop(name)
            assert its.pop(name) == 0
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-5), f"step {ours.step}"
        assert mine["errors"] == 0


@pytest.mark.slow
def test_killed_services_change_nothing(
    folder: Path, service: RewardService, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = struck(folder, service, "killed", signal.SIGKILL, monkeypatch)
    assert_same(run, folder / "undisturbed")
    assert sum(line.values["reward_retries/digits"] for line in lines(run)) > 0
    text = (run / "logs" / "driver.log").read_text()
    assert "reward_0 lost, restarting: reward_0 rank 1 died" in text
    assert "reference lost, restarting: reference rank 0 died" in text
    assert len(processes(run, "reward_0-0")) == len(processes(run, "reference-0")) == 2
    assert len(processes(run, "policy-0")) == 1
    said = (run / "logs" / "rollout-0.log").read_text()
    assert re.search(r"reward `digits` at http://127.0.0.1:\d+/v1 does not answer; calls wait for it", said)
    assert re.search(r"reward `digits` at http://127.0.0.1:\d+/v1 answers again", said)


@pytest.mark.slow
def test_stopped_services_change_nothing(
    folder: Path, service: RewardService, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = struck(folder, service, "stopped", signal.SIGSTOP, monkeypatch)
    assert_same(run, folder / "undisturbed")
    assert sum(line.values["environment/retries"] for line in lines(run)) > 0
    text = (run / "logs" / "driver.log").read_text()
    assert "reward_0 lost, restarting: reward_0 hangs in stage 'values': no response from rank 1 in 5" in text
    assert "reference lost, restarting: reference hangs in stage 'logprobs': no response from rank 0" in text
    said = (run / "logs" / "rollout-0.log").read_text()
    assert "calls wait for it: reward `digits`: no answer within 5 s" in said
