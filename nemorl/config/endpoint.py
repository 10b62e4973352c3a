"""`generation.endpoint`: an OpenAI-compatible HTTP server over the engines of a run."""

import ipaddress

from pydantic import Field

from .base import Config


class EndpointConfig(Config):
    """Who may ask the engines over HTTP, and how much."""

    host: str = "127.0.0.1"
    """Address to listen on; any that other machines reach wants `api_key_env`."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, which is printed."""
    api_key_env: str | None = None
    """Environment variable that holds the key; a key is made and printed when not given."""
    model_name: str | None = None
    """What requests call the model; the name of its folder when not given."""
    max_concurrent_requests: int = Field(256, ge=1)
    """Requests answered at a time; one more is told to come again (status 429)."""
    max_body_megabytes: int = Field(16, ge=1)
    """Size of a request."""
    timeout: float = Field(600.0, gt=0)
    """Seconds for an answer."""

    @property
    def on_this_machine_only(self) -> bool:
        """Whether no other machine reaches the address."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is the machine's own on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
