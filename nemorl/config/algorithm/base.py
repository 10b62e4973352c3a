"""Fields and facts of all algorithms."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nemorl.config.base import EXPERT, SIMPLE, Config, check
from nemorl.config.generation import GenerationConfig, SamplingConfig
from nemorl.config.policy import MOST_DRAFT_STEPS, MOST_FURTHER_TOKENS
from nemorl.config.yaml import merged
from nemorl.errors import Problem, Problems

PROCESSES = ("policy", "critic", "reference", "teacher", "reward", "generation", "rollout")
WAITS = ("environment", "validation", "checkpoint", "driver")  # of a step, for other reasons
TOTAL_LOSSES = ("loss/total", "loss/preference", "loss/sft")  # the first that there is, is the complete loss
GUARDED = ("loss", "grad_norm", "entropy", "logprob_gap")  # quantities of an update with limits
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
]
Part = str | dict[str, Any]  # the name of a section's variant, or its fields
FIXED_LENGTH = "seq-mean-token-sum-norm"  # which divides by a length that must be given


def of_stage(stage: str) -> tuple[str, ...]:
    """Metrics of a stage that computes with a model."""
    return tuple(f"{what}/{stage}" for what in ("flops", "tflops", "mfu"))


@dataclass(frozen=True)
class Preset:
    """A named algorithm: fields that lie under the experiment's `algorithm` as an inherited file would."""

    title: str  # short, as the paper calls it
    paper: str  # a link
    settings: dict[str, Any]


def preset(title: str, paper: str, loss: Part, advantage: Part = "", **parts: Any) -> Preset:
    """A row: `paper` may be the number of arXiv, and a loss or an advantage its name alone."""
    given = {"advantage": advantage, "loss": loss}
    settings = {
        name: {"name": part} if isinstance(part, str) else part for name, part in given.items() if part
    }
    return Preset(title, paper if "/" in paper else f"https://arxiv.org/abs/{paper}", settings | parts)


def online_preset(
    title: str, paper: str, advantage: Part = "group", loss: Part = "clip", **parts: Any
) -> Preset:
    """A row of an online algorithm, whose advantage and loss are GRPO's unless given."""
    return preset(title, paper, loss, advantage, **parts)


class ValidationConfig(Config):
    period: int | None = Field(None, ge=1, json_schema_extra=SIMPLE)
    """Steps between validations; null validates only as `at_start` and `at_end` configure."""
    at_start: bool = False
    """Validate before the first step."""
    at_end: bool = Field(False, json_schema_extra=SIMPLE)
    """Validate after the last step."""
    num_prompts: int | None = Field(None, ge=1)
    """Tasks of one validation; all of them when not given."""
    num_generations_per_prompt: int = Field(1, ge=1)
    """Samples of each task."""
    pass_at_k: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """The k of pass@k (Chen et al. 2021, unbiased); each at most `num_generations_per_prompt`."""
    cons_at_k: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """The k of cons@k: whether the majority answer of a task's first k samples is right."""
    pass_reward: float = Field(1.0, json_schema_extra=EXPERT)
    """A sample passes when its reward is at least this."""
    sampling: SamplingConfig | None = None
    """Sampling of the validation; the training's when not given."""

    @property
    def scheduled(self) -> bool:
        return self.period is not None or self.at_start or self.at_end

    def metrics(self, prefix: str, rewards: Iterable[str]) -> Iterator[str]:
        """Names of what sampling a set measures; `prefix` is the set's, `rewards` are the rewards' names."""
        yield from (
            f"{prefix}/{name}" for name in ("length", "errors", *(f"reward/{name}" for name in rewards))
        )
        of_k = (*(f"pass@{k}" for k in self.pass_at_k), *(f"cons@{k}" for k in self.cons_at_k))
        for name in ("reward", "accuracy", *of_k):
            yield from (f"{prefix}/{name}{bound}" for bound in ("", "_low", "_high"))

    @check
    def _k_has_samples(self) -> Problems:
        samples = self.num_generations_per_prompt
        for field, name in (("pass_at_k", "pass@k"), ("cons_at_k", "cons@k")):
            for k in getattr(self, field):
                if k > samples:
                    have = f"{name} requires {k} samples of each task, and there are {samples}"
                    fix = f"{have}; raise num_generations_per_prompt, or remove this k"
                    yield Problem(field, list(getattr(self, field)), fix)

    @check
    def _greedy_samples_once(self, generation: GenerationConfig) -> Problems:
        sampling = self.sampling or generation.sampling
        if sampling.temperature == 0 and self.num_generations_per_prompt > 1:
            fix = "at temperature 0 all samples of a task are the same; set it to 1, or raise the temperature"
            yield Problem("num_generations_per_prompt", self.num_generations_per_prompt, fix)


class EarlyStopConfig(Config):
    metric: str
    """Metric that is watched, such as `validation/accuracy`."""
    patience: int = Field(3, ge=1)
    """Consecutive measurements without a better value after which the run ends."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest improvement that counts."""
    higher_is_better: bool = True
    """Whether the best value is the highest."""


class AlgorithmBase(Config):
    presets: ClassVar[Mapping[str, Preset]] = {}  # that its name may be one of
    head: ClassVar[Literal["lm", "scalar"]] = "lm"  # of the model that it trains
    online: ClassVar[bool] = False  # training itself samples
    trains_filtered: ClassVar[bool] = False  # its logprobs are of what the filters of sampling keep
    keeps_teachers: ClassVar[bool] = False  # which score tokens
    aligns_teachers: ClassVar[bool] = False  # which have tokens of their own, and read all texts
    sequences_per_unit: ClassVar[int] = 1  # 2 where it trains on pairs of answers
    reference_field: ClassVar[str | None] = None  # which adds a reference in separate processes

    num_steps: int = Field(ge=1)
    """Steps of the run."""
    validation: ValidationConfig = ValidationConfig()
    """Measuring on `data.validation`, by sampling."""
    early_stop: EarlyStopConfig | None = None
    """End the run before its last step if a metric stops improving; null never does."""

    @model_validator(mode="before")
    @classmethod
    def _over_preset(cls, section: Any) -> Any:
        preset = cls.presets.get(section.get("name", "")) if isinstance(section, dict) else None
        return merged(preset.settings, section) if preset else section

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset(
            {
                *(f"guards/{name}" for name in (*GUARDED, "rollbacks")),
                *("grad_norm", "lr", "skipped_updates", "updates/all", "updates/skipped", "updates/empty"),
                *("tflops/peak", *of_stage("training")),
                *("tokens/trained", "throughput/tokens_per_second", "models/restarts"),
                *(f"packing/{name}" for name in ("imbalance", "fill", "micro_batches", "shared", "padding")),
                # Of models with experts; checks of a config do not open the folder of the model.
                *("experts/load_max", "experts/load_max_of_a_layer", "experts/idle", "loss/balance"),
                "loss/router_z",
                # Of models with layers for further tokens, in all and by depth if there are several.
                *("mtp/loss", "mtp/accepted", "mtp/grad_norm"),
                *(f"mtp/{what}_{k + 1}" for what in ("loss", "accepted") for k in range(MOST_FURTHER_TOKENS)),
                # Of `policy.draft`, also by step if there are several.
                *("draft/loss", "draft/accuracy", "draft/grad_norm"),
                *(f"draft/{what}_{k + 1}" for what in ("loss", "accuracy") for k in range(MOST_DRAFT_STEPS)),
                *("time/step", "time/training", "time/checkpoint"),
                *(f"idle/{kind}" for kind in PROCESSES),
                *(f"critical/{what}" for what in (*PROCESSES, *WAITS)),
            }
        )

    @check
    def _aggregation_has_no_length(self) -> Problems:
        if getattr(self, "aggregation", None) == FIXED_LENGTH:
            name = getattr(self, "name", "")
            fix = f"`{name}` has no fixed length to divide by; use `seq-mean-token-mean` or `token-mean`"
            yield Problem("aggregation", FIXED_LENGTH, fix)

    @property
    def generates(self) -> bool:
        """True if the run samples at all, for training or for validation."""
        return self.online or self.validation.scheduled

    @property
    def allows_staleness(self) -> bool:
        return getattr(self, "max_staleness", 0) > 0

    @property
    def units_per_update(self) -> int:
        """What an optimizer step divides over all data-parallel ranks: sequences, or pairs of them."""
        raise NotImplementedError

    @property
    def sequences_per_update(self) -> int:
        """Sequences of one optimizer step, over all data-parallel ranks."""
        return self.units_per_update * self.sequences_per_unit

    @property
    def keeps_reference(self) -> bool:
        """True if logprobs of the reference policy are needed in every step."""
        return False

    @property
    def teacher_temperature(self) -> float:
        """By which teachers divide their logits, if the algorithm does not sample."""
        return 1.0

    @property
    def precomputes_reference(self) -> bool:
        """True if the reference's logprobs are computed before the first step."""
        return False

    @property
    def keeps_critic(self) -> bool:
        return getattr(self, "critic", None) is not None

    @property
    def needs_rewards(self) -> bool:
        """True if it trains on rewards, or validation measures them."""
        return self.generates
