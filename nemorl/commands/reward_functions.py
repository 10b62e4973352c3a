"""The rewards of an experiment, tried before a run: none fails after the first samples."""

import json
from collections.abc import Iterator

from nemorl.config.data import ArithmeticDataset, DatasetConfig, JsonlDataset
from nemorl.config.environment import FunctionRewardConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import acted_on
from nemorl.errors import Violation
from nemorl.rewards.find import GIVEN, FoundReward, RewardError, find_reward
from nemorl.rewards.functions import BUILT_IN

_TRIED = {"completions": ["4"], "prompts": ["2+2="], "sampled_ids": [[1, 2]], "answer": ["4"]}


def reward_violations(experiment: Experiment) -> Iterator[Violation]:
    """Functions that are not there, or that ask for columns which the tasks do not have."""
    for place, config in enumerate(experiment.rewards):
        if not isinstance(config, FunctionRewardConfig):
            continue
        field = f"rewards.{place}.function"
        try:
            found = find_reward(config)
        except RewardError as error:
            yield Violation(field, config.function, str(error))
            continue
        yield from _tried(config, found, f"rewards.{place}.arguments")
        for path, dataset in acted_on(experiment.data, experiment.algorithm):
            columns = _columns(dataset)
            if columns is None:
                continue
            given = GIVEN[found.signature] | {"answer"}
            missing = sorted(found.needs - given - columns)
            if missing:
                mend = (
                    f"it asks for {', '.join(missing)}, and the tasks of {path} have the columns "
                    f"{', '.join(sorted(given | columns))}: give it a default, or bind it in "
                    f"rewards.{place}.arguments"
                )
                yield Violation(field, config.function, mend)


def _tried(config: FunctionRewardConfig, found: FoundReward, field: str) -> Iterator[Violation]:
    """A built-in reward is called once, which shows whether it can do with its arguments."""
    if config.function not in BUILT_IN or not found.needs <= _TRIED.keys():
        return
    given = {name: value for name, value in _TRIED.items() if name in found.takes}
    try:
        found.function(**given | config.arguments)
    except (TypeError, ValueError) as error:
        yield Violation(field, config.arguments, f"`{config.function}` cannot do with this: {error}")


def _columns(dataset: DatasetConfig) -> set[str] | None:
    """Columns of a dataset's own; None where a file cannot be read, which is told of elsewhere."""
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
