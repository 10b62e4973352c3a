import asyncio
import stat
from pathlib import Path

import pytest

from nemorl.slurm.errors import SlurmError
from nemorl.slurm.hardware import Hardware
from nemorl.slurm.ports import Ports
from nemorl.slurm.rendezvous import Card, Meeting, Plan

NODES = ("n1", "n2")
PLAN = Plan("10.0.0.1", {"n1": Ports(20000, 20099), "n2": Ports(20100, 20199)}, {"n1": "a", "n2": "a"})


def card(node: str) -> Card:
    """Of a node of two cores."""
    return Card(node, "host", "10.0.0.1", "eth0", Hardware(2, 10**9, 10**8, 0, ""), (20000,), 100)


def test_nodes_meet_and_hear_the_plan(tmp_path: Path) -> None:
    head, other = (Meeting(tmp_path, "12.0", NODES) for _ in NODES)

    async def lead() -> dict[str, Card]:
        head.join(card("n1"))
        cards = await head.everybody(10)
        head.publish(PLAN)
        return cards

    async def follow() -> Plan:
        other.join(card("n2"))
        return await other.plan(10)

    async def both() -> tuple[dict[str, Card], Plan]:
        return await asyncio.gather(lead(), follow())

    cards, plan = asyncio.run(both())

    assert list(cards.values()) == [card("n1"), card("n2")]
    assert plan == PLAN
    assert (plan.gcs, plan.control, plan.sharing("n2")) == ("10.0.0.1:20000", 20001, 2)


def test_the_secret_is_for_its_owner_and_gone_at_the_end(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, "12.0", NODES)

    meeting.publish(PLAN)
    secret = meeting.token_file.read_text()

    assert stat.S_IMODE(meeting.token_file.stat().st_mode) == 0o600
    assert len(secret) == 64
    assert all(
        secret not in path.read_text() for path in meeting.folder.iterdir() if path != meeting.token_file
    )
    meeting.end("over")
    assert not meeting.token_file.exists()
    assert asyncio.run(meeting.plan(1)) == PLAN


def test_a_start_that_ends_before_its_plan_is_refused_and_has_no_secret(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, "12.0", NODES)

    meeting.end("too small")

    assert not meeting.token_file.exists()
    assert asyncio.run(meeting.plan(1)).refused == "too small"


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, "12.0", ("n1", "n2", "n3"))
    meeting.join(card("n1"))

    with pytest.raises(
        SlurmError, match=r"n2, n3 did not appear in .*12.0 within 0 s, and n1 did"
    ) as refused:
        asyncio.run(meeting.everybody(0))

    assert "run_dir is not on a file system that all nodes share" in str(refused.value)


def test_who_fails_before_it_comes_is_not_waited_for(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, "12.0", ("n1", "n2.cluster", "n3"))
    meeting.join(card("n1"))
    meeting.fail("n2.cluster", "it has no such interface")

    with pytest.raises(SlurmError, match=r"^n2\.cluster: it has no such interface$"):
        asyncio.run(meeting.everybody(60))


def test_a_folder_that_is_not_shared_shows_on_the_other_node_too(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, "12.0", NODES)
    meeting.join(card("n2"))

    with pytest.raises(SlurmError, match=r"The head, n1, wrote no plan into .*there are n2.json"):
        asyncio.run(meeting.plan(0))
