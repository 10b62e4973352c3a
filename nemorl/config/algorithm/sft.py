"""Supervised fine-tuning."""

from typing import Literal

from pydantic import Field

from .base import Aggregation, AlgorithmBase


class SftConfig(AlgorithmBase):
    """Supervised fine-tuning on the answers of the training tasks."""

    name: Literal["sft"]
    batch_size: int = Field(ge=1)
    """Sequences of one step."""
    train_on: Literal["completion", "all"] = "completion"
    """Learn the answer's tokens, or all tokens."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number."""

    @property
    def sequences_per_update(self) -> int:
        """The batch."""
        return self.batch_size
