"""`algorithm`: what is optimised."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Config
from .generation_base import SamplingConfig

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"
]


class KLConfig(Config):
    coefficient: float = Field(0.0, ge=0)
    """Weight of the divergence from the reference policy in the loss; 0 keeps no reference at all."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence per token (Schulman, "Approximating KL divergence", 2020)."""


class PolicyLossConfig(Config):
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above 1 + clip_high."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number; sums are divided by counts of the whole batch."""
    aggregation_length: int | None = Field(None, ge=1)
    """The fixed length that divides in `seq-mean-token-sum-norm`."""
    kl: KLConfig = KLConfig()
    """Divergence from the reference policy."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy that is added to the objective."""


class AdvantageConfig(Config):
    normalize: bool = True
    """Divide by the standard deviation of the group (unbiased)."""
    leave_one_out: bool = False
    """The baseline of a sample is the mean of the others instead of the mean of all."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""


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
    pass_reward: float = 1.0
    """A sample passes when its reward is at least this."""
    sampling: SamplingConfig | None = None
    """Sampling of the validation; the training's when not given."""

    @property
    def scheduled(self) -> bool:
        """Whether training validates at all."""
        return self.period is not None or self.at_start or self.at_end


class GrpoConfig(Config):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300)."""

    name: Literal["grpo"]
    num_steps: int = Field(ge=1)
    """Steps of the run: each samples, scores, learns and hands the weights over."""
    num_prompts_per_step: int = Field(ge=1)
    """Tasks sampled in a step."""
    num_generations_per_prompt: int = Field(ge=1)
    """Trajectories of each task, a group."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps that share the batch of one step; divides the number of trajectories."""
    max_staleness: int = Field(0, ge=0)
    """Versions that the sampling weights may lie behind the trained ones; 0 is synchronous."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards of a group become advantages."""
    loss: PolicyLossConfig = PolicyLossConfig()
    """The policy's loss."""
    validation: ValidationConfig = ValidationConfig()
    """Measuring on `data.validation`."""
    max_logprob_gap: float = Field(0.2, gt=0)
    """Stop when the mean absolute difference between the engine's and the trainer's logprobs is larger."""
    max_token_logprob_gap: float | None = Field(None, gt=0)
    """Stop when that difference is larger at any token; not looked at when not given."""
    logprob_gap_period: int | None = Field(None, ge=1)
    """Steps between comparisons before an update, each a forward pass; the first batch always has one."""

    @property
    def trajectories_per_step(self) -> int:
        """Sequences that a step samples and learns from."""
        return self.num_prompts_per_step * self.num_generations_per_prompt


class SftConfig(Config):
    """Supervised fine-tuning on the answers of the training tasks."""

    name: Literal["sft"]
    num_steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_size: int = Field(ge=1)
    """Sequences of one step."""
    train_on: Literal["completion", "all"] = "completion"
    """Learn the answer's tokens, or all tokens."""
    aggregation: Aggregation = "token-mean"
    """How per-token losses become one number."""
    validation: ValidationConfig = ValidationConfig()
    """Measuring on `data.validation`, by sampling."""


AlgorithmConfig = Annotated[GrpoConfig | SftConfig, Field(discriminator="name")]
