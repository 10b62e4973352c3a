"""The requests of OpenAI's API as far as they are served: types, and what they mean for an engine.

A field that is not here is refused, since a setting that is silently ignored gives other samples than those
that were asked for.

The error of a request that cannot be answered, in OpenAI's shape.

From the body of a POST to a request, or to a sentence on what is wrong with it.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from nemorl.config.type_errors import expectation
from nemorl.generation.types import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 16

StopString = Annotated[str, Field(min_length=1)]
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
    n: int = Field(1, ge=1, le=MAX_CHOICES)
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
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end an answer; they are not part of its text."""
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    """Tokens that end an answer, in addition to those of the model."""
    stream: bool = False
    """Answer by server-sent events."""
    stream_options: StreamOptions | None = None
    """What a stream contains in addition to the text."""
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
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_CHOICES)]
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
    """Author of the message."""
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
        """As chat templates expect it: text in one piece, arguments of calls as an object."""
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
        """The tools that may be called, as chat templates expect them."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


def _arguments(call: FunctionCall) -> Any:
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments


class ApiError(Exception):
    """A refusal with its HTTP status; the message is a sentence for who asked."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """`param` is the field of the request; `kind` and `code` are OpenAI's words."""
        super().__init__(message)
        self.status, self.message = status, message
        self.kind, self.param, self.code = kind, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A request that is wrong in itself."""
    return ApiError(400, message, param=param)


R = TypeVar("R", bound=BaseModel)
Path = tuple[str | int, ...]

_SHOWN_CHARACTERS = 80  # of a value

# What fields with several forms expect.
_FORMS = {
    "prompt": f"expected a string, token ids (integers from 0 to {2**31 - 1}), or a list of up to "
    f"{MAX_CHOICES} strings or lists of token ids",
    "stop": f"expected a string that is not empty, or a list of up to {MAX_STOPS} of them",
    "content": 'expected a string, or a list of {"type": "text", "text": ...}',
}


def read_request(kind: type[R], body: bytes) -> R:
    """A request from the body of a POST. Raises ApiError with what is wrong first."""
    try:
        tree = json.loads(body)
    except ValueError as error:  # also of bytes that are no text
        raise bad_request(f"The body is not JSON: {error}.") from error
    if not isinstance(tree, dict):
        raise bad_request("The body is not a JSON object.")
    # null means that it is not given, as OpenAI's own client sends it
    given = {key: value for key, value in tree.items() if value is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False), given) from error


def _explained(errors: list[ErrorDetails], given: dict[str, Any]) -> ApiError:
    """The first field that is wrong. Where it may have several forms, there is an error for each of them."""
    places = [_place(details["loc"], given) for details in errors]
    path, form = places[0]
    if form is None:
        return _sentence(errors[0], path)
    deepest = max(
        (i for i, (_, other) in enumerate(places) if other == form), key=lambda i: len(places[i][0])
    )
    if form[-1] == "content" and len(places[deepest][0]) > len(form):  # a part of a list of parts
        return _sentence(errors[deepest], places[deepest][0])
    return _refusal(form, _at(form, given), _FORMS[str(form[-1])])


def _place(location: tuple[str | int, ...], given: object) -> tuple[Path, Path | None]:
    """The path in the body, and that of the first value on it which may have several forms.

    Pydantic puts the name of each form into its locations.
    """
    path: Path = ()
    form: Path | None = None
    value: object = given
    for number, step in enumerate(location):
        last = number == len(location) - 1
        if isinstance(value, dict) and (step in value or last):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
        else:
            form = form or path
            continue
        path = (*path, step)
    return path, form


def _sentence(details: ErrorDetails, path: Path) -> ApiError:
    kind = details["type"]
    if kind == "extra_forbidden":
        return bad_request(f"{_dotted(path)} is not served here: leave it out.", _dotted(path))
    if kind == "missing":
        return bad_request(f"{_dotted(path)} is missing.", _dotted(path))
    return _refusal(path, details["input"], expectation(details))


def _refusal(path: Path, value: object, problem: str) -> ApiError:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[: _SHOWN_CHARACTERS - 1] + "…"
    return bad_request(f"{_dotted(path)} = {shown}: {problem}.", _dotted(path))


def _at(path: Path, tree: Any) -> object:
    for step in path:
        tree = tree[step]
    return tree


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
