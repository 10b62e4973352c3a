"""The update of GRPO, PPO and all others with advantages: an advantage and a weight for every trajectory.

A sample has branches where its conversation did not stay one token sequence: a chat template that drops
earlier reasoning, an agent that rewrites its history, a rewind. Groups, baselines, filters and metrics count
samples; models train on sequences.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, pairwise, repeat
from math import inf
from typing import TypeVar

from nemorl.config.algorithm import Aggregation, OnlineConfig
from nemorl.config.algorithm.advantages import TokenAdvantageBase
from nemorl.config.algorithm.online import AdvantageClipConfig
from nemorl.data.losses import Loss, TrainStats
from nemorl.data.packed import PLACEHOLDER_TOKENS, Advantage
from nemorl.data.shards import SequencePlace
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.rollout.versions import UNBROKEN, Lineage

from .advantages import Estimator, estimator
from .metrics import versions_of
from .objective import Ages, EntropyWeight, metrics_of_updates, sequence_weights
from .online import Batch, RewardPenalty
from .policy_losses import PolicyLoss, ValueLoss
from .token_advantages import SequenceKL, TokenEstimator

T = TypeVar("T")


class PolicyGradientUpdate:
    """Scores the groups of a step; while the critic warms up, it is the only model that trains."""

    def __init__(
        self, config: OnlineConfig, entropy: EntropyWeight, reward_weights: Mapping[str, float] | None = None
    ) -> None:
        """`reward_weights`: of all rewards by name. Raises CustomFunctionError."""
        self._config = config
        self._entropy = entropy
        self._loss = PolicyLoss(
            config.loss, config.kl, config.correction, likelihood_coefficient=config.likelihood.coefficient
        )
        # Advantages of trajectories are estimated here, those of tokens by the policy's workers.
        self._estimate: Estimator | None = None
        self._token_estimator: TokenEstimator | None = None
        self._divergence: SequenceKL | None = None  # that is subtracted from the rewards of trajectories
        kl = config.kl if config.kl_in_reward else None
        if isinstance(config.advantage, TokenAdvantageBase):
            self._token_estimator = TokenEstimator(config.advantage, kl, config.correction)
        else:
            self._estimate = estimator(config.advantage, reward_weights or {})
            self._divergence = SequenceKL(kl) if kl is not None else None
        self._last_age = max(config.ages, default=0)
        self._batch = partial(  # with what is the same in every step
            Batch,
            num_updates=config.updates_per_step,
            num_minibatches=config.num_minibatches,
            needs_reference=config.keeps_reference,
            needs_old_logprobs=config.needs_old_logprobs,
            needs_old_entropies=config.loss.selects_by_entropy,
            needs_old_collisions=config.advantage.needs_collisions,
        )

    def prepare(self, groups: Sequence[GroupSummary], number: int, lineage: Lineage = UNBROKEN) -> Batch:
        """The batch of a step, whose schedule leaves out minibatches in which nothing trains."""
        config, places = self._config, self.score(groups)
        losses: dict[str, Loss] = {}
        if config.critic is not None:
            losses["critic"] = ValueLoss(config.critic)
        if config.critic is None or number > config.critic.warmup_steps:
            version = lineage.version(number - 1)
            ages = Ages(version, self._last_age, lineage) if self._last_age else None
            losses["policy"] = replace(self._loss, entropy_coefficient=self._entropy.weight, ages=ages)
        penalty = None
        if self._divergence is not None:
            penalty = RewardPenalty(self._divergence, partial(self._penalized, groups, places))
        token_estimator = self._token_estimator
        if token_estimator is not None:
            token_estimator = replace(token_estimator, longest=_longest_of_groups(places))
        trains = [any(p.weight > 0 for p in part) for part in self._minibatches(places)]
        return self._batch(
            places,
            versions_of(groups),
            losses,
            schedule=[number for number, some in enumerate(trains) if some] * config.num_epochs,
            critic_sequences=self._for_critic(groups, places),
            token_estimator=token_estimator,
            penalty=penalty,
        )

    def score(self, groups: Sequence[GroupSummary]) -> list[SequencePlace]:
        """All sequences, with advantage and weight, in the order of their groups.

        A trajectory that ended in an error neither trains nor enters the baseline of its group. Where whole
        groups do not train, what does is spread evenly over minibatches, each followed by what does not.
        Branches have the advantage of their sample, unless they are compared themselves, and together the
        weight of one sequence.
        """
        loss, imitation = self._config.loss, self._config.likelihood
        members = self._in_batch_order(groups, [(g, t) for g in groups for t in g.trajectories])
        advantages = self._in_batch_order(groups, list(chain(*self._advantages(groups))))
        sampled = [t.num_trained for _, t in members]
        weights = self._weights(sampled, loss.aggregation, loss.aggregation_length)
        likelihoods: Sequence[float | None] = [None] * len(members)
        if imitation.coefficient > 0:
            counted = zip(sampled, members, strict=True)
            imitated = [count * (t.reward >= imitation.min_reward) for count, (_, t) in counted]
            likelihoods = self._weights(imitated, "token-mean")
        of_members = []
        numbers = self._in_batch_order(groups, self._numbers(groups))
        values = zip(members, advantages, weights, likelihoods, numbers, strict=True)
        for (group, t), of_sample, weight, likelihood, number in values:
            places = []
            of_sequences = of_sample if weight > 0 else [0.0] * len(of_sample)
            rewards = repeat(None) if self._estimate is not None else branch_rewards(t)
            for one, advantage, of_turns in zip(t.sequences, of_sequences, rewards, strict=False):
                store, size = group.reference, one.num_tokens if weight > 0 else PLACEHOLDER_TOKENS
                runs = one.runs if weight > 0 else ()
                places.append(
                    SequencePlace(
                        store, one.row, size, advantage, weight, likelihood, of_turns, number, runs=runs
                    )
                )
            of_members.append(places)
        return filled_up(self._minibatches(of_members), placeholder)

    def metrics(self, updates: Sequence[TrainStats]) -> dict[str, float]:
        metrics = metrics_of_updates(updates)
        return metrics | self._entropy.update(metrics["entropy"])

    def _in_batch_order(self, groups: Sequence[GroupSummary], of_samples: list[T]) -> list[T]:
        """Values of all samples, given group by group, in the order of the batch."""
        if all(any(t.trains for t in group.trajectories) for group in groups):
            return of_samples
        trains, parts = [t.trains for g in groups for t in g.trajectories], self._config.num_minibatches
        ordered = sorted(range(len(trains)), key=lambda number: not trains[number])
        return [of_samples[number] for part in range(parts) for number in ordered[part::parts]]

    def _numbers(self, groups: Sequence[GroupSummary]) -> list[int | None]:
        """Of each sample the number of what its tokens are compared with: those of its group and player."""
        players = [(group.group, t.player) for group in groups for t in group.trajectories]
        if self._token_estimator is None or not self._config.advantage.needs_group:
            return [None] * len(players)
        numbers = {player: number for number, player in enumerate(dict.fromkeys(players))}
        return [numbers[player] for player in players]

    def _advantages(self, groups: Sequence[GroupSummary]) -> list[list[list[Advantage]]]:
        """Of each sequence of each sample of each group; 0 after an error, in groups that do not train, and
        where tokens have advantages of their own.

        Each player's are estimated as if there were no others: neither a group nor the batch compares a
        player with its opponents.
        """
        compared = [self._compared(group) for group in groups]
        advantages: list[list[Advantage]] = [[0.0] * len(group.trajectories) for group in compared]
        if self._estimate is not None:
            for counting in _places_of_players(compared):
                estimated = self._estimate([compared[n].only(places) for n, places in counting.items()])
                for (number, places), of_group in zip(counting.items(), estimated, strict=True):
                    for place, advantage in zip(places, of_group, strict=True):
                        advantages[number][place] = advantage
        of_groups = zip(groups, compared, advantages, strict=True)
        return [
            self._changed(group, _of_samples(group, units, of_units)) for group, units, of_units in of_groups
        ]

    def _changed(self, group: GroupSummary, estimated: list[list[Advantage]]) -> list[list[Advantage]]:
        """The advantages of the sequences of a group with those of flagged turns, within the bounds."""
        by_flag, bounds = self._config.flagged_advantages, self._config.advantage_clip
        if not by_flag and bounds is None:
            return estimated
        return [
            [
                clipped(with_flags(advantage, sequence.turn_flags, by_flag), bounds)
                for sequence, advantage in zip(t.sequences, of_sample, strict=True)
            ]
            for t, of_sample in zip(group.trajectories, estimated, strict=True)
        ]

    def _compared(self, group: GroupSummary) -> GroupSummary:
        """The group with what is compared as its members: samples, or each of their branches."""
        if self._config.compares == "samples":
            return group
        return replace(group, trajectories=tuple(chain(*map(branches_as_samples, group.trajectories))))

    def _penalized(
        self, groups: Sequence[GroupSummary], places: Sequence[SequencePlace], divergences: Sequence[float]
    ) -> list[SequencePlace]:
        """The same with advantages of rewards from which the divergence of each sequence was subtracted."""
        coefficient = self._config.kl.coefficient
        penalties: dict[tuple[object, int], float] = {}
        for place, kl in zip(places, divergences, strict=True):
            penalties.setdefault((place.store, place.row), coefficient * kl)  # placeholders follow
        penalized = []
        for group in map(self._compared, groups):
            store, members = group.reference, group.trajectories
            left = tuple(
                replace(t, reward=t.reward - sum(penalties[store, one.row] for one in t.sequences))
                for t in members
            )
            penalized.append(replace(group, trajectories=left))
        advantages = {
            (group.reference, one.row): of_sequence
            for group, of_group in zip(penalized, self._advantages(penalized), strict=True)
            for t, of_sample in zip(group.trajectories, of_group, strict=True)
            for one, of_sequence in zip(t.sequences, of_sample, strict=True)
        }
        return [replace(p, advantage=advantages[p.store, p.row]) if p.weight > 0 else p for p in places]

    def _for_critic(
        self, groups: Sequence[GroupSummary], places: Sequence[SequencePlace]
    ) -> list[SequencePlace]:
        """The same sequences, weighted for the critic's loss; empty without a critic."""
        if self._config.critic is None:
            return []
        members = self._in_batch_order(groups, [t for group in groups for t in group.trajectories])
        weighted = self._weights([t.num_trained for t in members], self._config.critic.aggregation)
        repeated = [[weight] * len(t.sequences) for t, weight in zip(members, weighted, strict=True)]
        weights = filled_up(self._minibatches(repeated), lambda _: 0.0)
        return [replace(p, weight=weight, likelihood=None) for p, weight in zip(places, weights, strict=True)]

    def _weights(
        self, sampled: Sequence[int], aggregation: Aggregation, length: int | None = None
    ) -> list[float]:
        parts = self._minibatches(sampled)
        return [weight for part in parts for weight in sequence_weights(part, aggregation, length).tolist()]

    def _minibatches(self, values: Sequence[T]) -> list[Sequence[T]]:
        return minibatches(values, self._config.num_minibatches)


def _longest_of_groups(places: Sequence[SequencePlace]) -> list[int]:
    """Of each group whose tokens are compared the number of tokens of its longest sequence."""
    longest: defaultdict[int, int] = defaultdict(int)
    for place in places:
        if place.group is not None:
            longest[place.group] = max(longest[place.group], place.num_tokens)
    return [longest[number] for number in range(len(longest))]


def _places_of_players(groups: Sequence[GroupSummary]) -> Iterable[Mapping[int, list[int]]]:
    """For each player, by number of a group that trains: the places of its samples without an error."""
    found: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, group in enumerate(groups):
        if any(t.trains for t in group.trajectories):
            for place, t in enumerate(group.trajectories):
                if t.error is None:
                    found[t.player][number].append(place)
    return found.values()


def _of_samples(
    group: GroupSummary, compared: GroupSummary, advantages: Sequence[Advantage]
) -> list[list[Advantage]]:
    """Advantages of what was compared, as those of the sequences of each sample of the group."""
    of_members = map(branch_advantages, compared.trajectories, advantages)
    if compared is group:
        return list(of_members)
    return [list(chain(*islice(of_members, max(1, len(t.branches))))) for t in group.trajectories]


def with_flags(
    advantage: Advantage, turn_flags: Sequence[tuple[str, ...]], by_flag: Mapping[str, float]
) -> Advantage:
    """An advantage of a sequence, or those of its turns, with those of flagged turns in their place."""
    counting = [[name for name in by_flag if name in flags] for flags in turn_flags]
    if not any(counting):
        return advantage
    of_turns = advantage if isinstance(advantage, tuple) else (advantage,) * len(turn_flags)
    pairs = zip(of_turns, counting, strict=True)
    return tuple(by_flag[names[0]] if names else own for own, names in pairs)


def clipped(advantage: Advantage, bounds: AdvantageClipConfig | None) -> Advantage:
    """An advantage, or those of turns, within the bounds."""
    if bounds is None:
        return advantage
    low, high = -inf if bounds.low is None else bounds.low, inf if bounds.high is None else bounds.high
    if isinstance(advantage, tuple):
        return tuple(min(max(one, low), high) for one in advantage)
    return min(max(advantage, low), high)


def branch_advantages(sample: TrajectorySummary, advantage: Advantage) -> list[Advantage]:
    """Of each sequence: the sample's, or those of its own turns."""
    if isinstance(advantage, tuple):
        return list(_of_branches(sample, advantage))
    return [advantage] * len(sample.sequences)


def branches_as_samples(sample: TrajectorySummary) -> list[TrajectorySummary]:
    """Each with the rewards of its own turns; what is given for the whole is of the last one.

    The only sequence of a sample is the sample.
    """
    if not sample.branches:
        return [sample]
    of_turns = [sum(branch.turn_rewards) for branch in sample.branches]
    of_whole = sample.reward - sum(of_turns)
    last = sample.branches[-1]
    return [
        replace(
            sample,
            row=branch.row,
            reward=earned + (of_whole if branch is last else 0.0),
            rewards={},  # single ones are not known by branch
            num_tokens=branch.num_tokens,
            num_sampled=branch.num_sampled,
            num_turns=len(branch.turn_rewards),
            turn_rewards=branch.turn_rewards,
            turn_flags=branch.turn_flags,
            branches=(),
        )
        for branch, earned in zip(sample.branches, of_turns, strict=True)
    ]


def branch_rewards(sample: TrajectorySummary) -> list[tuple[float, ...]]:
    """Of the turns of each sequence, as the environment gave them; the rest of the total is at the last turn.

    What is earned after a branch is added to its last turn, without a discount.
    """
    before = sample.turn_rewards[:-1]
    rewards = (*before, sample.reward - sum(before)) if sample.turn_rewards else ()
    later, of_branches = 0.0, []
    for of_turns in reversed(_of_branches(sample, rewards)):
        *earlier, last = of_turns or (0.0,)
        of_branches.append((*earlier, last + later) if of_turns else ())
        later += sum(of_turns)
    return of_branches[::-1]


def _of_branches(sample: TrajectorySummary, of_turns: Sequence[T]) -> list[tuple[T, ...]]:
    turns = iter(of_turns)
    return [tuple(next(turns) for _ in sequence.turn_rewards) for sequence in sample.sequences]


def minibatches(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Equal parts; the first have one more where the players of a sample do not divide evenly."""
    size, rest = divmod(len(values), parts)
    starts = [part * size + min(part, rest) for part in range(parts + 1)]
    return [values[start:end] for start, end in pairwise(starts)]


def filled_up(
    of_minibatches: Sequence[Sequence[Sequence[T]]], filler: Callable[[T], T], multiple: int = 1
) -> list[T]:
    """The sequences of the samples of each minibatch, filled up to equally many, a multiple, for all."""
    filled = [list(chain(*samples)) for samples in of_minibatches]
    longest = max(map(len, filled))
    longest += -longest % multiple
    return [one for part in filled for one in (*part, *[filler(part[-1])] * (longest - len(part)))]


def placeholder(place: SequencePlace) -> SequencePlace:
    """A sequence that trains nothing, in a batch with this one."""
    return replace(
        place,
        num_tokens=PLACEHOLDER_TOKENS,
        advantage=0.0,
        weight=0.0,
        likelihood=None if place.likelihood is None else 0.0,
        rewards=None if place.rewards is None else (),
        runs=(),
    )
