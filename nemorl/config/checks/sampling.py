"""The distribution that is sampled, and the one that is trained."""

from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig, OnlineConfig, OnPolicyDistillationConfig
from nemorl.config.generation import GenerationConfig
from nemorl.errors import Violation


def training_explores(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Greedy samples of one task are all the same, so there is nothing to compare."""
    if algorithm.online and generation.sampling.temperature == 0:
        yield Violation(
            "generation.sampling.temperature",
            0.0,
            "greedy samples of a task are all alike and teach nothing: take more than 0, such as 1.0 "
            "(validation has its own, algorithm.validation.sampling)",
        )


def training_is_unfiltered(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
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
            yield Violation(
                f"generation.sampling.{name}",
                value,
                "this release trains on the unfiltered distribution only, and a filter would change the "
                "sampled one: remove it here (algorithm.validation.sampling may have it)",
            )


def greedy_samples_once(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Several greedy samples of one task are one sample."""
    validation = algorithm.validation
    sampling = validation.sampling or generation.sampling
    if sampling.temperature == 0 and validation.num_generations_per_prompt > 1:
        yield Violation(
            "algorithm.validation.num_generations_per_prompt",
            validation.num_generations_per_prompt,
            "at temperature 0 all samples of a task are alike: take 1, or a temperature above 0 in "
            "algorithm.validation.sampling",
        )
