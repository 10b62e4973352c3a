"""Changes carry a new version exactly, from whatever base, and only onto that base."""

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemorl.models.slices import TensorSlice
from nemorl.weights.delta import BrokenChanges, apply, decode, encode
from nemorl.weights.endpoints import arriving
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.messages import (
    CorruptWeights,
    Part,
    PartBucket,
    PeerClosed,
    ReceiverLayout,
    RefitFailed,
    RefitSession,
)
from nemorl.weights.process_group import Membership
from nemorl.weights.shared_memory import SocketReceiver, socket_sender
from tests.weights.ranks import TP2_PP2, EngineSide, PolicySide, Threads, before_taken, box

BUCKET = 4096


@settings(max_examples=200, deadline=None)
@given(data=st.data(), itemsize=st.sampled_from([2, 4]), size=st.integers(1, 3000))
def test_new_is_made_of_old_and_the_changes(data: st.DataObject, itemsize: int, size: int) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    integers = np.dtype(f"i{itemsize}")
    old = generator.integers(-(2**15), 2**15, size).astype(integers)
    count = data.draw(st.integers(0, size // 2))
    where = np.sort(generator.choice(size, count, replace=False))
    by = generator.integers(1, data.draw(st.sampled_from([2, 300, 2**15])), count, endpoint=True)
    new = old.copy()
    new[where] += np.where(generator.random(count) < 0.5, by, -by).astype(integers)
    encoded = encode(*(torch.from_numpy(values.view(np.uint8)) for values in (old, new)), itemsize)
    if encoded is None:
        return  # more bytes than the whole
    places, differences = decode(torch.frombuffer(encoded, dtype=torch.uint8), itemsize)
    assert places.tolist() == where.tolist()
    made = old.copy()
    made[places.numpy()] += differences.numpy()
    assert made.tolist() == new.tolist()


def bits(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def test_few_changes_take_few_bytes() -> None:
    """2 % of a million elements move by one step: 1.3 bytes each."""
    old = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    new = old.clone()
    where = torch.randperm(1_000_000, generator=torch.Generator().manual_seed(1))[:20_000]
    new.view(torch.int16)[where] += torch.where(where % 2 == 0, 1, -1).to(torch.int16)
    encoded = encode(bits(old), bits(new), 2)
    assert encoded is not None
    assert len(encoded) < 1.3 * 20_000


def test_a_bucket_that_has_changed_by_half_goes_whole() -> None:
    old = torch.zeros(100)
    assert encode(bits(old), bits(torch.ones(100)), 4) is None
    assert encode(bits(old), bits(old), 4) is not None


def test_changes_that_were_altered_are_refused() -> None:
    """Whichever bit it is, but for those at the end that zlib does not read."""
    old = torch.randn(2000, generator=torch.Generator().manual_seed(3)).bfloat16()
    new = torch.where(torch.arange(2000) % 300 == 7, -old, old)
    encoded = encode(bits(old), bits(new), 2)
    assert encoded is not None
    sent = decode(torch.frombuffer(encoded, dtype=torch.uint8), 2)
    accepted = 0
    for bit in range(8 * len(encoded)):
        altered = bytearray(encoded)
        altered[bit // 8] ^= 1 << bit % 8
        with suppress(BrokenChanges):
            found = decode(torch.frombuffer(altered, dtype=torch.uint8), 2)
            accepted += 1
            assert all(torch.equal(a, b) for a, b in zip(found, sent, strict=True))
    assert accepted < 8


def test_changes_that_were_cut_are_refused() -> None:
    encoded = encode(bits(torch.zeros(100)), bits(torch.eye(10).flatten()), 4)
    assert encoded is not None
    for length in (8, 20, len(encoded) - 1):
        with pytest.raises(BrokenChanges):
            decode(torch.frombuffer(encoded[:length], dtype=torch.uint8), 4)


def test_changes_find_their_places_in_strided_parameters() -> None:
    """A column shard that lies transposed with a gap, next to a plain one, out of one bucket."""
    old, new = torch.zeros(108, dtype=torch.bfloat16), torch.zeros(108, dtype=torch.bfloat16)
    new[3], new[8], new[12] = 1.5, -2.0, 7.0
    encoded = encode(bits(old), bits(new), 2)
    transposed = TensorSlice("w", (4, 6), (0, 2), (4, 2), "t", offset=5, strides=(1, 4))
    plain = TensorSlice("v", (100,), (0,), (100,), "p", offset=1, strides=(1,))
    weights = {name: torch.zeros(101, dtype=torch.bfloat16) for name in "tp"}
    assert encoded is not None
    content = torch.frombuffer(encoded, dtype=torch.uint8)
    apply(PartBucket(0, (0,), "bfloat16", (transposed, plain)), content, weights)
    assert weights["t"][5:13].view(2, 4).t().flatten().tolist() == new[:8].tolist()
    assert weights["p"][1:].tolist() == new[8:].tolist()


class Setup:
    """A policy of TP2 x PP2 and two engines, refitted by changes."""

    def __init__(self, transport: str = "shared_memory", dtype: torch.dtype = torch.bfloat16) -> None:
        self.policy = [PolicySide(layout) for layout in TP2_PP2]
        for rank in self.policy:
            rank.train(0)
        self.engines = [EngineSide(dtype), EngineSide(dtype, in_place=True)]
        options = TransportOptions(transport, delta=True)  # type: ignore[arg-type]
        self.exchange = WeightExchange(Threads(self.policy), Threads(self.engines), BUCKET, 30.0, options)

    def step(self) -> None:
        for rank in self.policy:
            rank.step(2e-5)

    def assert_arrived(self) -> None:
        """The engines hold what a cast of the policy's weights gives."""
        for rank in self.policy:
            for part, values in rank.held():
                for engine in self.engines:
                    weights = engine.weights[part.name]
                    assert torch.equal(weights[box(part)], values.to(weights.dtype)), part.name


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_small_step_travels_as_changes(transport: str) -> None:
    setup = Setup(transport)
    stats = asyncio.run(setup.exchange.refit(1))
    assert stats.num_bytes == stats.num_bytes_whole
    assert stats.kept_bytes < stats.num_bytes_whole  # what both engines get is kept once
    for version in (2, 3, 4):
        setup.step()
        stats = asyncio.run(setup.exchange.refit(version))
        assert 0 < stats.num_bytes < stats.num_bytes_whole / 10
        setup.assert_arrived()
        assert {engine.version for engine in setup.engines} == {version}


def test_in_float32_everything_changes_and_goes_whole() -> None:
    setup = Setup(dtype=torch.float32)
    asyncio.run(setup.exchange.refit(1))
    setup.step()
    stats = asyncio.run(setup.exchange.refit(2))
    assert stats.num_bytes == stats.num_bytes_whole


def test_after_a_failure_a_full_refit_repairs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    asyncio.run(setup.exchange.refit(1))

    def fail() -> None:
        raise RefitFailed("the engine's memory is full")

    monkeypatch.setattr(SocketReceiver, "taken", SocketReceiver.taken)  # and back
    before_taken(SocketReceiver, 3, fail)
    setup.step()
    with pytest.raises(RefitFailed, match="memory is full"):
        asyncio.run(setup.exchange.refit(2))
    monkeypatch.undo()
    stats = asyncio.run(setup.exchange.refit(3))
    assert stats.num_bytes == stats.num_bytes_whole
    setup.assert_arrived()
    assert asyncio.run(setup.exchange.refit(4)).num_bytes < stats.num_bytes / 10


def test_the_end_of_a_sender_is_the_reason_why_its_changes_cannot_be_decoded(tmp_path: Path) -> None:
    """It clears its memory then, which a slower receiver may still read."""
    bucket = PartBucket(0, (0,), "bfloat16", (TensorSlice.whole("w", (64,)),))
    part, session = Part(0, (bucket,)), RefitSession(2, "shared_memory", str(tmp_path), 10.0)
    ended = threading.Event()

    def send() -> None:
        with socket_sender(part, session) as channel:
            channel.slot(0)
            channel.publish(0, 8)
        ended.set()

    def decode_slowly(*_: object) -> None:
        assert ended.wait(10)
        raise CorruptWeights("only zeros")

    sender = threading.Thread(target=send)
    sender.start()
    layout = ReceiverLayout(bucket.slices, ("bfloat16",))
    with (
        pytest.raises(PeerClosed, match="policy rank 0 closed its connection"),
        arriving(part, layout, session, Membership(), decode_slowly) as arrivals,
    ):
        list(arrivals.pieces)
    sender.join()


def test_a_receiver_without_the_base_refuses_changes() -> None:
    """An engine that was restarted, of which the driver received no report."""
    setup = Setup()
    asyncio.run(setup.exchange.refit(1))
    setup.engines[0].exchange._held = None
    with pytest.raises(RefitFailed, match="changes since version 1, but holds no complete version"):
        asyncio.run(setup.exchange.refit(2))
    stats = asyncio.run(setup.exchange.refit(3))
    assert stats.num_bytes == stats.num_bytes_whole


def test_a_sender_without_the_base_sends_everything() -> None:
    setup = Setup()
    asyncio.run(setup.exchange.refit(1))
    last = setup.policy[0].exchange._last
    assert last is not None
    last.version = None
    stats = asyncio.run(setup.exchange.refit(2))
    assert 0.1 < stats.num_bytes / stats.num_bytes_whole < 0.5
    setup.assert_arrived()


def test_an_engine_that_keeps_nothing_gets_everything() -> None:
    setup = Setup()
    setup.engines[0].exchange._takes_changes = False
    for version in (1, 2):
        stats = asyncio.run(setup.exchange.refit(version))
        assert stats.num_bytes == stats.num_bytes_whole
        assert stats.kept_bytes == 0
