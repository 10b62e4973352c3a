"""Processes, machines and devices."""

from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.auxiliary import (
    CriticConfig,
    ModelGroupConfig,
    ReferenceConfig,
    TeacherConfig,
    teachers_held,
)
from nemorl.config.environment import LocalModelRewardConfig, RewardConfig
from nemorl.config.generation import GenerationConfig
from nemorl.config.optimizer import AdamConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Violation

from .facts import generates


def kernels_want_gpus(cluster: ClusterConfig, policy: PolicyConfig) -> Iterator[Violation]:
    """Transformer Engine has kernels for GPUs only."""
    if policy.kernels == "transformer_engine" and cluster.gpus_per_node == 0:
        mend = "cluster.gpus_per_node is 0, and it computes on GPUs only: set it to auto"
        yield Violation("policy.kernels", policy.kernels, mend)


def narrow_optimizer_has_its_kernel(cluster: ClusterConfig, policy: PolicyConfig) -> Iterator[Violation]:
    """Transformer Engine's Adam keeps its tensors in types of fewer bits, on a GPU, beside bfloat16."""
    optimizer = policy.optimizer
    if not isinstance(optimizer, AdamConfig):
        return
    reasons = {
        "cluster.gpus_per_node is 0, and Transformer Engine's Adam, which takes this, runs on GPUs only": (
            cluster.gpus_per_node == 0
        ),
        "policy.precision is float32, which has no use for it": policy.precision == "float32",
        "policy.optimizer.on_host is true, and the Adam of the host takes float32 only": optimizer.on_host,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    for field in optimizer.narrow_fields if reason else ():
        yield Violation(
            f"policy.optimizer.{field}", getattr(optimizer, field), f"{reason}: set this to float32"
        )


def offload_wants_generation(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """The policy leaves its device to generation, so there has to be some."""
    for field in ("weights", "optimizer"):
        if getattr(policy.offload, field) and not generates(algorithm):
            mend = "this run never generates, so nothing would leave the device: set it to false"
            yield Violation(f"policy.offload.{field}", True, mend)


def gpus_for_all_processes(
    cluster: ClusterConfig,
    policy: PolicyConfig,
    generation: GenerationConfig,
    algorithm: AlgorithmConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Violation]:
    """Where there are GPUs every process of a model has one, and every engine that does not share theirs.

    Nodes without any are counted as if they had some; what is refused here fits nowhere.
    """
    engines = generation.replicas * generation.ranks_per_replica
    if not (generates(algorithm) and generation.has_engines) or generation.shares_devices:
        engines = 0
    beside = [critic or CriticConfig()] if algorithm.keeps_critic else []
    started: list[ModelGroupConfig] = [*beside, *([reference] if reference is not None else [])]
    started += teachers_held(teachers).values()
    started += [reward for reward in rewards if isinstance(reward, LocalModelRewardConfig)]
    others = sum(m.worker_config(policy).layout.world_size for m in started if m.devices == "own")
    wanted = policy.layout.world_size + others + engines
    there = cluster.num_nodes * cluster.gpus_per_node
    if 0 < there < wanted:
        yield Violation(
            "cluster.gpus_per_node",
            cluster.gpus_per_node,
            f"{there} GPUs are too few for {policy.layout.world_size} policy processes"
            + (f", {others} of models beside it" if others else "")
            + f" and {engines} engines: give more, or take a smaller policy.layout"
            + (", `devices: policy` for the others" if others else "")
            + " or fewer generation.replicas",
        )
