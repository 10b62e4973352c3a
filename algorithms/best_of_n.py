"""Best-of-n: train on the best sample of each group, or on the pair of its best and worst.

Pairs train by a loss of `pair_losses.py`, the best samples by cross entropy. Rewards select; they do not
enter the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from nemorl.config.algorithm import IterativePreferenceConfig, RejectionSamplingConfig
from nemorl.data.losses import Loss, TrainStats
from nemorl.data.packed import PLACEHOLDER_TOKENS, Compared
from nemorl.data.shards import SequencePlace
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.rollout.versions import UNBROKEN, Lineage

from .metrics import versions_of
from .objective import finish_metrics, means_over, sequence_weights
from .online import Batch
from .pair_losses import PreferenceLoss
from .policy_losses import CrossEntropyLoss


@dataclass(frozen=True)
class Picked:
    """The best trajectory of a group, and of a pair also the worst."""

    group: GroupSummary
    chosen: TrajectorySummary
    rejected: TrajectorySummary | None = None


def pairs_of(groups: Sequence[GroupSummary]) -> list[Picked]:
    """The highest and the lowest reward of each group that trains; none of a group with equal rewards.

    Players of a group are compared separately.
    Of equals the first sampled counts. A sample with branches is left out: the loss compares sequences.
    """
    pairs = []
    for group in chain.from_iterable(group.by_player for group in groups):
        trained = [t for t in group.trajectories if t.trains and t.num_sampled and not t.branches]
        if len({t.reward for t in trained}) > 1:
            chosen, rejected = (select(trained, key=lambda t: t.reward) for select in (max, min))
            pairs.append(Picked(group, chosen, rejected))
    return pairs


def best_of(groups: Sequence[GroupSummary], min_reward: float | None = None) -> list[Picked]:
    """The highest reward of each group, if it is at least `min_reward`; of equals the first sampled."""
    picked = []
    for group in chain.from_iterable(group.by_player for group in groups):
        trained = [t for t in group.trajectories if t.trains and t.num_sampled]
        best = max(trained, key=lambda t: t.reward, default=None)
        if best is not None and (min_reward is None or best.reward >= min_reward):
            picked.append(Picked(group, best))
    return picked


@dataclass
class BestOfNUpdate:
    config: IterativePreferenceConfig | RejectionSamplingConfig
    multiple: int  # of units into which a batch is laid over ranks and stages

    def prepare(self, groups: Sequence[GroupSummary], number: int, lineage: Lineage = UNBROKEN) -> Batch:
        """Select pairs or the best samples; a batch may give none, and then nothing trains."""
        config, needs_reference = self.config, False
        loss: Loss = CrossEntropyLoss()
        if isinstance(config, IterativePreferenceConfig):
            picked, needs_reference = pairs_of(groups), config.loss.keeps_reference
            loss = PreferenceLoss(config.loss, len(picked), config.sft_coefficient)
        else:
            picked = best_of(groups, config.min_reward)
        weights = sequence_weights([one.chosen.num_sampled for one in picked], "token-mean").tolist()
        sequences = list[SequencePlace]()
        num_units = 0
        for one, weight in zip(picked, weights, strict=True):
            # Weights are those of the cross entropy, which uses only the chosen of a pair.
            members = [(branch, Compared(num_units + n)) for n, branch in enumerate(one.chosen.sequences)]
            num_units += len(members)
            if (other := one.rejected) is not None:
                unit, margin = num_units - 1, one.chosen.reward - other.reward
                pair = zip((one.chosen, other), (1.0, -1.0), strict=True)
                members = [(t.sequences[0], Compared(unit, sign, margin)) for t, sign in pair]
            sequences += [
                SequencePlace(
                    one.group.reference, t.row, t.num_tokens, weight=weight, compared=compared, runs=t.runs
                )
                for t, compared in members
            ]
        units = range(num_units, num_units + -num_units % self.multiple)
        placeholders = [
            SequencePlace(groups[0].reference, 0, PLACEHOLDER_TOKENS, weight=0.0, compared=Compared(unit))
            for unit in units
        ]
        return Batch(
            sequences + placeholders,
            versions_of(groups),
            {"policy": loss},
            schedule=[0] * config.num_epochs if picked else [],
            num_updates=config.num_epochs,
            needs_reference=needs_reference,
            metrics={"picked": len(picked) / len(groups)},
        )

    def metrics(self, updates: Sequence[TrainStats]) -> dict[str, float]:
        first = updates[0]
        if "pairs" in first.sums:
            return means_over("pairs", first.sums)
        return finish_metrics(first.sums, first.maxima)
