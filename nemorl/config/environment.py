"""`rewards`: what the policy is paid for, beside what the environment pays.

`env`: what the policy acts in.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .auxiliary import ModelGroupConfig
from .base import Config, call_within, default_variant, function_at
from .policy import LayoutConfig, NoRecompute, PolicyConfig, TokenizerConfig


class EnvBase(Config):
    """What all environments have in common."""

    factory_path: ClassVar[str]  # `module:class` of an EnvironmentFactory that takes this section

    def make_factory(self) -> Any:
        """Construct the factory. Raises NotImported."""
        return function_at(self.factory_path)(self)


class SingleTurnEnvConfig(EnvBase):
    """One answer, scored by `rewards` alone."""

    factory_path: ClassVar[str] = "nemorl.environments.single_turn:SingleTurnFactory"
    name: Literal["single_turn"] = "single_turn"

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name: none."""
        return {}


class MathEnvConfig(EnvBase):
    """One answer, compared with the task's by the math-verify library."""

    factory_path: ClassVar[str] = "nemorl.environments.math_answers:MathFactory"
    name: Literal["math"]
    weight: float = 1.0
    """Weight of the reward `math` in the sum."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name."""
        return {self.name: self.weight}


class ReasoningGymEnvConfig(EnvBase):
    """One answer, scored by the reasoning-gym dataset that made the task."""

    factory_path: ClassVar[str] = "nemorl.environments.reasoning_gym:ReasoningGymFactory"
    name: Literal["reasoning_gym"]
    answer_tag: str | None = "answer"
    """Score what stands in `<answer>...</answer>`, an empty answer if missing; null scores the whole text."""
    weight: float = 1.0
    """Weight of the reward `reasoning_gym` in the sum."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name."""
        return {self.name: self.weight}


class CalculatorEnvConfig(EnvBase):
    """Several turns: the policy may call a calculator before it answers; the final answer is compared."""

    factory_path: ClassVar[str] = "nemorl.environments.calculator:CalculatorFactory"
    name: Literal["calculator"]
    max_turns: int = Field(4, ge=1)
    """Turns of the policy before the conversation ends without an answer."""
    weight: float = 1.0
    """Weight of the reward `calculator` in the sum."""
    call_weight: float = 0.0
    """Weight of the reward `calculator_call`, which pays each turn whose call the calculator can work out."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name."""
        of_calls = {"calculator_call": self.call_weight} if self.call_weight else {}
        return {self.name: self.weight, **of_calls}


class ChainedSumsEnvConfig(EnvBase):
    """Several turns that a tiny model can do: sums of which each goes on from the answer before it."""

    factory_path: ClassVar[str] = "nemorl.environments.chained_sums:ChainedSumsFactory"
    name: Literal["chained_sums"]
    num_sums: int = Field(2, ge=2)
    """Turns of the policy, a sum each."""
    weight: float = 1.0
    """Weight of the reward `chained_sums`, which pays the last sum."""
    turn_weight: float = Field(1.0, gt=0)
    """Weight of the reward `chained_sums_turn`, which pays each sum before the last one."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that it pays itself, by name."""
        return {self.name: self.weight, "chained_sums_turn": self.turn_weight}


FACTORY_SECONDS = 30.0  # most that the constructor of a custom factory may take


class CustomEnvConfig(EnvBase):
    """An environment of your own (docs/environments.md)."""

    name: Literal["custom"]
    factory: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:Factory`, a class with the methods of `nemorl.trajectories.EnvironmentFactory`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""

    def make_factory(self) -> Any:
        """Construct the factory with its options. Raises NotImported, and what the constructor raises."""
        return function_at(self.factory)(**self.options)

    @cached_property
    def reward_weights(self) -> dict[str, float]:
        """Weights that the factory declares; empty where it cannot be constructed, which `check` reports."""
        try:
            return dict(call_within(FACTORY_SECONDS, self.make_factory).reward_weights)
        except Exception:  # noqa: BLE001  code of the user's
            return {}


EnvConfig = Annotated[
    SingleTurnEnvConfig
    | MathEnvConfig
    | ReasoningGymEnvConfig
    | CalculatorEnvConfig
    | ChainedSumsEnvConfig
    | CustomEnvConfig,
    Field(discriminator="name"),
    default_variant(SingleTurnEnvConfig),
]


Signature = Literal["trl", "verl", "openrlhf"]


class RewardBase(Config):
    """What all rewards have in common."""

    kind: str
    """Which one it is."""
    name: str | None = Field(None, min_length=1)
    """What metrics and filters call it; when not given its kind, or a function's own name."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    deadline: float | None = Field(None, gt=0)
    """Seconds of one call, retries included and waiting for a place not; null is
    `cluster.deadlines.environment`."""
    max_concurrent: int = Field(8, ge=1)
    """Calls under way at a time in each rollout worker; more wait."""
    on_error: Literal["skip", "fail"] = "skip"
    """`skip`: a trajectory that cannot be scored does not train and is counted. `fail`: the run ends."""

    @property
    def metric(self) -> str:
        """What metrics call it: its name, or its kind."""
        return self.name or self.kind

    @property
    def field(self) -> str:
        """The field that the name comes from, for messages."""
        return "name" if self.name is not None else "kind"


class FunctionRewardConfig(RewardBase):
    kind: Literal["function"] = "function"
    """A function of the answers of a group, or of one answer."""
    function: str = Field(min_length=1)
    """A built-in reward's name, or `package.module:function`."""
    signature: Signature | None = None
    """How the function is called: as TRL, verl or OpenRLHF do; told from its parameters when not given."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the function."""

    @property
    def metric(self) -> str:
        """Its name, or the function's own."""
        return self.name or self.function.rpartition(":")[2]

    @property
    def field(self) -> str:
        """The function names itself."""
        return "name" if self.name is not None else "function"


class ServiceRewardBase(RewardBase):
    """A reward by HTTP."""

    url: str = Field(min_length=1)
    """Address of the server up to and with `/v1`; for vLLM's `/classify` without it."""
    model: str = Field(min_length=1)
    """What the server calls the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself never stands in a config."""
    max_retries: int = Field(3, ge=0)
    """Times a request is sent again after status 429, 5xx or a broken connection; counted in the metrics."""


class ModelRewardConfig(ServiceRewardBase):
    kind: Literal["model"]
    """A reward model behind a URL: `nemorl serve reward`, or vLLM."""
    protocol: Literal["nemorl", "vllm"] = "nemorl"
    """`nemorl`: what `nemorl serve reward` answers. `vllm`: vLLM's `/classify`, without its activation."""
    batch_size: int = Field(16, ge=1)
    """Most answers of one request; vLLM takes conversations one by one."""


class LocalModelRewardConfig(RewardBase, ModelGroupConfig):
    kind: Literal["local_model"]
    """A reward model in processes of the run's own, of the same kind as the policy's; it does not learn."""
    model_path: Path
    """Folder of a …ForSequenceClassification with one label; its tokenizer and chat template are its own."""
    layout: LayoutConfig = LayoutConfig()
    """How it is spread over processes."""
    batch_size: int = Field(16, ge=1)
    """Most answers of one request to it; it computes several requests together."""

    def worker_config(self, policy: PolicyConfig) -> PolicyConfig:
        """With a scalar head that reads text by a tokenizer of its own, and without training."""
        own = {"head": "scalar", "tokenizer": TokenizerConfig(), "lora": None, "recompute": NoRecompute()}
        return super().worker_config(policy).model_copy(update=own)


class JudgeRewardConfig(ServiceRewardBase):
    kind: Literal["judge"]
    """A model behind any OpenAI-compatible chat endpoint that reads answers and gives them scores."""
    prompt: str = Field(min_length=1)
    """What the judge is asked. `{prompt}`, `{answer}` (what the task expects) and, of one answer,
    `{completion}` or, of a group, `{completions}` (numbered from 1) stand for the task's own."""
    system_prompt: str | None = None
    """Put before it as a system message."""
    ranks_groups: bool = False
    """False: each answer is shown by itself. True: the judge sees all answers of a group, which costs one
    request and makes scores comparable, and gives each a score."""
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
    """Of the judge; 0 lets it say the same of the same answer."""


RewardConfig = Annotated[
    FunctionRewardConfig | ModelRewardConfig | LocalModelRewardConfig | JudgeRewardConfig,
    Field(discriminator="kind"),
    default_variant(FunctionRewardConfig, "kind"),
]
