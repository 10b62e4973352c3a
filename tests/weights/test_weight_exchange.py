"""A refit from the driver's point of view, every rank a thread."""

import asyncio
import itertools
import pickle
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from nemorl.models.layout import PolicyRank
from nemorl.weights.exchange import CorruptWeights, TransportOptions, WeightExchange
from nemorl.weights.messages import (
    Part,
    PartBucket,
    PeerClosed,
    ReceiveReport,
    ReceiverLayout,
    RefitDeadline,
    RefitFailed,
    RefitSession,
    SenderLayout,
    Waiting,
    refit_socket,
)
from nemorl.weights.plan import UnservedBox
from nemorl.weights.shared_memory import SocketReceiver, SocketSender, SocketVenue, socket_sender
from tests.weights.layouts import whole
from tests.weights.ranks import SHAPE, TP2_PP2, EngineSide, PolicySide, Threads, before_taken, model

BUCKET = 4096  # bytes; the embedding has 26 kilobytes


@pytest.fixture(autouse=True)
def _short_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of one test in a folder of its own, so that the test can look for what is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert list(Path(folder).iterdir()) == []


class Setup:
    """A policy of TP2 x PP2 and two engines."""

    def __init__(self, dtype: torch.dtype = torch.float32, deadline_seconds: float = 30.0) -> None:
        self.policy = [PolicySide(layout) for layout in TP2_PP2]
        self.engines = [EngineSide(dtype) for _ in range(2)]
        self.senders, self.receivers = Threads(self.policy), Threads(self.engines)
        self.exchange = WeightExchange(self.senders, self.receivers, BUCKET, deadline_seconds)

    def train(self, seed: int) -> None:
        for rank in self.policy:
            rank.train(seed)


def test_equal_layouts_of_many_ranks_share_their_objects() -> None:
    """The driver gets the layouts of thousands of ranks, of which few differ."""
    slices = (whole("a", (4, 6)), whole("b", (3,)))
    sender, receiver = SenderLayout(slices, "x", "0"), ReceiverLayout(slices, ("float32", "bfloat16"), "x")
    layouts = [sender, replace(sender, node="y"), receiver, replace(receiver, takes_changes=False, gpu="1")]
    arrived = [pickle.loads(pickle.dumps(layout)) for layout in layouts]  # noqa: S301 - own bytes
    assert arrived == layouts
    assert arrived[0].slices is arrived[1].slices
    assert arrived[2].slices is arrived[3].slices
    other = pickle.loads(pickle.dumps(SenderLayout(slices[:1])))  # noqa: S301 - own bytes
    assert other.slices == slices[:1]


def assert_holds(engine: EngineSide, version: int, expected: Mapping[str, Tensor]) -> None:
    assert engine.version == version
    for name, tensor in expected.items():
        assert torch.equal(engine.weights[name], tensor.to(engine.weights[name].dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_get_the_policys_weights_in_their_own_type(dtype: torch.dtype) -> None:
    setup = Setup(dtype)
    setup.train(seed=1)
    stats = asyncio.run(setup.exchange.refit(1))
    for engine in setup.engines:
        assert_holds(engine, 1, model(seed=1))
    elements = sum(tensor.numel() for tensor in model(1).values())
    assert (stats.version, stats.num_bytes) == (1, 2 * elements * dtype.itemsize)
    assert stats.num_buckets >= stats.num_bytes / len(setup.engines) / BUCKET
    assert stats.extra_bytes <= len(TP2_PP2) * 2 * BUCKET
    assert 0 < stats.seconds_transfer <= stats.seconds
    assert stats.gigabytes_per_second == pytest.approx(stats.num_bytes / stats.seconds_transfer / 1e9)


def test_buckets_of_shared_memory_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemorl.weights.shared_memory.MAX_HOST_BUCKET_BYTES", BUCKET)
    setup = Setup()
    setup.exchange = WeightExchange(setup.senders, setup.receivers, 2**20, 30.0)
    setup.train(seed=1)
    stats = asyncio.run(setup.exchange.refit(1))
    assert_holds(setup.engines[0], 1, model(seed=1))
    assert BUCKET < stats.extra_bytes <= len(TP2_PP2) * 2 * BUCKET


def test_versions_follow_each_other_on_one_plan() -> None:
    setup = Setup()
    for version in (1, 2, 3):
        setup.train(seed=version)
        asyncio.run(setup.exchange.refit(version))
        assert_holds(setup.engines[0], version, model(seed=version))
    assert setup.senders.calls == ["describe", "prepare", "send", "send", "send"]
    setup.exchange.layout_changed()
    asyncio.run(setup.exchange.refit(4))
    assert setup.senders.calls[-3:] == ["describe", "prepare", "send"]


def test_a_flipped_bit_is_found_and_the_old_version_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """At both engines, which take it from the same slot."""
    setup = Setup()
    setup.train(seed=1)
    asyncio.run(setup.exchange.refit(1))
    setup.train(seed=2)
    publish = SocketSender.publish

    def flip_one_bit(self: SocketSender, number: int, num_bytes: int) -> None:
        if number == 0 and self._part.rank == 1:
            memory = self._slots.memory
            memory[17] ^= 1
        publish(self, number, num_bytes)

    monkeypatch.setattr(SocketSender, "publish", flip_one_bit)
    with pytest.raises(
        CorruptWeights, match=r"refit to version 2: 2 tensors did not .* at generation rank 0"
    ):
        asyncio.run(setup.exchange.refit(2))
    for engine in setup.engines:
        assert_holds(engine, 1, model(seed=1))
    monkeypatch.undo()
    asyncio.run(setup.exchange.refit(2))
    for engine in setup.engines:
        assert_holds(engine, 2, model(seed=2))


def test_the_tensor_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine writes one tensor wrongly, after the transport has done its work."""
    setup = Setup()
    setup.train(seed=1)
    engine = setup.engines[0]
    next_bucket = SocketReceiver.next_bucket

    def spoil(self: SocketReceiver) -> Tensor:
        engine._staging["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 64)
        return next_bucket(self)

    monkeypatch.setattr(SocketReceiver, "next_bucket", spoil)
    message = r"1 tensors did not arrive .* first model\.layers\.1\.mlp\.up_proj\.weight at generation rank 0"
    with pytest.raises(CorruptWeights, match=message):
        asyncio.run(setup.exchange.refit(1))
    assert engine.version == 0


@pytest.mark.parametrize("period", [1, 3])
def test_checks_of_one_in_three_come_to_all_in_turn(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    """A tensor that is written wrongly is found within three refits, whatever versions are handed over."""
    setup = Setup()
    options = TransportOptions(check_one_in=3)
    setup.exchange = WeightExchange(setup.senders, setup.receivers, BUCKET, 30.0, options)
    engine = setup.engines[0]
    next_bucket = SocketReceiver.next_bucket

    def spoil(self: SocketReceiver) -> Tensor:
        engine._staging["model.layers.1.mlp.up_proj.weight"] = torch.ones(96, 64)
        return next_bucket(self)

    monkeypatch.setattr(SocketReceiver, "next_bucket", spoil)
    found = []
    for number in range(1, 7):
        try:
            asyncio.run(setup.exchange.refit(number * period))
        except CorruptWeights:
            found.append(number)
    assert len(found) == 2
    assert found[1] - found[0] == 3


def set_deadline(setup: Setup, seconds: float) -> None:
    """For the next refits: the first, which also connects, takes its time on a busy machine."""
    assert setup.exchange._route is not None
    venue: Any = setup.exchange._route.venue
    venue._deadline_seconds = seconds


def test_a_receiver_that_never_comes_is_named() -> None:
    setup = Setup()
    asyncio.run(setup.exchange.refit(1))
    set_deadline(setup, 0.3)
    setup.engines[1].exchange.receive = lambda session: None  # type: ignore[assignment,method-assign]
    message = (
        r"refit to version 2: policy rank \d waits for generation rank 1 to connect "
        r"since \d\d:\d\d:\d\d \(\d+\.\d s\); the deadline is 0\.3 s"
    )
    with pytest.raises(RefitDeadline, match=message):
        asyncio.run(setup.exchange.refit(2))


def test_a_sender_that_never_comes_is_named() -> None:
    setup = Setup()
    asyncio.run(setup.exchange.refit(1))
    set_deadline(setup, 0.3)
    setup.policy[2].exchange.send = lambda session: None  # type: ignore[assignment,method-assign]
    with pytest.raises(RefitDeadline, match=r"generation rank \d waits for policy rank 2 to listen since"):
        asyncio.run(setup.exchange.refit(2))


def test_a_receiver_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    asyncio.run(setup.exchange.refit(1))
    set_deadline(setup, 0.5)
    released = threading.Event()
    monkeypatch.setattr(SocketReceiver, "taken", SocketReceiver.taken)  # and back
    before_taken(SocketReceiver, 3, lambda: released.wait(2.0))
    with pytest.raises(
        RefitDeadline, match=r"policy rank \d waits for generation rank \d to take bucket \d+ since"
    ):
        asyncio.run(setup.exchange.refit(2))
    released.set()
    assert [engine.version for engine in setup.engines] == [1, 1]


def test_an_error_of_one_rank_is_the_cause_and_ends_the_others_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(deadline_seconds=30.0)
    asyncio.run(setup.exchange.refit(1))
    setup.engines[0]._staging.pop("model.norm.weight")
    with pytest.raises(ValueError, match="there is no local parameter 'model") as caught:
        asyncio.run(setup.exchange.refit(2))
    assert any("generation rank 0 closed its connection" in note for note in caught.value.__notes__)
    assert setup.engines[1].version == 1


def test_only_what_was_received_can_be_committed() -> None:
    setup = Setup()
    with pytest.raises(
        RefitFailed, match="this generation rank was requested to use version 5, but has received none"
    ):
        setup.engines[0].exchange.commit(5)
    asyncio.run(setup.exchange.refit(1))
    with pytest.raises(
        RefitFailed, match="generation rank 0 was requested to use version 1, but has received none"
    ):
        setup.engines[0].exchange.commit(1)


def test_a_rank_without_its_part_says_so(tmp_path: Path) -> None:
    with pytest.raises(RefitFailed, match="before it was given its part of the plan"):
        PolicySide(PolicyRank()).exchange.send(RefitSession(1, "shared_memory", str(tmp_path), 1.0))


def test_a_session_that_is_over_is_not_waited_for(tmp_path: Path) -> None:
    setup = Setup()
    asyncio.run(setup.exchange.refit(1))
    with pytest.raises(
        PeerClosed, match=r"generation rank 0 waits for policy rank 0 to listen .*the driver ended the refit"
    ):
        setup.engines[0].exchange.receive(RefitSession(2, "shared_memory", str(tmp_path / "gone"), 30.0))
    with pytest.raises(
        PeerClosed, match="policy rank 0 started to listen after the driver had ended the refit"
    ):
        setup.policy[0].exchange.send(RefitSession(2, "shared_memory", str(tmp_path / "gone"), 30.0))


def test_a_sender_that_comes_while_a_session_ends_does_not_keep_it_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remove = shutil.rmtree
    came_late: list[str] = []

    def over() -> bool:
        return not Path(session.place).exists()

    def remove_slowly(folder: Path, ignore_errors: bool) -> None:
        with pytest.raises(PeerClosed) as caught:
            Waiting("policy rank 0", session, over).listen(session.socket_path(0), 1)
        came_late.append(str(caught.value))
        remove(folder)

    with monkeypatch.context() as patch, SocketVenue("shared_memory", 30.0).session(1, 1, 1) as session:
        patch.setattr(shutil, "rmtree", remove_slowly)
    assert came_late


def test_a_receiver_that_dies_before_it_is_greeted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with SocketVenue("shared_memory", 30.0).session(1, 1, 1) as session:
        listener = Waiting("policy rank 0", session, lambda: False).listen(session.socket_path(0), 1)
        with refit_socket() as receiver:
            receiver.connect(str(session.socket_path(0)))
            receiver.send(struct.pack("<q", 3))
        monkeypatch.setattr(Waiting, "listen", lambda *_: listener)
        with (
            pytest.raises(PeerClosed, match="generation rank 3 closed its connection"),
            socket_sender(Part(0, (PartBucket(0, (3,), "float32", (whole("w", (2,)),)),)), session),
        ):
            pass


def test_every_tensor_comes_in_the_type_its_engine_keeps_it_in() -> None:
    """As DeepSeek's router bias, float32 among bfloat16; and engines may differ."""
    setup = Setup()
    norm = "model.norm.weight"
    setup.engines = [EngineSide(torch.float32), EngineSide(torch.bfloat16, dtypes={norm: torch.float32})]
    setup.receivers.ranks = setup.engines
    setup.train(seed=1)
    stats = asyncio.run(setup.exchange.refit(1))
    for engine in setup.engines:
        assert_holds(engine, 1, model(seed=1))
    assert setup.engines[1].weights[norm].dtype is torch.float32
    elements = sum(tensor.numel() for tensor in model(1).values())
    assert stats.num_bytes == (4 + 2) * elements + 2 * SHAPE.hidden_size


def test_a_type_that_does_not_travel_is_refused() -> None:
    mixed = EngineSide(torch.float32, dtypes={"model.norm.weight": torch.float64})
    with pytest.raises(ValueError, match=r"the engine keeps model\.norm\.weight as float64; the exchange"):
        mixed.exchange.describe()


def test_weights_written_in_place_are_partial_until_a_whole_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    setup.engines = [EngineSide(torch.float32, in_place=True), EngineSide(torch.float32)]
    setup.receivers.ranks = setup.engines
    setup.train(seed=1)
    asyncio.run(setup.exchange.refit(1))
    assert [engine.exchange.corruption for engine in setup.engines] == [None, None]
    setup.train(seed=2)

    def fail() -> None:
        # The staged engine may be four buckets ahead of the one in place.
        while setup.engines[0].exchange.corruption is None:
            time.sleep(0.001)
        raise RefitFailed("the engine's memory is full")

    monkeypatch.setattr(SocketReceiver, "taken", SocketReceiver.taken)  # and back
    before_taken(SocketReceiver, 3, fail)
    with pytest.raises(RefitFailed, match="memory is full"):
        asyncio.run(setup.exchange.refit(2))
    in_place, staged = (engine.exchange for engine in setup.engines)
    assert staged.corruption is None
    assert_holds(setup.engines[1], 1, model(seed=1))
    assert in_place.corruption is not None
    assert "generation rank 0 was being brought to version 2 in place" in in_place.corruption
    monkeypatch.undo()
    asyncio.run(setup.exchange.refit(3))
    assert in_place.corruption is None
    for engine in setup.engines:
        assert_holds(engine, 3, model(seed=2))


@pytest.mark.parametrize("bucket", [0, 3])
def test_an_update_that_is_given_up_writes_no_more_though_its_senders_live(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`abandon` reports whether the weights are corrupt, and that stays true."""
    setup = Setup()
    engine = EngineSide(torch.float32, in_place=True)
    setup.engines[:] = [engine]
    setup.train(seed=1)
    asyncio.run(setup.exchange.refit(1))
    setup.train(seed=2)
    next_bucket, counted = SocketReceiver.next_bucket, itertools.count()
    found: list[tuple[str | None, dict[str, Tensor]]] = []

    def give_up(receiver: SocketReceiver) -> Tensor:
        content = next_bucket(receiver)
        if next(counted) == bucket:
            engine.exchange.abandon()
            found.append(
                (engine.exchange.corruption, {name: w.clone() for name, w in engine.weights.items()})
            )
        return content

    with monkeypatch.context() as patch:
        patch.setattr(SocketReceiver, "next_bucket", give_up)
        with pytest.raises(
            RefitFailed, match="generation rank 0 was still receiving when the refit was abandoned"
        ):
            asyncio.run(setup.exchange.refit(2))
    ((corruption, weights),) = found
    assert engine.exchange.corruption == corruption
    assert (corruption is None) == (bucket == 0)
    assert_holds(engine, 1, weights)
    asyncio.run(setup.exchange.refit(2))
    assert engine.exchange.corruption is None
    assert_holds(engine, 2, model(seed=2))


def test_an_update_can_be_given_up_before_its_thread_runs() -> None:
    setup = Setup()
    asyncio.run(setup.exchange.refit(1))
    receiver = setup.engines[0].exchange
    receive = receiver.begin(RefitSession(2, "shared_memory", "/nowhere", 30.0))
    receiver.abandon()
    with pytest.raises(RefitFailed, match="was abandoned"):
        receive()


def test_messages_survive_json() -> None:
    """An engine hands them to its own processes as text."""
    setup = Setup(torch.bfloat16)
    asyncio.run(setup.exchange.refit(1))
    receiver = setup.engines[0].exchange
    for message in (
        receiver.describe(),
        receiver._part,
        RefitSession(3, "gloo", "127.0.0.1:29", 1.5, rendezvous=2),
        ReceiveReport({"w": 2**64 - 1}, 12),
    ):
        adapter = TypeAdapter(type(message))
        assert adapter.validate_json(adapter.dump_json(message)) == message


def test_a_policy_that_lacks_a_stage_is_refused_before_anything_moves() -> None:
    setup = Setup()
    senders = Threads(setup.policy[:2])
    exchange = WeightExchange(senders, setup.receivers, BUCKET, 30.0)
    with pytest.raises(UnservedBox, match=r"no sender holds model\.layers\.1\."):
        asyncio.run(exchange.refit(1))
    assert "send" not in senders.calls


def test_a_temporary_folder_with_a_long_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes socket paths of 107 characters at most."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(RefitFailed, match=r"too long a path for sockets .* set TMPDIR to a shorter one"):
        asyncio.run(Setup().exchange.refit(1))
    assert list(long.iterdir()) == []
