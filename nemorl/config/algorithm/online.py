"""Algorithms that learn from what the policy samples: one section, of which each algorithm is a preset."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from nemorl.config.merge import merged

from .advantages import AdvantageConfig, GroupAdvantageConfig, RemaxAdvantageConfig
from .correction import CorrectionConfig, NoCorrectionConfig
from .critic import CriticLearningConfig
from .entropy import EntropyBonusConfig, EntropyConfig
from .kl import KLConfig
from .likelihood import LikelihoodConfig
from .losses import ClipLossConfig, PolicyLossConfig
from .online_base import OnlineBase
from .presets import presets
from .token_advantage import TokenAdvantageBase

if TYPE_CHECKING:
    OnlineName = str
else:
    OnlineName = Literal[tuple(presets())]


class OnlineConfig(OnlineBase):
    """Sample, score, learn, hand the weights over."""

    name: OnlineName
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps that share the batch of one step; divides the number of trajectories."""
    num_epochs: int = Field(1, ge=1)
    """Times that the batch of a step is gone through, in the same minibatches."""
    advantage: AdvantageConfig = GroupAdvantageConfig()
    """How rewards become advantages."""
    loss: PolicyLossConfig = ClipLossConfig()
    """The policy's loss."""
    kl: KLConfig = KLConfig()
    """Divergence from the reference policy."""
    entropy: EntropyConfig = EntropyBonusConfig()
    """What the entropy is worth."""
    likelihood: LikelihoodConfig = LikelihoodConfig()
    """What the likelihood of well-paid samples is worth."""
    correction: CorrectionConfig = NoCorrectionConfig()
    """How samples of another policy than the one that learns are weighed or left out."""
    critic: CriticLearningConfig | None = None
    """How a critic learns, for advantages that want one; which model it is says the experiment's `critic`."""

    @model_validator(mode="before")
    @classmethod
    def _over_preset(cls, section: Any) -> Any:
        """What the experiment says, laid over the preset that it names."""
        if not isinstance(section, dict) or section.get("name") not in presets():
            return section
        return merged(dict(presets()[section["name"]].settings), section)

    @property
    def sequences_per_update(self) -> int:
        """Trajectories of a minibatch."""
        return self.trajectories_per_step // self.num_minibatches

    @property
    def keeps_reference(self) -> bool:
        """Whether divergence from it counts."""
        return self.kl.coefficient > 0

    @property
    def keeps_critic(self) -> bool:
        """Whether values are learnt."""
        return self.critic is not None

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a step."""
        return self.num_minibatches * self.num_epochs

    @property
    def kl_in_reward(self) -> bool:
        """Whether divergence is taken from the rewards; the loss leaves it out then."""
        return self.kl.coefficient > 0 and self.kl.placement == "reward"

    @property
    def greedy_baseline(self) -> bool:
        """Whether a greedy sample of each task is wanted beside its group."""
        return isinstance(self.advantage, RemaxAdvantageConfig)

    @property
    def estimates_tokens(self) -> bool:
        """Whether advantages differ from token to token, so that policy workers compute them."""
        return isinstance(self.advantage, TokenAdvantageBase)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy's logprobs before the first update have to be computed.

        A single update sees the weights before it, so its own logprobs are the old ones, unless the loss
        chooses among all tokens before it sees any, by covariance or by entropy, or is divided by those that
        the correction keeps. Several want the pass where a ratio, a weight or a mask is taken against the old
        policy; in the bypass form of the correction the engine's logprobs are the old ones.
        """
        compared = self.loss.has_ratio or self.correction.compares or self.kl.importance_weighted
        before_all = self.loss.selects_tokens or self.correction.divisor == "kept"
        wanted = before_all or (self.updates_per_step > 1 and compared)
        by_entropy = self.loss.selects_by_entropy
        return self.kl_in_reward or by_entropy or (wanted and self.correction.form == "decoupled")
