"""`env` for environments of other libraries (docs/libraries.md)."""

import re
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import Config, Key, Variants, call_within, check, function_at
from .environment_base import EnvBase
from .generation import ADDRESS, is_address

ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
_MAKE_SECONDS = 60.0  # for a check that constructs an environment


class LibraryEnvBase(EnvBase):
    package: ClassVar[
        str
    ]  # that it imports; the extra of nemorl that installs it has the name of the section

    weight: float = 1.0
    """Weight in the sum of the reward that is named as the environment."""

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None

    @check
    def _package_is_installed(self) -> Problems:
        if not self.is_installed:
            fix = f'the package {self.package} is not installed; run `pip install "nemorl[{self.name}]"`'
            yield Problem("name", self.name, fix)


class GymnasiumEnvConfig(LibraryEnvBase):
    """An environment of gymnasium; observations and actions are text."""

    factory_path: ClassVar[str] = "nemorl.environments.gymnasium:GymnasiumFactory"
    dataset: ClassVar[str | None] = "seeds"
    example: ClassVar[Mapping[str, Any]] = {"id": "FrozenLake-v1"}
    package: ClassVar[str] = "gymnasium"
    name: Literal["gymnasium"]
    id: str
    """Its id, such as `FrozenLake-v1`; `module:Id-v0` imports the module that registers it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""
    observe: ImportPath | None = None
    """`package.module:function`, `(observation, env) -> str`; null writes discrete, text and box spaces, and
    tuples and dicts of them."""
    act: ImportPath | None = None
    """`package.module:function`, `(text, env) -> action`; a ValueError that it raises is shown to the policy.
    null reads actions of discrete, text and box spaces."""
    instructions: str | None = None
    """Text before the first observation; null describes the actions of spaces that `act: null` reads."""
    action_tag: str | None = "action"
    """Take the text in `<action>...</action>` as the action; null takes the complete text."""
    max_turns: int = Field(50, ge=1)
    """Turns of the policy before the episode ends, turns without an action included."""

    @check
    def _environment_can_be_made(self) -> Problems:
        if not self.is_installed:
            return
        problems_of = function_at("nemorl.environments.gymnasium:problems_of")
        try:
            yield from call_within(_MAKE_SECONDS, partial(problems_of, self))
        except TimeoutError as error:
            yield Problem("id", self.id, f"its first observation: {error}; correct the environment")


class PolicyOpponentConfig(Config):
    """Self-play: the policy with its current weights plays every seat, and each seat trains."""

    name: Literal["policy"] = "policy"


class RandomOpponentConfig(Config):
    """A random one of the moves that the game lists."""

    name: Literal["random"]


class EndpointOpponentConfig(Config):
    """A fixed model behind an OpenAI endpoint with chat, such as an older checkpoint in `nemorl serve`."""

    name: Literal["endpoint"]
    base_url: str
    """Address of the server up to and with `/v1`."""
    model: str
    """The server's name of the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself never is in a config."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of its turns."""
    max_tokens: int = Field(512, ge=1)
    """Tokens of a turn."""

    @check
    def _address_is_complete(self) -> Problems:
        if not is_address(self.base_url):
            yield Problem("base_url", self.base_url, ADDRESS)


OpponentConfig = Annotated[
    PolicyOpponentConfig | RandomOpponentConfig | EndpointOpponentConfig, Variants(PolicyOpponentConfig)
]


class TextArenaEnvConfig(LibraryEnvBase):
    """A game of TextArena for one or more players; each that the policy plays has a trajectory."""

    factory_path: ClassVar[str] = "nemorl.environments.textarena:TextArenaFactory"
    dataset: ClassVar[str | None] = "seeds"
    example: ClassVar[Mapping[str, Any]] = {"game": "TicTacToe-v0"}
    package: ClassVar[str] = "textarena"
    calls_model: ClassVar[bool | None] = True
    name: Literal["textarena"]
    game: str
    """Its id, such as `TicTacToe-v0`. What it says is taken as it is, without the library's wrappers."""
    num_players: int = Field(2, ge=1)
    """Players of a game."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the game."""
    opponent: OpponentConfig = PolicyOpponentConfig()
    """Who plays against the policy. Unless it is the policy itself, the policy has one seat, which is that of
    the task's seed modulo the number of players."""
    action: str = "{turn}"
    """What the game receives; `{turn}` is replaced by the turn."""
    action_tag: str | None = None
    """Take the text in this tag, such as `move`, as the turn; null takes the complete text."""
    observation: Literal["messages", "turns"] = "messages"
    """`messages`: all that the game says since the player's last turn. `turns`: only the turns of the others,
    for models with few tokens."""

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(f"player_{seat}" for seat in range(self.num_players)) if self.num_players > 1 else ()

    @check
    def _action_has_the_turn(self) -> Problems:
        if self.action.count("{turn}") != 1:
            yield Problem("action", self.action, "the turn has no place in it; write {turn} once")

    @check
    def _opponent_has_a_seat(self) -> Problems:
        if self.num_players == 1 and self.opponent.name != "policy":
            yield Problem(
                "opponent.name", self.opponent.name, "num_players is 1; remove this, or set that to 2"
            )

    @check
    def _game_is_registered(self) -> Problems:
        if self.is_installed:
            problems_of = function_at("nemorl.environments.textarena:problems_of")
            yield from call_within(_MAKE_SECONDS, partial(problems_of, self))


class SkyrlGymEnvConfig(LibraryEnvBase):
    """An environment of skyrl-gym, for tasks of any dataset."""

    factory_path: ClassVar[str] = "nemorl.environments.skyrl_gym:SkyrlGymFactory"
    example: ClassVar[Mapping[str, Any]] = {"env": "gsm8k_multi_turn"}
    package: ClassVar[str] = "skyrl_gym"
    name: Literal["skyrl_gym"]
    env: str | None = None
    """Its id, such as `gsm8k`, or `package.module:Class` of a `BaseTextEnv`; null takes it from the column
    `env_class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment, its `env_config`."""
    max_turns: int = Field(5, ge=1)
    """Turns of the policy, which environments of several turns read from their `extras`."""

    @check
    def _environment_exists(self) -> Problems:
        if not self.is_installed or self.env is None:
            return
        try:
            if ":" in self.env:
                function_at(self.env)
            else:
                function_at("skyrl_gym:spec")(self.env)
        except Exception as error:  # noqa: BLE001  of the user's module, or of skyrl-gym
            yield Problem("env", self.env, f"{error}; correct it")


class OpenRLHFEnvConfig(EnvBase):
    """An agent file of OpenRLHF as it is, with `reset` and `step` on text; the package is not required."""

    factory_path: ClassVar[str] = "nemorl.environments.openrlhf:OpenRLHFFactory"
    writes_text: ClassVar[bool] = True
    name: Literal["openrlhf"]
    agent: ImportPath
    """`package.module:AgentExecutor`, a class derived from `MultiTurnAgentExecutor` in the agent file."""
    weight: float = 1.0
    """Weight of the reward `openrlhf`, the sum of the steps' `rewards`."""
    logs: tuple[Key, ...] = ()
    """Entries of `extra_logs` to show as metrics `reward/NAME`; they weigh 0."""

    @property
    def reward_weights(self) -> dict[str, float]:
        unweighted = dict.fromkeys(("openrlhf_score", *self.logs), 0.0)
        return unweighted | super().reward_weights

    @check
    def _logs_have_names_of_their_own(self) -> Problems:
        for name in {"openrlhf", "openrlhf_score"}.intersection(self.logs):
            yield Problem("logs", name, "a reward of the environment has this name; remove it")


class VerifiersEnvConfig(LibraryEnvBase):
    """An environment of verifiers, whose agents call the policy's endpoint."""

    factory_path: ClassVar[str] = "nemorl.environments.verifiers:VerifiersFactory"
    dataset: ClassVar[str | None] = "verifiers"
    package: ClassVar[str] = "verifiers"
    calls_model: ClassVar[bool | None] = True
    name: Literal["verifiers"]
    url: str | None = None
    """Address of the library's environment server, such as tcp://127.0.0.1:5000, which has the task set
    and the settings; null runs the environment in the rollout worker."""
    environment: dict[str, Any] = Field(default_factory=dict)
    """Its settings without the task set, such as `{agent: {runtime: {type: subprocess}}}`; `id` pairs another
    environment with the task set."""
    scores: tuple[str, ...] = ()
    """Single rewards and metrics of the library to show as metrics `reward/NAME` of the run; they weigh 0."""

    @property
    def reward_weights(self) -> dict[str, float]:
        return dict.fromkeys(self.scores, 0.0) | super().reward_weights

    @check
    def _address_is_complete(self) -> Problems:
        if self.url is not None and not re.fullmatch(r"tcp://[^\s/]+:\d+", self.url):
            yield Problem("url", self.url, "expected an address such as tcp://127.0.0.1:5000")

    @check
    def _server_has_its_settings(self) -> Problems:
        if self.url is not None:
            yield from self.without_effect(("environment",), "the server has its own settings; remove it")


class AviaryEnvConfig(LibraryEnvBase):
    """An environment of aviary, whose tools the policy calls."""

    factory_path: ClassVar[str] = "nemorl.environments.aviary:AviaryFactory"
    dataset: ClassVar[str | None] = "aviary"
    needs_chat: ClassVar[bool] = True
    has_tools: ClassVar[bool] = True
    package: ClassVar[str] = "aviary"
    name: Literal["aviary"]
    max_turns: int = Field(10, ge=1)
    """Turns of the policy before the episode ends."""
