"""What the policy has to be like to sample by itself."""

from collections.abc import Iterator

from nemorl.config.generation import GenerationConfig
from nemorl.config.generation_base import GenerationBase
from nemorl.config.generation_megatron import MegatronGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.errors import Violation

_OR = "or take another generation.backend"


def policy_can_sample(policy: PolicyConfig, generation: GenerationConfig) -> Iterator[Violation]:
    """Layouts that decode, and weights that are there when it does."""
    if not isinstance(generation, MegatronGenerationConfig):
        return
    layout, field = policy.layout, "policy.layout"
    if layout.context_parallel_size > 1:
        mend = f"generation.backend megatron decodes whole sequences on each process: set it to 1, {_OR}"
        yield Violation(f"{field}.context_parallel_size", layout.context_parallel_size, mend)
    if layout.virtual_pipeline_parallel_size > 1:
        mend = f"generation.backend megatron decodes with one run of layers a stage: set it to 1, {_OR}"
        yield Violation(
            f"{field}.virtual_pipeline_parallel_size", layout.virtual_pipeline_parallel_size, mend
        )
    if policy.offload.weights:
        mend = f"generation.backend is megatron, which samples with these weights: set it to false, {_OR}"
        yield Violation("policy.offload.weights", True, mend)


def policy_samples_as_it_is(policy: PolicyConfig, generation: GenerationConfig) -> Iterator[Violation]:
    """Settings of engines, which there are none of, would do nothing."""
    if not isinstance(generation, MegatronGenerationConfig):
        return
    instead = {
        "replicas": "it has as many copies as policy.layout.data_parallel_size says",
        "precision": "it computes in policy.precision",
        "bucket_megabytes": "no weights travel",
        "transport": "no weights travel",
        "delta": "no weights travel",
        "check_one_in": "no weights travel",
        "threads": "its processes have cluster.policy_threads",
        "endpoint": "between two stages of sampling it answers nobody",
    }
    for name, why in instead.items():
        value = getattr(generation, name)
        if value != GenerationBase.model_fields[name].default:
            yield Violation(
                f"generation.{name}", value, f"the policy samples by itself, and {why}: remove this"
            )
