"""Who acts in an environment without a model: random turns, given ones (`scripted_agent`), or a person.

A turn is text. Where tools are offered it may call them, in the format `hermes`:

    Let me see. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

In environments that own their loop it answers in place of the model (`AgentModel`).
"""

import asyncio
import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.rollout.agent_model import CALL_FORMAT, Agent
from nemorl.trajectories import Message, Reply, Task, ToolSchemas

from .terminal import notes

CALL_SHARE = 0.75  # of random turns that call a tool, where there are tools
MAX_DEPTH = 4  # of random arguments; below it they have only what is required


def random_agent(task: Task, seed: str) -> Agent:
    """Turns that the environment offers; else calls of its tools, words that it has used, or the answer."""
    draws = random.Random(seed)

    async def act(messages: Sequence[Message], tools: ToolSchemas, environment: object) -> str:
        if (example := getattr(environment, "example_turn", None)) is not None:
            return str(example(draws))
        words = " ".join(message.content for message in messages).split()
        if tools and draws.random() < CALL_SHARE:
            return random_call(draws.choice(tools), draws, words)
        return draws.choice(("", task.answer or "", " ".join(draws.choices(words, k=3)) if words else ""))

    return act


def random_call(tool: Mapping[str, Any], draws: random.Random, words: Sequence[str]) -> str:
    """A call of a tool with arguments of the types that its schema names."""
    function = tool["function"]
    schema = {"type": "object", **function.get("parameters", {})}
    call = {"name": function["name"], "arguments": _random_value(schema, draws, words, schema)}
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def _random_value(
    schema: Mapping[str, Any],
    draws: random.Random,
    words: Sequence[str],
    whole: Mapping[str, Any],
    depth: int = 0,
) -> Any:
    """A value of a JSON schema, by its types, ranges and choices; `whole` has its definitions."""

    def value_of(part: Mapping[str, Any]) -> Any:
        return _random_value(part, draws, words, whole, depth + 1)

    if name := schema.get("$ref"):
        return value_of(whole.get("$defs", {}).get(name.rpartition("/")[2], {}))
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("enum"):
        return draws.choice(choices)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return value_of(draws.choice(choices))
    kind = schema.get("type", "string")
    match draws.choice(kind) if isinstance(kind, list) else kind:
        case "object":
            required, properties = schema.get("required", ()), schema.get("properties", {})
            chosen = [
                one for one in properties if one in required or draws.random() < (depth < MAX_DEPTH) / 2
            ]
            return {one: value_of(properties[one]) for one in chosen}
        case "array":
            least = schema.get("minItems", 0)
            most = least if depth >= MAX_DEPTH else schema.get("maxItems", least + 2)
            return [value_of(schema.get("items", {})) for _ in range(draws.randint(least, most))]
        case "integer":
            least = schema.get("minimum", 0)
            return draws.randint(least, schema.get("maximum", least + 9))
        case "number":
            least = schema.get("minimum", 0)
            return round(draws.uniform(least, schema.get("maximum", least + 9)), 2)
        case "boolean":
            return draws.random() < 0.5
        case "null":
            return None
        case _:
            return draws.choice(words) if words else ""


async def human_agent(_: Sequence[Message], __: ToolSchemas, ___: object) -> str:
    """A line of standard input. Raises EOFError at its end."""
    notes().print("your turn (Ctrl-D ends the episode):", markup=False)
    line: str = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise EOFError
    return line.rstrip("\n")


def read_turn(text: str, tools: ToolSchemas, turn: int) -> tuple[Reply | None, Message]:
    """The calls in a turn, and the turn as a message; plain text where no tools are offered."""
    if not tools:
        return None, Message("assistant", text)
    reply = CALL_FORMAT.parse(text, f"t{turn:03d}")
    return reply, Message("assistant", reply.content, reply.tool_calls, reply.reasoning)
