import pytest

from nemorl.plan.machine import Gpu, Machine
from nemorl.slurm import SlurmError
from nemorl.slurm.node import nvlink_domain, read_allocation, read_hardware

JOB = {"NEMORL_JOB": "12", "NEMORL_NODES": "n1,n2", "SLURMD_NODENAME": "n2"}


def test_nodes_are_in_slurms_order_and_the_first_is_the_head() -> None:
    allocation = read_allocation(JOB)

    assert allocation.nodes == ("n1", "n2")
    assert not allocation.is_head
    assert allocation.start == "12.0"
    assert allocation.part is None


def test_a_restart_and_a_second_step_have_folders_of_their_own() -> None:
    allocation = read_allocation({**JOB, "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "1"})

    assert allocation.start == "12.2.1"


def test_the_second_component_of_a_heterogeneous_job_is_for_cpus() -> None:
    """Its own job id is another one than that of the whole job."""
    variables = {"SLURM_JOB_ID": "13", "NEMORL_JOB": "12", "NEMORL_NODES": "n1,n2;c7"}

    allocations = [read_allocation({**variables, "SLURMD_NODENAME": node}) for node in ("n1", "n2", "c7")]

    assert {allocation.components for allocation in allocations} == {(("n1", "n2"), ("c7",))}
    assert [allocation.is_head for allocation in allocations] == [True, False, False]
    assert [allocation.part for allocation in allocations] == ["gpu", "gpu", "cpu"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"NEMORL_JOB": ""}, "NEMORL_JOB and NEMORL_NODES are not set"),
        ({"NEMORL_NODES": ""}, "NEMORL_JOB and NEMORL_NODES are not set"),
        ({"SLURMD_NODENAME": "n9"}, "SLURMD_NODENAME = n9: job 12 has the nodes n1, n2"),
        ({"SLURMD_NODENAME": ""}, "SLURMD_NODENAME = unset: job 12"),
    ],
)
def test_outside_of_a_job_the_missing_variables_are_named(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(SlurmError, match=problem):
        read_allocation({**JOB, **changes})


FABRIC = """\
    Fabric
        State                                          : Completed
        Status                                         : Success
        CliqueId                                       : {clique}
        ClusterUUID                                    : {cluster}
        Health
            Bandwidth                                  : N/A
"""


@pytest.mark.parametrize(
    ("output", "domain"),
    [
        (
            FABRIC.format(clique=32766, cluster="D1B2C3A4-0000-4F5E-9999-0123456789AB"),
            "d1b2c3a4-0000-4f5e-9999-0123456789ab.32766",
        ),
        (FABRIC.format(clique="0", cluster="00000000-0000-0000-0000-000000000000"), ""),
        (FABRIC.format(clique="N/A", cluster="N/A"), ""),
        ("", ""),
    ],
)
def test_the_domain_is_the_cluster_and_the_clique(output: str, domain: str) -> None:
    assert nvlink_domain(output) == domain


def test_slurms_numbers_take_precedence() -> None:
    hardware = read_hardware({"SLURM_CPUS_ON_NODE": "3", "SLURM_MEM_PER_NODE": "1000"})

    assert hardware.cores == 3
    assert hardware.memory_bytes == 1000 * 2**20
    assert (hardware.gpus, hardware.gpus_allocated) == (0, 0)


def test_gpus_that_do_not_respond_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Machine(8, 10**9, None, (Gpu("Large", 80 * 10**9), Gpu("Small", 40 * 10**9)))
    monkeypatch.setattr("nemorl.slurm.node.read_machine", lambda: seen)

    hardware = read_hardware({"SLURM_GPUS_ON_NODE": "3", "CUDA_VISIBLE_DEVICES": "0,1,2"})

    assert (hardware.gpus, hardware.gpus_allocated) == (2, 3)
    assert (hardware.gpu_name, hardware.gpu_memory_bytes) == ("Small", 40 * 10**9)
