"""The one online loop: sample, score, learn, hand over.

    Collector ─groups─▶ score ─advantages─▶ Policy.load ─▶ logprobs ─▶ train ─version n+1─▶ hand_over ─┐
        ▲                                                                                             │
        └────────────────────────────── may start groups of the next step ◀───────────────────────────┘

With `max_staleness` 0 the collector starts nothing before the weights have been handed over; a larger number
lets it run ahead. Nothing else differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nemorl.config.algorithm import OnlineConfig
from nemorl.errors import RunError
from nemorl.observe.observer import Observer
from nemorl.rollout.collector import Collector
from nemorl.rollout.groups import GroupSummary
from nemorl.session.session import Session
from nemorl.session.shard import SequencePlace

from .bookkeeping import Bookkeeper
from .figures import environment_share, rollout_figures
from .filters import filter_groups
from .gate import LogprobGate, gap_figures, versions_of
from .losses import finish_metrics
from .scoring import Scorer


@dataclass
class OnlineLoop:
    """GRPO and its kin over a started session."""

    config: OnlineConfig
    scorer: Scorer
    session: Session
    collector: Collector
    observer: Observer
    books: Bookkeeper
    gate: LogprobGate

    def __post_init__(self) -> None:
        self._versions = range(0)  # that sampled the tokens of the present batch

    async def run(self) -> None:
        """All steps that are left. Raises RunError when a limit of the config is passed."""
        await self.session.hand_over(self.books.done)
        await self.books.open()
        try:
            for step in self.books.steps(self.config.num_steps):
                await self._step(step)
        finally:
            await self.collector.close()

    async def _step(self, step: int) -> None:
        async with self.session.generating():
            self.collector.advance(self.books.done)
            groups = await self._sample()
        batch = filter_groups(groups, self.config.filters, self.config.num_prompts_per_step)
        sequences = self.scorer.score(batch.groups)
        self._versions = versions_of(groups)
        values = rollout_figures(groups) | batch.figures | await self._learn(step, sequences)
        with self.observer.stage("refit"):
            values |= await self.session.hand_over(step)
        values |= await self.session.generation_figures()
        self.books.keep_samples(step, groups)
        await self.books.finish_step(step, values, self.collector.position)

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

    async def _learn(self, step: int, sequences: list[SequencePlace]) -> dict[str, float]:
        """One update for each minibatch; figures are means over them."""
        with self.observer.stage("logprobs"):
            gap = await self._prepare(step, sequences)
        with self.observer.stage("training", total=self.config.num_minibatches, unit="updates") as stage:
            updates = []
            for minibatch in range(self.config.num_minibatches):
                updates.append(await self.session.learner.train(self.scorer.loss, minibatch))
                stage.advance(tokens=updates[-1].num_tokens)
        figures = [finish_metrics(u.sums, u.maxima) for u in updates]
        values = {key: sum(f[key] for f in figures) / len(figures) for key in figures[0]} | gap
        self._check_gap(values)
        packing = self.session.learner.packing_figures()
        return values | self.books.optimizer_figures(updates) | packing

    async def _prepare(self, step: int, sequences: list[SequencePlace]) -> dict[str, float]:
        """Load the batch with the logprobs that its updates need; the gap, if it was measured on the way.

        A single update sees the weights that sampled, so its own logprobs are the old ones and tell the gap.
        """
        several = self.config.num_minibatches > 1
        learner, gap = self.session.learner, {}
        await self._load(sequences)
        if several or self.gate.due(step):
            gap = gap_figures(await learner.logprobs(old=True, reference=False))
            self._check_gap(gap)
            if not several:
                await self._load(sequences)  # without the old logprobs, as in every other step
        if self.config.kl.coefficient > 0:
            await learner.logprobs(old=False, reference=True)
        return gap if several else {}

    async def _load(self, sequences: list[SequencePlace]) -> None:
        await self.session.learner.load(
            sequences, kind="trajectories", num_minibatches=self.config.num_minibatches
        )

    def _check_gap(self, figures: Mapping[str, float]) -> None:
        self.gate.check(figures, self._versions, self.books.done)
