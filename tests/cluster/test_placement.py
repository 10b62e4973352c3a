"""What is asked of the cluster, what a refusal says, and which rank gets which bundle."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from nemorl.cluster import placement
from nemorl.cluster.errors import NodeNotReplaced, PlacementFailed
from nemorl.cluster.nodes import Node
from nemorl.cluster.placement import (
    Placement,
    WorkerRequest,
    assigned_bundles,
    await_places,
    required_bundles,
    reserve,
    worker_requests,
)
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.experiment import Experiment
from tests.cluster.places import on_one_node
from tests.cluster.recorders import start_recorders

EXPERIMENT = {
    "run_dir": "runs/x",
    "policy": {"model_path": "m", "layout": {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}},
    "generation": {"replicas": 4},
    "data": {"train": {"name": "arithmetic"}},
    "algorithm": {"name": "sft", "num_steps": 1, "batch_size": 1},
    "cluster": {"rollout_workers": 5},
}


def test_processes_of_an_experiment_on_the_cpu_and_on_gpus():
    on_cpu = worker_requests(Experiment.model_validate(EXPERIMENT))
    assert [(r.group, required_bundles([r])) for r in on_cpu] == [
        ("policy", [{"CPU": 1.0}] * 6),
        ("generation", [{"CPU": 1.0}] * 4),
        ("rollout", [{"CPU": 1.0}] * 5),
    ]
    cluster = {"rollout_workers": 5, "gpus_per_node": 8}
    on_gpus = worker_requests(Experiment.model_validate({**EXPERIMENT, "cluster": cluster}))
    assert [required_bundles([r])[0].get("GPU") for r in on_gpus] == [1.0, 1.0, None]


def test_a_critic_has_places_of_its_own_or_shares_the_policys():
    steps = {"num_steps": 1, "num_prompts_per_step": 1, "num_generations_per_prompt": 1}
    experiment = {**EXPERIMENT, "algorithm": {"name": "ppo", **steps}, "cluster": {"gpus_per_node": 16}}
    apart = worker_requests(Experiment.model_validate(experiment))
    assert [r.group for r in apart][:2] == ["policy", "critic"]
    assert required_bundles(apart[:2]) == [{"CPU": 1.0, "GPU": 1.0}] * 12
    critic = {"devices": "policy", "layout": {"tensor_parallel_size": 2}}
    together = worker_requests(Experiment.model_validate({**experiment, "critic": critic}))
    assert required_bundles(together[:2]) == [{"CPU": 2.0, "GPU": 1.0}] * 6
    requests = {request.group: request for request in together}
    bundles = assigned_bundles(together, dict(enumerate("babbaa" + "c" * 9)))
    assert [bundles["policy"][:3], bundles["critic"]] == [(1, 4, 5), (1, 4)]
    placement = on_one_node(bundles, together)
    options = placement.options("critic", 1)
    assert options["num_gpus"] == placement.options("policy", 1)["num_gpus"] == 0.5
    assert options["scheduling_strategy"].placement_group_bundle_index == 4
    assert str(requests["critic"]) == "2 critic workers (1 CPU and 1 GPU each, in places of policy workers)"


@pytest.mark.parametrize(("backend", "own_gpus"), [("vllm", 4), ("trtllm", 0)])
def test_an_engine_of_several_ranks_has_its_gpus_in_one_place(backend: str, own_gpus: int):
    """TensorRT-LLM's workers are actors of their own, so the replica's process leaves the GPUs to them."""
    generation = {"backend": backend, "tensor_parallel_size": 4}
    cluster = {"gpus_per_node": 8}
    experiment = Experiment.model_validate({**EXPERIMENT, "generation": generation, "cluster": cluster})
    (request,) = (wanted for wanted in worker_requests(experiment) if wanted.group == "generation")
    assert required_bundles([request])[0] == {"CPU": 1.0, "GPU": 4.0}
    placement = on_one_node({"generation": (6,)}, [request])
    assert placement.options("generation", 0)["num_gpus"] == own_gpus


SHARING = {
    "generation": {"backend": "vllm", "tensor_parallel_size": 2, "replicas": 3, "colocated": True},
    "algorithm": {**EXPERIMENT["algorithm"], "validation": {"period": 1}},
    "data": {"train": {"name": "arithmetic"}, "validation": {"name": "arithmetic"}},
    "cluster": {"gpus_per_node": 6},
    "policy": {**EXPERIMENT["policy"], "offload": {"weights": True, "optimizer": True}},
    "rewards": [{"kind": "local_model", "model_path": "m", "devices": "policy"}],
}


def test_engines_that_share_the_policys_gpus_are_placed_next_to_it():
    requests = worker_requests(Experiment.model_validate({**EXPERIMENT, **SHARING}))
    assert required_bundles(requests) == [{"CPU": 3.0, "GPU": 1.0}] * 6 + [{"CPU": 1.0}]
    three_on_each = dict(enumerate("baabba" + "a"))
    with pytest.raises(PlacementFailed, match=r"generation rank 1 uses the GPUs of policy ranks 2 to 3"):
        assigned_bundles(requests, three_on_each)

    bundles = assigned_bundles(requests, dict(enumerate("aaabab" + "a")))
    assert bundles["policy"] == (0, 1, 2, 4, 3, 5)
    assert bundles["generation"] == (0, 2, 3)
    placement = on_one_node(bundles, requests)
    assert placement.host_ranks("generation") == (range(2), range(2, 4), range(4, 6))
    groups = ("policy", "generation", "reward_0")  # which Ray places on a part of the policy's
    assert [placement.options(group, 0)["num_gpus"] for group in groups] == [0.5, 0, 0.5]
    assert placement.host_ranks("reward_0") == (range(1),)


def test_engines_without_a_policy_have_their_own_gpus():
    """As in an evaluation and in `nemorl serve`."""
    requests = worker_requests(Experiment.model_validate({**EXPERIMENT, **SHARING}))
    alone = [request for request in requests if request.group != "policy"]
    own = [{"CPU": 1.0, "GPU": 1.0}] + [{"CPU": 1.0, "GPU": 2.0}] * 3 + [{"CPU": 1.0}]
    assert required_bundles(alone) == own
    bundles = assigned_bundles(alone, dict.fromkeys(range(5), "a"))
    placement = on_one_node(bundles, alone)
    assert placement.host_ranks("generation") == ()
    assert placement.options("generation", 1)["num_gpus"] == 2


def spread(**groups: str) -> Placement:
    """Groups of which each rank is on the node of its letter: `a` has 8 cores, `b` has 4."""
    known = {"a": Node("a", "a", "10.0.0.1", 8), "b": Node("b", "b", "10.0.0.2", 4)}
    nodes = {name: tuple(known[letter] for letter in letters) for name, letters in groups.items()}
    return Placement({}, {}, {}, nodes, driver="a")


def test_threads_are_the_cores_of_the_fullest_node_shared_evenly():
    placement = spread(policy="aaab", critic="b", rollout="a" * 9)
    assert placement.threads(5, "policy") == 5
    assert placement.threads(None, "policy") == 8 // 3
    assert placement.threads(None, "critic") == 4
    assert placement.threads(None, "policy", "critic") == 4 // 2
    assert placement.threads(None, "rollout") == 1


def test_the_driver_listens_beyond_its_machine_only_where_another_one_asks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    placement = spread(policy="ab", rollout="aa")
    assert placement.driver_address("rollout") == "127.0.0.1"
    assert placement.driver_address("policy") == "10.0.0.1"
    assert placement.driver_address("rollout", "policy") == "10.0.0.1"


def test_an_engine_sees_the_devices_of_its_own_node():
    placement = spread(policy="abab", generation="ba")
    assert placement.on_node_of("generation", 0, "policy") == (1, 3)
    assert placement.on_node_of("generation", 1, "policy") == (0, 2)


class Cluster:
    """Nodes by the letters of their names, and the bundles of one reservation on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, requests: list[WorkerRequest], nodes: str) -> None:
        self.alive, self.nodes = set(nodes), nodes
        self.requests = requests
        bundles = assigned_bundles(requests, dict(enumerate(nodes)))
        homes = {name: tuple(self.node(nodes[b]) for b in own) for name, own in bundles.items()}
        places = dict.fromkeys(bundles, PlacementGroup.empty())
        self.placement = Placement(places, bundles, {r.group: r for r in requests}, homes, driver="a")
        monkeypatch.setattr(placement, "alive_nodes", lambda: [self.node(name) for name in self.alive])
        monkeypatch.setattr(placement, "placement_group_table", lambda place: self.table())

    @staticmethod
    def node(name: str) -> Node:
        return Node(name, name, "10.0.0.1", 8)

    def table(self) -> dict[str, Any]:
        """As Ray has it: a bundle without a place has no node."""
        at = {bundle: "" if name == "." else name for bundle, name in enumerate(self.nodes)}
        return {"bundles": dict(enumerate(required_bundles(self.requests))), "bundles_to_node_id": at}

    def names(self, group: str) -> str:
        return "".join(node.name for node in self.placement.nodes[group])


def test_ranks_of_a_lost_node_follow_their_bundles_and_others_stay(monkeypatch: pytest.MonkeyPatch):
    engines = WorkerRequest("generation", 3, gpus=2, host_group="policy")
    requests = [WorkerRequest("policy", 6, gpus=1), engines, WorkerRequest("rollout", 2)]
    cluster = Cluster(monkeypatch, requests, "ccaabb" + "ac")
    of_run, groups = cluster.placement, ("policy", "generation", "rollout")
    bundles = of_run.bundles
    assert bundles == {"policy": (2, 3, 4, 5, 0, 1), "generation": (2, 4, 0), "rollout": (6, 7)}
    assert of_run.follow("policy") is None
    cluster.alive, cluster.nodes = set("ab"), "..aabb" + "a."
    displaced = of_run.follow("rollout")
    wanted = "policy ranks 4, 5 and generation rank 2 and rollout rank 1 of c (5 CPU and 2 GPU)"
    assert str(displaced) == wanted
    assert displaced is not None
    assert [displaced.of(group) for group in groups] == [{4, 5}, {2}, {1}]
    assert [cluster.names(group) for group in groups] == ["aabbcc", "abc", "ac"]
    cluster.alive, cluster.nodes = set("abd"), "ddaabb" + "ab"
    assert of_run.follow("rollout") is None
    assert [cluster.names(group) for group in groups] == ["aabbdd", "abd", "ab"]
    assert of_run.bundles == bundles


def test_moved_ranks_fill_one_node_before_the_next(monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster(monkeypatch, [WorkerRequest("policy", 6)], "aabbbb")
    cluster.alive, cluster.nodes = set("acd"), "aadcdc"
    assert cluster.placement.follow("policy") is None
    assert cluster.placement.bundles["policy"] == (0, 1, 3, 5, 2, 4)
    assert cluster.names("policy") == "aaccdd"


def test_an_engine_is_refused_whose_gpus_ray_has_moved_to_several_nodes(monkeypatch: pytest.MonkeyPatch):
    engines = WorkerRequest("generation", 2, gpus=2, host_group="policy")
    cluster = Cluster(monkeypatch, [WorkerRequest("policy", 4, gpus=1), engines], "aabb")
    cluster.alive, cluster.nodes = set("acd"), "aacd"
    with pytest.raises(PlacementFailed, match="generation rank 1 uses the GPUs of policy ranks 2 to 3"):
        cluster.placement.follow("policy")
    assert cluster.names("policy") == "aabb"


def test_a_group_shrinks_to_places_that_are_left(monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster(monkeypatch, [WorkerRequest("policy", 6), WorkerRequest("rollout", 1)], "aabbcc" + "a")
    cluster.alive, cluster.nodes = set("ac"), "aa..cc" + "a"
    of_run = cluster.placement
    assert of_run.ranks_left("policy") == [0, 1, 4, 5]
    assert not of_run.shares_places("policy")
    of_run.shrink("policy", 3)
    assert (of_run.bundles["policy"], cluster.names("policy")) == ((0, 1, 4), "aac")
    assert of_run.requests["policy"].count == 3
    assert of_run.follow("policy") is None  # nothing is missing any more
    cluster.alive, cluster.nodes = set("ad"), "aa..dd" + "a"
    assert of_run.follow("policy") is None
    assert cluster.names("policy") == "aad"


def test_a_group_waits_for_its_own_ranks_only(monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster(monkeypatch, [WorkerRequest("policy", 1), WorkerRequest("rollout", 2)], "aab")
    cluster.alive, cluster.nodes = set("a"), "aa."
    of_run = cluster.placement
    asyncio.run(await_places(of_run, "policy", [0], seconds=0.0))
    asyncio.run(await_places(of_run, "rollout", [0], seconds=0.0))
    problem = "cluster.deadlines.lost_node = 0: no node has room for rollout rank 1 of b (1 CPU); add a node"
    with pytest.raises(NodeNotReplaced, match=re.escape(problem)):
        asyncio.run(await_places(of_run, "rollout", [0, 1], seconds=0.0))


def test_every_rank_has_a_bundle_of_its_own(placement: Placement):
    bundles = [bundle for group in ("policy", "generation", "fragile") for bundle in placement.bundles[group]]
    assert sorted(bundles) == list(range(8))


def test_a_local_ray_refuses_at_once_what_it_can_never_hold(
    runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(placement, "placement_group", None)  # nothing is asked of Ray, and waited for
    with pytest.raises(PlacementFailed) as caught:
        asyncio.run(
            reserve(
                [WorkerRequest("policy", 4, gpus=1), WorkerRequest("rollout", 1)],
                strategy="PACK",
                deadline_seconds=60,
                can_grow=False,
                environment={},
            )
        )
    message = str(caught.value)
    assert (
        "with strategy PACK: 4 policy workers (1 CPU and 1 GPU each), 1 rollout worker (1 CPU each)"
        in message
    )
    assert "(2 GPU more than its total)" in message
    assert "The cluster has 1 node (" in message
    assert "set cluster.gpus_per_node to the GPUs of a node" in message


def test_a_cluster_that_may_grow_is_given_until_the_deadline(runtime: ClusterRuntime, placement: Placement):
    free = ray.available_resources().get("CPU", 0)
    start = time.monotonic()
    with pytest.raises(PlacementFailed, match=r"not possible within 1 s.*strategy STRICT_PACK: 100 policy"):
        asyncio.run(
            reserve(
                [WorkerRequest("policy", 100)],
                strategy="STRICT_PACK",
                deadline_seconds=1,
                can_grow=True,
                environment={},
            )
        )
    assert time.monotonic() - start >= 1
    assert ray.available_resources().get("CPU", 0) == free  # nothing stays reserved


def test_the_event_loop_continues_while_places_are_waited_for(runtime: ClusterRuntime, placement: Placement):
    free = ray.available_resources().get("CPU", 0)

    async def cancel_a_reservation() -> None:
        waiting = asyncio.create_task(
            reserve(
                [WorkerRequest("policy", 100)],
                strategy="PACK",
                deadline_seconds=600,
                can_grow=True,
                environment={},
            )
        )
        for _ in range(5):  # each of these comes back only if the loop is free
            await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancel_a_reservation())
    assert ray.available_resources().get("CPU", 0) == free


def test_ray_starts_processes_next_to_each_other(runtime: ClusterRuntime, tmp_path: Path):
    requests = [
        WorkerRequest("policy", 2, gpus=1),
        WorkerRequest("generation", 1, gpus=2, host_group="policy"),
    ]
    places = asyncio.run(
        reserve(requests, strategy="PACK", deadline_seconds=60, can_grow=False, environment={})
    )
    groups = [
        asyncio.run(start_recorders(name, count, places, tmp_path))
        for name, count in (("policy", 2), ("generation", 1))
    ]
    seen = [asyncio.run(group.call("gpus", stage="testing", seconds=30)) for group in groups]
    assert sorted(seen[0]) == [("0",), ("1",)]
    assert seen[1] == [()]  # it receives the one it has
    for group in groups:
        asyncio.run(group.shutdown())
    places.release()
