"""Tasks: enough of them, with what the run needs of each, and none both trained on and measured.

Measuring: on what, how often and for which checkpoint.
"""

import difflib
from collections.abc import Iterator, Sequence

from nemorl.config.algorithm import AlgorithmConfig, DistillationConfig, SftConfig, ValidationConfig
from nemorl.config.data import ArithmeticDataset, DataConfig, JsonlDataset, ReasoningGymDataset
from nemorl.config.environment import (
    CalculatorEnvConfig,
    ChainedSumsEnvConfig,
    EnvConfig,
    MathEnvConfig,
    ReasoningGymEnvConfig,
    RewardConfig,
)
from nemorl.config.facts import acted_on, held_out
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import CheckpointingConfig
from nemorl.errors import ABSENT, Problem

from .metrics import metrics


def template_holds_prompt(data: DataConfig) -> Iterator[Problem]:
    """A template without the prompt would ask the same of every task."""
    if "{prompt}" not in data.prompt_template:
        yield Problem(
            "data.prompt_template",
            data.prompt_template,
            "the task's own text has no place in it: write `{prompt}` where it belongs",
        )


def chat_parts_want_chat(data: DataConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Plain text has no messages and no template."""
    if data.chat:
        return
    fix = "data.chat is false, so prompts are plain text: remove this, or set data.chat to true"
    if data.system_prompt is not None:
        yield Problem("data.system_prompt", data.system_prompt, fix)
    if policy.tokenizer.chat_template is not None:
        yield Problem("policy.tokenizer.chat_template", str(policy.tokenizer.chat_template), fix)


def arithmetic_has_enough_pairs(data: DataConfig) -> Iterator[Problem]:
    """Tasks are drawn without replacement."""
    for path, dataset in (("data.train", data.train), *held_out(data)):
        if not isinstance(dataset, ArithmeticDataset):
            continue
        pairs = 10 ** (2 * dataset.digits)
        if dataset.offset + dataset.size > pairs:
            yield Problem(
                f"{path}.size",
                dataset.size,
                f"with offset {dataset.offset} these are more than the {pairs} pairs of "
                f"{dataset.digits} digits: lower size or offset, or raise digits",
            )


def slips_are_wrong(data: DataConfig) -> Iterator[Problem]:
    """Answers of slips go round, and one that is off by a whole round is right."""
    for path, dataset in (("data.train", data.train), *held_out(data)):
        if not isinstance(dataset, ArithmeticDataset):
            continue
        around = 2 * 10**dataset.digits
        for place, slip in enumerate(dataset.slips):
            if slip % around == 0:
                fix = f"an answer off by that is right, since answers go round at {around}: take another"
                yield Problem(f"{path}.slips.{place}", slip, fix)


def answers_to_learn(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """SFT learns the answers."""
    if (
        isinstance(algorithm, SftConfig | DistillationConfig)
        and isinstance(data.train, JsonlDataset)
        and data.train.answer_key is None
    ):
        fix = "SFT learns the answers: name the key that holds them"
        yield Problem("data.train.answer_key", None, fix)


def answers_to_compare(env: EnvConfig, data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Some environments compare with the task's answer."""
    if not isinstance(env, MathEnvConfig | CalculatorEnvConfig):
        return
    for path, dataset in acted_on(data, algorithm):
        if isinstance(dataset, JsonlDataset) and dataset.answer_key is None:
            fix = f"the environment `{env.name}` compares with the task's answer: name the key that holds it"
            yield Problem(f"{path}.answer_key", None, fix)


def reasoning_gym_belongs_together(
    env: EnvConfig, data: DataConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """Only the dataset that made a reasoning-gym task can score it."""
    if not isinstance(env, ReasoningGymEnvConfig):
        return
    for path, dataset in acted_on(data, algorithm):
        if not isinstance(dataset, ReasoningGymDataset):
            fix = "the environment `reasoning_gym` scores tasks of `reasoning_gym` datasets only: change one"
            yield Problem(f"{path}.name", dataset.name, fix)


def chained_sums_begin_with_one(
    env: EnvConfig, data: DataConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """Its first sum is the task's."""
    if not isinstance(env, ChainedSumsEnvConfig):
        return
    for path, dataset in acted_on(data, algorithm):
        if not isinstance(dataset, ArithmeticDataset):
            fix = "the environment `chained_sums` goes on from `arithmetic` datasets only: change one"
            yield Problem(f"{path}.name", dataset.name, fix)


def validation_shares_no_task(data: DataConfig) -> Iterator[Problem]:
    """What is trained on says nothing about what was learnt."""
    train_file = getattr(data.train, "path", None)
    for path, dataset in held_out(data):
        if train_file is not None and train_file == getattr(dataset, "path", None):
            fix = "training reads the same file: take another"
            yield Problem(f"{path}.path", str(train_file), fix)
        match data.train, dataset:
            case ArithmeticDataset() as train, ArithmeticDataset() as other if train.digits == other.digits:
                yield from _shared_sums(train, other, path)
            case ReasoningGymDataset() as train, ReasoningGymDataset() as other if train.task == other.task:
                yield from _shared_puzzles(train, other, path)


def _shared_sums(train: ArithmeticDataset, held_out: ArithmeticDataset, path: str) -> Iterator[Problem]:
    """One seed is one order of all pairs; two orders share tasks wherever they are cut."""
    if train.seed != held_out.seed:
        fix = (
            "another order of the same pairs shares tasks with training: take the seed of data.train, "
            f"{train.seed}, and an offset"
        )
        yield Problem(f"{path}.seed", held_out.seed, fix)
        return
    end = train.offset + train.size
    if held_out.offset < end and train.offset < held_out.offset + held_out.size:
        fix = f"training takes tasks {train.offset} to {end - 1} of the same order: begin at {end}"
        yield Problem(f"{path}.offset", held_out.offset, fix)


def _shared_puzzles(
    train: ReasoningGymDataset, held_out: ReasoningGymDataset, path: str
) -> Iterator[Problem]:
    """Reasoning-gym makes task i from the seed `seed + i`, so near seeds give nearly the same tasks."""
    if train.options != held_out.options:
        return
    end = train.seed + train.size
    if held_out.seed < end and train.seed < held_out.seed + held_out.size:
        fix = (
            f"task i is made from seed + i, and training takes {train.seed} to {end - 1}: take {end} or more "
            "to share no task"
        )
        yield Problem(f"{path}.seed", held_out.seed, fix)


_WITH_CHECKS_OF_THEIR_OWN = {"metric", "higher_is_better", "save_hf"}


def data_to_validate_on(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """A validation needs tasks. The other way round is fine: `nemorl eval` uses them."""
    sampled = bool(data.validation_sets) and algorithm.generates
    if algorithm.validation.scheduled and data.validation is None and not sampled:
        fix = "algorithm.validation asks for it: name a dataset, or take period, at_start and at_end away"
        yield Problem("data.validation", ABSENT, fix)


def enough_tasks(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """A validation takes no task twice."""
    wanted, dataset = algorithm.validation.num_prompts, data.validation
    size = getattr(dataset, "size", None)  # files have as many as they have
    if wanted is not None and size is not None and wanted > size:
        fix = f"data.validation has {size} tasks: lower this, or raise data.validation.size"
        yield Problem("algorithm.validation.num_prompts", wanted, fix)


def pass_at_k_has_samples(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """pass@k looks at k samples of a task."""
    validation = algorithm.validation
    yield from _too_large(
        validation, "pass_at_k", validation.pass_at_k, "pass@{k} wants {k} samples of each task"
    )


def cons_at_k_has_samples(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """A vote wants voters."""
    validation = algorithm.validation
    yield from _too_large(validation, "cons_at_k", validation.cons_at_k, "{k} samples of each task vote")


def _too_large(validation: ValidationConfig, field: str, ks: Sequence[int], what: str) -> Iterator[Problem]:
    samples = validation.num_generations_per_prompt
    for k in ks:
        if k > samples:
            fix = (
                f"{what.format(k=k)}, and there are {samples}: raise "
                "algorithm.validation.num_generations_per_prompt, or leave this k out"
            )
            yield Problem(f"algorithm.validation.{field}", list(ks), fix)


def sets_are_sampled(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Further sets have no loss of their own: they are there to be sampled."""
    if data.validation_sets and algorithm.validation.scheduled and not algorithm.generates:
        fix = f"`{algorithm.name}` samples nothing here: remove this, or set algorithm.validation.generate"
        yield Problem("data.validation_sets", sorted(data.validation_sets), fix)


def saved_weights_come_from_a_checkpoint(checkpointing: CheckpointingConfig) -> Iterator[Problem]:
    """The Hugging Face folder is made of the last checkpoint."""
    if checkpointing.save_hf and not checkpointing.enabled:
        fix = "the folder is made from the last checkpoint: set checkpointing.enabled to true"
        yield Problem("checkpointing.save_hf", True, fix)


def best_checkpoint_is_measured(
    checkpointing: CheckpointingConfig,
    algorithm: AlgorithmConfig,
    env: EnvConfig,
    rewards: tuple[RewardConfig, ...],
    data: DataConfig,
) -> Iterator[Problem]:
    """The best checkpoint is found by a figure that the run has."""
    metric = checkpointing.metric
    if metric is None:
        if not checkpointing.higher_is_better:
            fix = "it belongs to checkpointing.metric, which is not given: give it, or remove this"
            yield Problem("checkpointing.higher_is_better", False, fix)
        return
    if not checkpointing.enabled:
        fix = "checkpointing.enabled is false, so no checkpoint is kept for it: remove one of the two"
        yield Problem("checkpointing.metric", metric, fix)
        return
    yield from _is_measured("checkpointing.metric", metric, algorithm, metrics(algorithm, env, rewards, data))


def early_stop_is_measured(
    algorithm: AlgorithmConfig, env: EnvConfig, rewards: tuple[RewardConfig, ...], data: DataConfig
) -> Iterator[Problem]:
    """What ends a run is a figure that the run has."""
    if algorithm.early_stop is not None:
        known = metrics(algorithm, env, rewards, data)
        yield from _is_measured("algorithm.early_stop.metric", algorithm.early_stop.metric, algorithm, known)


def _is_measured(
    field: str, metric: str, algorithm: AlgorithmConfig, known: frozenset[str]
) -> Iterator[Problem]:
    if metric.startswith("validation/") and algorithm.validation.period is None:
        fix = "it is measured by validation only: give algorithm.validation.period"
        yield Problem(field, metric, fix)
    elif metric not in known:
        close = difflib.get_close_matches(metric, known, n=1)
        fix = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(sorted(known))}"
        yield Problem(field, metric, f"the run has no such figure: {fix}")


def checkpoints_are_written(checkpointing: CheckpointingConfig) -> Iterator[Problem]:
    """How to write checkpoints says nothing where none is written."""
    if checkpointing.enabled:
        return
    for name in sorted(CheckpointingConfig.model_fields.keys() - {"enabled", *_WITH_CHECKS_OF_THEIR_OWN}):
        value = getattr(checkpointing, name)
        if value != CheckpointingConfig.model_fields[name].default:
            fix = "checkpointing.enabled is false, so no checkpoint is written: remove one of the two"
            yield Problem(f"checkpointing.{name}", value, fix)
