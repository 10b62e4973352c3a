"""`generation`: the engine that samples, and how it samples. Each engine has a file of its own."""

from typing import Annotated, Literal

from pydantic import Field

from .base import default_variant
from .generation_base import GenerationBase
from .generation_megatron import MegatronGenerationConfig
from .generation_openai import OpenAIGenerationConfig
from .generation_trtllm import TrtllmGenerationConfig
from .generation_vllm import VllmGenerationConfig


class TorchGenerationConfig(GenerationBase):
    """The embedded engine: plain torch, CPU and CUDA, for small models and tests."""

    backend: Literal["torch"] = "torch"
    max_batch_size: int = Field(64, ge=1)
    """Sequences decoded together; more wait."""
    max_kv_tokens: int = Field(65536, ge=1)
    """Tokens the KV cache of one engine holds; requests wait for room."""


GenerationConfig = Annotated[
    TorchGenerationConfig
    | MegatronGenerationConfig
    | OpenAIGenerationConfig
    | VllmGenerationConfig
    | TrtllmGenerationConfig,
    Field(discriminator="backend"),
    default_variant(TorchGenerationConfig, by="backend"),
]
