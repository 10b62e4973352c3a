"""What a TensorRT-LLM engine requires, and the memory of its workers."""

import os
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from nemorl.config.experiment import Experiment
from nemorl.config.generation import TrtllmGenerationConfig
from nemorl.errors import Problem
from nemorl.models.shape import ModelShape
from nemorl.plan.drafts import draft_elements, draft_problems
from nemorl.plan.memory import ITEM_SIZE, ProcessMemory, buckets_bytes, sampling_bytes

_RUNTIME = 600_000_000  # bytes of each worker with its imports, as measured of vLLM


def installed_version() -> str | None:
    if find_spec("tensorrt_llm") is None:
        return None
    try:
        return metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:  # a folder on the path
        return "unknown version"


def problems(experiment: Experiment, shape: ModelShape, *, installed: bool) -> Iterator[Problem]:
    if installed and "RAY_ADDRESS" not in os.environ and installed_version() is None:
        fix = "the package tensorrt_llm is not installed: start from NVIDIA's TensorRT-LLM container"
        fix += " (docs/trtllm.md), or take another generation.backend"
        yield Problem("generation.backend", "trtllm", fix)
    yield from draft_problems(experiment, shape)


def memory(experiment: Experiment, shape: ModelShape, weights: int) -> ProcessMemory:
    """One worker on its GPU; the KV cache takes its fraction of what is left. `weights` in bytes."""
    config = experiment.generation
    assert isinstance(config, TrtllmGenerationConfig)
    ranks, item = config.ranks_per_replica, ITEM_SIZE[config.precision or experiment.policy.precision]
    return ProcessMemory(
        "generation",
        config.replicas * ranks,
        weights=-(-(weights + draft_elements(experiment) * item) // ranks),
        logits=sampling_bytes(config.max_batch_size, shape),
        staging=buckets_bytes(config, weights),
        # gathered by the replica's process; of it each worker's share
        staging_on_host=-(-weights // ranks) if config.weight_delivery == "handles" else 0,
        runtime=_RUNTIME,
    )
