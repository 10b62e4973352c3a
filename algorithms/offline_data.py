"""Training and validation data of an offline run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.config.algorithm import (
    DistillationConfig,
    KtoConfig,
    OfflineBase,
    PreferenceConfig,
    RewardModelConfig,
    SftConfig,
)
from nemorl.config.data import DatasetConfig
from nemorl.config.experiment import Experiment
from nemorl.data.datasets import load_dialogues, load_feedback, load_pairs, load_steps, load_tasks
from nemorl.data.examples import Encoder, Example
from nemorl.data.tokenizer import load_tokenizer, prompts_of
from nemorl.rollout.collector import TaskOrder

from .distillation import Distillation
from .offline import Objective, Supervised, Unit
from .pair_losses import Kto, Preference
from .reward_model import RewardModel
from .teachers import teachers_of_tasks


@dataclass(frozen=True)
class OfflineData:
    """The units of a run."""

    units: Sequence[Unit]
    held_out: Sequence[Unit]  # of the validation data

    def compared(
        self, order: TaskOrder, config: OfflineBase, position: int, num_steps: int
    ) -> Iterator[Example]:
        """The sequences that `num_steps` steps from `position`, and a validation, compare with a reference.

        These are the trained ones and those they are contrasted with; a sequence may come several times.
        """
        objective, size = objective_of(config), config.batch_size
        drawn = [order.task_index(place) for place in range(position, position + num_steps * size)]
        needed = [*(self.units[index] for index in sorted(set(drawn))), *self.held_out]
        yield from (example for unit in needed for example in unit.examples)
        for start in range(0, len(drawn), size):
            yield from objective.contrast([self.units[index] for index in drawn[start : start + size]])
        if self.held_out:
            yield from objective.contrast(self.held_out)


_OBJECTIVES: Mapping[type[OfflineBase], Callable[[Any], Objective]] = {
    SftConfig: Supervised,
    DistillationConfig: Distillation,
    PreferenceConfig: Preference,
    KtoConfig: Kto,
    RewardModelConfig: RewardModel,
}


def objective_of(config: OfflineBase) -> Objective:
    """The objective of the config's algorithm."""
    return _OBJECTIVES[type(config)](config)


def load_offline_data(experiment: Experiment, config: OfflineBase) -> OfflineData:
    """Read and encode the training and validation data. Raises DatasetError and ExampleError."""
    data, tokenizer = experiment.data, load_tokenizer(experiment.policy)
    encoder = Encoder(tokenizer, prompts_of(tokenizer, data.chat), experiment.policy.max_sequence_length)
    validated = data.validation if config.validation.scheduled else None
    held_out: Sequence[Unit] = []
    # Tasks of a file without answers can be sampled but have no loss.
    if validated is not None and not (validated.name == "jsonl" and validated.answer_key is None):
        held_out = _units(experiment, config, validated, encoder)[: config.validation.num_prompts]
    return OfflineData(_units(experiment, config, data.train, encoder), held_out)


def _units(
    experiment: Experiment, config: OfflineBase, dataset: DatasetConfig, encoder: Encoder
) -> Sequence[Unit]:
    data = experiment.data
    match config:
        case SftConfig():
            dialogues = load_dialogues(dataset, data)
            return [Unit((example,)) for example in encoder.dialogues(dialogues, config.train_on)]
        case DistillationConfig():
            examples = encoder.dialogues(load_dialogues(dataset, data), config.train_on)
            tasks, teachers = load_tasks(dataset, data), list(experiment.teachers)
            names = teachers_of_tasks(tasks, config.teacher_key, teachers)
            return [Unit((e,), teacher=name) for e, name in zip(examples, names, strict=True)]
        case KtoConfig():
            feedback = load_feedback(dataset, data)
            answers = encoder.feedback(feedback)
            return [
                Unit((example,), (1.0 if one.good else -1.0,))
                for example, one in zip(answers, feedback, strict=True)
            ]
        case RewardModelConfig() if config.loss.of_steps:
            return [Unit((example,)) for example in encoder.steps(load_steps(dataset, data))]
    pairs = load_pairs(dataset, data)
    return [
        Unit(both, (1.0, -1.0), pair.margin) for both, pair in zip(encoder.pairs(pairs), pairs, strict=True)
    ]
