"""`generation` by the policy's own processes."""

from typing import Literal

from pydantic import Field

from .generation_base import GenerationBase


class MegatronGenerationConfig(GenerationBase):
    """The policy samples by itself: no engines, no second copy of weights, no refit.

    docs/megatron_generation.md.
    """

    backend: Literal["megatron"]
    max_batch_size: int = Field(64, ge=1)
    """Sequences that one data-parallel copy of the policy decodes together; more wait."""
    max_kv_tokens: int = Field(65536, ge=1)
    """Tokens the KV cache of one copy holds while it samples; requests wait for room."""

    @property
    def has_engines(self) -> bool:
        """Whether engines sample, in processes of their own."""
        return False
