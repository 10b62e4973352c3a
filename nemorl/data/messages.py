"""Messages and tools in rows of datasets, in OpenAI's form.

    {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
     "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]}
    {"role": "tool", "tool_call_id": "call_1", "content": "3"}

Parquet and Arrow give every object of a column the same keys, with null where a row has none. A null in
`arguments` or in a tool is therefore left out; as JSON text they are taken as they are.
"""

import json
from collections.abc import Mapping
from typing import Any

from nemorl.trajectories import Message, ToolCall, ToolSchemas

from .rows import DatasetError

ROLES = ("system", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def read_message(item: object) -> Message:
    """Raises DatasetError, which names the key of the message."""
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        raise DatasetError(f"`role` must be one of {', '.join(ROLES)}")
    role, content = item["role"], item.get("content")
    if isinstance(content, list):
        content = _joined(content)
    if role != "assistant":
        if not isinstance(content, str):
            raise DatasetError("`content` must be a text")
        if role != "tool":
            return Message(role, content)
        return Message("tool", content, tool_call_id=item.get("tool_call_id"), name=item.get("name"))
    given = item.get("tool_calls") or []
    if not isinstance(given, list):
        raise DatasetError("`tool_calls` must be a list")
    calls = tuple(_call(number, call) for number, call in enumerate(given))
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise DatasetError("`content` must be a text, or null with `tool_calls`")
    reasoning = next((item[key] for key in REASONING_KEYS if item.get(key)), None)
    if not isinstance(reasoning, str | None):
        raise DatasetError("the reasoning must be a text")
    return Message("assistant", content, calls, reasoning)


def read_tools(value: object) -> ToolSchemas:
    """The tools of a row, a list or JSON text. Raises DatasetError."""
    value = _parsed(value) if isinstance(value, str) else _without_nulls(value)
    if not isinstance(value, list):
        raise DatasetError("expected a list of tools")
    for number, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": …, "parameters": …}}'
            raise DatasetError(f"tool {number}: expected {form}")
    return tuple(value)


def _joined(parts: list[Any]) -> str:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise DatasetError("`content` must be a text, or a list of parts with `text`")
    return "".join(part["text"] for part in parts)


def _call(number: int, given: object) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        raise DatasetError(f"tool call {number}: `function` is missing")
    name, arguments = function.get("name"), function.get("arguments")
    arguments = _parsed(arguments or "{}") if isinstance(arguments, str | None) else _without_nulls(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise DatasetError(f"tool call {number}: `name` must be a text and `arguments` a JSON object")
    return ToolCall(str(given.get("id") or f"call{number:05d}"), name, arguments)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"not JSON: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
