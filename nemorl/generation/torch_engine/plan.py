"""Models that the embedded engine cannot sample, and the memory of its process."""

from collections.abc import Iterator

from nemorl.config.experiment import Experiment
from nemorl.config.generation import TorchGenerationConfig
from nemorl.errors import Problem
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.plan.drafts import draft_elements, draft_problems, draft_shape, names_mtp_layers
from nemorl.plan.memory import GENERATION_RUNTIME, ITEM_SIZE, ProcessMemory, sampling_bytes


def problems(experiment: Experiment, shape: ModelShape, *, installed: bool) -> Iterator[Problem]:
    """The embedded engine is a plain dense decoder; a window that no sequence fills is none."""
    found = _beyond(experiment, shape)
    if found:
        fix = f"the embedded engine samples dense Llama-like models only, and this one has {', '.join(found)}"
        yield Problem("generation.backend", "torch", f"{fix}: take another model or back end")
    yield from draft_problems(experiment, shape)
    yield from _mtp_problems(experiment)
    if (draft_model := experiment.generation.draft_model) is None:
        return
    field, folder = "generation.speculation.model_path", draft_model.model_path
    try:
        found = _beyond(experiment, load_shape(folder))
    except UnsupportedModel as error:
        yield Problem(field, str(folder), str(error))
        return
    except BrokenModelFolder:  # reported with the vocabulary
        return
    if found:
        fix = (
            f"the embedded engine drafts by dense Llama-like models only, and this one has {', '.join(found)}"
        )
        yield Problem(field, str(folder), fix)


def _mtp_problems(experiment: Experiment) -> Iterator[Problem]:
    """Layers that config.json names, and that the model's family does not read."""
    model_path = experiment.policy.model_path
    if not experiment.generation.drafts_by_mtp or not names_mtp_layers(model_path):
        return
    shape = load_shape(model_path, with_mtp=True)
    if shape.mtp is None:
        fix = f"the embedded engine has no layers for further tokens of this family ({shape.family})"
        yield Problem("generation.speculation.method", "mtp", f"{fix}: use prompt_lookup or draft_model")


def _beyond(experiment: Experiment, shape: ModelShape) -> list[str]:
    """What a model has that the embedded engine does not compute."""
    length = experiment.policy.max_sequence_length
    beyond = {
        "experts": shape.moe,
        "latent attention (MLA)": shape.mla,
        "sliding windows": any(window is not None and window < length for window in shape.windows),
        "attention sinks": shape.sinks,
        "norms after attention and MLP": shape.post_norms,
        f"the activation {shape.activation!r}": shape.activation != "silu",
    }
    return [what for what, there in beyond.items() if there]


def memory(experiment: Experiment, shape: ModelShape, weights: int) -> ProcessMemory:
    """`weights` in bytes."""
    config, policy = experiment.generation, experiment.policy
    assert isinstance(config, TorchGenerationConfig)
    item = ITEM_SIZE[config.precision or policy.precision]
    cached = config.most_kv_tokens(policy.max_sequence_length)
    drafts = draft_elements(experiment) * item
    kv_cache = _kv_elements(shape) * cached * item
    if config.drafts_by_mtp:
        weights, drafts = weights + drafts, 0  # received or not, each has a place in the staged weights
        of_layer = _kv_elements(shape) // shape.num_layers
        kv_cache += (of_layer + shape.hidden_size) * cached * item
    if (draft := draft_shape(experiment)) is not None:
        kv_cache += _kv_elements(draft) * cached * item
    return ProcessMemory(
        "generation",
        config.replicas,
        weights=weights + drafts,
        logits=sampling_bytes(config.max_batch_size, shape, gpus=experiment.cluster.gpus_per_node > 0),
        kv_cache=kv_cache,
        staging=2 * weights,  # what is received, and its copy while the old weights still serve
        runtime=GENERATION_RUNTIME,
    )


def _kv_elements(shape: ModelShape) -> int:
    """Keys and values of one token."""
    return 2 * shape.num_layers * shape.num_key_value_heads * shape.head_dim
