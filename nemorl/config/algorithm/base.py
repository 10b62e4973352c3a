"""What all algorithms share."""

from typing import Annotated, Literal

from pydantic import Field

from nemorl.config.base import Config
from nemorl.config.generation import SamplingConfig

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
]


class ValidationConfig(Config):
    period: int | None = Field(None, ge=1)
    """Steps between validations; null validates only where `at_start` and `at_end` say."""
    at_start: bool = False
    """Validate before the first step."""
    at_end: bool = False
    """Validate after the last step."""
    num_prompts: int | None = Field(None, ge=1)
    """Tasks of one validation; all of them when not given."""
    num_generations_per_prompt: int = Field(1, ge=1)
    """Samples of each task."""
    pass_at_k: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """The k of pass@k (Chen et al. 2021, unbiased); each at most `num_generations_per_prompt`."""
    cons_at_k: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """The k of cons@k: whether the answer that most of a task's first k samples give is right."""
    pass_reward: float = 1.0
    """A sample passes when its reward is at least this."""
    sampling: SamplingConfig | None = None
    """Sampling of the validation; the training's when not given."""

    @property
    def scheduled(self) -> bool:
        """Whether training validates at all."""
        return self.period is not None or self.at_start or self.at_end


class EarlyStopConfig(Config):
    metric: str
    """Figure that is watched, such as `validation/accuracy`."""
    patience: int = Field(3, ge=1)
    """Measurements one after the other without a better value, after which the run ends."""
    min_delta: float = Field(0.0, ge=0)
    """A value is better only where it is by more than this."""
    higher_is_better: bool = True
    """Whether the best value is the highest."""


class AlgorithmBase(Config):
    """Fields and facts that the rest of nemorl needs of any algorithm."""

    num_steps: int = Field(ge=1)
    """Steps of the run."""
    validation: ValidationConfig = ValidationConfig()
    """Measuring on `data.validation`, by sampling."""
    early_stop: EarlyStopConfig | None = None
    """End the run before its last step when a figure gets no better; null never does."""

    @property
    def online(self) -> bool:
        """Whether training itself samples."""
        return False

    @property
    def generates(self) -> bool:
        """Whether the run samples at all, be it for validation."""
        return self.online or self.validation.scheduled

    @property
    def units_per_update(self) -> int:
        """What an optimizer step divides over ranks: sequences, or several that go together."""
        return self.sequences_per_update

    @property
    def sequences_per_update(self) -> int:
        """Sequences of one optimizer step, over all data-parallel ranks."""
        raise NotImplementedError

    @property
    def keeps_reference(self) -> bool:
        """Whether logprobs of the reference policy are needed."""
        return False

    @property
    def keeps_critic(self) -> bool:
        """Whether a critic learns beside the policy."""
        return False

    @property
    def keeps_teachers(self) -> bool:
        """Whether teachers say what they think of the policy's tokens."""
        return False
