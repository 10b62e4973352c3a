"""Datasets: a `data` section becomes a sequence of `Task`, or of examples to train on.

Sources are generated sums, reasoning-gym, and files of prompts, conversations, preference pairs, labeled
answers and labeled steps.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nemorl.config.data import (
    ArithmeticDataset,
    ConversationsDataset,
    DataConfig,
    DatasetConfig,
    FeedbackDataset,
    JsonlDataset,
    PreferenceDataset,
    ReasoningGymDataset,
    StepsDataset,
)
from nemorl.trajectories import Message, Task

from .json_lines import (
    DatasetError,
    LazyTasks,
    Row,
    boolean,
    column,
    completion,
    ending_with_assistant,
    messages,
    number,
    opening,
    parsed_rows,
    probability,
    read_rows,
    text_or_messages,
)


class ArithmeticTasks(LazyTasks):
    """Sums of two numbers of `digits` digits, padded with zeros: `07+34=` is answered by `041`."""

    def __init__(self, config: ArithmeticDataset, data: DataConfig) -> None:
        super().__init__(config.size, data)
        self._digits = config.digits
        self._base = 10**config.digits
        num_pairs = self._base**2
        if config.offset + config.size > num_pairs:
            raise DatasetError(
                f"arithmetic dataset: offset {config.offset} and size {config.size} ask for more than the "
                f"{num_pairs} pairs of {config.digits} digits; lower them or raise `digits`"
            )
        self._pairs = _draw(num_pairs, config.offset + config.size, config.seed)[config.offset :]
        self._seed, self._wrong_answers, self._slips = config.seed, config.wrong_answers, config.slips

    def _make(self, index: int) -> Task:
        pair = self._pairs[index]
        left, right = divmod(pair, self._base)
        prompt = f"{left:0{self._digits}d}+{right:0{self._digits}d}="
        answer = self._answer(pair, self._error(pair))
        return Task(index, opening(prompt, self._data), answer, {"prompt": prompt})

    def alternative(self, index: int) -> str:
        """The answer that is not recorded: a slip if the recorded one is right, else the right one."""
        pair = self._pairs[index]
        if self._error(pair):
            return self._answer(pair, 0)
        return self._answer(pair, random.Random(f"{self._seed} {pair} slip").choice(self._slips))

    def _answer(self, pair: int, error: int) -> str:
        left, right = divmod(pair, self._base)
        return f"{(left + right + error) % (2 * self._base):0{self._digits + 1}d}"

    def _error(self, pair: int) -> int:
        """By how much the recorded answer of a pair is off; always the same for the pair."""
        draw = random.Random(f"{self._seed} {pair}")
        return draw.choice(self._slips) if draw.random() < self._wrong_answers else 0


def _draw(population: int, count: int, seed: int) -> list[int]:
    """The first `count` numbers of a random order of `range(population)`.

    A Fisher-Yates shuffle that keeps only the places it has moved, so the order does not depend on `count`
    (random.sample's does) and a million million pairs cost nothing.
    """
    draws = random.Random(seed)
    moved: dict[int, int] = {}
    order = []
    for place in range(count):
        other = draws.randrange(place, population)
        order.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return order


Messages = tuple[Message, ...]
FileDataset = JsonlDataset | ConversationsDataset | PreferenceDataset | FeedbackDataset | StepsDataset


@dataclass(frozen=True)
class Dialogue:
    """An opening and the exchange to train on."""

    opening: Messages
    exchange: Messages  # begins and ends with the assistant's


@dataclass(frozen=True)
class Pair:
    """Two continuations of an opening, of which one is better."""

    opening: Messages
    chosen: Messages
    rejected: Messages
    margin: float = 0.0  # by how much


@dataclass(frozen=True)
class Feedback:
    """A continuation, good or not."""

    opening: Messages
    completion: Messages
    good: bool


@dataclass(frozen=True)
class Steps:
    """A continuation in steps, each right or wrong, or the one as likely as its label says."""

    opening: Messages
    steps: tuple[str, ...]
    labels: tuple[float, ...]  # 1 right, 0 wrong


def load_conversations(dataset: ConversationsDataset, data: DataConfig) -> list[Dialogue]:
    """All conversations of the file. Raises DatasetError."""
    return read_rows(dataset.path, lambda _, row: _conversation(row, dataset, data))


def load_pairs(dataset: DatasetConfig, data: DataConfig) -> list[Pair]:
    """Pairs of a `preference` dataset or of sums. Raises DatasetError."""
    if isinstance(dataset, PreferenceDataset):
        return read_rows(dataset.path, lambda _, row: _pair(row, dataset, data))
    sums = _sums(dataset, data, "pairs of answers")
    return [
        Pair(task.messages, _says(str(task.answer)), _says(sums.alternative(task.index))) for task in sums
    ]


def load_feedback(dataset: DatasetConfig, data: DataConfig) -> list[Feedback]:
    """Labeled answers of a `feedback` dataset, of pairs (both answers) or of sums. Raises DatasetError."""
    if isinstance(dataset, FeedbackDataset):
        return read_rows(dataset.path, lambda _, row: _feedback(row, dataset, data))
    if isinstance(dataset, PreferenceDataset):
        return [
            Feedback(pair.opening, answer, good)
            for pair in load_pairs(dataset, data)
            for answer, good in ((pair.chosen, True), (pair.rejected, False))
        ]
    sums = _sums(dataset, data, "judged answers")
    return [
        Feedback(task.messages, _says(str(task.answer) if good else sums.alternative(task.index)), good)
        for task in sums
        for good in (task.index % 2 == 0,)
    ]


def load_steps(dataset: DatasetConfig, data: DataConfig) -> list[Steps]:
    """Labeled steps of a `steps` dataset, or the digits of sums. Raises DatasetError."""
    if isinstance(dataset, StepsDataset):
        return read_rows(dataset.path, lambda _, row: _steps(row, dataset, data))
    sums = _sums(dataset, data, "judged steps")
    return [_digits(task, sums) for task in sums]


def tasks_of(
    dataset: ConversationsDataset | PreferenceDataset | FeedbackDataset | StepsDataset, data: DataConfig
) -> list[Task]:
    """The prompts of judged answers as tasks to sample; the answer is the last good one that is known."""
    match dataset:
        case ConversationsDataset():
            found: list[tuple[Messages, str | None]] = [
                ((*d.opening, *d.exchange[:-1]), d.exchange[-1].content)
                for d in load_conversations(dataset, data)
            ]
        case PreferenceDataset():
            found = [(pair.opening, pair.chosen[-1].content) for pair in load_pairs(dataset, data)]
        case FeedbackDataset():
            found = [(feedback.opening, None) for feedback in load_feedback(dataset, data)]
        case StepsDataset():
            found = [(steps.opening, None) for steps in load_steps(dataset, data)]
    return [Task(index, opening, answer) for index, (opening, answer) in enumerate(found)]


def _says(text: str) -> Messages:
    return (Message("assistant", text),)


def _sums(dataset: DatasetConfig, data: DataConfig, what: str) -> ArithmeticTasks:
    if not isinstance(dataset, ArithmeticDataset):
        raise DatasetError(f"a dataset `{dataset.name}` has no {what}")
    return ArithmeticTasks(dataset, data)


def _digits(task: Task, sums: ArithmeticTasks) -> Steps:
    right, other = str(task.answer), sums.alternative(task.index)
    answer = right if task.index % 2 == 0 else other
    labels = tuple(float(answer[:end] == right[:end]) for end in range(1, len(answer) + 1))
    return Steps(task.messages, tuple(answer), labels)


def _conversation(row: Row, config: ConversationsDataset, data: DataConfig) -> Dialogue:
    key = config.messages_key
    return _split(messages(column(row, key, "data.*.messages_key"), key), key, data)


def _split(
    conversation: Sequence[Message], key: str, data: DataConfig, shared: int | None = None
) -> Dialogue:
    """Before the assistant's first turn, or after the first `shared` messages, and from there on."""
    roles = [message.role for message in conversation]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    cut = first if shared is None else shared
    exchange = ending_with_assistant(conversation[cut:], key)
    return Dialogue(opening(conversation[:cut], data), exchange)


def _pair(row: Row, config: PreferenceDataset, data: DataConfig) -> Pair:
    chosen = column(row, config.chosen_key, "data.*.chosen_key")
    rejected = column(row, config.rejected_key, "data.*.rejected_key")
    margin = 0.0
    if config.margin_key is not None:
        margin = number(column(row, config.margin_key, "data.*.margin_key"), config.margin_key)
    if config.prompt_key is None:
        return _pair_of_conversations(
            messages(chosen, config.chosen_key), messages(rejected, config.rejected_key), margin, config, data
        )
    prompt = text_or_messages(column(row, config.prompt_key, "data.*.prompt_key"), config.prompt_key)
    return Pair(
        opening(prompt, data),
        completion(chosen, config.chosen_key),
        completion(rejected, config.rejected_key),
        margin,
    )


def _pair_of_conversations(
    chosen: list[Message], rejected: list[Message], margin: float, config: PreferenceDataset, data: DataConfig
) -> Pair:
    """The messages that both conversations share at their start are the prompt."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    better = _split(chosen, config.chosen_key, data, shared)
    worse = _split(rejected, config.rejected_key, data, shared)
    return Pair(better.opening, better.exchange, worse.exchange, margin)


def _feedback(row: Row, config: FeedbackDataset, data: DataConfig) -> Feedback:
    prompt = text_or_messages(column(row, config.prompt_key, "data.*.prompt_key"), config.prompt_key)
    return Feedback(
        opening(prompt, data),
        completion(column(row, config.completion_key, "data.*.completion_key"), config.completion_key),
        boolean(column(row, config.label_key, "data.*.label_key"), config.label_key),
    )


def _steps(row: Row, config: StepsDataset, data: DataConfig) -> Steps:
    prompt = text_or_messages(column(row, config.prompt_key, "data.*.prompt_key"), config.prompt_key)
    steps = column(row, config.steps_key, "data.*.steps_key")
    labels = column(row, config.labels_key, "data.*.labels_key")
    if not isinstance(steps, list) or not all(isinstance(step, str) and step for step in steps):
        raise DatasetError(f"key `{config.steps_key}`: expected a list of texts, not {steps!r}")
    if not isinstance(labels, list) or len(labels) != len(steps) or not steps:
        raise DatasetError(f"key `{config.labels_key}`: expected {len(steps)} labels, one per step")
    return Steps(
        opening(prompt, data),
        tuple(step + config.separator for step in steps),
        tuple(probability(label, config.labels_key) for label in labels),
    )


def load_tasks(dataset: DatasetConfig, data: DataConfig) -> Sequence[Task]:
    """The tasks of `data.train` or `data.validation`, with the prompt template and system prompt applied.

    Of answers that are compared the chosen one is the task's; of a conversation its last. Raises
    DatasetError.
    """
    match dataset:
        case JsonlDataset():
            return read_rows(dataset.path, lambda index, row: _jsonl_task(index, row, dataset, data))
        case ReasoningGymDataset():
            return ReasoningGymTasks(dataset, data)
        case ArithmeticDataset():
            return ArithmeticTasks(dataset, data)
        case ConversationsDataset() | PreferenceDataset() | FeedbackDataset() | StepsDataset():
            return tasks_of(dataset, data)


def _parse(index: int, row: Row, dataset: FileDataset, data: DataConfig) -> object:
    match dataset:
        case JsonlDataset():
            return _jsonl_task(index, row, dataset, data)
        case ConversationsDataset():
            return _conversation(row, dataset, data)
        case PreferenceDataset():
            return _pair(row, dataset, data)
        case FeedbackDataset():
            return _feedback(row, dataset, data)
        case StepsDataset():
            return _steps(row, dataset, data)


def file_errors(dataset: DatasetConfig, data: DataConfig, seconds: float = 30.0) -> list[str]:
    """Errors of the first lines that loading the dataset's file would refuse; none without a file.

    Reading ends after 5 errors or after `seconds`; loading checks what is left.
    """
    if isinstance(dataset, ArithmeticDataset | ReasoningGymDataset):
        return []
    deadline = time.monotonic() + seconds
    errors: list[str] = []
    try:
        for row in parsed_rows(dataset.path, lambda index, row: _parse(index, row, dataset, data)):
            if isinstance(row, DatasetError):
                errors.append(str(row))
            if len(errors) == 5 or time.monotonic() > deadline:
                break
    except DatasetError as error:
        errors.append(str(error))
    return errors


def load_dialogues(dataset: DatasetConfig, data: DataConfig) -> list[Dialogue]:
    """Training data of SFT: conversations, or tasks with their answers. Raises DatasetError."""
    if isinstance(dataset, ConversationsDataset):
        return load_conversations(dataset, data)
    return [_answered(task) for task in load_tasks(dataset, data)]


def _answered(task: Task) -> Dialogue:
    if task.answer is None:
        raise DatasetError(
            f"task {task.index} has no answer to train on: name its key in `data.train.answer_key`"
        )
    return Dialogue(task.messages, (Message("assistant", task.answer),))


class ReasoningGymTasks(LazyTasks):
    """Tasks of a reasoning-gym dataset; the columns carry what its own scorer needs."""

    def __init__(self, config: ReasoningGymDataset, data: DataConfig) -> None:
        super().__init__(config.size, data)
        import reasoning_gym  # takes a second to import

        self._config = config
        try:
            self._dataset = reasoning_gym.create_dataset(
                config.task, size=config.size, seed=config.seed, **config.options
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise DatasetError(
                f"reasoning_gym dataset `{config.task}` with options {config.options}: {error}"
            ) from error

    def _make(self, index: int) -> Task:
        item = self._dataset[index]
        columns = {
            "question": item["question"],
            "metadata": item["metadata"],
            "reasoning_gym_task": self._config.task,
            "reasoning_gym_options": self._config.options,
        }
        return Task(index, opening(item["question"], self._data), item["answer"], columns)


def _jsonl_task(index: int, row: Row, config: JsonlDataset, data: DataConfig) -> Task:
    prompt = text_or_messages(column(row, config.prompt_key, "data.*.prompt_key"), config.prompt_key)
    answer = None
    if config.answer_key is not None:
        answer = column(row, config.answer_key, "data.*.answer_key")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DatasetError(
                f"key `{config.answer_key}`: expected a text or a number, not {type(answer).__name__}"
            )
    return Task(index, opening(prompt, data), None if answer is None else str(answer), row)
