import os

from nemorl.plan.machine import Gpu, parse_gpus, read_machine


def test_this_machine() -> None:
    machine = read_machine()

    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 10**8 < machine.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_gpus_as_the_driver_lists_them() -> None:
    listed = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA GB10, [N/A]\n"

    assert parse_gpus(listed) == (Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20),)
