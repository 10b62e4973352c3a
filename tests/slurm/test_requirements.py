"""What is made of the cards of a job's nodes."""

from pathlib import Path

import pytest

from nemorl.config.load import load_experiment
from nemorl.errors import Problem
from nemorl.slurm.errors import SlurmError
from nemorl.slurm.hardware import Hardware
from nemorl.slurm.rendezvous import Card
from nemorl.slurm.requirements import problems_of, words_for
from tests.config.experiments import GRPO, write
from tests.plan.models import write_model

GIGABYTE = 10**9


def cards(
    *gpus: int, given: int = 0, cpu_nodes: int = 0, gigabytes: int = 80, cores: int = 16
) -> dict[str, Card]:
    """Nodes n1, n2, … that see so many GPUs, and CPU nodes c1, c2, … of a heterogeneous job."""
    sees = Hardware(cores, 100 * GIGABYTE, 0, 0, "")
    found = {}
    for place, seen in enumerate(gpus, start=1):
        own = Hardware(cores, 100 * GIGABYTE, 0, seen, "", given, "Card 1", gigabytes * GIGABYTE)
        found[f"n{place}"] = Card(
            f"n{place}", "h", "10.0.0.1", "ib0", own, (), 100, "gpu" if cpu_nodes else None
        )
    for place in range(1, cpu_nodes + 1):
        found[f"c{place}"] = Card(f"c{place}", "h", "10.0.0.2", "ib0", sees, (), 100, "cpu")
    return found


def test_the_node_with_the_most_gpus_is_the_rule() -> None:
    """So that one with fewer is refused by name, and not made the rule for all."""
    assert words_for(cards(8, 8, cpu_nodes=1), gpus_given=False) == [
        "cluster.num_nodes=3",
        "cluster.gpus_per_node=8",
    ]
    assert words_for(cards(8, 0), gpus_given=False)[1] == "cluster.gpus_per_node=8"
    assert words_for(cards(8, 8), gpus_given=True) == ["cluster.num_nodes=2"]


def test_a_node_that_does_not_see_what_slurm_gave_is_named() -> None:
    with pytest.raises(SlurmError, match="do not answer: n2 sees 0 of 8"):
        words_for(cards(8, 0, given=8), gpus_given=True)


def problems(folder: Path, found: dict[str, Card], *words: str) -> dict[str, Problem]:
    """Of the experiment on these nodes, by field."""

    write_model(folder / "models" / "arithmetic")
    file = write(folder, GRPO.replace("models/arithmetic", str(folder / "models" / "arithmetic")))
    experiment = load_experiment(
        file, ["policy.precision=bfloat16", *words_for(found, gpus_given=False), *words]
    )
    return {problem.field: problem for problem in problems_of(experiment, found)}


def test_memory_is_that_of_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher runs in another Ray's surroundings."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")

    found = problems(tmp_path, cards(4, 4, gigabytes=0))

    assert set(found) == {"policy.layout", "generation.replicas"}
    assert "the Card 1 has 0.0 GB" in found["policy.layout"].fix


def test_threads_and_rooms_are_those_of_the_nodes(tmp_path: Path) -> None:
    found = problems(tmp_path, cards(0, 0, cores=2), "cluster.rollout_workers=9", "cluster.policy_threads=3")

    assert set(found) == {"cluster.rollout_workers", "cluster.policy_threads"}
    assert "a node of the job has 2 cores" in found["cluster.policy_threads"].fix


def test_the_endpoint_is_on_the_head(tmp_path: Path) -> None:
    """Four ranks fill it, and leave no CPU for the endpoint; on the other node there is one."""
    words = (
        "cluster.labels.policy={nemorl.io/node: n1}",
        "policy.layout.data_parallel_size=4",
        "generation.endpoint={}",
    )

    found = problems(tmp_path, cards(0, 0, cores=4), *words)

    assert set(found) == {"policy.layout"}
    problem = "no node with nemorl.io/node=n1 has room for one of the endpoint processes (1 CPUs)"
    assert problem in found["policy.layout"].fix
    assert not problems(tmp_path / "two", cards(0, 0, cores=4), *words[1:])
