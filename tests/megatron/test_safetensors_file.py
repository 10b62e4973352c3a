"""Files read by the safetensors library are those that were written."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nemorl.megatron.checkpoint_files import write_safetensors
from nemorl.megatron.checkpoint_store import UnwritableCheckpoint

TENSORS = {
    "odd bytes": torch.arange(7, dtype=torch.uint8),
    "a": torch.randn(3, 5).T,  # not contiguous
    "half": torch.randn(9).bfloat16(),
    "none": torch.zeros(0, 4),
    "number": torch.tensor(2.5),
    "large": torch.randn(5_000_000),  # more than one piece
}


def test_the_library_reads_what_was_written(tmp_path):
    path = tmp_path / "file.safetensors"
    record = write_safetensors(path, TENSORS, {"starts": '{"a": 1}'})
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"starts": '{"a": 1}'}
    content = path.read_bytes()
    assert (record.path, record.size) == ("file.safetensors", len(content))
    assert record.sha256 == hashlib.sha256(content).hexdigest()


def test_a_full_disk_is_said_with_the_file():
    with pytest.raises(UnwritableCheckpoint, match="/dev/full cannot be written: No space left on device"):
        write_safetensors(Path("/dev/full"), TENSORS, {})
