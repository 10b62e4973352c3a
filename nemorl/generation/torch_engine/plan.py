"""Models that the embedded engine cannot sample."""

from collections.abc import Iterator

from nemorl.config.experiment import Experiment
from nemorl.errors import Problem
from nemorl.models.shape import ModelShape


def torch_problems(experiment: Experiment, shape: ModelShape, *, installed: bool) -> Iterator[Problem]:
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
