import asyncio
import stat
from pathlib import Path

import pytest

from nemorl.slurm import SlurmError
from nemorl.slurm.node import Hardware, NodeInfo, Ports
from nemorl.slurm.start import Plan, Rendezvous

NODES = ("n1", "n2")
PLAN = Plan("10.0.0.1", {"n1": Ports(20000, 20099), "n2": Ports(20100, 20199)}, {"n1": "a", "n2": "a"})


def node_info(node: str) -> NodeInfo:
    """Report of a node with two cores."""
    return NodeInfo(node, "host", "10.0.0.1", "eth0", Hardware(2, 10**9, 10**8, 0, ""), (20000,), 100)


def test_nodes_exchange_reports_and_receive_the_plan(tmp_path: Path) -> None:
    head, other = (Rendezvous(tmp_path, "12.0", NODES) for _ in NODES)

    async def lead() -> dict[str, NodeInfo]:
        head.report(node_info("n1"))
        infos = await head.wait_for_nodes(10)
        head.publish(PLAN)
        return infos

    async def follow() -> Plan:
        other.report(node_info("n2"))
        return await other.wait_for_plan(10)

    async def both() -> tuple[dict[str, NodeInfo], Plan]:
        return await asyncio.gather(lead(), follow())

    infos, plan = asyncio.run(both())

    assert list(infos.values()) == [node_info("n1"), node_info("n2")]
    assert plan == PLAN
    assert (plan.gcs, plan.control) == ("10.0.0.1:20000", 20001)


def test_the_token_is_readable_by_its_owner_only_and_removed_at_the_end(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path, "12.0", NODES)

    rendezvous.publish(PLAN)
    token = rendezvous.token_file.read_text()

    assert stat.S_IMODE(rendezvous.token_file.stat().st_mode) == 0o600
    assert len(token) == 64
    assert all(
        token not in path.read_text() for path in rendezvous.folder.iterdir() if path != rendezvous.token_file
    )
    rendezvous.close("over")
    assert not rendezvous.token_file.exists()
    assert asyncio.run(rendezvous.wait_for_plan(1)) == PLAN


def test_a_start_that_ends_before_its_plan_has_a_reason_and_no_token(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path, "12.0", NODES)

    rendezvous.close("too small")

    assert not rendezvous.token_file.exists()
    assert asyncio.run(rendezvous.wait_for_plan(1)).refused == "too small"


def test_missing_nodes_are_named(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path, "12.0", ("n1", "n2", "n3"))
    rendezvous.report(node_info("n1"))

    with pytest.raises(SlurmError, match=r"n2, n3 did not appear in .*12.0 within 0 s \(n1 did\)") as refused:
        asyncio.run(rendezvous.wait_for_nodes(0))

    assert "run_dir is not on a file system that all nodes share" in str(refused.value)


def test_a_node_that_reports_a_failure_is_not_waited_for(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path, "12.0", ("n1", "n2.cluster", "n3"))
    rendezvous.report(node_info("n1"))
    rendezvous.report_failure("n2.cluster", "it has no such interface")

    with pytest.raises(SlurmError, match=r"^n2\.cluster: it has no such interface$"):
        asyncio.run(rendezvous.wait_for_nodes(60))


def test_a_folder_that_is_not_shared_is_reported_on_the_other_node_too(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path, "12.0", NODES)
    rendezvous.report(node_info("n2"))

    with pytest.raises(SlurmError, match=r"The head, n1, wrote no plan into .*this node sees n2.json"):
        asyncio.run(rendezvous.wait_for_plan(0))
