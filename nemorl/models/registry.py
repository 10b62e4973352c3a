"""The supported families, and the shape of a model read by its family. Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from nemorl.config.policy import PolicyConfig

from .deepseek_v3 import DEEPSEEK_V3
from .family import ModelFamily
from .gemma3 import GEMMA3
from .gpt_oss import GPT_OSS
from .hf_config import HfConfig, UnsupportedModel, read_json_object
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .published import PUBLISHED
from .qwen import MIMO, QWEN2, QWEN3, QWEN3_MOE
from .shape import ModelShape

FAMILIES = (LLAMA, MISTRAL, QWEN2, MIMO, QWEN3, QWEN3_MOE, MIXTRAL, GPT_OSS, DEEPSEEK_V3, GEMMA3)


def policy_shape(policy: PolicyConfig) -> ModelShape:
    """The shape of the model that a policy trains; raises as `load_shape`."""
    folder, with_mtp = policy.model_path, policy.multi_token_prediction is not None
    shape = load_shape(folder, policy.head, with_mtp=with_mtp)
    if not policy.normalize_values:
        return shape
    config = model_config(folder)
    mean, std = config.get("mean"), config.get("std")
    if not (isinstance(mean, int | float) and isinstance(std, int | float) and std > 0):
        problem = f"normalize_values requires the numbers `mean` and `std` (mean {mean!r}, std {std!r})"
        raise UnsupportedModel(f"{folder / 'config.json'}: {problem}; write them there, or remove it")
    return replace(shape, value_mean=float(mean), value_std=float(std))


def load_shape(
    folder: str | Path, head: Literal["lm", "scalar"] = "lm", *, with_mtp: bool = False
) -> ModelShape:
    """The shape of the model in a folder, or of a published one; a scalar head may replace the vocabulary's.

    Layers that predict further tokens are a part of it only `with_mtp`, if there are any.

    The token ids that end a sequence are those of `generation_config.json` if it has any, as in transformers.
    Raises `UnsupportedModel` naming the field, and `BrokenModelFolder` where config.json is not a model's.
    """
    generation = Path(folder) / "generation_config.json"
    config = model_config(folder)
    eos = read_json_object(generation).get("eos_token_id") if generation.exists() else None
    if eos is not None:
        config["eos_token_id"] = eos
    return shape_from_config(config, str(Path(folder) / "config.json"), head, with_mtp=with_mtp)


def model_config(folder: str | Path) -> dict[str, Any]:
    """The fields of config.json in a folder, or of a published model if its id names no folder."""
    known = None if Path(folder).exists() else PUBLISHED.get(str(folder))
    return read_json_object(Path(folder) / "config.json") if known is None else dict(known)


def shape_from_config(
    config: Mapping[str, Any],
    source: str,
    head: Literal["lm", "scalar"] = "lm",
    *,
    with_mtp: bool = False,
) -> ModelShape:
    """The same from the fields of a config.json; with a scalar head an architecture may be a classifier's."""
    architecture = (config.get("architectures") or ["(none)"])[0]
    for family in FAMILIES:
        is_classifier = architecture == family.scalar_architecture()
        if is_classifier and head == "lm":
            problem = f"architectures names {architecture!r}, which has no head for the vocabulary"
            fix = "it can be a critic or reward model, with head 'scalar'"
            raise UnsupportedModel(f"{source}: {problem}: {fix}")
        if is_classifier or architecture in family.architectures:
            shape = family.read(HfConfig(config, source))
            return replace(shape, head=head, mtp=shape.mtp if with_mtp else None)
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UnsupportedModel(f"{source}: architectures names {architecture!r}; supported are {known}")


def family_of(shape: ModelShape) -> ModelFamily:
    return next(family for family in FAMILIES if family.name == shape.family)
