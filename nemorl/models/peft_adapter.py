"""Adapters in PEFT's files: which of them training can start from, or merge. Imports no torch."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.config.policy import LoraConfig
from nemorl.errors import Problem

from .adapters import PEFT_PREFIX, adaptable_projections, adapted_projections, adapter_tensors, projection_of
from .hf_config import STORED_DTYPES, UnsupportedModel, read_json_object
from .shape import ModelShape

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MERGE = "merge it into the model with PEFT (`merge_and_unload`) and train the result"
_Check = Callable[[Any], bool]


def _unset(value: Any) -> bool:
    return not value


# Fields that change what an adapter computes, by the values that are implemented. Others of PEFT's LoraConfig
# say how an adapter was drawn or trained.
_SUPPORTED: Mapping[str, tuple[_Check, str]] = {
    "peft_type": (lambda value: value == "LORA", "only LORA is implemented"),
    "use_dora": (_unset, "DoRA has a magnitude for each row"),
    "init_lora_weights": (
        lambda value: value in (None, True, False, "gaussian", "eva", "orthogonal"),
        "this way to draw an adapter also changes the weights of the model",
    ),
    "kasa_config": (_unset, "KaSA changes the weights of the model"),
    "use_qalora": (_unset, "QALoRA pools the inputs"),
    "rank_pattern": (_unset, "adapters here have one rank"),
    "alpha_pattern": (_unset, "adapters here have one alpha"),
    "bias": (lambda value: value in (None, "none"), "biases are not trained with adapters"),
    "lora_bias": (_unset, "B has no bias here"),
    "modules_to_save": (_unset, "modules other than the adapters are not trained"),
    "layers_to_transform": (lambda value: value is None, "every layer has adapters here"),
    "target_parameters": (_unset, "parameters of experts have no adapters here"),
    "trainable_token_indices": (_unset, "single embeddings are not trained"),
    "layer_replication": (_unset, "layers are not repeated"),
    "fan_in_fan_out": (_unset, "matrices are [out, in] in the supported families"),
    "use_bdlora": (_unset, "block-diagonal adapters are not implemented"),
    "arrow_config": (_unset, "an adapter is not routed among others"),
    "alora_invocation_tokens": (_unset, "an adapter is active for all tokens"),
    "monteclora_config": (_unset, "adapters are not sampled"),
}


@dataclass(frozen=True)
class PeftAdapter:
    folder: Path
    lora: LoraConfig  # with its rank, alpha (of PEFT's `use_rslora`: that of the same scale) and targets

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS_FILE


def read_peft_adapter(folder: Path, shape: ModelShape) -> PeftAdapter:
    """Check that an adapter is one of this model and of what is implemented. Reads no weights.

    Raises UnsupportedModel naming the feature or tensor and the fix.
    """
    if not (folder / CONFIG_FILE).exists():
        fix = "name a folder that PEFT's `save_pretrained` or `nemorl models export --adapter` wrote"
        raise UnsupportedModel(f"{folder} holds no {CONFIG_FILE}: {fix}")
    config = read_json_object(folder / CONFIG_FILE)
    for name, (is_supported, reason) in _SUPPORTED.items():
        if name in config and not is_supported(config[name]):
            value = json.dumps(config[name])
            raise UnsupportedModel(f"{folder / CONFIG_FILE}: {name} is {value}: {reason}; {_MERGE}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or alpha <= 0:
        raise UnsupportedModel(
            f"{folder / CONFIG_FILE}: r is {rank}, lora_alpha {alpha}: both must be above 0"
        )
    if config.get("use_rslora"):  # scaled by alpha / sqrt(rank)
        alpha *= math.sqrt(rank)
    if not (folder / WEIGHTS_FILE).exists():
        fix = "save it as safetensors (PEFT's `save_pretrained(…, safe_serialization=True)`)"
        raise UnsupportedModel(f"{folder} holds no {WEIGHTS_FILE}: {fix}")
    found = _header(folder / WEIGHTS_FILE)
    known = adaptable_projections(shape)
    adapted = {name.partition(".lora_")[0] for name in found if ".lora_" in name}
    projections = {projection_of(f"{module}.weight") for module in adapted}
    if unknown := sorted(projections - set(known)):
        fix = f"in this model {', '.join(known)} can have an adapter; {_MERGE}"
        raise UnsupportedModel(f"{folder / WEIGHTS_FILE} has adapters of {', '.join(unknown)}: {fix}")
    targets = tuple(name for name in known if name in projections)
    lora = LoraConfig.model_validate({"rank": rank, "alpha": alpha, "targets": targets})
    expected = adapter_tensors(shape, lora)
    for name in sorted(expected.keys() | found.keys()):
        stored, needed = found.get(name), expected.get(name)
        if stored != needed:
            problem = f"{name.removeprefix(PEFT_PREFIX)} is {stored} there and {needed} in the model"
            fix = "name the model that it was trained on"
            raise UnsupportedModel(f"{folder / WEIGHTS_FILE} does not fit the model: {problem}; {fix}")
    return PeftAdapter(folder, lora)


def start_problem(lora: LoraConfig, shape: ModelShape, field: str) -> Problem | None:
    """Why training cannot start from `lora.start`, if it cannot."""
    assert lora.start is not None
    try:
        found = read_peft_adapter(lora.start, shape).lora
    except UnsupportedModel as error:
        return Problem(f"{field}.start", str(lora.start), str(error))
    if lora.rank != found.rank:
        fix = f"the adapter in {lora.start} has rank {found.rank}: set it to that"
        return Problem(f"{field}.rank", lora.rank, fix)
    if not math.isclose(lora.scale, found.scale):
        fix = f"the adapter in {lora.start} is scaled by {found.scale:g}: set alpha to {found.alpha:g}"
        return Problem(f"{field}.alpha", lora.alpha, fix)
    if set(adapted_projections(shape, lora)) != set(found.targets):
        fix = f"the adapter in {lora.start} has [{', '.join(found.targets)}]: name these"
        return Problem(f"{field}.targets", list(lora.targets), fix)
    return None


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file. Raises UnsupportedModel."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, path.stat().st_size)))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} is not a complete safetensors file: {error}") from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in STORED_DTYPES:
            known = ", ".join(STORED_DTYPES)
            raise UnsupportedModel(f"{path}: {name} is of type {entry['dtype']}; adapters may be {known}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}
