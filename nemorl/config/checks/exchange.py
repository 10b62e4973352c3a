"""How weights travel from the policy to generation."""

from collections.abc import Iterator

from nemorl.config.generation import GenerationConfig
from nemorl.config.generation_trtllm import TrtllmGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Violation


def changes_are_few(generation: GenerationConfig, policy: PolicyConfig) -> Iterator[Violation]:
    """A step moves few weights far enough to change their bfloat16, and nearly all in float32."""
    if generation.delta and (generation.precision or policy.precision) == "float32":
        yield Violation(
            "generation.delta",
            True,
            "in float32 a step changes nearly every weight (in bfloat16 two to four in a hundred), so that "
            "nothing is saved and a copy is kept: set generation.precision to bfloat16, or this to false",
        )


def changes_have_a_base(generation: GenerationConfig) -> Iterator[Violation]:
    """Changes go onto what a receiver keeps."""
    if not isinstance(generation, TrtllmGenerationConfig) or generation.weight_delivery != "workers":
        return
    if generation.delta:
        yield Violation(
            "generation.delta",
            True,
            "TensorRT-LLM's workers keep nothing of what came, so every refit would be whole: set this to "
            "false, or generation.weight_delivery to handles",
        )


def files_hold_whole_versions(generation: GenerationConfig) -> Iterator[Violation]:
    """Whoever joins later reads one version and has no other."""
    if generation.delta and generation.transport == "files":
        yield Violation(
            "generation.delta",
            True,
            "files hold whole versions, which any engine may read at any time: set this to false, or "
            "generation.transport to auto",
        )


def nccl_wants_gpus(generation: GenerationConfig, cluster: ClusterConfig) -> Iterator[Violation]:
    """NCCL moves memory of GPUs only."""
    if generation.transport == "nccl" and not cluster.gpus_per_node:
        yield Violation(
            "generation.transport",
            "nccl",
            "NCCL moves the memory of GPUs, and cluster.gpus_per_node is 0: set this to auto or gloo",
        )


def cuda_ipc_is_for_gpus_of_one_machine(
    generation: GenerationConfig, cluster: ClusterConfig
) -> Iterator[Violation]:
    """Processes open each other's GPU memory."""
    if generation.transport != "cuda_ipc":
        return
    if not cluster.gpus_per_node:
        yield Violation(
            "generation.transport",
            "cuda_ipc",
            "CUDA IPC shares the memory of GPUs, and cluster.gpus_per_node is 0: set this to auto or "
            "shared_memory",
        )
    elif cluster.num_nodes > 1:
        yield Violation(
            "generation.transport",
            "cuda_ipc",
            f"CUDA IPC stays on one machine, and cluster.num_nodes is {cluster.num_nodes}: set this to auto "
            "or nccl",
        )
