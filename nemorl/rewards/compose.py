"""The rewards of a group: those of the environment and of `rewards`, weighted and summed.

A reward that is a function of the answers, with the signature of TRL, OpenRLHF or verl.
"""

import asyncio
import inspect
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from nemorl.config.base import call_within
from nemorl.config.environment import (
    FunctionRewardConfig,
    JudgeRewardConfig,
    ModelRewardConfig,
    RewardConfig,
    Signature,
)
from nemorl.trajectories import Conversation, Message, StopReason, Task, Trajectory, Turn

from .find import RewardError, find_reward
from .scored import (
    Answers,
    Call,
    Calls,
    Columns,
    Failed,
    Score,
    Scored,
    Scorer,
    ScoringMetrics,
    in_thread,
    text_of,
)


def given_columns(signature: Signature, answers: Answers) -> Columns:
    """What a function of this signature may be given, a list each with one entry an answer.

    verl's ground truth is the column `reward_model`'s, where the data are verl's, else the task's answer;
    its `extra_info` is the column of that name, else all columns.
    """
    columns, task = answers.columns, answers.task
    if signature == "trl":
        return columns
    prompts = [text_of(c.opening) for c in answers.conversations]
    said = [text_of(c.exchange) for c in answers.conversations]
    if signature == "openrlhf":
        queries = [prompt + text for prompt, text in zip(prompts, said, strict=True)]
        return {**columns, "queries": queries, "prompts": prompts, "labels": columns["answer"]}
    of_verl = task.columns.get("reward_model")
    truth = of_verl.get("ground_truth", task.answer) if isinstance(of_verl, dict) else task.answer
    extra = task.columns.get("extra_info", task.columns)
    count = len(answers)
    return {**columns, "solution_str": said, "ground_truth": [truth] * count, "extra_info": [extra] * count}


def answered(signature: Signature, value: Any) -> Any:
    """What a function said as plain numbers: a list of them for a group, or one for an answer."""
    if isinstance(value, dict):
        value = value.get({"verl": "score", "openrlhf": "rewards"}.get(signature, ""), value)
    return value.tolist() if hasattr(value, "tolist") else value  # tensors and arrays


class FunctionReward:
    """Calls the function once for a group, or, with verl's signature, once for each answer."""

    def __init__(self, config: FunctionRewardConfig, seconds: float) -> None:
        """`seconds` bounds one call. Raises RewardError when the function cannot be found or called."""
        self.name = config.metric
        self._arguments = config.arguments
        self._found = find_reward(config)
        self._calls = Calls(f"reward `{self.name}`", config.max_concurrent, config.deadline or seconds)

    async def score(self, answers: Answers) -> Scored:
        """What raises, hangs or answers wrongly costs the answers of its call. Raises RewardError."""
        columns = given_columns(self._found.signature, answers)
        missing = sorted(self._found.needs - columns.keys())
        if missing:
            raise RewardError(
                f"reward `{self.name}` asks for {', '.join(missing)}; "
                f"the columns are {', '.join(sorted(columns))}"
            )
        given = {
            key: values
            for key, values in columns.items()
            if self._found.takes_any or key in self._found.takes
        }
        if self._found.signature == "verl":
            one_by_one = [{key: values[i] for key, values in given.items()} for i in range(len(answers))]
            calls = await asyncio.gather(*map(self._call, one_by_one))
            scores = [self._one(call) for call in calls]
        else:
            calls = [await self._call(given)]
            scores = self._each(calls[0], len(answers))
        return Scored(scores, sum(call.seconds for call in calls), sum(call.waited for call in calls))

    async def close(self) -> None:
        """Nothing is held."""

    async def _call(self, given: Mapping[str, Any]) -> Call[Any]:
        return await self._calls.run(lambda: self._run({**given, **self._arguments}))

    async def _run(self, arguments: dict[str, Any]) -> Any:
        """The value in a tuple, since None is an answer of its own."""
        function = self._found.function
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  an object of the user's with an async __call__
        ):
            return (await function(**arguments),)
        return (await in_thread(function, **arguments),)

    def _each(self, call: Call[Any], count: int) -> list[Score]:
        """The scores of a group, of which there must be as many as answers."""
        if call.outcome.value is None:
            return [Failed(str(call.outcome.failure))] * count
        scores = answered(self._found.signature, call.outcome.value[0])
        if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != count:
            return [
                Failed(f"reward `{self.name}` answered {scores!r} to {count} completions: one number each")
            ] * count
        return [self._checked(score) for score in scores]

    def _one(self, call: Call[Any]) -> Score:
        if call.outcome.value is None:
            return Failed(str(call.outcome.failure))
        return self._checked(answered(self._found.signature, call.outcome.value[0]))

    def _checked(self, score: object) -> Score:
        if score is None:
            return None
        if isinstance(score, Real) and math.isfinite(score):
            return float(score)
        return Failed(f"reward `{self.name}` answered {score!r}: return a finite number or None")


def smoke_test_reward(config: FunctionRewardConfig, task: Task, chat: bool, seconds: float) -> str | None:
    """Call a function on scripted answers to `task`. Return why it scores none of them; None if it does one.

    One group has the expected answer and an empty one, another the expected answer twice. `seconds` bounds
    each call.
    """

    async def scores(texts: Sequence[str]) -> Sequence[Score]:
        reward = FunctionReward(config, seconds)
        answers = Answers(task, [_scripted(task, text) for text in texts], chat)
        return (await reward.score(answers)).scores

    reasons = []
    for texts in ((task.answer or "", ""), (task.answer or "",) * 2):
        try:
            found = call_within(2 * seconds + 5, partial(lambda t: asyncio.run(scores(t)), texts))
        except (RewardError, TimeoutError) as error:
            return str(error)
        failures = [score.reason for score in found if isinstance(score, Failed)]
        if len(failures) < len(found):
            return None
        reasons += failures
    return reasons[0]


def _scripted(task: Task, text: str) -> Conversation:
    """A conversation in which the policy answers `text`; its tokens are placeholders, one a character."""
    sampled = len(text) + 1
    trajectory = Trajectory(
        tokens=np.zeros(1 + sampled, dtype=np.int32),
        loss_mask=np.array([False] + [True] * sampled),
        logprobs=np.zeros(1 + sampled, dtype=np.float32),
        versions=np.array([-1] + [0] * sampled, dtype=np.int32),
        turns=(Turn(1, 1 + sampled, StopReason.STOP),),
        rewards={},
        reward=0.0,
        stop=StopReason.STOP,
        group=0,
        task=task.index,
    )
    return Conversation(trajectory, task.messages, (Message("assistant", text),), 1)


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
