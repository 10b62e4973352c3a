"""The rewards of a group: those of the environment and of `rewards`, weighted and summed."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemorl.config.environment import FunctionRewardConfig, JudgeRewardConfig, ModelRewardConfig, RewardConfig
from nemorl.trajectories import Conversation, StopReason, Task, Trajectory

from .find import RewardError
from .function import FunctionReward
from .scored import Answers, Failed, Scored, Scorer, ScoringMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredGroup:
    """Trajectories with their rewards, and how each reward's scoring went."""

    trajectories: list[Trajectory]
    scoring: Mapping[str, ScoringMetrics]


class Rewards:
    """All rewards of an experiment. Groups are scored while others sample."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        environment_weights: dict[str, float],
        chat: bool,
        seconds: float,
    ) -> None:
        """`seconds` bounds one call of a reward without a deadline of its own; `chat` gives functions
        messages instead of texts. Raises RewardError.
        """
        self._configs = configs
        self._weights = dict(environment_weights)
        self._chat = chat
        for config in configs:
            if config.metric in self._weights:
                raise RewardError(f"two rewards are named `{config.metric}`; a metric can hold only one")
            self._weights[config.metric] = config.weight
        self._scorers = [scorer(config, seconds) for config in configs]

    async def apply(self, task: Task, conversations: Sequence[Conversation]) -> ScoredGroup:
        """The conversations' trajectories with all rewards and their weighted sum; failed ones as they are.

        Where a reward cannot be computed the trajectory fails too: it holds the reason and trains nothing.
        Raises RewardError where a reward says `on_error: fail`, and for what no answer can have.
        """
        whole = [c for c in conversations if c.trajectory.error is None]
        answers = Answers(task, whole, self._chat)
        if not whole:
            return ScoredGroup([c.trajectory for c in conversations], {})
        found = await asyncio.gather(*(scorer.score(answers) for scorer in self._scorers))
        for config, scored in zip(self._configs, found, strict=True):
            self._log_failures(config, scored, task)
        scored_ones = (self._with_rewards(c.trajectory, found, row) for row, c in enumerate(whole))
        return ScoredGroup(
            [c.trajectory if c.trajectory.error is not None else next(scored_ones) for c in conversations],
            {c.metric: _metrics(scored) for c, scored in zip(self._configs, found, strict=True)},
        )

    async def close(self) -> None:
        """Release what rewards hold, such as connections."""
        await asyncio.gather(*(scorer.close() for scorer in self._scorers))

    def _log_failures(self, config: RewardConfig, scored: Scored, task: Task) -> None:
        """Log each reason. Raises RewardError with the first one if the config says `on_error: fail`."""
        reasons = Counter(score.reason for score in scored.scores if isinstance(score, Failed))
        for reason, count in reasons.items():
            if config.on_error == "fail":
                raise RewardError(reason)
            log.warning("task %d: %d trajectories lost: %s", task.index, count, reason)

    def _with_rewards(self, trajectory: Trajectory, found: Sequence[Scored], row: int) -> Trajectory:
        rewards = dict(trajectory.rewards)
        for config, scored in zip(self._configs, found, strict=True):
            score = scored.scores[row]
            if isinstance(score, Failed):
                return _failed(trajectory, score.reason)
            if score is not None:
                rewards[config.metric] = score
        unknown = sorted(rewards.keys() - self._weights.keys())
        if unknown:
            raise RewardError(f"the environment gave the rewards {', '.join(unknown)}, which have no weight")
        turns = tuple(replace(turn, reward=self._weighted(turn.rewards)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns, rewards=rewards, reward=self._weighted(rewards))

    def _weighted(self, rewards: dict[str, float]) -> float:
        return sum(self._weights[name] * value for name, value in rewards.items())


def scorer(config: RewardConfig, seconds: float) -> Scorer:
    """What computes a reward; `seconds` bounds a call that has no deadline of its own. Raises RewardError."""
    if isinstance(config, FunctionRewardConfig):
        return FunctionReward(config, seconds)
    if isinstance(config, JudgeRewardConfig):
        from .judge import JudgeReward  # with aiohttp, as the other

        return JudgeReward(config, seconds)
    from .model import ModelServiceReward

    assert isinstance(config, ModelRewardConfig), "a session gives models of the run's own an address"
    return ModelServiceReward(config, seconds)


def _metrics(scored: Scored) -> ScoringMetrics:
    errors = sum(isinstance(score, Failed) for score in scored.scores)
    return ScoringMetrics(errors, scored.seconds, scored.waited, scored.retries)


def _failed(trajectory: Trajectory, reason: str) -> Trajectory:
    """A trajectory without its reward is no evidence: it does not train and has no reward."""
    return replace(
        trajectory,
        loss_mask=np.zeros_like(trajectory.loss_mask),
        rewards={},
        reward=0.0,
        stop=StopReason.ERROR,
        error=reason,
    )
