"""Models that the embedded engine cannot sample, and the memory of its process."""

from collections.abc import Iterator

from nemorl.config.experiment import Experiment
from nemorl.config.generation import TorchGenerationConfig
from nemorl.errors import Problem
from nemorl.models.shape import ModelShape
from nemorl.plan.memory import GENERATION_RUNTIME, ITEM_SIZE, ProcessMemory, sampling_bytes


def problems(experiment: Experiment, shape: ModelShape, *, installed: bool) -> Iterator[Problem]:
    """The embedded engine is a plain dense decoder; a window that no sequence fills is none."""
    length = experiment.policy.max_sequence_length
    beyond = {
        "experts": shape.moe,
        "latent attention (MLA)": shape.mla,
        "sliding windows": any(window is not None and window < length for window in shape.windows),
        "attention sinks": shape.sinks,
        "norms after attention and MLP": shape.post_norms,
        f"the activation {shape.activation!r}": shape.activation != "silu",
    }
    found = [what for what, there in beyond.items() if there]
    if found:
        fix = f"the embedded engine samples dense Llama-like models only, and this one has {', '.join(found)}"
        yield Problem("generation.backend", "torch", f"{fix}: take another model or back end")


def memory(experiment: Experiment, shape: ModelShape, weights: int) -> ProcessMemory:
    """`weights` in bytes."""
    config, policy = experiment.generation, experiment.policy
    assert isinstance(config, TorchGenerationConfig)
    item = ITEM_SIZE[config.precision or policy.precision]
    cached = config.most_kv_tokens(policy.max_sequence_length)
    return ProcessMemory(
        "generation",
        config.replicas,
        weights=weights,
        logits=sampling_bytes(config.max_batch_size, shape, gpus=experiment.cluster.gpus_per_node > 0),
        kv_cache=2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim * cached * item,
        staging=2 * weights,  # what is received, and its copy while the old weights still serve
        runtime=GENERATION_RUNTIME,
    )
