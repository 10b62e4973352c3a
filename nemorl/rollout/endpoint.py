"""An OpenAI endpoint for the agents of a rollout worker, which records what each episode samples.

    POST {base_url}/chat/completions, /completions     as `nemorl serve`, streams and tools included
    POST {base_url}/rewards                            {"rewards": {"name": 1.0}, "id": "chatcmpl-…"}

Each episode, and each of its players, has a path and a key of its own.
"""

import asyncio
import math
import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import Field

from nemorl.data.tokenizer import Tokenizer, TokenizerError
from nemorl.generation.types import GenerationRequest, SamplingParams
from nemorl.serve.answers import Answer
from nemorl.serve.app import errors_as_json, list_of_models, listening_at, refuse_other_keys, respond
from nemorl.serve.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    ModelRequest,
    SamplingRequest,
    bad_request,
    read_request,
)
from nemorl.serve.sampling import Work
from nemorl.trajectories import Episode, EpisodeTruncated, add_rewards

from .model_calls import ModelCalls

MODEL_NAME = "policy"
MAX_BODY_BYTES = 32 * 2**20
_PIECE_TOKENS = 8  # of a stream


class RewardRequest(ModelRequest):
    model: str = MODEL_NAME
    rewards: dict[str, float] = Field(min_length=1)
    id: str | None = None  # of an answer; the whole episode when not given


@dataclass
class OpenEpisode:
    """One player of an episode that runs, as the endpoint sees it."""

    calls: ModelCalls
    reward_names: frozenset[str]  # that it may be given
    rewards: dict[str, float] = field(default_factory=dict)
    answer_rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    def take(self, request: RewardRequest) -> None:
        """Add rewards. Raises ApiError for those that cannot be used."""
        for name, value in request.rewards.items():
            if name not in self.reward_names:
                known = ", ".join(sorted(self.reward_names)) or "none"
                raise bad_request(f"rewards.{name} has no weight in the configuration; there are: {known}.")
            if not math.isfinite(value):
                raise bad_request(f"rewards.{name} = {value}: expected a finite number.")
        if request.id is not None and not self.calls.has_answered(request.id):
            raise bad_request(f"id = {request.id}: the model gave no such answer.", "id")
        of_answer = {} if request.id is None else self.answer_rewards.setdefault(request.id, {})
        add_rewards(request.rewards, self.rewards if request.id is None else of_answer)

    def add(self, episode: Episode, player: str) -> None:
        """Add the rewards that an episode gives this player to those that were sent."""
        add_rewards(episode.rewards, self.rewards)
        add_rewards(episode.player_rewards.get(player, {}), self.rewards)
        for name, rewards in episode.answer_rewards.items():
            if self.calls.has_answered(name):
                add_rewards(rewards, self.answer_rewards.setdefault(name, {}))


@dataclass(frozen=True)
class Address:
    base_url: str
    api_key: str


class Endpoint:
    """Listens from the first episode on. Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, max_sequence_length: int, host: str) -> None:
        """`host`: the address to listen at."""
        self._tokenizer, self._max_sequence_length, self._host = tokenizer, max_sequence_length, host
        self._episodes: dict[str, OpenEpisode] = {}
        self._listening, self._starting = AsyncExitStack(), asyncio.Lock()
        self._url: str | None = None

    async def start(self) -> None:
        """Listen, if it does not yet."""
        async with self._starting:
            if self._url is None:
                app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_json])
                app.router.add_get("/{episode}/v1/models", self.models)
                app.router.add_post("/{episode}/v1/chat/completions", self.chat)
                app.router.add_post("/{episode}/v1/completions", self.complete)
                app.router.add_post("/{episode}/v1/rewards", self.reward)
                url = await self._listening.enter_async_context(listening_at(app, self._host))
                self._url = _reachable(url)

    @contextmanager
    def open(self, episode: OpenEpisode) -> Iterator[Address]:
        """Answer the requests of a player inside of the block, after `start`."""
        name = secrets.token_hex(8)
        self._episodes[name] = episode
        try:
            yield Address(f"{self._url}/{name}/v1", episode.key)
        finally:
            del self._episodes[name]

    async def close(self) -> None:
        await self._listening.aclose()

    def _episode_of(self, request: web.Request) -> OpenEpisode:
        """Raises ApiError without its key, or when it is over."""
        episode = self._episodes.get(request.match_info["episode"])
        refuse_other_keys(request, secrets.token_hex(8) if episode is None else episode.key)
        assert episode is not None, "no request has a key that was not given out"
        return episode

    async def models(self, request: web.Request) -> web.Response:
        self._episode_of(request)
        return list_of_models(MODEL_NAME, self._max_sequence_length)

    async def reward(self, request: web.Request) -> web.Response:
        episode = self._episode_of(request)
        episode.take(read_request(RewardRequest, await request.read(), MODEL_NAME))
        return web.json_response({})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        calls = self._episode_of(request).calls
        body = read_request(ChatRequest, await request.read(), MODEL_NAME)
        _refuse_other_sampling(body, calls.sampling)
        messages, tools = [m.as_message() for m in body.messages], body.tools_for_template or []
        limit = body.max_completion_tokens or body.max_tokens
        with _refusals("messages"):
            requests = [
                calls.ask(messages, tools, max_tokens=limit, stop=body.stop_strings) for _ in range(body.n)
            ]
        return await self._respond(request, body, requests, calls, tools=bool(tools))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        calls = self._episode_of(request).calls
        body = read_request(CompletionRequest, await request.read(), MODEL_NAME)
        _refuse_other_sampling(body, calls.sampling)
        with _refusals("prompt"):
            requests = [
                calls.ask_text(prompt, body.max_tokens, body.stop_strings)
                for prompt in body.prompts
                for _ in range(body.n)
            ]
        return await self._respond(request, body, requests, calls, tools=False)

    async def _respond(
        self,
        request: web.Request,
        body: ChatRequest | CompletionRequest,
        requests: list[GenerationRequest],
        calls: ModelCalls,
        *,
        tools: bool,
    ) -> web.StreamResponse:
        prompts = [asked.prompt.tolist() for asked in requests[:: body.n]]
        work = Work(prompts, requests[0].max_new_tokens, tools=tools)
        answer = Answer(body, work, MODEL_NAME, self._tokenizer)
        for choice, asked in enumerate(requests):
            calls.name(asked, f"{answer.id}/{choice}" if choice else answer.id)
        piece = _PIECE_TOKENS if body.stream else 0
        return await respond(
            request, body, answer, [replace(asked, progress_tokens=piece) for asked in requests], calls
        )


def _reachable(url: str) -> str:
    """The URL with the address of this machine in place of one that means all of its addresses."""
    parts = urlsplit(url)
    if not ip_address(str(parts.hostname)).is_unspecified:
        return url
    import ray  # takes a second

    return f"{parts.scheme}://{ray.util.get_node_ip_address()}:{parts.port}"


@contextmanager
def _refusals(param: str) -> Iterator[None]:
    """Turn what a prompt cannot be into an answer for the client."""
    try:
        yield
    except EpisodeTruncated as error:
        raise ApiError(400, f"The episode is truncated: {error}.", code="episode_truncated") from error
    except (TokenizerError, ValueError) as error:
        raise bad_request(f"{error}.", param) from error


def _refuse_other_sampling(body: SamplingRequest, sampling: SamplingParams) -> None:
    """Raise ApiError where the agent would sample otherwise than the run, whose distribution trains."""
    for name in ("temperature", "top_p", "top_k", "min_p"):
        given, own = getattr(body, name), getattr(sampling, name)
        if name in body.model_fields_set and given != own:
            raise bad_request(f"{name} = {given}: the run samples with {own}; leave it out.", name)
    for name in ("seed", "stop_token_ids"):
        if name in body.model_fields_set:
            raise bad_request(f"{name} = {getattr(body, name)}: the run sets it; leave it out.", name)
