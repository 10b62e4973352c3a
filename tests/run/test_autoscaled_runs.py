"""Runs whose engines or policy come and go with the nodes of Ray's autoscaler."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.autoscaling import LocalAutoscalingCluster
from tests.run.runs import assert_same_run, finish, lines, start, tiny_model, write_experiment
from tests.run.test_scaled_runs import scale, wait_for_steps


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalAutoscalingCluster]:
    """A head with CPUs as the parameter says, and further nodes with others."""
    head_cpus, cpus = request.param
    node = {"resources": {"CPU": cpus, "object_store_memory": 100 * 2**20}, "labels": {"part": "more"}}
    node |= {"node_config": {}, "min_workers": 0, "max_workers": 2}
    cluster = LocalAutoscalingCluster(head_cpus, {"more": node}, tmp_path)
    try:
        cluster.start()
        for name, value in {"RAY_ADDRESS": cluster.address, **cluster.access}.items():
            monkeypatch.setenv(name, value)
        yield cluster
    finally:
        cluster.shutdown()


def wait(met: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 240
    while not met():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@pytest.mark.slow
# The head has places for what the run begins with.
@pytest.mark.parametrize("cluster", [(3, 1)], indirect=True)
def test_an_engine_joins_with_a_node_is_lost_with_it_and_gives_another_back(
    cluster: LocalAutoscalingCluster, tmp_path: Path
) -> None:
    config = write_experiment(
        tmp_path, tiny_model(tmp_path / "model"), "elastic", policy={"layout": {}},
        algorithm={"num_steps": 5000, "max_staleness": 1, "validation": {}},
        generation={"replicas": 1, "max_replicas": 2, "on_update": "restart"},
        data={"validation": None, "train": {"name": "arithmetic", "digits": 3, "size": 20000}},
        cluster={"deadlines": {"health": 5, "generation": 120}},
        checkpointing={"period": 10000}, logger={"console": "plain"},
    )  # fmt: skip
    run = tmp_path / "elastic"
    driver = start("train", config)

    def last(name: str) -> float:
        assert driver.poll() is None, driver.communicate()[0]
        steps = lines(run)
        return steps[-1].values[f"generation/{name}"] if steps else 0.0

    try:
        wait(lambda: last("replicas") == 2, "no engine has joined")
        for raylet in cluster.nodes():
            os.kill(raylet, signal.SIGKILL)
        wait(lambda: last("replicas_lost") == 1, "the loss of a node was not noticed")
        wait_for_steps(driver, run, 5)
        wait(lambda: last("replicas") == 2, "no node has replaced the lost one")
        for node in cluster.nodes().values():
            cluster.drain(node)
        wait(lambda: last("replicas_left") == 1, "the engine has not left the node that is drained")
        wait(lambda: last("replicas") == 2, "the engine has not joined elsewhere")
        assert scale(run, 1) == ["generation replica 1: left"]
        wait(lambda: not cluster.nodes(), "the nodes were not given back")
        wait_for_steps(driver, run, 3)
        counts = [last(f"replicas{name}") for name in ("", "_joined", "_left", "_lost", "_restarted")]
        assert counts == [1, 2, 2, 1, 1]
        driver.send_signal(signal.SIGTERM)
        status, output = finish(driver)
    finally:
        driver.kill()
    assert "Stopped by SIGTERM after step" in output, (status, output[-2000:])
    steps = lines(run)
    assert [s.step for s in steps] == list(range(1, len(steps) + 1))
    assert sum(s.values["errors"] for s in steps) == 0
    assert max(s.values["staleness/gap_0"] for s in steps if "staleness/gap_0" in s.values) < 1e-4


# The head has places for all but the policy.
@pytest.mark.slow
@pytest.mark.parametrize("cluster", [(2, 2)], indirect=True)
def test_a_policy_whose_node_is_lost_waits_for_another_and_no_task_is_lost(
    cluster: LocalAutoscalingCluster, tmp_path: Path
) -> None:
    # A plain label is refused that no node has yet.
    labels = {"policy": {"part": "in(more)"}, "generation": {"part": "!more"}, "rollout": {"part": "!more"}}
    config = write_experiment(
        tmp_path, tiny_model(tmp_path / "model"), "ahead",
        algorithm={"num_steps": 12, "max_staleness": 2, "validation": {}},
        generation={"on_update": "restart"},
        data={"validation": None, "train": {"name": "arithmetic", "digits": 3, "size": 2000}},
        cluster={"labels": labels, "placement": "PACK"},
        logger={"console": "plain", "samples_per_step": 16},
    )  # fmt: skip
    run = tmp_path / "ahead"
    driver = start("train", config)
    try:
        wait_for_steps(driver, run, 3)
        (raylet,) = cluster.nodes()
        os.kill(raylet, signal.SIGKILL)
        status, output = finish(driver)
    finally:
        driver.kill()
    assert status == 0, output
    text = (run / "logs" / "driver.log").read_text()
    assert "waiting for a node with room for policy ranks 0, 1 of" in text
    assert "restarted in" in text
    steps = lines(run)
    assert [line.step for line in steps] == list(range(1, 13))
    assert all(line.values["version/lag_max"] <= 2 for line in steps)
    assert sum(line.values["errors"] for line in steps) == 0
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    tasks = Counter(sample["task"] for sample in samples)
    given_up = sum(line.values.get("dropped/given_up", 0) for line in steps)
    # A group of four of each.
    assert (set(tasks.values()), len(tasks), given_up) == ({4}, 4 * 12, 0)


@pytest.mark.slow
def test_the_number_of_engines_does_not_change_what_is_sampled(tmp_path: Path) -> None:
    """On policy; gradients of SGD, so that rounding is not amplified."""
    settings: dict[str, Any] = {
        "policy": {"layout": {}, "optimizer": {"name": "sgd", "lr": 1e-2}},
        "algorithm": {"num_steps": 5000, "validation": {}},
        "data": {"validation": None, "train": {"name": "arithmetic", "digits": 3, "size": 20000}},
        "checkpointing": {"period": 10000},
    }
    model = tiny_model(tmp_path / "model")
    driver = start("train", write_experiment(tmp_path, model, "scaled", **settings))
    try:
        wait_for_steps(driver, tmp_path / "scaled", 2)
        scale(tmp_path / "scaled", 2)
        wait_for_steps(driver, tmp_path / "scaled", 3)
        scale(tmp_path / "scaled", 1)
        wait_for_steps(driver, tmp_path / "scaled", 3)
        driver.send_signal(signal.SIGTERM)
        status, output = finish(driver)
    finally:
        driver.kill()
    assert "Stopped by SIGTERM after step" in output, (status, output[-2000:])
    scaled = lines(tmp_path / "scaled")
    settings["algorithm"]["num_steps"] = len(scaled)
    status, output = finish(start("train", write_experiment(tmp_path, model, "one", **settings)))
    assert status == 0, output
    one = lines(tmp_path / "one")
    assert {s.values["generation/replicas"] for s in scaled} == {1, 2}
    for step in (*scaled, *one):
        for name in ("replicas", "replicas_joined", "replicas_left", "requests_moved", "tokens_kept"):
            step.values.pop(f"generation/{name}")
        step.values.pop("refit/gigabytes", None)  # to all engines
    assert_same_run(scaled, one)
