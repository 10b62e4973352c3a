"""Rewards of steps: scores of a process reward model for the parts of an answer, at its turns and tokens.

    scores of the steps      0.9          0.8          0.3        probabilities that each is right
    reward after each        0.9          0.8          0.3        with `reduce: min`
    earned by each           0.9         -0.1         -0.5        the difference to the step before

What the steps earn adds up to the reward of the answer, so estimators that compare answers, turns or tokens
share out the same total.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add, mul

from nemorl.config.environment import StepReduction
from nemorl.trajectories import Conversation, Trajectory, Turn

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class StepScore:
    turn: int  # of the assistant's messages, from 0
    end: int | None  # characters of the message up to the end of the step; None is the end of the turn
    logit: float  # of the probability that the step is right


@dataclass(frozen=True)
class StepReward:
    turn: int
    end: int | None
    earned: float


@dataclass(frozen=True)
class StepRewards:
    steps: tuple[StepReward, ...]

    @property
    def total(self) -> float:
        return math.fsum(step.earned for step in self.steps)


def step_rewards(scores: Sequence[StepScore], reduce: StepReduction) -> StepRewards:
    """The rewards of the steps of an answer. Raises ValueError without a step."""
    if not scores:
        raise ValueError("the answer has no step")
    after = rewards_after([_probability(score.logit) for score in scores], reduce)
    earned = [later - before for before, later in zip([0.0, *after], after, strict=False)]
    return StepRewards(
        tuple(StepReward(score.turn, score.end, e) for score, e in zip(scores, earned, strict=True))
    )


def rewards_after(scores: Sequence[float], reduce: StepReduction) -> list[float]:
    """The reward of the answer if it ended after each of its steps."""
    match reduce:
        case "last":
            return list(scores)
        case "min":
            return list(accumulate(scores, min))
        case "prod":
            return list(accumulate(scores, mul))
        case "sum":
            return list(accumulate(scores, add))
        case "mean":
            return [total / count for count, total in enumerate(accumulate(scores, add), start=1)]


def _probability(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


def with_step_rewards(
    conversation: Conversation, name: str, weight: float, rewards: StepRewards, decode: Decode
) -> Conversation:
    """The conversation with the rewards at its turns and tokens; `decode` is the policy's tokenizer's.

    If its messages are not its turns, one by one, as in an agent's episode with several branches, the total
    is that of the whole only.
    """
    sequences = (*conversation.earlier, conversation.trajectory)
    said = [message for message in conversation.exchange if message.role == "assistant"]
    if len(said) != sum(len(one.turns) for one in sequences):
        return conversation
    placed, number = [], 0
    for sequence in sequences:
        turns = []
        for turn in sequence.turns:
            of_turn = [step for step in rewards.steps if step.turn == number]
            turns.append(_with_steps(sequence, turn, name, weight, of_turn, decode) if of_turn else turn)
            number += 1
        placed.append(replace(sequence, turns=tuple(turns)))
    *earlier, last = placed
    return replace(conversation, trajectory=last, earlier=tuple(earlier))


def _with_steps(
    sequence: Trajectory, turn: Turn, name: str, weight: float, steps: Sequence[StepReward], decode: Decode
) -> Turn:
    tokens = sequence.tokens[turn.start : turn.end].tolist()
    total = turn.rewards.get(name, 0.0) + math.fsum(step.earned for step in steps)
    placed = [
        (turn.start + token_at(tokens, step.end, decode), weight * step.earned)
        for step in steps
        if tokens and step.end is not None
    ]
    return replace(turn, rewards=turn.rewards | {name: total}, steps=(*turn.steps, *placed))


def token_at(tokens: Sequence[int], end: int, decode: Decode) -> int:
    """The first token with which the text has `end` characters; the last one if it has fewer."""
    low, high = 0, len(tokens) - 1
    while low < high:
        middle = (low + high) // 2
        if len(decode(tokens[: middle + 1])) >= end:
            high = middle
        else:
            low = middle + 1
    return low
