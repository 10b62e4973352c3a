"""Transport through a folder or an object store: versions of weights, complete or changes of boxes.

    <url>/v00000012.json                     the version: its folders, the full one first; written last
          v00000012-9b1c04fe/manifest.json   which box of which tensor lies where, with its checksums
                             rank-00000.bin  boxes of one sender; each element is in one of these objects
          v00000013.json, v00000013-.../     changes since version 12, or complete boxes if that is less

The URL is one of fsspec's, or a local folder. Object stores cannot rename, so folders have unique names, and
a version appears when its small file does. Objects are written once, from the beginning to the end. Nothing
waits until a disk has them: checksums find what a power cut damages, and a resumed run writes a full version.

A receiver of any layout, also one that joins later, reads the boxes it needs and checks each: changes since
those that it holds, or what is in the full version and all changes. Boxes that the plan knew contain nothing
else (`plan_files`).
"""

import json
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import merge_offset_ranges
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from nemorl.models.slices import TensorSlice

from .delta import BrokenChanges, add_changes
from .messages import (
    ITEM_BYTES,
    CorruptWeights,
    Part,
    RefitFailed,
    RefitSession,
    SendingChannel,
    SendReport,
    Slots,
    Venue,
    fingerprint,
    sender_name,
    torch_dtype,
)
from .plan import Box, box_of, intersection, narrow

MANIFEST = "manifest.json"
_VERSION = re.compile(r"v(\d{8,})\.json")
_OBJECT_STORES = frozenset({"s3", "gs", "abfs"})  # by fsspec's names
_FOLDER = re.compile(r"v\d{8,}-[0-9a-f]{8}")
_KEPT_VERSIONS = 2  # the newest, and the one that some receiver may still be reading
_READ_BYTES = 2**25  # that a receiver reads at a time, to keep a link busy
_LOCAL_READ_BYTES = 2**23  # of files on this machine: what stays in a cache until it is copied
_ALIGNMENT = max(ITEM_BYTES.values())
_TRIES, _PAUSE_SECONDS = 5, 0.2  # of a read that fails; the pause doubles
_NOT_AGAIN = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


class _Invalid(RefitFailed):
    """A small object is not what is written there."""


_Range = tuple[str, int | None, int | None]  # path, first byte and the one after the last; None: all
_Bytes = NDArray[np.uint8]  # which may be written to


class Store:
    """A folder of versions. Raises `RefitFailed` for an unknown kind of URL or one without its package."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise RefitFailed(f"the weights at {url} cannot be reached: {error}") from error
        self._root = root.rstrip("/")
        self._is_local = isinstance(self.files, LocalFileSystem)
        self.read_bytes = _LOCAL_READ_BYTES if self._is_local else _READ_BYTES

    def path(self, *names: str) -> str:
        """Of an object, as the file system takes it."""
        return "/".join((self._root, *names))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object that replaces another of that name; readers see one of the two.

        Objects of a store appear completely; files are renamed to their name. Raises OSError.
        """
        protocols = self.files.protocol  # one, or a tuple
        kinds = {protocols} if isinstance(protocols, str) else set(protocols)
        appears_whole = not _OBJECT_STORES.isdisjoint(kinds)
        path = self.path(name)
        written = path if appears_whole else f"{path}.new"
        with self.files.open(written, "wb") as file:
            file.write(content)
        if not appears_whole:
            self.files.mv(written, path)

    def read(self, version: int, ranges: Sequence[_Range]) -> list[_Bytes]:
        """Ranges of objects, each of which is read again if that fails. Raises `RefitFailed`.

        A range is shorter where the object ends before it, and longer from a server without ranges.
        """
        found: dict[int, _Bytes] = {}
        missing = list(range(len(ranges)))
        for attempt in range(1, _TRIES + 1):
            failed: dict[int, Exception] = {}
            answers = self._answers([ranges[n] for n in missing])
            for n, answer in zip(missing, answers, strict=True):
                if isinstance(answer, Exception):
                    failed[n] = answer
                else:
                    found[n] = answer
            if not failed:
                return [found[n] for n in range(len(ranges))]
            worst = next((n for n in failed if isinstance(failed[n], _NOT_AGAIN)), min(failed))
            if attempt == _TRIES or isinstance(failed[worst], _NOT_AGAIN):
                raise self._unreadable(version, ranges[worst][0], failed[worst]) from failed[worst]
            time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
            missing = sorted(failed)
        raise AssertionError("the last attempt returns or raises")

    def _answers(self, ranges: Sequence[_Range]) -> list[_Bytes | Exception]:
        if self._is_local:
            return [_read_file(*each) for each in ranges]
        paths, starts, ends = (list(column) for column in zip(*ranges, strict=True))
        answers = self.files.cat_ranges(paths, starts, ends, on_error="return")
        return [
            one if isinstance(one, Exception) else np.frombuffer(bytearray(one), np.uint8) for one in answers
        ]

    def _unreadable(self, version: int, path: str, error: Exception) -> RefitFailed:
        if isinstance(error, FileNotFoundError):
            fix = "it was removed or never completed; take a newer version, or write one again, a full one"
            return RefitFailed(f"version {version} of the weights lacks {path}: {fix}")
        reason = f"{type(error).__name__}: {error}"
        fix = "check the store and its permissions, then repeat the update, which reads only what is missing"
        return RefitFailed(f"version {version} of the weights: {path} cannot be read ({reason}); {fix}")

    def names(self) -> list[str]:
        """Of everything in the folder. Raises OSError."""
        self.files.invalidate_cache()
        with suppress(FileNotFoundError):
            entries = self.files.ls(self._root, detail=False)
            return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)
        return []

    def chain(self, version: int) -> tuple[str, ...]:
        """Folders of which a version is made, the full one first. Raises `RefitFailed`."""
        name = version_name(version)
        (content,) = self.read(version, [(self.path(name), None, None)])
        with _validated(f"{self.url}/{name}"):
            head = _HEAD.validate_json(content.tobytes())
        if head.version != version:
            raise _Invalid(f"{self.url}/{name} is of version {head.version}")
        return head.folders

    def remove_all_but(self, kept: Iterable[int]) -> None:
        """Remove all but these versions and their folders, and those of them whose small object is invalid.

        Raises OSError and `RefitFailed`.
        """
        chains: dict[str, tuple[str, ...]] = {}
        for version in kept:
            with suppress(_Invalid):
                chains[version_name(version)] = self.chain(version)
        in_use = {*chains, *(folder for chain in chains.values() for folder in chain)}
        unused = [name for name in self.names() if name not in in_use]
        for name in sorted(unused, key=lambda name: _FOLDER.fullmatch(name) is not None):  # folders last
            if _FOLDER.fullmatch(name) or _VERSION.fullmatch(name.removesuffix(".new")):
                with suppress(FileNotFoundError):
                    self.files.rm(self.path(name), recursive=True)


def _read_file(path: str, start: int | None, end: int | None) -> _Bytes | Exception:
    start = start or 0
    try:
        return np.fromfile(path, np.uint8, -1 if end is None else end - start, offset=start)
    except OSError as error:
        return error


def versions(url: str) -> list[int]:
    """Versions that can be read, the newest last; for a receiver that joins later. Raises OSError."""
    found = (_VERSION.fullmatch(name) for name in Store(url).names())
    return sorted(int(match[1]) for match in found if match)


def version_name(version: int) -> str:
    return f"v{version:08d}.json"


def folder_name(session: RefitSession) -> str:
    """Folder of what one attempt to write a version writes."""
    return f"v{session.version:08d}-{session.attempt:08x}"


def object_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


class FileSender(SendingChannel):
    """A sender's side: a thread writes one bucket while the next is filled."""

    def __init__(self, part: Part, session: RefitSession, writer: ThreadPoolExecutor) -> None:
        super().__init__(part, Slots.allocate(part))
        store = Store(session.place)
        names = folder_name(session), object_name(part.rank)
        cannot = f"cannot write {'/'.join((store.url, *names))}"
        self._failure = f"refit to version {session.version}: {sender_name(part.rank)} {cannot}"
        self._writer = writer
        with _reported(self._failure):
            self.file = store.files.open(store.path(*names), "wb")

    def publish(self, number: int, num_bytes: int) -> None:
        values = self._slots.bucket(number, num_bytes).numpy().data
        self._waits[number] = self._writer.submit(self._write, values).result

    def drain(self) -> None:
        super().drain()
        with _reported(self._failure):
            self.file.close()

    def _wait_free(self, number: int) -> None:
        with _reported(self._failure):
            super()._wait_free(number)

    def _write(self, content: memoryview) -> None:
        self.file.write(content)


@contextmanager
def file_sender(part: Part, session: RefitSession) -> Iterator[FileSender]:
    with ThreadPoolExecutor(max_workers=1) as writer:
        sender = FileSender(part, session, writer)
        try:
            yield sender
        finally:
            writer.shutdown()
            with suppress(OSError):  # after an error, which is already reported
                sender.file.close()


class FileVenue(Venue):
    """Writes full versions, or one in `full_version_every` and changes between these."""

    def __init__(self, url: str, deadline_seconds: float, full_version_every: int = 1) -> None:
        super().__init__("files", deadline_seconds)
        self._store = Store(url)
        self._full_version_every = full_version_every
        self._newest = 0  # version of the chain
        self._chain: tuple[str, ...] = ()  # of the last version that this venue completed

    @contextmanager
    def session(self, version: int, num_senders: int, num_receivers: int) -> Iterator[RefitSession]:
        follows = self._chain and version > self._newest and len(self._chain) < self._full_version_every
        session = RefitSession(
            version,
            "files",
            self._store.url,
            self._deadline_seconds,
            attempt=secrets.randbits(32),
            keep=self._full_version_every > 1,
            base=self._newest if follows else None,
        )
        folder = folder_name(session)
        with _reported(f"refit to version {version}: cannot prepare {self._store.url}/{folder}"):
            self._store.remove_all_but(versions(self._store.url))  # what a crash left
            self._store.files.makedirs(self._store.path(folder), exist_ok=True)
        try:
            yield session
        finally:
            if folder not in self._chain:
                # A rank that is late may still add its object, which the next session removes.
                with suppress(OSError, RefitFailed):
                    self._store.remove_all_but(versions(self._store.url))

    def reset_rendezvous(self) -> None:
        super().reset_rendezvous()
        self._chain = ()  # a receiver may lack something of it that is lost

    def complete(self, session: RefitSession, parts: Sequence[Part], sent: Sequence[SendReport]) -> None:
        """Make what the senders wrote the version, also in place of an older one. Raises `RefitFailed`."""
        store, name, folder = self._store, version_name(session.version), folder_name(session)
        tensors = _tensors(parts, sent)
        changes = any(box.changes is not None for tensor in tensors.values() for box in tensor.boxes)
        chain = (*self._chain, folder) if changes else (folder,)
        with _reported(f"refit to version {session.version}: cannot complete {store.url}/{name}"):
            store.write(f"{folder}/{MANIFEST}", json.dumps(tensors, default=vars).encode())
            store.write(name, json.dumps({"version": session.version, "folders": chain}).encode())
        self._chain, self._newest = chain, session.version

    def remove_old(self) -> None:
        """Remove versions before the last two, if the store allows it now; receivers may read the newest."""
        with suppress(OSError, RefitFailed):
            # later versions were written before this run was resumed from an earlier checkpoint
            kept = [version for version in versions(self._store.url) if version <= self._newest]
            self._store.remove_all_but(kept[-_KEPT_VERSIONS:])


@contextmanager
def _reported(failure: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RefitFailed(f"{failure}: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Head:
    version: int
    folders: Annotated[tuple[str, ...], Field(min_length=1)]


@dataclass(frozen=True)
class _StoredBox:
    rank: int  # of the sender, which names the object
    offset: Annotated[int, Field(ge=0)]  # bytes in it
    num_bytes: Annotated[int, Field(ge=0)]
    dtype: Literal["float32", "bfloat16", "float16"]
    start: tuple[int, ...]
    size: tuple[int, ...]
    fingerprint: int  # of the values of this version
    changes: int | None  # CRC-32 of the bytes, which are changes of these values; None: they are the values

    @property
    def box(self) -> Box:
        return Box(self.start, self.size)


@dataclass(frozen=True)
class _StoredTensor:
    shape: tuple[int, ...]
    boxes: list[_StoredBox]


def _tensors(parts: Sequence[Part], sent: Sequence[SendReport]) -> dict[str, _StoredTensor]:
    tensors: dict[str, _StoredTensor] = {}
    for part, report in zip(parts, sent, strict=True):
        written, offset = iter(report.boxes), 0
        for bucket in part.buckets:
            for piece in bucket.slices:
                one = next(written)
                place = part.rank, offset, one.num_bytes
                dtype: Any = bucket.dtype
                box = _StoredBox(*place, dtype, piece.start, piece.size, one.fingerprint, one.changes)
                tensors.setdefault(piece.name, _StoredTensor(piece.shape, [])).boxes.append(box)
                offset += one.num_bytes
    return tensors


_HEAD = TypeAdapter(_Head)
_MANIFEST = TypeAdapter(dict[str, Any])  # of `_StoredTensor`, each validated when it is read
_TENSOR = TypeAdapter(_StoredTensor)


@contextmanager
def _validated(what: str, *within: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([*within, *map(str, first["loc"])]) or "the file"
        raise _Invalid(f"{what} cannot be read: {where}: {first['msg']}") from error


@dataclass(frozen=True)
class StoredPiece:
    """Part of a slice that a receiver needs, in one box of a version."""

    piece: TensorSlice
    dtype: str  # of the box, by torch's name
    fingerprint: int
    folder: str | None  # whose values these are; None if they are not those of a box as it was written
    values: Tensor | None  # in the piece's shape and type, not checked yet; None: see `changes`
    changes: Sequence[tuple[str, Tensor]] = ()  # since the values that the receiver holds; folder of each


_Link = tuple[str, _StoredBox]  # folder, and a box there
_Boxes = dict[tuple[tuple[int, ...], tuple[int, ...]], _StoredBox]  # by start and size
_Tensor = tuple[tuple[int, ...], dict[str, _Boxes]]  # shape, and boxes by type


@dataclass(frozen=True)
class _Fetch:
    """What to read for one piece."""

    piece: TensorSlice
    dtype: torch.dtype
    box: _StoredBox  # in the newest folder
    is_box: bool  # the piece is all of it, in its type
    is_held: bool  # the links are changes of values that the receiver holds, not of those of the first link
    links: Sequence[_Link]  # the oldest first


class StoredVersion:
    """A version that can be read. Raises `RefitFailed` for an invalid manifest or a missing object."""

    def __init__(self, url: str, version: int) -> None:
        self._store, self.version = Store(url), version
        self._chain = self._store.chain(version)
        self._manifests: dict[str, dict[str, Any]] = {}
        self._tensors: dict[tuple[str, str], _Tensor] = {}  # by folder and name
        self._manifest(self._chain[-1])
        self.num_bytes = 0  # read; all of a box, for its checksum

    def pieces(
        self, needs: Iterable[tuple[TensorSlice, torch.dtype]], held: Mapping[TensorSlice, str]
    ) -> Iterator[StoredPiece]:
        """All parts of slices. `held`: folders of the values that the receiver has, of complete boxes.

        The receiver compares fingerprints, which covers its copies too, and has `verify` find the reason of
        a difference. Raises `RefitFailed` if some are missing, or `CorruptWeights`.
        """
        batch: list[_Fetch] = []
        num_bytes = 0
        for need, dtype in needs:
            for fetch in self._fetches(need, dtype, held):
                batch.append(fetch)
                num_bytes += sum(box.num_bytes for _, box in fetch.links)
                if num_bytes >= self._store.read_bytes:
                    yield from self._read(batch)
                    batch, num_bytes = [], 0
        yield from self._read(batch)

    def verify(self, need: TensorSlice, dtype: torch.dtype) -> None:
        """Read the boxes of a slice again. Raises `CorruptWeights` if one is not what was written."""
        for fetch in self._fetches(need, dtype, {}):
            contents = self._contents(fetch.links)
            self._checked_values(fetch, [contents[link] for link in fetch.links])

    def _fetches(
        self, need: TensorSlice, dtype: torch.dtype, held: Mapping[TensorSlice, str]
    ) -> Iterator[_Fetch]:
        missing = need.num_elements
        boxes = self._boxes(need, str(dtype).removeprefix("torch."))
        exact = boxes.get((need.start, need.size))
        for box in boxes.values() if exact is None else (exact,):
            shared = intersection(box_of(need), box.box)
            if shared is None:
                continue
            missing -= shared.num_elements
            piece = narrow(need, shared)
            is_box = shared == box.box and torch_dtype(box.dtype) == dtype
            since = held.get(piece) if is_box else None
            links: list[_Link] = []
            is_held = False
            for folder in reversed(self._chain):
                if links and links[0][1].changes is None:
                    break
                if is_held := folder == since:
                    break
                links.insert(0, (folder, self._same_box(folder, need.name, box)))
            if not is_held and links[0][1].changes is not None:
                place = f"{self._name(links[0][0], MANIFEST)}: {need.name}{box.box}"
                raise RefitFailed(f"{place} has changes of no values; write a full version")
            yield _Fetch(piece, dtype, box, is_box, is_held, links)
        if missing:
            what = f"{missing} elements of {need.name}{box_of(need)}"
            place = self._name(self._chain[-1])
            raise RefitFailed(f"{place} lacks {what}; the receiver needs what the policy does not have")

    def _read(self, batch: Sequence[_Fetch]) -> Iterator[StoredPiece]:
        contents = self._contents({link for fetch in batch for link in fetch.links})
        for fetch in batch:
            piece, box = fetch.piece, fetch.box
            folder = self._chain[-1] if fetch.is_box else None
            if fetch.is_held:
                changes = [(link[0], contents[link]) for link in fetch.links]
                yield StoredPiece(piece, box.dtype, box.fingerprint, folder, None, changes)
                continue
            links = [contents[link] for link in fetch.links]
            if fetch.is_box:
                yield StoredPiece(piece, box.dtype, box.fingerprint, folder, self._values(fetch, links))
                continue
            values = self._checked_values(fetch, links)  # no part of a box has a fingerprint in the manifest
            extents = zip(piece.start, box.start, piece.size, strict=True)
            cut = values[tuple(slice(i - first, i - first + n) for i, first, n in extents)].to(fetch.dtype)
            yield StoredPiece(piece, box.dtype, fingerprint(cut, piece.start, piece.shape), None, cut)

    def _values(self, fetch: _Fetch, contents: Sequence[Tensor]) -> Tensor:
        """A box ([its size]) from its values in a full version and all changes. Raises `CorruptWeights`."""
        box = fetch.box
        first, *later = contents
        # changes are added to a copy, since another piece may need the same box
        values = (first.clone() if later else first).view(torch_dtype(box.dtype))
        try:
            for changes in later:
                add_changes(values, changes)
            return values.view(box.size)
        except (BrokenChanges, RuntimeError) as error:  # of torch: another number of elements
            raise self._corrupt(self._chain[-1], box, f"{fetch.piece.name}{box.box}: {error}") from error

    def _checked_values(self, fetch: _Fetch, contents: Sequence[Tensor]) -> Tensor:
        values, box, piece = self._values(fetch, contents), fetch.box, fetch.piece
        if fingerprint(values, box.start, piece.shape) != box.fingerprint:
            raise self._corrupt(self._chain[-1], box, f"{piece.name}{box.box} is not what was written there")
        return values

    def _contents(self, links: Iterable[_Link]) -> dict[_Link, Tensor]:
        """Bytes ([bytes] uint8) of boxes, checked if they are changes. Neighbors are read together."""
        in_order = sorted(links, key=lambda link: (link[0], link[1].rank, link[1].offset))
        paths = [self._store.path(folder, object_name(box.rank)) for folder, box in in_order]
        starts = [box.offset for _, box in in_order]
        ends = [box.offset + box.num_bytes for _, box in in_order]
        together = merge_offset_ranges(paths, starts, ends, max_block=self._store.read_bytes)
        ranges = list(zip(*together, strict=True))
        reads = iter(zip(ranges, self._store.read(self.version, ranges), strict=True)) if ranges else iter(())
        found: dict[_Link, Tensor] = {}
        where, content = ("", 0, 0), np.empty(0, np.uint8)
        for link, path, start, end in zip(in_order, paths, starts, ends, strict=True):
            while not (where[0] == path and where[1] <= start and end <= where[2]):
                where, content = next(reads)
            here = content[start - where[1] : end - where[1]]
            found[link] = self._checked(link, here, is_longer=content.size > where[2] - where[1])
        self.num_bytes += sum(box.num_bytes for _, box in in_order)
        return found

    def _checked(self, link: _Link, content: _Bytes, *, is_longer: bool) -> Tensor:
        folder, box = link
        if is_longer:
            fix = "the server does not support ranges (RFC 9110, section 14); use one that does"
            raise RefitFailed(f"{self._name(folder, object_name(box.rank))} is sent completely: {fix}")
        if content.size != box.num_bytes:
            raise self._corrupt(folder, box, f"it ends before byte {box.offset + box.num_bytes}")
        if box.changes is not None and zlib.crc32(content.data) != box.changes:
            raise self._corrupt(folder, box, f"changes of {box.box} are not what was written there")
        found = torch.from_numpy(content)
        # after changes, whose bytes are of any number, values may begin at any byte
        return found.clone() if found.data_ptr() % _ALIGNMENT else found

    def _corrupt(self, folder: str, box: _StoredBox, problem: str) -> CorruptWeights:
        place = self._name(folder, object_name(box.rank))
        fix = "check where it is stored, and write a full version"
        return CorruptWeights(f"version {self.version} of the weights: {place}: {problem}; {fix}")

    def _name(self, *names: str) -> str:
        return "/".join((self._store.url, *names))

    def _manifest(self, folder: str) -> dict[str, Any]:
        if folder not in self._manifests:
            (content,) = self._store.read(self.version, [(self._store.path(folder, MANIFEST), None, None)])
            with _validated(self._name(folder, MANIFEST)):
                self._manifests[folder] = _MANIFEST.validate_json(content.tobytes())
        return self._manifests[folder]

    def _tensor(self, folder: str, name: str) -> _Tensor:
        """Shape of a tensor, and its boxes by type and place. Raises KeyError."""
        if (folder, name) not in self._tensors:
            entry = self._manifest(folder)[name]
            with _validated(self._name(folder, MANIFEST), name):
                tensor = _TENSOR.validate_python(entry)
            boxes: dict[str, _Boxes] = {}
            for number, box in enumerate(tensor.boxes):
                if not len(box.start) == len(box.size) == len(tensor.shape):
                    place = f"{self._name(folder, MANIFEST)} cannot be read: {name}.boxes.{number}"
                    rule = f"start and size must have {len(tensor.shape)} numbers each, as shape has"
                    raise RefitFailed(f"{place}: {rule}")
                boxes.setdefault(box.dtype, {})[box.start, box.size] = box
            self._tensors[folder, name] = tensor.shape, boxes
        return self._tensors[folder, name]

    def _boxes(self, need: TensorSlice, dtype: str) -> _Boxes:
        newest = self._chain[-1]
        if need.name not in self._manifest(newest):
            return {}
        shape, by_type = self._tensor(newest, need.name)
        if shape != need.shape:
            shapes = f"of shape {shape}, and the receiver needs {need.shape}"
            fix = "both must be built from the same config.json"
            raise RefitFailed(f"{self._name(newest)} has {need.name} {shapes}; {fix}")
        # a type that was not requested when the version was written is made of the widest
        return by_type.get(dtype) or by_type.get("float32") or {}

    def _same_box(self, folder: str, tensor: str, box: _StoredBox) -> _StoredBox:
        try:
            return self._tensor(folder, tensor)[1][box.dtype][box.start, box.size]
        except KeyError:
            changes = f"of which {self._chain[-1]} has changes"
            problem = f"{self._name(folder, MANIFEST)} lacks {tensor}{box.box}, {changes}"
            raise RefitFailed(f"{problem}; write a full version") from None
