"""Safetensors files that are written piece by piece, so that no process holds more than a few pieces."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

_PIECE_BYTES = 16 * 2**20
STORED_NAMES = {  # of types in safetensors' files
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
# The elements of a tensor in the order of the file, in one piece or several.
Pieces = Callable[[str], Iterable[Tensor]]


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def plan_shards(tensors: Mapping[str, StoredTensor], shard_bytes: int) -> list[dict[str, StoredTensor]]:
    """The tensors of each file, in order: a file is full before it exceeds `shard_bytes`.

    A larger tensor has a file of its own.
    """
    shards: list[dict[str, StoredTensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.num_bytes > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.num_bytes
    return shards


def write_pieces(
    file: BinaryIO, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], pieces: Pieces
) -> tuple[int, str]:
    """Write a whole file and flush it to disk; its bytes, and the SHA-256 of what was to be written.

    Raises ValueError for pieces that are not of the tensor's type or number of elements.
    """
    # The format allows no gaps; the widest types first leaves every tensor aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        stored, start = tensors[name], end
        end += stored.num_bytes
        dtype = STORED_NAMES[stored.dtype]
        header[name] = {"dtype": dtype, "shape": stored.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    encoded = len(encoded).to_bytes(8, "little") + encoded
    digest = hashlib.sha256(encoded)
    file.write(encoded)
    for name in order:
        left = tensors[name].num_bytes
        for content in map(_as_bytes, pieces(name)):
            left -= len(content)
            for start in range(0, len(content), _PIECE_BYTES):
                part = content[start : start + _PIECE_BYTES]
                digest.update(part)
                file.write(part)
        if left:
            raise ValueError(f"{name}: its pieces have {-left} bytes more than {tensors[name]}")
    file.flush()
    os.fsync(file.fileno())
    return len(encoded) + end, digest.hexdigest()


def whole(tensors: Mapping[str, Tensor]) -> Pieces:
    """Pieces of tensors in memory: each is one."""

    def pieces(name: str) -> Iterator[Tensor]:
        yield tensors[name]

    return pieces


def write_shard(path: Path, tensors: Mapping[str, StoredTensor], pieces: Pieces) -> str:
    """Write a file of weights, which has its name once it is complete and on disk; its SHA-256."""
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("wb") as file:
        _, digest = write_pieces(file, tensors, {"format": "pt"}, pieces)
    partial.rename(path)
    return digest


def _as_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data
