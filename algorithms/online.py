"""The one online loop: sample, filter, score, learn, hand over.

    Collector ─groups─▶ load ─▶ logprobs ─▶ values ─▶ advantages ─▶ train ─version n+1─▶ hand_over ─┐
        ▲                                                                                          │
        └──────────────────────────── may start groups of the next step ◀──────────────────────────┘

With `max_staleness` 0 the collector starts nothing before the weights have been handed over; a larger number
lets it run ahead. Nothing else differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nemorl.config.algorithm import OnlineBase
from nemorl.errors import RunError
from nemorl.observe.observer import Observer
from nemorl.rollout.collector import Collector
from nemorl.rollout.groups import GroupSummary
from nemorl.session.session import Session

from .filters import filter_groups
from .recorder import Bookkeeper
from .rollout_metrics import environment_share, rollout_figures


class Learns(Protocol):
    """What is learnt from a batch, step by step; `Learning` is the one of advantages."""

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
    learning: Learns
    observer: Observer
    books: Bookkeeper

    async def run(self) -> None:
        """All steps that are left. Raises RunError when a limit of the config is passed, and Dropped."""
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
            groups = await self.books.stop.drop(self._sample())
        batch = filter_groups(groups, self.config.filters, self.config.num_prompts_per_step)
        values = rollout_figures(groups) | batch.figures
        await self.learning.load(batch.groups)
        gap = await self.learning.logprobs(step)
        await self.learning.values()
        values |= await self.learning.advantages()
        values |= await self.learning.train(step) | gap
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
