"""Writing a Hugging Face folder, complete or not at all; `nemorl models import`."""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from .hf_config import INDEX_FILE, SINGLE_FILE, BrokenModelFolder, read_json_object
from .hf_folder import HfFolder
from .layout import hf_tensors
from .quantized import Quantizer
from .registry import family_of, load_shape
from .shape import ModelShape


def begin_folder(out: Path) -> Path:
    """A temporary folder on the file system of `out`. Raises FileExistsError where `out` exists."""
    if out.exists():
        raise FileExistsError(f"{out} exists already; choose another folder, or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))


def complete_folder(folder: Path, out: Path) -> None:
    """Make a temporary folder `out`, readable by all and on disk."""
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o755 if path.is_dir() else 0o644)
        fsync(path)
    folder.rename(out)
    fsync(out.parent)


def fsync(path: Path) -> None:
    """Have a file, or the names in a folder, written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Files beyond config and weights that a model needs to answer.
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
CHECKSUM_FILE = "SHA256SUMS"  # verified by `sha256sum --check`


class HfFolderWriter:
    """Writes whole HF tensors, and config.json and tokenizer files copied from the folder `source`.

    With a scalar `head` it is transformers' sequence classification with one label; with a `quantizer` linear
    weights are quantized, and config.json has a `quantization_config`. A context manager: the folder `out`
    appears when the block ends without an exception. Keeps at most one file (5 GB) of tensors in memory.
    Raises FileExistsError where `out` exists, and `BrokenModelFolder` naming missing, unknown or wrongly
    shaped tensors.
    """

    def __init__(
        self,
        out: str | Path,
        source: str | Path,
        *,
        head: Literal["lm", "scalar"] = "lm",
        shard_bytes: int = 5_000_000_000,
        quantizer: Quantizer | None = None,
    ) -> None:
        self.out, self.source = Path(out), Path(source)
        self._quantizer = quantizer
        self._shard_bytes = shard_bytes
        self._shape = load_shape(self.source, head)
        self._missing = hf_tensors(self._shape)
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self.num_bytes = 0  # of these tensors, and of all
        self._shards: list[list[str]] = []  # names of the tensors in each file
        self._dtype: torch.dtype | None = None
        self._folder = begin_folder(self.out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        expected = self._missing.get(name)
        if expected is None:
            raise BrokenModelFolder(f"{name} is no tensor of the model in {self.source}, or was added twice")
        if (found := tuple(tensor.shape)) != expected:
            raise BrokenModelFolder(f"{name} has shape {found}, the model in {self.source} {expected}")
        del self._missing[name]
        self._dtype = self._dtype or tensor.dtype
        written = {name: tensor} if self._quantizer is None else self._quantizer.add(name, tensor)
        for part, values in written.items():
            self._append(part, values)

    def _append(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._shard_bytes:
            self._write_shard()
        # a copy, because safetensors refuses tensors that share their storage, as views of a buffer do
        self._pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def _write_shard(self) -> None:
        save_file(self._pending, self._folder / f"{len(self._shards)}.shard", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        if self._missing:
            lacking = f"{len(self._missing)} tensors, among them {next(iter(self._missing))}"
            raise BrokenModelFolder(f"{self.out} would lack {lacking}")
        self._write_shard()
        # The names that transformers looks for hold the number of files.
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"{number}.shard").rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            _write_json(self._folder / INDEX_FILE, index)
        config = read_json_object(self.source / "config.json")
        config.pop("torch_dtype", None)
        config["dtype"] = str(self._dtype).removeprefix("torch.")
        if self._quantizer is not None:
            config["quantization_config"] = self._quantizer.config
        if self._shape.head == "scalar":
            config["architectures"] = [family_of(self._shape).scalar_architecture()]
            config |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}  # their number is `num_labels`
        _write_json(self._folder / "config.json", config)
        for name in COMPANION_FILES:
            if (self.source / name).exists():
                shutil.copyfile(self.source / name, self._folder / name)
        lines = []
        for path in sorted(self._folder.iterdir()):
            with path.open("rb") as content:
                lines.append(f"{hashlib.file_digest(content, 'sha256').hexdigest()}  {path.name}\n")
        (self._folder / CHECKSUM_FILE).write_text("".join(lines), encoding="utf-8")
        complete_folder(self._folder, self.out)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ImportedModel:
    shape: ModelShape
    num_parameters: int
    num_bytes: int  # of the weights
    left_out: tuple[str, ...]  # tensors of the source that are no part of the model


def import_model(hf_dir: str | Path, out: str | Path) -> ImportedModel:
    """Check a Hugging Face folder and write it again: config, tokenizer, safetensors and their checksums.

    Weights keep their type. What the model does not use is left out, such as the `lm_head.weight` of tied
    embeddings. Raises `UnsupportedModel`, `BrokenModelFolder`, or FileExistsError for `out`.
    """
    shape = load_shape(hf_dir)
    tensors = hf_tensors(shape)
    folder = HfFolder(hf_dir)
    folder.check(tensors)
    with HfFolderWriter(out, hf_dir) as writer:
        for name, extents in tensors.items():
            tensor = folder.tensor(name, extents)
            if not torch.isfinite(tensor).all():
                raise BrokenModelFolder(f"{folder.file(name)}: {name} holds NaN or infinite values")
            writer.add(name, tensor)
    num_parameters = sum(math.prod(extents) for extents in tensors.values())
    left_out = tuple(name for name in folder.names() if name not in tensors)
    return ImportedModel(shape, num_parameters, writer.num_bytes, left_out)
