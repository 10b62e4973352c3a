"""Processes and devices: auxiliary models, GPUs for all, labels of nodes, servers that workers reach."""

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.auxiliary import (
    CriticConfig,
    EndpointTeacherConfig,
    ModelGroupConfig,
    ReferenceConfig,
    TeacherConfig,
    teachers_held,
)
from nemorl.config.base import Config, check
from nemorl.config.environment import LocalModelRewardConfig, RewardConfig, ServiceRewardBase
from nemorl.config.experiment import derived_fields, field_value
from nemorl.config.facts import reward_group, teacher_group
from nemorl.config.generation import GenerationConfig, OpenAIGenerationConfig, is_loopback
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Problem

from .batches import data_parallel_divides, interleaved_stages_have_work


@check
def gpus_for_all_processes(
    cluster: ClusterConfig,
    policy: PolicyConfig,
    generation: GenerationConfig,
    algorithm: AlgorithmConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Problem]:
    """With GPUs every process of a model has one, and every engine that does not share the policy's.

    Whether the machines have these GPUs is not known here; what is refused fits nowhere.
    """
    engines = generation.replicas * generation.ranks_per_replica
    if not (algorithm.generates and generation.has_engines) or generation.shares_devices:
        engines = 0
    auxiliary = list(_groups(critic, reference, teachers, rewards).values())
    if algorithm.keeps_critic and critic is None:
        auxiliary.append(CriticConfig())
    elif not algorithm.keeps_critic and critic is not None:
        auxiliary.remove(critic)
    others = sum(m.worker_config(policy).layout.world_size for m in auxiliary if m.devices == "own")
    needed = policy.layout.world_size + others + engines
    available = cluster.num_nodes * cluster.gpus_per_node
    if 0 < available < needed:
        yield Problem(
            "cluster.gpus_per_node",
            cluster.gpus_per_node,
            f"{available} GPUs are too few for {policy.layout.world_size} policy processes"
            + (f", {others} of auxiliary models" if others else "")
            + f" and {engines} engines; raise it, or use a smaller policy.layout"
            + (", `devices: policy` for the others" if others else "")
            + " or fewer generation.replicas",
        )


@check
def labels_name_groups(
    cluster: ClusterConfig,
    generation: GenerationConfig,
    algorithm: AlgorithmConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Problem]:
    """Labels of nodes are for groups of the run that have their own devices."""
    placed = {"policy": True, "rollout": True}  # each group, and if it has its own devices
    if generation.has_engines:
        placed["generation"] = not (generation.shares_devices and cluster.gpus_per_node)
    if algorithm.keeps_critic:
        placed["critic"] = (critic or CriticConfig()).devices == "own"
    if algorithm.keeps_reference and reference is not None:
        placed["reference"] = reference.devices == "own"
    for name, teacher in teachers_held(teachers).items():
        placed[teacher_group(name)] = teacher.devices == "own"
    for index, reward in enumerate(rewards):
        if isinstance(reward, LocalModelRewardConfig):
            placed[reward_group(index)] = reward.devices == "own"
    for field, groups in (("labels", cluster.labels), ("topology", cluster.topology)):
        for group, value in groups.items():
            if group not in placed:
                fix = f"this run has no such group of workers; use one of {', '.join(placed)}"
                yield Problem(f"cluster.{field}.{group}", value, fix)
            elif not placed[group]:
                fix = f"it shares the policy's devices; name the nodes in cluster.{field}.policy"
                yield Problem(f"cluster.{field}.{group}", value, fix)


@check
def auxiliary_models_are_used(
    algorithm: AlgorithmConfig, critic: CriticConfig | None, reference: ReferenceConfig | None
) -> Iterator[Problem]:
    """A critic or a reference in separate processes needs an algorithm that uses it."""
    if critic is not None and not algorithm.keeps_critic:
        fix = f"`{algorithm.name}` has no critic; remove this section, or use an algorithm such as `ppo`"
        yield Problem("critic", _given(critic), fix)
    if reference is None:
        return
    if algorithm.reference_field is not None:
        if not algorithm.keeps_reference:
            fix = f"no reference is used; remove this section, or raise {algorithm.reference_field}"
            yield Problem("reference", _given(reference), fix)
        return
    uses = "keeps its reference in the policy's processes"
    if not (algorithm.keeps_reference or algorithm.precomputes_reference):
        uses = "uses no reference"
    yield Problem("reference", _given(reference), f"`{algorithm.name}` {uses}; remove this section")


@check
def teachers_are_used(algorithm: AlgorithmConfig, teachers: dict[str, TeacherConfig]) -> Iterator[Problem]:
    """Distillation has teachers, and if several, a column that names the teacher of each task."""
    if not algorithm.keeps_teachers:
        if teachers:
            fix = f"`{algorithm.name}` has no teachers; remove this section, or use `on_policy_distillation`"
            yield Problem("teachers", sorted(teachers), fix)
        return
    key = getattr(algorithm, "teacher_key", None)
    if not teachers:
        fix = f"`{algorithm.name}` learns from teachers; add one, such as {{main: {{model_path: FOLDER}}}}"
        yield Problem("teachers", {}, fix)
    elif len(teachers) > 1 and key is None:
        fix = (
            f"there are {len(teachers)} teachers; set it to the column of the tasks that names their teacher"
        )
        yield Problem("algorithm.teacher_key", None, fix)
    elif len(teachers) == 1 and key is not None:
        fix = "there is one teacher, of all tasks; remove this, or add teachers"
        yield Problem("algorithm.teacher_key", key, fix)


@check
def teachers_score_at_temperature_1(
    algorithm: AlgorithmConfig, generation: GenerationConfig, teachers: dict[str, TeacherConfig]
) -> Iterator[Problem]:
    """A server returns logprobs of the unscaled distribution."""
    temperature = generation.sampling.temperature
    for name, teacher in teachers.items():
        if isinstance(teacher, EndpointTeacherConfig) and algorithm.online and temperature != 1:
            fix = (
                f"the server of teachers.{name} returns logprobs at temperature 1; set it to 1, or use a "
                "teacher `model`"
            )
            yield Problem("generation.sampling.temperature", temperature, fix)


@check
def auxiliary_layouts_divide(
    policy: PolicyConfig,
    algorithm: AlgorithmConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
) -> Iterator[Problem]:
    """The batches of an auxiliary model with another layout divide too; reward models fill theirs up."""
    for name, group in _groups(critic, reference, teachers, ()).items():
        if group.layout is None:
            continue
        config = group.worker_config(policy)
        for problem in (
            *data_parallel_divides(config, algorithm),
            *interleaved_stages_have_work(config, algorithm),
        ):
            if problem.field.startswith("policy.layout"):
                field = problem.field.replace("policy", name, 1)
                yield replace(
                    problem, field=field, fix=problem.fix.replace("policy.layout", f"{name}.layout")
                )


@check
def reward_models_run_while_sampling(
    algorithm: AlgorithmConfig, rewards: tuple[RewardConfig, ...]
) -> Iterator[Problem]:
    """A model on the policy's devices scores while these are free."""
    for index, reward in enumerate(rewards if algorithm.allows_staleness else ()):
        if isinstance(reward, LocalModelRewardConfig) and reward.devices == "policy":
            fix = "with algorithm.max_staleness answers are scored while the policy trains; set it to own"
            yield Problem(f"rewards.{index}.devices", "policy", fix)


@check
def shared_devices_are_freed(
    generation: GenerationConfig,
    cluster: ClusterConfig,
    algorithm: AlgorithmConfig,
    policy: PolicyConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Problem]:
    """Engines on the policy's GPUs need the memory of the models there, which they have unless it is set."""
    sections = {
        **{"generation": generation, "cluster": cluster, "algorithm": algorithm, "policy": policy},
        **{"critic": critic, "reference": reference, "teachers": teachers, "rewards": rewards},
    }
    for field in derived_fields(sections):
        if not field_value(sections, field):
            fix = "generation.colocated is true, and engines need the memory that this occupies; remove it"
            yield Problem(field, False, fix)


@check
def servers_are_reached_from_all_nodes(
    cluster: ClusterConfig,
    generation: GenerationConfig,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Problem]:
    """Workers send requests to them, and on another node a loopback address is another machine."""
    if cluster.num_nodes == 1:
        return
    urls: dict[str, str] = {}
    if isinstance(generation, OpenAIGenerationConfig):
        urls["generation.base_url"] = generation.base_url
    for name, teacher in teachers.items():
        if isinstance(teacher, EndpointTeacherConfig):
            urls[f"teachers.{name}.base_url"] = teacher.base_url
    for index, reward in enumerate(rewards):
        if isinstance(reward, ServiceRewardBase):
            urls[f"rewards.{index}.url"] = reward.url
    for field, url in urls.items():
        if is_loopback(_host(url)):
            fix = (
                f"cluster.num_nodes is {cluster.num_nodes}, and on each node this address is that node; use "
                "the address by which all nodes reach the server"
            )
            yield Problem(field, url, fix)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _groups(
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> dict[str, ModelGroupConfig]:
    """The auxiliary models with a section, by its path."""
    groups: dict[str, ModelGroupConfig] = {}
    if critic is not None:
        groups["critic"] = critic
    if reference is not None:
        groups["reference"] = reference
    groups |= {f"teachers.{name}": teacher for name, teacher in teachers_held(teachers).items()}
    for index, reward in enumerate(rewards):
        if isinstance(reward, LocalModelRewardConfig):
            groups[f"rewards.{index}"] = reward
    return groups


def _given(section: Config) -> object:
    """The fields of a section that were set, for messages."""
    return section.model_dump(mode="json", exclude_unset=True)
