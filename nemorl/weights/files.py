"""Transport through a folder that all sides can read and write: weights as versions in safetensors files.

    <folder>/v00000012/manifest.json            which box of which tensor lies where, with its fingerprint
                       rank-00000.safetensors   what one sender wrote; each element is in one file
    <folder>/v00000013.partial/                 being written; the driver's rename completes it
    <folder>/v00000013.replaced/                what had that number before, for as long as the rename takes

A receiver of any layout, also one that joins later, reads the boxes it needs and checks each. Those that the
plan knew read nothing else (`plan_files`).
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemorl.models.hf_writer import fsync
from nemorl.models.slices import TensorSlice

from .messages import (
    ITEM_BYTES,
    CorruptWeights,
    Part,
    PartBucket,
    RefitFailed,
    RefitSession,
    SendingChannel,
    SendReport,
    Slots,
    Venue,
    fingerprint,
    sender_name,
)
from .plan import Box, box_of, intersection, narrow

MANIFEST = "manifest.json"
_PARTIAL, _REPLACED = ".partial", ".replaced"
_KEPT_VERSIONS = 2  # the newest, and the one that some receiver may still be reading
_SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class FileSender(SendingChannel):
    """A sender's side: a thread writes one bucket while the next is filled."""

    def __init__(self, part: Part, session: RefitSession, writer: ThreadPoolExecutor) -> None:
        super().__init__(part, Slots.allocate(part))
        path = partial_folder(session) / file_name(part.rank)
        self._failure = f"refit to version {session.version}: {sender_name(part.rank)} cannot write {path}"
        self._writer = writer
        self._header, self._offsets = _header(part.buckets)
        with _reported(self._failure):
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def publish(self, number: int, num_bytes: int) -> None:
        values = self._slots.bucket(number, num_bytes).numpy().data
        self._waits[number] = self._writer.submit(self._write, values, self._offsets[number]).result

    def drain(self) -> None:
        super().drain()
        with _reported(self._failure):
            self._write(memoryview(self._header), 0)
            os.fsync(self.file)

    def _wait_free(self, number: int) -> None:
        with _reported(self._failure):
            super()._wait_free(number)

    def _write(self, content: memoryview, offset: int) -> None:
        while content:
            written = os.pwrite(self.file, content, offset)
            content, offset = content[written:], offset + written


@contextmanager
def file_sender(part: Part, session: RefitSession) -> Iterator[FileSender]:
    with ThreadPoolExecutor(max_workers=1) as writer:
        sender = FileSender(part, session, writer)
        try:
            yield sender
        finally:
            writer.shutdown()
            os.close(sender.file)


class FileVenue(Venue):
    def __init__(self, folder: Path, deadline_seconds: float) -> None:
        super().__init__("files", deadline_seconds)
        self._folder = folder.absolute()

    @contextmanager
    def session(self, version: int, num_senders: int, num_receivers: int) -> Iterator[RefitSession]:
        session = RefitSession(version, "files", str(self._folder), self._deadline_seconds)
        partial = partial_folder(session)
        with _reported(f"refit to version {version}: cannot make {partial}"):
            # Remove what a crash left, and give a version that has lost its name its name back.
            for left in self._folder.glob(f"v*{_PARTIAL}"):
                shutil.rmtree(left)
            for replaced in self._folder.glob(f"v*{_REPLACED}"):
                whole = replaced.with_suffix("")
                if whole.exists():
                    shutil.rmtree(replaced)
                else:
                    replaced.rename(whole)
            partial.mkdir(parents=True)
        try:
            yield session
        finally:
            # Under another name no rank that is late can add a file while this one is removed.
            ended = partial.with_name(f"{partial.stem}.ended{_PARTIAL}")
            with suppress(OSError):  # it is complete, and has its version's name
                partial.rename(ended)
            shutil.rmtree(ended, ignore_errors=True)

    def complete(self, session: RefitSession, parts: Sequence[Part], sent: Sequence[SendReport]) -> None:
        """Make what the senders wrote the version, also in place of an older one. Raises `RefitFailed`."""
        partial, whole = partial_folder(session), version_folder(self._folder, session.version)
        replaced = whole.with_name(f"{whole.name}{_REPLACED}")
        manifest = _Manifest(session.version, _tensors(parts, sent))
        with _reported(f"refit to version {session.version}: cannot complete {whole}"):
            with (partial / MANIFEST).open("w") as file:
                file.write(json.dumps(manifest, default=vars))  # several times faster than `dump`
                file.flush()
                os.fsync(file.fileno())
            fsync(partial)
            if whole.exists():  # from a failed attempt or before a resume; a crash leaves one of the two
                whole.rename(replaced)
            partial.rename(whole)
            fsync(self._folder)
            shutil.rmtree(replaced, ignore_errors=True)
        there = complete_versions(self._folder)
        # later versions were written before this run was resumed from an earlier checkpoint
        kept = [version for version in there if version <= session.version][-_KEPT_VERSIONS:]
        for other in set(there) - set(kept):
            shutil.rmtree(version_folder(self._folder, other), ignore_errors=True)


@contextmanager
def _reported(failure: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RefitFailed(f"{failure}: {error.strerror}") from error


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"v{version:08d}"


def partial_folder(session: RefitSession) -> Path:
    folder = version_folder(Path(session.place), session.version)
    return folder.with_name(f"{folder.name}{_PARTIAL}")


def complete_versions(folder: Path) -> list[int]:
    """Versions that can be read, the newest last; for a receiver that joins later."""
    found = []
    for path in folder.glob("v*/"):
        with suppress(ValueError):  # a partial one
            found.append(int(path.name.removeprefix("v")))
    return sorted(found)


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _header(buckets: Sequence[PartBucket]) -> tuple[bytes, list[int]]:
    """The beginning of a safetensors file, and where each bucket lies in it: wide types first, aligned."""
    entries: dict[str, Any] = {}
    starts = [0] * len(buckets)
    end = 0
    for number in sorted(range(len(buckets)), key=lambda number: -ITEM_BYTES[buckets[number].dtype]):
        bucket = buckets[number]
        starts[number] = end
        for part in bucket.slices:
            start, end = end, end + part.num_elements * ITEM_BYTES[bucket.dtype]
            entry = {"dtype": _SAFETENSORS_TYPES[bucket.dtype], "shape": list(part.size)}
            entries[_key(part.name, box_of(part), bucket.dtype)] = {**entry, "data_offsets": [start, end]}
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % 8)
    header = len(encoded).to_bytes(8, "little") + encoded
    return header, [len(header) + start for start in starts]


def _key(name: str, box: Box, dtype: str) -> str:
    return f"{name}{box}:{dtype}"


@dataclass(frozen=True)
class _StoredBox:
    file: str
    dtype: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    fingerprint: int


@dataclass(frozen=True)
class _StoredTensor:
    shape: tuple[int, ...]
    boxes: list[_StoredBox]


@dataclass(frozen=True)
class _Manifest:
    version: int
    tensors: dict[str, Any]  # of `_StoredTensor`, each validated when it is read


def _tensors(parts: Sequence[Part], sent: Sequence[SendReport]) -> dict[str, _StoredTensor]:
    tensors: dict[str, _StoredTensor] = {}
    for part, report in zip(parts, sent, strict=True):
        fingerprints = iter(report.of_pieces)
        for bucket in part.buckets:
            for piece in bucket.slices:
                boxes = tensors.setdefault(piece.name, _StoredTensor(piece.shape, [])).boxes
                file = file_name(part.rank)
                boxes.append(_StoredBox(file, bucket.dtype, piece.start, piece.size, next(fingerprints)))
    return tensors


_MANIFEST = TypeAdapter(_Manifest)
_TENSOR = TypeAdapter(_StoredTensor)


class VersionFolder:
    """A complete version. Its files stay open until `close`. Raises `RefitFailed` for an invalid manifest."""

    def __init__(self, folder: Path, version: int) -> None:
        self.path = version_folder(folder, version)
        try:
            text = (self.path / MANIFEST).read_bytes()
        except OSError as error:
            raise RefitFailed(f"version {version} of the weights cannot be read: {error}") from error
        with self._validated():
            manifest = _MANIFEST.validate_json(text)
        if manifest.version != version:
            raise RefitFailed(f"{self.path / MANIFEST} is of version {manifest.version}")
        self._tensors = manifest.tensors
        self.num_bytes = 0  # read; a box is read completely for its checksum and counts once
        self._files: dict[str, Any] = {}
        self._checked: set[tuple[str, str]] = set()
        self._stack = ExitStack()

    def close(self) -> None:
        self._stack.close()

    def pieces(
        self, need: TensorSlice, dtype: torch.dtype
    ) -> Iterator[tuple[TensorSlice, Tensor, int | None]]:
        """Yield the parts of a slice, each with its fingerprint if it is a complete box as it was written.

        Raises `RefitFailed` if some are missing, or `CorruptWeights`.
        """
        missing = need.num_elements
        for stored in self._boxes(need, str(dtype).removeprefix("torch.")):
            box = Box(stored.start, stored.size)
            shared = intersection(box_of(need), box)
            if shared is not None:
                missing -= shared.num_elements
                values = self._read(need, stored, shared)
                is_stored = shared == box and values.dtype == dtype
                yield narrow(need, shared), values.to(dtype), stored.fingerprint if is_stored else None
        if missing:
            what = f"{missing} elements of {need.name}{box_of(need)}"
            raise RefitFailed(f"{self.path} lacks {what}; the receiver needs what the policy does not have")

    @contextmanager
    def _validated(self, *within: str) -> Iterator[None]:
        try:
            yield
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join([*within, *map(str, first["loc"])]) or "the file"
            raise RefitFailed(f"{self.path / MANIFEST} cannot be read: {field}: {first['msg']}") from error

    def _boxes(self, need: TensorSlice, dtype: str) -> list[_StoredBox]:
        if need.name not in self._tensors:
            return []
        with self._validated(f"tensors.{need.name}"):
            entry = _TENSOR.validate_python(self._tensors[need.name])
        if entry.shape != need.shape:
            shapes = f"of shape {entry.shape}, and the receiver needs {need.shape}"
            fix = "both must be built from the same config.json"
            raise RefitFailed(f"{self.path} has {need.name} {shapes}; {fix}")
        by_type: dict[str, list[_StoredBox]] = {}
        for number, stored in enumerate(entry.boxes):
            if not len(stored.start) == len(stored.size) == len(entry.shape):
                field = f"{self.path / MANIFEST} cannot be read: tensors.{need.name}.boxes.{number}"
                rule = f"start and size must have {len(entry.shape)} numbers each, as shape has"
                raise RefitFailed(f"{field}: {rule}")
            by_type.setdefault(stored.dtype, []).append(stored)
        # a type that was not asked for when the version was written is made of the widest
        return by_type.get(dtype) or by_type.get("float32") or []

    def _read(self, need: TensorSlice, stored: _StoredBox, shared: Box) -> Tensor:
        """The elements of a stored box that are in `shared`; the first read of the box checks all of it."""
        box, path = Box(stored.start, stored.size), self.path / stored.file
        key = _key(need.name, box, stored.dtype)
        try:
            if stored.file not in self._files:
                self._files[stored.file] = self._stack.enter_context(safe_open(path, framework="pt"))
            content = self._files[stored.file].get_slice(key)
            if (stored.file, key) not in self._checked:
                content = content[...]
                self.num_bytes += content.nbytes
                if fingerprint(content, box.start, need.shape) != stored.fingerprint:
                    raise CorruptWeights(f"{path}: {need.name}{box} is not what was written there")
                self._checked.add((stored.file, key))
            extents = zip(shared.start, box.start, shared.size, strict=True)
            values: Tensor = content[tuple(slice(i - first, i - first + n) for i, first, n in extents)]
        except (SafetensorError, OSError) as error:
            raise RefitFailed(f"{path} cannot be read: {error}") from error
        return values
