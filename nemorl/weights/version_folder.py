"""Reading a version of weights from files: any box of any tensor, by any layout, checked."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemorl.models.slices import TensorSlice

from .boxes import Box, box_of, intersection, narrow
from .files import MANIFEST, version_folder
from .fingerprint import fingerprint
from .session import CorruptWeights, RefitFailed


@dataclass(frozen=True)
class _StoredBox:
    file: str
    dtype: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    fingerprint: int

    @property
    def box(self) -> Box:
        return Box(self.start, self.size)


@dataclass(frozen=True)
class _StoredTensor:
    shape: tuple[int, ...]
    boxes: tuple[_StoredBox, ...]


@dataclass(frozen=True)
class _Manifest:
    version: int
    tensors: dict[str, Any]  # each checked when it is wanted


_MANIFEST = TypeAdapter(_Manifest)
_TENSOR = TypeAdapter(_StoredTensor)


class VersionFolder:
    """A complete version. Its files stay open until `close`.

    `num_bytes` counts what was read. A box is read whole for its checksum, however little of it is needed,
    and counts once: what else is needed of it later comes from the system's memory.
    """

    def __init__(self, folder: Path, version: int) -> None:
        """Read the manifest. Raises `RefitFailed` where it is missing, broken or of another version."""
        self.path = version_folder(folder, version)
        try:
            text = (self.path / MANIFEST).read_bytes()
        except OSError as error:
            raise RefitFailed(f"version {version} of the weights cannot be read: {error}") from error
        with self._said():
            manifest = _MANIFEST.validate_json(text)
        if manifest.version != version:
            raise RefitFailed(f"{self.path / MANIFEST} is of version {manifest.version}")
        self._tensors = manifest.tensors
        self.num_bytes = 0
        self._files: dict[str, Any] = {}
        self._checked: set[tuple[str, str]] = set()
        self._stack = ExitStack()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def pieces(self, need: TensorSlice, dtype: torch.dtype) -> Iterator[tuple[TensorSlice, Tensor]]:
        """What a slice needs, box by box, in its type: which part of the slice, and the values, shaped alike.

        Raises `RefitFailed` where the version does not have all of it, `CorruptWeights` where a box is not
        what was written.
        """
        missing = need.num_elements
        for stored in self._boxes(need, str(dtype).removeprefix("torch.")):
            shared = intersection(box_of(need), stored.box)
            if shared is not None:
                missing -= shared.num_elements
                yield narrow(need, shared), self._read(need, stored, shared).to(dtype)
        if missing:
            raise RefitFailed(
                f"{self.path} lacks {missing} elements of {need.name}{box_of(need)}; "
                "the receiver needs what the policy does not have"
            )

    @contextmanager
    def _said(self, *within: str) -> Iterator[None]:
        """Name the file and the first field that is not as it has to be."""
        try:
            yield
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join([*within, *map(str, first["loc"])])
            raise RefitFailed(
                f"{self.path / MANIFEST} cannot be read: {field or 'the whole'}: {first['msg']}"
            ) from error

    def _boxes(self, need: TensorSlice, dtype: str) -> list[_StoredBox]:
        if need.name not in self._tensors:
            return []
        with self._said(f"tensors.{need.name}"):
            entry = _TENSOR.validate_python(self._tensors[need.name])
        if entry.shape != need.shape:
            raise RefitFailed(
                f"{self.path} has {need.name} of shape {entry.shape}, and the receiver needs "
                f"{need.shape}; both must be built from the same config.json"
            )
        by_type: dict[str, list[_StoredBox]] = {}
        for stored in entry.boxes:
            by_type.setdefault(stored.dtype, []).append(stored)
        # a type that was not asked for when the version was written is made of the widest
        return by_type.get(dtype) or by_type.get("float32") or []

    def _read(self, need: TensorSlice, stored: _StoredBox, shared: Box) -> Tensor:
        key = f"{need.name}{stored.box}:{stored.dtype}"
        try:
            content = self._file(stored.file).get_slice(key)
            if (stored.file, key) not in self._checked:
                content = content[...]
                self.num_bytes += content.nbytes
                self._check(need, stored, content)
                self._checked.add((stored.file, key))
            inner = tuple(
                slice(first - begin, first - begin + count)
                for first, begin, count in zip(shared.start, stored.box.start, shared.size, strict=True)
            )
            values: Tensor = content[inner]
        except (SafetensorError, OSError) as error:
            raise RefitFailed(f"{self.path / stored.file} cannot be read: {error}") from error
        return values

    def _check(self, need: TensorSlice, stored: _StoredBox, values: Tensor) -> None:
        if fingerprint(values, stored.box.start, need.shape) != stored.fingerprint:
            raise CorruptWeights(
                f"{self.path / stored.file}: {need.name}{stored.box} is not what was written there"
            )

    def _file(self, name: str) -> Any:
        if name not in self._files:
            opened = safe_open(self.path / name, framework="pt")
            self._files[name] = self._stack.enter_context(opened)
        return self._files[name]
