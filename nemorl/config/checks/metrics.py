"""The figures that a run writes into metrics.jsonl, by name.

The figures of runs that learn from data as it stands.
"""

from collections.abc import Iterator

from nemorl.config.algorithm import (
    AdaptiveEntropyConfig,
    AlgorithmConfig,
    DistillationConfig,
    KtoConfig,
    OfflineBase,
    OnlineBase,
    OnlineConfig,
    OnPolicyDistillationConfig,
    ProcessLossConfig,
    RewardModelConfig,
    SftConfig,
    TruncatedCorrectionConfig,
    ValidationConfig,
)
from nemorl.config.algorithm.distillation import IterativePreferenceConfig, PickedBase
from nemorl.config.algorithm.online import FiltersConfig
from nemorl.config.data import DataConfig
from nemorl.config.environment import EnvConfig, FunctionRewardConfig, RewardConfig

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


def offline_metrics(algorithm: OfflineBase) -> set[str]:
    """Names of what such a run writes beside what every run does."""
    trained = _trained(algorithm)
    names = trained | {"epoch"}
    if algorithm.validation.scheduled:
        whole = next(n for n in ("loss/total", "loss/preference", "loss/sft") if n in trained)
        measured = trained - {whole, "kl/reference"}
        names |= {f"validation/{name}" for name in ("loss", *measured)} | {"time/validation"}
    return names


def picked_metrics(algorithm: PickedBase) -> set[str]:
    """Names of what a run writes of samples that it picked."""
    trained = _PAIRS if isinstance(algorithm, IterativePreferenceConfig) else {"loss/sft", "nll"}
    return {"picked", "logprob_gap/mean", "logprob_gap/max", *trained}


def _trained(algorithm: OfflineBase) -> set[str]:
    match algorithm:
        case DistillationConfig():
            return {"loss/total", "entropy"} | algorithm.loss.metrics
        case SftConfig():
            return {"loss/sft", "nll"}
        case KtoConfig():
            return _KTO
        case RewardModelConfig():
            return _STEPS if isinstance(algorithm.loss, ProcessLossConfig) else _SCORES
    return _PAIRS


_UPDATES = {
    "grad_norm",
    "lr",
    "skipped_updates",
    "updates/all",
    "updates/skipped",
    "updates/empty",
    "tokens/trained",
    "throughput/tokens_per_second",
}
_PACKING = {f"packing/{name}" for name in ("imbalance", "fill", "micro_batches", "padding")}
# Of models with experts; which model it is stands in a folder that the checks of a config do not open.
_EXPERTS = {"experts/load_max", "experts/load_max_of_a_layer", "experts/idle", "loss/balance"}
_UPDATING_WEIGHTS = {"refit/gigabytes", "refit/gigabytes_per_second", "time/refit"}
_SAMPLING = {
    *("reward/mean", "reward/std", "group/zero_variance", "length/mean", "turns/mean", "errors"),
    *("tokens/generated", "version/lag", "throughput/generated_tokens_per_second"),
    *(f"stop/{reason}" for reason in ("stop", "length", "tool_calls", "abort", "error")),
    *("time/generation", "time/environment", "time/loading", "time/logprobs"),
    *("generation/replicas", "generation/replicas_lost", "generation/replicas_restarted"),
    "generation/restarts_failed",
    *("generation/requests_moved", "generation/tokens_kept", "generation/requests_failed"),
    "generation/retries",
}
_POLICY_LOSS = {
    *("loss/total", "loss/policy", "entropy"),
    *("logprob_gap/mean", "logprob_gap/max", "logprob_gap/k1", "logprob_gap/k3"),
}
_STAGES = {"time/step", "time/training", "time/checkpoint"}


def metrics(
    algorithm: AlgorithmConfig,
    env: EnvConfig,
    rewards: tuple[RewardConfig, ...],
    data: DataConfig | None = None,
) -> frozenset[str]:
    """Names of all figures that a line of such a run may hold; without data those of `data.validation`."""
    names = _UPDATES | _STAGES | _PACKING | _EXPERTS
    paid = {f"reward/{name}" for name in reward_names(env, rewards)}
    scored = set(_of_rewards(env, rewards))
    if isinstance(algorithm, OnlineBase):
        names = names | _SAMPLING | _UPDATING_WEIGHTS | paid | scored | set(_filters(algorithm.filters))
    if isinstance(algorithm, OnPolicyDistillationConfig):
        names |= (_POLICY_LOSS - {"loss/policy"}) | algorithm.loss.metrics | {"time/teachers"}
    if isinstance(algorithm, PickedBase):
        names |= picked_metrics(algorithm)
    if isinstance(algorithm, OnlineConfig):
        names |= _POLICY_LOSS | algorithm.loss.metrics | set(_of_correction(algorithm))
        if algorithm.greedy_baseline:
            names |= {"reward/of_greedy"}
        if algorithm.kl.coefficient > 0:
            names |= {"kl/reference"}
        names |= set(_beside_the_policy(algorithm))
        if isinstance(algorithm.entropy, AdaptiveEntropyConfig):
            names |= {"entropy/coefficient"}
    if isinstance(algorithm, OfflineBase):
        names = names | offline_metrics(algorithm)
    if algorithm.early_stop is not None:
        names |= {"early_stop/waited"}
    if algorithm.validation.scheduled and algorithm.generates:
        names |= _UPDATING_WEIGHTS | {"time/validation"}
        sets = [] if data is None else [f"validation/{name}" for name in data.validation_sets]
        if data is None or data.validation is not None:
            sets = ["validation", *sets]
        for of_set in sets:
            names |= set(_measured(algorithm.validation, paid, of_set))
    return frozenset(names)


def _of_rewards(env: EnvConfig, rewards: tuple[RewardConfig, ...]) -> Iterator[str]:
    """Of each reward its spread and how often it does not apply; of those that are computed, how it went."""
    for name in reward_names(env, rewards):
        yield from (f"reward_std/{name}", f"reward_absent/{name}")
    for reward in rewards:
        yield from (f"reward_{metric}/{reward.metric}" for metric in ("errors", "seconds", "waiting"))
        if not isinstance(reward, FunctionRewardConfig):
            yield f"reward_retries/{reward.metric}"


def _beside_the_policy(algorithm: OnlineConfig) -> Iterator[str]:
    if algorithm.likelihood.coefficient > 0:
        yield "loss/likelihood"
    if algorithm.loss.selects_by_entropy:
        yield "top_entropy_fraction"
    if algorithm.estimates_tokens:
        yield from ("advantage/mean", "advantage/std")
    if algorithm.estimates_tokens or algorithm.kl_in_reward:
        yield from ("kl/penalty", "time/advantages")
    if algorithm.keeps_critic:
        yield "time/values"
        of_critic = ("loss", "value", "return", "clip_fraction", "explained_variance", "grad_norm", "lr")
        yield from (f"critic/{name}" for name in (*of_critic, "skipped_updates"))


def _of_correction(algorithm: OnlineConfig) -> Iterator[str]:
    correction = algorithm.correction
    if correction.weighs:
        truncates = isinstance(correction, TruncatedCorrectionConfig)
        yield "correction/truncated" if truncates else "correction/masked"
        yield from ("correction/ratio_mean", "correction/ratio_max")
    if correction.sequence_mask is not None:
        yield "correction/masked_sequences"
    if correction.off_policy_threshold is not None:
        yield "correction/masked_off_policy"
    if correction.changes_terms:
        yield from ("correction/mean", "correction/ess")


def _filters(filters: FiltersConfig) -> Iterator[str]:
    if filters.active:
        yield from ("filters/sampled", "filters/kept")
    if filters.drop_equal_rewards:
        yield "filters/dropped_equal_rewards"
    if filters.min_mean_reward is not None or filters.max_mean_reward is not None:
        yield "filters/dropped_mean_reward"
    if filters.keep_most_varied is not None:
        yield "filters/least_varied"
    if filters.drop_truncated:
        yield "filters/truncated"


def reward_weights(env: EnvConfig, rewards: tuple[RewardConfig, ...]) -> dict[str, float]:
    """The factor of each reward in the sum, by its name."""
    return env.reward_weights | {reward.metric: reward.weight for reward in rewards}


def reward_names(env: EnvConfig, rewards: tuple[RewardConfig, ...]) -> Iterator[str]:
    """What each reward is called in figures."""
    yield from env.reward_weights
    yield from (reward.metric for reward in rewards)


def _measured(validation: ValidationConfig, paid: set[str], of_set: str) -> Iterator[str]:
    yield from (f"{of_set}/{name}" for name in ("length", "errors", *paid))
    bounded = ["reward", "accuracy", *(f"pass@{k}" for k in validation.pass_at_k)]
    for name in (*bounded, *(f"cons@{k}" for k in validation.cons_at_k)):
        yield from (f"{of_set}/{name}{bound}" for bound in ("", "_low", "_high"))
