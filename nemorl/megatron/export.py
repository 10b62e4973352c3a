"""A checkpoint's weights as a Hugging Face folder, and its adapters as PEFT's, without Megatron."""

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from nemorl.config.policy import PolicyConfig
from nemorl.config.quantization import QuantizationConfig
from nemorl.models import adapters
from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.hf_folder import HfFolder
from nemorl.models.hf_writer import HfFolderWriter, begin_folder, complete_folder
from nemorl.models.layout import hf_tensors
from nemorl.models.quantized import Quantizer
from nemorl.models.registry import load_shape
from nemorl.models.tensors import merge_adapter

from .calibration import input_amax_of
from .checkpoint_files import SavedState
from .device import DTYPES


def export_hf(
    checkpoint: Path, out: Path, config: PolicyConfig, quantization: QuantizationConfig | None = None
) -> None:
    """Write `out` with the weights of `checkpoint` in the policy's precision, one tensor at a time.

    config.json, the tokenizer and frozen weights, with adapters merged into them, come from the model that
    training started from. With `quantization` linear weights are in its format. Raises FileExistsError where
    `out` exists, `UnfitCheckpoint` for another model, and `Unquantizable`.
    """
    quantizer = None
    if quantization is not None:
        shape = load_shape(config.model_path, config.head)
        amax = input_amax_of(checkpoint, shape, quantization)
        quantizer = Quantizer(shape, quantization.format, quantization.ignore, amax)
    with HfFolderWriter(out, config.model_path, head=config.head, quantizer=quantizer) as writer:
        for name, tensor in hf_weights(checkpoint, config):
            writer.add(name, tensor)


def hf_weights(checkpoint: Path, config: PolicyConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `export_hf`, in turn, in the shapes of the Hugging Face folder."""
    shape = load_shape(config.model_path, config.head)
    trained = adapters.TrainedWeights(shape, config.lora)
    # Kept in their own type.
    buffers = hf_tensors(shape).keys() - adapters.TrainedWeights(shape).tensors().keys()
    frozen = cache(lambda: HfFolder(config.model_path))  # read only where something is
    held, saved, dtype = trained.tensors(), SavedState(checkpoint, trained), DTYPES[config.precision]
    for name, extents in hf_tensors(shape).items():
        if name in held and saved.holds(name):
            tensor = saved.hf_tensor(name).view(extents).to(dtype)
        else:
            tensor = frozen().tensor(name, extents)
            tensor = tensor if name in buffers else tensor.to(dtype)
        names = adapters.peft_names(name)
        if config.lora is not None and names.a in held:
            a, b = (saved.hf_tensor(matrix).to(dtype) for matrix in (names.a, names.b))
            merge_adapter(tensor, a, b, config.lora.scale)
        yield name, tensor


def export_adapter(checkpoint: Path, out: Path, config: PolicyConfig) -> None:
    """Write PEFT's two files; raises as `export_hf`, and `UnsupportedModel` if no adapters were trained."""
    if config.lora is None:
        raise UnsupportedModel(
            f"{checkpoint} holds whole weights, since policy.lora is null in its run: leave out --adapter"
        )
    shape = load_shape(config.model_path, config.head)
    trained = adapters.TrainedWeights(shape, config.lora)
    saved, dtype = SavedState(checkpoint, trained), DTYPES[config.precision]
    of_adapters = adapters.adapter_tensors(shape, config.lora)
    # A head is no adapter: PEFT keeps it whole.
    tensors = {
        name if name in of_adapters else adapters.PEFT_PREFIX + name: saved.hf_tensor(name).to(dtype)
        for name in trained.tensors()
    }
    folder = begin_folder(out)
    try:
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
        complete_folder(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
