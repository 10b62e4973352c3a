"""What is learnt from one batch, by the policy and, where there is one, by its critic.

    policy ─┬─ load ─▶ logprobs ─────────▶ advantages ─▶ [ epochs x minibatches ] train
    critic ─┴─ load ─▶ values ──────────────▲   └─returns─▶ [ epochs x minibatches ] train
    reference ─ load ─▶ logprobs ───────────┘

Arrays of tokens go from group to group; this module has handles and figures. A reference without processes of
its own is the policy with its first weights.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nemorl.config.algorithm import OnlineConfig
from nemorl.data.losses import Loss
from nemorl.megatron.stats import TrainStats
from nemorl.observe.observer import Observer
from nemorl.observe.timeline import Stage
from nemorl.rollout.groups import GroupSummary
from nemorl.session.models import ModelGroup
from nemorl.session.session import Session
from nemorl.session.shard import SequencePlace

from .gate import LogprobGate, gap_figures, versions_of
from .losses import finish_metrics
from .recorder import Bookkeeper
from .scoring import Scorer
from .token_advantages import SequenceKL
from .value_loss import ValueLoss, value_figures


@dataclass
class Learning:
    """The steps of learning from a batch, in their order: load, logprobs, values, advantages, train."""

    config: OnlineConfig
    scorer: Scorer
    session: Session
    observer: Observer
    books: Bookkeeper
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
                gap = gap_figures(await policy.logprobs(old=True, reference=False, entropy=by_entropy))
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
                divergences = await policy.sequence_figures(SequenceKL(self.config.kl))
                self._places = self.scorer.penalised(self._groups, self._places, divergences)
                await policy.take_advantages(self._places)
                trained = max(1, sum(place.weight > 0 for place in self._places))
                return {"kl/penalty": self.config.kl.coefficient * sum(divergences) / trained}
            figures = await policy.estimate(estimator)
            if self.config.keeps_critic:
                await self.session.model("critic").take("returns", await policy.share("returns"))
            return figures

    async def train(self, step: int) -> dict[str, float]:
        """The updates of policy and critic, of minibatches of which anything trains; figures are means."""
        critic = self.config.critic
        loss = replace(self.scorer.loss, entropy_coefficient=self.books.entropy.weight)
        learns = {"policy": loss} if critic is None or step > critic.warmup_steps else {}
        losses: dict[str, Loss] = {**({} if critic is None else {"critic": ValueLoss(critic)}), **learns}
        total = len(losses) * self.config.num_epochs * len(self._minibatches)
        with self.observer.stage("training", total=total, unit="updates") as stage:
            if self.session.models_share_devices:
                updates = {name: await self._updates(name, loss, stage) for name, loss in losses.items()}
            else:
                found = await asyncio.gather(*(self._updates(*item, stage) for item in losses.items()))
                updates = dict(zip(losses, found, strict=True))
        figures = {} if "policy" not in updates else self._of_policy(updates["policy"])
        return figures | _of_critic(updates.get("critic", []))

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
            return self.books.optimizer_figures(updates, left_out)
        figures = [finish_metrics(u.sums, u.maxima) for u in updates]
        values = {key: sum(f[key] for f in figures) / len(figures) for key in figures[0]}
        values |= {key: max(u.maxima[key] for u in updates) for key in updates[0].maxima}
        # Later updates see other weights than those that sampled.
        values |= {key: value for key, value in figures[0].items() if key.startswith("logprob_gap/")}
        self._check_gap(values)
        values |= self.books.entropy.hear(values["entropy"])
        packing = self.session.learner.packing_figures()
        return values | self.books.optimizer_figures(updates, left_out) | packing

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

    def _check_gap(self, figures: Mapping[str, float]) -> None:
        self.gate.check(figures, self._versions, self.books.done)


def training_minibatches(places: Sequence[SequencePlace], num_minibatches: int) -> list[int]:
    """Those of equal runs of a batch in which at least one sequence trains."""
    size = len(places) // num_minibatches
    runs = (places[start : start + size] for start in range(0, len(places), size))
    return [number for number, run in enumerate(runs) if any(place.weight > 0 for place in run)]


def _of_critic(updates: Sequence[TrainStats]) -> dict[str, float]:
    if not updates:
        return {}
    return {
        **value_figures([u.sums for u in updates]),
        "critic/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "critic/lr": updates[-1].lr,
        "critic/skipped_updates": float(sum(u.skipped for u in updates)),
    }
