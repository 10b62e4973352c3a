"""Runs that lose a node of the policy: raylets of one Ray cluster, which share this machine.

The policy is on nodes of its own; engines, rollout workers and the driver are on the head.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from nemorl.cluster.runtime import SYSTEM_CONFIG
from nemorl.observe.metrics import StepMetrics
from tests.run.runs import assert_same_run, finish, lines, start, write_experiment
from tests.run.test_layouts_of_runs import assert_same_figures

SHARED = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
# By default Ray takes 15 s; the bound on a single answer is its default, 10 s.
QUICK = SYSTEM_CONFIG | {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
PART = "nemorl.io/part"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The head of a cluster, with places for all but the policy."""
    head = {**SHARED, "node_name": "head", "num_cpus": 2, "_system_config": QUICK}
    started = Cluster(initialize_head=True, head_node_args=head)
    yield started
    started.shutdown()


@pytest.fixture(autouse=True)
def joined(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of these tests join the cluster, and each begins without nodes for the policy."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield
    for node in [*cluster.worker_nodes]:
        cluster.remove_node(node, allow_graceful=False)


def add_node(cluster: Cluster, name: str, cpus: int = 1) -> Any:
    return cluster.add_node(**SHARED, num_cpus=cpus, node_name=name, labels={PART: "train"})


def experiment(folder: Path, model: Path, name: str, cluster: dict[str, Any], **changes: Any) -> Path:
    """Ranks have one thread: their number is seen in the last digits."""
    labels = {"policy": {PART: "train"}, "generation": {PART: "!train"}, "rollout": {PART: "!train"}}
    on_nodes = {"num_nodes": 2, "labels": labels, "policy_threads": 1, **cluster}
    changes = {"generation": {"threads": 1, "transport": "gloo"}, **changes}
    return write_experiment(folder, model, name, cluster=on_nodes, **changes)


def two_copies(memory: Path) -> dict[str, Any]:
    """A policy of two ranks, of which nothing is on disk before the last step."""
    memory.mkdir()
    return {
        "policy": {"layout": {"data_parallel_size": 2}},
        "algorithm": {"num_steps": 30, "validation": {"period": 15}},
        "checkpointing": {"period": 100, "memory_period": 1, "memory_dir": str(memory)},
    }


@pytest.fixture(scope="module")
def undisturbed(folder: Path, model: Path) -> Path:
    """On one node, which is not of the cluster."""
    alone = {"num_nodes": 1, "labels": {}}
    config = experiment(folder, model, "undisturbed", alone, **two_copies(folder / "memory"))
    status, output = finish(start("train", config), seconds=600)
    assert status == 0, output
    return folder / "undisturbed"


def wait_for_step(driver: "subprocess.Popen[str]", run: Path, number: int) -> None:
    end = time.monotonic() + 600
    while len(lines(run)) < number:
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end, "the run makes no steps"
        time.sleep(0.05)


def wait_for_memory(driver: "subprocess.Popen[str]", memory: Path) -> None:
    """Until a checkpoint is complete on two nodes."""
    end = time.monotonic() + 600
    while len(names := [path.name for path in memory.glob("nemorl-state-*/step_*")]) == len(set(names)):
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end, "no checkpoint is kept in memory"
        time.sleep(0.02)


def wait_for_log(driver: "subprocess.Popen[str]", run: Path, text: str) -> None:
    log, end = run / "logs" / "driver.log", time.monotonic() + 600
    while text not in log.read_text():
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.1)


@pytest.mark.slow
def test_a_policy_waits_for_a_node_and_takes_its_state_from_the_buddy(
    cluster: Cluster, folder: Path, model: Path, undisturbed: Path
) -> None:
    spread = {"num_nodes": 3, "placement": "SPREAD"}
    add_node(cluster, "one")
    two = add_node(cluster, "two")
    run = folder / "moved"
    memory = folder / "memory of moved"
    driver = start("train", experiment(folder, model, "moved", spread, **two_copies(memory)))
    try:
        wait_for_memory(driver, memory)
        cluster.remove_node(two, allow_graceful=False)
        waits = "room for policy rank 1 of two (1 CPU), for at most 1800 s (cluster.deadlines.lost_node)"
        wait_for_log(driver, run, waits)
        add_node(cluster, "three")
        status, output = finish(driver, seconds=600)
    finally:
        driver.kill()
    assert status == 0, output
    text = (run / "logs" / "driver.log").read_text()
    assert output.count("node two was lost in stage") == 1
    assert "node three: policy rank 1" in text
    assert re.search(r"continuing after step [1-9]", text), text
    last = lines(run)[-1].values
    assert (last["nodes/lost"], last["nodes/policy_ranks"]) == (1, 2)
    assert_same_run(without_nodes(run), lines(undisturbed))


@pytest.mark.slow
def test_a_policy_shrinks_to_the_nodes_that_are_left(
    cluster: Cluster, folder: Path, model: Path, undisturbed: Path
) -> None:
    """Other layouts differ by rounding only."""
    add_node(cluster, "one")
    two = add_node(cluster, "two")
    run = folder / "shrunk"
    shrinks = {"num_nodes": 3, "placement": "SPREAD", "on_lost_node": "shrink"}
    memory = folder / "memory of shrunk"
    driver = start("train", experiment(folder, model, "shrunk", shrinks, **two_copies(memory)))
    try:
        wait_for_memory(driver, memory)
        cluster.remove_node(two, allow_graceful=False)
        status, output = finish(driver, seconds=600)
    finally:
        driver.kill()
    assert status == 0, output
    text = (run / "logs" / "driver.log").read_text()
    assert "policy restarts with a data-parallel size of 1 instead of 2" in text
    assert "node one: policy rank 0" in text
    assert re.search(r"continuing after step [1-9]", text), text
    last = lines(run)[-1].values
    assert (last["nodes/lost"], last["nodes/policy_ranks"]) == (1, 1)
    assert_same_figures(without_nodes(run), lines(undisturbed))


def without_nodes(run: Path) -> list[StepMetrics]:
    """Without the metrics that only a run with a lost node has."""
    return [
        replace(step, values={k: v for k, v in step.values.items() if not k.startswith("nodes/")})
        for step in lines(run)
    ]


@pytest.mark.slow
def test_a_run_without_a_node_ends_with_the_reason(cluster: Cluster, folder: Path, model: Path) -> None:
    lost = add_node(cluster, "one", cpus=2)
    run = folder / "bereft"
    soon = {"deadlines": {"lost_node": 2}}
    driver = start("train", experiment(folder, model, "bereft", soon, algorithm={"num_steps": 1000}))
    try:
        wait_for_step(driver, run, 1)
        cluster.remove_node(lost, allow_graceful=False)
        status, output = finish(driver, seconds=600)
    finally:
        driver.kill()
    assert status == 1, output
    problem = (
        "cluster.deadlines.lost_node = 2: no node has room for policy ranks 0, 1 of one (2 CPU); add a node"
    )
    assert problem in output, output
    assert "node one was lost in stage" in output
    assert "Traceback" not in output
