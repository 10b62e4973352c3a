"""The reward functions of an experiment, imported before a run: none fails after the first samples."""

import json
from collections.abc import Iterator

from nemorl.config.checks.facts import acted_on
from nemorl.config.data import ArithmeticDataset, DatasetConfig, JsonlDataset
from nemorl.config.experiment import Experiment
from nemorl.errors import Violation
from nemorl.rewards.find import GIVEN, RewardError, find_reward


def reward_violations(experiment: Experiment) -> Iterator[Violation]:
    """Functions that are not there, or that ask for columns which the tasks do not have."""
    for place, config in enumerate(experiment.rewards):
        field = f"rewards.{place}.function"
        try:
            found = find_reward(config)
        except RewardError as error:
            yield Violation(field, config.function, str(error))
            continue
        for path, dataset in acted_on(experiment.data, experiment.algorithm):
            columns = _columns(dataset)
            if columns is None:
                continue
            missing = sorted(found.needs - GIVEN - columns)
            if missing:
                mend = (
                    f"it asks for {', '.join(missing)}, and the tasks of {path} have the columns "
                    f"{', '.join(sorted(GIVEN | columns))}: give it a default, or bind it in "
                    f"rewards.{place}.arguments"
                )
                yield Violation(field, config.function, mend)


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
