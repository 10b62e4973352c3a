"""The one online loop: sample, filter, score, learn, hand over.

    Collector ─groups─▶ load ─▶ logprobs ─▶ values ─▶ advantages ─▶ train ─version n+1─▶ hand_over ─┐
        ▲                                                                                          │
        └──────────────────────────── may start groups of the next step ◀──────────────────────────┘

With `max_staleness` 0 the collector starts nothing before the weights have been handed over; a larger number
lets it run ahead. Nothing else differs.

From sampled groups to the batch that is learnt: an advantage and a weight for every trajectory.

What is learnt from one batch, by the policy and, where there is one, by its critic.

    policy ─┬─ load ─▶ logprobs ─────────▶ advantages ─▶ [ epochs x minibatches ] train
    critic ─┴─ load ─▶ values ──────────────▲   └─returns─▶ [ epochs x minibatches ] train
    reference ─ load ─▶ logprobs ───────────┘

Arrays of tokens go from group to group; this module has handles and figures. A reference without processes of
its own is the policy with its first weights.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from nemorl.config.algorithm import Aggregation, OnlineBase, OnlineConfig
from nemorl.config.algorithm.advantages import TokenAdvantageBase
from nemorl.data.batches import PLACEHOLDER_TOKENS, Advantage
from nemorl.data.losses import Loss
from nemorl.errors import RunError
from nemorl.megatron.stats import TrainStats
from nemorl.observe.observer import Observer
from nemorl.observe.timeline import Stage
from nemorl.rollout.collector import Collector
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.session.models import ModelGroup
from nemorl.session.session import Session
from nemorl.session.shard import SequencePlace

from .advantages import Estimator, estimator
from .aggregation import sequence_weights
from .filters import filter_groups
from .gate import LogprobGate, gap_metrics, versions_of
from .losses import PolicyLoss, ValueLoss, finish_metrics, value_metrics
from nemorl.run.recorder import RunRecorder
from .metrics import environment_share, rollout_metrics
from .token_advantages import SequenceKL, TokenEstimator


class Update(Protocol):
    """What is learnt from a batch, step by step; `PolicyGradientUpdate` is the one of advantages."""

    async def load(self, groups: Sequence[GroupSummary], /) -> None:
        """Lay the batch over the ranks."""
        ...

    async def logprobs(self, step: int, /) -> dict[str, float]:
        """Those that are needed before the updates; figures."""
        ...

    async def values(self) -> None:
        """A critic's, if any."""
        ...

    async def advantages(self) -> dict[str, float]:
        """Those that are made of tokens; figures."""
        ...

    async def train(self, step: int, /) -> dict[str, float]:
        """The updates; figures."""
        ...


@dataclass
class OnlineLoop:
    """Every online algorithm over a started session; `learning` knows what is learnt from a batch."""

    config: OnlineBase
    session: Session
    collector: Collector
    learning: Update
    observer: Observer
    recorder: RunRecorder

    async def run(self) -> None:
        """Run all remaining steps. Raises RunError if a limit of the config is passed, and StepCancelled."""
        await self.session.update_weights(self.recorder.done)
        await self.recorder.open()
        try:
            for step in self.recorder.steps(self.config.num_steps):
                await self._step(step)
        finally:
            await self.collector.close()

    async def _step(self, step: int) -> None:
        async with self.session.generating():
            self.collector.advance(self.recorder.done)
            groups = await self.recorder.stop.drop(self._sample())
        batch = filter_groups(groups, self.config.filters, self.config.num_prompts_per_step)
        values = rollout_metrics(groups) | batch.metrics
        await self.learning.load(batch.groups)
        gap = await self.learning.logprobs(step)
        await self.learning.values()
        values |= await self.learning.advantages()
        values |= await self.learning.train(step) | gap
        with self.observer.stage("refit"):
            values |= await self.session.update_weights(step)
        values |= await self.session.generation_metrics()
        self.recorder.keep_samples(step, groups)
        await self.recorder.finish_step(step, values, self.collector.position)

    async def _sample(self) -> list[GroupSummary]:
        """The groups that were sampled for one step; more than it trains where others replace them."""
        count = self.config.num_prompts_per_step
        with self.observer.stage("generation", total=count, unit="groups") as stage:
            groups = await self.collector.next_batch(stage.advance)
            stage.share("environment", environment_share(groups))
        errors = [t.error for group in groups for t in group.trajectories]
        if all(errors):
            raise RunError(
                f"all {len(errors)} trajectories of a step failed, so there is nothing to learn from. "
                f"The first says: {errors[0]}"
            )
        return groups


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
                num_tokens=t.num_tokens if weight > 0 else PLACEHOLDER_TOKENS,
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


@dataclass
class PolicyGradientUpdate:
    """The steps of learning from a batch, in their order: load, logprobs, values, advantages, train."""

    config: OnlineConfig
    scorer: Scorer
    session: Session
    observer: Observer
    recorder: RunRecorder
    gate: LogprobGate

    async def load(self, groups: Sequence[GroupSummary]) -> None:
        """Score the groups and lay their trajectories over the ranks of all models.

        Filters and errors may leave nothing that trains: then no model is asked for anything.
        """
        self._groups = groups
        self._places = self.scorer.score(groups)
        self._versions = versions_of(groups)
        self._minibatches = training_minibatches(self._places, self.config.num_minibatches)
        if not self._minibatches:
            return
        with self.observer.stage("loading"):
            await asyncio.gather(*(self._load(name) for name in self.session.models))

    async def logprobs(self, step: int) -> dict[str, float]:
        """Those of the policy before its updates and of the reference, where needed; the gap, if measured.

        A single update sees the weights that sampled, so its own logprobs are the old ones and tell the gap.
        """
        if not self._minibatches:
            return {}
        policy, gap = self.session.learner, {}
        with self.observer.stage("logprobs"):
            if self.config.needs_old_logprobs or self.gate.due(step):
                by_entropy = self.config.loss.selects_by_entropy
                gap = gap_metrics(await policy.logprobs(old=True, reference=False, entropy=by_entropy))
                self._check_gap(gap)
                if not self.config.needs_old_logprobs:
                    await self._load("policy")  # without the old logprobs, as in every other step
            if self.config.keeps_reference:
                await self._reference_logprobs()
        return gap

    async def values(self) -> None:
        """The critic's, handed to the policy."""
        if self.config.keeps_critic and self._minibatches:
            with self.observer.stage("values"):
                critic = self.session.model("critic")
                await critic.values()
                await self.session.learner.take("values", await critic.share("values"))

    async def advantages(self) -> dict[str, float]:
        """Those that depend on more than rewards: of single tokens, or less the divergence; their figures."""
        policy, estimator = self.session.learner, self.scorer.token_estimator
        if not self._minibatches or (estimator is None and not self.config.kl_in_reward):
            return {}
        with self.observer.stage("advantages"):
            if estimator is None:
                divergences = await policy.sequence_metrics(SequenceKL(self.config.kl))
                self._places = self.scorer.penalised(self._groups, self._places, divergences)
                await policy.take_advantages(self._places)
                trained = max(1, sum(place.weight > 0 for place in self._places))
                return {"kl/penalty": self.config.kl.coefficient * sum(divergences) / trained}
            metrics = await policy.estimate(estimator)
            if self.config.keeps_critic:
                await self.session.model("critic").take("returns", await policy.share("returns"))
            return metrics

    async def train(self, step: int) -> dict[str, float]:
        """The updates of policy and critic, of minibatches of which anything trains; figures are means."""
        critic = self.config.critic
        loss = replace(self.scorer.loss, entropy_coefficient=self.recorder.entropy.weight)
        learns = {"policy": loss} if critic is None or step > critic.warmup_steps else {}
        losses: dict[str, Loss] = {**({} if critic is None else {"critic": ValueLoss(critic)}), **learns}
        total = len(losses) * self.config.num_epochs * len(self._minibatches)
        with self.observer.stage("training", total=total, unit="updates") as stage:
            if self.session.models_share_devices:
                updates = {name: await self._updates(name, loss, stage) for name, loss in losses.items()}
            else:
                found = await asyncio.gather(*(self._updates(*item, stage) for item in losses.items()))
                updates = dict(zip(losses, found, strict=True))
        metrics = {} if "policy" not in updates else self._of_policy(updates["policy"])
        return metrics | _of_critic(updates.get("critic", []))

    async def _updates(self, name: str, loss: Loss, stage: Stage) -> list[TrainStats]:
        """All updates of a model in a step: the minibatches that train, as often as there are epochs."""
        updates = []
        for _ in range(self.config.num_epochs):
            for minibatch in self._minibatches:
                updates.append(await self.session.model(name).train(loss, minibatch))
                stage.advance(tokens=updates[-1].num_tokens if name == "policy" else 0)
        return updates

    def _of_policy(self, updates: Sequence[TrainStats]) -> dict[str, float]:
        left_out = self.config.updates_per_step - len(updates)
        if not updates:
            return self.recorder.optimizer_metrics(updates, left_out)
        metrics = [finish_metrics(u.sums, u.maxima) for u in updates]
        values = {key: sum(f[key] for f in metrics) / len(metrics) for key in metrics[0]}
        values |= {key: max(u.maxima[key] for u in updates) for key in updates[0].maxima}
        # Later updates see other weights than those that sampled.
        values |= {key: value for key, value in metrics[0].items() if key.startswith("logprob_gap/")}
        self._check_gap(values)
        values |= self.recorder.entropy.hear(values["entropy"])
        packing = self.session.learner.packing_metrics()
        return values | self.recorder.optimizer_metrics(updates, left_out) | packing

    async def _reference_logprobs(self) -> None:
        policy = self.session.learner
        if "reference" not in self.session.models:
            await policy.logprobs(old=False, reference=True)
            return
        reference: ModelGroup = self.session.model("reference")
        await reference.logprobs(old=True, reference=False)
        await policy.take("reference_logprobs", await reference.share("old_logprobs"))

    async def _load(self, name: str) -> None:
        places: Sequence[SequencePlace] = self._places
        if name == "critic":
            places = self.scorer.of_critic(self._groups, places)
        await self.session.model(name).load(
            places, kind="trajectories", num_minibatches=self.config.num_minibatches
        )

    def _check_gap(self, metrics: Mapping[str, float]) -> None:
        self.gate.check(metrics, self._versions, self.recorder.done)


def training_minibatches(places: Sequence[SequencePlace], num_minibatches: int) -> list[int]:
    """Those of equal runs of a batch in which at least one sequence trains."""
    size = len(places) // num_minibatches
    runs = (places[start : start + size] for start in range(0, len(places), size))
    return [number for number, run in enumerate(runs) if any(place.weight > 0 for place in run)]


def _of_critic(updates: Sequence[TrainStats]) -> dict[str, float]:
    if not updates:
        return {}
    return {
        **value_metrics([u.sums for u in updates]),
        "critic/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "critic/lr": updates[-1].lr,
        "critic/skipped_updates": float(sum(u.skipped for u in updates)),
    }
