"""A checkpoint's weights as a Hugging Face folder, its adapters as PEFT's, its draft head. No Megatron."""

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from nemorl.config.policy import PolicyConfig
from nemorl.config.quantization import QuantizationConfig
from nemorl.models import adapters
from nemorl.models.eagle3 import D2T, write_head
from nemorl.models.eagle3_shape import LM_HEAD, head_shape
from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.hf_folder import HfFolder
from nemorl.models.hf_shards import StoredTensor
from nemorl.models.hf_writer import SHARD_BYTES, HfFolderWriter, writing_folder
from nemorl.models.layout import hf_copies, hf_tensors
from nemorl.models.quantized import Quantizer
from nemorl.models.registry import load_shape, policy_shape
from nemorl.models.tensors import merge_adapter
from nemorl.weights.plan import Box, split

from .calibration import input_amax_of
from .checkpoint_files import SavedState, read_draft
from .device import DTYPES

# A process holds a piece for each file that it writes at a time, with the float32 values that it came from.
PIECE_ELEMENTS = 2**23
MAX_THREADS = 4


def export_hf(
    checkpoint: Path,
    out: Path,
    config: PolicyConfig,
    quantization: QuantizationConfig | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `out` with the weights of `checkpoint` in the policy's precision, piece by piece.

    config.json, the tokenizer and frozen weights, with adapters merged into them, come from the model that
    training started from. With `quantization` linear weights are in its format; whole tensors are quantized,
    one file of them is in memory, and layers for further tokens are left out. A file has at most
    `shard_bytes`, unless one tensor has more. Files that a killed process had completed are kept. Raises
    FileExistsError where `out` exists, `UnfitCheckpoint` for another model, and `Unquantizable`.
    """
    weights = _Weights(checkpoint, config)
    if quantization is not None:
        shape = load_shape(config.model_path, config.head)  # engines do not quantize further layers
        amax = input_amax_of(checkpoint, shape, quantization)
        quantizer = Quantizer(shape, quantization.format, quantization.ignore, amax)
        with HfFolderWriter(
            out, config.model_path, head=config.head, quantizer=quantizer, shard_bytes=shard_bytes
        ) as writer:
            for name in hf_tensors(shape):
                writer.add(name, weights.tensor(name))
        return
    key = weights.identity(shard_bytes)
    with HfFolderWriter(
        *(out, config.model_path),
        head=config.head,
        with_mtp=weights.has_mtp,
        shard_bytes=shard_bytes,
        resume_key=key,
    ) as writer:
        writer.stream(weights.stored, weights.pieces, min(MAX_THREADS, os.cpu_count() or 1))


def hf_weights(checkpoint: Path, config: PolicyConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `export_hf`, in turn, in the shapes of the Hugging Face folder."""
    weights = _Weights(checkpoint, config)
    for name in weights.stored:
        yield name, weights.tensor(name)


class _Weights:
    """The weights of a checkpoint in the shapes of the Hugging Face folder, of which boxes are read."""

    def __init__(self, checkpoint: Path, config: PolicyConfig) -> None:
        self._checkpoint, self._config, shape = checkpoint, config, policy_shape(config)
        trained = adapters.TrainedWeights(shape, config.lora)
        self._saved, self._dtype = SavedState(checkpoint, trained), DTYPES[config.precision]
        self._frozen = cache(lambda: HfFolder(config.model_path))  # read only where something is
        held = trained.tensors()
        self._adapted = {name for name in hf_tensors(shape) if adapters.peft_names(name).a in held}
        self._trained = {name for name in hf_tensors(shape) if name in held and self._saved.holds(name)}
        # Kept in their own type.
        buffers = hf_tensors(shape).keys() - adapters.TrainedWeights(shape).tensors().keys()
        self.stored = {
            name: StoredTensor(extents, self._frozen().dtype(name) if name in buffers else self._dtype)
            for name, extents in hf_tensors(shape).items()
        }
        self.has_mtp, self._copies = shape.mtp is not None, hf_copies(shape)
        self.stored |= {copy: self.stored[name] for copy, name in self._copies.items()}

    def identity(self, shard_bytes: int) -> str:
        """A digest of everything that the files of an export depend on."""
        folders = (self._checkpoint, self._config.model_path)
        paths = (path for folder in folders for path in sorted(Path(folder).iterdir()) if path.is_file())
        files = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        lora = self._config.lora
        settings = (self._config.precision, self._config.head, str(lora), self.has_mtp, shard_bytes)
        return hashlib.sha256(repr((files, settings)).encode()).hexdigest()

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        name = self._copies.get(name, name)
        extents = self._extents(name)
        for box in split(Box((0,) * len(extents), extents), PIECE_ELEMENTS):
            yield self._box(name, box)

    def tensor(self, name: str) -> torch.Tensor:
        name = self._copies.get(name, name)
        extents = self._extents(name)
        return self._box(name, Box((0,) * len(extents), extents)).view(self.stored[name].shape)

    def _extents(self, name: str) -> tuple[int, ...]:
        """The shape in which boxes are counted; the order of the elements is that of the folder."""
        return self._saved.hf_shape(name) if name in self._trained else self.stored[name].shape

    def _box(self, name: str, box: Box) -> torch.Tensor:
        stored = self.stored[name]
        if name in self._trained:
            return self._saved.hf_box(name, box).to(stored.dtype)
        place = tuple(slice(first, first + count) for first, count in zip(box.start, box.size, strict=True))
        values = self._frozen().box(name, stored.shape, place).to(stored.dtype)
        if name in self._adapted:
            assert self._config.lora is not None
            names = adapters.peft_names(name)
            a, b = (self._saved.hf_tensor(matrix).to(self._dtype) for matrix in (names.a, names.b))
            values = values.clone()  # the file's own memory otherwise
            merge_adapter(values, a[:, place[1]], b[place[0]], self._config.lora.scale)
        return values


def export_adapter(checkpoint: Path, out: Path, config: PolicyConfig) -> None:
    """Write PEFT's two files; raises as `export_hf`, and `UnsupportedModel` if no adapters were trained."""
    if config.lora is None:
        raise UnsupportedModel(
            f"{checkpoint} holds whole weights, since policy.lora is null in its run: leave out --adapter"
        )
    shape = policy_shape(config)
    trained = adapters.TrainedWeights(shape, config.lora)
    saved, dtype = SavedState(checkpoint, trained), DTYPES[config.precision]
    of_adapters = adapters.adapter_tensors(shape, config.lora)
    # A head is no adapter: PEFT keeps it whole.
    tensors = {
        name if name in of_adapters else adapters.PEFT_PREFIX + name: saved.hf_tensor(name).to(dtype)
        for name in trained.tensors()
    }
    with writing_folder(out) as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        description = {  # PEFT's `LoraConfig`; what is left out has its default there
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if shape.head == "lm" else "SEQ_CLS",
            "base_model_name_or_path": str(config.model_path),
            "r": config.lora.rank,
            "lora_alpha": config.lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(adapters.adapted_projections(shape, config.lora)),
            "modules_to_save": None if shape.head == "lm" else ["score"],
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(description, indent=2) + "\n")


def export_draft(checkpoint: Path, out: Path, config: PolicyConfig) -> None:
    """Write the head for drafts as engines load it, in the policy's precision.

    Raises FileExistsError where `out` exists, `UnsupportedModel` if no head was trained, and
    `UnfitCheckpoint` if another one was.
    """
    if config.draft is None:
        raise UnsupportedModel(
            f"{checkpoint} holds no head for drafts, since policy.draft is null in its run: leave out --draft"
        )
    shape = head_shape(policy_shape(config), config.draft.layers, config.draft.model_path)
    tensors = shape.tensors()
    saved = read_draft(checkpoint, LM_HEAD, range(shape.draft_vocab_size), tensors)
    weights = {name: saved[name].to(DTYPES[config.precision]) for name in tensors}
    weights |= {D2T: saved[D2T]} if D2T in saved else {}
    write_head(out, shape, weights, config.draft.model_path or config.model_path)
