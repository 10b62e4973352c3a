"""One HTTP request as requests to the engines: prompts to tokens, choices to seeds, and their answers.

Tool calls in the text of an answer, as Hermes and Qwen models write them.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

import asyncio
import json
import re
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemorl.data.tokenizer import Tokenizer, TokenizerError
from nemorl.generation.router import OnProgress, Router
from nemorl.generation.types import Completion, GenerationRequest, NoReplicaLeft, Progress, RequestRefused
from nemorl.trajectories import StopReason

from .requests import MAX_CHOICES, ApiError, ChatRequest, CompletionRequest, SamplingRequest, bad_request

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


# A piece of a stream has one token while at most this many answers are under way, two with twice as many, and
# so on: a message takes about a millisecond here and as much in the engine's process.
ANSWERS_BY_TOKEN = 8
MAX_CHARACTERS = 256  # of a token, generously: vocabularies have some of about 100


@dataclass(frozen=True)
class Served:
    """What an endpoint serves."""

    router: Router
    tokenizer: Tokenizer
    model_name: str
    max_sequence_length: int
    timeout_seconds: float


@dataclass(frozen=True)
class Work:
    """A request whose prompts are tokens: `n` choices of each."""

    prompts: list[list[int]]
    max_tokens: int
    tools: bool = False  # answers may hold tool calls
    name: str = field(default_factory=lambda: uuid.uuid4().hex)


def completion_work(request: CompletionRequest, served: Served) -> Work:
    """What a completion asks for. Raises ApiError."""
    prompts = [
        _encode(served.tokenizer.encode_document, prompt, "prompt", served)
        if isinstance(prompt, str)
        else list(prompt)
        for prompt in request.prompts
    ]
    if len(prompts) * request.n > MAX_CHOICES:
        raise bad_request(
            f"{len(prompts)} prompts with n={request.n} are {len(prompts) * request.n} samples; a request "
            f"has {MAX_CHOICES} at most",
            "n",
        )
    for prompt in prompts:
        _check_room(len(prompt), request.max_tokens, "prompt", served)
    return Work(prompts, request.max_tokens)


def chat_work(request: ChatRequest, served: Served) -> Work:
    """What a chat asks for. Raises ApiError."""
    tools = request.tools_for_template
    template = served.tokenizer.chat_template
    if tools and OPENING not in template:
        raise bad_request(
            "the model's chat template does not write tool calls as <tool_call> JSON, the one way that is "
            "read here: send no tools, or name another template in policy.tokenizer.chat_template",
            "tools",
        )
    messages = [message.for_template() for message in request.messages]
    try:
        text = served.tokenizer.render_chat(messages, tools, add_generation_prompt=True)
    except TokenizerError as error:
        raise bad_request(str(error), "messages") from error
    prompt = _encode(served.tokenizer.encode, text, "messages", served)
    limit = request.max_completion_tokens or request.max_tokens
    room = max(1, served.max_sequence_length - len(prompt))
    _check_room(len(prompt), limit or room, "messages", served)
    return Work([prompt], limit or room, tools=bool(tools))


def _encode(encode: Callable[[str], list[int]], text: str, param: str, served: Served) -> list[int]:
    # Refused before it is encoded, which takes a minute for some megabytes.
    if len(text) > MAX_CHARACTERS * served.max_sequence_length:
        raise bad_request(
            f"{len(text)} characters are more than {served.max_sequence_length} tokens hold, the longest "
            "sequence that is served here",
            param,
        )
    try:
        return encode(text)
    except TokenizerError as error:
        raise bad_request(str(error), param) from error


def engine_requests(request: SamplingRequest, work: Work, served: Served) -> list[GenerationRequest]:
    """One for each choice, in order: the choices of the first prompt, then of the next."""
    seed = secrets.randbits(63) if request.seed is None else request.seed
    stops = served.tokenizer.end_token_ids | set(request.stop_token_ids)
    count = len(work.prompts) * request.n
    piece = -(-(served.router.num_unanswered + count) // ANSWERS_BY_TOKEN)
    return [
        GenerationRequest(
            id=f"{work.name}-{index}",
            prompt=np.array(work.prompts[index // request.n], dtype=np.int32),
            sampling=request.sampling,
            max_new_tokens=work.max_tokens,
            seed=_seed(seed, index),
            stop_token_ids=frozenset(stops),
            stop_strings=request.stop_strings,
            deadline_seconds=served.timeout_seconds,
            progress_tokens=piece if request.stream else 0,
        )
        for index in range(count)
    ]


async def sample(requests: Sequence[GenerationRequest], router: Router) -> list[Completion]:
    """All answers. Raises ApiError."""
    tasks = [asyncio.ensure_future(_sample_one(request, router)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def stream(
    requests: Sequence[GenerationRequest], router: Router
) -> AsyncGenerator[tuple[int, Progress | Completion], None]:
    """The choice, and what it has to say: progress, every token once, and its completion last.

    Raises ApiError.
    """
    said: asyncio.Queue[tuple[int, Progress | Completion | Exception]] = asyncio.Queue()

    async def follow(index: int, request: GenerationRequest) -> None:
        try:
            answer = await _sample_one(request, router, lambda progress: said.put_nowait((index, progress)))
            said.put_nowait((index, answer))
        except Exception as error:  # noqa: BLE001 - raised where the item is waited for
            said.put_nowait((index, error))

    tasks = [asyncio.ensure_future(follow(i, request)) for i, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            index, item = await said.get()
            if isinstance(item, Exception):
                raise item
            left -= isinstance(item, Completion)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()


async def _sample_one(
    request: GenerationRequest, router: Router, on_progress: OnProgress | None = None
) -> Completion:
    try:
        answer = await router.generate(request, on_progress)
    except RequestRefused as error:
        raise bad_request(str(error)) from error
    except NoReplicaLeft as error:
        raise ApiError(503, "No engine answers.", kind="server_error", code="no_engine") from error
    if answer.stop is StopReason.ABORT:
        raise ApiError(
            504,
            f"The answer took longer than {request.deadline_seconds:g} s, or was ended.",
            kind="server_error",
            code="timeout",
        )
    if answer.stop is StopReason.ERROR:
        raise ApiError(500, "The engines that worked on this request failed.", kind="server_error")
    return answer


def _seed(seed: int, index: int) -> int:
    """The seed itself for the first choice, unlike ones of 63 bits for the others."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]) >> 1


def _check_room(num_prompt: int, max_tokens: int, param: str, served: Served) -> None:
    limit = served.max_sequence_length
    if num_prompt == 0:
        raise bad_request(f"{param} has no tokens.", param)
    if num_prompt + max_tokens > limit:
        raise ApiError(
            400,
            f"This model's sequences have {limit} tokens at most, and {param} has {num_prompt} with "
            f"{max_tokens} asked for: shorten it, or ask for fewer.",
            param=param,
            code="context_length_exceeded",
        )
