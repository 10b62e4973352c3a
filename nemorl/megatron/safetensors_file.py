"""Safetensors files written in pieces: no second copy in memory, and other threads run meanwhile.

The library's `save_file` makes the whole file in memory first and holds the interpreter's lock while it does;
a checkpoint is written beside training, so both would be felt.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint_store import FileRecord, writing

_PIECE_BYTES = 16 * 2**20
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a file and flush it to disk; the record's checksum is of what was to be written.

    Raises `UnwritableCheckpoint` naming the file where the disk is full or refuses it.
    """
    # The format wants no gaps; the widest types first leaves every tensor aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest, size = hashlib.sha256(), 0
    with writing(path), path.open("wb") as file:
        for piece in _pieces(tensors, order, metadata):
            digest.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, size, digest.hexdigest())


def _pieces(
    tensors: Mapping[str, Tensor], order: list[str], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The file's bytes: length of the header, header, tensors."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for name in order:
        content = tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        for start in range(0, len(content), _PIECE_BYTES):
            yield content[start : start + _PIECE_BYTES]
