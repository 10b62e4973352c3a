"""Learning from data as it stands: data of the right kind, and settings that are used."""

from collections.abc import Iterator

from nemorl.config.algorithm import (
    AlgorithmConfig,
    DistillationConfig,
    IterativePreferenceConfig,
    KtoConfig,
    OfflineBase,
    PreferenceConfig,
    ProcessLossConfig,
    RewardModelConfig,
    SftConfig,
    ValidationConfig,
)
from nemorl.config.algorithm.losses import LogisticLossConfig, OddsRatioLossConfig
from nemorl.config.algorithm.offline import BradleyTerryLossConfig
from nemorl.config.data import DataConfig, PreferenceDataset
from nemorl.config.facts import datasets
from nemorl.config.policy import PolicyConfig
from nemorl.errors import Problem

_TASKS = ("jsonl", "reasoning_gym", "arithmetic", "conversations", "preference")
_PAIRS = ("preference", "arithmetic")
_FEEDBACK = ("feedback", "preference", "arithmetic")
_STEPS = ("steps", "arithmetic")
_OF_SAMPLING = ("num_generations_per_prompt", "pass_at_k", "cons_at_k", "pass_reward", "sampling")


def data_can_be_learnt(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Pairs, judged answers, judged steps and answers come from datasets that have them."""
    if not isinstance(algorithm, OfflineBase):
        return
    what, known = _wanted(algorithm)
    for path, dataset in datasets(data):
        if dataset.name not in known:
            fix = f"`{algorithm.name}` learns from {what}: take a dataset `{'`, `'.join(known)}`"
            yield Problem(f"{path}.name", dataset.name, fix)


def _wanted(algorithm: OfflineBase) -> tuple[str, tuple[str, ...]]:
    match algorithm:
        case SftConfig() | DistillationConfig():
            return "answers", _TASKS
        case KtoConfig():
            return "judged answers", _FEEDBACK
        case RewardModelConfig() if isinstance(algorithm.loss, ProcessLossConfig):
            return "judged steps", _STEPS
    return "pairs of answers", _PAIRS


def head_suits_algorithm(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """A reward model gives numbers; what samples or imitates gives tokens."""
    scores = isinstance(algorithm, RewardModelConfig)
    if policy.head != "lm" and not scores:
        fix = (
            f"`{algorithm.name}` samples or imitates tokens: set it to lm (a scalar head is for critics and "
            "reward models)"
        )
        yield Problem("policy.head", policy.head, fix)
    if policy.head != "scalar" and scores:
        yield Problem("policy.head", policy.head, "a reward model gives one number: set it to scalar")


def micro_batch_holds_pair(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The two answers of a pair are compared in one pass."""
    if algorithm.sequences_per_update == algorithm.units_per_update:
        return
    longest = 2 * policy.max_sequence_length
    if policy.max_sequence_length <= policy.micro_batch_tokens < longest:
        fix = f"one pass must hold both answers of a pair: give it twice max_sequence_length, {longest}"
        yield Problem("policy.micro_batch_tokens", policy.micro_batch_tokens, fix)


def preference_settings_are_used(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """A reference and margins say something only to losses that look at them."""
    if not isinstance(algorithm, PreferenceConfig | RewardModelConfig):
        return
    if isinstance(algorithm, PreferenceConfig) and algorithm.reference == "live":
        yield from _live_reference_is_asked(algorithm)
    loss = algorithm.loss
    scale = loss.margin_scale if isinstance(loss, LogisticLossConfig | BradleyTerryLossConfig) else 0.0
    for path, dataset in datasets(data):
        key = dataset.margin_key if isinstance(dataset, PreferenceDataset) else None
        if scale and key is None:
            fix = f"{path} says nothing of margins: name their key in {path}.margin_key, or remove this"
            yield Problem("algorithm.loss.margin_scale", scale, fix)
        elif key is not None and not scale:
            fix = "the loss looks at no margins: remove this, or give algorithm.loss.margin_scale"
            yield Problem(f"{path}.margin_key", key, fix)


def preferences_teach(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Odds ratios hold nothing by themselves; of judged answers some have to count."""
    if isinstance(algorithm, PreferenceConfig | IterativePreferenceConfig):
        if isinstance(algorithm.loss, OddsRatioLossConfig) and algorithm.sft_coefficient == 0:
            fix = (
                "the odds ratio has no reference, and compares two answers that may both become unlikely: "
                "give it a cross entropy beside it, as ORPO's 1, or take another loss"
            )
            yield Problem("algorithm.sft_coefficient", 0.0, fix)
    elif isinstance(algorithm, KtoConfig) and algorithm.desirable_weight == algorithm.undesirable_weight == 0:
        fix = (
            "algorithm.undesirable_weight is 0 too, so no answer counts: give at least one of them a weight, "
            "as the default 1"
        )
        yield Problem("algorithm.desirable_weight", 0.0, fix)


def _live_reference_is_asked(algorithm: PreferenceConfig) -> Iterator[Problem]:
    if not algorithm.loss.keeps_reference:
        fix = f"the loss `{algorithm.loss.name}` has no reference here: remove this"
        yield Problem("algorithm.reference", "live", fix)


def validation_settings_are_used(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """How to sample says nothing to a validation that computes the loss only."""
    if not isinstance(algorithm, OfflineBase) or algorithm.validation.generate:
        return
    fix = "algorithm.validation.generate is false, so nothing is sampled: set it to true, or remove this"
    if isinstance(algorithm, RewardModelConfig):
        fix = "a reward model samples nothing: remove this"
    for name in _OF_SAMPLING:
        value = getattr(algorithm.validation, name)
        if value != ValidationConfig.model_fields[name].default:
            yield Problem(f"algorithm.validation.{name}", value, fix)
