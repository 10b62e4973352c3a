"""Rotary frequencies against transformers, for every scaling."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemorl.models.hf_config import HfConfig
from nemorl.models.rope import attention_factor, inverse_frequencies
from nemorl.models.shape import Rope

HEAD = 64
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn of DeepSeek-V3": {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn of two sharpenings": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn of gpt-oss": {**YARN, "rope_theta": 150000.0, "factor": 32.0, "truncate": False},
    "yarn with its own factor": {**YARN, "attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn without an original length": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "yarn whose band is one pair": {
        **YARN,
        "rope_theta": 1e30,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor_are_those_of_transformers(name: str) -> None:
    theirs = LlamaConfig(head_dim=HEAD, max_position_embeddings=65536, rope_parameters=dict(SCALINGS[name]))
    expected, factor = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](theirs, torch.device("cpu"))
    fields = {"rope_parameters": SCALINGS[name], "max_position_embeddings": 65536}
    rope = HfConfig(fields, "config.json").rope()
    torch.testing.assert_close(inverse_frequencies(HEAD, rope), expected, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


def test_without_a_scaling_frequencies_fall_from_one() -> None:
    assert inverse_frequencies(4, Rope(100.0)).tolist() == pytest.approx([1.0, 0.1])


def test_linear_scaling_divides_positions() -> None:
    fields = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100.0}
    rope = HfConfig(fields, "config.json").rope()
    assert inverse_frequencies(4, rope).tolist() == pytest.approx([0.25, 0.025])
