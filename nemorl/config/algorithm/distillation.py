"""Learning from a teacher: on what the policy samples itself, or on data as they stand.

Learning from the best, or the best and the worst, of what the policy samples for a task.
"""

from typing import Annotated, Literal

from pydantic import Field

from nemorl.config.base import Config, default_variant

from .base import Aggregation
from .losses import LogisticLossConfig, PairLossConfig
from .offline import OfflineBase, SampledValidationConfig
from .online import OnlineBase


class DistillationLossBase(Config):
    """What these losses share."""

    @property
    def top_k(self) -> int | None:
        """Tokens of the teacher that the loss looks at in each place; None for the sampled one alone."""
        return None

    @property
    def metrics(self) -> frozenset[str]:
        """What is measured of it."""
        raise NotImplementedError


class ReverseKlLossConfig(DistillationLossBase):
    """KL(policy || teacher), estimated from each sampled token alone (docs/distillation.md)."""

    name: Literal["reverse_kl"] = "reverse_kl"

    @property
    def metrics(self) -> frozenset[str]:
        """The estimate."""
        return frozenset({"distillation/reverse_kl"})


class TopLossBase(DistillationLossBase):
    """Losses over the tokens that the teacher finds likeliest."""

    tokens: int = Field(32, ge=1)
    """How many of them in each place; the whole vocabulary where it is as large."""
    rest: Literal["one_outcome", "leave_out"] = "one_outcome"
    """All other tokens count as one outcome more; or are left out, and what stays is scaled to sum to 1."""

    @property
    def top_k(self) -> int | None:
        """So many."""
        return self.tokens

    @property
    def metrics(self) -> frozenset[str]:
        """Divergence, the share of the teacher's probability that is looked at, and the loss."""
        return frozenset({"distillation/forward_kl", "distillation/covered"})


class ForwardKlLossConfig(TopLossBase):
    """KL(teacher || policy)."""

    name: Literal["forward_kl"]


class JsdLossConfig(TopLossBase):
    """Generalised Jensen-Shannon divergence (GKD, Agarwal et al. 2023, arXiv 2306.13649).

    `beta KL(teacher || m) + (1 - beta) KL(policy || m)` with `m = beta teacher + (1 - beta) policy`.
    """

    name: Literal["jsd"]
    beta: float = Field(0.5, gt=0, lt=1)
    """Divided by `beta (1 - beta)` it goes to the forward KL as beta goes to 0, to the reverse for 1."""

    @property
    def metrics(self) -> frozenset[str]:
        """And itself."""
        return super().metrics | {"distillation/jsd"}


TopLossConfig = Annotated[ForwardKlLossConfig | JsdLossConfig, Field(discriminator="name")]
DistillationLossConfig = Annotated[
    ReverseKlLossConfig | ForwardKlLossConfig | JsdLossConfig,
    Field(discriminator="name"),
    default_variant(ReverseKlLossConfig),
]


class OnPolicyDistillationConfig(OnlineBase):
    """The policy samples and teachers score what it said, token by token; rewards are figures only."""

    name: Literal["on_policy_distillation"]
    loss: DistillationLossConfig = ReverseKlLossConfig()
    """How far the policy is from its teacher."""
    aggregation: Aggregation = "token-mean"
    """How divergences of tokens become one number."""
    teacher_key: str | None = None
    """Column of the tasks that names the teacher of each, of several in `teachers`."""

    @property
    def sequences_per_update(self) -> int:
        """All trajectories of a step."""
        return self.trajectories_per_step

    @property
    def keeps_teachers(self) -> bool:
        """Always."""
        return True


class DistillationConfig(OfflineBase):
    """The answers of the training data, with the teacher's distribution at each of their tokens."""

    name: Literal["distillation"]
    loss: TopLossConfig = ForwardKlLossConfig(name="forward_kl")
    """How far the policy is from its teacher."""
    train_on: Literal["completion", "all"] = "completion"
    """Learn at the tokens of the assistant, or at all tokens."""
    aggregation: Aggregation = "token-mean"
    """How divergences of tokens become one number."""
    teacher_key: str | None = None
    """Column of the tasks that names the teacher of each, of several in `teachers`."""
    validation: SampledValidationConfig = SampledValidationConfig()
    """Measuring on `data.validation`: the loss where it has answers, and samples."""

    @property
    def sequences_per_update(self) -> int:
        """The batch."""
        return self.batch_size

    @property
    def keeps_teachers(self) -> bool:
        """Always."""
        return True


DistillationAlgorithm = OnPolicyDistillationConfig | DistillationConfig


class PickedBase(OnlineBase):
    """What these share."""

    num_generations_per_prompt: int = Field(ge=2)
    """Samples of each task, from which one or two are picked by their reward."""
    num_epochs: int = Field(1, ge=1)
    """Updates on what a step picked."""


class IterativePreferenceConfig(PickedBase):
    """The best and the worst sample of each task are a pair (Xu et al. 2023, arXiv 2312.16682; Dong et al.
    2024, arXiv 2405.07863). A task whose samples are paid alike gives none.
    """

    name: Literal["iterative_dpo"]
    loss: PairLossConfig = LogisticLossConfig()
    """What a pair costs; its own margin is the difference of the rewards."""
    sft_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean negative logprob of the chosen samples' tokens, added to the loss."""

    @property
    def sequences_per_update(self) -> int:
        """Two for each task at most."""
        return 2 * self.num_prompts_per_step

    @property
    def units_per_update(self) -> int:
        """A pair for each task at most."""
        return self.num_prompts_per_step

    @property
    def keeps_reference(self) -> bool:
        """Whether the loss looks at one: the weights that the run started from."""
        return self.loss.keeps_reference


class RejectionSamplingConfig(PickedBase):
    """Imitate the best sample of each task (RAFT, Dong et al. 2023, arXiv 2304.06767; best of n)."""

    name: Literal["rejection_sampling"]
    min_reward: float | None = None
    """Samples that are paid less are not imitated, though they were the best of their task."""

    @property
    def sequences_per_update(self) -> int:
        """One for each task at most."""
        return self.num_prompts_per_step
