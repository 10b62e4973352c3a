"""How many sequences there are, and over what they must divide."""

from collections.abc import Iterator

from nemorl.config.algorithm import (
    AlgorithmConfig,
    DistillationAlgorithm,
    OfflineBase,
    OnlineBase,
    OnlineConfig,
    SftConfig,
)
from nemorl.config.policy import PolicyConfig
from nemorl.errors import ABSENT, Violation

_FIXED_LENGTH = "seq-mean-token-sum-norm"


def no_staleness_yet(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """The loop is synchronous in this release."""
    if isinstance(algorithm, OnlineBase) and algorithm.max_staleness != 0:
        yield Violation(
            "algorithm.max_staleness",
            algorithm.max_staleness,
            "this release samples with the newest weights only: set it to 0",
        )


def minibatches_divide(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Every optimizer step takes equally many trajectories."""
    if isinstance(algorithm, OnlineConfig) and algorithm.trajectories_per_step % algorithm.num_minibatches:
        yield Violation(
            "algorithm.num_minibatches",
            algorithm.num_minibatches,
            f"it must divide the {_trajectories(algorithm)} of a step",
        )


def data_parallel_divides(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Every data-parallel rank takes equally many sequences of every optimizer step."""
    size = policy.layout.data_parallel_size
    if isinstance(algorithm, OfflineBase) and algorithm.batch_size % size:
        mend = f"policy.layout.data_parallel_size, {size}, must divide it: change one of the two"
        yield Violation("algorithm.batch_size", algorithm.batch_size, mend)
    if not isinstance(algorithm, OnlineConfig):  # what is picked of samples is filled up
        return
    per_minibatch, rest = divmod(algorithm.trajectories_per_step, algorithm.num_minibatches)
    if per_minibatch % size and not rest:
        share = f", in {algorithm.num_minibatches} minibatches of {per_minibatch}"
        yield Violation(
            "policy.layout.data_parallel_size",
            size,
            "it must divide the trajectories of an optimizer step; there are "
            f"{_trajectories(algorithm)} in a step{share if algorithm.num_minibatches > 1 else ''}",
        )


def interleaved_stages_have_work(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Megatron's interleaved schedule wants as many micro-batches as stages, none of them empty."""
    layout = policy.layout
    share = algorithm.units_per_update // layout.data_parallel_size
    what = "sequences" if algorithm.units_per_update == algorithm.sequences_per_update else "pairs"
    if layout.virtual_pipeline_parallel_size > 1 and share < layout.pipeline_parallel_size:
        yield Violation(
            "policy.layout.virtual_pipeline_parallel_size",
            layout.virtual_pipeline_parallel_size,
            f"interleaved stages want a micro-batch each, and an optimizer step has {share} {what} for "
            f"the {layout.pipeline_parallel_size} stages of a copy: set this to 1, or take larger batches",
        )


def aggregation_has_its_length(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """One aggregation divides by a fixed length, and only that one."""
    if isinstance(algorithm, SftConfig | DistillationAlgorithm) and algorithm.aggregation == _FIXED_LENGTH:
        mend = (
            f"`{algorithm.name}` has no fixed length to divide by: take `seq-mean-token-mean` or `token-mean`"
        )
        yield Violation("algorithm.aggregation", algorithm.aggregation, mend)
    if not isinstance(algorithm, OnlineConfig):
        return
    loss = algorithm.loss
    if loss.aggregation == _FIXED_LENGTH and loss.aggregation_length is None:
        mend = f"`{_FIXED_LENGTH}` divides by this length: give it, such as generation.max_new_tokens"
        yield Violation("algorithm.loss.aggregation_length", ABSENT, mend)
    if loss.aggregation != _FIXED_LENGTH and loss.aggregation_length is not None:
        mend = f"`{loss.aggregation}` does not use it: remove it, or take the aggregation `{_FIXED_LENGTH}`"
        yield Violation("algorithm.loss.aggregation_length", loss.aggregation_length, mend)


def _trajectories(algorithm: OnlineConfig) -> str:
    return (
        f"{algorithm.trajectories_per_step} trajectories "
        f"({algorithm.num_prompts_per_step} prompts x {algorithm.num_generations_per_prompt} generations)"
    )
