"""An agent in place of the model, for environments that own their loop: through the same endpoint and the
same recording as in a run.
"""

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemorl.config.environment_base import EnvBase
from nemorl.data.tokenizer import ChatPrompts, Tokenizer
from nemorl.data.tool_calls import FORMATS
from nemorl.generation.types import Completion, GenerationRequest, Generator, Progress, SamplingParams
from nemorl.trajectories import Conversation, Message, StopReason, Task, ToolSchemas

from .episodes import EpisodeLoop
from .turn_loop import SampleKey, Sampler, TurnLimits

CALL_FORMAT = FORMATS["hermes"]  # of tools in turns
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


def scripted_agent(texts: Sequence[str]) -> Agent:
    """These turns, the last one repeatedly."""
    left = list(texts)

    async def act(_: Sequence[Message], __: ToolSchemas, ___: object) -> str:
        return left.pop(0) if len(left) > 1 else left[0]

    return act


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
    return Tokenizer(fast, "this command", frozenset({1}), CALL_FORMAT)
