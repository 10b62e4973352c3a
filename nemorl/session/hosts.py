"""What runs in the process of an `openai` replica: a client of a server that somebody else runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nemorl.config.generation import OpenAIGenerationConfig
from nemorl.generation.async_engine import AsyncEngineWorker
from nemorl.generation.openai_client import OpenAIClient
from nemorl.generation.openai_engine import OpenAIBackend
from nemorl.generation.types import EngineFailed, EngineHealth, EngineStats
from nemorl.weights.messages import ReceiverLayout


class OpenAIHost(AsyncEngineWorker):
    """An `openai` replica as the driver and the rollout workers call it. Lives in an event loop."""

    def __init__(
        self,
        config: OpenAIGenerationConfig,
        *,
        rank: int,
        tokenizer_path: Path,
        max_sequence_length: int,
        **of_engines: Any,  # that have weights and devices here
    ) -> None:
        """Connects with the first request. Raises MissingKey, or EngineFailed without a tokenizer."""
        file = Path(tokenizer_path) / "tokenizer.json"
        if not file.is_file():
            raise EngineFailed(f"{tokenizer_path} holds no tokenizer.json, which text is encoded with")
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
            max_sequence_length=max_sequence_length,
        )
        super().__init__(backend, f"generation client {rank} of {config.base_url}")

    def health(self) -> EngineHealth:
        """Where the client stands. An answer comes in one piece, so that long ones are no hanging engine: a
        server that hangs is noticed by the deadlines of requests.
        """
        return replace(super().health(), seconds_since_step=0.0)

    async def stats(self) -> EngineStats:
        """What was done since the last call, with the retries."""
        return replace(await super().stats(), retries=self._client.take_figures().retries)

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        """No weights are wanted."""
        return ()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
