"""Measuring on the validation tasks, during training and on its own."""

from nemorl.config.experiment import Experiment
from nemorl.data.datasets import load_tasks
from nemorl.rollout.collector import sample_validation
from nemorl.rollout.dispatch import OnFinished, ignore
from nemorl.rollout.groups import GroupSummary
from nemorl.session.session import Session

from .figures import validation_figures


def num_validation_tasks(experiment: Experiment) -> int:
    """Tasks of one validation. Reads the whole dataset, so ask once a run. Raises DatasetError."""
    config, data = experiment.algorithm.validation, experiment.data
    assert data.validation is not None, "the checks of a config let no validation without its data pass"
    available = len(load_tasks(data.validation, data))
    return min(config.num_prompts or available, available)


async def validate(
    session: Session, experiment: Experiment, num_tasks: int, on_finished: OnFinished = ignore
) -> tuple[dict[str, float], list[GroupSummary]]:
    """Sample `num_tasks` validation tasks with the weights that generation holds; figures and groups."""
    config = experiment.algorithm.validation
    groups = await sample_validation(
        session.rollout,
        num_tasks,
        config.num_generations_per_prompt,
        experiment.cluster.deadlines.generation,
        num_texts=experiment.logger.samples_per_step,
        on_finished=on_finished,
    )
    return validation_figures(groups, config.pass_reward, config.pass_at_k), groups
