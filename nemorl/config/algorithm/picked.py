"""Learning from the best, or the best and the worst, of what the policy samples for a task."""

from typing import Literal

from pydantic import Field

from .online_base import OnlineBase
from .pair_loss import LogisticLossConfig, PairLossConfig


class PickedBase(OnlineBase):
    """What these share."""

    num_generations_per_prompt: int = Field(ge=2)
    """Samples of each task, from which one or two are picked by their reward."""
    num_epochs: int = Field(1, ge=1)
    """Updates on what a step picked."""


class IterativePreferenceConfig(PickedBase):
    """The best and the worst sample of each task are a pair (Xu et al. 2023, arXiv 2312.16682; Dong et al.
    2024, arXiv 2405.07863). A task whose samples are paid alike gives none.
    """

    name: Literal["iterative_dpo"]
    loss: PairLossConfig = LogisticLossConfig()
    """What a pair costs; its own margin is the difference of the rewards."""
    sft_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean negative logprob of the chosen samples' tokens, added to the loss."""

    @property
    def sequences_per_update(self) -> int:
        """Two for each task at most."""
        return 2 * self.num_prompts_per_step

    @property
    def units_per_update(self) -> int:
        """A pair for each task at most."""
        return self.num_prompts_per_step

    @property
    def keeps_reference(self) -> bool:
        """Whether the loss looks at one: the weights that the run started from."""
        return self.loss.keeps_reference


class RejectionSamplingConfig(PickedBase):
    """Imitate the best sample of each task (RAFT, Dong et al. 2023, arXiv 2304.06767; best of n)."""

    name: Literal["rejection_sampling"]
    min_reward: float | None = None
    """Samples that are paid less are not imitated, though they were the best of their task."""

    @property
    def sequences_per_update(self) -> int:
        """One for each task at most."""
        return self.num_prompts_per_step
