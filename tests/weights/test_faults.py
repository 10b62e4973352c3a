"""Processes that die in the middle of an update, over every transport.

A staged receiver stays on the old version, one written in place reports that it is corrupt, and a refit with
new processes repairs all. CUDA IPC has a stand-in of its device, and NIXL one of its package.
"""

import asyncio
import functools
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nemorl.cluster.errors import DeadlineExceeded
from nemorl.models.layout import PolicyRank
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.files import versions
from nemorl.weights.messages import PeerClosed, RefitDeadline
from tests.weights.cuda_stand_in import with_stand_in
from tests.weights.ranks import (
    TP2,
    EngineSide,
    PolicySide,
    Remote,
    Threads,
    WorkerGone,
    model,
    with_nixl_stand_in,
)

BUCKET = 4096
INSTALLED = "installed nixl"  # over UCX, where tests have the package; "nixl" is the stand-in


class Setup:
    """Two tensor-parallel policy processes; an engine that is staged and one that is written in place."""

    def __init__(self, folder: Path, transport: str) -> None:
        self._folder, self._installed = folder, transport == INSTALLED
        self.policy = [self.policy_process(rank) for rank in range(2)]
        self.engines = [self.engine_process(in_place) for in_place in (False, True)]
        self.senders, self.receivers = Threads(self.policy), Threads(self.engines)
        self.exchange = WeightExchange(
            self.senders,
            self.receivers,
            BUCKET,
            60.0,
            TransportOptions("nixl" if self._installed else transport, str(folder)),  # type: ignore[arg-type]
        )

    def policy_process(self, rank: int) -> Remote:
        return self._process(functools.partial(PolicySide, PolicyRank(TP2, rank)))

    def engine_process(self, in_place: bool) -> Remote:
        return self._process(functools.partial(EngineSide, torch.float32, in_place=in_place))

    def _process(self, make: Callable[[], Any]) -> Remote:
        if not self._installed:
            make = functools.partial(with_nixl_stand_in, make)
        return Remote(functools.partial(with_stand_in, self._folder, make))

    def replace(self, ranks: list[Remote], rank: int) -> None:
        """Start another process instead of one; the policy's has the weights of the others."""
        ranks[rank].stop()
        ranks[rank] = self.policy_process(rank) if ranks is self.policy else self.engine_process(rank == 1)
        self.train(2)
        self.exchange.layout_changed()

    def train(self, seed: int) -> None:
        for rank in self.policy:
            rank.call("train", seed)

    def assert_holds(self, engine: int, version: int) -> None:
        found, weights = self.engines[engine].call("state")
        assert found == version
        for name, tensor in model(version).items():
            assert torch.equal(weights[name], tensor), name

    def stop(self) -> None:
        for rank in (*self.policy, *self.engines):
            rank.stop()


@pytest.fixture
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    if request.param == INSTALLED and find_spec("nixl") is None:
        pytest.skip("NIXL is not installed")
    made = Setup(tmp_path, request.param)
    made.train(1)
    asyncio.run(made.exchange.refit(1))
    made.train(2)
    yield made
    made.stop()


def said(caught: pytest.ExceptionInfo[BaseException]) -> str:
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    "setup", ["shared_memory", "cuda_ipc", "gloo", "files", "nixl", INSTALLED], indirect=True
)
def test_a_receiver_is_killed(setup: Setup) -> None:
    setup.engines[1].call("die_at_bucket", 5)
    with pytest.raises((WorkerGone, PeerClosed)) as caught:
        asyncio.run(setup.exchange.refit(2))
    message = said(caught)
    assert "generation rank 1 closed its connection" in message or "ended during exchange.rec" in message
    setup.assert_holds(0, version=1)
    setup.replace(setup.engines, 1)
    asyncio.run(setup.exchange.refit(2))
    for engine in range(2):
        setup.assert_holds(engine, version=2)


@pytest.mark.parametrize(
    "setup", ["shared_memory", "cuda_ipc", "gloo", "files", "nixl", INSTALLED], indirect=True
)
def test_a_sender_is_killed(setup: Setup, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    setup.policy[1].call("die_at_bucket", 5)
    with pytest.raises((WorkerGone, PeerClosed)) as caught:
        asyncio.run(setup.exchange.refit(2))
    assert "policy rank 1 closed its connection" in said(caught) or "ended during exchange.send" in said(
        caught
    )
    setup.assert_holds(0, version=1)
    if "files" in request.node.name:
        setup.assert_holds(1, version=1)  # nothing was read
        assert [path.name for path in tmp_path.glob("*.json")] == ["v00000001.json"]
        assert len(list(tmp_path.iterdir())) == 2
    else:
        assert "to version 2 in place, which did not finish" in setup.engines[1].call("corruption")
    setup.replace(setup.policy, 1)
    asyncio.run(setup.exchange.refit(2))
    for engine in range(2):
        setup.assert_holds(engine, version=2)
    assert setup.engines[1].call("corruption") is None


@pytest.mark.parametrize("setup", ["shared_memory", "gloo", "nixl", INSTALLED], indirect=True)
def test_a_sender_stops(setup: Setup) -> None:
    """Stopped, its process neither answers nor closes anything; all others end with the deadline."""
    assert setup.exchange._route is not None
    venue: Any = setup.exchange._route.venue
    venue._deadline_seconds = 1.0
    setup.policy[1].call("die_at_bucket", 5, signal.SIGSTOP)
    with pytest.raises(
        RefitDeadline, match=r"since \d\d:\d\d:\d\d \(\d+\.\d s\); the deadline is 1 s"
    ) as caught:
        asyncio.run(setup.exchange.refit(2))
    assert "waits for the next bucket of policy rank 1" in said(caught) or "policy rank 0 waits" in said(
        caught
    )
    setup.assert_holds(0, version=1)  # its process answers


@pytest.mark.parametrize("setup", ["files"], indirect=True)
@pytest.mark.parametrize("side", ["policy", "engines"])
def test_a_rank_stops_over_files(setup: Setup, tmp_path: Path, side: str) -> None:
    """Ranks do not wait for each other there: the deadline of the group's call names the rank."""
    ranks, group = (setup.policy, setup.senders) if side == "policy" else (setup.engines, setup.receivers)
    group.deadline_seconds = 2.0
    ranks[1].call("die_at_bucket", 5, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match=r"in 2 s; no answer from rank 1\.") as caught:
        asyncio.run(setup.exchange.refit(2))
    assert caught.value.stage == ("send" if side == "policy" else "receive")
    setup.assert_holds(0, version=1)
    left = [1] if side == "policy" else [1, 2]  # which are unused
    assert versions(str(tmp_path)) == left
