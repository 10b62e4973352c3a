import pytest

from nemorl.plan.machine import Gpu, Machine
from nemorl.slurm.hardware import nvlink_domain, read_hardware

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
    ("told", "domain"),
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
def test_the_domain_is_the_cluster_and_the_clique(told: str, domain: str) -> None:
    assert nvlink_domain(told) == domain


def test_slurms_numbers_come_before_the_machines() -> None:
    hardware = read_hardware({"SLURM_CPUS_ON_NODE": "3", "SLURM_MEM_PER_NODE": "1000"})

    assert hardware.cores == 3
    assert hardware.memory_bytes == 1000 * 2**20
    assert (hardware.gpus_given, hardware.is_blind) == (0, False)


def test_gpus_that_slurm_gave_and_that_do_not_answer_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Machine(8, 10**9, None, (Gpu("Large", 80 * 10**9), Gpu("Small", 40 * 10**9)))
    monkeypatch.setattr("nemorl.slurm.hardware.read_machine", lambda: seen)

    hardware = read_hardware({"SLURM_GPUS_ON_NODE": "3", "CUDA_VISIBLE_DEVICES": "0,1,2"})

    assert (hardware.gpus, hardware.gpus_given, hardware.is_blind) == (2, 3, True)
    assert (hardware.gpu_name, hardware.gpu_memory_bytes) == ("Small", 40 * 10**9)
