"""Measuring: on what, how often and for which checkpoint."""

import difflib
from collections.abc import Iterator, Sequence

from nemorl.config.algorithm import AlgorithmConfig, ValidationConfig
from nemorl.config.data import DataConfig
from nemorl.config.env import EnvConfig
from nemorl.config.environment import RewardConfig
from nemorl.config.run import CheckpointingConfig
from nemorl.errors import ABSENT, Violation

from .metrics import figures

_WITH_CHECKS_OF_THEIR_OWN = {"metric", "higher_is_better", "save_hf"}


def data_to_validate_on(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """A validation needs tasks. The other way round is fine: `nemorl eval` uses them."""
    sampled = bool(data.validation_sets) and algorithm.generates
    if algorithm.validation.scheduled and data.validation is None and not sampled:
        mend = "algorithm.validation asks for it: name a dataset, or take period, at_start and at_end away"
        yield Violation("data.validation", ABSENT, mend)


def enough_tasks(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """A validation takes no task twice."""
    wanted, dataset = algorithm.validation.num_prompts, data.validation
    size = getattr(dataset, "size", None)  # files have as many as they have
    if wanted is not None and size is not None and wanted > size:
        mend = f"data.validation has {size} tasks: lower this, or raise data.validation.size"
        yield Violation("algorithm.validation.num_prompts", wanted, mend)


def pass_at_k_has_samples(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """pass@k looks at k samples of a task."""
    validation = algorithm.validation
    yield from _too_large(
        validation, "pass_at_k", validation.pass_at_k, "pass@{k} wants {k} samples of each task"
    )


def cons_at_k_has_samples(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """A vote wants voters."""
    validation = algorithm.validation
    yield from _too_large(validation, "cons_at_k", validation.cons_at_k, "{k} samples of each task vote")


def _too_large(validation: ValidationConfig, field: str, ks: Sequence[int], what: str) -> Iterator[Violation]:
    samples = validation.num_generations_per_prompt
    for k in ks:
        if k > samples:
            mend = (
                f"{what.format(k=k)}, and there are {samples}: raise "
                "algorithm.validation.num_generations_per_prompt, or leave this k out"
            )
            yield Violation(f"algorithm.validation.{field}", list(ks), mend)


def sets_are_sampled(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Further sets have no loss of their own: they are there to be sampled."""
    if data.validation_sets and algorithm.validation.scheduled and not algorithm.generates:
        mend = f"`{algorithm.name}` samples nothing here: remove this, or set algorithm.validation.generate"
        yield Violation("data.validation_sets", sorted(data.validation_sets), mend)


def saved_weights_come_from_a_checkpoint(checkpointing: CheckpointingConfig) -> Iterator[Violation]:
    """The Hugging Face folder is made of the last checkpoint."""
    if checkpointing.save_hf and not checkpointing.enabled:
        mend = "the folder is made from the last checkpoint: set checkpointing.enabled to true"
        yield Violation("checkpointing.save_hf", True, mend)


def best_checkpoint_is_measured(
    checkpointing: CheckpointingConfig,
    algorithm: AlgorithmConfig,
    env: EnvConfig,
    rewards: tuple[RewardConfig, ...],
    data: DataConfig,
) -> Iterator[Violation]:
    """The best checkpoint is found by a figure that the run has."""
    metric = checkpointing.metric
    if metric is None:
        if not checkpointing.higher_is_better:
            mend = "it belongs to checkpointing.metric, which is not given: give it, or remove this"
            yield Violation("checkpointing.higher_is_better", False, mend)
        return
    if not checkpointing.enabled:
        mend = "checkpointing.enabled is false, so no checkpoint is kept for it: remove one of the two"
        yield Violation("checkpointing.metric", metric, mend)
        return
    yield from _is_measured("checkpointing.metric", metric, algorithm, figures(algorithm, env, rewards, data))


def early_stop_is_measured(
    algorithm: AlgorithmConfig, env: EnvConfig, rewards: tuple[RewardConfig, ...], data: DataConfig
) -> Iterator[Violation]:
    """What ends a run is a figure that the run has."""
    if algorithm.early_stop is not None:
        known = figures(algorithm, env, rewards, data)
        yield from _is_measured("algorithm.early_stop.metric", algorithm.early_stop.metric, algorithm, known)


def _is_measured(
    field: str, metric: str, algorithm: AlgorithmConfig, known: frozenset[str]
) -> Iterator[Violation]:
    if metric.startswith("validation/") and algorithm.validation.period is None:
        mend = "it is measured by validation only: give algorithm.validation.period"
        yield Violation(field, metric, mend)
    elif metric not in known:
        close = difflib.get_close_matches(metric, known, n=1)
        mend = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(sorted(known))}"
        yield Violation(field, metric, f"the run has no such figure: {mend}")


def checkpoints_are_written(checkpointing: CheckpointingConfig) -> Iterator[Violation]:
    """How to write checkpoints says nothing where none is written."""
    if checkpointing.enabled:
        return
    for name in sorted(CheckpointingConfig.model_fields.keys() - {"enabled", *_WITH_CHECKS_OF_THEIR_OWN}):
        value = getattr(checkpointing, name)
        if value != CheckpointingConfig.model_fields[name].default:
            mend = "checkpointing.enabled is false, so no checkpoint is written: remove one of the two"
            yield Violation(f"checkpointing.{name}", value, mend)
