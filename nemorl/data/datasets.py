"""From a `data` section to tasks: every dataset is a sequence of `Task`."""

import json
import random
from collections.abc import Sequence
from typing import Any, overload

from nemorl.config.data import (
    ArithmeticDataset,
    DataConfig,
    DatasetConfig,
    JsonlDataset,
    ReasoningGymDataset,
)
from nemorl.errors import NemorlError
from nemorl.rollout.types import Message, Task

ROLES = ("system", "user", "assistant", "tool")


class DatasetError(NemorlError, ValueError):
    """A dataset that cannot be read or made; the message names the file, line and key or the option."""


def load_tasks(dataset: DatasetConfig, data: DataConfig) -> Sequence[Task]:
    """The tasks of `data.train` or `data.validation`, with the prompt template and system prompt applied.

    Raises DatasetError.
    """
    match dataset:
        case JsonlDataset():
            return _read_jsonl(dataset, data)
        case ReasoningGymDataset():
            return ReasoningGymTasks(dataset, data)
        case ArithmeticDataset():
            return ArithmeticTasks(dataset, data)


class LazyTasks(Sequence[Task]):
    """A sequence whose tasks are made one by one, each a pure function of its index."""

    def __init__(self, size: int, data: DataConfig) -> None:
        self._size = size
        self._data = data

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


# What a tired teacher gets wrong: a unit or two, or the carry.
SLIPS = (-10, -2, -1, 1, 2, 10)


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
        self._seed, self._wrong_answers = config.seed, config.wrong_answers

    def _make(self, index: int) -> Task:
        pair = self._pairs[index]
        left, right = divmod(pair, self._base)
        prompt = f"{left:0{self._digits}d}+{right:0{self._digits}d}="
        answer = f"{(left + right + self._error(pair)) % (2 * self._base):0{self._digits + 1}d}"
        return Task(index, opening(prompt, self._data), answer, {"prompt": prompt})

    def _error(self, pair: int) -> int:
        """By how much the recorded answer of a pair is off; always the same for the pair."""
        draw = random.Random(f"{self._seed} {pair}")
        return draw.choice(SLIPS) if draw.random() < self._wrong_answers else 0


class ReasoningGymTasks(LazyTasks):
    """Tasks of a reasoning-gym dataset; the columns carry what its own scorer needs."""

    def __init__(self, config: ReasoningGymDataset, data: DataConfig) -> None:
        super().__init__(config.size, data)
        import reasoning_gym  # a second of imports that other datasets need not pay

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


def opening(prompt: str | Sequence[Message], data: DataConfig) -> tuple[Message, ...]:
    """The messages that open a conversation: system prompt, then the prompt put into the template.

    The template is applied to a text, or to the last user message of a list. Raises DatasetError.
    """
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
        raise DatasetError(
            "the prompt has a system message and `data.system_prompt` is set; keep one of them"
        )
    return (Message("system", data.system_prompt), *messages)


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


def _read_jsonl(config: JsonlDataset, data: DataConfig) -> list[Task]:
    try:
        lines = config.path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read the dataset {config.path}: {error}") from error
    tasks: list[Task] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(_jsonl_task(len(tasks), line, config, data))
        except DatasetError as error:
            raise DatasetError(f"{config.path}, line {number}: {error}") from error
    if not tasks:
        raise DatasetError(f"{config.path} holds no tasks")
    return tasks


def _jsonl_task(index: int, line: str, config: JsonlDataset, data: DataConfig) -> Task:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DatasetError(f"a JSON object is wanted, not {type(row).__name__}")
    prompt = _column(row, config.prompt_key, "data.*.prompt_key")
    if not isinstance(prompt, str):
        prompt = _messages(prompt, config.prompt_key)
    answer = None
    if config.answer_key is not None:
        answer = _column(row, config.answer_key, "data.*.answer_key")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DatasetError(
                f"key `{config.answer_key}`: a text or a number is wanted, not {type(answer).__name__}"
            )
    return Task(index, opening(prompt, data), None if answer is None else str(answer), row)


def _column(row: dict[str, Any], key: str, option: str) -> Any:
    if key not in row:
        raise DatasetError(f"key `{key}` is missing; the keys are {sorted(row)} (option `{option}`)")
    return row[key]


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DatasetError(f"key `{key}`: a text or a list of messages is wanted, not {value!r}")
    messages = []
    for position, item in enumerate(value):
        if not isinstance(item, dict) or item.get("role") not in ROLES:
            raise DatasetError(f"key `{key}`, message {position}: `role` must be one of {', '.join(ROLES)}")
        if not isinstance(item.get("content"), str):
            raise DatasetError(f"key `{key}`, message {position}: `content` must be a text")
        messages.append(Message(item["role"], item["content"]))
    return messages
