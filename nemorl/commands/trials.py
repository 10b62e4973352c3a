"""Parts of the user's own (losses, advantages, rewards, environments), tried before a run starts."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.advantages import CustomAdvantageConfig
from nemorl.config.algorithm.losses import CustomLossConfig
from nemorl.config.data import ArithmeticDataset, DatasetConfig, JsonlDataset
from nemorl.config.environment import CustomEnvConfig, FunctionRewardConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import acted_on, metric_names, reward_names
from nemorl.errors import NemorlError, Problem
from nemorl.rewards.find import GIVEN, FoundReward, RewardError, find_reward
from nemorl.rewards.functions import BUILT_IN

if TYPE_CHECKING:
    from nemorl.trajectories import Task


def custom_function_problems(experiment: Experiment) -> Iterator[Problem]:
    """Advantages and losses that cannot be found or called, or that return the wrong thing."""
    algorithm = experiment.algorithm
    if not isinstance(algorithm, OnlineConfig):
        return
    if isinstance(algorithm.advantage, CustomAdvantageConfig):
        from nemorl.algorithms.custom import smoke_test_advantage  # brings torch, which takes seconds

        try:
            smoke_test_advantage(algorithm.advantage, reward_names(experiment.env, experiment.rewards))
        except NemorlError as error:
            yield Problem("algorithm.advantage.function", algorithm.advantage.function, str(error))
    if isinstance(algorithm.loss, CustomLossConfig):
        from nemorl.algorithms.custom import smoke_test_loss  # brings torch as well

        try:
            taken = metric_names(algorithm, experiment.env, experiment.rewards, experiment.data)
            smoke_test_loss(algorithm.loss, taken)
        except NemorlError as error:
            yield Problem("algorithm.loss.function", algorithm.loss.function, str(error))


def environment_problems(experiment: Experiment) -> Iterator[Problem]:
    """A custom environment that cannot be found or constructed, or in which an episode fails."""
    if not isinstance(experiment.env, CustomEnvConfig):
        return
    from nemorl.rollout.custom_environment import custom_environment_problems

    seconds = experiment.cluster.deadlines.environment
    yield from custom_environment_problems(experiment.env, _first_task(experiment), seconds)


def _first_task(experiment: Experiment) -> "Task | None":
    """None where nothing is sampled, and where the data cannot be read, which other checks report."""
    from nemorl.data.datasets import load_tasks  # with numpy
    from nemorl.data.json_lines import DatasetError

    with suppress(DatasetError):
        for _, dataset in acted_on(experiment.data, experiment.algorithm):
            return load_tasks(dataset, experiment.data)[0]
    return None


_SAMPLE = {"completions": ["4"], "prompts": ["2+2="], "sampled_ids": [[1, 2]], "answer": ["4"]}


def reward_problems(experiment: Experiment, *, calls: bool = True) -> Iterator[Problem]:
    """Functions that cannot be found, that require columns which the tasks lack, or that score no answer.

    `calls=False` calls only built-in functions: those of the user may need what this machine lacks.
    """
    for place, config in enumerate(experiment.rewards):
        if not isinstance(config, FunctionRewardConfig):
            continue
        field = f"rewards.{place}.function"
        try:
            found = find_reward(config)
        except RewardError as error:
            yield Problem(field, config.function, str(error))
            continue
        missing = list(_missing_columns(experiment, found, place))
        if missing:
            yield from missing
        elif config.function in BUILT_IN:
            yield from _built_in_trial(config, found, f"rewards.{place}.arguments")
        elif calls and (reason := _scores_nothing(experiment, config)) is not None:
            fix = f"it scores no answer to the first task ({reason}); correct the function or its arguments"
            yield Problem(field, config.function, fix)


def _missing_columns(experiment: Experiment, found: FoundReward, place: int) -> Iterator[Problem]:
    for path, dataset in acted_on(experiment.data, experiment.algorithm):
        columns = _columns(dataset)
        if columns is None:
            continue
        given = GIVEN[found.signature] | {"answer"}
        missing = sorted(found.needs - given - columns)
        if missing:
            fix = (
                f"it requires {', '.join(missing)}, and the tasks of {path} have the columns "
                f"{', '.join(sorted(given | columns))}; give it a default, or set it in "
                f"rewards.{place}.arguments"
            )
            yield Problem(f"rewards.{place}.function", experiment.rewards[place].function, fix)  # type: ignore[union-attr]


def _built_in_trial(config: FunctionRewardConfig, found: FoundReward, field: str) -> Iterator[Problem]:
    """Call a built-in reward once, which shows arguments that it does not accept."""
    if not found.needs <= _SAMPLE.keys():
        return
    given = {name: value for name, value in _SAMPLE.items() if name in found.takes}
    try:
        found.function(**given | config.arguments)
    except (TypeError, ValueError) as error:
        yield Problem(field, config.arguments, f"`{config.function}` does not accept these: {error}")


def _scores_nothing(experiment: Experiment, config: FunctionRewardConfig) -> str | None:
    from nemorl.rewards.compose import smoke_test_reward  # with numpy

    task = _first_task(experiment)
    if task is None:
        return None
    seconds = config.deadline or experiment.cluster.deadlines.environment
    return smoke_test_reward(config, task, experiment.data.chat, seconds)


def _columns(dataset: DatasetConfig) -> set[str] | None:
    """Columns of a dataset; None where a file cannot be read, which the checks of the data report."""
    if isinstance(dataset, ArithmeticDataset):
        return {"prompt"}
    if not isinstance(dataset, JsonlDataset):
        return {"question", "metadata", "reasoning_gym_task", "reasoning_gym_options"}
    try:
        with dataset.path.open(encoding="utf-8") as lines:
            first = json.loads(next((line for line in lines if line.strip()), ""))
    except (OSError, ValueError):
        return None
    return set(first) if isinstance(first, dict) else None
