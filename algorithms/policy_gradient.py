"""Policy gradients (GRPO, PPO and others): from groups to an advantage and a weight of every trajectory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from nemorl.config.algorithm import Aggregation, OnlineConfig
from nemorl.config.algorithm.advantages import TokenAdvantageBase
from nemorl.data.losses import Loss, TrainStats
from nemorl.data.packed import PLACEHOLDER_TOKENS, Advantage
from nemorl.data.shards import SequencePlace
from nemorl.rollout.collector import GroupSummary, TrajectorySummary

from .advantages import Estimator, estimator
from .losses import PolicyLoss, ValueLoss, finish_metrics
from .metrics import versions_of
from .objective import EntropyWeight, sequence_weights
from .online import Batch, RewardPenalty
from .token_advantages import SequenceKL, TokenEstimator


@dataclass(frozen=True)
class Scorer:
    """Advantages and weights of the trajectories of a batch, and their loss."""

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
        """The estimator of policy workers for advantages that differ between tokens."""
        config = self.config.advantage
        if not isinstance(config, TokenAdvantageBase):
            return None
        return TokenEstimator(config, self.config.kl if self.config.kl_in_reward else None)

    def score(self, groups: Sequence[GroupSummary]) -> list[SequencePlace]:
        """All trajectories, with advantage and weight, in the order of their groups.

        A trajectory that ended in an error says nothing about the policy: it neither trains nor enters the
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
                num_tokens=t.num_tokens if weight > 0 else PLACEHOLDER_TOKENS,
                advantage=advantages[group.group, t.row] if advantages and weight > 0 else 0.0,
                weight=weight,
                likelihood=likelihood,
                rewards=_turn_rewards(t) if self.config.estimates_tokens else None,
            )
            for (group, t), weight, likelihood in zip(members, weights, likelihoods, strict=True)
        ]

    def penalized(
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
        penalized_groups = [
            replace(
                group,
                trajectories=tuple(
                    replace(t, reward=t.reward - taken[group.reference, t.row]) for t in group.trajectories
                ),
            )
            for group in groups
        ]
        advantages = self._advantages(penalized_groups)
        numbers = {group.reference: group.group for group in groups}
        return [
            replace(place, advantage=advantages[numbers[place.store], place.row])
            if place.weight > 0
            else place
            for place in places
        ]

    def for_critic(
        self, groups: Sequence[GroupSummary], places: Sequence[SequencePlace]
    ) -> list[SequencePlace]:
        """The same sequences, weighted for the critic's loss."""
        assert self.config.critic is not None, "this algorithm has no critic"
        sampled = {(group.reference, t.row): t.num_sampled for group in groups for t in group.trajectories}
        counts = [sampled[place.store, place.row] if place.weight > 0 else 0 for place in places]
        weights = self._weights(counts, self.config.critic.aggregation)
        return [
            replace(place, weight=weight, likelihood=None)
            for place, weight in zip(places, weights, strict=True)
        ]

    def _advantages(self, groups: Sequence[GroupSummary]) -> dict[tuple[int, int], Advantage]:
        """Advantages of the trajectories that count, by group and row."""
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
        """Members that train, spread evenly over the minibatches, each followed by those that do not."""
        parts = self.config.num_minibatches
        ordered = sorted(members, key=lambda member: not member[1].trains)
        return [member for part in range(parts) for member in ordered[part::parts]]

    def _likelihoods(
        self, members: Sequence[tuple[GroupSummary, TrajectorySummary]]
    ) -> Sequence[float | None]:
        """Weights that make the mean over the tokens of each optimizer step's trajectories of high reward."""
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


def _turn_rewards(trajectory: TrajectorySummary) -> tuple[float, ...]:
    """The reward of each turn as the environment gave it, and the rest of the total at the last one."""
    if not trajectory.turn_rewards:
        return ()
    *before, _ = trajectory.turn_rewards
    return (*before, trajectory.reward - sum(before))


@dataclass
class PolicyGradientUpdate:
    """The update of GRPO, PPO and every other algorithm with advantages."""

    config: OnlineConfig
    scorer: Scorer
    entropy: EntropyWeight

    def prepare(self, groups: Sequence[GroupSummary], number: int) -> Batch:
        """Score the groups; while the critic warms up, it is the only model that trains."""
        config, scorer = self.config, self.scorer
        sequences = scorer.score(groups)
        losses: dict[str, Loss] = {}
        if config.critic is not None:
            losses["critic"] = ValueLoss(config.critic)
        if config.critic is None or number > config.critic.warmup_steps:
            losses["policy"] = replace(scorer.loss, entropy_coefficient=self.entropy.weight)
        penalty = None
        if config.kl_in_reward and not config.estimates_tokens:
            penalty = RewardPenalty(SequenceKL(config.kl), partial(scorer.penalized, groups, sequences))
        return Batch(
            sequences,
            versions_of(groups),
            losses,
            schedule=training_minibatches(sequences, config.num_minibatches) * config.num_epochs,
            num_updates=config.updates_per_step,
            num_minibatches=config.num_minibatches,
            critic_sequences=scorer.for_critic(groups, sequences) if config.keeps_critic else (),
            needs_old_logprobs=config.needs_old_logprobs,
            needs_old_entropies=config.loss.selects_by_entropy,
            token_estimator=scorer.token_estimator,
            penalty=penalty,
        )

    def metrics(self, updates: Sequence[TrainStats]) -> dict[str, float]:
        """Means over the updates, and the largest of their maxima."""
        of_updates = [finish_metrics(u.sums, u.maxima) for u in updates]
        metrics = {key: sum(m[key] for m in of_updates) / len(of_updates) for key in of_updates[0]}
        metrics |= {key: max(u.maxima[key] for u in updates) for key in updates[0].maxima}
        # Later updates see other weights than those that sampled.
        metrics |= {key: value for key, value in of_updates[0].items() if key.startswith("logprob_gap/")}
        return metrics | self.entropy.update(metrics["entropy"])


def training_minibatches(places: Sequence[SequencePlace], num_minibatches: int) -> list[int]:
    """Those of equal runs of a batch in which at least one sequence trains."""
    size = len(places) // num_minibatches
    runs = (places[start : start + size] for start in range(0, len(places), size))
    return [number for number, run in enumerate(runs) if any(place.weight > 0 for place in run)]
