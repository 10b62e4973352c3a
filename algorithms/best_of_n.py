"""From sampled groups to what is imitated or compared: the best of each, and the worst beside it.

`BestOfNUpdate` is what the online loop learns with then: pairs by a loss of `pair_losses.py`, or the best
samples by cross entropy. Rewards pick; nothing else of them enters the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nemorl.config.algorithm import IterativePreferenceConfig, RejectionSamplingConfig
from nemorl.data.batches import PLACEHOLDER_TOKENS
from nemorl.data.losses import Loss
from nemorl.data.packed import Compared
from nemorl.observe.observer import Observer
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.session.session import Session
from nemorl.session.shard import SequencePlace

from .aggregation import sequence_weights
from .gate import LogprobGate, gap_metrics, versions_of
from .losses import CrossEntropyLoss, finish_metrics
from .pair_losses import PreferenceLoss, pair_metrics
from nemorl.run.recorder import RunRecorder


@dataclass(frozen=True)
class PickedPair:
    """Two trajectories of a group."""

    group: GroupSummary
    chosen: TrajectorySummary
    rejected: TrajectorySummary


def pairs_of(groups: Sequence[GroupSummary]) -> list[PickedPair]:
    """The best and the worst paid of each group that trains; none of a group paid alike.

    Of equals the first sampled counts.
    """
    pairs = []
    for group in groups:
        sound = [t for t in group.trajectories if t.trains and t.num_sampled]
        if len({t.reward for t in sound}) > 1:
            chosen = max(sound, key=lambda t: t.reward)
            pairs.append(PickedPair(group, chosen, min(sound, key=lambda t: t.reward)))
    return pairs


def best_of(
    groups: Sequence[GroupSummary], min_reward: float | None = None
) -> list[tuple[GroupSummary, TrajectorySummary]]:
    """The best paid of each group, if it is paid at least `min_reward`; of equals the first sampled."""
    found = []
    for group in groups:
        sound = [t for t in group.trajectories if t.trains and t.num_sampled]
        best = max(sound, key=lambda t: t.reward, default=None)
        if best is not None and (min_reward is None or best.reward >= min_reward):
            found.append((group, best))
    return found


@dataclass
class BestOfNUpdate:
    """The steps of learning from what was picked of a batch, as the online loop calls them."""

    config: IterativePreferenceConfig | RejectionSamplingConfig
    session: Session
    observer: Observer
    recorder: RunRecorder
    gate: LogprobGate
    multiple: int  # of units into which a batch is laid over ranks and stages

    async def load(self, groups: Sequence[GroupSummary]) -> None:
        """Pick, and lay what was picked over the ranks; a batch may give nothing at all."""
        self._versions = versions_of(groups)
        if isinstance(self.config, IterativePreferenceConfig):
            pairs = pairs_of(groups)
            self._num_picked, places = len(pairs), _pair_places(pairs)
        else:
            best = best_of(groups, self.config.min_reward)
            self._num_picked, places = len(best), _best_places(best)
        self._share = self._num_picked / len(groups)
        if not places:
            return
        missing = -self._num_picked % self.multiple
        places += [_stand_in(groups[0], self._num_picked + unit) for unit in range(missing)]
        with self.observer.stage("loading"):
            await self.session.learner.load(places, kind="trajectories")

    async def logprobs(self, step: int) -> dict[str, float]:
        """Those of the reference, where the loss looks at one; the gap of what was picked, if measured."""
        if not self._num_picked:
            return {}
        measures, reference = self.gate.due(step), self.config.keeps_reference
        if not measures and not reference:
            return {}
        with self.observer.stage("logprobs"):
            stats = await self.session.learner.logprobs(old=measures, reference=reference)
        if not measures:
            return {}
        gap = gap_metrics(stats)
        self.gate.check(gap, self._versions, self.recorder.done)
        return gap

    async def values(self) -> None:
        """There is no critic."""

    async def advantages(self) -> dict[str, float]:
        """There are none."""
        return {}

    async def train(self, step: int) -> dict[str, float]:
        """The updates; a batch in which nothing was picked leaves the weights as they are."""
        picked = {"picked": self._share}
        if not self._num_picked:
            return picked | self.recorder.optimizer_metrics([], left_out=self.config.num_epochs)
        updates = []
        with self.observer.stage("training", total=self.config.num_epochs, unit="updates") as stage:
            for _ in range(self.config.num_epochs):
                updates.append(await self.session.learner.train(self._loss))
                stage.advance(tokens=updates[-1].num_tokens)
        first = updates[0]
        pairs = "pairs" in first.sums
        metrics = pair_metrics(first.sums) if pairs else finish_metrics(first.sums, first.maxima)
        packing = self.session.learner.packing_metrics()
        return metrics | picked | self.recorder.optimizer_metrics(updates) | packing

    @property
    def _loss(self) -> Loss:
        config = self.config
        if isinstance(config, IterativePreferenceConfig):
            return PreferenceLoss(config.loss, self._num_picked, config.sft_coefficient)
        return CrossEntropyLoss()


def _pair_places(pairs: Sequence[PickedPair]) -> list[SequencePlace]:
    """Chosen and rejected of each pair; weights of the cross entropy, which looks at the chosen only."""
    weights = sequence_weights([pair.chosen.num_sampled for pair in pairs], "token-mean").tolist()
    return [
        SequencePlace(
            pair.group.reference,
            t.row,
            t.num_tokens,
            weight=weight,
            compared=Compared(unit, label, pair.chosen.reward - pair.rejected.reward),
        )
        for unit, (pair, weight) in enumerate(zip(pairs, weights, strict=True))
        for t, label in ((pair.chosen, 1.0), (pair.rejected, -1.0))
    ]


def _best_places(best: Sequence[tuple[GroupSummary, TrajectorySummary]]) -> list[SequencePlace]:
    weights = sequence_weights([t.num_sampled for _, t in best], "token-mean").tolist()
    return [
        SequencePlace(group.reference, t.row, t.num_tokens, weight=weight, compared=Compared(unit))
        for unit, ((group, t), weight) in enumerate(zip(best, weights, strict=True))
    ]


def _stand_in(group: GroupSummary, unit: int) -> SequencePlace:
    """One token that is not trained: what has no weight is not sent whole."""
    return SequencePlace(group.reference, 0, PLACEHOLDER_TOKENS, weight=0.0, compared=Compared(unit))
