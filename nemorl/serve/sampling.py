"""One HTTP request as requests to the engines: prompts to tokens, choices to seeds, and their answers."""

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from nemorl.data.tokenizer import Tokenizer, TokenizerError
from nemorl.generation.router import Router
from nemorl.generation.types import (
    Completion,
    GenerationRequest,
    Generator,
    NoReplicaLeft,
    Progress,
    RequestRefused,
)
from nemorl.trajectories import StopReason

from .requests import MAX_CHOICES, ApiError, ChatRequest, CompletionRequest, SamplingRequest, bad_request

# A piece of a stream has one token while at most this many answers are under way, two with twice as many, and
# so on: a message takes about a millisecond here and as much in the engine's process.
ANSWERS_BY_TOKEN = 8
MAX_CHARACTERS = 256  # of a token, generously: vocabularies have some of about 100


@dataclass(frozen=True)
class Served:
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
    if request.echo and request.stream:
        raise bad_request("echo is for whole answers: set stream to false, or leave echo out", "echo")
    encode = served.tokenizer.encode_document
    given = request.prompts
    prompts = [_encode(encode, p, "prompt", served) if isinstance(p, str) else list(p) for p in given]
    if (count := len(prompts) * request.n) > MAX_CHOICES:
        message = f"{len(prompts)} prompts with n={request.n} are {count} samples"
        raise bad_request(f"{message}; a request has {MAX_CHOICES} at most", "n")
    for prompt in prompts:
        _check_room(len(prompt), request.max_tokens, "prompt", served)
    return Work(prompts, request.max_tokens)


def chat_work(request: ChatRequest, served: Served) -> Work:
    tools = request.tools_for_template
    if tools and served.tokenizer.tool_format is None:
        problem = "the model's chat template shows no known format of tool calls"
        fix = "send no tools, or set policy.tokenizer.tool_format or another chat_template"
        raise bad_request(f"{problem}: {fix}", "tools")
    messages = [message.as_message() for message in request.messages]
    try:
        text = served.tokenizer.render(messages, add_generation_prompt=True, tools=tools)
    except TokenizerError as error:
        raise bad_request(str(error), "messages") from error
    prompt = _encode(served.tokenizer.encode, text, "messages", served)
    room = max(1, served.max_sequence_length - len(prompt))
    limit = request.max_completion_tokens or request.max_tokens or room
    _check_room(len(prompt), limit, "messages", served)
    return Work([prompt], limit, tools=bool(tools))


def _encode(encode: Callable[[str], list[int]], text: str, param: str, served: Served) -> list[int]:
    # Refused before it is encoded, which takes a minute for some megabytes.
    if len(text) > MAX_CHARACTERS * served.max_sequence_length:
        most = f"{served.max_sequence_length} tokens hold, the longest sequence that is served here"
        raise bad_request(f"{len(text)} characters are more than {most}", param)
    try:
        return encode(text)
    except TokenizerError as error:
        raise bad_request(str(error), param) from error


def _check_room(num_prompt: int, max_tokens: int, param: str, served: Served) -> None:
    limit = served.max_sequence_length
    if num_prompt == 0:
        raise bad_request(f"{param} has no tokens.", param)
    if num_prompt + max_tokens > limit:
        problem = f"This model's sequences have {limit} tokens at most, and {param} has {num_prompt}"
        message = f"{problem} with {max_tokens} asked for: shorten it, or ask for fewer."
        raise ApiError(400, message, param=param, code="context_length_exceeded")


def engine_requests(request: SamplingRequest, work: Work, served: Served) -> list[GenerationRequest]:
    """Return one for each choice, in the order of the prompts; the first has the seed of the request."""
    seed = secrets.randbits(63) if request.seed is None else request.seed
    stops = frozenset(served.tokenizer.end_token_ids | set(request.stop_token_ids))
    count = len(work.prompts) * request.n
    derived = (np.random.SeedSequence((seed, i)).generate_state(1, np.uint64)[0] for i in range(1, count))
    scores_prompt = isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    piece = -(-(served.router.num_unanswered + count) // ANSWERS_BY_TOKEN)
    return [
        GenerationRequest(
            id=f"{work.name}-{index}",
            prompt=np.array(work.prompts[index // request.n], dtype=np.int32),
            sampling=request.sampling,
            max_new_tokens=work.max_tokens,
            seed=choice_seed,
            stop_token_ids=stops,
            stop_strings=request.stop_strings,
            deadline_seconds=served.timeout_seconds,
            progress_tokens=piece if request.stream else 0,
            scores_prompt=scores_prompt,
        )
        for index, choice_seed in enumerate([seed, *(int(state) >> 1 for state in derived)])
    ]


async def sample(requests: Sequence[GenerationRequest], generator: Generator) -> list[Completion]:
    async with aclosing(stream(requests, generator)) as items:
        answers = {index: item async for index, item in items if isinstance(item, Completion)}
    return [answers[index] for index in range(len(requests))]


async def stream(
    requests: Sequence[GenerationRequest], generator: Generator
) -> AsyncGenerator[tuple[int, Progress | Completion], None]:
    """Yield the index of a choice with progress, every token once, or its completion. Raises ApiError."""
    news: asyncio.Queue[tuple[int, Progress | Completion | Exception]] = asyncio.Queue()

    async def follow(index: int, request: GenerationRequest) -> None:
        item: Completion | Exception
        try:
            item = await generator.generate(request, lambda progress: news.put_nowait((index, progress)))
            if item.stop is StopReason.ABORT:
                message = f"The answer took longer than {request.deadline_seconds:g} s, or was ended."
                item = ApiError(504, message, kind="server_error", code="timeout")
            elif item.stop is StopReason.ERROR:
                message = "The engines that worked on this request failed."
                item = ApiError(500, message, kind="server_error")
        except RequestRefused as error:
            item = bad_request(str(error))
        except NoReplicaLeft:
            item = ApiError(503, "No engine answers.", kind="server_error", code="no_engine")
        except Exception as error:  # noqa: BLE001 - raised where the item is awaited
            item = error
        news.put_nowait((index, item))

    tasks = [asyncio.ensure_future(follow(i, request)) for i, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            index, item = await news.get()
            if isinstance(item, Exception):
                raise item
            left -= isinstance(item, Completion)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
