"""Measuring on the validation tasks, during training and on its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemorl.config.experiment import Experiment
from nemorl.data.datasets import load_tasks
from nemorl.rollout.collector import sample_validation
from nemorl.rollout.dispatch import OnFinished, ignore
from nemorl.rollout.groups import GroupSummary
from nemorl.session.session import Session

from .validation import validation_figures


@dataclass(frozen=True)
class ValidationSet:
    """Tasks that are measured together."""

    name: str  # in `data.validation_sets`; empty: `data.validation`
    num_tasks: int

    @property
    def prefix(self) -> str:
        """What its figures' names begin with."""
        return f"validation/{self.name}" if self.name else "validation"


def validation_sets(experiment: Experiment) -> list[ValidationSet]:
    """All sets of one validation. Reads the whole datasets, so ask once a run. Raises DatasetError."""
    config, data = experiment.algorithm.validation, experiment.data
    datasets = {} if data.validation is None else {"": data.validation}
    sizes = {
        name: len(load_tasks(dataset, data)) for name, dataset in (datasets | data.validation_sets).items()
    }
    return [ValidationSet(name, min(config.num_prompts or size, size)) for name, size in sizes.items()]


async def validate(
    session: Session,
    experiment: Experiment,
    sets: Sequence[ValidationSet],
    on_finished: OnFinished = ignore,
) -> tuple[dict[str, float], list[GroupSummary]]:
    """Sample the tasks of the sets, one after the other, with the weights that generation holds.

    Figures, and the groups of all sets.
    """
    config = experiment.algorithm.validation
    figures: dict[str, float] = {}
    sampled: list[GroupSummary] = []
    for one in sets:
        groups = await sample_validation(
            session.rollout,
            one.num_tasks,
            config.num_generations_per_prompt,
            experiment.cluster.deadlines.generation,
            num_texts=experiment.logger.samples_per_step,
            on_finished=on_finished,
            of_set=one.name,
        )
        figures |= validation_figures(groups, config, one.prefix)
        sampled += groups
    return figures, sampled
