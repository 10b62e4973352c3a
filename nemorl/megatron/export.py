"""A checkpoint's adapters as a folder that PEFT, and engines that take adapters, load."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from nemorl.config.policy import LoraConfig, PolicyConfig
from nemorl.models.adapters import PEFT_PREFIX, TrainedWeights, adapted_projections, adapter_tensors
from nemorl.models.errors import UnsupportedModel
from nemorl.models.hf_writer import begin_folder, complete_folder
from nemorl.models.shape import ModelShape

from .checkpoint_files import SavedState
from .device import DTYPES


def export_adapter(checkpoint: Path, out: Path, config: PolicyConfig) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in the policy's precision.

    Raises FileExistsError where `out` exists, `UnfitCheckpoint` for a checkpoint of another model, and
    `UnsupportedModel` where no adapters were trained.
    """
    if config.lora is None:
        raise UnsupportedModel(
            f"{checkpoint} holds whole weights, since policy.lora is null in its run: leave out --adapter"
        )
    shape = ModelShape.load(config.model_path, config.head)
    trained = TrainedWeights(shape, config.lora)
    saved, dtype = SavedState(checkpoint, trained), DTYPES[config.precision]
    adapters = adapter_tensors(shape, config.lora)
    # A head is no adapter: PEFT keeps it whole.
    tensors = {
        name if name in adapters else PEFT_PREFIX + name: saved.hf_tensor(name).to(dtype)
        for name in trained.tensors()
    }
    folder = begin_folder(out)
    try:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        description = _description(shape, config, config.lora)
        (folder / "adapter_config.json").write_text(json.dumps(description, indent=2) + "\n")
        complete_folder(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _description(shape: ModelShape, config: PolicyConfig, lora: LoraConfig) -> dict[str, object]:
    """PEFT's `LoraConfig`; what is left out has its default there."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if shape.head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": str(config.model_path),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapted_projections(shape, lora)),
        "modules_to_save": None if shape.head == "lm" else ["score"],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
