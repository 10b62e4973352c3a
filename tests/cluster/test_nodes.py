"""Runs over several nodes: two raylets of one Ray cluster, which share this machine."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from nemorl.cluster.runtime import SYSTEM_CONFIG
from tests.run.runs import finish, lines, start, timeless, tiny_model, write_experiment
from tests.run.test_reward_runs import reward_model

SHARED = {"include_dashboard": False, "object_store_memory": 100 * 2**20, "num_cpus": 4}
SECOND = {**SHARED, "node_name": "second", "labels": {"ray.io/gpu-domain": "east"}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes of different labels. Drivers of these tests are processes of their own."""
    try:
        started = two_nodes()
    except Exception:  # noqa: BLE001 - Ray's own, when a busy machine takes more than its 30 s
        started = two_nodes()
    yield started
    started.shutdown()


def two_nodes() -> Cluster:
    """A head and another node."""
    head = {**SHARED, "node_name": "first", "labels": {"ray.io/gpu-domain": "west"}}
    # By default Ray takes 15 s to find a loss; a single answer may still take its default, 10 s.
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
    head["_system_config"] = SYSTEM_CONFIG | quick
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**SECOND)
    return cluster


@pytest.fixture(autouse=True)
def joined(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both nodes are there whatever an earlier test lost, and commands that a test starts join them."""
    for node in [*cluster.worker_nodes]:
        if node._ray_params.node_name != SECOND["node_name"]:
            cluster.remove_node(node, allow_graceful=False)
    if not cluster.worker_nodes:
        cluster.add_node(**SECOND)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)


@pytest.mark.slow
def test_a_policy_over_two_nodes_trains_as_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path / "model")
    taste = {
        "kind": "local_model",
        "name": "taste",
        "model_path": str(reward_model(tmp_path / "taste", model)),
    }
    changes = {
        "rewards": [taste, {"function": "tests.run.rewards:starts_right"}],
        "algorithm": {"num_steps": 2, "validation": {"period": 2}},
        "policy": {"layout": {"data_parallel_size": 2}},
    }
    one = {"policy_threads": 1}  # the number of threads is seen in the last digits
    spread = {**one, "num_nodes": 2, "placement": "SPREAD"}
    sampler = {"threads": 1, "transport": "gloo"}
    apart = write_experiment(tmp_path, model, "apart", cluster=spread, generation=sampler, **changes)
    status, output = finish(start("train", apart))
    assert status == 0, output
    monkeypatch.delenv("RAY_ADDRESS")
    together = write_experiment(
        tmp_path, model, "together", cluster=one, generation={"threads": 1}, **changes
    )
    status, output = finish(start("train", together))
    assert status == 0, output
    told = json.loads((tmp_path / "apart" / "header.json").read_text())[-1]["run"]
    assert told["node second"].startswith("policy rank 0")  # its domain is the first by name
    assert told["node first"].startswith("policy rank 1")
    for ours, theirs in zip(lines(tmp_path / "apart"), lines(tmp_path / "together"), strict=True):
        assert timeless(ours) == pytest.approx(timeless(theirs), rel=1e-5, abs=1e-6), f"step {ours.step}"
        assert max(ours.values["logprob_gap/max"], theirs.values["logprob_gap/max"]) < 1e-5


def test_labels_and_domains_say_where_groups_live() -> None:
    command = [sys.executable, "-m", "tests.cluster.reserve_driver"]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert driver.returncode == 0, driver.stderr
    found = json.loads(driver.stdout)
    assert found["labels"] == {"policy": ["second"] * 3, "rollout": ["first"]}
    spread = found["spread"]["policy"]
    assert set(spread) == {"first", "second"}
    assert spread == sorted(spread, reverse=True)  # ranks fill one domain before the next, east then west
    # SPREAD, but for those that are to be in one domain, which here is a node.
    assert len(set(found["topology"]["policy"])) == 1
    assert found["at the driver"] == {"endpoint": ["first"]}
    has = "Labels of the nodes: first (ray.io/gpu-domain=west), second (ray.io/gpu-domain=east)"
    assert (
        "no node has the label ray.io/gpu-domain=north, which cluster.labels.policy requires"
        in (found["nobody has it"])
    )
    assert has in found["nobody has it"]
    assert "no node has the label rack, which cluster.topology.policy requires" in found["no such label"]
    assert has in found["no such label"]
    assert found["not a label"].startswith("cluster.labels and cluster.topology of policy: ")
    assert found["too few nodes"].startswith(
        "cluster.num_nodes is 3, and after 5 s (cluster.deadlines.start) the Ray cluster has 2 nodes"
    )


def test_a_node_that_is_lost_is_named_once(cluster: Cluster, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    # Without restarts, whose warnings would name it as well.
    spread = {"num_nodes": 2, "placement": "SPREAD", "max_model_restarts": 0, "max_worker_restarts": 0}
    config = write_experiment(tmp_path, model, "bereft", cluster=spread, algorithm={"num_steps": 1000})
    driver = start("train", config)
    while not lines(tmp_path / "bereft"):
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.1)
    (second,) = cluster.worker_nodes
    cluster.remove_node(second, allow_graceful=False)
    status, output = finish(driver, seconds=120)
    assert status == 1, output
    assert output.count("node second was lost in stage") == 1
    told = json.loads((tmp_path / "bereft" / "header.json").read_text())[-1]["run"]
    assert f"and with it {told['node second']}: the machine is down" in output, output
    assert "died in stage" not in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_group_follows_its_reservation_to_another_node_and_shrinks_to_what_is_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Ranks are placed by a label."""

    def add(name: str) -> Any:
        labels = {"nemorl.io/part": "train"}
        return cluster.add_node(**{**SHARED, "num_cpus": 1}, node_name=name, labels=labels)

    add("one")
    two = add("two")
    command = [sys.executable, "-m", "tests.cluster.lost_node_driver", str(tmp_path)]
    driver = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def said() -> dict[str, Any]:
        assert driver.stdout is not None
        line = next((line for line in driver.stdout if line.startswith("{")), "")  # Ray writes too
        assert line, driver.communicate()[1]
        return dict(json.loads(line))

    def ranks_on(*names: str) -> dict[str, Any]:
        found = {key: [*names] for key in ("placed", "found", "homes")}
        return {**found, "ranks": [*range(len(names))]}

    try:
        assert said() == ranks_on("one", "two")
        cluster.remove_node(two, allow_graceful=False)
        problem = "cluster.deadlines.lost_node = 2: no node has room for policy rank 1 of two (1 CPU); add a"
        assert said()["missing"].startswith(problem)
        unread = said()
        assert "reader rank 0 failed in stage 'reading' with ray.exceptions.Object" in unread["unread"]
        assert unread["then"] == [[]]  # it answers, and the call was not made
        three = add("three")
        assert said() == ranks_on("one", "three")
        cluster.remove_node(three, allow_graceful=False)
        assert "no node has room for policy rank 1 of three (1 CPU)" in said()["missing"]
        assert said() == ranks_on("one")
        assert driver.wait(timeout=120) == 0
    finally:
        driver.kill()


def test_the_state_of_a_lost_node_comes_from_its_buddy(cluster: Cluster, tmp_path: Path) -> None:
    (second,) = cluster.worker_nodes
    cluster.remove_node(second, allow_graceful=False)
    third = cluster.add_node(**SHARED, node_name="third")
    memory = tmp_path / "memory"
    memory.mkdir()
    config = write_experiment(
        tmp_path,
        tiny_model(tmp_path / "model"),
        "kept",
        cluster={"num_nodes": 2, "placement": "SPREAD"},
        policy={"layout": {"data_parallel_size": 2}},
        checkpointing={"memory_period": 1, "memory_dir": str(memory)},
    )
    command = [sys.executable, "-m", "tests.cluster.buddy_driver", str(config)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    driver = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    try:
        first = next((line for line in driver.stdout if line.startswith("{")), "")  # Ray writes too
        assert first, driver.communicate()[1]
        assert sorted(json.loads(first)["nodes"]) == ["first", "third"]
        cluster.remove_node(third, allow_graceful=False)
        output, errors = driver.communicate("\n", timeout=240)
    finally:
        driver.kill()
    assert driver.returncode == 0, errors
    moved, found = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    assert moved == {"nodes": ["first"]}  # which has room for both ranks
    assert found == {"step": 3, "progress": '{"step": 3}', "same": True, "files": 9, "more": 0}, errors
