"""Writing a Hugging Face folder, complete or not at all; `nemorl models import`."""

import fcntl
import glob
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from nemorl.errors import UsageError

from .adapters import peft_names
from .hf_config import INDEX_FILE, SINGLE_FILE, BrokenModelFolder, read_json_object
from .hf_folder import HfFolder
from .hf_shards import Pieces, StoredTensor, plan_shards, whole, write_shard
from .layout import hf_copies, hf_tensors
from .peft_adapter import read_peft_adapter
from .quantized import Quantizer
from .registry import family_of, load_shape
from .shape import ModelShape
from .tensors import merge_adapter

SHARD_BYTES = 5_000_000_000  # of a file of weights, as transformers writes them
_PARTIAL = "partial-"


def begin_folder(out: Path, resume_key: str | None = None) -> Path:
    """A temporary folder on the file system of `out`. Raises FileExistsError where `out` exists.

    With a key, it may hold what a killed process with the same key had completed; what others left of `out`
    is removed.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists already; choose another folder, or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    if resume_key is None:
        return Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    folder = out.parent / f".{out.name}.{_PARTIAL}{resume_key[:16]}"
    for other in out.parent.glob(f"{glob.escape(f'.{out.name}.{_PARTIAL}')}*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def writing_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` at the end, or is removed. Raises as `begin_folder`."""
    folder = begin_folder(out)
    try:
        yield folder
        complete_folder(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lock_folder(folder: Path) -> int:
    """Lock a folder until its descriptor is closed. Raises UsageError if another writer holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(f"another process is writing {folder}: wait for it, or end it") from error
    except OSError:  # a file system that has no locks of folders
        pass
    return descriptor


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
    """Writes HF tensors, and config.json and tokenizer files copied from the folder `source`.

    With layers for further tokens (`with_mtp`) it holds these, and their copies of tensors of the model.
    With a scalar `head` it is transformers' sequence classification with one label; with a `quantizer` linear
    weights are quantized, and config.json has a `quantization_config`. A context manager: the folder `out`
    appears when the block ends without an exception. Whole tensors come by `add`, of which at most one file
    (`shard_bytes`) is kept in memory, or all of them in pieces by `stream`, of which a thread keeps one.
    With a `resume_key` the files that a killed process with the same key had completed are not written again.
    Raises FileExistsError where `out` exists, and `BrokenModelFolder` naming missing, unknown or wrongly
    shaped tensors.
    """

    def __init__(
        self,
        out: str | Path,
        source: str | Path,
        *,
        head: Literal["lm", "scalar"] = "lm",
        with_mtp: bool = False,
        shard_bytes: int = SHARD_BYTES,
        quantizer: Quantizer | None = None,
        resume_key: str | None = None,
    ) -> None:
        self.out, self.source = Path(out), Path(source)
        self._quantizer = quantizer
        self._shard_bytes = shard_bytes
        self._shape = load_shape(self.source, head, with_mtp=with_mtp)
        self._missing = hf_tensors(self._shape)
        self._missing |= {copy: self._missing[name] for copy, name in hf_copies(self._shape).items()}
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self.num_bytes = 0  # of these tensors, and of all
        self._shards: list[list[str]] = []  # names of the tensors in each file
        self._digests: list[str] = []  # of the files
        self._dtype: torch.dtype | None = None
        self._folder = begin_folder(self.out, resume_key)
        self._lock = lock_folder(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)

    def add(self, name: str, tensor: Tensor) -> None:
        self._expect(name, StoredTensor.of(tensor))
        written = {name: tensor} if self._quantizer is None else self._quantizer.add(name, tensor)
        for part, values in written.items():
            self._append(part, values)

    def stream(self, tensors: Mapping[str, StoredTensor], pieces: Pieces, num_threads: int) -> None:
        """Write tensors of the model, several files at a time; not with a quantizer.

        `pieces` is called in threads.
        """
        for name, stored in tensors.items():
            self._expect(name, stored)
            self.num_bytes += stored.num_bytes
        shards = plan_shards(tensors, self._shard_bytes)

        def write(number: int) -> str:
            path = self._shard_path(number)
            record = path.with_suffix(".sha256")
            if path.exists() and record.exists():  # of a process that was killed
                return record.read_text()
            digest = write_shard(path, shards[number], pieces)
            record.write_text(digest)
            return digest

        with ThreadPoolExecutor(num_threads) as threads:
            running = [threads.submit(write, number) for number in range(len(shards))]
            try:
                self._digests += [each.result() for each in running]
            finally:
                threads.shutdown(cancel_futures=True)
        self._shards += map(list, shards)

    def _expect(self, name: str, stored: StoredTensor) -> None:
        expected = self._missing.get(name)
        if expected is None:
            raise BrokenModelFolder(f"{name} is no tensor of the model in {self.source}, or was added twice")
        if stored.shape != expected:
            raise BrokenModelFolder(f"{name} has shape {stored.shape}, the model in {self.source} {expected}")
        del self._missing[name]
        self._dtype = self._dtype or stored.dtype

    def _append(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._shard_bytes:
            self._write_pending()
        # a copy, because the caller may use the memory of a tensor again
        self._pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._pending_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def _write_pending(self) -> None:
        stored = {name: StoredTensor.of(tensor) for name, tensor in self._pending.items()}
        self._digests.append(write_shard(self._shard_path(len(self._shards)), stored, whole(self._pending)))
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _shard_path(self, number: int) -> Path:
        return self._folder / f"{number}.shard"

    def _finish(self) -> None:
        if self._missing:
            lacking = f"{len(self._missing)} tensors, among them {next(iter(self._missing))}"
            raise BrokenModelFolder(f"{self.out} would lack {lacking}")
        if self._pending:
            self._write_pending()
        # The names that transformers looks for hold the number of files.
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        digests: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._shard_path(number).rename(self._folder / file)
            self._shard_path(number).with_suffix(".sha256").unlink(missing_ok=True)
            digests[file] = self._digests[number]
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
        for path in self._folder.iterdir():
            if path.name not in digests and path.name != CHECKSUM_FILE:
                digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
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


def import_model(hf_dir: str | Path, out: str | Path, adapter: Path | None = None) -> ImportedModel:
    """Check a Hugging Face folder and write it again: config, tokenizer, safetensors and their checksums.

    Weights keep their type. An `adapter` in PEFT's format is merged into them, in float32. What the model
    does not use is left out, such as the `lm_head.weight` of tied embeddings. Raises `UnsupportedModel`,
    `BrokenModelFolder`, or FileExistsError for `out`.
    """
    shape = load_shape(hf_dir)
    tensors = hf_tensors(shape)
    folder = HfFolder(hf_dir)
    folder.check(tensors)
    low_rank = None if adapter is None else read_peft_adapter(adapter, shape)
    pairs = {} if low_rank is None else load_file(low_rank.weights)
    with HfFolderWriter(out, hf_dir) as writer:
        for name, extents in tensors.items():
            tensor = folder.tensor(name, extents)
            if not torch.isfinite(tensor).all():
                raise BrokenModelFolder(f"{folder.file(name)}: {name} holds NaN or infinite values")
            names = peft_names(name)
            if low_rank is not None and names.a in pairs:
                tensor = tensor.clone()  # the file's own memory otherwise
                merge_adapter(tensor, pairs[names.a], pairs[names.b], low_rank.lora.scale)
            writer.add(name, tensor)
    num_parameters = sum(math.prod(extents) for extents in tensors.values())
    left_out = tuple(name for name in folder.names() if name not in tensors)
    return ImportedModel(shape, num_parameters, writer.num_bytes, left_out)
