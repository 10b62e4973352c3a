"""What a TensorRT-LLM engine cannot be started without."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from nemorl.config.experiment import Experiment
from nemorl.errors import Problem
from nemorl.models.shape import ModelShape


def trtllm_problems(experiment: Experiment, shape: ModelShape, *, installed: bool) -> Iterator[Problem]:
    """Packages of an engine that this installation does not bring; a run on other machines may have them."""
    if installed and "RAY_ADDRESS" not in os.environ and find_spec("tensorrt_llm") is None:
        fix = (
            "the package tensorrt_llm is not installed: start from NVIDIA's TensorRT-LLM container "
            "(docs/trtllm.md), or take torch or vllm"
        )
        yield Problem("generation.backend", "trtllm", fix)
