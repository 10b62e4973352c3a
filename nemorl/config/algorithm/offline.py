"""What algorithms share that learn from data as it stands."""

from pydantic import Field

from .base import AlgorithmBase, ValidationConfig


class LossValidationConfig(ValidationConfig):
    """The loss of the validation data; its tasks are sampled where that is asked for."""

    generate: bool = False
    """Also sample the validation tasks and score what was sampled."""


class SampledValidationConfig(LossValidationConfig):
    """The loss of the validation data, and samples of its tasks."""

    generate: bool = True
    """Sample the validation tasks and score what was sampled; false computes the loss only."""


class OfflineBase(AlgorithmBase):
    """Examples in their order, a batch in each step."""

    batch_size: int = Field(ge=1)
    """Examples of one step (pairs, where the data are pairs); an epoch has as many steps as batches fit."""
    validation: LossValidationConfig = LossValidationConfig()
    """Measuring on `data.validation`: the loss, without sampling, and samples where asked for."""

    @property
    def generates(self) -> bool:
        """For validation only, and only where it says so."""
        return self.validation.scheduled and self.validation.generate

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference's logprobs are computed before the first step."""
        return False

    @property
    def units_per_update(self) -> int:
        """The batch; the sequences of one example go together."""
        return self.batch_size
