"""Functions of the user's own that an algorithm names: tried before a run, so that none fails in a step."""

from collections.abc import Iterator

from nemorl.config.algorithm import CustomLossConfig, OnlineConfig
from nemorl.config.algorithm.advantages import CustomAdvantageConfig
from nemorl.config.checks.metrics import figures, reward_names
from nemorl.config.experiment import Experiment
from nemorl.errors import NemorlError, Violation


def own_part_violations(experiment: Experiment) -> Iterator[Violation]:
    """Advantages and losses that are not there, cannot be called, or do not answer as they must."""
    algorithm = experiment.algorithm
    if not isinstance(algorithm, OnlineConfig):
        return
    if isinstance(algorithm.advantage, CustomAdvantageConfig):
        from nemorl.algorithms.custom import try_out  # brings torch, which takes seconds

        try:
            try_out(algorithm.advantage, reward_names(experiment.env, experiment.rewards))
        except NemorlError as error:
            yield Violation("algorithm.advantage.function", algorithm.advantage.function, str(error))
    if isinstance(algorithm.loss, CustomLossConfig):
        from nemorl.algorithms.policy_losses import try_out as try_out_loss  # brings torch as well

        try:
            taken = figures(algorithm, experiment.env, experiment.rewards, experiment.data)
            try_out_loss(algorithm.loss, taken)
        except NemorlError as error:
            yield Violation("algorithm.loss.function", algorithm.loss.function, str(error))
