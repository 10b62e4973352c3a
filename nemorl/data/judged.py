"""Answers that somebody has judged: pairs, single ones, steps; and whole conversations."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemorl.config.data import (
    ArithmeticDataset,
    ConversationsDataset,
    DataConfig,
    DatasetConfig,
    FeedbackDataset,
    PreferenceDataset,
    StepsDataset,
)
from nemorl.trajectories import Message, Task

from .arithmetic import ArithmeticTasks
from .json_lines import (
    DatasetError,
    Row,
    boolean,
    column,
    completion,
    ending_with_assistant,
    messages,
    number,
    probability,
    read_rows,
    text_or_messages,
)
from .openings import opening

Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Dialogue:
    """An opening and all that followed it, to be learnt."""

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
    """All that stands in the file. Raises DatasetError."""
    return read_rows(dataset.path, lambda _, row: _conversation(row, dataset, data))


def load_pairs(dataset: DatasetConfig, data: DataConfig) -> list[Pair]:
    """Of a `preference` dataset or of sums. Raises DatasetError."""
    if isinstance(dataset, PreferenceDataset):
        return read_rows(dataset.path, lambda _, row: _pair(row, dataset, data))
    sums = _sums(dataset, data, "pairs of answers")
    return [
        Pair(task.messages, _says(str(task.answer)), _says(sums.alternative(task.index))) for task in sums
    ]


def load_feedback(dataset: DatasetConfig, data: DataConfig) -> list[Feedback]:
    """Of a `feedback` dataset, of pairs (both answers, each by itself) or of sums. Raises DatasetError."""
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
    """Of a `steps` dataset, or of sums, whose steps are the digits of an answer. Raises DatasetError."""
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
    """Both begin alike; what they share, up to the turn in which they part, is the prompt."""
    alike = 0
    while alike < min(len(chosen), len(rejected)) and chosen[alike] == rejected[alike]:
        alike += 1
    better = _split(chosen, config.chosen_key, data, alike)
    worse = _split(rejected, config.rejected_key, data, alike)
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
        raise DatasetError(f"key `{config.steps_key}`: a list of texts is wanted, not {steps!r}")
    if not isinstance(labels, list) or len(labels) != len(steps) or not steps:
        raise DatasetError(f"key `{config.labels_key}`: a list of {len(steps)} labels, one a step, is wanted")
    return Steps(
        opening(prompt, data),
        tuple(step + config.separator for step in steps),
        tuple(probability(label, config.labels_key) for label in labels),
    )
