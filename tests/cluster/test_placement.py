"""What is asked of the cluster, what a refusal says, and which rank gets which bundle."""

import asyncio
import time

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from nemorl.cluster.errors import PlacementFailed
from nemorl.cluster.placement import (
    Placement,
    WorkerRequest,
    available_cores,
    reserve,
    threads_per_worker,
    worker_requests,
)
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.experiment import Experiment

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
    assert [(r.group, r.count, r.bundle) for r in on_cpu] == [
        ("policy", 6, {"CPU": 1.0}),
        ("generation", 4, {"CPU": 1.0}),
        ("rollout", 5, {"CPU": 1.0}),
    ]
    cluster = {"rollout_workers": 5, "gpus_per_node": 8}
    on_gpus = worker_requests(Experiment.model_validate({**EXPERIMENT, "cluster": cluster}))
    assert [r.bundle.get("GPU") for r in on_gpus] == [1.0, 1.0, None]


@pytest.mark.parametrize(("backend", "own_gpus"), [("vllm", 4), ("trtllm", 0)])
def test_an_engine_of_several_ranks_has_its_gpus_in_one_place(backend: str, own_gpus: int):
    """TensorRT-LLM's workers are actors of their own, so the replica's process leaves the GPUs to them."""
    generation = {"backend": backend, "tensor_parallel_size": 4}
    cluster = {"gpus_per_node": 8}
    experiment = Experiment.model_validate({**EXPERIMENT, "generation": generation, "cluster": cluster})
    (request,) = (wanted for wanted in worker_requests(experiment) if wanted.group == "generation")
    assert request.bundle == {"CPU": 1.0, "GPU": 4.0}
    placement = Placement(PlacementGroup.empty(), {"generation": (6,)}, {"generation": request})
    assert placement.options("generation", 0)["num_gpus"] == own_gpus


def test_threads_are_the_cores_shared_evenly():
    assert threads_per_worker(5, workers=2, num_nodes=1) == 5
    assert threads_per_worker(None, workers=1, num_nodes=1) == available_cores()
    assert threads_per_worker(None, workers=1000, num_nodes=1) == 1
    assert threads_per_worker(None, workers=4, num_nodes=4) == available_cores()


def test_every_rank_has_a_bundle_of_its_own(placement: Placement):
    bundles = [bundle for group in ("policy", "generation", "fragile") for bundle in placement.bundles[group]]
    assert sorted(bundles) == list(range(8))


def test_a_local_ray_refuses_at_once_what_it_can_never_hold(runtime: ClusterRuntime):
    start = time.monotonic()
    with pytest.raises(PlacementFailed) as caught:
        asyncio.run(
            reserve(
                [WorkerRequest("policy", 2, gpus=1), WorkerRequest("rollout", 1)],
                strategy="PACK",
                deadline_seconds=60,
                can_grow=False,
                environment={},
            )
        )
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert (
        "with strategy PACK: 2 policy workers (1 CPU and 1 GPU each), 1 rollout worker (1 CPU each)"
        in message
    )
    assert "(2 GPU more than all of it)" in message
    assert "The cluster has 1 node (" in message
    assert "set cluster.gpus_per_node to what is there" in message


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
    assert 1 <= time.monotonic() - start < 10
    assert ray.available_resources().get("CPU", 0) == free  # nothing stays reserved


def test_the_event_loop_goes_on_while_places_are_waited_for(runtime: ClusterRuntime, placement: Placement):
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
