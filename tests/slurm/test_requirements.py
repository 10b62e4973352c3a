from pathlib import Path

import pytest

from nemorl.config.load import load_experiment
from nemorl.errors import Problem
from nemorl.slurm import SlurmError
from nemorl.slurm.node import Hardware, NodeInfo
from nemorl.slurm.requirements import NodeSize, capacity_problems, cluster_overrides, node_problems
from tests.config.experiments import GRPO, write
from tests.plan.models import write_model

GIGABYTE = 10**9


def reports(
    *gpus: int, given: int = 0, cpu_nodes: int = 0, gigabytes: int = 80, cores: int = 16
) -> dict[str, NodeInfo]:
    """Nodes n1, n2, … with these numbers of GPUs, and CPU nodes c1, c2, … of a heterogeneous job."""
    sees = Hardware(cores, 100 * GIGABYTE, 0, 0, "")
    found = {}
    for index, seen in enumerate(gpus, start=1):
        own = Hardware(cores, 100 * GIGABYTE, 0, seen, "", given, "Model 1", gigabytes * GIGABYTE)
        found[f"n{index}"] = NodeInfo(
            f"n{index}", "h", "10.0.0.1", "ib0", own, (), 100, "gpu" if cpu_nodes else None
        )
    for index in range(1, cpu_nodes + 1):
        found[f"c{index}"] = NodeInfo(f"c{index}", "h", "10.0.0.2", "ib0", sees, (), 100, "cpu")
    return found


def test_gpus_per_node_is_that_of_the_node_with_the_most() -> None:
    """So that a node with fewer is reported by name."""
    assert cluster_overrides(reports(8, 8, cpu_nodes=1), gpus_given=False) == [
        "cluster.num_nodes=3",
        "cluster.gpus_per_node=8",
    ]
    assert cluster_overrides(reports(8, 0), gpus_given=False)[1] == "cluster.gpus_per_node=8"
    assert cluster_overrides(reports(8, 8), gpus_given=True) == ["cluster.num_nodes=2"]


def test_a_node_that_does_not_see_its_gpus_is_named() -> None:
    with pytest.raises(SlurmError, match="do not respond: n2 sees 0 of 8"):
        cluster_overrides(reports(8, 0, given=8), gpus_given=True)


def problems(folder: Path, found: dict[str, NodeInfo], *words: str) -> dict[str, Problem]:
    """Problems of the experiment on these nodes, by field."""

    write_model(folder / "models" / "arithmetic")
    file = write(folder, GRPO.replace("models/arithmetic", str(folder / "models" / "arithmetic")))
    experiment = load_experiment(
        file, ["policy.precision=bfloat16", *cluster_overrides(found, gpus_given=False), *words]
    )
    return {problem.field: problem for problem in node_problems(experiment, found)}


def test_memory_is_that_of_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher runs in another Ray's surroundings."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")

    found = problems(tmp_path, reports(4, 4, gigabytes=0))

    assert set(found) == {"policy.layout", "generation.replicas"}
    assert "the Model 1 has 0.0 GB" in found["policy.layout"].fix


def test_threads_and_rooms_are_those_of_the_nodes(tmp_path: Path) -> None:
    found = problems(
        tmp_path, reports(0, 0, cores=2), "cluster.rollout_workers=9", "cluster.policy_threads=3"
    )

    assert set(found) == {"cluster.rollout_workers", "cluster.policy_threads"}
    assert "a node of the job has 2 cores" in found["cluster.policy_threads"].fix


def refused(folder: Path, nodes: list[NodeSize], *overrides: str, gpus_per_node: int = 0) -> list[Problem]:
    """Problems of an experiment with a policy rank, an engine and a rollout worker, unless overridden."""
    extra = ["policy.precision=bfloat16"] if gpus_per_node else []
    words = ["cluster.num_nodes=2", f"cluster.gpus_per_node={gpus_per_node}", *extra, *overrides]
    return list(capacity_problems(load_experiment(write(folder, GRPO), words), nodes))


CPU, GPU = {"nemorl.io/part": "cpu"}, {"nemorl.io/part": "gpu"}


def sizes(*nodes: tuple[int, int], part: str | None = None) -> list[NodeSize]:
    """Nodes n1, n2, … with CPUs and GPUs; the last one is in `part` of a heterogeneous job."""
    last = len(nodes)
    return [
        NodeSize(f"n{i}", cpus, gpus, GPU if gpus else CPU, part if i == last else None)
        for i, (cpus, gpus) in enumerate(nodes, start=1)
    ]


def test_an_experiment_that_fits_is_not_refused(tmp_path: Path) -> None:
    overrides = ("policy.layout.data_parallel_size=8", "generation.replicas=8", "cluster.rollout_workers=16")

    assert not refused(tmp_path, sizes((16, 8), (16, 8)), *overrides, gpus_per_node=8)


def test_too_many_gpus_name_the_group_that_needs_most(tmp_path: Path) -> None:
    """The second node of a heterogeneous job has none, which the checks of the configuration do not know."""
    overrides = ("policy.layout.data_parallel_size=2", "generation.replicas=8")

    (problem,) = refused(tmp_path, sizes((64, 8), (64, 0), part="cpu"), *overrides, gpus_per_node=8)

    assert (problem.field, problem.value) == ("generation.replicas", 8)
    assert "the run needs 10 GPUs (policy 2, generation 8, rollout 0)" in problem.fix
    assert "the job has 8 (n1 8, n2 0)" in problem.fix


def test_too_many_processes_name_their_field(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, sizes((4, 0), (4, 0)), "cluster.rollout_workers=7")

    assert (problem.field, problem.value) == ("cluster.rollout_workers", 7)
    assert "the run needs 9 CPUs (policy 1, generation 1, rollout 7), and the job has 8" in problem.fix


def test_a_node_with_fewer_gpus_than_configured_is_named(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, sizes((8, 8), (8, 4)), gpus_per_node=8)

    assert problem.field == "cluster.gpus_per_node"
    assert "n2 has 4" in problem.fix


def test_cpu_nodes_of_a_heterogeneous_job_need_no_gpus(tmp_path: Path) -> None:
    assert not refused(tmp_path, sizes((8, 8), (8, 0), part="cpu"), gpus_per_node=8)
    (problem,) = refused(tmp_path, sizes((8, 8), (8, 0)), gpus_per_node=8)
    assert "n2 has 0" in problem.fix


def test_an_engine_needs_its_gpus_on_one_node(tmp_path: Path) -> None:
    """Sixteen GPUs suffice for three engines of five and a rank of the policy, but each node has eight."""
    engine = "generation={backend: vllm, tensor_parallel_size: 5, replicas: 3}"

    (problem,) = refused(tmp_path, sizes((16, 8), (16, 8)), engine, gpus_per_node=8)

    assert problem.field == "generation.replicas"
    assert "the nodes have room for 2 generation processes (1 CPU and 5 GPU each)" in problem.fix


def test_labels_select_nodes(tmp_path: Path) -> None:
    nodes = sizes((8, 8), (2, 0), part="cpu")
    workers = ("cluster.rollout_workers=3", "cluster.labels.rollout={nemorl.io/part: %s}")

    (problem,) = refused(tmp_path, nodes, workers[0], workers[1] % "cpu", gpus_per_node=8)

    assert problem.field == "cluster.rollout_workers"
    room = "nodes with nemorl.io/part=cpu have room for 2 rollout processes (1 CPU each)"
    assert room in problem.fix
    for left_to_ray in ("in(cpu, gpu)", "!gpu"):
        assert not refused(tmp_path, nodes, workers[0], workers[1] % f"'{left_to_ray}'", gpus_per_node=8)


def test_labels_of_ray_are_left_to_it(tmp_path: Path) -> None:
    label = "cluster.labels.policy={ray.io/accelerator-type: H100}"

    assert not refused(tmp_path, sizes((8, 8), (8, 8)), label, gpus_per_node=8)
