"""Datasets: a `data` section becomes a sequence of `Task`, or of examples to train on."""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

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
from nemorl.errors import NemorlError, shorten
from nemorl.trajectories import Message, Task

ROLES = ("system", "user", "assistant", "tool")

Row = dict[str, Any]
Messages = tuple[Message, ...]
FileDataset = JsonlDataset | ConversationsDataset | PreferenceDataset | FeedbackDataset | StepsDataset


class DatasetError(NemorlError, ValueError):
    """A dataset that cannot be read or made; the message names the file, line and key or the option."""


@dataclass(frozen=True)
class Dialogue:
    opening: Messages
    exchange: Messages  # begins and ends with the assistant's


@dataclass(frozen=True)
class Pair:
    opening: Messages
    chosen: Messages
    rejected: Messages
    margin: float = 0.0  # by how much the chosen one is better


@dataclass(frozen=True)
class Feedback:
    opening: Messages
    completion: Messages
    good: bool


@dataclass(frozen=True)
class Steps:
    opening: Messages
    steps: tuple[str, ...]
    labels: tuple[float, ...]  # probability that each is right


def load_tasks(dataset: DatasetConfig, data: DataConfig) -> Sequence[Task]:
    """Tasks of a dataset; the answer is the chosen one or a conversation's last. Raises DatasetError."""
    known: list[tuple[Messages, str | None]]
    match dataset:
        case JsonlDataset():
            return _read(dataset, data)
        case ReasoningGymDataset():
            return ReasoningGymTasks(dataset, data)
        case ArithmeticDataset():
            return ArithmeticTasks(dataset, data)
        case ConversationsDataset():
            dialogues = load_dialogues(dataset, data)
            known = [((*d.opening, *d.exchange[:-1]), d.exchange[-1].content) for d in dialogues]
        case PreferenceDataset():
            known = [(pair.opening, pair.chosen[-1].content) for pair in load_pairs(dataset, data)]
        case FeedbackDataset() | StepsDataset():
            known = [(row.opening, None) for row in _read(dataset, data)]
    return [Task(index, opening, answer) for index, (opening, answer) in enumerate(known)]


def load_dialogues(dataset: DatasetConfig, data: DataConfig) -> list[Dialogue]:
    """Training data of SFT: conversations, or tasks with their answers. Raises DatasetError."""
    if isinstance(dataset, ConversationsDataset):
        return _read(dataset, data)
    dialogues = []
    for task in load_tasks(dataset, data):
        if task.answer is None:
            raise DatasetError(f"task {task.index} has no answer to train on: set `data.train.answer_key`")
        dialogues.append(Dialogue(task.messages, _says(task.answer)))
    return dialogues


def load_pairs(dataset: DatasetConfig, data: DataConfig) -> list[Pair]:
    """Pairs of a `preference` dataset or of sums. Raises DatasetError."""
    if isinstance(dataset, PreferenceDataset):
        return _read(dataset, data)
    sums = _sums(dataset, data, "pairs of answers")
    return [Pair(task.messages, _says(answer), _says(other)) for task, answer, other in sums]


def load_feedback(dataset: DatasetConfig, data: DataConfig) -> list[Feedback]:
    """Labeled answers of a `feedback` dataset, of pairs (both answers) or of sums. Raises DatasetError."""
    if isinstance(dataset, FeedbackDataset):
        return _read(dataset, data)
    if isinstance(dataset, PreferenceDataset):
        return [
            Feedback(pair.opening, answer, good)
            for pair in load_pairs(dataset, data)
            for answer, good in ((pair.chosen, True), (pair.rejected, False))
        ]
    return [
        Feedback(task.messages, _says(other if task.index % 2 else answer), task.index % 2 == 0)
        for task, answer, other in _sums(dataset, data, "judged answers")
    ]


def load_steps(dataset: DatasetConfig, data: DataConfig) -> list[Steps]:
    """Labeled steps of a `steps` dataset, or the digits of sums. Raises DatasetError."""
    if isinstance(dataset, StepsDataset):
        return _read(dataset, data)
    steps = []
    for task, right, other in _sums(dataset, data, "judged steps"):
        answer = other if task.index % 2 else right
        labels = tuple(float(answer[:end] == right[:end]) for end in range(1, len(answer) + 1))
        steps.append(Steps(task.messages, tuple(answer), labels))
    return steps


def _says(text: str) -> Messages:
    return (Message("assistant", text),)


def _sums(dataset: DatasetConfig, data: DataConfig, kind: str) -> list[tuple[Task, str, str]]:
    if not isinstance(dataset, ArithmeticDataset):
        raise DatasetError(f"a dataset `{dataset.name}` has no {kind}")
    tasks = ArithmeticTasks(dataset, data)
    return [(task, str(task.answer), tasks.alternative(task.index)) for task in tasks]


NUM_ENCODED = 100  # rows of a file whose prompts a check encodes


def file_errors(
    dataset: DatasetConfig,
    data: DataConfig,
    seconds: float = 30.0,
    encode: Callable[[str], object] | None = None,
) -> list[str]:
    """Errors of the lines of the dataset's file, if any: the first 5, or those found within `seconds`.

    `encode` is called with the prompts of the first rows; what it raises is an error of the line.
    """
    if isinstance(dataset, ArithmeticDataset | ReasoningGymDataset):
        return []
    deadline = time.monotonic() + seconds
    errors: list[str] = []
    try:
        for row in _rows(dataset, data, encode):
            if isinstance(row, DatasetError):
                errors.append(str(row))
            if len(errors) == 5 or time.monotonic() > deadline:
                break
    except DatasetError as error:
        errors.append(str(error))
    return errors


def _read(dataset: FileDataset, data: DataConfig) -> list[Any]:
    """Raises DatasetError at the first wrong line, and for a file without rows."""
    rows = []
    for row in _rows(dataset, data):
        if isinstance(row, DatasetError):
            raise row
        rows.append(row)
    if not rows:
        raise DatasetError(f"{dataset.path} holds no tasks")
    return rows


def _rows(
    dataset: FileDataset, data: DataConfig, encode: Callable[[str], object] | None = None
) -> Iterator[Any]:
    """The rows of a file, or their errors. Raises DatasetError for an unreadable file."""
    index = 0
    try:
        # Not str.splitlines, which also splits at characters that JSON strings may hold, such as U+2028.
        with dataset.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = _parse(index, line, dataset, data)
                    if encode is not None and index < NUM_ENCODED:
                        _check_prompt(row.messages if isinstance(row, Task) else row.opening, encode)
                    yield row
                except DatasetError as error:
                    yield DatasetError(f"{dataset.path}, line {number}: {error}")
                index += 1
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read the dataset {dataset.path}: {error}") from error


def _check_prompt(prompt: Messages, encode: Callable[[str], object]) -> None:
    for message in prompt:
        try:
            encode(message.content)
        except Exception as error:  # tokenizers raises no narrower class
            text = shorten(repr(message.content))
            raise DatasetError(f"the policy's tokenizer cannot encode {text}: {error}") from error


def _parse(index: int, line: str, dataset: FileDataset, data: DataConfig) -> Any:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DatasetError(f"expected a JSON object, not {type(row).__name__}")
    fields = _Fields(row, dataset)
    match dataset:
        case JsonlDataset():
            prompt, answer = fields.prompt(), None
            if dataset.answer_key is not None:
                answer = fields.value("answer_key")
                if isinstance(answer, bool) or not isinstance(answer, str | int | float):
                    kind = type(answer).__name__
                    raise DatasetError(f"key `{dataset.answer_key}`: expected a text or a number, not {kind}")
            return Task(index, _opening(prompt, data), None if answer is None else str(answer), row)
        case ConversationsDataset():
            messages = fields.messages("messages_key")
            roles = [message.role for message in messages]
            first = roles.index("assistant") if "assistant" in roles else len(roles)
            exchange = _exchange(messages[first:], dataset.messages_key)
            return Dialogue(_opening(messages[:first], data), exchange)
        case PreferenceDataset():
            if dataset.prompt_key is not None:
                opening = _opening(fields.prompt(), data)
                chosen, rejected = fields.completion("chosen_key"), fields.completion("rejected_key")
            else:  # the messages that both conversations share at their start are the prompt
                both = fields.messages("chosen_key"), fields.messages("rejected_key")
                shared = 0
                while shared < min(map(len, both)) and both[0][shared] == both[1][shared]:
                    shared += 1
                chosen = _exchange(both[0][shared:], dataset.chosen_key)
                rejected = _exchange(both[1][shared:], dataset.rejected_key)
                opening = _opening(both[0][:shared], data)
            margin = 0.0
            if dataset.margin_key is not None:
                margin = float(fields.checked("margin_key", lambda v: type(v) in (int, float), "a number"))
            return Pair(opening, chosen, rejected, margin)
        case FeedbackDataset():
            opening, completion = _opening(fields.prompt(), data), fields.completion("completion_key")
            good = fields.checked("label_key", lambda value: value in (0, 1), "true or false")
            return Feedback(opening, completion, bool(good))
        case StepsDataset():
            prompt, steps, labels = fields.prompt(), fields.value("steps_key"), fields.value("labels_key")
            if not isinstance(steps, list) or not all(isinstance(step, str) and step for step in steps):
                raise DatasetError(f"key `{dataset.steps_key}`: expected a list of texts, not {steps!r}")
            key = f"key `{dataset.labels_key}`"
            if not isinstance(labels, list) or len(labels) != len(steps) or not steps:
                raise DatasetError(f"{key}: expected {len(steps)} labels, one per step")
            for label in labels:
                if not isinstance(label, int | float) or not 0 <= label <= 1:
                    raise DatasetError(f"{key}: expected true, false or a number from 0 to 1, not {label!r}")
            texts = tuple(step + dataset.separator for step in steps)
            return Steps(_opening(prompt, data), texts, tuple(map(float, labels)))


class _Fields:
    def __init__(self, row: Row, dataset: FileDataset) -> None:
        self._row, self._dataset = row, dataset

    def value(self, option: str) -> Any:
        key = getattr(self._dataset, option)
        if key in self._row:
            return self._row[key]
        keys = f"the keys are {sorted(self._row)}"
        raise DatasetError(f"key `{key}` is missing; {keys} (option `data.*.{option}`)")

    def checked(self, option: str, is_valid: Callable[[Any], bool], expected: str) -> Any:
        value = self.value(option)
        if not is_valid(value):
            raise DatasetError(f"key `{getattr(self._dataset, option)}`: expected {expected}, not {value!r}")
        return value

    def prompt(self) -> str | list[Message]:
        value = self.value("prompt_key")
        return value if isinstance(value, str) else self.messages("prompt_key")

    def completion(self, option: str) -> Messages:
        value, key = self.value(option), getattr(self._dataset, option)
        return _says(value) if isinstance(value, str) else _exchange(self.messages(option), key)

    def messages(self, option: str) -> list[Message]:
        key = getattr(self._dataset, option)
        value = self.checked(option, lambda v: type(v) is list and bool(v), "a text or a list of messages")
        for position, item in enumerate(value):
            where = f"key `{key}`, message {position}"
            if not isinstance(item, dict) or item.get("role") not in ROLES:
                raise DatasetError(f"{where}: `role` must be one of {', '.join(ROLES)}")
            if not isinstance(item.get("content"), str):
                raise DatasetError(f"{where}: `content` must be a text")
        return [Message(item["role"], item["content"]) for item in value]


def _exchange(messages: Sequence[Message], key: str) -> Messages:
    if not messages or messages[0].role != "assistant" or messages[-1].role != "assistant":
        roles = ", ".join(message.role for message in messages) or "nothing"
        rule = "the exchange must begin and end with an assistant's message"
        raise DatasetError(f"key `{key}`: {rule}, not {roles}")
    return tuple(messages)


def _opening(prompt: str | Sequence[Message], data: DataConfig) -> Messages:
    """The system prompt, then the prompt, with its text or last user message put into the template."""
    messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if not users:
        raise DatasetError("the prompt has no user message")
    # Not str.format: prompts and templates may hold braces of their own.
    filled = data.prompt_template.replace("{prompt}", messages[users[-1]].content)
    messages[users[-1]] = Message("user", filled)
    if data.system_prompt is None:
        return tuple(messages)
    if messages[0].role == "system":
        raise DatasetError("the prompt has a system message and `data.system_prompt` is set; keep one")
    return (Message("system", data.system_prompt), *messages)


class LazyTasks(Sequence[Task]):
    """A sequence whose tasks are made one by one, each a pure function of its index."""

    def __init__(self, size: int, data: DataConfig) -> None:
        self._size, self._data = size, data

    def _make(self, index: int) -> Task:
        raise NotImplementedError

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        positions = range(self._size)[index]
        return self._make(positions) if isinstance(positions, int) else [self._make(i) for i in positions]


class ArithmeticTasks(LazyTasks):
    """Sums of two numbers of `digits` digits, padded with zeros: `07+34=` is answered by `041`."""

    def __init__(self, config: ArithmeticDataset, data: DataConfig) -> None:
        super().__init__(config.size, data)
        self._config = config
        self._base = 10**config.digits
        num_pairs = self._base**2
        if config.offset + config.size > num_pairs:
            pairs = f"{num_pairs} pairs of {config.digits} digits"
            problem = f"offset {config.offset} and size {config.size} ask for more than the {pairs}"
            raise DatasetError(f"arithmetic dataset: {problem}; lower them or raise `digits`")
        self._pairs = _draw(num_pairs, config.offset + config.size, config.seed)[config.offset :]

    def _make(self, index: int) -> Task:
        pair, digits = self._pairs[index], self._config.digits
        left, right = divmod(pair, self._base)
        prompt = f"{left:0{digits}d}+{right:0{digits}d}="
        answer = self._answer(pair, self._error(pair))
        return Task(index, _opening(prompt, self._data), answer, {"prompt": prompt})

    def alternative(self, index: int) -> str:
        """A slip if the recorded answer is right, else the right answer."""
        pair = self._pairs[index]
        slip = random.Random(f"{self._config.seed} {pair} slip").choice(self._config.slips)
        return self._answer(pair, 0 if self._error(pair) else slip)

    def _answer(self, pair: int, error: int) -> str:
        total = sum(divmod(pair, self._base)) + error
        return f"{total % (2 * self._base):0{self._config.digits + 1}d}"

    def _error(self, pair: int) -> int:
        draw = random.Random(f"{self._config.seed} {pair}")
        return draw.choice(self._config.slips) if draw.random() < self._config.wrong_answers else 0


def _draw(population: int, count: int, seed: int) -> list[int]:
    """First of a Fisher-Yates shuffle of `range(population)`; random.sample's order depends on `count`."""
    draws = random.Random(seed)
    moved: dict[int, int] = {}
    order = []
    for place in range(count):
        other = draws.randrange(place, population)
        order.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return order


class ReasoningGymTasks(LazyTasks):
    def __init__(self, config: ReasoningGymDataset, data: DataConfig) -> None:
        super().__init__(config.size, data)
        from reasoning_gym import create_dataset  # takes a second to import

        self._config = config
        try:
            self._dataset = create_dataset(config.task, size=config.size, seed=config.seed, **config.options)
        except (ValueError, TypeError, AssertionError) as error:
            what = f"reasoning_gym dataset `{config.task}` with options {config.options}"
            raise DatasetError(f"{what}: {error}") from error

    def _make(self, index: int) -> Task:
        item = self._dataset[index]
        scorer = {"reasoning_gym_task": self._config.task, "reasoning_gym_options": self._config.options}
        columns = {"question": item["question"], "metadata": item["metadata"], **scorer}
        return Task(index, _opening(item["question"], self._data), item["answer"], columns)
