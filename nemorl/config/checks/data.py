"""Tasks: enough of them, with what the run needs of each, and none both trained on and measured."""

from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig, DistillationConfig, SftConfig
from nemorl.config.data import (
    ArithmeticDataset,
    DataConfig,
    JsonlDataset,
    ReasoningGymDataset,
)
from nemorl.config.env import (
    CalculatorEnvConfig,
    ChainedSumsEnvConfig,
    EnvConfig,
    MathEnvConfig,
    ReasoningGymEnvConfig,
)
from nemorl.config.policy import PolicyConfig
from nemorl.errors import Violation

from .facts import acted_on, held_out


def template_holds_prompt(data: DataConfig) -> Iterator[Violation]:
    """A template without the prompt would ask the same of every task."""
    if "{prompt}" not in data.prompt_template:
        yield Violation(
            "data.prompt_template",
            data.prompt_template,
            "the task's own text has no place in it: write `{prompt}` where it belongs",
        )


def chat_parts_want_chat(data: DataConfig, policy: PolicyConfig) -> Iterator[Violation]:
    """Plain text has no messages and no template."""
    if data.chat:
        return
    mend = "data.chat is false, so prompts are plain text: remove this, or set data.chat to true"
    if data.system_prompt is not None:
        yield Violation("data.system_prompt", data.system_prompt, mend)
    if policy.tokenizer.chat_template is not None:
        yield Violation("policy.tokenizer.chat_template", str(policy.tokenizer.chat_template), mend)


def arithmetic_has_enough_pairs(data: DataConfig) -> Iterator[Violation]:
    """Tasks are drawn without replacement."""
    for path, dataset in (("data.train", data.train), *held_out(data)):
        if not isinstance(dataset, ArithmeticDataset):
            continue
        pairs = 10 ** (2 * dataset.digits)
        if dataset.offset + dataset.size > pairs:
            yield Violation(
                f"{path}.size",
                dataset.size,
                f"with offset {dataset.offset} these are more than the {pairs} pairs of "
                f"{dataset.digits} digits: lower size or offset, or raise digits",
            )


def slips_are_wrong(data: DataConfig) -> Iterator[Violation]:
    """Answers of slips go round, and one that is off by a whole round is right."""
    for path, dataset in (("data.train", data.train), *held_out(data)):
        if not isinstance(dataset, ArithmeticDataset):
            continue
        around = 2 * 10**dataset.digits
        for place, slip in enumerate(dataset.slips):
            if slip % around == 0:
                mend = f"an answer off by that is right, since answers go round at {around}: take another"
                yield Violation(f"{path}.slips.{place}", slip, mend)


def answers_to_learn(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """SFT learns the answers."""
    if (
        isinstance(algorithm, SftConfig | DistillationConfig)
        and isinstance(data.train, JsonlDataset)
        and data.train.answer_key is None
    ):
        mend = "SFT learns the answers: name the key that holds them"
        yield Violation("data.train.answer_key", None, mend)


def answers_to_compare(env: EnvConfig, data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Some environments compare with the task's answer."""
    if not isinstance(env, MathEnvConfig | CalculatorEnvConfig):
        return
    for path, dataset in acted_on(data, algorithm):
        if isinstance(dataset, JsonlDataset) and dataset.answer_key is None:
            mend = f"the environment `{env.name}` compares with the task's answer: name the key that holds it"
            yield Violation(f"{path}.answer_key", None, mend)


def reasoning_gym_belongs_together(
    env: EnvConfig, data: DataConfig, algorithm: AlgorithmConfig
) -> Iterator[Violation]:
    """Only the dataset that made a reasoning-gym task can score it."""
    if not isinstance(env, ReasoningGymEnvConfig):
        return
    for path, dataset in acted_on(data, algorithm):
        if not isinstance(dataset, ReasoningGymDataset):
            mend = "the environment `reasoning_gym` scores tasks of `reasoning_gym` datasets only: change one"
            yield Violation(f"{path}.name", dataset.name, mend)


def chained_sums_begin_with_one(
    env: EnvConfig, data: DataConfig, algorithm: AlgorithmConfig
) -> Iterator[Violation]:
    """Its first sum is the task's."""
    if not isinstance(env, ChainedSumsEnvConfig):
        return
    for path, dataset in acted_on(data, algorithm):
        if not isinstance(dataset, ArithmeticDataset):
            mend = "the environment `chained_sums` goes on from `arithmetic` datasets only: change one"
            yield Violation(f"{path}.name", dataset.name, mend)


def validation_shares_no_task(data: DataConfig) -> Iterator[Violation]:
    """What is trained on says nothing about what was learnt."""
    train_file = getattr(data.train, "path", None)
    for path, dataset in held_out(data):
        if train_file is not None and train_file == getattr(dataset, "path", None):
            mend = "training reads the same file: take another"
            yield Violation(f"{path}.path", str(train_file), mend)
        match data.train, dataset:
            case ArithmeticDataset() as train, ArithmeticDataset() as other if train.digits == other.digits:
                yield from _shared_sums(train, other, path)
            case ReasoningGymDataset() as train, ReasoningGymDataset() as other if train.task == other.task:
                yield from _shared_puzzles(train, other, path)


def _shared_sums(train: ArithmeticDataset, held_out: ArithmeticDataset, path: str) -> Iterator[Violation]:
    """One seed is one order of all pairs; two orders share tasks wherever they are cut."""
    if train.seed != held_out.seed:
        mend = (
            "another order of the same pairs shares tasks with training: take the seed of data.train, "
            f"{train.seed}, and an offset"
        )
        yield Violation(f"{path}.seed", held_out.seed, mend)
        return
    end = train.offset + train.size
    if held_out.offset < end and train.offset < held_out.offset + held_out.size:
        mend = f"training takes tasks {train.offset} to {end - 1} of the same order: begin at {end}"
        yield Violation(f"{path}.offset", held_out.offset, mend)


def _shared_puzzles(
    train: ReasoningGymDataset, held_out: ReasoningGymDataset, path: str
) -> Iterator[Violation]:
    """Reasoning-gym makes task i from the seed `seed + i`, so near seeds give nearly the same tasks."""
    if train.options != held_out.options:
        return
    end = train.seed + train.size
    if held_out.seed < end and train.seed < held_out.seed + held_out.size:
        mend = (
            f"task i is made from seed + i, and training takes {train.seed} to {end - 1}: take {end} or more "
            "to share no task"
        )
        yield Violation(f"{path}.seed", held_out.seed, mend)
