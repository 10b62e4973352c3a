"""A checkpoint's weights as a Hugging Face folder; needs neither its processes nor Megatron."""

from pathlib import Path

import torch

from nemorl.config.policy import PolicyConfig
from nemorl.models.hf_writer import HfFolderWriter
from nemorl.models.layout import hf_tensors
from nemorl.models.shape import ModelShape

from .checkpoint_files import SavedState


def export_hf(checkpoint: Path, out: Path, config: PolicyConfig) -> None:
    """Write `out` with the weights of `checkpoint` in the policy's precision, one tensor at a time.

    config.json and the tokenizer come from the model that training started from. A checkpoint holds float32
    weights; rounded to the policy's precision they are what forward passes and generation used. Raises
    FileExistsError where `out` exists, and `UnfitCheckpoint` for a checkpoint of another model.
    """
    shape = ModelShape.load(config.model_path)
    saved = SavedState(checkpoint, shape)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.precision]
    with HfFolderWriter(out, config.model_path) as writer:
        for name, extents in hf_tensors(shape).items():
            writer.add(name, saved.hf_tensor(name).view(extents).to(dtype))
