"""Supervised fine-tuning."""

from typing import Literal

from .base import Aggregation
from .offline import OfflineBase, SampledValidationConfig


class SftConfig(OfflineBase):
    """Supervised fine-tuning on the answers of the training tasks, or on every turn of conversations."""

    name: Literal["sft"]
    train_on: Literal["completion", "all"] = "completion"
    """Learn the tokens of the assistant, or all tokens."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number."""
    validation: SampledValidationConfig = SampledValidationConfig()
    """Measuring on `data.validation`: the loss where it has answers, and samples."""

    @property
    def sequences_per_update(self) -> int:
        """The batch."""
        return self.batch_size
