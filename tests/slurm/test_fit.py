from nemorl.slurm.fit import Demand, Room, fit_violations, unplaced

CPU, GPU = {"nemorl.io/part": "cpu"}, {"nemorl.io/part": "gpu"}


def rooms(*sizes: tuple[int, int]) -> list[Room]:
    """Nodes n1, n2, … of so many CPUs and GPUs."""
    return [Room(f"n{i}", cpus, gpus, GPU if gpus else CPU) for i, (cpus, gpus) in enumerate(sizes, start=1)]


def demands(group: str, count: int, gpus: float = 0, labels: dict[str, str] | None = None) -> list[Demand]:
    """So many processes of one CPU each."""
    return [Demand(group, 1, gpus, labels or {})] * count


def test_what_fits_is_not_refused() -> None:
    wanted = [*demands("policy", 8, gpus=1), *demands("generation", 4, gpus=2), *demands("rollout", 4)]

    assert not list(fit_violations(wanted, rooms((8, 8), (8, 8)), "PACK", 8))


def test_processes_without_gpus_leave_the_cpus_of_those_with_one() -> None:
    """Four CPUs are left on the second node; a rollout worker on the first would take a rank's."""
    assert (
        unplaced([*demands("rollout", 4), *demands("policy", 4, gpus=1)], rooms((4, 4), (4, 0)), "PACK")
        is None
    )


def test_too_many_gpus_name_the_group_that_wants_most() -> None:
    wanted = [*demands("policy", 2, gpus=1), *demands("generation", 4, gpus=4)]

    (violation,) = fit_violations(wanted, rooms((64, 8), (64, 8)), "PACK", 8)

    assert violation.field == "generation.replicas"
    assert "18 GPUs are wanted, and the job has 16" in violation.mend
    assert "wanted: policy 2, generation 16; there: n1 8, n2 8" in violation.mend


def test_too_many_processes_name_their_field() -> None:
    (violation,) = fit_violations(
        [*demands("policy", 2), *demands("rollout", 7)], rooms((4, 0), (4, 0)), "PACK", 0
    )

    assert violation.field == "cluster.rollout_workers"
    assert "9 CPUs are wanted, and the job has 8" in violation.mend


def test_a_node_with_fewer_gpus_than_said_is_named() -> None:
    (violation,) = fit_violations(demands("policy", 2, gpus=1), rooms((8, 8), (8, 4)), "PACK", 8)

    assert violation.field == "cluster.gpus_per_node"
    assert "n2 has 4" in violation.mend


def test_cpu_nodes_need_no_gpus() -> None:
    assert not list(fit_violations(demands("policy", 2, gpus=1), rooms((8, 8), (8, 0)), "PACK", 8))


def test_an_engine_wants_its_gpus_on_one_node() -> None:
    """Sixteen GPUs are there, but after the first engine no node has six."""
    (violation,) = fit_violations(demands("generation", 3, gpus=5), rooms((8, 8), (8, 8)), "PACK", 8)

    assert violation.field == "generation.replicas"
    assert "no node has room for a generation process of 1 CPUs and 5 GPUs" in violation.mend


def test_strict_pack_is_one_node() -> None:
    assert unplaced(demands("policy", 4), rooms((2, 0), (2, 0)), "PACK") is None
    (violation,) = fit_violations(demands("policy", 4), rooms((2, 0), (2, 0)), "STRICT_PACK", 0)

    assert violation.field == "cluster.placement"


def test_strict_spread_is_one_process_a_node() -> None:
    assert unplaced(demands("policy", 2), rooms((2, 0), (2, 0)), "STRICT_SPREAD") is None
    assert unplaced(demands("policy", 3), rooms((2, 0), (2, 0)), "STRICT_SPREAD") is not None


def test_labels_choose_among_the_nodes() -> None:
    wanted = demands("rollout", 3, labels=CPU)

    (violation,) = fit_violations(wanted, rooms((8, 8), (2, 0)), "PACK", 8)

    assert violation.field == "cluster.rollout_workers"
    assert "no node with nemorl.io/part=cpu has room" in violation.mend
