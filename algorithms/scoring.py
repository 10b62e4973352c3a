"""From sampled groups to the batch that is learnt: an advantage and a weight for every trajectory."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemorl.config.algorithm import OnlineConfig
from nemorl.data.batches import STAND_IN_TOKENS
from nemorl.rollout.groups import GroupSummary
from nemorl.session.shard import SequencePlace

from .advantages import group_relative
from .aggregation import sequence_weights
from .losses import PolicyLoss


@dataclass(frozen=True)
class Scorer:
    """How a batch of groups is scored, and the loss it is learnt with."""

    config: OnlineConfig

    @property
    def loss(self) -> PolicyLoss:
        """The loss of one micro-batch."""
        return PolicyLoss(self.config.loss, self.config.kl, self.config.correction)

    def score(self, groups: Sequence[GroupSummary]) -> list[SequencePlace]:
        """All trajectories in the order of their groups, with advantage and weight.

        A trajectory that ended in an error is no evidence about the policy: it neither trains nor enters the
        baseline of its group.
        """
        members = [(group, t) for group in groups for t in group.trajectories]
        valid = [(group, t) for group, t in members if t.error is None]
        advantages = iter(
            group_relative(
                [t.reward for _, t in valid], [group.group for group, _ in valid], self.config.advantage
            ).tolist()
        )
        weights = self._weights([t.num_sampled for _, t in members])
        return [
            SequencePlace(
                store=group.reference,
                row=t.row,
                num_tokens=t.num_tokens if t.error is None else STAND_IN_TOKENS,
                advantage=next(advantages) if t.error is None else 0.0,
                weight=weight,
            )
            for (group, t), weight in zip(members, weights, strict=True)
        ]

    def _weights(self, sampled: Sequence[int]) -> list[float]:
        """Weights by the counts of each optimizer step's own part of the batch."""
        loss = self.config.loss
        size = len(sampled) // self.config.num_minibatches
        weights: list[float] = []
        for start in range(0, len(sampled), size):
            part = sampled[start : start + size]
            weights += sequence_weights(part, loss.aggregation, loss.aggregation_length).tolist()
        return weights
