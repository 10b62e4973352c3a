"""Process groups, NIXL (a stand-in) and files carry what shared memory carries; every rank a thread."""

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.config.generation import LOOPBACK
from nemorl.models.layout import PolicyRank
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import RefitDeadline, RefitFailed
from nemorl.weights.process_group import Group, GroupReceiver, GroupSender, GroupVenue
from tests.weights.ranks import SHAPE, TP2_PP2, EngineSide, PolicySide, Threads, before_taken, model

BUCKET = 4096


class Setup:
    """A policy of TP2 x PP2, and an engine of each kind and type."""

    def __init__(self, folder: Path, transport: str, deadline_seconds: float = 30.0) -> None:
        self.policy = [PolicySide(layout) for layout in TP2_PP2]
        self.engines = [
            EngineSide(torch.bfloat16, dtypes={"model.norm.weight": torch.float32}),
            EngineSide(torch.float32, in_place=True),
        ]
        self.folder = folder
        self.exchange = WeightExchange(
            Threads(self.policy),
            Threads(self.engines),
            BUCKET,
            deadline_seconds,
            TransportOptions(transport, str(folder)),  # type: ignore[arg-type]
        )

    def train(self, seed: int) -> None:
        for rank in self.policy:
            rank.train(seed)

    def refit(self, version: int) -> None:
        self.train(version)
        asyncio.run(self.exchange.refit(version))

    def assert_holds(self, version: int) -> None:
        for engine in self.engines:
            assert engine.version == version
            assert_equal(engine.weights, model(version))


def assert_equal(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor.to(weights[name].dtype)), name


@pytest.mark.parametrize("transport", ["gloo", "nixl", "files"])
def test_weights_arrive_bit_for_bit(tmp_path: Path, transport: str, nixl_stand_in: None) -> None:
    setup = Setup(tmp_path, transport)
    for version in (1, 2, 3):
        setup.refit(version)
        setup.assert_holds(version)
    stats = asyncio.run(setup.exchange.refit(4))
    elements = sum(tensor.numel() for tensor in model(1).values())
    assert stats.num_bytes == (2 + 4) * elements + 2 * SHAPE.hidden_size
    assert 0 < stats.extra_bytes <= len(TP2_PP2) * 2 * BUCKET


@pytest.mark.parametrize("transport", ["gloo", "nixl"])
def test_a_receiver_that_hangs_ends_with_the_deadline_and_ranks_meet_again(
    tmp_path: Path, transport: str, nixl_stand_in: None
) -> None:
    setup = Setup(tmp_path, transport)
    setup.refit(1)
    assert setup.exchange._route is not None
    venue: Any = setup.exchange._route.venue
    venue._deadline_seconds = 0.5
    released = threading.Event()
    undo = before_taken(GroupReceiver, 3, lambda: released.wait(2.0))
    try:
        setup.train(2)
        message = r"policy rank \d waits for generation rank \d to take bucket \d+ since"
        with pytest.raises(RefitDeadline, match=message):
            asyncio.run(setup.exchange.refit(2))
    finally:
        undo()
        released.set()
    assert setup.engines[0].version == 1
    venue._deadline_seconds = 30.0
    setup.refit(3)
    setup.assert_holds(3)


def test_a_member_that_gives_up_waits_for_no_other_though_another_has_gone_before() -> None:
    """gloo ends all waits of a member when one of them times out, and none does for who is gone."""
    with GroupVenue("gloo", LOOPBACK, 30.0).session(1, 1, 2) as session, ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(lambda rank: Group.join(session, rank), range(3))
        for one, other in (((first, 1), (second, 0)), ((second, 2), (third, 1))):
            connecting = pool.submit(one[0].connect, one[1], first=True)
            other[0].connect(other[1], first=False)
            connecting.result()
        first.abort()
        with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
            second.receive(torch.empty(1), 0)
        waiting = pool.submit(second.receive, torch.empty(1), 2)
        second.abort()
        with pytest.raises(RuntimeError, match="closure"):
            waiting.result(10)


@pytest.mark.parametrize("transport", ["gloo", "nixl"])
def test_a_member_that_never_comes_is_named(tmp_path: Path, transport: str, nixl_stand_in: None) -> None:
    setup = Setup(tmp_path, transport, deadline_seconds=2.0)
    setup.policy[2].exchange.send = lambda session: None  # type: ignore[assignment,method-assign]
    with pytest.raises(RefitDeadline, match=r"generation rank \d waits for policy rank 2 to join since"):
        asyncio.run(setup.exchange.refit(1))


@pytest.mark.parametrize("transport", ["gloo", "nixl"])
def test_an_error_of_one_member_ends_the_others_at_once(
    tmp_path: Path, transport: str, nixl_stand_in: None
) -> None:
    setup = Setup(tmp_path, transport)
    setup.refit(1)

    def fail() -> None:
        raise RefitFailed("the engine's memory is full")

    undo = before_taken(GroupReceiver, 2, fail)
    try:
        with pytest.raises(RefitFailed, match="memory is full"):
            asyncio.run(setup.exchange.refit(2))
    finally:
        undo()
    setup.refit(3)
    setup.assert_holds(3)


@pytest.mark.parametrize("transport", ["gloo", "nixl"])
def test_one_bucket_is_enough_for_many_engines(transport: str, nixl_stand_in: None) -> None:
    """It is passed on from one to the next."""
    policy, engines = PolicySide(PolicyRank()), [EngineSide(torch.float32) for _ in range(4)]
    policy.train(1)
    options = TransportOptions(transport)  # type: ignore[arg-type]
    stats = asyncio.run(WeightExchange(Threads([policy]), Threads(engines), 2**30, 30.0, options).refit(1))
    assert stats.num_buckets == 1
    assert stats.num_bytes == 4 * sum(tensor.nbytes for tensor in model(1).values())
    for engine in engines:
        assert_equal(engine.weights, model(1))


@pytest.mark.parametrize("transport", ["gloo", "nixl"])
def test_a_sender_that_fails_before_its_first_bucket_ends_the_others_at_once(
    tmp_path: Path, transport: str, nixl_stand_in: None
) -> None:
    """No two ranks have exchanged anything by then, and gloo connects late."""
    setup = Setup(tmp_path, transport, deadline_seconds=120.0)
    slot = GroupSender.slot

    def fail(self: GroupSender, number: int) -> Tensor:
        if self._rendezvous.place == 0:
            raise RefitFailed("no memory for a slot")
        return slot(self, number)

    GroupSender.slot = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(RefitFailed, match="no memory for a slot"):
            asyncio.run(setup.exchange.refit(1))
    finally:
        GroupSender.slot = slot  # type: ignore[method-assign]
    setup.refit(2)
    setup.assert_holds(2)
