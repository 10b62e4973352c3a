"""Mistral (arXiv 2310.06825): Llama whose attention may see a sliding window of tokens only."""

from .family import ModelFamily
from .hf_config import HfConfig, decoder_shape
from .llama import LLAMA_WEIGHTS
from .shape import ModelShape

_DEFAULT_WINDOW = 4096  # where config.json names none; null means that all tokens are seen


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, layer_types=None)
    window = config.fields.get("sliding_window", _DEFAULT_WINDOW)
    windows = () if window is None else (window,) * config.integer("num_hidden_layers")
    return decoder_shape(config, "mistral", windows=windows)


MISTRAL = ModelFamily("mistral", ("MistralForCausalLM",), _read, lambda shape: LLAMA_WEIGHTS)
