"""Algorithms that learn from what the policy samples: one section, of which each algorithm is a preset."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from nemorl.config.merge import merged

from .advantage import AdvantageConfig, GroupAdvantageConfig
from .base import AlgorithmBase
from .kl import KLConfig
from .policy_loss import ClipLossConfig, PolicyLossConfig
from .presets import presets

if TYPE_CHECKING:
    OnlineName = str
else:
    OnlineName = Literal[tuple(presets())]


class OnlineConfig(AlgorithmBase):
    """Sample, score, learn, hand the weights over."""

    name: OnlineName
    num_prompts_per_step: int = Field(ge=1)
    """Tasks sampled in a step."""
    num_generations_per_prompt: int = Field(ge=1)
    """Trajectories of each task, a group."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps that share the batch of one step; divides the number of trajectories."""
    max_staleness: int = Field(0, ge=0)
    """Versions that the sampling weights may lie behind the trained ones; 0 is synchronous."""
    advantage: AdvantageConfig = GroupAdvantageConfig()
    """How rewards become advantages."""
    loss: PolicyLossConfig = ClipLossConfig()
    """The policy's loss."""
    kl: KLConfig = KLConfig()
    """Divergence from the reference policy."""
    max_logprob_gap: float = Field(0.2, gt=0)
    """Stop when the mean absolute difference between the engine's and the trainer's logprobs is larger."""
    max_token_logprob_gap: float | None = Field(None, gt=0)
    """Stop when that difference is larger at any token; not looked at when not given."""
    logprob_gap_period: int | None = Field(None, ge=1)
    """Steps between comparisons before an update, each a forward pass; the first batch always has one."""

    @model_validator(mode="before")
    @classmethod
    def _over_preset(cls, section: Any) -> Any:
        """What the experiment says, laid over the preset that it names."""
        if not isinstance(section, dict) or section.get("name") not in presets():
            return section
        return merged(dict(presets()[section["name"]].settings), section)

    @property
    def online(self) -> bool:
        """It samples in every step."""
        return True

    @property
    def trajectories_per_step(self) -> int:
        """Sequences that a step samples and learns from."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def sequences_per_update(self) -> int:
        """Trajectories of a minibatch."""
        return self.trajectories_per_step // self.num_minibatches

    @property
    def keeps_reference(self) -> bool:
        """Whether divergence from it counts."""
        return self.kl.coefficient > 0
