"""Tool calls in the text of an answer, as Hermes and Qwen models write them.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

import json
import re
from typing import Any

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def tool_calls(text: str, name: str) -> list[dict[str, Any]] | None:
    """The calls in a text that begins with one, as OpenAI's API has them; None when one cannot be read.

    `name` of the answer makes their ids.
    """
    calls: list[dict[str, Any]] = []
    for found in _CALL.finditer(text):
        try:
            call = json.loads(found[1])
        except ValueError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(
            {
                "id": f"call_{name}_{len(calls)}",
                "type": "function",
                "function": {"name": call["name"], "arguments": written},
            }
        )
    return calls or None
