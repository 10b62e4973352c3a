"""Requests of OpenAI's API as far as served. Unknown fields are refused, since they could change samples."""

import json
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError
from pydantic_core import ErrorDetails

from nemorl.config.type_errors import expectation
from nemorl.errors import shorten
from nemorl.generation.types import SamplingParams
from nemorl.trajectories import Message, ToolCall

MAX_CHOICES = 128
MAX_STOPS = 16

StopString = Annotated[str, Field(min_length=1)]
# Larger numbers do not fit the arrays and messages of engines, which would end with the request.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Below it logits leave float32, and the draw is that of the most likely token anyway; vLLM has the same.
_GREEDY_BELOW = 1e-5


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelRequest(Strict):
    model: str  # under which the model is served


class StreamOptions(Strict):
    include_usage: bool = False  # counts of tokens, in a last chunk


class SamplingRequest(ModelRequest):
    n: int = Field(1, ge=1, le=MAX_CHOICES)  # samples of each prompt
    temperature: float = Field(1.0, ge=0)  # 0 is greedy, and so is less than 1e-5
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)  # -1 and 0 keep all
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)  # by chance when not given
    # Not part of the answer's text.
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] = Field(default_factory=list)  # in addition to the model's
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False  # of prompt and answer, and the versions of the weights that sampled
    user: str | None = None  # accepted and ignored
    presence_penalty: float = Field(0.0, ge=0, le=0)
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    repetition_penalty: float = Field(1.0, ge=1, le=1)

    @property
    def sampling(self) -> SamplingParams:
        top_k = self.top_k if self.top_k is not None and self.top_k > 0 else None
        temperature = self.temperature if self.temperature >= _GREEDY_BELOW else 0.0
        return SamplingParams(temperature, top_k, self.top_p, self.min_p)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(SamplingRequest):
    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    max_tokens: int = Field(16, ge=1)
    logprobs: Literal[0, 1] | None = None  # of every sampled token
    echo: bool = False  # begin the text, and the logprobs, with the prompt

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    name: str
    arguments: Json[dict[str, Any]]


class GivenCall(Strict):
    id: str = ""  # joins the call and its result
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None  # of the speaker, where the template has such
    tool_calls: list[GivenCall] | None = None
    reasoning_content: str | None = None  # of an answer that was apart from its content
    tool_call_id: str | None = None
    refusal: None = None

    def as_message(self) -> Message:
        """Return it with its text in one piece."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        given = self.tool_calls or ()
        return Message(
            "system" if self.role == "developer" else self.role,
            content or "",
            tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in given),
            self.reasoning_content,
            self.tool_call_id,
            self.name,
        )


class Function(Strict):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    result: dict[str, Any] | None = Field(None, alias="return")  # of the result, as transformers writes it
    strict: bool | None = None  # accepted; the grammar of answers is not enforced


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ResponseFormat(Strict):
    type: Literal["text"]


class ChatRequest(SamplingRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    max_tokens: int | None = Field(None, ge=1)  # what the sequence has room for when not given
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False  # of every sampled token
    top_logprobs: Literal[0] | None = None

    @property
    def tools_for_template(self) -> list[dict[str, Any]] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True, by_alias=True) for tool in self.tools]


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal with its HTTP status; the message is a sentence for the client."""

    status: int
    message: str
    kind: str = "invalid_request_error"  # this and `code` are OpenAI's words
    param: str | None = None  # field of the request
    code: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


R = TypeVar("R", bound=ModelRequest)
Path = tuple[str | int, ...]

# Errors about a field, not its value.
_OF_THE_FIELD = {"extra_forbidden": "is not served here: leave it out.", "missing": "is missing."}
# Expected values of fields with several forms.
_FORMS = {
    "prompt": f"expected a string, token ids (integers from 0 to {2**31 - 1}), or a list of up to "
    f"{MAX_CHOICES} strings or lists of token ids",
    "stop": f"expected a string that is not empty, or a list of up to {MAX_STOPS} of them",
    "content": 'expected a string, or a list of {"type": "text", "text": ...}',
}


def read_request(kind: type[R], body: bytes, model_name: str) -> R:
    """Return the request in the body of a POST. Raises ApiError naming the first problem."""
    try:
        tree = json.loads(body)
    except ValueError as error:  # also of bytes that are no text
        raise bad_request(f"The body is not JSON: {error}.") from error
    if not isinstance(tree, dict):
        raise bad_request("The body is not a JSON object.")
    # null means that it is not given, as OpenAI's own client sends it
    given = {key: value for key, value in tree.items() if value is not None}
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False), given) from error
    if request.model != model_name:
        message = f"The model `{request.model}` is not served; `{model_name}` is."
        raise ApiError(404, message, param="model", code="model_not_found")
    return request


def _explained(errors: list[ErrorDetails], given: dict[str, Any]) -> ApiError:
    """Return the error of the first wrong field. A field with several forms has an error for each of them."""
    located = [(*_locate(details["loc"], given), details) for details in errors]
    path, form, details = located[0]
    value, problem = details["input"], None
    if form is not None:
        of_form = [(path, details) for path, other, details in located if other == form]
        path, details = max(of_form, key=lambda pair: len(pair[0]))
        value = details["input"]
        if form[-1] != "content" or len(path) == len(form):  # else a part of a list of parts
            path, value = form, reduce(getitem, form, given)  # type: ignore[arg-type]
            problem = _FORMS[str(form[-1])]
    field = ".".join(map(str, path))
    if problem is None and details["type"] in _OF_THE_FIELD:
        return bad_request(f"{field} {_OF_THE_FIELD[details['type']]}", field)
    shown = shorten(json.dumps(value, ensure_ascii=False, default=str))
    return bad_request(f"{field} = {shown}: {problem or expectation(details)}.", field)


def _locate(location: Path, given: object) -> tuple[Path, Path | None]:
    """Return the path in the body, without pydantic's names of forms, and that of a value with several."""
    path: Path = ()
    form: Path | None = None
    value = given
    for number, step in enumerate(location, start=1):
        if isinstance(value, dict) and (step in value or number == len(location)):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
        else:
            form = form or path
            continue
        path = (*path, step)
    return path, form
