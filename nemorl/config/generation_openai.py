"""`generation` by a server that somebody else runs."""

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from .generation_base import GenerationBase


class OpenAIGenerationConfig(GenerationBase):
    """Any server with OpenAI's /v1/completions. It gets no weights from a run. docs/serving.md."""

    backend: Literal["openai"]
    base_url: str = Field(min_length=1)
    """Address of the server up to and with `/v1`."""
    model: str = Field(min_length=1)
    """What the server calls the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself never stands in a config."""
    token_ids: bool = True
    """The server takes prompts as token ids and tells ids and logprobs of its samples; false is text only."""
    max_concurrent_requests: int = Field(64, ge=1)
    """Requests under way at a time, of each replica; more wait here."""
    max_retries: int = Field(6, ge=0)
    """Times a request is sent again after status 429, 5xx or a broken connection; counted in the metrics."""

    @property
    def host(self) -> str:
        """The server's machine; empty where the address names none."""
        try:
            return urlsplit(self.base_url).hostname or ""
        except ValueError:
            return ""

    @property
    def takes_weights(self) -> bool:
        """Whether refits reach the engine."""
        return False

    @property
    def ranks_per_replica(self) -> int:
        """No device and no engine's process here."""
        return 0
