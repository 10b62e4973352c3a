"""What algorithms share that sample in every step."""

from pydantic import Field

from .base import AlgorithmBase
from .filters import FiltersConfig


class OnlineBase(AlgorithmBase):
    """Sample groups, learn from them, hand the weights over."""

    num_prompts_per_step: int = Field(ge=1)
    """Tasks sampled in a step."""
    num_generations_per_prompt: int = Field(ge=1)
    """Trajectories of each task, a group."""
    max_staleness: int = Field(0, ge=0)
    """Versions that the sampling weights may lie behind the trained ones; 0 is synchronous."""
    filters: FiltersConfig = FiltersConfig()
    """What of a step's samples does not train."""
    max_logprob_gap: float = Field(0.2, gt=0)
    """Stop when the mean absolute difference between the engine's and the trainer's logprobs is larger."""
    max_token_logprob_gap: float | None = Field(None, gt=0)
    """Stop when that difference is larger at any token; not looked at when not given."""
    logprob_gap_period: int | None = Field(None, ge=1)
    """Steps between comparisons before an update, each a forward pass; the first batch always has one."""

    @property
    def online(self) -> bool:
        """It samples in every step."""
        return True

    @property
    def trajectories_per_step(self) -> int:
        """Sequences that a step samples."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def greedy_baseline(self) -> bool:
        """Whether a greedy sample of each task is wanted beside its group."""
        return False
