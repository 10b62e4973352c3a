"""Which nodes the workers of a group may live on."""

from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.auxiliary import CriticConfig, ReferenceConfig, TeacherConfig, teachers_held
from nemorl.config.environment import LocalModelRewardConfig, RewardConfig
from nemorl.config.generation import GenerationConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Violation

_NODE_LABEL = "ray.io/node-id"


def labels_name_groups(
    cluster: ClusterConfig,
    generation: GenerationConfig,
    algorithm: AlgorithmConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Violation]:
    """Labels of nodes are for groups that the run has, and that have places of their own."""
    own = {"policy": True, "rollout": True}  # whether each group has places of its own
    if generation.has_engines:
        own["generation"] = not (generation.shares_devices and cluster.gpus_per_node)
    if algorithm.keeps_critic:
        own["critic"] = (critic or CriticConfig()).devices == "own"
    if algorithm.keeps_reference and reference is not None:
        own["reference"] = reference.devices == "own"
    for name, teacher in teachers_held(teachers).items():
        own[f"teacher_{name}"] = teacher.devices == "own"
    for place, reward in enumerate(rewards):
        if isinstance(reward, LocalModelRewardConfig):
            own[f"reward_{place}"] = reward.devices == "own"
    for field, groups in (("labels", cluster.labels), ("topology", cluster.topology)):
        for group, wanted in groups.items():
            if group not in own:
                mend = f"this run has no such group of workers: name one of {', '.join(own)}"
                yield Violation(f"cluster.{field}.{group}", wanted, mend)
            elif not own[group]:
                mend = f"it lives where the policy does: name the nodes in cluster.{field}.policy"
                yield Violation(f"cluster.{field}.{group}", wanted, mend)


def domains_are_labels(cluster: ClusterConfig) -> Iterator[Violation]:
    """A domain is of several nodes, else it is a matter of the strategy."""
    for group, label in cluster.topology.items():
        if label == _NODE_LABEL:
            mend = "every node is alone with its value of it: set cluster.placement to STRICT_PACK instead"
            yield Violation(f"cluster.topology.{group}", label, mend)
