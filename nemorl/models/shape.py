"""The shape of a model, read from the config.json of its Hugging Face folder. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BrokenModelFolder, UnsupportedModel
from .family import Dim, ModelFamily
from .json_object import read_json_object
from .registry import family_of_architecture

__all__ = ["BrokenModelFolder", "Llama3RopeScaling", "ModelShape", "UnsupportedModel"]

# Fields of config.json that change the model in ways not implemented here: absent, or of this value.
_FIXED_FIELDS: tuple[tuple[str, object], ...] = (
    ("hidden_act", "silu"),
    ("attention_dropout", 0),
    ("partial_rotary_factor", 1),
    ("quantization_config", None),
)
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Rotary frequencies stretched for long contexts, as Llama 3.1 does (arXiv 2407.21783, section 3.4)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelShape:
    """Everything about a model but its weights."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # as in the checkpoint, not padded
    tied_embeddings: bool
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    rms_norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # generation_config.json's where it names any, as transformers does
    torch_dtype: str  # of the checkpoint: float32, bfloat16 or float16

    @classmethod
    def load(cls, folder: str | Path) -> ModelShape:
        """Read `config.json` of a folder.

        Raises `UnsupportedModel` naming the field that is the reason, and `BrokenModelFolder` where the file
        is missing or not a model's.
        """
        folder = Path(folder)
        source = folder / "config.json"
        config = read_json_object(source)
        generation = folder / "generation_config.json"
        eos = read_json_object(generation).get("eos_token_id") if generation.exists() else None
        if eos is not None:
            config = {**config, "eos_token_id": eos}
        return cls.from_config(config, str(source))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str) -> ModelShape:
        """The same from the fields of a config.json; `source` names it in messages."""
        architectures = config.get("architectures") or ["(none)"]
        family = family_of_architecture(architectures[0], source)
        _check_supported(config, family, source)
        theta, scaling = _rope(config, source)
        hidden = _integer(config, "hidden_size", source)
        heads = _integer(config, "num_attention_heads", source)
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise BrokenModelFolder(
                f"{source}: num_attention_heads ({heads}) is not a multiple of "
                f"num_key_value_heads ({kv_heads})"
            )
        return cls(
            family=family.name,
            num_layers=_integer(config, "num_hidden_layers", source),
            hidden_size=hidden,
            ffn_hidden_size=_integer(config, "intermediate_size", source),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=config.get("head_dim") or family.default_head_dim or hidden // heads,
            vocab_size=_integer(config, "vocab_size", source),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            max_position_embeddings=_integer(config, "max_position_embeddings", source),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_token_ids(config.get("eos_token_id")),
            torch_dtype=_dtype(config, source),
        )

    def extent(self, dim: Dim) -> int:
        """The number behind a named extent of a weight."""
        return {
            Dim.HIDDEN: self.hidden_size,
            Dim.FFN: self.ffn_hidden_size,
            Dim.VOCABULARY: self.vocab_size,
            Dim.HEAD: self.head_dim,
            Dim.QUERY: self.num_attention_heads * self.head_dim,
            Dim.KEY_VALUE: self.num_key_value_heads * self.head_dim,
        }[dim]


def _integer(config: Mapping[str, Any], field: str, source: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise BrokenModelFolder(f"{source}: {field} is {value!r}, expected a whole number of at least 1")
    return value


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _dtype(config: Mapping[str, Any], source: str) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UnsupportedModel(f"{source}: dtype is {name!r}; supported are {', '.join(_DTYPES)}")
    return str(name)


def _check_supported(config: Mapping[str, Any], family: ModelFamily, source: str) -> None:
    for field, supported in (*_FIXED_FIELDS, *family.fixed_fields):
        value = config.get(field, supported)
        if value != supported:
            raise UnsupportedModel(
                f"{source}: {field} is {value!r}; "
                f"for {family.architectures[0]} only {supported!r} is supported"
            )
    for number, kind in enumerate(config.get("layer_types") or ()):
        if kind != "full_attention":
            raise UnsupportedModel(
                f"{source}: layer_types[{number}] is {kind!r}; only 'full_attention' is supported"
            )


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters: Mapping[str, Any] = config.get(field) or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModel(
            f"{source}: {field}.partial_rotary_factor is {parameters['partial_rotary_factor']!r}; "
            "only 1 is supported"
        )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModel(
            f"{source}: {field}.rope_type is {kind!r}; only 'default' and 'llama3' are supported"
        )
    wanted = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in wanted if name not in parameters]
    if missing:
        raise BrokenModelFolder(f"{source}: {field} of rope_type 'llama3' lacks {', '.join(missing)}")
    return theta, Llama3RopeScaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
    )
