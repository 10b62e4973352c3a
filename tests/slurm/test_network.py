import socket

import pytest

from nemorl.slurm import SlurmError
from nemorl.slurm import node as network
from nemorl.slurm.node import Hardware, NodeInfo


def test_a_block_has_a_port_for_each_listener_and_none_twice() -> None:
    block = network.Ports(20000, 20099)

    fixed = {name: port for name, port in block.ray_options.items() if "worker" not in name}
    all_fixed = [block.gcs, block.control, *fixed.values()]

    assert len(set(all_fixed)) == len(all_fixed)
    assert max(all_fixed) < block.ray_options["min-worker-port"]
    assert block.ray_options["max-worker-port"] == 20099
    assert min(all_fixed) == 20000


def test_jobs_search_in_different_orders() -> None:
    ports = network.parse_ports({"NEMORL_PORTS": "20000-20399"})

    first = network.free_blocks(ports, 100, "7")
    second = network.free_blocks(ports, 100, "8")

    assert first[0] != second[0]
    assert set(first) <= {20000, 20100, 20200, 20300}


def test_a_block_in_which_something_listens_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        around = range(taken - 2, taken + 3)

        assert network.free_blocks(around, 5, "1") == ()
        assert all(taken not in range(first, first + 2) for first in network.free_blocks(around, 2, "1"))


def node_info(node: str, blocks: tuple[int, ...], size: int, host: str = "host") -> NodeInfo:
    """Report of a node with these free blocks."""
    return NodeInfo(node, host, "10.0.0.1", "eth0", Hardware(2, 10**9, 10**8, 0, ""), blocks, size)


def test_nodes_of_one_machine_get_blocks_that_do_not_overlap() -> None:
    blocks = network.assign_ports(
        {
            "n1": node_info("n1", (20000, 20100), 100),
            "n2": node_info("n2", (20000, 20050, 20100), 50),
            "n3": node_info("n3", (20000,), 100, host="another"),
        }
    )

    assert (blocks["n1"].first, blocks["n1"].last) == (20000, 20099)
    assert (blocks["n2"].first, blocks["n2"].last) == (20100, 20149)
    assert blocks["n3"].first == 20000


def test_a_node_with_too_few_free_ports_is_named() -> None:
    nodes = {name: node_info(name, (20000,), 100) for name in ("n1", "n2")}
    with pytest.raises(SlurmError, match="NEMORL_PORTS: n2 has no 100 consecutive free ports in the range"):
        network.assign_ports(nodes)


@pytest.mark.parametrize("text", ["20000", "20000-", "a-b", "30000-20000", "80-90", "20000-70000"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(SlurmError, match=f"NEMORL_PORTS = {text}: expected the first and the last port"):
        network.parse_ports({"NEMORL_PORTS": text})


LOOPBACK, ETHERNET, INFINIBAND = (
    network.Interface("lo", "127.0.0.1"),
    network.Interface("eth0", "10.0.0.1"),
    network.Interface("ib0", "10.1.0.1"),
)


@pytest.mark.parametrize(
    ("available", "host", "route", "chosen"),
    [
        ((LOOPBACK, ETHERNET, INFINIBAND), "10.1.0.1", "10.0.0.1", INFINIBAND),
        ((LOOPBACK, ETHERNET, INFINIBAND), "127.0.1.1", "10.0.0.1", ETHERNET),
        ((LOOPBACK, ETHERNET), "127.0.0.1", None, ETHERNET),
        ((LOOPBACK,), None, None, LOOPBACK),
    ],
)
def test_the_interface_is_that_of_the_host_name_and_loopback_only_alone(
    monkeypatch: pytest.MonkeyPatch,
    available: tuple[network.Interface, ...],
    host: str | None,
    route: str | None,
    chosen: network.Interface,
) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: available)
    monkeypatch.setattr(network, "_preferred_addresses", lambda: [host, route])

    assert network.select_interface({}) == chosen
    assert network.select_interface({"NEMORL_INTERFACE": "lo"}) == LOOPBACK
