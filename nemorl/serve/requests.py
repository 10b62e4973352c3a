"""The requests of OpenAI's API as far as they are served: types, and what they mean for an engine.

A field that is not here is refused, since a setting that is silently ignored gives other samples than those
that were asked for.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nemorl.generation.types import SamplingParams

MOST_CHOICES = 128
MOST_STOPS = 16

Stop = Annotated[str, Field(min_length=1)]
# Larger numbers do not fit the arrays and messages of engines, which would end with the request.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Below it logits leave float32, and the draw is that of the most likely token anyway; vLLM has the same.
_GREEDY_BELOW = 1e-5


class Strict(BaseModel):
    """Refuses what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    """Send the counts of tokens in a last chunk."""


class SamplingRequest(Strict):
    """What completions and chats have in common."""

    model: str
    """The name under which the model is served."""
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    """Samples of each prompt."""
    temperature: float = Field(1.0, ge=0)
    """Divides the logits; 0 is greedy, and so is less than 1e-5."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens up to this probability."""
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """Keep the k most likely tokens; -1 and 0 keep all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely, as a fraction of the most likely one."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Decides what is drawn; by chance when not given."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    """Texts that end an answer; they are not part of its text."""
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    """Tokens that end an answer, beside the model's own."""
    stream: bool = False
    """Answer by server-sent events."""
    stream_options: StreamOptions | None = None
    """What a stream says beside the text."""
    return_token_ids: bool = False
    """Give the token ids of prompt and answer, and the version of the weights that sampled each."""
    user: str | None = None
    """Taken, and used for nothing."""
    presence_penalty: float = Field(0.0, ge=0, le=0)
    """Not served but for 0."""
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    """Not served but for 0."""
    repetition_penalty: float = Field(1.0, ge=1, le=1)
    """Not served but for 1."""

    @property
    def sampling(self) -> SamplingParams:
        """The distribution to sample from."""
        top_k = self.top_k if self.top_k is not None and self.top_k > 0 else None
        temperature = self.temperature if self.temperature >= _GREEDY_BELOW else 0.0
        return SamplingParams(temperature, top_k, self.top_p, self.min_p)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    """One text or several, or their token ids."""
    max_tokens: int = Field(16, ge=1)
    """Most tokens of an answer."""
    logprobs: Literal[0, 1] | None = None
    """Give the logprob of every sampled token."""
    echo: Literal[False] = False
    """Not served."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(Strict):
    type: Literal["text"]
    """Text is all that is served."""
    text: str
    """The text."""


class FunctionCall(Strict):
    name: str
    """Of the function."""
    arguments: str
    """JSON."""


class ToolCall(Strict):
    id: str = ""
    """Joins the call and its result."""
    type: Literal["function"] = "function"
    """Functions are all that is served."""
    function: FunctionCall
    """What is called."""


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks."""
    content: str | list[TextPart] | None = None
    """What is said."""
    name: str | None = None
    """Of the speaker, where the template knows such."""
    tool_calls: list[ToolCall] | None = None
    """What an assistant called."""
    tool_call_id: str | None = None
    """The call to which a tool answers."""
    refusal: None = None
    """As earlier answers have it."""

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it: text in one piece, arguments of calls as an object."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = content or ""
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function)},
                }
                for call in self.tool_calls
            ]
        extra = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in extra.items() if value is not None}


class Function(Strict):
    name: str = Field(min_length=1)
    """Of the function."""
    description: str | None = None
    """What it does."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Taken; the grammar of answers is not enforced."""


class Tool(Strict):
    type: Literal["function"]
    """Functions are all that is served."""
    function: Function
    """What may be called."""


class ResponseFormat(Strict):
    type: Literal["text"]
    """Text is all that is served."""


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    """The conversation so far."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["auto", "none"] = "auto"
    """Whether it may call them."""
    parallel_tool_calls: Literal[True] | None = None
    """An answer may hold several calls."""
    response_format: ResponseFormat | None = None
    """Text."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of an answer; what the sequence has room for when not given."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The same by its newer name."""
    logprobs: bool = False
    """Give the logprob of every sampled token."""
    top_logprobs: Literal[0] | None = None
    """Not served but for 0."""

    @property
    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools that may be called, as chat templates want them."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


def _arguments(call: FunctionCall) -> Any:
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments
