"""Reading a config.json: what families have in common. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import BrokenModelFolder, UnsupportedModel
from .shape import LinearRopeScaling, Llama3RopeScaling, ModelShape, Rope, RopeScaling, YarnRopeScaling

# Fields that change a model in ways not implemented for any family: absent, or of this value.
_FIXED_FIELDS: Mapping[str, object] = {
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "quantization_config": None,
}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class HfConfig:
    """The fields of a config.json; `source` names the file in messages."""

    fields: Mapping[str, Any]
    source: str

    @property
    def architecture(self) -> str:
        """The model's class in transformers."""
        return str(self.fields["architectures"][0])

    def get(self, field: str, default: Any = None) -> Any:
        """A field, or the default where it is absent or null."""
        value = self.fields.get(field)
        return default if value is None else value

    def integer(self, field: str) -> int:
        """A field that has to be an integer of at least 1."""
        value = self.fields.get(field)
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
        """The error that names a field of this file and its value."""
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
        """The same from an object of the file that is found under `field`."""
        theta = float(parameters.get("rope_theta") or self.get("rope_theta", 10000.0))
        if parameters.get("partial_rotary_factor", 1) != 1:
            raise self.unsupported(f"{field}.partial_rotary_factor", "only 1 is supported")
        return Rope(theta, self._rope_scaling(field, parameters))

    def _rope_scaling(self, field: str, parameters: Mapping[str, Any]) -> RopeScaling | None:
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        match kind:
            case "default":
                return None
            case "linear":
                (factor,) = self._numbers(field, kind, parameters, "factor")
                return LinearRopeScaling(factor)
            case "llama3":
                names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
                factor, low, high, original = self._numbers(field, kind, parameters, *names)
                return Llama3RopeScaling(factor, low, high, int(original))
            case "yarn":
                (factor,) = self._numbers(field, kind, parameters, "factor")
                context = parameters.get("original_max_position_embeddings")
                return YarnRopeScaling(
                    factor,
                    int(context or self.integer("max_position_embeddings")),
                    beta_fast=float(parameters.get("beta_fast") or 32),
                    beta_slow=float(parameters.get("beta_slow") or 1),
                    attention_factor=_yarn_attention_factor(parameters),
                    truncate=bool(parameters.get("truncate", True)),
                )
        raise UnsupportedModel(
            f"{self.source}: {field}.rope_type is {kind!r}; "
            "only 'default', 'linear', 'llama3' and 'yarn' are supported"
        )

    def _numbers(self, field: str, kind: str, parameters: Mapping[str, Any], *names: str) -> list[float]:
        missing = [name for name in names if name not in parameters]
        if missing:
            raise BrokenModelFolder(
                f"{self.source}: {field} of rope_type {kind!r} lacks {', '.join(missing)}"
            )
        return [float(parameters[name]) for name in names]


def yarn_sharpening(factor: float, amount: float = 1.0) -> float:
    """By how much YaRN multiplies queries and keys to sharpen its attention (arXiv 2309.00071)."""
    return 0.1 * amount * math.log(factor) + 1 if factor > 1 else 1.0


def _yarn_attention_factor(parameters: Mapping[str, Any]) -> float:
    """The value of the file, or else the paper's; `mscale_all_dim` is that of the softmax scale."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = float(parameters["factor"])
    rotary, everywhere = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if rotary and everywhere:
        return yarn_sharpening(factor, rotary) / yarn_sharpening(factor, everywhere)
    return yarn_sharpening(factor)


def decoder_shape(config: HfConfig, family: str, **changes: Any) -> ModelShape:
    """The shape of a decoder whose config.json uses the common names; `changes` are a family's own fields.

    Raises `UnsupportedModel` for what no family supports.
    """
    config.require(**_FIXED_FIELDS)
    source, hidden = config.source, config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise BrokenModelFolder(
            f"{source}: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
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
        "eos_token_ids": _token_ids(config.get("eos_token_id")),
        "torch_dtype": _dtype(config),
    }
    if "rope" not in changes:
        changes["rope"] = config.rope()
    return ModelShape(**common | changes)


def refuse_windows(config: HfConfig) -> None:
    """Raise `UnsupportedModel` for layers that do not see all tokens before them."""
    for number, kind in enumerate(config.get("layer_types", ())):
        if kind != "full_attention":
            raise UnsupportedModel(
                f"{config.source}: layer_types[{number}] is {kind!r}; only 'full_attention' is supported"
            )


def layer_windows(config: HfConfig) -> tuple[int | None, ...]:
    """`layer_types` and `sliding_window`: how many tokens each layer sees, itself included; None for all."""
    known = {"full_attention": None, "sliding_attention": config.get("sliding_window")}
    kinds = config.get("layer_types", ())
    if kinds and len(kinds) != config.integer("num_hidden_layers"):
        raise BrokenModelFolder(
            f"{config.source}: layer_types names {len(kinds)} layers, num_hidden_layers says "
            f"{config.integer('num_hidden_layers')}"
        )
    for number, kind in enumerate(kinds):
        if kind not in known:
            raise UnsupportedModel(
                f"{config.source}: layer_types[{number}] is {kind!r}; supported are {', '.join(known)}"
            )
    if "sliding_attention" in kinds:
        config.integer("sliding_window")
    return tuple(known[kind] for kind in kinds)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _dtype(config: HfConfig) -> str:
    name = config.get("dtype") or config.get("torch_dtype", "float32")
    if name not in _DTYPES:
        raise UnsupportedModel(f"{config.source}: dtype is {name!r}; supported are {', '.join(_DTYPES)}")
    return str(name)
