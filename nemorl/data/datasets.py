"""Datasets: a `data` section becomes a sequence of `Task`, or of examples to train on."""

import random
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, overload

from nemorl.config.data import (
    ArithmeticDataset,
    ConversationsDataset,
    CurriculumConfig,
    DataConfig,
    DatasetConfig,
    FeedbackDataset,
    GeneratorDataset,
    MixtureDataset,
    PreferenceDataset,
    ReasoningGymDataset,
    SeedsDataset,
    SourceConfig,
    StepsDataset,
    TaskRows,
    TasksDataset,
    TextsDataset,
)
from nemorl.config.library_datasets import AviaryDataset, VerifiersDataset, aviary_tasks, verifiers_tasks
from nemorl.errors import shorten
from nemorl.trajectories import Message, Task, ToolSchemas

from .messages import read_message, read_tools
from .rows import DatasetError as DatasetError
from .rows import Row, RowsDataset, no_rows, read_rows

Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Dialogue:
    opening: Messages
    exchange: Messages  # begins and ends with the assistant's
    tools: ToolSchemas = ()


@dataclass(frozen=True)
class Text:
    """A document without a prompt, which no template writes."""

    content: str
    truncate: bool  # to the longest sequence
    end_token: bool


@dataclass(frozen=True)
class Pair:
    opening: Messages
    chosen: Messages
    rejected: Messages
    margin: float = 0.0  # by how much the chosen one is better
    tools: ToolSchemas = ()


@dataclass(frozen=True)
class Feedback:
    opening: Messages
    completion: Messages
    good: bool
    tools: ToolSchemas = ()


@dataclass(frozen=True)
class Steps:
    opening: Messages
    steps: tuple[str, ...]
    labels: tuple[float, ...]  # probability that each is right
    tools: ToolSchemas = ()


def _load_source(source: SourceConfig, data: DataConfig) -> Sequence[Task]:
    tasks, limit = load_tasks(source.dataset, data), source.max_tasks
    return tasks if limit is None or limit >= len(tasks) else FirstTasks(tasks, limit, data)


def load_tasks(dataset: DatasetConfig | MixtureDataset, data: DataConfig) -> Sequence[Task]:
    """Tasks of a dataset. Raises DatasetError.

    The answer is the chosen one, a conversation's last, or the text of those without prompts.
    """
    known: list[tuple[Messages, str | None, ToolSchemas]]
    match dataset:
        case MixtureDataset(sources=sources):
            return MixedTasks({name: _load_source(source, data) for name, source in sources.items()}, data)
        case GeneratorDataset() | TasksDataset():
            return _read(dataset, data) if dataset.stream is None else StreamedTasks(dataset, data)
        case ReasoningGymDataset():
            return ReasoningGymTasks(dataset, data)
        case ArithmeticDataset():
            return ArithmeticTasks(dataset, data)
        case SeedsDataset():
            return SeedTasks(dataset, data)
        case VerifiersDataset():
            return VerifiersTasks(dataset, data)
        case AviaryDataset():
            return AviaryTasks(dataset, data)
        case ConversationsDataset():
            dialogues: list[Dialogue] = _read(dataset, data)
            known = [((*d.opening, *d.exchange[:-1]), d.exchange[-1].content, d.tools) for d in dialogues]
        case TextsDataset():
            known = [((), text.content, ()) for text in load_texts(dataset, data)]
        case PreferenceDataset():
            pairs = load_pairs(dataset, data)
            known = [(pair.opening, pair.chosen[-1].content, pair.tools) for pair in pairs]
        case FeedbackDataset() | StepsDataset():
            known = [(row.opening, None, row.tools) for row in _read(dataset, data)]
    return [Task(index, opening, answer, tools=tools) for index, (opening, answer, tools) in enumerate(known)]


def reads(tasks: Sequence[Task]) -> bool:
    """True if an item is read from a disk or a network when it is taken."""
    return getattr(tasks, "reads", False)


def source_sizes(tasks: Sequence[Task]) -> tuple[int, ...]:
    """Number of tasks of each source of a mixture, or of the only one."""
    return tasks.sizes if isinstance(tasks, MixedTasks) else (len(tasks),)


def load_dialogues(dataset: DatasetConfig, data: DataConfig) -> Sequence[Dialogue | Text]:
    """Training data of SFT: conversations, texts, or tasks with their answers. Raises DatasetError."""
    if isinstance(dataset, ConversationsDataset):
        return _read(dataset, data)
    if isinstance(dataset, TextsDataset):
        return load_texts(dataset, data)
    dialogues = []
    for task in load_tasks(dataset, data):
        if task.answer is None:
            raise DatasetError(f"task {task.index} has no answer to train on: set `data.train.answer_key`")
        dialogues.append(Dialogue(task.messages, _says(task.answer), task.tools))
    return dialogues


def load_texts(dataset: TextsDataset, data: DataConfig) -> list[Text]:
    """Raises DatasetError."""
    texts = [text for text in _read(dataset, data) if text]
    if not texts:
        raise DatasetError(f"no row of {dataset.source} has a text (option `data.*.text_key`)")
    if dataset.min_characters is not None:
        texts = joined(texts, dataset.min_characters)
    return [Text(text, dataset.truncate, dataset.end_token) for text in texts]


def joined(texts: Iterable[str], min_characters: int) -> list[str]:
    """Consecutive texts with line breaks between, each as few as have the characters; the last may have less.

    NeMo-RL's rule (`characters_per_sample`): line breaks do not count.
    """
    samples, parts, size = list[str](), list[str](), 0
    for text in texts:
        parts.append(text)
        size += len(text)
        if size >= min_characters:
            samples.append("\n".join(parts))
            parts, size = [], 0
    return samples + (["\n".join(parts)] if parts else [])


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
            Feedback(pair.opening, answer, good, pair.tools)
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


def row_errors(
    dataset: RowsDataset,
    data: DataConfig,
    seconds: float = 30.0,
    encode: Callable[[str], object] | None = None,
) -> list[str]:
    """Errors of the rows of a dataset, if any: the first 5, or those found within `seconds`.

    Of streams and generators the first rows are read.

    `encode` is called with the prompts of the first rows; what it raises is an error of the line.
    """
    deadline = time.monotonic() + seconds
    errors: list[str] = []
    try:
        some = None if getattr(dataset, "stream", None) is None else NUM_ENCODED
        for row in islice(_rows(dataset, data, encode), some):
            if isinstance(row, DatasetError):
                errors.append(str(row))
            if len(errors) == 5 or time.monotonic() > deadline:
                break
    except DatasetError as error:
        errors.append(str(error))
    return errors


def _read(dataset: RowsDataset, data: DataConfig) -> list[Any]:
    """Raises DatasetError at the first wrong line, and for a file without rows."""
    rows = []
    for row in _rows(dataset, data):
        if isinstance(row, DatasetError):
            raise row
        rows.append(row)
    if not rows:
        raise DatasetError(no_rows(dataset))
    return rows


def _rows(
    dataset: RowsDataset, data: DataConfig, encode: Callable[[str], object] | None = None, skip: int = 0
) -> Iterator[Any]:
    """The rows after the first `skip`, or their errors. Raises DatasetError for an unreadable source."""
    for index, (place, row) in enumerate(read_rows(dataset, skip), start=skip):
        try:
            if isinstance(row, DatasetError):
                raise row
            parsed = _parse(index, row, dataset, data)
            if encode is not None and index < NUM_ENCODED:
                _check_prompt(_opens(parsed), encode)
            yield parsed
        except DatasetError as error:
            yield DatasetError(f"{place}: {error}")


def _opens(row: Any) -> list[str]:
    """What is encoded of a row before what it says: its prompt, or all of a text."""
    if isinstance(row, str):
        return [row]
    return [message.content for message in (row.messages if isinstance(row, Task) else row.opening)]


def _check_prompt(prompt: Iterable[str], encode: Callable[[str], object]) -> None:
    for content in prompt:
        try:
            encode(content)
        except Exception as error:  # tokenizers raises no narrower class
            text = shorten(repr(content))
            raise DatasetError(f"the policy's tokenizer cannot encode {text}: {error}") from error


def _parse(index: int, row: Row, dataset: RowsDataset, data: DataConfig) -> Any:
    fields = _Fields(row, dataset)
    tools = fields.tools()
    match dataset:
        case TaskRows():
            prompt, answer = fields.prompt(), None
            if dataset.answer_key is not None:
                answer = fields.value("answer_key")
                if isinstance(answer, bool) or not isinstance(answer, str | int | float):
                    kind = type(answer).__name__
                    raise DatasetError(f"key `{dataset.answer_key}`: expected a text or a number, not {kind}")
            given = None if answer is None else str(answer)
            return Task(index, _opening(prompt, data), given, row, tools)
        case ConversationsDataset():
            messages = fields.messages("messages_key")
            roles = [message.role for message in messages]
            first = roles.index("assistant") if "assistant" in roles else len(roles)
            exchange = _exchange(messages[first:], dataset.messages_key)
            return Dialogue(_opening(messages[:first], data), exchange, tools)
        case TextsDataset():
            return (
                fields.checked("text_key", lambda value: value is None or type(value) is str, "a text") or ""
            )
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
            return Pair(opening, chosen, rejected, margin, tools)
        case FeedbackDataset():
            opening, completion = _opening(fields.prompt(), data), fields.completion("completion_key")
            good = fields.checked("label_key", lambda value: value in (0, 1), "true or false")
            return Feedback(opening, completion, bool(good), tools)
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
            return Steps(_opening(prompt, data), texts, tuple(map(float, labels)), tools)


_ABSENT = object()


class _Fields:
    def __init__(self, row: Row, dataset: RowsDataset) -> None:
        self._row, self._dataset = row, dataset

    def value(self, option: str) -> Any:
        key = getattr(self._dataset, option)
        if key in self._row:
            return self._row[key]
        value: Any = self._row  # a key with dots is inside of nested objects
        for part in key.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT:
            return value
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
        messages = []
        for position, item in enumerate(value):
            try:
                messages.append(read_message(item))
            except DatasetError as error:
                raise DatasetError(f"key `{key}`, message {position}: {error}") from error
        return messages

    def tools(self) -> ToolSchemas:
        """The tools of the row; none if it has no such column."""
        key = self._dataset.tools_key
        if key is None or (value := self._row.get(key)) is None:
            return ()
        try:
            return read_tools(value)
        except DatasetError as error:
            fix = "for a column of another meaning set `data.*.tools_key` to null"
            raise DatasetError(f"key `{key}`: {error}; {fix}") from error


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

    reads = False  # making a task may wait for a disk or a network

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


class FirstTasks(LazyTasks):
    """The first tasks of a source."""

    def __init__(self, tasks: Sequence[Task], limit: int, data: DataConfig) -> None:
        super().__init__(limit, data)
        self._tasks, self.reads = tasks, reads(tasks)

    def _make(self, index: int) -> Task:
        return self._tasks[index]


class MixedTasks(LazyTasks):
    """The tasks of several sources, in sequence; each has the name of its source as a column."""

    def __init__(self, sources: Mapping[str, Sequence[Task]], data: DataConfig) -> None:
        self._sources = list(sources.items())
        self.sizes = tuple(map(len, sources.values()))
        self._starts = [0, *accumulate(self.sizes)]
        super().__init__(self._starts[-1], data)
        self.reads = any(map(reads, sources.values()))

    def _make(self, index: int) -> Task:
        number = bisect_right(self._starts, index) - 1
        name, tasks = self._sources[number]
        task = tasks[index - self._starts[number]]
        return replace(task, index=index, columns=task.columns | {"source": name})


_MAX_WINDOWS = 4  # that groups of neighboring steps, and groups that are sampled again, are likely to use


class StreamedTasks(LazyTasks):
    """Tasks of a stream, read in windows. What lies behind is read again, from the start of its window.

    May be used by several threads. Raises DatasetError for a wrong row, and for a stream that ends early.
    """

    reads = True

    def __init__(self, dataset: TasksDataset | GeneratorDataset, data: DataConfig) -> None:
        assert dataset.stream is not None
        super().__init__(dataset.stream.size, data)
        self._dataset, self._length = dataset, dataset.stream.window
        self._windows: OrderedDict[int, list[Task]] = OrderedDict()
        self._rows: Iterator[Any] = iter(())
        self._next = -1  # the window that follows in the rows
        self._lock = threading.Lock()

    def _make(self, index: int) -> Task:
        number, place = divmod(index, self._length)
        with self._lock:
            if number not in self._windows:
                self._windows[number] = self._read_window(number)
            self._windows.move_to_end(number)
            while len(self._windows) > _MAX_WINDOWS:
                self._windows.popitem(last=False)
            window = self._windows[number]
        if place >= len(window):
            there, asked = number * self._length + len(window), len(self)
            field = "size" if isinstance(self._dataset, GeneratorDataset) else "stream.size"
            raise DatasetError(
                f"{self._dataset.source} has {there} rows, and {field} is {asked}; set it to {there} or less"
            )
        return window[place]

    def _read_window(self, number: int) -> list[Task]:
        if number != self._next:
            self._rows = _rows(self._dataset, self._data, skip=number * self._length)
        self._next = number + 1
        window = list(islice(self._rows, self._length))
        for row in window:
            if isinstance(row, DatasetError):
                self._next = -1
                raise row
        return window


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


class SeedTasks(LazyTasks):
    """Tasks of which the environment makes the text."""

    def __init__(self, config: SeedsDataset, data: DataConfig) -> None:
        super().__init__(config.size, data)
        self._first, self._columns = config.seed, config.columns

    def _make(self, index: int) -> Task:
        columns = {**self._columns, "seed": self._first + index}
        return Task(index, _opening("", self._data), columns=columns)


class VerifiersTasks(LazyTasks):
    """Tasks whose environment opens the conversation; the message is the library's prompt, for logs."""

    def __init__(self, config: VerifiersDataset, data: DataConfig) -> None:
        """Raises DatasetError."""
        end = None if config.size is None else config.offset + config.size
        try:
            tasks = verifiers_tasks(config.section)
            if end is None and not tasks.bounded:
                raise ValueError("the task set has no end; set size")
            self._rows = [task.data for task in islice(tasks, config.offset, end)]
            config.indices(config.offset + len(self._rows))
        except Exception as error:  # the library's and the user's code
            raise DatasetError(f"verifiers task set `{config.taskset}`: {error}") from error
        super().__init__(len(self._rows), data)
        self._section = config.section

    def _make(self, index: int) -> Task:
        row = self._rows[index]
        columns = {"verifiers_taskset": self._section, "verifiers_data": row.model_dump(mode="json")}
        return Task(index, _opening(row.prompt_text, self._data), columns=columns)


class AviaryTasks(LazyTasks):
    """Tasks of which the library makes the environment, and that the text."""

    def __init__(self, config: AviaryDataset, data: DataConfig) -> None:
        """Raises DatasetError."""
        try:
            tasks = aviary_tasks(config.dataset, config.options)
            available = len(tasks) if _has_length(tasks) else None
            self._indices = config.indices(available)
        except Exception as error:  # the library's and the user's code
            raise DatasetError(f"aviary task set `{config.dataset}`: {error}") from error
        super().__init__(len(self._indices), data)
        self._is_indexed = available is not None
        self._columns = {"aviary_dataset": config.dataset, "aviary_options": config.options}

    def _make(self, index: int) -> Task:
        position = self._indices[index] if self._is_indexed else None
        return Task(index, _opening("", self._data), columns=self._columns | {"aviary_index": position})


def _has_length(tasks: Any) -> bool:
    try:
        len(tasks)
    except TypeError:
        return False
    return True


def difficulties(tasks: Sequence[Task], curriculum: CurriculumConfig) -> list[float]:
    """The values of its column. Raises DatasetError for a task without a number, and for an empty stage."""
    levels, key = [], curriculum.key
    for index, task in enumerate(tasks):
        value = task.columns.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            there = ", ".join(sorted(task.columns)) or "none"
            raise DatasetError(f"task {index} has no number in column `{key}`; its columns are {there}")
        levels.append(float(value))
    for number, stage in enumerate(curriculum.stages):
        if not any(map(stage.admits, levels)):
            span = f"from {min(levels):g} to {max(levels):g}"
            raise DatasetError(f"stage {number} admits no task: the values of column `{key}` are {span}")
    return levels
