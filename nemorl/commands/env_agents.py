"""Who acts in an environment without a model: random turns, given ones, or a person.

A turn is text. Where tools are offered it may call them, in the format `hermes`:

    Let me see. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

Environments that own their loop call a model, so there an agent answers in its place (`AgentModel`): through
the same endpoint and the same recording as in a run.
"""

import asyncio
import json
import math
import random
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemorl.config.environment_base import EnvBase
from nemorl.data.tokenizer import ChatPrompts, Tokenizer
from nemorl.data.tool_calls import FORMATS
from nemorl.generation.types import Completion, GenerationRequest, Generator, Progress, SamplingParams
from nemorl.rollout.episodes import EpisodeLoop
from nemorl.rollout.turn_loop import SampleKey, Sampler, TurnLimits
from nemorl.trajectories import Conversation, Message, Reply, StopReason, Task, ToolSchemas

from .terminal import notes

CALL_SHARE = 0.75  # of random turns that call a tool, where there are tools
MAX_DEPTH = 4  # of random arguments; below it they have only what is required
_FORMAT = FORMATS["hermes"]
_OPENING = "<|im_start|>assistant\n"
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}" + _OPENING + "{% endif %}"
)
_MAX_TOKENS = 2**30  # of a conversation, which are its bytes: no limit of the policy's own tokens applies

# Makes a turn from the messages so far and the tools; `environment` may say what it accepts.
Agent = Callable[[Sequence[Message], ToolSchemas, object], Awaitable[str]]
# Shows what an agent reads and says; None is between two conversations.
Show = Callable[[Message | None], None]


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


def scripted_agent(texts: Sequence[str]) -> Agent:
    """These turns, the last one repeatedly."""
    left = list(texts)

    async def act(_: Sequence[Message], __: ToolSchemas, ___: object) -> str:
        return left.pop(0) if len(left) > 1 else left[0]

    return act


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
    reply = _FORMAT.parse(text, f"t{turn:03d}")
    return reply, Message("assistant", reply.content, reply.tool_calls, reply.reasoning)


@dataclass
class _Seat:
    """One episode, whose turns are made one at a time."""

    agent: Agent
    environment: object
    show: Show
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    shown: list[tuple[Message, ...]] = field(default_factory=list)  # conversations, up to their last turns

    async def answer(self, messages: tuple[Message, ...], tools: ToolSchemas) -> str:
        """Show what is new to the agent, and its turn."""
        async with self.turn:
            known = [one for one in self.shown if messages[: len(one)] == one]
            continued = max(known, key=len, default=())
            if self.shown and continued is not self.shown[-1]:
                self.show(None)
            for message in messages[len(continued) :]:
                self.show(message)
            text = await self.agent(messages, tools, self.environment)
            turn = Message("assistant", text)
            self.show(turn)
            self.shown.append((*messages, turn))
            return text


class AgentModel(Generator):
    """The model of environments that own their loop: an agent for each episode. Belongs to one event loop.

    Its tokens are bytes and its chat template shows roles, so they are not those of any policy.
    """

    def __init__(
        self,
        config: EnvBase,
        rewards: Iterable[str],
        sampling: SamplingParams,
        seconds: float,
        max_calls: int,
    ) -> None:
        """`rewards` may be given; `seconds` bound the time between two calls, `max_calls` their number."""
        self._tokenizer, self._sampling = _tokenizer(), sampling
        self._seats: dict[str, _Seat] = {}
        limits = config.limits.model_copy(
            update={
                "max_calls": min(config.limits.max_calls or max_calls, max_calls),
                "max_tokens": None,
                "model_seconds": None,
            }
        )
        turns = TurnLimits(
            _MAX_TOKENS, _MAX_TOKENS, self._tokenizer.end_token_ids, (), math.inf, seconds, limits
        )
        sampler = Sampler(self, self._tokenizer, ChatPrompts(self._tokenizer), turns)
        self._loop = EpisodeLoop(sampler, rewards, config.endpoint_host)

    async def run(
        self, number: int, task: Task, environment: Any, agent: Agent, show: Show
    ) -> list[Conversation]:
        """An episode with a number of its own, as `EpisodeLoop.run`. Raises what the agent raises."""
        key = SampleKey(0, number, 0)
        self._seats[str(key)] = _Seat(agent, environment, show)
        try:
            return await self._loop.run(task, environment, key, self._sampling)
        finally:
            del self._seats[str(key)]

    async def close(self) -> None:
        await self._loop.close()

    async def generate(
        self, request: GenerationRequest, on_progress: Callable[[Progress], None] | None = None
    ) -> Completion:
        prompt = self._tokenizer.decode(request.prompt.tolist())
        is_chat = prompt.endswith(_OPENING)
        messages, tools = _read_prompt(prompt) if is_chat else ((Message("user", prompt),), ())
        text = await self._seats[request.conversation].answer(messages, tools)
        ends = (text.find(stop) + len(stop) for stop in request.stop_strings if stop in text)
        tokens = self._tokenizer.encode(text[: min(ends, default=len(text))])
        if is_chat:
            tokens.append(self._tokenizer.template_end_token_id or 0)
        stop = StopReason.LENGTH if len(tokens) > request.max_new_tokens else StopReason.STOP
        ids = np.array(tokens[: request.max_new_tokens], dtype=np.int32)
        values = (ids, np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.int32))
        if on_progress is not None:
            on_progress(Progress(request.id, *values))
        return Completion(request.id, *values, stop)


def _read_prompt(text: str) -> tuple[tuple[Message, ...], ToolSchemas]:
    """Messages and tools that the template has written; calls are in the text of their turn."""
    found = [(role, content) for role, content in _MESSAGE.findall(text)]
    tools = [json.loads(content) for role, content in found if role == "tools"]
    messages = tuple(Message(role, content) for role, content in found if role != "tools")
    return messages, tools[0] if tools else ()


def _tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<|im_start|>", "<|im_end|>"]
    names = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=marks[1])
    fast.add_special_tokens({"additional_special_tokens": marks[:1]})
    fast.chat_template = _TEMPLATE
    return Tokenizer(fast, "this command", frozenset({1}), _FORMAT)
