"""The figures of runs that learn from data as it stands."""

from nemorl.config.algorithm import (
    DistillationConfig,
    KtoConfig,
    OfflineBase,
    ProcessLossConfig,
    RewardModelConfig,
    SftConfig,
)
from nemorl.config.algorithm.picked import IterativePreferenceConfig, PickedBase

_REWARDS = {"rewards/margin", "rewards/accuracy"}
_PAIRS = {
    *("loss/total", "loss/preference", "loss/sft", "rewards/chosen", "rewards/rejected"),
    *("logprobs/chosen", "logprobs/rejected", *_REWARDS),
}
_KTO = {
    *("loss/preference", "rewards/desirable", "rewards/undesirable", "examples/desirable", "kl/reference"),
    *_REWARDS,
}
_STEPS = {"loss/total", "accuracy", "score/margin"}
_SCORES = {*_STEPS, "loss/preference", "loss/center", "score/chosen", "score/rejected"}


def offline_figures(algorithm: OfflineBase) -> set[str]:
    """Names of what such a run writes beside what every run does."""
    learnt = _learnt(algorithm)
    names = learnt | {"epoch"}
    if algorithm.validation.scheduled:
        whole = next(n for n in ("loss/total", "loss/preference", "loss/sft") if n in learnt)
        measured = learnt - {whole, "kl/reference"}
        names |= {f"validation/{name}" for name in ("loss", *measured)} | {"time/validation"}
    return names


def picked_figures(algorithm: PickedBase) -> set[str]:
    """Names of what a run writes of samples that it picked."""
    learnt = _PAIRS if isinstance(algorithm, IterativePreferenceConfig) else {"loss/sft", "nll"}
    return {"picked", "logprob_gap/mean", "logprob_gap/max", *learnt}


def _learnt(algorithm: OfflineBase) -> set[str]:
    match algorithm:
        case DistillationConfig():
            return {"loss/total", "entropy"} | algorithm.loss.figures
        case SftConfig():
            return {"loss/sft", "nll"}
        case KtoConfig():
            return _KTO
        case RewardModelConfig():
            return _STEPS if isinstance(algorithm.loss, ProcessLossConfig) else _SCORES
    return _PAIRS
