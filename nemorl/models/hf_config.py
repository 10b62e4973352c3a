"""JSON files of a Hugging Face model folder, and what families have in common in config.json. No torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.errors import NemorlError

from .shape import LinearRopeScaling, Llama3RopeScaling, ModelShape, Rope, YarnRopeScaling

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = ("F32", "BF16", "F16")  # safetensors' names of the types that can be loaded
# Fields that change a model in ways not implemented for any family: absent, or of this value.
_FIXED_FIELDS = {"attention_dropout": 0, "partial_rotary_factor": 1, "quantization_config": None}
_DTYPES = ("float32", "bfloat16", "float16")
_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {  # by rope_type
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


class UnsupportedModel(NemorlError, ValueError):
    """Something in the model's config.json is not implemented here."""


class BrokenModelFolder(NemorlError, ValueError):
    """The folder is not a complete Hugging Face model: a file, a field or a tensor is missing or wrong."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; `BrokenModelFolder` where it is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenModelFolder(f"{path} is missing; it is part of every Hugging Face model folder") from None
    except OSError as error:
        raise BrokenModelFolder(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BrokenModelFolder(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BrokenModelFolder(f"{path} holds a {type(content).__name__}, not an object with fields")
    return content


def indexed_files(folder: Path) -> dict[str, Path] | None:
    """The file of each tensor by the folder's index, None without one. Raises `BrokenModelFolder`."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return None
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BrokenModelFolder(f"{index} has no object weight_map, which says where each tensor is")
    return {name: folder / str(file) for name, file in weight_map.items()}


@dataclass(frozen=True)
class HfConfig:
    """The fields of a config.json; `source` names the file in messages."""

    fields: Mapping[str, Any]
    source: str

    @property
    def architecture(self) -> str:
        return str(self.fields["architectures"][0])

    def get(self, field: str, default: Any = None) -> Any:
        value = self.fields.get(field)
        return default if value is None else value

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.get(field, default)
        if not isinstance(value, int) or value < 1:
            raise BrokenModelFolder(f"{self.source}: {field} is {value!r}, expected an integer of at least 1")
        return value

    def require(self, **fields: object) -> None:
        """Raise `UnsupportedModel` unless each field is absent or of its value."""
        for field, supported in fields.items():
            value = self.fields.get(field, supported)
            if value != supported:
                raise self.unsupported(field, f"for {self.architecture} only {supported!r} is supported")

    def unsupported(self, field: str, reason: str) -> UnsupportedModel:
        value: Any = self.fields
        for part in field.split("."):
            value = value.get(part)
        return UnsupportedModel(f"{self.source}: {field} is {value!r}; {reason}")

    def rope(self) -> Rope:
        """The one rotary embedding of all layers."""
        return self.rope_from(*self.rope_fields())

    def rope_fields(self) -> tuple[str, Mapping[str, Any]]:
        """`rope_parameters` since transformers 5, `rope_scaling` before: the name and its value."""
        field = "rope_parameters" if self.get("rope_parameters") else "rope_scaling"
        return field, self.get(field, {})

    def rope_from(self, field: str, parameters: Mapping[str, Any]) -> Rope:
        theta = float(parameters.get("rope_theta") or self.get("rope_theta", 10000.0))
        if parameters.get("partial_rotary_factor", 1) != 1:
            raise self.unsupported(f"{field}.partial_rotary_factor", "only 1 is supported")
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind == "default":
            return Rope(theta)
        if kind not in _ROPE_NUMBERS:
            known = "only 'default', 'linear', 'llama3' and 'yarn' are supported"
            raise UnsupportedModel(f"{self.source}: {field}.rope_type is {kind!r}; {known}")
        if missing := ", ".join(name for name in _ROPE_NUMBERS[kind] if name not in parameters):
            raise BrokenModelFolder(f"{self.source}: {field} of rope_type {kind!r} lacks {missing}")
        numbers = [float(parameters[name]) for name in _ROPE_NUMBERS[kind]]
        if kind == "linear":
            return Rope(theta, LinearRopeScaling(*numbers))
        if kind == "llama3":
            factor, low, high, original = numbers
            return Rope(theta, Llama3RopeScaling(factor, low, high, int(original)))
        (factor,) = numbers
        context = parameters.get("original_max_position_embeddings")
        attention_factor = parameters.get("attention_factor")
        if attention_factor is None:  # the paper's; `mscale_all_dim` is that of the softmax scale
            rotary, everywhere = parameters.get("mscale"), parameters.get("mscale_all_dim")
            attention_factor = yarn_sharpening(factor)
            if rotary and everywhere:
                attention_factor = yarn_sharpening(factor, rotary) / yarn_sharpening(factor, everywhere)
        fast, slow = float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1)
        truncate = bool(parameters.get("truncate", True))
        context = int(context or self.integer("max_position_embeddings"))
        return Rope(theta, YarnRopeScaling(factor, context, fast, slow, float(attention_factor), truncate))


def yarn_sharpening(factor: float, amount: float = 1.0) -> float:
    """Factor by which YaRN multiplies queries and keys to sharpen attention (arXiv 2309.00071)."""
    return 0.1 * amount * math.log(factor) + 1 if factor > 1 else 1.0


def decoder_shape(config: HfConfig, family: str, **changes: Any) -> ModelShape:
    """The shape of a decoder whose config.json uses the common names; `changes` are a family's own fields."""
    config.require(**_FIXED_FIELDS)
    source, hidden = config.source, config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.get("num_key_value_heads", heads)
    if heads % kv_heads:
        reason = f"is not a multiple of num_key_value_heads ({kv_heads})"
        raise BrokenModelFolder(f"{source}: num_attention_heads ({heads}) {reason}")
    dtype = config.get("dtype") or config.get("torch_dtype", "float32")
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"{source}: dtype is {dtype!r}; supported are {', '.join(_DTYPES)}")
    eos = config.get("eos_token_id", [])
    common: dict[str, Any] = {
        "family": family,
        "num_layers": config.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": config.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": config.get("head_dim", hidden // heads),
        "vocab_size": config.integer("vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": (eos,) if isinstance(eos, int) else tuple(eos),
        "torch_dtype": str(dtype),
    }
    if "rope" not in changes:
        changes["rope"] = config.rope()
    return ModelShape(**common | changes)


def layer_types(config: HfConfig, *supported: str) -> list[str]:
    """`layer_types`: the kind of attention of each layer. Raises `UnsupportedModel` for another kind."""
    kinds: list[str] = config.get("layer_types", [])
    names = " and ".join(map(repr, supported))
    for i, kind in enumerate(kinds):
        if kind not in supported:
            raise UnsupportedModel(f"{config.source}: layer_types[{i}] is {kind!r}; only {names} can be used")
    return kinds


def layer_windows(config: HfConfig, every: int, default_window: int | None = None) -> tuple[int | None, ...]:
    """Tokens that each layer sees, None for all: by `layer_types`, or else all in every `every`-th layer."""
    kinds = layer_types(config, "full_attention", "sliding_attention")
    num_layers = config.integer("num_hidden_layers")
    if not kinds:
        window = config.integer("sliding_window", default_window)
        return tuple(window if number % every else None for number in range(1, num_layers + 1))
    if len(kinds) != num_layers:
        reason = f"layer_types names {len(kinds)} layers, num_hidden_layers says {num_layers}"
        raise BrokenModelFolder(f"{config.source}: {reason}")
    return tuple(config.integer("sliding_window") if kind == "sliding_attention" else None for kind in kinds)
