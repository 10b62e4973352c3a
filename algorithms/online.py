"""The one online loop: sample, score, learn, hand over.

    Collector ─groups─▶ score ─advantages─▶ Policy.load ─▶ logprobs ─▶ train ─version n+1─▶ hand_over ─┐
        ▲                                                                                             │
        └────────────────────────────── may start groups of the next step ◀───────────────────────────┘

With `max_staleness` 0 the collector starts nothing before the weights have been handed over; a larger number
lets it run ahead. Nothing else differs.
"""

from dataclasses import dataclass

from nemorl.config.algorithm import GrpoConfig
from nemorl.errors import RunError
from nemorl.observe.observer import Observer
from nemorl.rollout.collector import Collector
from nemorl.rollout.groups import GroupSummary
from nemorl.session.session import Session
from nemorl.session.shard import SequencePlace

from .bookkeeping import Bookkeeper
from .figures import environment_share, rollout_figures
from .grpo import Grpo
from .losses import finish_metrics


@dataclass
class OnlineLoop:
    """GRPO and its kin over a started session."""

    config: GrpoConfig
    algorithm: Grpo
    session: Session
    collector: Collector
    observer: Observer
    books: Bookkeeper

    async def run(self) -> None:
        """All steps that are left. Raises RunError when a limit of the config is passed."""
        await self.session.hand_over(self.books.done)
        await self.books.open()
        self.collector.advance(self.books.done)
        for step in self.books.steps(self.config.num_steps):
            groups = await self._sample()
            sequences = self.algorithm.score(groups)
            values = rollout_figures(groups) | await self._learn(sequences)
            self._check_gap(values)
            with self.observer.stage("refit"):
                values |= await self.session.hand_over(step)
            self.books.keep_samples(step, groups)
            await self.books.finish_step(step, values, self.collector.position)
            self.collector.advance(step)

    async def _sample(self) -> list[GroupSummary]:
        """The groups of one step."""
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

    async def _learn(self, sequences: list[SequencePlace]) -> dict[str, float]:
        """One update for each minibatch; figures are means over them."""
        several = self.config.num_minibatches > 1
        reference = self.config.loss.kl.coefficient > 0
        with self.observer.stage("logprobs"):
            await self.session.learner.load(
                sequences, kind="trajectories", num_minibatches=self.config.num_minibatches
            )
            # The very first batch is compared before anything is learnt from it.
            if several or reference or not self.books.compared:
                await self._compare(old=several or not self.books.compared, reference=reference)
        with self.observer.stage("training", total=self.config.num_minibatches, unit="updates") as stage:
            updates = []
            for minibatch in range(self.config.num_minibatches):
                updates.append(await self.session.learner.train(self.algorithm.loss, minibatch))
                stage.advance(tokens=updates[-1].num_tokens)
        figures = [finish_metrics(u.sums, u.maxima) for u in updates]
        return {
            **{key: sum(f[key] for f in figures) / len(figures) for key in figures[0]},
            "logprob_gap/max": max(f["logprob_gap/max"] for f in figures),
            **self.books.optimizer_figures(updates),
        }

    async def _compare(self, *, old: bool, reference: bool) -> None:
        stats = await self.session.learner.logprobs(old=old, reference=reference)
        if old:
            self.books.compared = True
            self._check_gap({"logprob_gap/mean": stats.gap_mean, "logprob_gap/max": stats.gap_max})

    def _check_gap(self, values: dict[str, float]) -> None:
        gap = values["logprob_gap/mean"]
        if not gap <= self.config.max_logprob_gap:
            raise RunError(
                f"engine and trainer disagree: the mean difference of their logprobs is {gap:.4g}, the limit "
                f"algorithm.max_logprob_gap is {self.config.max_logprob_gap:g}. Likely causes: generation in "
                "another precision than the policy, weights that did not arrive, or an update so large that "
                "the policy broke down (see grad_norm and entropy in metrics.jsonl)."
            )
