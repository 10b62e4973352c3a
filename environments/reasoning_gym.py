"""Any reasoning-gym task, scored by the dataset that made it."""

import json
from functools import lru_cache
from typing import Any

from nemorl.config.environment import ReasoningGymEnvConfig
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

from .scoring_process import ScoringProcess
from .tags import last_tagged

SECONDS = 10.0


class ReasoningGymEnvironment(Environment):
    """One answer; the reward `reasoning_gym` is the dataset's own score, 0 to 1."""

    def __init__(self, scoring: ScoringProcess, answer_tag: str | None) -> None:
        self._scoring, self._answer_tag = scoring, answer_tag
        self._task: Task | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's own opening. Raises ValueError for a task of another dataset."""
        if "reasoning_gym_task" not in task.columns:
            fix = "set `data` to a reasoning_gym dataset"
            raise ValueError(f"task {task.index} was not made by reasoning-gym: {fix}")
        self._task = task
        return task.messages

    async def step(self, action: Action) -> Step:
        assert self._task is not None, "step before reset"
        columns = self._task.columns
        entry = {key: columns[key] for key in ("question", "metadata")} | {"answer": self._task.answer}
        answer = action.text if self._answer_tag is None else last_tagged(action.text, self._answer_tag) or ""
        options = json.dumps(columns["reasoning_gym_options"], sort_keys=True)
        arguments = columns["reasoning_gym_task"], options, answer, entry
        return await self._scoring.step("reasoning_gym", score_entry, *arguments)


class ReasoningGymFactory(EnvironmentFactory):
    def __init__(self, config: ReasoningGymEnvConfig) -> None:
        self.reward_weights, self._answer_tag = config.reward_weights, config.answer_tag
        self._scoring = ScoringProcess("reasoning_gym", SECONDS)

    def create(self) -> ReasoningGymEnvironment:
        return ReasoningGymEnvironment(self._scoring, self._answer_tag)

    async def answer_in(self, text: str) -> str | None:
        return text if self._answer_tag is None else last_tagged(text, self._answer_tag)

    async def close(self) -> None:
        await self._scoring.close()


def score_entry(task: str, options: str, answer: str, entry: dict[str, Any]) -> float:
    return float(_dataset(task, options).score_answer(answer, entry))


@lru_cache
def _dataset(task: str, options: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(options))
