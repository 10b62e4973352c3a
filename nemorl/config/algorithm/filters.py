"""What of a batch does not train."""

from typing import Literal

from pydantic import Field

from nemorl.config.base import Config


class RefillConfig(Config):
    """Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476): others are sampled for groups dropped."""

    max_batches: int = Field(10, ge=2)
    """A step samples at most this many times `num_prompts_per_step` groups."""
    at_cap: Literal["fewer", "stop"] = "fewer"
    """When these are not enough: train on the groups there are, or stop the run with the reason."""


class FiltersConfig(Config):
    drop_equal_rewards: bool = False
    """Drop groups whose rewards are all equal: comparing them teaches nothing."""
    min_mean_reward: float | None = None
    """Drop groups whose mean reward is less."""
    max_mean_reward: float | None = None
    """Drop groups whose mean reward is more."""
    reward: str | None = None
    """Name of the reward by which groups are dropped; the weighted sum when not given."""
    refill: RefillConfig | None = None
    """Sample other groups for those dropped by one of the fields above; without it a step has fewer."""
    keep_most_varied: float | None = Field(None, gt=0, lt=1)
    """Of a batch train only this share of the groups, those whose rewards vary most (StarPO-S)."""
    drop_truncated: bool = False
    """Trajectories that a limit of tokens ended do not train; their reward counts in their group."""

    @property
    def drops_groups(self) -> bool:
        """Whether a group can be dropped by what it is, without the rest of its batch."""
        return self.drop_equal_rewards or self.min_mean_reward is not None or self.max_mean_reward is not None

    @property
    def active(self) -> bool:
        """Whether anything is kept from training at all."""
        return self.drops_groups or self.keep_most_varied is not None or self.drop_truncated
