from dataclasses import replace

import pytest

from nemorl.slurm.fit import Demand, Room, fit_problems, selects, unplaced

CPU, GPU = {"nemorl.io/part": "cpu"}, {"nemorl.io/part": "gpu"}


def rooms(*sizes: tuple[int, int], part: str | None = None) -> list[Room]:
    """Nodes n1, n2, … of so many CPUs and GPUs; the last is in a part of a heterogeneous job."""
    found = [Room(f"n{i}", cpus, gpus, GPU if gpus else CPU) for i, (cpus, gpus) in enumerate(sizes, start=1)]
    return [*found[:-1], replace(found[-1], part=part)]


def demands(group: str, count: int, gpus: float = 0, labels: dict[str, str] | None = None) -> list[Demand]:
    """So many processes of one CPU each."""
    return [Demand(group, 1, gpus, labels or {})] * count


def test_what_fits_is_not_refused() -> None:
    wanted = [*demands("policy", 8, gpus=1), *demands("generation", 4, gpus=2), *demands("rollout", 4)]

    assert not list(fit_problems(wanted, rooms((8, 8), (8, 8)), "PACK", 8))


def test_processes_without_gpus_leave_the_cpus_of_those_with_one() -> None:
    """Four CPUs are left on the second node; a rollout worker on the first would take a rank's."""
    assert (
        unplaced([*demands("rollout", 4), *demands("policy", 4, gpus=1)], rooms((4, 4), (4, 0)), "PACK")
        is None
    )


def test_too_many_gpus_name_the_group_that_wants_most() -> None:
    wanted = [*demands("policy", 2, gpus=1), *demands("generation", 4, gpus=4)]

    (problem,) = fit_problems(wanted, rooms((64, 8), (64, 8)), "PACK", 8)

    assert problem.field == "generation.replicas"
    assert "18 GPUs are wanted, and the job has 16" in problem.fix
    assert "wanted: policy 2, generation 16; there: n1 8, n2 8" in problem.fix


def test_too_many_processes_name_their_field() -> None:
    (problem,) = fit_problems(
        [*demands("policy", 2), *demands("rollout", 7)], rooms((4, 0), (4, 0)), "PACK", 0
    )

    assert problem.field == "cluster.rollout_workers"
    assert "9 CPUs are wanted, and the job has 8" in problem.fix


def test_a_node_with_fewer_gpus_than_said_is_named() -> None:
    (problem,) = fit_problems(demands("policy", 2, gpus=1), rooms((8, 8), (8, 4)), "PACK", 8)

    assert problem.field == "cluster.gpus_per_node"
    assert "n2 has 4" in problem.fix


def test_cpu_nodes_of_a_heterogeneous_job_need_no_gpus_and_others_do() -> None:
    wanted = demands("policy", 2, gpus=1)

    assert not list(fit_problems(wanted, rooms((8, 8), (8, 0), part="cpu"), "PACK", 8))
    (problem,) = fit_problems(wanted, rooms((8, 8), (8, 0)), "PACK", 8)
    assert "n2 has 0" in problem.fix


def test_an_engine_wants_its_gpus_on_one_node() -> None:
    """Sixteen GPUs are there, but after the first engine no node has six."""
    (problem,) = fit_problems(demands("generation", 3, gpus=5), rooms((8, 8), (8, 8)), "PACK", 8)

    assert problem.field == "generation.replicas"
    assert "no node has room for one of the generation processes (1 CPUs and 5 GPUs)" in problem.fix


def test_strict_pack_is_one_node() -> None:
    assert unplaced(demands("policy", 4), rooms((2, 0), (2, 0)), "PACK") is None
    (problem,) = fit_problems(demands("policy", 4), rooms((2, 0), (2, 0)), "STRICT_PACK", 0)

    assert problem.field == "cluster.placement"


def test_strict_pack_takes_whichever_node_is_large_enough() -> None:
    """The smallest node would do for the first process, and not for all."""
    assert unplaced(demands("policy", 4), rooms((2, 0), (8, 0)), "STRICT_PACK") is None


def test_strict_spread_is_one_process_a_node() -> None:
    assert unplaced(demands("policy", 2), rooms((2, 0), (2, 0)), "STRICT_SPREAD") is None
    assert unplaced(demands("policy", 3), rooms((2, 0), (2, 0)), "STRICT_SPREAD") is not None


def test_labels_choose_among_the_nodes() -> None:
    wanted = demands("rollout", 3, labels=CPU)

    (problem,) = fit_problems(wanted, rooms((8, 8), (2, 0), part="cpu"), "PACK", 8)

    assert problem.field == "cluster.rollout_workers"
    assert "no node with nemorl.io/part=cpu has room" in problem.fix


@pytest.mark.parametrize(
    ("selector", "cpu", "gpu", "none"),
    [
        ("cpu", True, False, False),
        ("!gpu", True, False, True),
        ("in(cpu, gpu)", True, True, False),
        ("!in(cpu,gpu)", False, False, True),
    ],
)
def test_selectors_are_rays(selector: str, cpu: bool, gpu: bool, none: bool) -> None:
    assert (selects(selector, "cpu"), selects(selector, "gpu"), selects(selector, None)) == (cpu, gpu, none)
    wanted = demands("rollout", 3, labels={"nemorl.io/part": selector})
    refused = list(fit_problems(wanted, rooms((8, 8), (8, 0), part="cpu"), "PACK", 8))
    assert bool(refused) is not (cpu or gpu)


def test_labels_that_ray_gives_are_left_to_it() -> None:
    wanted = demands("policy", 2, gpus=1, labels={"ray.io/accelerator-type": "H100"})

    assert not list(fit_problems(wanted, rooms((8, 8)), "STRICT_PACK", 8))


DOMAIN = "ray.io/gpu-domain"


def in_domains(*names: str) -> list[Room]:
    """Nodes of eight CPUs and four GPUs each, in these domains."""
    found = rooms(*[(8, 4)] * len(names))
    return [replace(room, labels={**GPU, DOMAIN: name}) for room, name in zip(found, names, strict=True)]


def test_a_group_with_a_topology_fits_into_one_domain() -> None:
    eight = [replace(demand, topology=DOMAIN) for demand in demands("policy", 8, gpus=1)]

    assert not list(fit_problems(eight, in_domains("a", "b", "b"), "PACK", 4))
    (problem,) = fit_problems(eight, in_domains("a", "b", "c"), "PACK", 4)
    assert problem.field == "cluster.topology.policy"
    assert problem.value == DOMAIN
    assert "a has 4 GPUs and 8 CPUs; b has 4" in problem.fix


def test_a_group_with_a_topology_is_apart_from_the_others() -> None:
    """Each of the two groups has a node of its own under STRICT_PACK; one node has no room for both."""
    policy = [replace(demand, topology=DOMAIN) for demand in demands("policy", 4, gpus=1)]

    assert not list(fit_problems([*policy, *demands("rollout", 6)], in_domains("a", "b"), "STRICT_PACK", 4))
