"""Parts that datasets share: JSON Lines files and their keys, opening messages, tasks made on demand."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from nemorl.config.data import DataConfig
from nemorl.errors import NemorlError
from nemorl.trajectories import Message, Task

ROLES = ("system", "user", "assistant", "tool")

T = TypeVar("T")
Row = dict[str, Any]


class DatasetError(NemorlError, ValueError):
    """A dataset that cannot be read or made; the message names the file, line and key or the option."""


def parsed_rows(path: Path, parse: Callable[[int, Row], T]) -> Iterator[T | DatasetError]:
    """`parse(index, row)` of each line that is not blank, or the line's error, which names file and line.

    Raises DatasetError for a file that cannot be read.
    """
    index = 0
    try:
        # Not str.splitlines, which also splits at characters that JSON strings may hold, such as U+2028.
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield parse(index, _row(line))
                except DatasetError as error:
                    yield DatasetError(f"{path}, line {number}: {error}")
                index += 1
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read the dataset {path}: {error}") from error


def read_rows(path: Path, parse: Callable[[int, Row], T]) -> list[T]:
    """All rows of a file. Raises DatasetError at the first wrong line, and for a file without rows."""
    rows: list[T] = []
    for row in parsed_rows(path, parse):
        if isinstance(row, DatasetError):
            raise row
        rows.append(row)
    if not rows:
        raise DatasetError(f"{path} holds no tasks")
    return rows


def column(row: Row, key: str, option: str) -> Any:
    """The value of a key, which the field `option` of the config names. Raises DatasetError."""
    if key not in row:
        raise DatasetError(f"key `{key}` is missing; the keys are {sorted(row)} (option `{option}`)")
    return row[key]


def text_or_messages(value: Any, key: str) -> str | list[Message]:
    """A text as it is, or a list of messages. Raises DatasetError."""
    return value if isinstance(value, str) else messages(value, key)


def messages(value: Any, key: str) -> list[Message]:
    """A list of messages with `role` and `content`. Raises DatasetError."""
    if not isinstance(value, list) or not value:
        raise DatasetError(f"key `{key}`: expected a text or a list of messages, not {value!r}")
    found = []
    for position, item in enumerate(value):
        if not isinstance(item, dict) or item.get("role") not in ROLES:
            raise DatasetError(f"key `{key}`, message {position}: `role` must be one of {', '.join(ROLES)}")
        if not isinstance(item.get("content"), str):
            raise DatasetError(f"key `{key}`, message {position}: `content` must be a text")
        found.append(Message(item["role"], item["content"]))
    return found


def completion(value: Any, key: str) -> tuple[Message, ...]:
    """The completion of a prompt: a text, or messages that begin and end with the assistant's.

    Raises DatasetError.
    """
    if isinstance(value, str):
        return (Message("assistant", value),)
    return ending_with_assistant(messages(value, key), key)


def ending_with_assistant(exchange: Sequence[Message], key: str) -> tuple[Message, ...]:
    """The exchange itself, if the assistant begins and ends it. Raises DatasetError."""
    if not exchange or exchange[0].role != "assistant" or exchange[-1].role != "assistant":
        roles = ", ".join(message.role for message in exchange) or "nothing"
        raise DatasetError(
            f"key `{key}`: the exchange must begin and end with an assistant's message, not {roles}"
        )
    return tuple(exchange)


def boolean(value: Any, key: str) -> bool:
    """A true or a false, also as 1 and 0. Raises DatasetError."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise DatasetError(f"key `{key}`: expected true or false, not {value!r}")


def probability(value: Any, key: str) -> float:
    """A true or a false, or a number from 0 to 1. Raises DatasetError."""
    if isinstance(value, bool | int | float) and 0 <= value <= 1:
        return float(value)
    raise DatasetError(f"key `{key}`: expected true, false or a number from 0 to 1, not {value!r}")


def number(value: Any, key: str) -> float:
    """Raises DatasetError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DatasetError(f"key `{key}`: expected a number, not {value!r}")
    return float(value)


def _row(line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DatasetError(f"expected a JSON object, not {type(row).__name__}")
    return row


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
