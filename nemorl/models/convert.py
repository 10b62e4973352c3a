"""`nemorl models import`: take a model folder from outside, checked once and for all."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import BrokenModelFolder
from .hf_folder import HfFolder
from .hf_writer import HfFolderWriter
from .layout import hf_tensors
from .registry import load_shape
from .shape import ModelShape


@dataclass(frozen=True)
class ImportedModel:
    """What was imported."""

    shape: ModelShape
    num_parameters: int
    num_bytes: int  # of the weights
    left_out: tuple[str, ...]  # tensors of the source that are no part of the model


def import_model(hf_dir: str | Path, out: str | Path) -> ImportedModel:
    """Check a Hugging Face folder and write it anew: config, tokenizer, safetensors and their checksums.

    Weights keep their type. What the model does not use is left out, such as the `lm_head.weight` of tied
    embeddings. Raises `UnsupportedModel`,
    `BrokenModelFolder` (also naming a tensor that holds NaN or infinity), or FileExistsError for `out`.
    """
    shape = load_shape(hf_dir)
    tensors = hf_tensors(shape)
    folder = HfFolder(hf_dir)
    folder.check(tensors)
    num_bytes = 0
    with HfFolderWriter(out, hf_dir) as writer:
        for name, extents in tensors.items():
            tensor = folder.tensor(name, extents)
            if not torch.isfinite(tensor).all():
                raise BrokenModelFolder(f"{folder.file(name)}: {name} holds NaN or infinite values")
            num_bytes += tensor.numel() * tensor.element_size()
            writer.add(name, tensor)
    return ImportedModel(
        shape=shape,
        num_parameters=sum(math.prod(extents) for extents in tensors.values()),
        num_bytes=num_bytes,
        left_out=tuple(name for name in folder.names() if name not in tensors),
    )
