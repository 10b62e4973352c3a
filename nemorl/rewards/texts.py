"""Texts of answers: of messages, between tags, and JSON."""

import json
from collections.abc import Sequence
from typing import Any

from nemorl.environments.tags import last_tagged

Completion = str | Sequence[dict[str, str]]


def last_text(completion: Completion) -> str:
    if isinstance(completion, str):
        return completion
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return said[-1] if said else ""


def said_in(completions: Sequence[Completion], tag: str | None) -> list[str | None]:
    """The last text of each; with `tag` what is inside its last `<tag>...</tag>`, None without one."""
    return [text if tag is None else last_tagged(text, tag) for text in map(last_text, completions)]


def json_in(text: str) -> tuple[bool, Any]:
    """Whether the complete text is JSON, which may be in a Markdown code block, and its value."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        text = text[3:-3]
        if text[:4].lower() == "json":
            text = text[4:]
    try:
        return True, json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")  # which Python reads as a number
