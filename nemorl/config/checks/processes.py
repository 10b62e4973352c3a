"""Processes and devices: auxiliary models, GPUs for all, labels of nodes, servers that workers reach."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from nemorl.config.algorithm import AlgorithmConfig
from nemorl.config.auxiliary import (
    CriticConfig,
    EndpointTeacherConfig,
    ModelGroupConfig,
    ReferenceConfig,
    TeacherConfig,
    used_models,
)
from nemorl.config.base import check, counted
from nemorl.config.environment import RewardConfig, ServiceRewardBase
from nemorl.config.experiment import derived_fields, field_value
from nemorl.config.facts import group_name
from nemorl.config.generation import GenerationConfig, OpenAIGenerationConfig, is_loopback, server_host
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Problem

from .batches import data_parallel_divides, interleaved_stages_have_work

Auxiliary = dict[str, ModelGroupConfig]


@check
def gpus_for_all_processes(
    cluster: ClusterConfig,
    policy: PolicyConfig,
    generation: GenerationConfig,
    algorithm: AlgorithmConfig,
    auxiliary: Auxiliary,
) -> Iterator[Problem]:
    """With GPUs every process of a model has one, and every engine that does not share the policy's.

    Whether the machines have these GPUs is not known here; what is refused fits nowhere.
    """
    engines = 0
    if algorithm.generates and generation.has_engines and not generation.shares_devices:
        engines = generation.replicas * generation.ranks_per_replica
    models = used_models(algorithm, auxiliary).values()
    others = sum(model.worker_config(policy).layout.world_size for model in models if model.devices == "own")
    available = cluster.num_nodes * cluster.gpus_per_node
    if 0 < available < policy.layout.world_size + others + engines:
        have = f"{counted(available, 'GPU')} {'is' if available == 1 else 'are'} too few for"
        of_models = f", {others} of auxiliary models" if others else ""
        share = ", `devices: policy` for the others" if others else ""
        yield Problem(
            "cluster.gpus_per_node",
            cluster.gpus_per_node,
            f"{have} {counted(policy.layout.world_size, 'policy process')}{of_models} and "
            f"{counted(engines, 'engine')}; raise it, or use a smaller policy.layout{share} or fewer "
            "generation.replicas",
        )


@check
def labels_name_groups(
    cluster: ClusterConfig, generation: GenerationConfig, algorithm: AlgorithmConfig, auxiliary: Auxiliary
) -> Iterator[Problem]:
    """Labels of nodes are for groups of the run that have their own devices."""
    placed = {"policy": True, "rollout": True}  # each group, and if it has its own devices
    if generation.has_engines:
        placed["generation"] = not (generation.shares_devices and cluster.gpus_per_node)
    for path, model in used_models(algorithm, auxiliary).items():
        placed[group_name(path)] = model.devices == "own"
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
        yield Problem("critic", critic.model_dump(mode="json", exclude_unset=True), fix)
    if reference is None or (algorithm.reference_field is not None and algorithm.keeps_reference):
        return
    if algorithm.reference_field is not None:
        fix = f"no reference is used; remove this section, or raise {algorithm.reference_field}"
    elif algorithm.keeps_reference or algorithm.precomputes_reference:
        fix = f"`{algorithm.name}` keeps its reference in the policy's processes; remove this section"
    else:
        fix = f"`{algorithm.name}` uses no reference; remove this section"
    yield Problem("reference", reference.model_dump(mode="json", exclude_unset=True), fix)


@check
def teachers_are_used(algorithm: AlgorithmConfig, teachers: dict[str, TeacherConfig]) -> Iterator[Problem]:
    """Distillation has teachers, and if several, a column that names the teacher of each task."""
    key = getattr(algorithm, "teacher_key", None)
    if teachers and not algorithm.keeps_teachers:
        fix = f"`{algorithm.name}` has no teachers; remove this section, or use `on_policy_distillation`"
        yield Problem("teachers", sorted(teachers), fix)
    elif algorithm.keeps_teachers and not teachers:
        fix = f"`{algorithm.name}` learns from teachers; add one, such as {{main: {{model_path: FOLDER}}}}"
        yield Problem("teachers", {}, fix)
    elif len(teachers) > 1 and key is None:
        fix = f"there are {len(teachers)} teachers; set it to the column of the tasks that names the teacher"
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
            of_server = f"the server of teachers.{name} returns logprobs at temperature 1"
            fix = f"{of_server}; set it to 1, or use a teacher `model`"
            yield Problem("generation.sampling.temperature", temperature, fix)


@check
def auxiliary_layouts_divide(
    policy: PolicyConfig, algorithm: AlgorithmConfig, auxiliary: Auxiliary
) -> Iterator[Problem]:
    """The batches of an auxiliary model with another layout divide too; reward models fill theirs up."""
    for path, model in auxiliary.items():
        if model.layout is None or path.startswith("rewards."):
            continue
        config = model.worker_config(policy)
        for of_batch in (data_parallel_divides, interleaved_stages_have_work):
            for problem in of_batch(config, algorithm):
                if problem.field.startswith("policy.layout"):
                    field = problem.field.replace("policy", path, 1)
                    fix = problem.fix.replace("policy.layout", f"{path}.layout")
                    yield replace(problem, field=field, fix=fix)


@check
def reward_models_run_while_sampling(algorithm: AlgorithmConfig, auxiliary: Auxiliary) -> Iterator[Problem]:
    """A model on the policy's devices scores while these are free."""
    for path, model in auxiliary.items():
        if algorithm.allows_staleness and path.startswith("rewards.") and model.devices == "policy":
            fix = "with algorithm.max_staleness answers are scored while the policy trains; set it to own"
            yield Problem(f"{path}.devices", "policy", fix)


@check
def shared_devices_are_freed(sections: Mapping[str, object]) -> Iterator[Problem]:
    """Engines on the policy's GPUs need the memory of the models there, which they have unless it is set."""
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
        if is_loopback(server_host(url)):
            fix = (
                f"cluster.num_nodes is {cluster.num_nodes}, and on each node this address is that node; use "
                "the address by which all nodes reach the server"
            )
            yield Problem(field, url, fix)
