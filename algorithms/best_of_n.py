"""Best-of-n: train on the best sample of each group, or on the pair of its best and worst.

Pairs train by a loss of `pair_losses.py`, the best samples by cross entropy. Rewards select; they do not
enter the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nemorl.config.algorithm import IterativePreferenceConfig, RejectionSamplingConfig
from nemorl.data.losses import Loss, TrainStats
from nemorl.data.packed import PLACEHOLDER_TOKENS, Compared
from nemorl.data.shards import SequencePlace
from nemorl.rollout.collector import GroupSummary, TrajectorySummary

from .losses import CrossEntropyLoss, finish_metrics
from .metrics import versions_of
from .objective import sequence_weights
from .online import Batch
from .pair_losses import PreferenceLoss, pair_metrics


@dataclass(frozen=True)
class PickedPair:
    """Two trajectories of a group."""

    group: GroupSummary
    chosen: TrajectorySummary
    rejected: TrajectorySummary


def pairs_of(groups: Sequence[GroupSummary]) -> list[PickedPair]:
    """The highest and the lowest reward of each group that trains; none of a group with equal rewards.

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
    """The highest reward of each group, if it is at least `min_reward`; of equals the first sampled."""
    found = []
    for group in groups:
        sound = [t for t in group.trajectories if t.trains and t.num_sampled]
        best = max(sound, key=lambda t: t.reward, default=None)
        if best is not None and (min_reward is None or best.reward >= min_reward):
            found.append((group, best))
    return found


@dataclass
class BestOfNUpdate:
    """The update of iterative preference optimization and of rejection sampling."""

    config: IterativePreferenceConfig | RejectionSamplingConfig
    multiple: int  # of units into which a batch is laid over ranks and stages

    def prepare(self, groups: Sequence[GroupSummary], number: int) -> Batch:
        """Select pairs or the best samples; a batch may give none, and then nothing trains."""
        config = self.config
        loss: Loss
        if isinstance(config, IterativePreferenceConfig):
            pairs = pairs_of(groups)
            selected, sequences = len(pairs), _pair_sequences(pairs)
            loss = PreferenceLoss(config.loss, selected, config.sft_coefficient)
        else:
            best = best_of(groups, config.min_reward)
            selected, sequences = len(best), _best_sequences(best)
            loss = CrossEntropyLoss()
        missing = -selected % self.multiple
        return Batch(
            sequences + [_placeholder(groups[0], selected + unit) for unit in range(missing)],
            versions_of(groups),
            {"policy": loss},
            schedule=[0] * config.num_epochs if selected else [],
            num_updates=config.num_epochs,
            metrics={"picked": selected / len(groups)},
        )

    def metrics(self, updates: Sequence[TrainStats]) -> dict[str, float]:
        """Metrics of the first update, in which the policy is still the one that sampled."""
        first = updates[0]
        return pair_metrics(first.sums) if "pairs" in first.sums else finish_metrics(first.sums, first.maxima)


def _pair_sequences(pairs: Sequence[PickedPair]) -> list[SequencePlace]:
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


def _best_sequences(best: Sequence[tuple[GroupSummary, TrajectorySummary]]) -> list[SequencePlace]:
    weights = sequence_weights([t.num_sampled for _, t in best], "token-mean").tolist()
    return [
        SequencePlace(group.reference, t.row, t.num_tokens, weight=weight, compared=Compared(unit))
        for unit, ((group, t), weight) in enumerate(zip(best, weights, strict=True))
    ]


def _placeholder(group: GroupSummary, unit: int) -> SequencePlace:
    """One token that is not trained: what has no weight is not sent whole."""
    return SequencePlace(group.reference, 0, PLACEHOLDER_TOKENS, weight=0.0, compared=Compared(unit))
