"""Measuring on the validation tasks, during training and on its own."""

from nemorl.config.experiment import Experiment
from nemorl.rollout.collector import sample_validation
from nemorl.rollout.groups import GroupSummary
from nemorl.session.session import Session

from .figures import validation_figures


async def validate(session: Session, experiment: Experiment) -> tuple[dict[str, float], list[GroupSummary]]:
    """Sample the validation tasks with the weights that generation holds; figures and groups."""
    config = experiment.algorithm.validation
    groups = await sample_validation(
        session.rollout,
        config.num_prompts or session.num_validation_tasks,
        config.num_generations_per_prompt,
        experiment.cluster.deadlines.generation,
        num_texts=experiment.logger.samples_per_step,
    )
    return validation_figures(groups, config.pass_reward, config.pass_at_k), groups
