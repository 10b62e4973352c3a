import socket

import pytest

from nemorl.slurm import ports
from nemorl.slurm.errors import SlurmError


def test_a_block_has_a_port_for_each_listener_and_none_twice() -> None:
    block = ports.Ports(20000, 20099)

    fixed = {name: port for name, port in block.ray_options.items() if "worker" not in name}
    all_fixed = [block.gcs, block.control, *fixed.values()]

    assert len(set(all_fixed)) == len(all_fixed)
    assert max(all_fixed) < block.ray_options["min-worker-port"]
    assert block.ray_options["max-worker-port"] == 20099
    assert min(all_fixed) == 20000


def test_jobs_begin_at_different_blocks_and_come_to_all() -> None:
    wanted = ports.read_range("20000-20399")

    first = ports.free_blocks(wanted, 100, "7")
    second = ports.free_blocks(wanted, 100, "8")

    assert first[0] != second[0]
    assert set(first) <= {20000, 20100, 20200, 20300}


def test_a_block_in_which_something_listens_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        around = range(taken - 2, taken + 3)

        assert ports.free_blocks(around, 5, "1") == []
        assert all(taken not in range(first, first + 2) for first in ports.free_blocks(around, 2, "1"))


def test_nodes_of_one_machine_get_blocks_that_do_not_overlap() -> None:
    blocks = ports.assign(
        {"n1": [20000, 20100], "n2": [20000, 20050, 20100], "n3": [20000]},
        {"n1": 100, "n2": 50, "n3": 100},
        {"n1": "host", "n2": "host", "n3": "another"},
        "20000-20199",
    )

    assert (blocks["n1"].first, blocks["n1"].last) == (20000, 20099)
    assert (blocks["n2"].first, blocks["n2"].last) == (20100, 20149)
    assert blocks["n3"].first == 20000


def test_too_few_ports_are_named_with_the_node() -> None:
    with pytest.raises(SlurmError, match="NEMORL_PORTS = 20000-20199: on n2 there are no 100 ports in a row"):
        ports.assign(
            {"n1": [20000], "n2": [20000]}, {"n1": 100, "n2": 100}, {"n1": "h", "n2": "h"}, "20000-20199"
        )


@pytest.mark.parametrize("text", ["20000", "20000-", "a-b", "30000-20000", "80-90", "20000-70000"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SlurmError, match=f"NEMORL_PORTS = {text}: name the first and the last port"):
        ports.read_range(text)
