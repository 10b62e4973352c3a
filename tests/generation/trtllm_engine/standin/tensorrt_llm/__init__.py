"""A stand-in for TensorRT-LLM on a CPU, written from its documented interface; see ../README.md."""

from ._torch.async_llm import AsyncLLM
from .sampling_params import SamplingParams

__all__ = ["AsyncLLM", "SamplingParams"]
