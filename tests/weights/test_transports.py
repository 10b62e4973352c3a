"""Process groups and files carry what shared memory carries; every rank a thread."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from nemorl.config.generation import LOOPBACK
from nemorl.models.layout import PolicyRank, hf_tensors
from nemorl.weights import endpoints, files
from nemorl.weights.exchange import TransportOptions, WeightExchange
from nemorl.weights.files import (
    FileSender,
    FileVenue,
    complete_versions,
    file_name,
    partial_folder,
    version_folder,
)
from nemorl.weights.messages import CorruptWeights, Part, RefitDeadline, RefitFailed, RefitSession
from nemorl.weights.process_group import Group, GroupReceiver, GroupSender, GroupVenue
from tests.full_disk import files_end_at
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
            TransportOptions(transport, folder),  # type: ignore[arg-type]
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


@pytest.mark.parametrize("transport", ["gloo", "files"])
def test_weights_arrive_bit_for_bit(tmp_path: Path, transport: str) -> None:
    setup = Setup(tmp_path, transport)
    for version in (1, 2, 3):
        setup.refit(version)
        setup.assert_holds(version)
    stats = asyncio.run(setup.exchange.refit(4))
    elements = sum(tensor.numel() for tensor in model(1).values())
    assert stats.num_bytes == (2 + 4) * elements + 2 * SHAPE.hidden_size
    assert 0 < stats.extra_bytes <= len(TP2_PP2) * 2 * BUCKET


def test_a_receiver_that_hangs_ends_with_the_deadline_and_ranks_meet_again(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "gloo")
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


def test_a_member_that_never_comes_is_named(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "gloo", deadline_seconds=2.0)
    setup.policy[2].exchange.send = lambda session: None  # type: ignore[assignment,method-assign]
    with pytest.raises(RefitDeadline, match=r"generation rank \d waits for policy rank 2 to join since"):
        asyncio.run(setup.exchange.refit(1))


def test_an_error_of_one_member_ends_the_others_at_once(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "gloo")
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


def test_one_bucket_is_enough_for_many_engines() -> None:
    """It is passed on from one to the next."""
    policy, engines = PolicySide(PolicyRank()), [EngineSide(torch.float32) for _ in range(4)]
    policy.train(1)
    options = TransportOptions("gloo")
    stats = asyncio.run(WeightExchange(Threads([policy]), Threads(engines), 2**30, 30.0, options).refit(1))
    assert stats.num_buckets == 1
    assert stats.num_bytes == 4 * sum(tensor.nbytes for tensor in model(1).values())
    for engine in engines:
        assert_equal(engine.weights, model(1))


def test_a_sender_that_fails_before_its_first_bucket_ends_the_others_at_once(tmp_path: Path) -> None:
    """No two ranks have exchanged anything by then, and gloo connects late."""
    setup = Setup(tmp_path, "gloo", deadline_seconds=120.0)
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


def test_each_element_is_in_one_file_and_old_versions_go(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "files")
    for version in (1, 2, 3):
        setup.refit(version)
    assert complete_versions(tmp_path) == [2, 3]
    stored: dict[tuple[str, str], int] = {}
    folder = version_folder(tmp_path, 3)
    for name, entry in json.loads((folder / "manifest.json").read_text())["tensors"].items():
        for box in entry["boxes"]:
            spans = [(s, s + n) for s, n in zip(box["start"], box["size"], strict=True)]
            key = f"{name}[{', '.join(f'{first}:{last}' for first, last in spans)}]:{box['dtype']}"
            with safe_open(folder / box["file"], framework="pt") as file:
                values = file.get_tensor(key)
            expected = model(3)[name][tuple(slice(*span) for span in spans)]
            assert torch.equal(values, expected.to(values.dtype))
            stored[name, box["dtype"]] = stored.get((name, box["dtype"]), 0) + values.numel()
    sizes = {name: tensor.numel() for name, tensor in model(3).items()}
    wanted = {(name, dtype): size for name, size in sizes.items() for dtype in ("float32", "bfloat16")}
    del wanted["model.norm.weight", "bfloat16"]
    assert stored == wanted


@pytest.mark.parametrize("renames", [0, 1])
def test_a_crash_while_a_version_is_replaced_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """The driver is gone before the first rename, or between the two; the next one finds the old version."""
    setup = Setup(tmp_path, "files")
    setup.refit(1)
    setup.refit(2)
    rename, done = Path.rename, []

    def crash(self: Path, target: Path) -> Path:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(self.name)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(setup.exchange.refit(2))
    (tmp_path / "v00000009.partial").mkdir()  # of another crash
    again = Setup(tmp_path, "files")
    again.refit(3)
    assert complete_versions(tmp_path) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000002", "v00000003"]
    late = receive_late(tmp_path, 2)
    late.exchange.commit(2)
    assert_equal(late.weights, model(2))


def test_a_resumed_run_replaces_the_versions_after_its_checkpoint(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "files")
    for version in (4, 5, 6, 4):
        setup.refit(version)
        setup.assert_holds(version)
    assert complete_versions(tmp_path) == [4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_receiver_that_joins_later_reads_a_complete_version(tmp_path: Path, dtype: torch.dtype) -> None:
    """In a type that was written, and in one that is made of float32."""
    setup = Setup(tmp_path, "files")
    setup.refit(7)
    late = EngineSide(dtype)
    late.exchange.prepare(Part(9, ()))
    late.exchange.receive(RefitSession(7, "files", str(tmp_path), 30.0))
    late.exchange.commit(7)
    assert late.version == 7
    assert_equal(late.weights, model(7))


def receive_late(folder: Path, version: int) -> EngineSide:
    late = EngineSide(torch.float32)
    late.exchange.prepare(Part(9, ()))
    late.exchange.receive(RefitSession(version, "files", str(folder), 30.0))
    return late


def test_each_element_of_files_is_checked_once_where_it_is_read_and_once_where_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Setup(tmp_path, "files").refit(1)
    checked: dict[str, int] = {}
    for module, name in (
        (files, "fingerprint"),
        (endpoints, "fingerprint"),
        (endpoints, "queue_fingerprint"),
    ):
        original: Callable[..., Any] = getattr(module, name)
        key = f"{module.__name__}.{name}"

        def counting(
            values: Tensor, *place: Any, key: str = key, original: Callable[..., Any] = original
        ) -> Any:
            checked[key] = checked.get(key, 0) + values.numel()
            return original(values, *place)

        monkeypatch.setattr(module, name, counting)
    receive_late(tmp_path, 1)
    elements = sum(tensor.numel() for tensor in model(1).values())
    where_read, where_held = f"{files.__name__}.fingerprint", f"{endpoints.__name__}.queue_fingerprint"
    assert checked == {where_read: elements, where_held: elements}


def test_an_engine_that_does_not_hold_what_it_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Setup(tmp_path, "files").refit(1)
    queue = endpoints.queue_fingerprint

    def spoiled(values: Tensor, *place: Any) -> Tensor:
        values.view(-1)[0] += 1
        return queue(values, *place)

    monkeypatch.setattr(endpoints, "queue_fingerprint", spoiled)
    with pytest.raises(CorruptWeights, match=r"rank 9 read .* for version 1, but holds other values"):
        receive_late(tmp_path, 1)


def lack_a_field(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["tensors"]["model.norm.weight"]["boxes"][0]["fingerprint"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def cut(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:1000])


def flatten_a_box(folder: Path) -> None:
    """Of a matrix, a box with one dimension."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"]["model.embed_tokens.weight"]["boxes"][0]["start"] = [0]
    path.write_text(json.dumps(manifest))


def damage(folder: Path) -> None:
    """Flip a bit of the last element of a file."""
    path = folder / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def lose(folder: Path) -> None:
    (folder / "rank-00001.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (damage, r"rank-00001\.safetensors: .* is not what was written"),
        (lose, "No such file"),
        (
            lack_a_field,
            r"v00000002/manifest\.json cannot be read: tensors\.model\.norm\.weight\.boxes\.0\.fingerprint: "
            "Field required",
        ),
        (
            flatten_a_box,
            r"tensors\.model\.embed_tokens\.weight\.boxes\.0: start and size must have 2 numbers each",
        ),
        (cut, r"v00000002/manifest\.json cannot be read: the file: Invalid JSON"),
    ],
)
def test_a_spoilt_file_is_found(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    setup = Setup(tmp_path, "files")
    setup.refit(1)
    setup.refit(2)
    spoil(version_folder(tmp_path, 2))
    late = EngineSide(torch.bfloat16)
    late.exchange.prepare(Part(9, ()))
    with pytest.raises((CorruptWeights, RefitFailed), match=said):
        late.exchange.receive(RefitSession(2, "files", str(tmp_path), 30.0))
    assert late.version == 0


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "files")
    setup.refit(1)
    setup.train(2)
    message = r"policy rank \d cannot write .*: File too large"
    with files_end_at(40_000), pytest.raises(RefitFailed, match=message):
        asyncio.run(setup.exchange.refit(2))
    setup.assert_holds(1)
    assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]
    setup.refit(3)
    setup.assert_holds(3)


def test_nothing_is_left_though_a_rank_begins_its_file_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmdir = os.rmdir
    with FileVenue(tmp_path, 30.0).session(1, 2, 1) as session:  # that does not become complete
        (partial_folder(session) / file_name(0)).touch()

        def after_late_rank(*given: Any, **options: Any) -> None:
            with suppress(FileNotFoundError):
                (partial_folder(session) / file_name(1)).touch()
            rmdir(*given, **options)

        monkeypatch.setattr(os, "rmdir", after_late_rank)
    assert not list(tmp_path.iterdir())


def test_a_version_that_is_not_there_is_said(tmp_path: Path) -> None:
    engine = EngineSide(torch.float32)
    engine.exchange.prepare(Part(0, ()))
    with pytest.raises(RefitFailed, match="version 4 of the weights cannot be read"):
        engine.exchange.receive(RefitSession(4, "files", str(tmp_path), 30.0))


def test_conversion_continues_while_a_bucket_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bucket's write waits until the second is filled."""
    filled = threading.Event()
    write, slot = FileSender._write, FileSender.slot

    def slow(self: FileSender, content: memoryview, offset: int) -> None:
        assert offset == 0 or filled.wait(10.0)
        write(self, content, offset)

    def noted(self: FileSender, number: int) -> Tensor:
        if number == 1:
            filled.set()
        return slot(self, number)

    monkeypatch.setattr(FileSender, "_write", slow)
    monkeypatch.setattr(FileSender, "slot", noted)
    setup = Setup(tmp_path, "files")
    setup.refit(1)
    setup.assert_holds(1)
    assert set(hf_tensors(SHAPE)) == set(setup.engines[0].weights)
