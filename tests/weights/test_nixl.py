"""Members of a NIXL group; updates through them are in `test_transports`, `test_matrix` and `test_faults`."""

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from nemorl.config.generation import LOOPBACK
from nemorl.models.layout import PolicyRank
from nemorl.models.slices import TensorSlice
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import Part, PartBucket, RefitFailed, RefitSession
from nemorl.weights.nixl import GroupAborted, NixlGroup
from nemorl.weights.process_group import GroupVenue, Membership, served_store
from tests.weights.ranks import EngineSide, PolicySide, Threads, model

PART = Part(0, (PartBucket(0, (0,), "float32", (TensorSlice.whole("a", (32,)),)),))


@contextmanager
def joined() -> Iterator[tuple[NixlGroup, NixlGroup]]:
    store, place = served_store(LOOPBACK)
    session = RefitSession(1, "nixl", place, 30.0, num_senders=1, num_receivers=1)
    groups = NixlGroup(session, 0, PART, store), NixlGroup(session, 1, PART, store)
    for member, group in enumerate(groups):
        assert group.has_joined(session, 1 - member)
        group.connect(1 - member, first=member == 0)
    yield groups
    for group in groups:
        group.leave()


def test_a_bucket_leaves_its_slot_when_it_has_been_read(nixl_stand_in: None) -> None:
    with joined() as (sender, receiver), ThreadPoolExecutor(1) as pool:
        for number in range(3):
            content = sender.slots(PART).bucket(number, 100).copy_(torch.arange(100) + number)
            waiting = pool.submit(sender.send_bucket(content, 1))
            assert receiver.receive_size(0) == 100
            assert not waiting.done()
            slot = receiver.slots(PART).bucket(number, 100)
            receiver.receive_content(slot, 0)
            waiting.result(10)
            assert slot.tolist() == [number + value for value in range(100)]


def test_waits_end_when_the_group_is_aborted(nixl_stand_in: None) -> None:
    with joined() as (sender, receiver), ThreadPoolExecutor(2) as pool:
        taken = pool.submit(sender.send_bucket(sender.slots(PART).bucket(0, 8), 1))
        arrived = pool.submit(receiver.receive_size, 0)
        arrived.result(10)
        arrived = pool.submit(lambda: receiver._wait((b"R", 0, 1)))
        for group, waiting in ((sender, taken), (receiver, arrived)):
            group.abort()
            with pytest.raises(GroupAborted):
                waiting.result(10)


def test_memory_beyond_the_slots_is_refused(nixl_stand_in: None) -> None:
    with joined() as (sender, receiver):
        sender.send_bucket(sender.slots(PART).memory[128:], 1)
        size = receiver.receive_size(0)
        assert size == 128
        receiver._peers[0] = replace(receiver._peers[0], num_bytes=128)
        with pytest.raises(RefitFailed, match="offers memory that it has not registered"):
            receiver.receive_content(receiver.slots(PART).bucket(0, size), 0)


def test_a_refit_that_ends_late_does_not_leave_the_group_of_the_next_one(nixl_stand_in: None) -> None:
    store, place = served_store(LOOPBACK)
    sessions = [RefitSession(1, "nixl", place, 30.0, rendezvous=n, num_senders=1) for n in (1, 2)]
    member = Membership()
    failed, current = (member.join(session, 0, PART) for session in sessions)
    member.leave(failed)  # it was left when the rank joined the next group
    assert member.join(sessions[1], 0, PART) is current
    assert current.has_joined(sessions[1], 0)
    current.connect(0, first=True)  # its agent is there
    member.leave(current)
    assert member.join(sessions[1], 0, PART) is not current
    assert store.num_keys()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    policy, engine = PolicySide(PolicyRank()), EngineSide(torch.float32)
    exchange = WeightExchange(Threads([policy]), Threads([engine]), 4096, 30.0, TransportOptions("nixl"))
    with pytest.raises(RefitFailed, match=r"the package nixl cannot be imported .*'nemorl\[nixl\]'"):
        asyncio.run(exchange.refit(1))
    assert engine.version == 0


def test_changes_alone_travel(nixl_stand_in: None) -> None:
    policy, engine = PolicySide(PolicyRank()), EngineSide(torch.bfloat16)
    options = TransportOptions("nixl", delta=True)
    exchange = WeightExchange(Threads([policy]), Threads([engine]), 4096, 30.0, options)
    policy.train(1)
    whole = asyncio.run(exchange.refit(1))
    policy.step(0.0)
    unchanged = asyncio.run(exchange.refit(2))
    assert unchanged.num_bytes < whole.num_bytes / 10
    assert engine.version == 2
    for name, tensor in model(1).items():
        assert torch.equal(engine.weights[name], tensor.bfloat16()), name


def test_members_register_their_slots_once(nixl_stand_in: None) -> None:
    policy, engine = PolicySide(PolicyRank()), EngineSide(torch.float32)
    exchange = WeightExchange(Threads([policy]), Threads([engine]), 4096, 30.0, TransportOptions("nixl"))
    groups = set()
    for version in (1, 2, 3):
        policy.train(version)
        asyncio.run(exchange.refit(version))
        groups.add(policy.exchange._member._group)
    assert len(groups) == 1
    assert isinstance(exchange._route.venue, GroupVenue)  # type: ignore[union-attr]
