"""A checkpoint's weights as a Hugging Face folder; needs neither its processes nor Megatron."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from nemorl.config.policy import PolicyConfig
from nemorl.models.adapters import TrainedWeights, peft_names
from nemorl.models.hf_folder import HfFolder
from nemorl.models.hf_writer import HfFolderWriter
from nemorl.models.layout import hf_tensors
from nemorl.models.shape import ModelShape
from nemorl.models.tensors import merge_adapter

from .checkpoint_files import SavedState
from .device import DTYPES


def export_hf(checkpoint: Path, out: Path, config: PolicyConfig) -> None:
    """Write `out` with the weights of `checkpoint` in the policy's precision, one tensor at a time.

    config.json and the tokenizer come from the model that training started from; so do frozen weights, with
    adapters merged into them. A checkpoint holds float32 weights; rounded to the policy's precision they are
    what forward passes and generation used. Raises FileExistsError where `out` exists, and `UnfitCheckpoint`
    for a checkpoint of another model.
    """
    with HfFolderWriter(out, config.model_path, head=config.head) as writer:
        for name, tensor in hf_weights(checkpoint, config):
            writer.add(name, tensor)


def hf_weights(checkpoint: Path, config: PolicyConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `export_hf`, one after the other, in the shapes of the Hugging Face folder."""
    shape = ModelShape.load(config.model_path, config.head)
    trained = TrainedWeights(shape, config.lora)
    buffers = hf_tensors(shape).keys() - TrainedWeights(shape).tensors().keys()  # kept in their own type
    frozen = cache(lambda: HfFolder(config.model_path))  # read only where something is
    held, saved, dtype = trained.tensors(), SavedState(checkpoint, trained), DTYPES[config.precision]
    for name, extents in hf_tensors(shape).items():
        if name in held and saved.holds(name):
            tensor = saved.hf_tensor(name).view(extents).to(dtype)
        else:
            tensor = frozen().tensor(name, extents)
            if name not in buffers:
                tensor = tensor.to(dtype)
        names = peft_names(name)
        if config.lora is not None and names.a in held:
            a, b = (saved.hf_tensor(matrix).to(dtype) for matrix in (names.a, names.b))
            merge_adapter(tensor, a, b, config.lora.scale)
        yield name, tensor
