"""From sampled groups to the batch that is learnt: an advantage and a weight for every trajectory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from nemorl.config.algorithm import Aggregation, OnlineConfig
from nemorl.config.algorithm.advantages import TokenAdvantageBase
from nemorl.data.batches import STAND_IN_TOKENS, Advantage
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.session.shard import SequencePlace

from .advantages import Estimator, estimator
from .aggregation import sequence_weights
from .losses import PolicyLoss
from .token_advantages import TokenEstimator


@dataclass(frozen=True)
class Scorer:
    """How a batch of groups is scored, and the loss it is learnt with."""

    config: OnlineConfig
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # of all rewards by name

    @property
    def loss(self) -> PolicyLoss:
        """The loss of one micro-batch."""
        config = self.config
        return PolicyLoss(
            config.loss, config.kl, config.correction, likelihood_coefficient=config.likelihood.coefficient
        )

    @cached_property
    def token_estimator(self) -> TokenEstimator | None:
        """What policy workers compute advantages of tokens with, where these differ."""
        config = self.config.advantage
        if not isinstance(config, TokenAdvantageBase):
            return None
        return TokenEstimator(config, self.config.kl if self.config.kl_in_reward else None)

    def score(self, groups: Sequence[GroupSummary]) -> list[SequencePlace]:
        """All trajectories, with advantage and weight, in the order of their groups.

        A trajectory that ended in an error is no evidence about the policy: it neither trains nor enters the
        baseline of its group. Where whole groups do not train, what does is spread evenly over minibatches.
        """
        advantages = {} if self.config.estimates_tokens else self._advantages(groups)
        members = [(group, t) for group in groups for t in group.trajectories]
        if not all(any(t.trains for t in group.trajectories) for group in groups):
            members = self._spread(members)
        loss = self.config.loss
        sampled = [t.num_sampled if t.trains else 0 for _, t in members]
        weights = self._weights(sampled, loss.aggregation, loss.aggregation_length)
        likelihoods = self._likelihoods(members)
        return [
            SequencePlace(
                store=group.reference,
                row=t.row,
                num_tokens=t.num_tokens if weight > 0 else STAND_IN_TOKENS,
                advantage=advantages[group.group, t.row] if advantages and weight > 0 else 0.0,
                weight=weight,
                likelihood=likelihood,
                rewards=_paid(t) if self.config.estimates_tokens else None,
            )
            for (group, t), weight, likelihood in zip(members, weights, likelihoods, strict=True)
        ]

    def penalised(
        self,
        groups: Sequence[GroupSummary],
        places: Sequence[SequencePlace],
        divergences: Sequence[float],
    ) -> list[SequencePlace]:
        """The same with advantages of rewards from which the divergence of each sequence was taken."""
        taken = {
            (place.store, place.row): self.config.kl.coefficient * divergence
            for place, divergence in zip(places, divergences, strict=True)
        }
        taxed = [
            replace(
                group,
                trajectories=tuple(
                    replace(t, reward=t.reward - taken[group.reference, t.row]) for t in group.trajectories
                ),
            )
            for group in groups
        ]
        advantages = self._advantages(taxed)
        numbers = {group.reference: group.group for group in groups}
        return [
            replace(place, advantage=advantages[numbers[place.store], place.row])
            if place.weight > 0
            else place
            for place in places
        ]

    def of_critic(
        self, groups: Sequence[GroupSummary], places: Sequence[SequencePlace]
    ) -> list[SequencePlace]:
        """The same sequences, weighed as the critic's loss wants it."""
        assert self.config.critic is not None, "this algorithm has no critic"
        sampled = {(group.reference, t.row): t.num_sampled for group in groups for t in group.trajectories}
        counts = [sampled[place.store, place.row] if place.weight > 0 else 0 for place in places]
        weights = self._weights(counts, self.config.critic.aggregation)
        return [
            replace(place, weight=weight, likelihood=None)
            for place, weight in zip(places, weights, strict=True)
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

    def _likelihoods(
        self, members: Sequence[tuple[GroupSummary, TrajectorySummary]]
    ) -> Sequence[float | None]:
        """Weights that make the mean over the tokens of each optimizer step's well-paid trajectories."""
        config = self.config.likelihood
        if config.coefficient == 0:
            return [None] * len(members)
        imitated = [t.num_sampled if t.trains and t.reward >= config.min_reward else 0 for _, t in members]
        return self._weights(imitated, "token-mean")

    def _weights(
        self, sampled: Sequence[int], aggregation: Aggregation, length: int | None = None
    ) -> list[float]:
        """Weights by the counts of each optimizer step's own part of the batch."""
        size = len(sampled) // self.config.num_minibatches
        weights: list[float] = []
        for start in range(0, len(sampled), size):
            part = sampled[start : start + size]
            weights += sequence_weights(part, aggregation, length).tolist()
        return weights


def _paid(trajectory: TrajectorySummary) -> tuple[float, ...]:
    """The reward of each turn: what the environment paid for it, and at the last one all that is left."""
    if not trajectory.turn_rewards:
        return ()
    *before, _ = trajectory.turn_rewards
    return (*before, trajectory.reward - sum(before))
