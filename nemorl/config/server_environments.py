"""Environments that are servers of other projects (docs/environment_servers.md)."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import check
from .environment_base import EnvBase
from .generation import is_address


class ServerEnvBase(EnvBase):
    url: str
    """Address of the server, such as http://127.0.0.1:8000."""

    @check
    def _address_is_complete(self) -> Problems:
        if not is_address(self.url):
            yield Problem("url", self.url, "expected an address such as http://127.0.0.1:8000")


class OpenEnvConfig(ServerEnvBase):
    """An OpenEnv server: a session over WebSocket for each conversation."""

    factory_path: ClassVar[str] = "nemorl.environments.openenv:OpenEnvFactory"
    name: Literal["openenv"]
    action_field: str | None = None
    """Field of an action that a turn's text fills. null: the policy acts by calls, of the server's MCP tools,
    or of the tool `act` with the fields of an action."""
    action_tag: str | None = None
    """With `action_field`: take the text in this tag, such as `move`; null takes the complete text."""
    observation_field: str | None = None
    """Field of an observation that the policy sees; null shows all of them as JSON."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Arguments with which each conversation is reset."""
    reset_keys: tuple[str, ...] = ("seed",)
    """Columns of a task that are further arguments of its reset, where it has them."""
    max_turns: int = Field(16, ge=1)
    """Turns of the policy, after which the conversation ends."""
    max_result_characters: int = Field(8192, ge=1)
    """Characters of an observation; the rest is cut off."""
    weight: float = 1.0
    """Weight of the reward `openenv` in the sum, which adds up the rewards of all steps."""

    @check
    def _tag_has_an_effect(self) -> Problems:
        if self.action_field is None:
            reason = "the policy acts by calls; set action_field, or remove this"
            yield from self.without_effect(("action_tag",), reason)


class NemoGymEnvConfig(ServerEnvBase):
    """An agent of NeMo-Gym, whose servers run each episode and give its reward."""

    factory_path: ClassVar[str] = "nemorl.environments.nemo_gym:NemoGymFactory"
    calls_model: ClassVar[bool | None] = True
    name: Literal["nemo_gym"]
    url_of: Literal["agent", "head"] = "agent"
    """`agent`: the server at `url` runs all episodes. `head`: it is NeMo-Gym's head server, which knows where
    the agent is that each row names in `agent_ref`."""
    time_limit_seconds: float = Field(600.0, gt=0)
    """Time of an episode, calls of the model included; an agent that takes longer has failed."""
    skip_flagged: bool = True
    """An episode whose answer has `mask_sample` has failed, for example because its sandbox did; false trains
    on it."""
    components: dict[str, float] = Field(default_factory=dict)
    """Weights of rewards in the answer's `reward_components`, which take the place of `nemo_gym`; one that an
    answer does not have is 0."""
    weight: float = 1.0
    """Weight of the reward `nemo_gym` in the sum."""

    @check
    def _weight_has_an_effect(self) -> Problems:
        if self.components:
            yield from self.without_effect(("weight",), "components have weights of their own; remove this")

    @property
    def reward_weights(self) -> dict[str, float]:
        return self.components or super().reward_weights


ServerEnvConfig = OpenEnvConfig | NemoGymEnvConfig
