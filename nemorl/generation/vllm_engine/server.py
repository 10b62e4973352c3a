"""A `vllm serve` that others started, as an engine of a run: requests and updates over HTTP, weights by file.

Requests go to vLLM's `/inference/v1/generate`, whose answers have the version of the weights of each token,
and updates to the routes of `served`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from nemorl.config.generation import VllmServerGenerationConfig
from nemorl.generation.openai_client import OpenAIClient
from nemorl.generation.request_driver import Chunk
from nemorl.generation.tokens import RequestLimits, load_decoder
from nemorl.generation.types import (
    EngineFailed,
    EngineHealth,
    EngineOptions,
    EngineStats,
    GenerationRequest,
    RequestRefused,
)
from nemorl.models.registry import load_shape
from nemorl.trajectories import StopReason
from nemorl.weights.messages import (
    Part,
    ReceiveReport,
    ReceiverLayout,
    RefitDeadline,
    RefitFailed,
    RefitSession,
)

from .arguments import sampling_arguments
from .backend import STOPS
from .host import LAYOUT, PARTS, SESSION, UpdatedDriver, reports_in

_LOGPROBS = "processed_logprobs"  # of the distribution that is sampled
_START_SECONDS = 60.0  # to describe its weights
_GRACE_SECONDS = 5.0  # that the server's own deadline may come before ours


class VllmServerBackend:
    """An `AsyncEngine` that sends requests to one server."""

    def __init__(
        self, config: VllmServerGenerationConfig, client: OpenAIClient, limits: RequestLimits
    ) -> None:
        self.version = 0
        self.newest: int | None = None  # version that this run has sent, in use or about to be
        self._client, self._limits = client, limits
        self._salts = config.on_update == "continue"  # else a cache of old weights is emptied

    def check(self, request: GenerationRequest) -> None:
        self._limits.check(request)

    async def sample(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """The whole answer as one chunk. Raises RequestRefused and EngineFailed."""
        arguments = dict(sampling_arguments(request, self._limits.max_sequence_length))
        del arguments["routed_experts_prompt_start"]
        body: dict[str, Any] = {"token_ids": request.prompt.tolist(), "sampling_params": arguments}
        if self._salts:
            body["cache_salt"] = f"version {self.version}"
        yield self._read(request, await self._client.post("/inference/v1/generate", body))

    async def freeze(self) -> None:
        """The server keeps running; its own routes pause it for an update."""

    async def thaw(self) -> None:
        """Nothing is paused."""

    def _read(self, request: GenerationRequest, answer: dict[str, Any]) -> Chunk:
        try:
            (choice,) = answer["choices"]
            tokens = [int(token) for token in choice["token_ids"]]
            logprobs = [float(one["logprob"]) for one in choice["logprobs"]["content"]]
            spans = [(span["start"], span["end"], span["version"]) for span in choice["weight_versions"]]
            stop = STOPS.get(choice["finish_reason"], StopReason.ERROR)
        except (KeyError, TypeError, ValueError) as error:
            problem = "answered without tokens, their logprobs and versions of weights"
            raise EngineFailed(f"{self._client.base_url}/inference/v1/generate {problem}") from error
        versions = [self._number(version) for start, end, version in spans for _ in range(start, end)]
        if not len(tokens) == len(logprobs) == len(versions):
            counts = f"{len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions"
            raise EngineFailed(f"{self._client.base_url}/inference/v1/generate answered {counts}")
        finder = self._limits.stop_finder(request)
        if finder is not None and (end := finder.find(tokens)) is not None:
            return Chunk(tokens[:end], logprobs[:end], versions[:end], StopReason.STOP)
        return Chunk(tokens, logprobs, versions, stop)

    def _number(self, version: str) -> int:
        """Of the weights of a span. Raises EngineFailed for those that this run did not send."""
        if self.newest is None:
            return 0  # those that the server has had before the run
        if not version.isdecimal() or int(version) > self.newest:
            problem = f"samples with weights of version {version}, and this run sent version {self.newest}"
            raise EngineFailed(f"{self._client.base_url} {problem}: it was restarted, or another run uses it")
        return int(version)


class VllmServerHost(UpdatedDriver):
    """A client of one server, its replica in the run. Lives in an event loop."""

    def __init__(self, config: VllmServerGenerationConfig, options: EngineOptions) -> None:
        """Raises MissingKey."""
        self._config, self._options = config, options
        url = config.base_urls[options.rank]
        self._client = OpenAIClient(
            url,
            api_key_env=config.api_key_env,
            max_concurrent=config.max_concurrent_requests,
            max_retries=config.max_retries,
        )
        # Updates do not wait until requests have ended.
        self._updates = OpenAIClient(url, api_key_env=config.api_key_env, max_retries=0)
        vocab_size, length = load_shape(options.model_path).vocab_size, options.max_sequence_length
        limits = RequestLimits(vocab_size, length, length, load_decoder(options.tokenizer_path))
        self._server = VllmServerBackend(config, self._client, limits)
        self._layouts: tuple[ReceiverLayout, ...] = ()
        super().__init__(
            self._server,
            f"generation server {url}",
            staged=config.update == "staged",
            on_update=config.on_update,
            commit_seconds=options.commit_seconds,
        )

    async def start(self) -> None:
        """Read how the server's weights are laid out. Raises EngineFailed."""
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self.close)
            try:
                found = await self._post("describe", {"update": self._config.update}, _START_SECONDS)
            except RequestRefused as error:
                fix = "start it with the plug-in, as docs/vllm.md shows, and with the same key"
                raise EngineFailed(f"{self.name} does not take weights ({error}): {fix}") from error
            modes = {worker["logprobs"] for worker in found["workers"]}
            if modes != {_LOGPROBS}:
                fix = f"start it with --logprobs-mode {_LOGPROBS}"
                raise EngineFailed(
                    f"{self.name} returns {', '.join(modes)}, not those that are sampled: {fix}"
                )
            self._layouts = tuple(LAYOUT.validate_python(worker["layout"]) for worker in found["workers"])
            on_failure.pop_all()

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        return self._layouts

    async def prepare_refit(self, parts: tuple[Part, ...]) -> None:
        parts_json = PARTS.dump_python(parts, mode="json")
        await self._post("prepare", {"parts": parts_json}, self._options.commit_seconds)

    async def receive_weights(self, session: RefitSession) -> tuple[ReceiveReport, ...]:
        """Have the server read a version; it samples meanwhile if it is staged. Raises RefitFailed."""
        await self._pause_for_transfer(session.version)
        seconds = session.deadline_seconds + _GRACE_SECONDS
        try:
            body = {"session": SESSION.dump_python(session, mode="json")}
            found = await self._post("receive", body, seconds)
        except (RequestRefused, EngineFailed) as error:
            raise RefitFailed(f"refit to version {session.version}: {self.name}: {error}") from error
        except TimeoutError as error:
            late = f"{self.name} has not received it within {seconds:g} s"
            raise RefitDeadline(f"refit to version {session.version}: {late}") from error
        return reports_in(found["answers"])

    async def commit_weights(self, version: int) -> None:
        body = {"version": version, "recompute": self._config.on_update != "continue"}
        async with self._committing(version):
            self._server.newest = version  # of tokens that are sampled before the answer comes
            await self._post("commit", body, self._options.commit_seconds)
            self._server.version = version

    async def abandon_refit(self) -> None:
        found = await self._post("abandon", {}, self._options.commit_seconds)
        self.corruption = found["corruption"]
        if self.corruption is None:
            await self._pause.aclose()

    def health(self) -> EngineHealth:
        # An answer comes in one piece; a server that hangs is noticed by the deadlines of requests.
        return replace(super().health(), seconds_since_step=0.0)

    async def stats(self) -> EngineStats:
        return replace(await super().stats(), retries=self._client.take_retries())

    async def close(self) -> None:
        await asyncio.gather(self._client.close(), self._updates.close())

    async def _post(self, route: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        async with asyncio.timeout(seconds):
            return await self._updates.post(f"/nemorl/{route}", body)
