"""Batches, lengths and sampling: what must divide or fit into what."""

from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig, OfflineBase, OnlineBase, OnlineConfig
from nemorl.config.base import check
from nemorl.config.generation import GenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.errors import Problem


@check
def data_parallel_divides(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Every data-parallel rank has the same number of sequences of an optimizer step."""
    size = policy.layout.data_parallel_size
    if isinstance(algorithm, OfflineBase) and algorithm.batch_size % size:
        fix = f"policy.layout.data_parallel_size, {size}, must divide it; change one of the two"
        yield Problem("algorithm.batch_size", algorithm.batch_size, fix)
    if not isinstance(algorithm, OnlineConfig):  # selected samples are filled up
        return
    per_minibatch, rest = divmod(algorithm.trajectories_per_step, algorithm.num_minibatches)
    if per_minibatch % size and not rest:
        share = f", in {algorithm.num_minibatches} minibatches of {per_minibatch}"
        yield Problem(
            "policy.layout.data_parallel_size",
            size,
            "it must divide the trajectories of an optimizer step; a step has "
            f"{algorithm.described_trajectories}{share if algorithm.num_minibatches > 1 else ''}",
        )


@check
def interleaved_stages_have_work(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Megatron's interleaved schedule needs at least as many micro-batches as stages, none of them empty."""
    layout = policy.layout
    share = algorithm.units_per_update // layout.data_parallel_size
    units = "sequences" if algorithm.units_per_update == algorithm.sequences_per_update else "pairs"
    if layout.virtual_pipeline_parallel_size > 1 and share < layout.pipeline_parallel_size:
        yield Problem(
            "policy.layout.virtual_pipeline_parallel_size",
            layout.virtual_pipeline_parallel_size,
            f"interleaved stages need a micro-batch each, and an optimizer step has {share} {units} for the "
            f"{layout.pipeline_parallel_size} stages of a copy; set this to 1, or use larger batches",
        )


@check
def turn_fits_sequence(
    policy: PolicyConfig, generation: GenerationConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """A turn leaves room for its prompt."""
    if algorithm.generates and generation.max_new_tokens >= policy.max_sequence_length:
        yield Problem(
            "generation.max_new_tokens",
            generation.max_new_tokens,
            "a turn leaves no room for its prompt in policy.max_sequence_length, "
            f"{policy.max_sequence_length}; lower this or raise that",
        )


@check
def cache_holds_sequence(
    policy: PolicyConfig, generation: GenerationConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """A KV cache of a fixed number of tokens holds at least one conversation."""
    tokens = getattr(generation, "max_kv_tokens", None)
    if algorithm.generates and tokens is not None and tokens < policy.max_sequence_length:
        yield Problem(
            "generation.max_kv_tokens",
            tokens,
            "the cache must hold a complete conversation; set it to at least policy.max_sequence_length, "
            f"{policy.max_sequence_length}",
        )


@check
def micro_batch_holds_pair(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The two answers of a pair are compared in one pass."""
    if algorithm.sequences_per_update == algorithm.units_per_update:
        return
    longest = 2 * policy.max_sequence_length
    if policy.max_sequence_length <= policy.micro_batch_tokens < longest:
        fix = f"one pass must hold both answers of a pair; set it to twice max_sequence_length, {longest}"
        yield Problem("policy.micro_batch_tokens", policy.micro_batch_tokens, fix)


@check
def head_suits_algorithm(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """A reward model produces numbers; other algorithms sample or imitate tokens."""
    if policy.head != algorithm.head:
        reason = (
            "a reward model produces one number"
            if algorithm.head == "scalar"
            else f"`{algorithm.name}` samples or imitates tokens (reward models have a scalar head)"
        )
        yield Problem("policy.head", policy.head, f"{reason}; set it to {algorithm.head}")


@check
def training_explores(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Greedy samples of one task are equal, so there is nothing to compare."""
    if algorithm.online and generation.sampling.temperature == 0:
        yield Problem(
            "generation.sampling.temperature",
            0.0,
            "greedy samples of a task are all the same, with nothing to learn from; set it to more than 0, "
            "such as 1.0 (for validation use algorithm.validation.sampling)",
        )


@check
def training_is_unfiltered(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The trainer's logprobs are of the complete distribution, so samples must come from it."""
    if isinstance(algorithm, OnlineBase) and algorithm.needs_unfiltered_samples:
        reason = (
            "training supports the unfiltered distribution only; remove it here "
            "(algorithm.validation.sampling may have it)"
        )
        for problem in generation.sampling.without_effect(("top_k", "top_p", "min_p"), reason):
            yield Problem(f"generation.sampling.{problem.field}", problem.value, problem.fix)
