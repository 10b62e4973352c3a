"""What rewards by HTTP have in common: a client, deadlines, and retries that are counted."""

from collections.abc import Mapping
from typing import Any

from nemorl.config.environment import ServiceRewardBase
from nemorl.generation.openai_client import MissingKey, OpenAIClient

from .calls import Call, Calls
from .find import RewardError


class Service:
    """The server of one reward. Belongs to one event loop."""

    def __init__(self, config: ServiceRewardBase, seconds: float) -> None:
        """`seconds` bounds a call where the config does not. Raises RewardError without its key."""
        self.name = config.metric
        try:
            self._client = OpenAIClient(
                config.url,
                api_key_env=config.api_key_env,
                max_concurrent=config.max_concurrent,
                max_retries=config.max_retries,
                key_field=f"rewards ({self.name}): api_key_env",
            )
        except MissingKey as error:
            raise RewardError(str(error)) from error
        self._calls = Calls(f"reward `{self.name}`", config.max_concurrent, config.deadline or seconds)

    async def post(self, path: str, body: Mapping[str, Any]) -> Call[dict[str, Any]]:
        """The JSON that the server answers, or why it does not."""
        return await self._calls.run(lambda: self._client.post(path, body))

    def take_retries(self) -> int:
        """Requests sent again since the last call; groups that are scored at once share them out."""
        return self._client.take_figures().retries

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
