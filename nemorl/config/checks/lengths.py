"""Tokens: what has to fit into what."""

from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.generation import GenerationConfig, TorchGenerationConfig
from nemorl.config.generation_megatron import MegatronGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.errors import Violation

from .facts import generates


def turn_fits_sequence(
    policy: PolicyConfig, generation: GenerationConfig, algorithm: AlgorithmConfig
) -> Iterator[Violation]:
    """A turn leaves room for its prompt."""
    if generates(algorithm) and generation.max_new_tokens >= policy.max_sequence_length:
        yield Violation(
            "generation.max_new_tokens",
            generation.max_new_tokens,
            "a turn leaves no room for its prompt in policy.max_sequence_length, "
            f"{policy.max_sequence_length}: lower this or raise that",
        )


def cache_holds_sequence(
    policy: PolicyConfig, generation: GenerationConfig, algorithm: AlgorithmConfig
) -> Iterator[Violation]:
    """The engine can hold at least one whole conversation."""
    ours = TorchGenerationConfig | MegatronGenerationConfig
    if not isinstance(generation, ours) or not generates(algorithm):
        return
    if generation.max_kv_tokens < policy.max_sequence_length:
        yield Violation(
            "generation.max_kv_tokens",
            generation.max_kv_tokens,
            "the cache must hold one whole conversation: give it policy.max_sequence_length, "
            f"{policy.max_sequence_length}, or more",
        )


def micro_batch_holds_sequence(policy: PolicyConfig) -> Iterator[Violation]:
    """A sequence is never cut to fit a pass."""
    if policy.micro_batch_tokens < policy.max_sequence_length:
        yield Violation(
            "policy.micro_batch_tokens",
            policy.micro_batch_tokens,
            "one pass must hold one whole conversation: give it policy.max_sequence_length, "
            f"{policy.max_sequence_length}, or more",
        )
