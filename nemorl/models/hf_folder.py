"""Reading the weights of a Hugging Face folder, box by box: a rank reads no more than it holds."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .hf_config import INDEX_FILE, SINGLE_FILE, STORED_DTYPES, BrokenModelFolder, indexed_files
from .slices import TensorSlice
from .tensors import local_view

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class HfFolder:
    """The safetensors of a folder. Raises `BrokenModelFolder` naming the file, and the tensor if any."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files = indexed_files(self.path)
        if files is None:
            single = self.path / SINGLE_FILE
            if not single.exists():
                missing = f"holds neither {SINGLE_FILE} nor {INDEX_FILE}"
                raise BrokenModelFolder(f"{self.path} {missing}; weights are read from safetensors only")
            with _open(single) as file:
                files = dict.fromkeys(file.keys(), single)
        self._files = files  # of each tensor

    def names(self) -> list[str]:
        return list(self._files)

    def file(self, name: str) -> Path:
        if file := self._files.get(name):
            return file
        raise BrokenModelFolder(f"{self.path} holds no tensor {name!r}, which its config.json asks for")

    def tensor(self, name: str, extents: tuple[int, ...]) -> Tensor:
        path = self.file(name)
        with _open(path) as file:
            return _checked_slice(file, path, name, extents)[:]  # type: ignore[no-any-return]

    def box(self, name: str, extents: tuple[int, ...], box: tuple[slice, ...]) -> Tensor:
        path = self.file(name)
        with _open(path) as file:
            return _checked_slice(file, path, name, extents)[box]  # type: ignore[no-any-return]

    def dtype(self, name: str) -> torch.dtype:
        path = self.file(name)
        with _open(path) as file:
            return _DTYPES[file.get_slice(name).get_dtype()]

    def load_into(self, parameters: Mapping[str, Tensor], slices: Iterable[TensorSlice]) -> None:
        """Copy boxes into the parameters that hold them, converted to each parameter's type."""
        by_file: dict[Path, list[TensorSlice]] = defaultdict(list)
        for part in slices:
            by_file[self.file(part.name)].append(part)
        for path, parts in by_file.items():
            with _open(path) as file:
                for part in parts:
                    local_view(parameters, part).copy_(_read_box(file, path, part))

    def check(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        """Raise unless every named tensor is there, of the given shape and a supported type."""
        for name, extents in tensors.items():
            path = self.file(name)
            with _open(path) as file:
                _checked_slice(file, path, name, extents)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise BrokenModelFolder(f"{path} is missing, though {INDEX_FILE} names it") from None
    except SafetensorError as error:
        raise BrokenModelFolder(f"{path} is not a complete safetensors file: {error}") from error


def _read_box(file: safe_open, path: Path, part: TensorSlice) -> Tensor:
    """Read the last dimensions completely if a tensor has fewer on disk than its slices have, and view them.

    Its first dimensions, as far as they are the same on disk, are cut there: one expert is read of many.
    """
    box = part.box
    stored = tuple(file.get_slice(part.name).get_shape())
    if len(stored) < len(part.shape) and math.prod(stored) == math.prod(part.shape):
        same = next(i for i, (a, b) in enumerate(zip(stored, part.shape, strict=False)) if a != b)
        whole = _checked_slice(file, path, part.name, stored)
        cut: Tensor = whole[box[:same]] if same else whole[:]
        return cut.view(*part.size[:same], *part.shape[same:])[(slice(None),) * same + box[same:]]
    return _checked_slice(file, path, part.name, part.shape)[box]  # type: ignore[no-any-return]


def _checked_slice(file: safe_open, path: Path, name: str, extents: tuple[int, ...]) -> Any:
    """The tensor of a file as safetensors' lazy slice; raises unless its type and shape are right."""
    try:
        whole = file.get_slice(name)
    except SafetensorError as error:
        raise BrokenModelFolder(f"{path} holds no tensor {name!r}, though {INDEX_FILE} says so") from error
    dtype, shape = whole.get_dtype(), tuple(whole.get_shape())
    if dtype not in STORED_DTYPES:
        known = ", ".join(STORED_DTYPES)
        raise BrokenModelFolder(f"{path}: {name} is of type {dtype}; weights may be {known}")
    if shape != extents:
        raise BrokenModelFolder(f"{path}: {name} has shape {shape}, the model's config.json says {extents}")
    return whole
