"""`env`: the environment that the policy acts in. `rewards`: rewards in addition to the environment's."""

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .auxiliary import ModelGroupConfig
from .base import Config, Variants, call_within, check, function_at
from .generation import ADDRESS, is_address
from .policy import LayoutConfig, NoRecompute, PolicyConfig, TokenizerConfig

# Of a reward that cannot be computed or an environment that fails; all but `fail` are counted.
OnError = Literal["skip", "drop_group", "zero", "fail"]


class EnvBase(Config):
    factory_path: ClassVar[str]  # `module:class` of an EnvironmentFactory that takes this section
    dataset: ClassVar[str | None] = None  # name of the only datasets that it supports; None supports all
    needs_answer: ClassVar[bool] = False  # of each task
    needs_chat: ClassVar[bool] = False  # `data.chat`, as its messages have roles
    has_one_turn: ClassVar[bool] = False

    name: str
    max_retries: int = Field(1, ge=0)
    """Times a trajectory whose environment fails or hangs is sampled again, in a new environment."""
    on_error: OnError = "skip"
    """After that, `skip`: leave the trajectory out of training and count it. `drop_group`: drop its group,
    which is sampled again. `zero`: train on it as far as it came, with no reward of the environment. `fail`:
    end the run."""

    @property
    def reward_weights(self) -> dict[str, float]:
        weight = getattr(self, "weight", None)
        return {} if weight is None else {self.name: weight}

    def make_factory(self) -> Any:
        """Construct the factory. Raises NotImported."""
        return function_at(self.factory_path)(self)


class SingleTurnEnvConfig(EnvBase):
    """One answer, scored by `rewards` alone."""

    factory_path: ClassVar[str] = "nemorl.trajectories:SingleTurnFactory"
    has_one_turn: ClassVar[bool] = True
    name: Literal["single_turn"] = "single_turn"


class MathEnvConfig(EnvBase):
    """One answer, compared with the task's by the math-verify library."""

    factory_path: ClassVar[str] = "nemorl.environments.math_answers:MathFactory"
    needs_answer: ClassVar[bool] = True
    has_one_turn: ClassVar[bool] = True
    name: Literal["math"]
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
    max_turns: int = Field(4, ge=1)
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


class CustomEnvConfig(EnvBase):
    """A custom environment (docs/environments.md)."""

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
        """Weights that the factory declares; empty if it cannot be constructed, which `check` reports."""
        try:
            return dict(call_within(30.0, self.make_factory).reward_weights)
        except Exception:  # noqa: BLE001  code of the user's
            return {}


_OneTurn = SingleTurnEnvConfig | MathEnvConfig | ReasoningGymEnvConfig
_SeveralTurns = CalculatorEnvConfig | ChainedSumsEnvConfig
EnvConfig = Annotated[_OneTurn | _SeveralTurns | CustomEnvConfig, Variants(SingleTurnEnvConfig)]

Signature = Literal["trl", "verl", "openrlhf"]


class RewardBase(Config):
    call_metrics: ClassVar[tuple[str, ...]] = ("errors", "seconds", "waiting", "retries")
    """Metrics of its calls: `reward_KIND/NAME`."""
    named_by: ClassVar[str] = "kind"  # the field that it is called by where it has no name
    kind: str
    """The kind of reward."""
    name: str | None = Field(None, min_length=1)
    """Its name in metrics and filters; the kind, or the function's name, when not given."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    deadline: float | None = Field(None, gt=0)
    """Seconds of one call, including retries but not waiting; null is `cluster.deadlines.environment`."""
    max_concurrent: int = Field(8, ge=1)
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
    arguments: dict[str, Any] = Field(default_factory=dict)
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


class ModelRewardConfig(ServiceRewardBase):
    kind: Literal["model"]
    """A reward model behind a URL: `nemorl serve reward`, or vLLM."""
    protocol: Literal["nemorl", "vllm"] = "nemorl"
    """`nemorl`: what `nemorl serve reward` answers. `vllm`: vLLM's `/classify`, without its activation."""
    batch_size: int = Field(16, ge=1)
    """Most answers of one request; vLLM takes conversations one by one."""


class LocalModelRewardConfig(RewardBase, ModelGroupConfig):
    kind: Literal["local_model"]
    """A reward model in processes of the run, of the same kind as the policy's; it is not trained."""
    model_path: Path
    """Folder of a …ForSequenceClassification with one label; it uses its tokenizer and chat template."""
    layout: LayoutConfig = LayoutConfig()
    """Its layout over processes."""
    batch_size: int = Field(16, ge=1)
    """Most answers of one request to it; it computes several requests together."""

    def worker_config(self, policy: PolicyConfig) -> PolicyConfig:
        fields = {"head": "scalar", "tokenizer": TokenizerConfig(), "recompute": NoRecompute()}
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
