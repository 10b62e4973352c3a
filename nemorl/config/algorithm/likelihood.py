"""Imitation of the policy's own good samples, beside what advantages teach."""

from pydantic import Field

from nemorl.config.base import Config


class LikelihoodConfig(Config):
    """The likelihood of samples that were paid well (VAPO's positive-example loss, arXiv 2504.05118)."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of their mean negative logprob per token, added to the loss; the paper takes 0.1."""
    min_reward: float = 1.0
    """A trajectory is imitated when its reward is at least this."""
