"""Learning on data from teachers with other tokens than the policy's."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemorl.config.auxiliary import EndpointTeacherConfig, Teachers
from nemorl.config.base import Config, Variants, check
from nemorl.config.data import DataConfig
from nemorl.errors import Problem, Problems

from .offline import OfflineBase, SampledValidationConfig


class AlignedLossBase(Config):
    metrics: ClassVar[frozenset[str]] = frozenset()
    scales_teacher: ClassVar[bool] = False
    tokens: int = Field(1024, ge=1)
    """Tokens of the teacher that are compared at each chunk of a text: those with the largest probabilities
    anywhere in the text, at most its vocabulary."""
    temperature: float = Field(1.0, gt=0)
    """Both distributions are of logits divided by this, and the divergence is multiplied by its square."""
    reverse: bool = False
    """KL(policy || teacher) in place of KL(teacher || policy)."""

    @property
    def top_k(self) -> int:
        return self.tokens


class ProjectedKlLossConfig(AlignedLossBase):
    """The policy's probabilities as those of the teacher's tokens, scaled to sum to 1 over compared ones."""

    metrics: ClassVar[frozenset[str]] = frozenset({"distillation/projected_kl"})
    scales_teacher: ClassVar[bool] = True
    name: Literal["projected_kl"] = "projected_kl"


class CommonKlLossConfig(AlignedLossBase):
    """KL over the tokens that both have, plus distances of the sorted probabilities of all others.

    The second term is that of ULD (Boizard et al. 2024, arXiv 2402.12030), the sum that of GOLD (Hugging Face
    2025). A teacher with the policy's own tokens is compared by `projected_kl`.
    """

    metrics: ClassVar[frozenset[str]] = frozenset(
        f"distillation/{name}" for name in ("projected_kl", "common_kl", "sorted_distance")
    )
    name: Literal["common_kl"]
    common: Literal["exact", "likeliest"] = "exact"
    """Tokens that both have. `exact`: those that write the same. `likeliest`: also a token of the policy and
    the first one into which the teacher's tokenizer splits it, where no exact one is mapped to that."""
    rest_tokens: int = Field(8192, ge=1)
    """Largest probabilities of other tokens that are compared."""


AlignedLossConfig = Annotated[ProjectedKlLossConfig | CommonKlLossConfig, Variants(ProjectedKlLossConfig)]


TeacherScore = Literal["cross_entropy", "entropy", "max_probability"]


class CombinationBase(Config):
    uses_weights: ClassVar[bool] = True  # those of `teacher_weights`

    @property
    def measured(self) -> TeacherScore | None:
        """What teachers say of themselves at each text; None if nothing depends on it."""
        return None


class SumConfig(CombinationBase):
    """The divergences from all teachers are added."""

    name: Literal["sum"] = "sum"
    scale_by_vocabulary: bool = False
    """Multiply the divergence from each teacher by the logarithm of the size of its vocabulary, over that of
    the smallest one."""


class TrustConfig(CombinationBase):
    """They are added with weights for each text, by how certain or how right each teacher is there."""

    uses_weights: ClassVar[bool] = False
    name: Literal["trust"]
    score: TeacherScore
    """Mean over the text's tokens, as the teacher reads them: minus the cross entropy of the tokens, minus
    the entropy, or the largest probability, each at temperature 1. Weights are the softmax over teachers."""
    sharpness: float = 1.0
    """Factor of the scores before the softmax."""
    scale_by_vocabulary: bool = False
    """Multiply scores and divergences of each teacher by the logarithm of the size of its vocabulary, over
    that of the smallest one."""

    @property
    def measured(self) -> TeacherScore:
        return self.score


class SelectConfig(CombinationBase):
    """Of each text the divergence from the teacher with the lowest mean cross entropy of its tokens."""

    uses_weights: ClassVar[bool] = False
    name: Literal["select"]

    @property
    def measured(self) -> TeacherScore:
        return "cross_entropy"


class AverageConfig(CombinationBase):
    """One divergence, from the mean of the teachers' logits, whose shares are as `teacher_weights`.

    The teachers have the policy's tokens. Those are compared that all of them compare, each side scaled to
    sum to 1 over these.
    """

    name: Literal["average"]


CombinationConfig = Annotated[SumConfig | TrustConfig | SelectConfig | AverageConfig, Variants(SumConfig)]
TEACHER_METRICS = ("divergence", "weight", "aligned")  # of each of several, as `teachers/NAME/weight`


class AlignedDistillationConfig(OfflineBase):
    """The answers of the training data, compared with teachers that have tokens of their own.

    Each text is encoded by the policy's tokenizer and by that of each teacher's folder, and compared chunk by
    chunk: a chunk ends where a token ends under both. All teachers read all texts. The loss is
    `sft_coefficient * cross entropy + distillation_coefficient * sum over teachers of weight * divergence`;
    `combination` has other ways to join several teachers.
    """

    keeps_teachers: ClassVar[bool] = True
    aligns_teachers: ClassVar[bool] = True
    name: Literal["aligned_distillation"]
    loss: AlignedLossConfig = ProjectedKlLossConfig()
    """The divergence of policy and teacher, a mean over chunks."""
    teacher_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Weights of the divergences, by the teachers' names; 1 of those that are missing."""
    combination: CombinationConfig = SumConfig()
    """What of several teachers is learned."""
    distillation_coefficient: float = Field(1.0, ge=0)
    """Weight of the divergences."""
    sft_coefficient: float = Field(0.1, ge=0)
    """Weight of the cross entropy of the answers' tokens."""
    match_sft: bool = False
    """In place of both coefficients, scale the divergences of each text to the size of its cross entropy,
    without a gradient through the scale, and add that with weight 1 (NeMo-RL)."""
    train_on: Literal["completion", "all"] = "completion"
    """Train on the tokens of the assistant, or on all tokens of plain texts."""
    validation: SampledValidationConfig = SampledValidationConfig()
    """Measuring on `data.validation`: the loss where it has answers, and samples."""

    @property
    def teacher_temperature(self) -> float:
        return self.loss.temperature

    @property
    def loss_metrics(self) -> frozenset[str]:
        losses = {f"loss/{name}" for name in ("total", "sft", "distillation")}
        return self.loss.metrics | losses | {"entropy", "distillation/aligned", "distillation/match"}

    @check
    def _coefficients_have_an_effect(self) -> Problems:
        if self.match_sft:
            reason = "match_sft is true, so divergences are scaled to the cross entropy; remove this"
            yield from self.without_effect(("distillation_coefficient", "sft_coefficient"), reason)
        elif self.distillation_coefficient == 0:
            fix = "the teachers have no effect; raise it, or use `sft`"
            yield Problem("distillation_coefficient", 0.0, fix)

    @check
    def _weights_are_of_teachers(self, teachers: Teachers) -> Problems:
        for name, weight in self.teacher_weights.items():
            if name not in teachers:
                fix = f"there is no such teacher; use one of {', '.join(teachers) or '`teachers`'}"
                yield Problem(f"teacher_weights.{name}", weight, fix)

    @check
    def _several_teachers_are_combined(self, teachers: Teachers) -> Problems:
        combination = self.combination
        if len(teachers) == 1 and combination != SumConfig():
            fix = "there is one teacher, and nothing to combine; remove this, or add teachers"
            yield Problem("combination.name", combination.name, fix)
        elif self.teacher_weights and not combination.uses_weights:
            fix = f"the combination `{combination.name}` has no constant weights; remove this, or use `sum`"
            yield Problem("teacher_weights", self.teacher_weights, fix)
        if isinstance(combination, AverageConfig):
            if teachers and not any(self.teacher_weights.get(name, 1.0) for name in teachers):
                fix = "the mean of their logits is of no teacher; raise a weight"
                yield Problem("teacher_weights", self.teacher_weights, fix)
            if not isinstance(self.loss, ProjectedKlLossConfig):
                fix = "a mean of logits is compared token by token, by `projected_kl`; use it"
                yield Problem("loss.name", self.loss.name, fix)

    @check
    def _teachers_have_tokens_of_their_own(self, teachers: Teachers) -> Problems:
        for name, teacher in teachers.items():
            if isinstance(teacher, EndpointTeacherConfig):
                fix = (
                    f"the server of teachers.{name} would be sent the policy's tokens; use a teacher `model`"
                )
                yield Problem("", self.name, fix)

    @check
    def _texts_are_the_same(self, data: DataConfig) -> Problems:
        if self.train_on == "all" and data.chat:
            fix = "prompts differ by the templates of the models; use `completion`, or set data.chat to false"
            yield Problem("train_on", "all", fix)
