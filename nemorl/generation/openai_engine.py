"""A server somewhere else as a generation back end: requests out, completions with their tokens back."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from nemorl.config.generation import OpenAIGenerationConfig
from nemorl.trajectories import StopReason
from nemorl.weights.messages import ReceiverLayout

from .openai_client import OpenAIClient
from .request_driver import Chunk, RequestDriver
from .tokens import Decode, RequestLimits, engine_seed
from .types import EngineFailed, EngineHealth, EngineOptions, EngineStats, GenerationRequest, RequestRefused

Encode = Callable[[str], list[int]]

_ANY_TOKEN = 2**31  # above all ids that fit a request: the server checks its vocabulary
_STOPS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "tool_calls": StopReason.STOP}


class OpenAIBackend:
    """An `AsyncEngine` that asks a server. It gets no weights: all tokens have version 0.

    Without `token_ids` text goes both ways and is encoded here: for evaluation only.
    """

    version = 0

    def __init__(
        self,
        config: OpenAIGenerationConfig,
        client: OpenAIClient,
        encode: Encode,
        decode: Decode,
        max_sequence_length: int,
    ) -> None:
        self._config, self._client = config, client
        self._encode, self._decode = encode, decode
        self._limits = RequestLimits(_ANY_TOKEN, max_sequence_length, max_sequence_length, decode)

    def check(self, request: GenerationRequest) -> None:
        self._limits.check(request)

    async def sample(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """The whole answer as one chunk. Raises RequestRefused and EngineFailed."""
        yield self._read(request, await self._client.post("/completions", self._body(request)))

    async def freeze(self) -> None:
        """The server keeps running."""

    async def thaw(self) -> None:
        """Nothing is paused."""

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling, tokens = request.sampling, request.prompt.tolist()
        body: dict[str, Any] = {
            "model": self._config.model,
            "prompt": tokens if self._config.token_ids else self._decode(tokens),
            "max_tokens": self._limits.max_tokens(request) - len(tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": engine_seed(request),
        }
        if request.stop_strings:
            body["stop"] = list(request.stop_strings)
        if self._config.token_ids:
            # Filters also where they change nothing: vLLM's server defaults to generation_config.json.
            return body | {
                "logprobs": 0,
                "return_token_ids": True,  # vLLM's server and ours know it
                "stop_token_ids": sorted(request.stop_token_ids),
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
            }
        beyond = {"top_k": sampling.top_k, "min_p": sampling.min_p or None}
        return body | {name: value for name, value in beyond.items() if value is not None}

    def _read(self, request: GenerationRequest, answer: dict[str, Any]) -> Chunk:
        try:
            (choice,) = answer["choices"]
            stop = _STOPS.get(choice["finish_reason"], StopReason.ABORT)
            text = choice["text"]
            read = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"{self._client.base_url}/completions answered without a choice") from error
        if not self._config.token_ids:
            tokens = self._encode(text)
            return Chunk(tokens, [0.0] * len(tokens), [0] * len(tokens), stop)
        tokens, logprobs = choice.get("token_ids"), choice.get("logprobs")
        values: Any = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        paired = isinstance(tokens, list) and isinstance(values, list) and len(tokens) == len(values)
        if not paired or None in values:
            raise RequestRefused(
                f"the server at {self._client.base_url} does not return token ids with a logprob for each, "
                "so its samples cannot be trained on: use one that supports `return_token_ids` "
                "(docs/serving.md), or set generation.token_ids: false to evaluate by its text"
            )
        if read is not None and read != request.prompt.tolist():
            raise RequestRefused(
                f"the server at {self._client.base_url} has read other tokens than it was sent: does it "
                "serve the model of policy.model_path?"
            )
        return Chunk(tokens, values, [0] * len(tokens), stop)


class OpenAIHost(RequestDriver):
    """An `openai` replica. Lives in an event loop."""

    def __init__(self, config: OpenAIGenerationConfig, options: EngineOptions) -> None:
        """Connects with the first request. Raises MissingKey, or EngineFailed without a tokenizer."""
        file = options.tokenizer_path / "tokenizer.json"
        if not file.is_file():
            raise EngineFailed(f"{file.parent} holds no tokenizer.json, which text is encoded with")
        tokenizer = Tokenizer.from_file(str(file))
        self._client = OpenAIClient(
            config.base_url,
            api_key_env=config.api_key_env,
            max_concurrent=config.max_concurrent_requests,
            max_retries=config.max_retries,
        )
        backend = OpenAIBackend(
            config,
            self._client,
            encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False)),
            max_sequence_length=options.max_sequence_length,
        )
        super().__init__(backend, f"generation client {options.rank} of {config.base_url}")

    def health(self) -> EngineHealth:
        # An answer comes in one piece; a server that hangs is noticed by the deadlines of requests.
        return replace(super().health(), seconds_since_step=0.0)

    async def stats(self) -> EngineStats:
        return replace(await super().stats(), retries=self._client.take_retries())

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        return ()

    async def close(self) -> None:
        await self._client.close()
