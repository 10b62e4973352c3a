"""How many sequences there are, and over what they must divide.

Tokens: what has to fit into what.

The learning rate.

The distribution that is sampled, and the one that is trained.
"""

from collections.abc import Iterator

from nemorl.config.algorithm import (
    AlgorithmConfig,
    DistillationAlgorithm,
    OfflineBase,
    OnlineBase,
    OnlineConfig,
    OnPolicyDistillationConfig,
    SftConfig,
)
from nemorl.config.facts import generates
from nemorl.config.generation import GenerationConfig, MegatronGenerationConfig, TorchGenerationConfig
from nemorl.config.policy import DecaySchedule, InverseSqrtSchedule, PolicyConfig
from nemorl.errors import ABSENT, Problem

_FIXED_LENGTH = "seq-mean-token-sum-norm"


def no_staleness_yet(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The loop is synchronous in this release."""
    if isinstance(algorithm, OnlineBase) and algorithm.max_staleness != 0:
        yield Problem(
            "algorithm.max_staleness",
            algorithm.max_staleness,
            "this release samples with the newest weights only: set it to 0",
        )


def minibatches_divide(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Every optimizer step takes equally many trajectories."""
    if isinstance(algorithm, OnlineConfig) and algorithm.trajectories_per_step % algorithm.num_minibatches:
        yield Problem(
            "algorithm.num_minibatches",
            algorithm.num_minibatches,
            f"it must divide the {_trajectories(algorithm)} of a step",
        )


def data_parallel_divides(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Every data-parallel rank takes equally many sequences of every optimizer step."""
    size = policy.layout.data_parallel_size
    if isinstance(algorithm, OfflineBase) and algorithm.batch_size % size:
        fix = f"policy.layout.data_parallel_size, {size}, must divide it: change one of the two"
        yield Problem("algorithm.batch_size", algorithm.batch_size, fix)
    if not isinstance(algorithm, OnlineConfig):  # what is picked of samples is filled up
        return
    per_minibatch, rest = divmod(algorithm.trajectories_per_step, algorithm.num_minibatches)
    if per_minibatch % size and not rest:
        share = f", in {algorithm.num_minibatches} minibatches of {per_minibatch}"
        yield Problem(
            "policy.layout.data_parallel_size",
            size,
            "it must divide the trajectories of an optimizer step; there are "
            f"{_trajectories(algorithm)} in a step{share if algorithm.num_minibatches > 1 else ''}",
        )


def interleaved_stages_have_work(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Megatron's interleaved schedule wants as many micro-batches as stages, none of them empty."""
    layout = policy.layout
    share = algorithm.units_per_update // layout.data_parallel_size
    what = "sequences" if algorithm.units_per_update == algorithm.sequences_per_update else "pairs"
    if layout.virtual_pipeline_parallel_size > 1 and share < layout.pipeline_parallel_size:
        yield Problem(
            "policy.layout.virtual_pipeline_parallel_size",
            layout.virtual_pipeline_parallel_size,
            f"interleaved stages want a micro-batch each, and an optimizer step has {share} {what} for "
            f"the {layout.pipeline_parallel_size} stages of a copy: set this to 1, or take larger batches",
        )


def aggregation_has_its_length(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """One aggregation divides by a fixed length, and only that one."""
    if isinstance(algorithm, SftConfig | DistillationAlgorithm) and algorithm.aggregation == _FIXED_LENGTH:
        fix = (
            f"`{algorithm.name}` has no fixed length to divide by: take `seq-mean-token-mean` or `token-mean`"
        )
        yield Problem("algorithm.aggregation", algorithm.aggregation, fix)
    if not isinstance(algorithm, OnlineConfig):
        return
    loss = algorithm.loss
    if loss.aggregation == _FIXED_LENGTH and loss.aggregation_length is None:
        fix = f"`{_FIXED_LENGTH}` divides by this length: give it, such as generation.max_new_tokens"
        yield Problem("algorithm.loss.aggregation_length", ABSENT, fix)
    if loss.aggregation != _FIXED_LENGTH and loss.aggregation_length is not None:
        fix = f"`{loss.aggregation}` does not use it: remove it, or take the aggregation `{_FIXED_LENGTH}`"
        yield Problem("algorithm.loss.aggregation_length", loss.aggregation_length, fix)


def _trajectories(algorithm: OnlineConfig) -> str:
    return (
        f"{algorithm.trajectories_per_step} trajectories "
        f"({algorithm.num_prompts_per_step} prompts x {algorithm.num_generations_per_prompt} generations)"
    )


def turn_fits_sequence(
    policy: PolicyConfig, generation: GenerationConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """A turn leaves room for its prompt."""
    if generates(algorithm) and generation.max_new_tokens >= policy.max_sequence_length:
        yield Problem(
            "generation.max_new_tokens",
            generation.max_new_tokens,
            "a turn leaves no room for its prompt in policy.max_sequence_length, "
            f"{policy.max_sequence_length}: lower this or raise that",
        )


def cache_holds_sequence(
    policy: PolicyConfig, generation: GenerationConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """The engine can hold at least one whole conversation."""
    ours = TorchGenerationConfig | MegatronGenerationConfig
    if not isinstance(generation, ours) or not generates(algorithm):
        return
    if generation.max_kv_tokens < policy.max_sequence_length:
        yield Problem(
            "generation.max_kv_tokens",
            generation.max_kv_tokens,
            "the cache must hold one whole conversation: give it policy.max_sequence_length, "
            f"{policy.max_sequence_length}, or more",
        )


def micro_batch_holds_sequence(policy: PolicyConfig) -> Iterator[Problem]:
    """A sequence is never cut to fit a pass."""
    if policy.micro_batch_tokens < policy.max_sequence_length:
        yield Problem(
            "policy.micro_batch_tokens",
            policy.micro_batch_tokens,
            "one pass must hold one whole conversation: give it policy.max_sequence_length, "
            f"{policy.max_sequence_length}, or more",
        )


def decay_follows_warmup(policy: PolicyConfig) -> Iterator[Problem]:
    """The decay needs steps after the warm-up and those at the peak."""
    schedule = policy.schedule
    if not isinstance(schedule, DecaySchedule):
        return
    before = schedule.warmup_steps + schedule.stable_steps
    if before >= schedule.decay_steps:
        yield Problem(
            "policy.schedule.decay_steps",
            schedule.decay_steps,
            "it counts the steps before the decay in, so it must be more than policy.schedule.warmup_steps "
            f"and stable_steps together, {before}",
        )


def decay_goes_down(policy: PolicyConfig) -> Iterator[Problem]:
    """The rate comes down, not up."""
    schedule, peak = policy.schedule, policy.optimizer.lr
    if isinstance(schedule, DecaySchedule | InverseSqrtSchedule) and schedule.min_lr > peak:
        yield Problem(
            "policy.schedule.min_lr",
            schedule.min_lr,
            f"the rate decays from policy.optimizer.lr, {peak:g}, to this: it must not be more",
        )


def training_explores(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Greedy samples of one task are all the same, so there is nothing to compare."""
    if algorithm.online and generation.sampling.temperature == 0:
        yield Problem(
            "generation.sampling.temperature",
            0.0,
            "greedy samples of a task are all alike and teach nothing: take more than 0, such as 1.0 "
            "(validation has its own, algorithm.validation.sampling)",
        )


def training_is_unfiltered(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The trainer's logprobs are of the whole distribution, so what is sampled must come from it."""
    if not isinstance(algorithm, OnlineConfig | OnPolicyDistillationConfig):
        return
    sampling = generation.sampling
    for name, value, off in (
        ("top_k", sampling.top_k, None),
        ("top_p", sampling.top_p, 1.0),
        ("min_p", sampling.min_p, 0.0),
    ):
        if value != off:
            yield Problem(
                f"generation.sampling.{name}",
                value,
                "this release trains on the unfiltered distribution only, and a filter would change the "
                "sampled one: remove it here (algorithm.validation.sampling may have it)",
            )


def greedy_samples_once(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Several greedy samples of one task are one sample."""
    validation = algorithm.validation
    sampling = validation.sampling or generation.sampling
    if sampling.temperature == 0 and validation.num_generations_per_prompt > 1:
        yield Problem(
            "algorithm.validation.num_generations_per_prompt",
            validation.num_generations_per_prompt,
            "at temperature 0 all samples of a task are alike: take 1, or a temperature above 0 in "
            "algorithm.validation.sampling",
        )
