"""The rewards of a group: what the environment paid and what reward functions say, weighted and summed."""

import asyncio
import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nemorl.config.env import RewardConfig
from nemorl.rollout.types import Conversation, Message, Task, Trajectory

from .deadline import attempt
from .find import RewardError, Scores, find_reward


class RewardFunction:
    """One reward of the `rewards` section: the function, its bound arguments and its weight."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises RewardError when the function cannot be found or does not take the arguments."""
        self.name = config.function.rpartition(":")[2]
        self.weight = config.weight
        self._arguments = config.arguments
        self._found = find_reward(config)

    async def score(self, columns: dict[str, list[Any]], count: int, seconds: float) -> list[float | None]:
        """One reward for each of `count` completions. Raises RewardError naming this function."""
        missing = sorted(self._found.needs - columns.keys())
        if missing:
            raise RewardError(
                f"reward `{self.name}` asks for {', '.join(missing)}; "
                f"the columns are {', '.join(sorted(columns))}"
            )
        given = {
            key: value for key, value in columns.items() if self._found.takes_any or key in self._found.takes
        }
        outcome = await attempt(self._call(given | self._arguments), f"reward `{self.name}`", seconds)
        if outcome.failure is not None:
            raise RewardError(outcome.failure)
        return self._checked(outcome.value, count)

    async def _call(self, arguments: dict[str, Any]) -> Scores:
        if inspect.iscoroutinefunction(self._found.function):
            return await self._found.function(**arguments)  # type: ignore[no-any-return]
        # In a thread, so that a slow function holds up no other conversation.
        return await asyncio.to_thread(self._blocking_call, arguments)

    def _blocking_call(self, arguments: dict[str, Any]) -> Scores:
        try:
            return self._found.function(**arguments)  # type: ignore[return-value]
        except SystemExit as exit_:  # it would end the event loop of all conversations without a word
            raise RuntimeError(f"it called sys.exit({exit_.code!r})") from exit_

    def _checked(self, scores: Scores | None, count: int) -> list[float | None]:
        if not isinstance(scores, list | tuple) or len(scores) != count:
            raise RewardError(
                f"reward `{self.name}` answered {scores!r} to {count} completions: one number each"
            )
        for score in scores:
            if score is not None and not (isinstance(score, int | float) and math.isfinite(score)):
                raise RewardError(
                    f"reward `{self.name}` answered {score!r}: a finite number or None is wanted"
                )
        return [None if score is None else float(score) for score in scores]


class Rewards:
    """All rewards of an experiment."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        environment_weights: dict[str, float],
        chat: bool,
        seconds: float,
    ) -> None:
        """`seconds` bounds one call of a function; `chat` gives functions messages instead of texts."""
        self._functions = [RewardFunction(config) for config in configs]
        self._weights = dict(environment_weights)
        self._chat = chat
        self._seconds = seconds
        for function in self._functions:
            if function.name in self._weights:
                raise RewardError(f"two rewards are named `{function.name}`; a metric can hold only one")
            self._weights[function.name] = function.weight

    async def apply(self, task: Task, conversations: Sequence[Conversation]) -> list[Trajectory]:
        """The conversations' trajectories with all rewards and their weighted sum; failed ones as they are.

        Raises RewardError.
        """
        whole = [c for c in conversations if c.trajectory.error is None]
        columns = self._columns(task, whole)
        earned = [dict(c.trajectory.rewards) for c in whole]
        if whole:
            answers = await asyncio.gather(
                *(function.score(columns, len(whole), self._seconds) for function in self._functions)
            )
            for function, scores in zip(self._functions, answers, strict=True):
                for rewards, score in zip(earned, scores, strict=True):
                    if score is not None:
                        rewards[function.name] = score
        paid = iter(earned)
        return [
            c.trajectory if c.trajectory.error is not None else self._pay(c.trajectory, next(paid))
            for c in conversations
        ]

    def _pay(self, trajectory: Trajectory, rewards: dict[str, float]) -> Trajectory:
        unknown = sorted(rewards.keys() - self._weights.keys())
        if unknown:
            raise RewardError(f"the environment pays {', '.join(unknown)}, to which it gave no weight")
        turns = tuple(replace(turn, reward=self._weighted(turn.rewards)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns, rewards=rewards, reward=self._weighted(rewards))

    def _weighted(self, rewards: dict[str, float]) -> float:
        return sum(self._weights[name] * value for name, value in rewards.items())

    def _columns(self, task: Task, conversations: Sequence[Conversation]) -> dict[str, list[Any]]:
        """Keyword arguments of reward functions: a list each, one entry a conversation."""
        columns: dict[str, list[Any]] = {
            key: [value] * len(conversations) for key, value in task.columns.items()
        }
        columns["answer"] = [task.answer] * len(conversations)
        columns["prompts"] = [self._shape(c.opening) for c in conversations]
        columns["completions"] = [self._shape(c.exchange) for c in conversations]
        columns["completion_ids"] = [
            c.trajectory.tokens[c.num_prompt_tokens :].tolist() for c in conversations
        ]
        return columns

    def _shape(self, messages: Sequence[Message]) -> str | list[dict[str, str]]:
        if self._chat:
            return [{"role": m.role, "content": m.content} for m in messages]
        return "".join(m.content for m in messages)
