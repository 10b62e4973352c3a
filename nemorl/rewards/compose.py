"""The rewards of a group: those of the environment and of `rewards`, weighted and summed."""

import asyncio
import inspect
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from nemorl.config import environment as configs
from nemorl.config.base import call_within, counted
from nemorl.trajectories import Conversation, Message, StopReason, Task, Trajectory, Turn

from .find import RewardError, find_reward
from .scored import Answers, Columns, Failed, Score, Scored, Scorer, ScoringMetrics, Service, text_of
from .steps import Decode, StepRewards, with_step_rewards

log = logging.getLogger(__name__)


def given_columns(signature: configs.Signature, answers: Answers) -> Columns:
    """Columns that a function of this signature may be given, a list each with one entry an answer.

    verl's ground truth is the column `reward_model`'s, where the data are verl's, else the task's answer;
    its `extra_info` is the column of that name, else all columns.
    """
    columns, task = answers.columns, answers.task
    if signature == "trl":
        return columns
    prompts = [text_of(c.opening) for c in answers.conversations]
    texts = [text_of(c.exchange) for c in answers.conversations]
    if signature == "openrlhf":
        queries = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        return {**columns, "queries": queries, "prompts": prompts, "labels": columns["answer"]}
    of_verl = task.columns.get("reward_model")
    truth = of_verl.get("ground_truth", task.answer) if isinstance(of_verl, dict) else task.answer
    extra = task.columns.get("extra_info", task.columns)
    count = len(answers)
    return {**columns, "solution_str": texts, "ground_truth": [truth] * count, "extra_info": [extra] * count}


class FunctionReward(Scorer):
    """Calls the function once for a group, or, with verl's signature, once for each answer."""

    def __init__(self, config: configs.FunctionRewardConfig, seconds: float) -> None:
        """Raises RewardError when the function cannot be found or called."""
        super().__init__(config, seconds)
        self._arguments = config.arguments
        self._found = find_reward(config)
        self._key = config.score_key
        self._one_by_one = self._found.signature == "verl"

    @property
    def columns(self) -> frozenset[str]:
        """Names of its parameters."""
        return self._found.takes

    async def score(self, answers: Answers) -> Scored:
        """Raises RewardError for a column that the function requires and the task lacks."""
        columns = given_columns(self._found.signature, answers)
        if missing := sorted(self._found.needs - columns.keys()):
            given = ", ".join(sorted(columns))
            raise RewardError(f"{self.label} asks for {', '.join(missing)}; the columns are {given}")
        return await super().score(answers)

    def _part_size(self, answers: Answers) -> int:
        return 1 if self._one_by_one else len(answers)

    async def _ask(self, part: Answers) -> Any:
        found, columns = self._found, given_columns(self._found.signature, part)
        given: dict[str, Any] = {k: v for k, v in columns.items() if found.takes_any or k in found.takes}
        if self._one_by_one:
            given = {key: values[0] for key, values in given.items()}
        given |= self._arguments
        if inspect.iscoroutinefunction(found.function) or inspect.iscoroutinefunction(
            getattr(found.function, "__call__", None)  # noqa: B004  an object with an async __call__
        ):
            return await found.function(**given)
        return await in_thread(found.function, **given)

    def _read(self, value: Any, count: int) -> list[Score]:
        if isinstance(value, dict):
            key = self._key or {"verl": "score", "openrlhf": "rewards"}.get(self._found.signature, "")
            value = value.get(key, value)
        scores = value.tolist() if hasattr(value, "tolist") else value  # tensors and arrays
        if self._one_by_one:
            return [self._checked(scores)]
        if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != count:
            listed = isinstance(scores, Sequence) and not isinstance(scores, str)
            returned = counted(len(scores), "value") if listed else repr(scores)
            problem = f"{self.label} returned {returned} for {counted(count, 'completion')}"
            return [Failed(f"{problem}; return one per completion")] * count
        return list(map(self._checked, scores))

    def _checked(self, score: object) -> Score:
        if score is None:
            return None
        if isinstance(score, Real) and math.isfinite(score):
            return float(score)
        return Failed(f"{self.label} returned {score!r}; return a finite number or None")


async def in_thread(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function in a thread of its own, so that a slow one delays no other conversation.

    Unlike a pool's thread, one that never returns keeps neither later calls nor the process from ending.
    """
    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()  # so that a cancelled wait leaves it to the thread
    context = copy_context()

    def run() -> None:
        try:
            answer.set_result(context.run(function, **arguments))
        except (SystemExit, StopIteration) as exit_:  # which end an event loop or a future without a message
            error = RuntimeError(f"it raised {type(exit_).__name__}({', '.join(map(repr, exit_.args))})")
            error.__cause__ = exit_
            answer.set_exception(error)
        except Exception as failure:  # noqa: BLE001  raised where it is awaited
            answer.set_exception(failure)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return await asyncio.wrap_future(answer)


def smoke_test_reward(
    config: configs.FunctionRewardConfig, task: Task, chat: bool, seconds: float
) -> str | None:
    """Call a function on scripted answers to `task`, for `seconds` each. Return why it scores none, if so.

    It is not called again after a call that took all of them.
    """

    def scores(texts: Sequence[str]) -> Sequence[Score]:
        said = [(Message("assistant", text),) for text in texts]
        answers = Answers(task, [scripted(task, task.messages, exchange) for exchange in said], chat)
        return asyncio.run(FunctionReward(config, seconds).score(answers)).scores

    reasons, right = [], task.answer or ""
    for texts in ((right, ""), (right, right)):
        began = time.monotonic()
        try:
            found = call_within(2 * seconds + 5, partial(scores, texts))
        except (RewardError, TimeoutError) as error:
            return str(error)
        failures = [score.reason for score in found if isinstance(score, Failed)]
        if len(failures) < len(found):
            return None
        reasons += failures
        if time.monotonic() - began >= seconds:
            break
    return reasons[0].removeprefix(f"reward `{config.metric}`").lstrip(": ")


def scripted(
    task: Task,
    opening: Sequence[Message],
    exchange: Sequence[Message],
    rewards: Mapping[str, float] | None = None,
) -> Conversation:
    """A conversation that no model sampled, with the environment's `rewards`.

    Its tokens are placeholders, one a character of the policy's turns.
    """
    sampled = sum(len(message.content) for message in exchange if message.role == "assistant") + 1
    trajectory = Trajectory(
        tokens=np.zeros(1 + sampled, dtype=np.int32),
        loss_mask=np.array([False] + [True] * sampled),
        logprobs=np.zeros(1 + sampled, dtype=np.float32),
        versions=np.array([-1] + [0] * sampled, dtype=np.int32),
        turns=(Turn(1, 1 + sampled, StopReason.STOP),),
        rewards=dict(rewards or {}),
        reward=0.0,
        stop=StopReason.STOP,
        group=0,
        task=task.index,
    )
    return Conversation(trajectory, tuple(opening), tuple(exchange), 1)


@dataclass(frozen=True)
class ScoredGroup:
    trajectories: list[Trajectory]  # with their rewards
    scoring: Mapping[str, ScoringMetrics]  # by reward
    is_dropped: bool = False  # since a reward with `on_error: drop_group` failed
    earlier: Sequence[tuple[Trajectory, ...]] = ()  # further branches of each, with rewards of their turns


class Rewards:
    """All rewards of an experiment. Groups are scored while others sample."""

    def __init__(
        self,
        rewards: Sequence[configs.RewardConfig],
        weights: dict[str, float],
        chat: bool,
        seconds: float,
        outage_seconds: float = 0.0,
        decode: Decode | None = None,
    ) -> None:
        """`weights` are the environment's; `seconds` bound a call without a deadline, `outage_seconds` the
        wait for a service that does not answer. `decode`, of the policy's tokenizer, finds the tokens of
        steps. Raises RewardError.
        """
        self._decode = decode
        self._weights, self._chat = dict(weights), chat
        for config in rewards:
            if config.metric in self._weights:
                raise RewardError(f"two rewards are named `{config.metric}`; a metric can hold only one")
            self._weights[config.metric] = config.weight
        self._on_error = {config.metric: config.on_error for config in rewards}
        self._scorers = [scorer_of(config, seconds, outage_seconds) for config in rewards]
        self.services: list[Service] = [s.service for s in self._scorers if s.service is not None]

    async def apply(self, task: Task, conversations: Sequence[Conversation]) -> ScoredGroup:
        """The conversations' trajectories with all rewards and their weighted sum; failed ones as they are.

        Where a reward cannot be computed the trajectory fails too: it holds the reason and trains nothing,
        unless the reward says `on_error: zero`. Raises RewardError where it says `on_error: fail`, and for
        what no answer can have.
        """
        whole = [c for c in conversations if c.trajectory.error is None]
        if not whole:
            trajectories = [c.trajectory for c in conversations]
            return ScoredGroup(trajectories, {}, earlier=[c.earlier for c in conversations])
        answers, scoring = Answers(task, whole, self._chat), {}
        scored = list(await asyncio.gather(*(scorer.score(answers) for scorer in self._scorers)))
        is_dropped = False
        for number, (scorer, one) in enumerate(zip(self._scorers, scored, strict=True)):
            on_error = self._on_error[scorer.name]
            reasons = Counter(score.reason for score in one.scores if isinstance(score, Failed))
            for reason, count in reasons.items():
                if on_error == "fail":
                    raise RewardError(reason)
                consequence = "have the reward 0" if on_error == "zero" else "lost"
                log.warning("task %d: %d trajectories %s: %s", task.index, count, consequence, reason)
            is_dropped |= bool(reasons) and on_error == "drop_group"
            if on_error == "zero":
                scores = [0.0 if isinstance(score, Failed) else score for score in one.scores]
                scored[number] = replace(one, scores=scores)
            scoring[scorer.name] = ScoringMetrics(reasons.total(), one.seconds, one.waited, one.retries)
        in_steps = (self._with_steps(c, scored, row) for row, c in enumerate(whole))
        conversations = [next(in_steps) if c.trajectory.error is None else c for c in conversations]
        whole = [c for c in conversations if c.trajectory.error is None]
        of_whole = (self._with_rewards(c.trajectory, scored, row) for row, c in enumerate(whole))
        trajectories = [next(of_whole) if c.trajectory.error is None else c.trajectory for c in conversations]
        earlier = [tuple(map(self._with_turns, c.earlier)) for c in conversations]
        return ScoredGroup(trajectories, scoring, is_dropped, earlier)

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for scorer in self._scorers))

    def _with_steps(self, conversation: Conversation, scored: Sequence[Scored], row: int) -> Conversation:
        """The conversation with the rewards of its steps at their turns and tokens."""
        for scorer, one in zip(self._scorers, scored, strict=True):
            if isinstance(score := one.scores[row], StepRewards):
                assert self._decode is not None, "rewards of steps require the policy's tokenizer"
                weight = self._weights[scorer.name]
                conversation = with_step_rewards(conversation, scorer.name, weight, score, self._decode)
        return conversation

    def _with_rewards(self, trajectory: Trajectory, scored: Sequence[Scored], row: int) -> Trajectory:
        rewards = dict(trajectory.rewards)
        for scorer, one in zip(self._scorers, scored, strict=True):
            score = one.scores[row]
            if isinstance(score, Failed):
                # A trajectory without its reward is no evidence: it does not train and has no reward.
                mask, reason = np.zeros_like(trajectory.loss_mask), score.reason
                failed = replace(trajectory, loss_mask=mask, stop=StopReason.ERROR, error=reason)
                return replace(failed, rewards={}, reward=0.0)
            if score is not None:
                rewards[scorer.name] = score.total if isinstance(score, StepRewards) else score
        if unknown := sorted(rewards.keys() - self._weights.keys()):
            raise RewardError(f"the environment gave the rewards {', '.join(unknown)}, which have no weight")
        return replace(self._with_turns(trajectory), rewards=rewards, reward=self._weighted(rewards))

    def _with_turns(self, trajectory: Trajectory) -> Trajectory:
        turns = tuple(replace(turn, reward=self._weighted(turn.rewards)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns)

    def _weighted(self, rewards: dict[str, float]) -> float:
        return sum(self._weights[name] * value for name, value in rewards.items())


def scorer_of(config: configs.RewardConfig, seconds: float, outage_seconds: float) -> Scorer:
    """The scorer of a reward, with the bounds of `Rewards`. Raises RewardError."""
    if isinstance(config, configs.FunctionRewardConfig):
        return FunctionReward(config, seconds)
    from .services import JudgeReward, ModelServiceReward  # with aiohttp

    if isinstance(config, configs.JudgeRewardConfig):
        return JudgeReward(config, seconds, outage_seconds)
    assert isinstance(config, configs.ModelRewardConfig), "a session gives models of the run's own an address"
    return ModelServiceReward(config, seconds, outage_seconds)
