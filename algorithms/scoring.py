"""From sampled groups to the batch that is learnt: an advantage and a weight for every trajectory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.token_advantage import TokenAdvantageBase
from nemorl.data.batches import STAND_IN_TOKENS, Advantage
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.session.shard import SequencePlace

from .advantages import Estimator, estimator
from .aggregation import sequence_weights
from .losses import PolicyLoss


@dataclass(frozen=True)
class Scorer:
    """How a batch of groups is scored, and the loss it is learnt with."""

    config: OnlineConfig
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # of all rewards by name

    @property
    def loss(self) -> PolicyLoss:
        """The loss of one micro-batch."""
        return PolicyLoss(self.config.loss, self.config.kl, self.config.correction)

    def score(self, groups: Sequence[GroupSummary]) -> list[SequencePlace]:
        """All trajectories, with advantage and weight, in the order of their groups.

        A trajectory that ended in an error is no evidence about the policy: it neither trains nor enters the
        baseline of its group. Where whole groups do not train, what does is spread evenly over minibatches.
        """
        advantages = self._advantages(groups)
        members = [(group, t) for group in groups for t in group.trajectories]
        if not all(any(t.trains for t in group.trajectories) for group in groups):
            members = self._spread(members)
        weights = self._weights([t.num_sampled if t.trains else 0 for _, t in members])
        return [
            SequencePlace(
                store=group.reference,
                row=t.row,
                num_tokens=t.num_tokens if weight > 0 else STAND_IN_TOKENS,
                advantage=advantages[group.group, t.row] if weight > 0 else 0.0,
                weight=weight,
            )
            for (group, t), weight in zip(members, weights, strict=True)
        ]

    def _advantages(self, groups: Sequence[GroupSummary]) -> dict[tuple[int, int], Advantage]:
        """Those of the trajectories that count, by group and row; none where tokens have their own."""
        counting = [
            replace(group, trajectories=tuple(t for t in group.trajectories if t.error is None))
            for group in groups
            if any(t.trains for t in group.trajectories)
        ]
        return {
            (group.group, t.row): advantage
            for group, of_group in zip(counting, self._estimate(counting), strict=True)
            for t, advantage in zip(group.trajectories, of_group, strict=True)
        }

    @cached_property
    def _estimate(self) -> Estimator:
        config = self.config.advantage
        assert not isinstance(config, TokenAdvantageBase), "advantages of tokens are made by policy workers"
        return estimator(config, self.reward_weights)

    def _spread(
        self, members: Sequence[tuple[GroupSummary, TrajectorySummary]]
    ) -> list[tuple[GroupSummary, TrajectorySummary]]:
        """What trains dealt out over the minibatches, and what does not after it."""
        parts = self.config.num_minibatches
        ordered = sorted(members, key=lambda member: not member[1].trains)
        return [member for part in range(parts) for member in ordered[part::parts]]

    def _weights(self, sampled: Sequence[int]) -> list[float]:
        """Weights by the counts of each optimizer step's own part of the batch."""
        loss = self.config.loss
        size = len(sampled) // self.config.num_minibatches
        weights: list[float] = []
        for start in range(0, len(sampled), size):
            part = sampled[start : start + size]
            weights += sequence_weights(part, loss.aggregation, loss.aggregation_length).tolist()
        return weights
