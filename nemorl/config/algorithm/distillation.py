"""Learning from a teacher, on samples of the policy or on data; and from the best of the policy's samples."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemorl.config.base import Config, Variants, check
from nemorl.errors import Problems

from .base import Aggregation
from .offline import PAIR_METRICS, SFT_METRICS, OfflineBase, SampledValidationConfig, sft_problems
from .online import POLICY_METRICS, OnlineBase
from .pair_losses import LogisticLossConfig, PairLossConfig


class ReverseKlLossConfig(Config):
    """KL(policy || teacher), estimated from each sampled token alone (docs/distillation.md)."""

    metrics: ClassVar[frozenset[str]] = frozenset({"distillation/reverse_kl"})
    top_k: ClassVar[None] = None  # compares the sampled token alone
    name: Literal["reverse_kl"] = "reverse_kl"


class TopLossBase(Config):
    """Losses over the teacher's most likely tokens."""

    metrics: ClassVar[frozenset[str]] = frozenset({"distillation/forward_kl", "distillation/covered"})
    tokens: int = Field(32, ge=1)
    """Their number at each position, at most the vocabulary."""
    rest: Literal["one_outcome", "leave_out"] = "one_outcome"
    """All other tokens count as one more outcome; or are left out, and the rest is scaled to sum to 1."""

    @property
    def top_k(self) -> int | None:
        """Tokens of the teacher that are compared at each position."""
        return self.tokens


class ForwardKlLossConfig(TopLossBase):
    """KL(teacher || policy)."""

    name: Literal["forward_kl"]


class JsdLossConfig(TopLossBase):
    """Generalized Jensen-Shannon divergence (GKD, Agarwal et al. 2023, arXiv 2306.13649).

    `beta KL(teacher || m) + (1 - beta) KL(policy || m)` with `m = beta teacher + (1 - beta) policy`.
    """

    metrics: ClassVar[frozenset[str]] = TopLossBase.metrics | {"distillation/jsd"}
    name: Literal["jsd"]
    beta: float = Field(0.5, gt=0, lt=1)
    """Divided by `beta (1 - beta)` it converges to the forward KL as beta goes to 0, to the reverse for 1."""


TopLossConfig = Annotated[ForwardKlLossConfig | JsdLossConfig, Field(discriminator="name")]
DistillationLossConfig = Annotated[
    ReverseKlLossConfig | ForwardKlLossConfig | JsdLossConfig, Variants(ReverseKlLossConfig)
]


class OnPolicyDistillationConfig(OnlineBase):
    """The policy samples and teachers score its tokens; rewards are metrics only."""

    keeps_teachers: ClassVar[bool] = True
    compares_all_tokens: ClassVar[bool] = True
    name: Literal["on_policy_distillation"]
    loss: DistillationLossConfig = ReverseKlLossConfig()
    """The divergence of policy and teacher."""
    aggregation: Aggregation = "token-mean"
    """How divergences of tokens are aggregated."""
    teacher_key: str | None = None
    """Column of the tasks that names the teacher of each, if `teachers` has several."""

    @property
    def units_per_update(self) -> int:
        return self.trajectories_per_step

    @property
    def needs_rewards(self) -> bool:
        return self.validation.scheduled

    @property
    def metrics(self) -> frozenset[str]:
        return super().metrics | {*POLICY_METRICS, *self.loss.metrics, "time/teachers"}


class DistillationConfig(OfflineBase):
    """The answers of the training data, with the teacher's distribution at each of their tokens."""

    keeps_teachers: ClassVar[bool] = True
    name: Literal["distillation"]
    loss: TopLossConfig = ForwardKlLossConfig(name="forward_kl")
    """The divergence of policy and teacher."""
    train_on: Literal["completion", "all"] = "completion"
    """Train on the tokens of the assistant, or on all tokens."""
    aggregation: Aggregation = "token-mean"
    """How divergences of tokens are aggregated."""
    teacher_key: str | None = None
    """Column of the tasks that names the teacher of each, if `teachers` has several."""
    validation: SampledValidationConfig = SampledValidationConfig()
    """Measuring on `data.validation`: the loss where it has answers, and samples."""

    @property
    def loss_metrics(self) -> frozenset[str]:
        return self.loss.metrics | {"loss/total", "entropy"}


class PickedBase(OnlineBase):
    """Algorithms that select one or two samples of each task by their reward."""

    trained_metrics: ClassVar[frozenset[str]] = SFT_METRICS
    num_generations_per_prompt: int = Field(ge=2)
    """Samples of each task, from which one or two are selected by their reward."""
    num_epochs: int = Field(1, ge=1)
    """Updates on the samples that a step selected."""

    @property
    def metrics(self) -> frozenset[str]:
        return super().metrics | self.trained_metrics | {"picked"}

    @property
    def units_per_update(self) -> int:
        return self.num_prompts_per_step


class IterativePreferenceConfig(PickedBase):
    """The best and the worst sample of each task are a pair (Xu et al. 2023, arXiv 2312.16682; Dong et al.
    2024, arXiv 2405.07863). A task whose samples have equal rewards has none.
    """

    trained_metrics: ClassVar[frozenset[str]] = PAIR_METRICS
    sequences_per_unit: ClassVar[int] = 2
    name: Literal["iterative_dpo"]
    loss: PairLossConfig = LogisticLossConfig()
    """The loss of a pair; its margin is the difference of the rewards."""
    sft_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean negative logprob of the chosen samples' tokens, added to the loss."""

    @property
    def keeps_reference(self) -> bool:
        return self.loss.keeps_reference

    @property
    def min_members(self) -> int:
        return 2

    @check
    def _loss_has_its_sft_term(self) -> Problems:
        yield from sft_problems(self.loss, self.sft_coefficient)


class RejectionSamplingConfig(PickedBase):
    """Imitate the best sample of each task (RAFT, Dong et al. 2023, arXiv 2304.06767; best of n)."""

    name: Literal["rejection_sampling"]
    min_reward: float | None = None
    """Samples with a lower reward are not imitated, even if they are the best of their task."""
