"""`env`: the environment that the policy acts in. `rewards`: rewards in addition to the environment's."""

import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .auxiliary import ModelGroupConfig
from .base import (
    EXPERT,
    SIMPLE,
    Config,
    FieldLevel,
    Key,
    NotImported,
    Variants,
    call_within,
    check,
    function_at,
)
from .environment_base import ActorPlacement as ActorPlacement
from .environment_base import EnvBase as EnvBase
from .environment_base import EpisodeLimits as EpisodeLimits
from .environment_base import OnError
from .environment_base import ServerPlacement as ServerPlacement
from .environment_base import TurnFlagConfig as TurnFlagConfig
from .generation import ADDRESS, is_address
from .library_environments import (
    AviaryEnvConfig,
    GymnasiumEnvConfig,
    OpenRLHFEnvConfig,
    SkyrlGymEnvConfig,
    TextArenaEnvConfig,
    VerifiersEnvConfig,
)
from .policy import LayoutConfig, NoRecompute, PolicyConfig, TokenizerConfig
from .run import ClusterConfig
from .sandbox import LocalSandboxConfig, SandboxConfig
from .server_environments import ServerEnvConfig
from .terminal_environment import TerminalEnvConfig

ENTRY_POINTS = "nemorl.environments"  # of packages with factories


class SingleTurnEnvConfig(EnvBase):
    """One answer, scored by `rewards` alone."""

    factory_path: ClassVar[str] = "nemorl.trajectories:SingleTurnFactory"
    has_one_turn: ClassVar[bool] = True
    name: Literal["single_turn"] = "single_turn"


class MathEnvConfig(EnvBase):
    """One answer, compared with the task's."""

    factory_path: ClassVar[str] = "nemorl.environments.math_answers:MathFactory"
    needs_answer: ClassVar[bool] = True
    has_one_turn: ClassVar[bool] = True
    name: Literal["math"]
    comparison: Literal["math_verify", "text"] = "math_verify"
    """`math_verify`: by what both mean, with the math-verify library. `text`: the text after the last
    `Answer:`, with spaces, units and LaTeX's spellings normalized (arXiv 2206.14858, as in DAPO)."""
    weight: float = 1.0
    """Weight of the reward `math` in the sum."""


class ReasoningGymEnvConfig(EnvBase):
    """One answer, scored by the reasoning-gym dataset that made the task."""

    factory_path: ClassVar[str] = "nemorl.environments.reasoning_gym:ReasoningGymFactory"
    dataset: ClassVar[str | None] = "reasoning_gym"
    has_one_turn: ClassVar[bool] = True
    name: Literal["reasoning_gym"]
    answer_tag: str | None = "answer"
    """Score the text in `<answer>...</answer>`, an empty answer if missing; null scores the complete text."""
    weight: float = 1.0
    """Weight of the reward `reasoning_gym` in the sum."""


class CalculatorEnvConfig(EnvBase):
    """Several turns: the policy may call a calculator before it answers; the final answer is compared."""

    factory_path: ClassVar[str] = "nemorl.environments.calculator:CalculatorFactory"
    needs_answer: ClassVar[bool] = True
    needs_chat: ClassVar[bool] = True
    name: Literal["calculator"]
    max_turns: int = Field(4, ge=1, json_schema_extra=SIMPLE)
    """Turns of the policy before the conversation ends without an answer."""
    weight: float = 1.0
    """Weight of the reward `calculator` in the sum."""
    call_weight: float = 0.0
    """Weight of the reward `calculator_call`, for each turn whose call the calculator can evaluate."""

    @property
    def reward_weights(self) -> dict[str, float]:
        of_calls = {"calculator_call": self.call_weight} if self.call_weight else {}
        return super().reward_weights | of_calls


class ChainedSumsEnvConfig(EnvBase):
    """Several turns that a tiny model can do: sums, each of which continues from the previous answer."""

    factory_path: ClassVar[str] = "nemorl.environments.chained_sums:ChainedSumsFactory"
    dataset: ClassVar[str | None] = "arithmetic"
    name: Literal["chained_sums"]
    num_sums: int = Field(2, ge=2)
    """Turns of the policy, a sum each."""
    weight: float = 1.0
    """Weight of the reward `chained_sums`, for the last sum."""
    turn_weight: float = Field(1.0, gt=0)
    """Weight of the reward `chained_sums_turn`, for each sum before the last one."""

    @property
    def reward_weights(self) -> dict[str, float]:
        return super().reward_weights | {"chained_sums_turn": self.turn_weight}


class GameEnvBase(EnvBase):
    """A game that the seed of a task begins; a move a turn."""

    dataset: ClassVar[str | None] = "seeds"
    max_moves: int = Field(10, ge=1, json_schema_extra=SIMPLE)
    """Turns of the policy before the game ends."""
    move_tag: str | None = "move"
    """Take the text in `<move>...</move>` as the move; null takes the complete text."""
    weight: float = 1.0
    """Weight of the reward named as the game."""


class GuessNumberTexts(Config):
    """What the game says. Other texts are for models with few tokens."""

    field_level: ClassVar[FieldLevel] = "expert"
    opening: str = (
        "Find the number from {low} to {high} in {guesses} guesses, such as <move>{low}</move>. "
        "I answer `higher` or `lower`."
    )
    """Rules of the game; `{low}`, `{high}` and `{guesses}` are replaced."""
    higher: str = "higher"
    """Answer to a guess below the number."""
    lower: str = "lower"
    """Answer to a guess above the number."""
    invalid: str = "That is no number."
    """Answer to a turn without a number."""


class GuessNumberEnvConfig(GameEnvBase):
    """A game: find a number; each guess is answered by whether the number is higher or lower."""

    factory_path: ClassVar[str] = "nemorl.environments.guess_number:GuessNumberFactory"
    name: Literal["guess_number"]
    low: int = 1
    """Smallest number."""
    high: int = 100
    """Largest number."""
    discount: float = Field(1.0, gt=0, le=1)
    """The reward is multiplied by it for each guess before the right one."""
    texts: GuessNumberTexts = GuessNumberTexts()
    """What the game says."""
    range_weight: float = 0.0
    """Weight of the reward `guess_number_range`, the share of guesses that the hints had left possible."""

    @property
    def reward_weights(self) -> dict[str, float]:
        of_range = {"guess_number_range": self.range_weight} if self.range_weight else {}
        return super().reward_weights | of_range

    @check
    def _numbers_differ(self) -> Problems:
        if self.high <= self.low:
            yield Problem(
                "high", self.high, f"low is {self.low}, so there is nothing to guess; set it to more"
            )


class SlidingPuzzleEnvConfig(GameEnvBase):
    """A game: order the tiles of a board by sliding them into its gap."""

    factory_path: ClassVar[str] = "nemorl.environments.sliding_puzzle:SlidingPuzzleFactory"
    name: Literal["sliding_puzzle"]
    size: int = Field(3, ge=2, le=10)
    """Rows and columns of the board."""
    num_shuffles: int = Field(4, ge=1)
    """Random moves from the ordered board to the first one: at most as many are needed."""
    max_moves: int = Field(20, ge=1)
    """Turns of the policy before the game ends."""


class WordleEnvConfig(GameEnvBase):
    """A game: find a word; the letters of each guess are compared with its own."""

    factory_path: ClassVar[str] = "nemorl.environments.wordle:WordleFactory"
    name: Literal["wordle"]
    words: tuple[str, ...] = ()
    """Words of which the seed draws one; empty for common English words of five letters. Guesses may be
    others."""
    max_moves: int = Field(6, ge=1)
    """Turns of the policy before the game ends."""
    letters_weight: float = 0.0
    """Weight of the reward `wordle_letters`, the largest share of letters in the right place."""

    @property
    def reward_weights(self) -> dict[str, float]:
        of_letters = {"wordle_letters": self.letters_weight} if self.letters_weight else {}
        return super().reward_weights | of_letters

    @check
    def _words_can_be_guessed(self) -> Problems:
        for index, word in enumerate(self.words):
            if not (word.isalpha() and word == word.lower()):
                yield Problem(f"words.{index}", word, "a word has lowercase letters only; change it")


class CodeEnvConfig(EnvBase):
    """One answer with a Python program, run in a sandbox and judged by the task's tests."""

    factory_path: ClassVar[str] = "nemorl.environments.code:CodeFactory"
    has_one_turn: ClassVar[bool] = True
    name: Literal["code"]
    tests_key: str = "tests"
    """Column of the dataset with the tests (docs/sandbox.md has their forms)."""
    score: Literal["all", "share"] = "all"
    """`all`: the reward is 1 if every test passes, else 0, and the first test that fails ends the answer.
    `share`: the reward is the share of tests that pass."""
    answer_seconds: float = Field(30.0, gt=0)
    """Time for all tests of an answer; those that have not started by then fail."""
    sandbox: SandboxConfig = LocalSandboxConfig()
    """Where programs run, and their limits for each test."""
    weight: float = 1.0
    """Weight of the reward `code` in the sum."""

    @check
    def _tests_end_in_time(self, cluster: ClusterConfig) -> Problems:
        deadline, longest = cluster.deadlines.environment, self.answer_seconds + self.sandbox.wall_seconds
        if longest >= deadline:
            fix = f"with sandbox.wall_seconds the tests of an answer may take {longest:g} s, and"
            fix = f"{fix} cluster.deadlines.environment is {deadline:g}; lower it, or raise that"
            yield Problem("answer_seconds", self.answer_seconds, fix)


class McpServerConfig(Config):
    """An MCP server: `command` or `url`."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server that each rollout worker starts and reaches over stdin and stdout."""
    url: str | None = None
    """Address of a server over HTTP, such as http://127.0.0.1:8000/mcp."""

    @property
    def label(self) -> str:
        return self.url or " ".join(self.command)

    @check
    def _there_is_one_way_to_reach_it(self) -> Problems:
        if bool(self.command) == (self.url is not None):
            yield Problem("command", list(self.command), "set either command or url")


class RetrievalConfig(Config):
    """The tool `search`: documents by BM25."""

    path: Path
    """JSON lines, a document each."""
    text_key: str = "text"
    """Key of a document's text."""
    num_results: int = Field(3, ge=1)
    """Documents of a result, at most."""

    @check
    def _file_exists(self) -> Problems:
        if not self.path.is_file():
            yield Problem("path", str(self.path), "there is no such file; correct the path")
            return
        try:
            next(function_at("nemorl.environments.tools:documents_in")(self.path, self.text_key), None)
        except ValueError as error:
            yield Problem("path", str(self.path), f"{error}; correct the file, or set text_key")


class ToolsEnvConfig(EnvBase):
    """Tools that the policy may call before it answers (docs/tools.md)."""

    factory_path: ClassVar[str] = "nemorl.environments.tools:ToolsFactory"
    needs_chat: ClassVar[bool] = True
    has_tools: ClassVar[bool] = True
    name: Literal["tools"]
    tools: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = Field((), json_schema_extra=SIMPLE)
    """`package.module:function` of typed Python functions with docstrings, sync or async."""
    mcp: tuple[McpServerConfig, ...] = ()
    """MCP servers whose tools are offered. The conversations of a rollout worker share their sessions."""
    python: SandboxConfig | None = None
    """The tool `python`: code in a sandbox with these limits; null offers none."""
    retrieval: RetrievalConfig | None = None
    """The tool `search` over local documents; null offers none."""
    max_turns: int = Field(8, ge=1, json_schema_extra=SIMPLE)
    """Turns of the policy; the last one answers."""
    call_seconds: float = Field(30.0, gt=0)
    """Time of a call, except of `python`, whose sandbox has its own limits."""
    max_result_characters: int = Field(8192, ge=1)
    """Characters of a result; the rest is cut off."""
    answer: Literal["none", "equal"] = "none"
    """`equal`: the reward `tools` is 1 if the answer is the task's, as number or as text. `none`: `rewards`
    score it."""
    answer_tag: str | None = None
    """Compare the text in this tag, such as `answer`; null compares the complete text of the last turn."""
    weight: float = 1.0
    """Weight of the reward `tools` in the sum."""

    @property
    def built_in_tools(self) -> dict[str, str]:
        """The field of each tool that is no function and of no server, by its name."""
        fields = {"python": ("python", self.python), "search": ("retrieval", self.retrieval)}
        return {name: field for name, (field, section) in fields.items() if section is not None}

    @property
    def compares_answers(self) -> bool:
        return self.answer != "none"

    @property
    def reward_weights(self) -> dict[str, float]:
        return super().reward_weights if self.compares_answers else {}

    @check
    def _packages_are_installed(self) -> Problems:
        for field, package in (("mcp", "mcp"), ("retrieval", "bm25s")):
            if (value := getattr(self, field)) and find_spec(package) is None:
                fix = f'the package {package} is not installed; run `pip install "nemorl[tools]"`'
                yield Problem(field, str(value), fix)

    @check
    def _weight_has_an_effect(self) -> Problems:
        if self.answer == "none":
            reason = "answer is `none`, which gives no reward; set that to equal, or remove this"
            yield from self.without_effect(("weight", "answer_tag"), reason)

    @check
    def _there_are_tools(self) -> Problems:
        if not (self.tools or self.mcp or self.python or self.retrieval):
            yield Problem("tools", list(self.tools), "there is no tool; set tools, mcp, python or retrieval")

    @check
    def _functions_can_be_called(self) -> Problems:
        fields = dict(self.built_in_tools)  # by the names of the tools
        for index, path in enumerate(self.tools):
            field = f"tools.{index}"
            try:
                tool = function_at("nemorl.environments.tools:FunctionTool")(function_at(path), None)
            except (NotImported, ValueError) as error:
                yield Problem(field, path, str(error))
                continue
            name = tool.schema["function"]["name"]
            if (other := fields.setdefault(name, field)) != field:
                fix = f"the tool of {other} is named `{name}`, too; rename or remove one of them"
                yield Problem(field, path, fix)

    @check
    def _servers_can_be_started(self) -> Problems:
        for index, server in enumerate(self.mcp if self.placement.name != "server" else ()):
            if server.command and shutil.which(server.command[0]) is None:
                fix = "no such program on this machine; correct the path, or install it on all nodes"
                yield Problem(f"mcp.{index}.command.0", server.command[0], fix)

    @check
    def _calls_end_in_time(self, cluster: ClusterConfig) -> Problems:
        deadline, longest = cluster.deadlines.environment, self.call_seconds
        if self.python is not None:
            longest += self.python.wall_seconds
        if longest >= deadline:
            fix = f"calls may take {longest:g} s, with python.wall_seconds where there is such, and"
            fix = f"{fix} cluster.deadlines.environment is {deadline:g}; lower it, or raise that"
            yield Problem("call_seconds", self.call_seconds, fix)


class CustomEnvConfig(EnvBase):
    """A custom environment (docs/environments.md)."""

    calls_model: ClassVar[bool | None] = None
    name: Literal["custom"]
    factory: str = Field(pattern=r"^[\w.]+:\w+$|^[\w.-]+$")
    """`package.module:Factory`, a class with the methods of `nemorl.trajectories.EnvironmentFactory`; or the
    name of an entry point of the group `nemorl.environments`, of an installed package."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""

    def make_factory(self) -> Any:
        """Construct the factory with its options. Raises NotImported, and what the constructor raises."""
        return function_at(_installed(self.factory))(**self.options)

    @cached_property
    def reward_weights(self) -> dict[str, float]:
        """Weights that the factory declares; empty if it cannot be constructed, which `check` reports."""
        try:
            return dict(call_within(30.0, self.make_factory).reward_weights)
        except Exception:  # noqa: BLE001  code of the user's
            return {}


class ProgramEnvConfig(EnvBase):
    """A program in any language as agent, with an OpenAI endpoint for the policy (docs/agents.md)."""

    factory_path: ClassVar[str] = "nemorl.environments.program:ProgramFactory"
    calls_model: ClassVar[bool | None] = True
    name: Literal["program"]
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments; no shell reads them."""
    time_limit_seconds: float = Field(600.0, gt=0)
    """Time of an episode, calls of the model included; a program that takes longer has failed."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the rewards that the program gives, by name; further rewards are those of `rewards`."""
    pass_environment: tuple[str, ...] = ()
    """Environment variables that the program inherits in addition to PATH, HOME, LANG and the like."""

    @property
    def reward_weights(self) -> dict[str, float]:
        return dict(self.weights)

    @check
    def _the_program_is_there(self) -> Problems:
        if shutil.which(self.command[0]) is None:
            fix = "no such program on this machine; correct the path, or install it on all nodes"
            yield Problem("command.0", self.command[0], fix)


class UserSimulatorEnvConfig(EnvBase):
    """A conversation with a user that a model behind an OpenAI endpoint plays; `rewards` score it."""

    factory_path: ClassVar[str] = "nemorl.environments.user_simulator:UserSimulatorFactory"
    needs_chat: ClassVar[bool] = True
    name: Literal["user_simulator"]
    url: str
    """Address of the endpoint up to and with `/v1`, such as that of `nemorl serve`."""
    model: str = Field(min_length=1)
    """The endpoint's name of the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key."""
    persona_key: str = "persona"
    """Column of the dataset that says who the user is and what the user knows, likes and is after."""
    instructions: str = (
        "Play a user who talks with an assistant. {persona}\n"
        "Write only what the user says next. When the user has nothing more to say, write {end_phrase}"
    )
    """The system prompt of the model that plays; `{persona}` and `{end_phrase}` are replaced."""
    end_phrase: str = Field("[END]", min_length=1)
    """A turn of the user with this text ends the conversation; the policy does not see it."""
    max_turns: int = Field(8, ge=1)
    """Turns of the policy, after the last of which the conversation ends."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of the user."""
    max_tokens: int = Field(256, ge=1)
    """Tokens of a turn of the user."""
    call_seconds: float = Field(30.0, gt=0)
    """Time of a turn of the user; an endpoint that takes longer is lost, and its trajectories are sampled
    again."""

    @check
    def _address_is_complete(self) -> Problems:
        if not is_address(self.url):
            yield Problem("url", self.url, ADDRESS)

    @check
    def _instructions_are_complete(self) -> Problems:
        for name in ("{persona}", "{end_phrase}"):
            if name not in self.instructions:
                yield Problem(
                    "instructions", self.instructions, f"{name} is missing; write it where it belongs"
                )

    @check
    def _turns_end_in_time(self, cluster: ClusterConfig) -> Problems:
        if self.call_seconds >= (deadline := cluster.deadlines.environment):
            fix = f"cluster.deadlines.environment is {deadline:g}; lower this, or raise that"
            yield Problem("call_seconds", self.call_seconds, fix)


class ServiceEnvConfig(EnvBase):
    """An environment that only its server has, in any language (docs/environment_service.md)."""

    name: Literal["service"]
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the rewards that it gives, by name; further rewards are those of `rewards`."""

    @property
    def reward_weights(self) -> dict[str, float]:
        return dict(self.weights)

    def make_factory(self) -> Any:
        raise NotImported("this environment runs behind its server; set placement, or use another env")

    @check
    def _there_is_a_server(self) -> Problems:
        if self.placement.name != "server":
            fix = "only its server has this environment; set it to {name: server, url: …}"
            yield Problem("placement.name", self.placement.name, fix)


_OneTurn = SingleTurnEnvConfig | MathEnvConfig | ReasoningGymEnvConfig | CodeEnvConfig
_Games = GuessNumberEnvConfig | SlidingPuzzleEnvConfig | WordleEnvConfig
_WithOthers = ToolsEnvConfig | UserSimulatorEnvConfig
_WithTools = TerminalEnvConfig | ServerEnvConfig
_SeveralTurns = CalculatorEnvConfig | ChainedSumsEnvConfig | _WithTools | _WithOthers | _Games
_Others = ProgramEnvConfig | ServiceEnvConfig | CustomEnvConfig
_OnText = GymnasiumEnvConfig | SkyrlGymEnvConfig | OpenRLHFEnvConfig
_Libraries = _OnText | TextArenaEnvConfig | VerifiersEnvConfig | AviaryEnvConfig
OneEnvConfig = Annotated[_OneTurn | _SeveralTurns | _Libraries | _Others, Variants(SingleTurnEnvConfig)]


def _installed(factory: str) -> str:
    """The import path of a factory that may be the name of an entry point. Raises NotImported."""
    if ":" in factory:
        return factory
    points = entry_points(group=ENTRY_POINTS)
    if factory not in points.names:
        known = f"there are {', '.join(sorted(points.names))}" if points.names else "there is none"
        fix = "install the package, or write package.module:Factory"
        raise NotImported(f"no entry point of {ENTRY_POINTS} has this name ({known}); {fix}")
    return points[factory].value


class ByTaskEnvConfig(Config):
    """Several environments: a column of the dataset names that of each task."""

    name: Literal["by_task"]
    key: str = "env"
    """The column. With `source`, the sources of a mixture have the names of their environments."""
    environments: dict[Key, OneEnvConfig] = Field(min_length=1)
    """The environments, by names of your choice: metrics `environment/NAME/…`."""

    def name_for(self, columns: Mapping[str, Any]) -> str:
        name = columns.get(self.key)
        if isinstance(name, str) and name in self.environments:
            return name
        known = ", ".join(self.environments)
        raise ValueError(f"the column `{self.key}` is {name!r}; set it to one of env.environments: {known}")

    @property
    def reward_weights(self) -> dict[str, float]:
        return {
            name: weight
            for environment in self.environments.values()
            for name, weight in environment.reward_weights.items()
        }

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(player for one in self.environments.values() for player in one.players)

    @property
    def metrics(self) -> Iterator[str]:
        for name in self.environments:
            yield from (f"environment/{name}/{kind}" for kind in ("share", "errors", "turns", "reward"))
            yield from self.environments[name].metrics

    @check
    def _a_reward_has_one_weight(self) -> Problems:
        weights: dict[str, float] = {}
        for name, environment in self.environments.items():
            for reward, weight in environment.reward_weights.items():
                if weights.setdefault(reward, weight) != weight:
                    fix = f"another environment gives `{reward}` the weight {weights[reward]:g}; set the same"
                    yield Problem(f"environments.{name}.weight", weight, fix)


EnvConfig = Annotated[
    _OneTurn | _SeveralTurns | _Libraries | _Others | ByTaskEnvConfig, Variants(SingleTurnEnvConfig)
]


def environments_in(env: EnvConfig) -> Iterator[tuple[str, EnvBase]]:
    """Each environment with the path of its section."""
    for name, environment in env.environments.items():
        yield f"env.environments.{name}" if name else "env", environment


Signature = Literal["trl", "verl", "openrlhf"]


class RewardBase(Config):
    call_metrics: ClassVar[tuple[str, ...]] = ("errors", "seconds", "waiting", "retries")
    """Metrics of its calls: `reward_KIND/NAME`."""
    named_by: ClassVar[str] = "kind"  # the field that it is called by where it has no name
    kind: str
    """The kind of reward."""
    name: str | None = Field(None, min_length=1, json_schema_extra=SIMPLE)
    """Its name in metrics and filters; the kind, or the function's name, when not given."""
    weight: float = Field(1.0, json_schema_extra=SIMPLE)
    """Factor of this reward in the sum."""
    deadline: float | None = Field(None, gt=0)
    """Seconds of one call, including retries but not waiting; null is `cluster.deadlines.environment`."""
    max_concurrent: int = Field(8, ge=1, json_schema_extra=EXPERT)
    """Concurrent calls of each rollout worker; more wait."""
    on_error: OnError = "skip"
    """`skip`: leave a trajectory that cannot be scored out of training and count it. `drop_group`: drop its
    group, which is sampled again. `zero`: the reward is 0. `fail`: end the run."""

    @property
    def metric(self) -> str:
        """Its name in metrics; that of a function without a name is behind the colon."""
        return self.name or str(getattr(self, self.named_by)).rpartition(":")[2]

    @property
    def field(self) -> str:
        """The field that the name comes from, for messages."""
        return "name" if self.name is not None else self.named_by


class FunctionRewardConfig(RewardBase):
    call_metrics: ClassVar[tuple[str, ...]] = ("errors", "seconds", "waiting")  # no call is retried
    named_by: ClassVar[str] = "function"
    kind: Literal["function"] = "function"
    """A function of the answers of a group, or of one answer."""
    function: str = Field(min_length=1)
    """A built-in reward's name, or `package.module:function`."""
    signature: Signature | None = None
    """How the function is called: as TRL, verl or OpenRLHF do; by its parameters when not given."""
    score_key: str | None = Field(None, min_length=1)
    """The key of the reward where the function returns a dict; null is `score` for verl's signature and
    `rewards` for OpenRLHF's. Several rewards can be keys of one function, which is then called for each."""
    arguments: dict[str, Any] = Field(default_factory=dict, json_schema_extra=SIMPLE)
    """Keyword arguments bound to the function."""


class ServiceRewardBase(RewardBase):
    url: str = Field(min_length=1)
    """Address of the server up to and with `/v1`; for vLLM's `/classify` without it."""
    model: str = Field(min_length=1)
    """The server's name of the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself never is in a config."""
    max_retries: int = Field(3, ge=0)
    """Retries of a request after status 429, 5xx or a broken connection; counted in the metrics."""

    @check
    def _address_is_complete(self) -> Problems:
        if not is_address(self.url):
            yield Problem("url", self.url, ADDRESS)


StepReduction = Literal["min", "prod", "mean", "last", "sum"]


class StepRewardConfig(Config):
    """The model is a process reward model, which says of each step how likely it is right."""

    separator: str = "\n"
    """Ends a step, as in the model's training data; empty: each token of the model is a step."""
    reduce: StepReduction = "min"
    """How the probabilities of the steps become the reward of an answer. What a step adds to it is its own
    reward, for advantages of turns and of tokens."""


class ModelRewardConfig(ServiceRewardBase):
    kind: Literal["model"]
    """A reward model behind a URL: `nemorl serve reward`, or vLLM."""
    protocol: Literal["nemorl", "vllm"] = "nemorl"
    """`nemorl`: what `nemorl serve reward` answers. `vllm`: vLLM's `/classify`, without its activation."""
    batch_size: int = Field(16, ge=1)
    """Most answers of one request; vLLM takes conversations one by one."""
    steps: StepRewardConfig | None = None
    """Score the steps of answers; null scores answers as a whole."""

    @check
    def _steps_are_served(self) -> Problems:
        if self.steps is not None and self.protocol == "vllm":
            fix = "vLLM's /classify has no scores of steps; use `nemorl serve reward` and protocol nemorl"
            yield Problem("steps", "set", f"{fix}, or remove it")


class LocalModelRewardConfig(RewardBase, ModelGroupConfig):
    kind: Literal["local_model"]
    """A reward model in processes of the run, of the same kind as the policy's; it is not trained."""
    model_path: Path
    """Folder of a …ForSequenceClassification with one label; it uses its tokenizer and chat template."""
    normalize_values: bool = Field(False, json_schema_extra=EXPERT)
    """Subtract `mean` of the model's config.json from scores and divide them by its `std` (OpenRLHF's
    `normalize_enable`)."""
    layout: LayoutConfig = LayoutConfig()
    """Its layout over processes."""
    batch_size: int = Field(16, ge=1)
    """Most answers of one request to it; it computes several requests together."""
    steps: StepRewardConfig | None = None
    """Score the steps of answers; null scores answers as a whole."""

    def worker_config(self, policy: PolicyConfig) -> PolicyConfig:
        fields = {"head": "scalar", "tokenizer": TokenizerConfig(), "recompute": NoRecompute()}
        fields |= {"normalize_values": self.normalize_values}
        return super().worker_config(policy).model_copy(update=fields)


class JudgeRewardConfig(ServiceRewardBase):
    kind: Literal["judge"]
    """A model behind any OpenAI-compatible chat endpoint that reads answers and gives them scores."""
    prompt: str = Field(min_length=1)
    """The prompt of the judge. `{prompt}`, `{answer}` (the task's expected answer) and `{completion}` or, of
    a group, `{completions}` (numbered from 1) are replaced by the task's."""
    system_prompt: str | None = None
    """Put before it as a system message."""
    ranks_groups: bool = False
    """False: one request for each answer. True: one request for all answers of a group, which makes scores
    comparable."""
    parser: Literal["json", "regex"] = "json"
    """How scores are read: `json` takes the last JSON object, `{"score": 7}`, or `{"scores": [7, 3]}` of a
    group; `regex` takes the last match of `pattern`, or as many matches as a group has answers."""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """With `parser: regex`: its first group is the number."""
    min_score: float = 0.0
    """The score that is worth 0; one below it is an error."""
    max_score: float = 10.0
    """The score that is worth 1; one above it is an error."""
    max_tokens: int = Field(512, ge=1)
    """Tokens of the judge's answer."""
    temperature: float = Field(0.0, ge=0)
    """Temperature of the judge; 0 gives the same answer the same score."""

    @check
    def _prompt_shows_the_answers(self) -> Problems:
        forms = ["{completion}", "{completions}"]
        shown, other = forms[::-1] if self.ranks_groups else forms
        ranks = f"ranks_groups is {str(self.ranks_groups).lower()}"
        if shown not in self.prompt:
            yield Problem("prompt", self.prompt, f"{ranks}, and {shown} is missing; add it")
        elif other in self.prompt:
            yield Problem("prompt", self.prompt, f"{ranks}, so {other} is not replaced; use {shown}")

    @check
    def _scores_can_be_read(self) -> Problems:
        if self.max_score <= self.min_score:
            fix = f"it is worth 1 and min_score, {self.min_score:g}, is worth 0; set it to more than that"
            yield Problem("max_score", self.max_score, fix)
        if self.parser != "regex":
            reason = "parser is `json`, which does not use it; set that to regex, or remove this"
            yield from self.without_effect(("pattern",), reason)
            return
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            yield Problem("pattern", self.pattern, f"invalid regular expression ({error})")
        else:
            if not groups:
                fix = "the score is its first group, and it has none; put parentheses around the number"
                yield Problem("pattern", self.pattern, fix)


RewardConfig = Annotated[
    FunctionRewardConfig | ModelRewardConfig | LocalModelRewardConfig | JudgeRewardConfig,
    Variants(FunctionRewardConfig, by="kind"),
]
Rewards = tuple[RewardConfig, ...]
