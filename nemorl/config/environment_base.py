"""What the section of every environment has: where it runs, retries, limits, and how it is constructed."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import EXPERT, Config, FieldLevel, Key, Variants, check, function_at
from .generation import ADDRESS, LOOPBACK, is_address

# Of a reward that cannot be computed or an environment that fails; all but `fail` are counted.
OnError = Literal["skip", "drop_group", "zero", "fail"]


class EpisodeLimits(Config):
    """Limits of one episode. At the first three it ends as truncated, and trains with the rewards it has."""

    max_calls: int | None = Field(None, ge=1)
    """Calls of the model, or turns; null is unlimited."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that all of its calls sample; those that run at a time may exceed it. null is unlimited."""
    model_seconds: float | None = Field(None, gt=0)
    """Time in which calls of the model run; null is unlimited."""
    environment_seconds: float | None = Field(None, gt=0)
    """Time in which none runs. An environment that takes longer has failed. null limits only the time between
    two calls, to `cluster.deadlines.environment`."""


class WorkerPlacement(Config):
    """In the rollout workers, in their event loops."""

    name: Literal["worker"] = "worker"


class ActorPlacement(Config):
    """In processes of the run for them alone, which Ray places. One that is lost is started again."""

    field_level: ClassVar[FieldLevel] = "expert"
    name: Literal["actors"]
    num_actors: int = Field(1, ge=1)
    """Processes."""
    max_episodes: int = Field(16, ge=1)
    """Episodes of each process at a time; others wait."""


class ServerPlacement(Config):
    """Behind a server: `nemorl serve env`, or any other with its protocol (docs/environment_service.md)."""

    name: Literal["server"]
    url: str
    """Address of the server up to and with `/v1`; of several environments, that of one ends with its name."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key; the key itself never is in a config."""

    @check
    def _address_is_complete(self) -> Problems:
        if not is_address(self.url):
            yield Problem("url", self.url, ADDRESS)


PlacementConfig = Annotated[WorkerPlacement | ActorPlacement | ServerPlacement, Variants(WorkerPlacement)]


class TurnFlagConfig(Config):
    """A flag of turns, by what their answers say; one with a tool call that can be read has none."""

    texts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """An answer with one of these in its content is flagged."""
    max_in_reasoning: int = Field(0, ge=0)
    """An answer that has reasoning and no content is flagged if one of them is there more often than this."""

    def fits(self, content: str, reasoning: str) -> bool:
        """True for a turn that says this."""
        if reasoning and not content.strip():
            return any(reasoning.count(text) > self.max_in_reasoning for text in self.texts)
        return any(text in content for text in self.texts)


class EnvBase(Config):
    factory_path: ClassVar[str]  # `module:class` of an EnvironmentFactory that takes this section
    dataset: ClassVar[str | None] = None  # name of the only datasets that it supports; None supports all
    needs_answer: ClassVar[bool] = False  # of each task
    needs_chat: ClassVar[bool] = False  # `data.chat`, as its messages have roles
    has_tools: ClassVar[bool] = False  # so the chat template must offer them
    writes_text: ClassVar[bool] = False  # what follows the prompt, with the marks of the chat template
    has_one_turn: ClassVar[bool] = False
    calls_model: ClassVar[bool | None] = False  # from its own loop; None if its factory decides
    example: ClassVar[Mapping[str, Any]] = {}  # of its required fields, for `nemorl env NAME`

    name: str
    max_retries: int = Field(1, ge=0, json_schema_extra=EXPERT)
    """Times a trajectory whose environment fails or hangs is sampled again, in a new environment."""
    on_error: OnError = Field("skip", json_schema_extra=EXPERT)
    """After that, `skip`: leave the trajectory out of training and count it. `drop_group`: drop its group,
    which is sampled again. `zero`: train on it as far as it came, with no reward of the environment. `fail`:
    end the run."""
    limits: EpisodeLimits = EpisodeLimits()
    """Limits of each episode (docs/agents.md)."""
    turn_flags: dict[Key, TurnFlagConfig] = Field(default_factory=dict, json_schema_extra=EXPERT)
    """Flags of the policy's turns, by names of your choice: metrics `flagged_turns/NAME`, and advantages by
    `algorithm.flagged_advantages` (docs/rewards.md)."""
    placement: PlacementConfig = Field(WorkerPlacement(), json_schema_extra=EXPERT)
    """Where it runs."""
    endpoint_host: str = Field(LOOPBACK, json_schema_extra=EXPERT)
    """Address at which rollout workers listen for agents that call the model over HTTP. `0.0.0.0`, or another
    that other machines reach, is for agents in containers and on other nodes. Each request requires the key
    of its episode."""

    @check
    def _limits_have_an_effect(self) -> Problems:
        if self.has_one_turn:
            reason = f"conversations in `{self.name}` have one turn; remove this, or use another env"
            yield from self.limits.without_effect(EpisodeLimits.model_fields, reason, "limits.")

    @check
    def _runs_where_it_can(self) -> Problems:
        if self.calls_model and self.placement.name != "worker":
            fix = f"episodes of `{self.name}` call the model in their rollout worker; remove this"
            yield Problem("placement.name", self.placement.name, fix)

    @check
    def _endpoint_has_an_effect(self) -> Problems:
        if self.calls_model is False:
            reason = f"episodes of `{self.name}` do not call the model over HTTP; remove this"
            yield from self.without_effect(("endpoint_host",), reason)

    @property
    def compares_answers(self) -> bool:
        """With the answer of each task, which is therefore required."""
        return self.needs_answer

    @property
    def environments(self) -> "dict[str, EnvBase]":
        """The environments of the run by the name that tasks use; a single one has none."""
        return {"": self}

    def name_for(self, columns: Mapping[str, Any]) -> str:
        """Name of the environment of a task with these columns. Raises ValueError for an unknown one."""
        return ""

    @property
    def metrics(self) -> Iterator[str]:
        """Names of the metrics of single environments, of their actors and of flags."""
        yield from (f"flagged_turns/{name}" for name in self.turn_flags)
        if isinstance(self.placement, ActorPlacement):
            yield from (f"environment/actors{what}" for what in ("", "_lost", "_restarted"))
            yield "environment/restarts_failed"

    @property
    def players(self) -> tuple[str, ...]:
        """Names of the players of its episodes, as far as the section has them."""
        return ()

    @property
    def reward_weights(self) -> dict[str, float]:
        weight = getattr(self, "weight", None)
        return {} if weight is None else {self.name: weight}

    def make_factory(self) -> Any:
        """Construct the factory. Raises NotImported."""
        return function_at(self.factory_path)(self)
