"""Versions in files: complete or changes of boxes, in a folder, in memory and behind HTTP."""

import asyncio
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor

from nemorl.config.policy import LayoutConfig
from nemorl.models.layout import hf_tensors, policy_rank, policy_slices
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view
from nemorl.weights import endpoints, files
from nemorl.weights.endpoints import WeightReceiver
from nemorl.weights.exchange import RefitStats, TransportOptions, WeightExchange
from nemorl.weights.files import FileSender, FileVenue, Store, folder_name, object_name, versions
from nemorl.weights.messages import CorruptWeights, Part, ReceiveReport, RefitFailed, RefitSession
from tests.full_disk import files_end_at
from tests.weights.ranks import SHAPE, TP2_PP2, EngineSide, PolicySide, Threads, allocate, box, model
from tests.weights.store_server import serving

BUCKET = 4096


class Setup:
    """A policy of TP2 x PP2; an engine of each kind. Without `every` each version is complete."""

    def __init__(self, url: object, every: int | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        self.policy = [PolicySide(layout) for layout in TP2_PP2]
        self.engines = [EngineSide(dtype), EngineSide(dtype, in_place=True)]
        self.url = str(url)
        options = TransportOptions("files", self.url, delta=every is not None, full_version_every=every or 1)
        self.exchange = WeightExchange(Threads(self.policy), Threads(self.engines), BUCKET, 30.0, options)

    def refit(self, version: int) -> RefitStats:
        """With the weights of a seed."""
        for rank in self.policy:
            rank.train(version)
        return asyncio.run(self.exchange.refit(version))

    def step(self, version: int) -> RefitStats:
        """After a small step of the optimizer."""
        for rank in self.policy:
            rank.step(2e-5)
        return asyncio.run(self.exchange.refit(version))

    def weights(self) -> dict[str, Tensor]:
        """Complete, float32."""
        found = {name: torch.full(shape, math.nan) for name, shape in hf_tensors(SHAPE).items()}
        for rank in self.policy:
            for part, values in rank.held():
                found[part.name][box(part)] = values
        return found

    def assert_arrived(self, *others: EngineSide) -> None:
        for engine in (*self.engines, *others):
            assert_equal(engine.weights, self.weights())


def assert_equal(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor.to(weights[name].dtype)), name


def joiner(dtype: torch.dtype = torch.bfloat16) -> EngineSide:
    late = EngineSide(dtype)
    late.exchange.prepare(Part(9, ()))
    return late


def receive(engine: EngineSide, url: object, version: int) -> ReceiveReport:
    report = engine.exchange.receive(RefitSession(version, "files", str(url), 30.0))
    engine.exchange.commit(version)
    return report


def folders(path: Path, version: int) -> list[Path]:
    """Of which a version is made."""
    names = json.loads((path / f"v{version:08d}.json").read_text())["folders"]
    return [path / name for name in names]


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.bin"))


NUM_BYTES = 2 * sum(math.prod(shape) for shape in hf_tensors(SHAPE).values())  # of a version in bfloat16


# Complete versions


@pytest.mark.parametrize("every", [None, 1])
def test_each_element_is_in_one_object_and_old_versions_go(tmp_path: Path, every: int | None) -> None:
    setup = Setup(tmp_path, every)
    for version in (1, 2, 3):
        setup.refit(version)
    assert versions(str(tmp_path)) == [2, 3]
    (folder,) = folders(tmp_path, 3)
    assert len(list(tmp_path.iterdir())) == 4
    stored: dict[str, int] = {}
    for name, entry in json.loads((folder / "manifest.json").read_text()).items():
        for one in entry["boxes"]:
            content = (folder / object_name(one["rank"])).read_bytes()
            content = content[one["offset"] : one["offset"] + one["num_bytes"]]
            values = torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(one["size"])
            place = tuple(slice(s, s + n) for s, n in zip(one["start"], one["size"], strict=True))
            assert torch.equal(values, model(3)[name][place].bfloat16())
            stored[name] = stored.get(name, 0) + values.numel()
    assert stored == {name: tensor.numel() for name, tensor in model(3).items()}
    assert bytes_in(folder) == NUM_BYTES


@pytest.mark.parametrize("moves", [0, 1])
def test_a_crash_while_a_version_is_replaced_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """The driver is gone before the manifest, or the version, has its name; the next one finds the old."""
    setup = Setup(tmp_path)
    setup.refit(1)
    setup.refit(2)
    local: Any = fsspec.filesystem("file")
    move, done = type(local).mv, list[str]()

    def crash(self: Any, source: str, target: str) -> None:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(source)
        move(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(local), "mv", crash)
        patch.setattr(Store, "remove_all_but", lambda self, kept: None)  # the process is gone
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(setup.exchange.refit(2))
    assert len(list(tmp_path.iterdir())) == 5 + moves
    late = joiner()
    receive(late, tmp_path, 2)
    assert_equal(late.weights, model(2))
    Setup(tmp_path).refit(3)
    assert versions(str(tmp_path)) == [2, 3]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("every", [None, 3])
def test_a_resumed_run_replaces_the_versions_after_its_checkpoint(tmp_path: Path, every: int | None) -> None:
    setup = Setup(tmp_path, every)
    for version in (4, 5, 6, 4):
        setup.refit(version)
        setup.assert_arrived()
    assert versions(str(tmp_path)) == [4]
    again = Setup(tmp_path, every)  # has no changes since a version of another driver
    again.refit(5)
    assert len(folders(tmp_path, 5)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_receiver_that_joins_later_reads_a_complete_version(tmp_path: Path, dtype: torch.dtype) -> None:
    """In a type that was written, and in one that is made of float32."""
    setup = Setup(tmp_path)
    setup.engines[0] = EngineSide(torch.float32)
    setup.exchange._receivers.ranks = setup.engines  # type: ignore[attr-defined]
    setup.refit(7)
    late = joiner(dtype)
    receive(late, tmp_path, 7)
    assert late.version == 7
    assert_equal(late.weights, model(7))


def test_each_element_is_checked_once_where_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Setup(tmp_path).refit(1)
    checked = []
    queue = endpoints.queue_fingerprint

    def counting(values: Tensor, *place: Any) -> Tensor:
        checked.append(values.numel())
        return queue(values, *place)

    monkeypatch.setattr(endpoints, "queue_fingerprint", counting)
    monkeypatch.setattr(files, "fingerprint", lambda *_: pytest.fail("a box is checked when it is read"))
    receive(joiner(), tmp_path, 1)
    assert sum(checked) == NUM_BYTES // 2


def test_an_engine_that_does_not_hold_what_it_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Setup(tmp_path).refit(1)
    queue = endpoints.queue_fingerprint

    def spoiled(values: Tensor, *place: Any) -> Tensor:
        values.view(-1)[0] += 1
        return queue(values, *place)

    late = joiner()
    with monkeypatch.context() as patch:
        patch.setattr(endpoints, "queue_fingerprint", spoiled)
        with pytest.raises(CorruptWeights, match=r"rank 9 read .* for version 1, but holds other values"):
            receive(late, tmp_path, 1)
    assert receive(late, tmp_path, 1).num_bytes == NUM_BYTES  # it does not rely on what it held
    assert_equal(late.weights, model(1))


def lack_a_field(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["model.norm.weight"]["boxes"][0]["fingerprint"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def cut_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:1000])


def flatten_a_box(folder: Path) -> None:
    """Of a matrix, a box with one dimension."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["model.embed_tokens.weight"]["boxes"][0]["start"] = [0]
    path.write_text(json.dumps(manifest))


def damage(folder: Path) -> None:
    """Flip a bit of the last element of a file."""
    path = folder / "rank-00001.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(folder: Path) -> None:
    path = folder / "rank-00001.bin"
    path.write_bytes(path.read_bytes()[:-5])


def lose(folder: Path) -> None:
    (folder / "rank-00001.bin").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def end_version(folder: Path) -> None:
    (folder.parent / "v00000002.json").write_text('{"version": 2, "folders": []}')


OBJECT = r"version 2 of the weights: .*v0000000\d-[0-9a-f]{8}/rank-00001\.bin: "
MANIFEST = r"v0000000\d-[0-9a-f]{8}/manifest\.json"
SPOILED = {
    "bit": (damage, OBJECT + r".* not what was written there; .*write a full version"),
    "cut": (cut, OBJECT + r"it ends before byte \d+; .*write a full version"),
    "lost": (lose, r"version 2 of the weights lacks .*/rank-00001\.bin: .* a newer version, or write one"),
    "lost manifest": (lose_manifest, rf"version 2 of the weights lacks .*{MANIFEST}"),
    "field": (
        lack_a_field,
        rf"{MANIFEST} cannot be read: model\.norm\.weight\.boxes\.0\.fingerprint: Field required",
    ),
    "axes": (
        flatten_a_box,
        r"model\.embed_tokens\.weight\.boxes\.0: start and size must have 2 numbers each",
    ),
    "cut manifest": (cut_manifest, rf"{MANIFEST} cannot be read: the file: Invalid JSON"),
    "no folders": (end_version, r"v00000002\.json cannot be read: folders: Tuple should have at least 1"),
}


@pytest.mark.parametrize("which", [0, 1], ids=["full", "changes"])
@pytest.mark.parametrize(("spoil", "said"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_object_is_found_and_the_next_version_is_complete(
    tmp_path: Path, spoil: Callable[[Path], None], said: str, which: int
) -> None:
    """Of a version of two folders, in either."""
    setup = Setup(tmp_path, every=10)
    setup.refit(1)
    setup.step(2)
    spoil(folders(tmp_path, 2)[which])
    late = joiner()
    with pytest.raises((CorruptWeights, RefitFailed), match=said):
        receive(late, tmp_path, 2)
    assert late.version == 0
    setup.engines.append(late)
    setup.exchange.layout_changed()
    assert setup.step(3).num_bytes == 3 * NUM_BYTES
    setup.assert_arrived()
    assert (2 in versions(str(tmp_path))) == (spoil is not end_version)  # which cannot be read at all


def test_old_versions_are_gone_when_an_update_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal that continues could take what the next update writes."""
    setup = Setup(tmp_path)
    remove_old, removed = FileVenue.remove_old, threading.Event()

    def slow(venue: FileVenue) -> None:
        removed.wait(0.5)
        remove_old(venue)
        removed.set()

    def fail(*_: Any) -> ReceiveReport:
        raise RefitFailed("the engine's memory is full")

    async def refit() -> None:
        with pytest.raises(RefitFailed, match="memory is full"):
            await setup.exchange.refit(1)
        assert removed.is_set()

    monkeypatch.setattr(FileVenue, "remove_old", slow)
    with monkeypatch.context() as patch:
        patch.setattr(WeightReceiver, "_receive", fail)
        asyncio.run(refit())
    setup.refit(2)
    setup.assert_arrived()


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    setup = Setup(tmp_path, dtype=torch.float32)
    setup.refit(1)
    with files_end_at(40_000), pytest.raises(RefitFailed, match=r"policy rank \d cannot write .*too large"):
        setup.refit(2)
    assert versions(str(tmp_path)) == [1]
    assert len(list(tmp_path.iterdir())) == 2
    assert [engine.version for engine in setup.engines] == [1, 1]
    setup.refit(3)
    setup.assert_arrived()


def test_what_a_late_rank_leaves_goes_with_the_next_version(tmp_path: Path) -> None:
    venue = FileVenue(str(tmp_path), 30.0)
    with venue.session(1, 2, 1) as late:
        pass  # it does not become complete
    assert not list(tmp_path.iterdir())
    (tmp_path / folder_name(late)).mkdir()
    (tmp_path / folder_name(late) / object_name(1)).touch()
    (tmp_path / "notes.txt").touch()  # of the user
    with venue.session(2, 2, 1) as session:
        assert {path.name for path in tmp_path.iterdir()} == {folder_name(session), "notes.txt"}


def test_a_version_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RefitFailed, match=r"version 4 of the weights lacks .*/v00000004\.json"):
        receive(joiner(), tmp_path, 4)


@pytest.mark.parametrize("url", ["nowhere://x", "dropbox://x"])
def test_an_url_without_file_system_is_named(url: str) -> None:
    with pytest.raises(RefitFailed, match=f"the weights at {url} cannot be reached: .*(dropbox|nowhere)"):
        Setup(url).refit(1)


def test_conversion_continues_while_a_bucket_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bucket's write waits until the second is filled."""
    filled = threading.Event()
    write, slot = FileSender._write, FileSender.slot

    def slow(self: FileSender, content: memoryview) -> None:
        assert self.file.tell() or filled.wait(10.0)
        write(self, content)

    def noted(self: FileSender, number: int) -> Tensor:
        if number == 1:
            filled.set()
        return slot(self, number)

    monkeypatch.setattr(FileSender, "_write", slow)
    monkeypatch.setattr(FileSender, "slot", noted)
    setup = Setup(tmp_path)
    setup.refit(1)
    setup.assert_arrived()


# Changes


@pytest.fixture(params=["folder", "memory"])
def url(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path)
        return
    yield "memory://weights/run"
    fsspec.filesystem("memory").rm("/weights", recursive=True)


def test_every_kth_version_is_complete_and_the_others_are_changes(url: str) -> None:
    check_versions(url)


def check_versions(url: str) -> None:
    """Seven versions, each third of which is complete, and engines that join at each."""
    setup = Setup(url, every=3)
    joiners = []
    for version in range(1, 8):
        stats = setup.refit(1) if version == 1 else setup.step(version)
        setup.assert_arrived()
        is_full = version in (1, 4, 7)
        chain = Store(url).chain(version)
        assert len(chain) == (version - 1) % 3 + 1
        assert stats.num_bytes_whole == NUM_BYTES
        if is_full:
            assert stats.num_bytes == 2 * NUM_BYTES
        else:
            assert 0 < stats.num_bytes < 2 * NUM_BYTES / 10
            assert stats.max_sent_bytes < NUM_BYTES / 10
        joiners.append(joiner())
        report = receive(joiners[-1], url, version)
        assert_equal(joiners[-1].weights, setup.weights())
        assert NUM_BYTES <= report.num_bytes < 1.2 * NUM_BYTES
    # the two newest versions are kept, with the chain of each
    assert versions(url) == [6, 7]
    kept = {*Store(url).chain(6), *Store(url).chain(7)}
    assert len(kept) == 4
    assert {name for name in Store(url).names() if not name.endswith(".json")} == kept
    # each joiner reads on from the version that it has, and only what has changed if it is of the chain
    for version, late in enumerate(joiners[:6], 1):
        report = receive(late, url, 6)
        assert_equal(late.weights, joiners[5].weights)
        assert (report.num_bytes < NUM_BYTES / 5) == (version >= 4)
        assert (report.num_bytes == 0) == (version == 6)


def test_object_stores_are_written_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their objects appear completely, so that none needs another name before."""
    store = Store("memory://weights/run")
    monkeypatch.setattr(type(store.files), "protocol", ("s3", "s3a"))
    monkeypatch.setattr(type(store.files), "mv", None)
    store.write("manifest.json", b"{}")
    assert store.names() == ["manifest.json"]
    store.files.rm("/weights", recursive=True)


def layout(tp: int = 1, pp: int = 1) -> LayoutConfig:
    return LayoutConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, sequence_parallel=tp > 1)


@pytest.mark.parametrize("of_engine", [layout(), layout(2, 2)], ids=["TP1", "TP2 PP2"])
def test_an_engine_of_any_layout_reads_a_chain(tmp_path: Path, of_engine: LayoutConfig) -> None:
    """Boxes were cut for complete tensors: of those that it needs in part, it reads all from the full one."""
    setup = Setup(tmp_path, every=10)
    setup.refit(1)
    for rank in range(of_engine.world_size):
        slices = policy_slices(SHAPE, policy_rank(of_engine, rank))
        weights = allocate(slices, torch.bfloat16)
        late = WeightReceiver(slices, lambda held=weights: held, lambda version: None)  # type: ignore[misc]
        late.prepare(Part(9, ()))
        newest = versions(str(tmp_path))[-1]
        for version in range(newest, newest + 3):
            if version > newest:
                setup.step(version)
            late.receive(RefitSession(version, "files", str(tmp_path), 30.0))
            late.commit(version)
            expected = setup.weights()
            for part in slices:
                assert torch.equal(local_view(weights, part), expected[part.name][box(part)].bfloat16())


def halves(name: str, shape: tuple[int, ...]) -> list[TensorSlice]:
    """Both halves of the first axis, in one parameter."""
    whole, middle = TensorSlice.whole(name, shape), shape[0] // 2
    return [
        replace(whole, start=(start, *whole.start[1:]), size=(end - start, *shape[1:]), offset=offset)
        for start, end, offset in ((0, middle, 0), (middle, shape[0], middle * whole.strides[0]))
    ]


def test_parts_of_the_same_box_get_its_changes_once(tmp_path: Path) -> None:
    setup = Setup(tmp_path, every=10)
    setup.refit(1)
    setup.step(2)
    slices = [part for name, shape in hf_tensors(SHAPE).items() for part in halves(name, shape)]
    weights = allocate(slices, torch.bfloat16)
    late = WeightReceiver(slices, lambda: weights, lambda version: None)
    late.prepare(Part(9, ()))
    late.receive(RefitSession(2, "files", str(tmp_path), 30.0))
    expected = setup.weights()
    for part in slices:
        assert torch.equal(local_view(weights, part), expected[part.name][box(part)].bfloat16())


def test_a_sender_without_the_base_writes_its_boxes_completely(tmp_path: Path) -> None:
    setup = Setup(tmp_path, every=10)
    setup.refit(1)
    last = setup.policy[0].exchange._last
    last.version = None
    stats = setup.step(2)
    assert 0.2 < stats.num_bytes / (2 * NUM_BYTES) < 0.6
    assert len(folders(tmp_path, 2)) == 2
    late = joiner()
    assert receive(late, tmp_path, 2).num_bytes < 1.2 * NUM_BYTES  # its boxes of version 1 are not read
    setup.assert_arrived(late)


def test_after_a_failure_the_next_version_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path, every=10)
    setup.refit(1)

    def fail(*given: Any) -> None:
        raise RefitFailed("the engine's memory is full")

    with monkeypatch.context() as patch:
        patch.setattr(endpoints, "apply", fail)
        with pytest.raises(RefitFailed, match="memory is full"):
            setup.step(2)
    assert setup.step(3).num_bytes == 2 * NUM_BYTES
    assert len(folders(tmp_path, 3)) == 1
    assert setup.step(4).num_bytes < NUM_BYTES / 5
    setup.assert_arrived()


def test_changes_are_refused_if_they_were_altered(tmp_path: Path) -> None:
    """Each bit of the changes that a box has is in a checksum."""
    setup = Setup(tmp_path, every=10)
    setup.refit(1)
    setup.step(2)
    path = folders(tmp_path, 2)[1] / "rank-00001.bin"
    content = path.read_bytes()
    for place in range(0, len(content), 97):
        altered = bytearray(content)
        altered[place] ^= 1 << place % 8
        path.write_bytes(altered)
        with pytest.raises(CorruptWeights, match=r"(is|are) not what was written there"):
            receive(joiner(), tmp_path, 2)


def test_altered_changes_are_not_applied(tmp_path: Path) -> None:
    """An engine that holds the version before keeps all of it, and later reads only the changes."""
    setup = Setup(tmp_path, every=10)
    setup.refit(1)
    late = joiner()
    receive(late, tmp_path, 1)
    setup.step(2)
    path = folders(tmp_path, 2)[1] / "rank-00001.bin"
    content = path.read_bytes()
    path.write_bytes(bytes([*content[:-1], content[-1] ^ 1]))
    with pytest.raises(CorruptWeights, match=r"rank-00001\.bin: changes of .* not what was written there"):
        late.exchange.receive(RefitSession(2, "files", str(tmp_path), 30.0))
    path.write_bytes(content)
    assert receive(late, tmp_path, 2).num_bytes < NUM_BYTES / 5
    setup.assert_arrived(late)


def test_an_update_that_was_given_up_writes_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread waits for the store while another one brings the version; changes are added once."""
    setup = Setup(tmp_path, every=10)
    setup.refit(1)
    late = EngineSide(torch.bfloat16, in_place=True)
    late.exchange.prepare(Part(9, ()))
    receive(late, tmp_path, 1)
    setup.step(2)
    reading, released = threading.Event(), threading.Event()
    contents = files.StoredVersion._contents

    def slow(self: files.StoredVersion, links: Any) -> Any:
        found = contents(self, links)
        if threading.current_thread().name == "given up":
            reading.set()
            assert released.wait(10)
        return found

    monkeypatch.setattr(files.StoredVersion, "_contents", slow)
    session = RefitSession(2, "files", str(tmp_path), 30.0)
    failures: list[Exception] = []
    first = late.exchange.begin(session)

    def given_up() -> None:
        try:
            first()
        except RefitFailed as error:
            failures.append(error)

    thread = threading.Thread(target=given_up, name="given up")
    thread.start()
    assert reading.wait(10)
    late.exchange.abandon()
    receive(late, tmp_path, 2)
    released.set()
    thread.join()
    assert "still receiving when the refit was abandoned" in str(failures[0])
    setup.assert_arrived(late)


# Interruptions, and other stores


def test_what_was_read_before_an_interruption_is_not_read_again(tmp_path: Path) -> None:
    """A joiner over HTTP loses its store after some boxes; the second attempt reads the rest."""
    setup = Setup(tmp_path, every=10)
    setup.refit(1)
    for version in (2, 3):
        setup.step(version)
    late = joiner()
    with serving(tmp_path) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_READ_BYTES", 2 * BUCKET)
        patch.setattr(files, "_PAUSE_SECONDS", 0.001)
        assert versions(server.url) == [2, 3]
        server.fails = lambda path: 503 if path.endswith(".bin") and len(server.reads) > 30 else None
        with pytest.raises(RefitFailed, match=r"version 3 of the weights: .*rank-.*503.*repeat the update"):
            late.exchange.receive(RefitSession(3, "files", server.url, 30.0))
        first = server.bytes_of(".bin")
        assert 0 < first < NUM_BYTES
        late.exchange.abandon()
        server.fails = lambda path: None
        report = receive(late, server.url, 3)
        assert_equal(late.weights, setup.weights())
        both = sum(bytes_in(folder) for folder in folders(tmp_path, 3))
        # of the last batch, which was interrupted, some is read twice
        assert both <= server.bytes_of(".bin") <= both + 4 * BUCKET
        assert report.num_bytes < both - first + 4 * BUCKET


def test_a_range_that_fails_once_is_read_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(tmp_path)
    setup.refit(1)
    monkeypatch.setattr(files, "_READ_BYTES", 2 * BUCKET)
    monkeypatch.setattr(files, "_PAUSE_SECONDS", 0.001)
    turn = itertools.count()
    with serving(tmp_path) as server:
        server.fails = lambda path: 500 if next(turn) % 3 == 2 else None
        late = joiner()
        receive(late, server.url, 1)
        assert server.bytes_of(".bin") == NUM_BYTES
    setup.assert_arrived(late)


def test_a_server_without_ranges_is_named(tmp_path: Path) -> None:
    Setup(tmp_path).refit(1)
    with serving(tmp_path) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_READ_BYTES", BUCKET)
        server.has_ranges = False
        with pytest.raises(RefitFailed, match=r"rank-0000\d\.bin .*the server does not support ranges"):
            receive(joiner(), server.url, 1)
