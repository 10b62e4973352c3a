"""Processes, machines and devices.

Which nodes the workers of a group may live on.

How weights travel from the policy to generation.

The models beside the policy: whether one is wanted, what it lives on, and how its batches divide.
"""

from collections.abc import Iterator
from dataclasses import replace

from nemorl.config.algorithm import (
    AlgorithmConfig,
    DistillationAlgorithm,
    OfflineBase,
    OnlineBase,
    OnlineConfig,
)
from nemorl.config.algorithm.advantages import GaeConfig, TokenAdvantageBase
from nemorl.config.algorithm.presets import PRESETS
from nemorl.config.auxiliary import (
    CriticConfig,
    ModelGroupConfig,
    ModelTeacherConfig,
    ReferenceConfig,
    TeacherConfig,
    teachers_held,
)
from nemorl.config.base import Config
from nemorl.config.environment import LocalModelRewardConfig, RewardConfig
from nemorl.config.facts import generates, is_address
from nemorl.config.generation import GenerationConfig, TrtllmGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Problem

from .batches import (
    data_parallel_divides,
    decay_follows_warmup,
    decay_goes_down,
    interleaved_stages_have_work,
    micro_batch_holds_sequence,
)


def kernels_want_gpus(cluster: ClusterConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Transformer Engine has kernels for GPUs only."""
    if policy.kernels == "transformer_engine" and cluster.gpus_per_node == 0:
        fix = "cluster.gpus_per_node is 0, and it computes on GPUs only: set it to auto"
        yield Problem("policy.kernels", policy.kernels, fix)


def narrow_optimizer_has_its_kernel(cluster: ClusterConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Transformer Engine's Adam keeps its tensors in types of fewer bits, on a GPU, beside bfloat16."""
    optimizer = policy.optimizer
    reasons = {
        "cluster.gpus_per_node is 0, and Transformer Engine's Adam, which takes this, runs on GPUs only": (
            cluster.gpus_per_node == 0
        ),
        "policy.precision is float32, which has no use for it": policy.precision == "float32",
        "policy.optimizer.on_host is true, and the Adam of the host takes float32 only": (
            optimizer.state_is_on_host
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    for field in optimizer.narrow_fields if reason else ():
        yield Problem(
            f"policy.optimizer.{field}", getattr(optimizer, field), f"{reason}: set this to float32"
        )


def offload_wants_generation(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """The policy leaves its device to generation, so there has to be some."""
    for field in ("weights", "optimizer"):
        if getattr(policy.offload, field) and not generates(algorithm):
            fix = "this run never generates, so nothing would leave the device: set it to false"
            yield Problem(f"policy.offload.{field}", True, fix)


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
        yield Problem(
            "cluster.gpus_per_node",
            cluster.gpus_per_node,
            f"{there} GPUs are too few for {policy.layout.world_size} policy processes"
            + (f", {others} of models beside it" if others else "")
            + f" and {engines} engines: give more, or take a smaller policy.layout"
            + (", `devices: policy` for the others" if others else "")
            + " or fewer generation.replicas",
        )


_NODE_LABEL = "ray.io/node-id"


def labels_name_groups(
    cluster: ClusterConfig,
    generation: GenerationConfig,
    algorithm: AlgorithmConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Problem]:
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
                fix = f"this run has no such group of workers: name one of {', '.join(own)}"
                yield Problem(f"cluster.{field}.{group}", wanted, fix)
            elif not own[group]:
                fix = f"it lives where the policy does: name the nodes in cluster.{field}.policy"
                yield Problem(f"cluster.{field}.{group}", wanted, fix)


def domains_are_labels(cluster: ClusterConfig) -> Iterator[Problem]:
    """A domain is of several nodes, else it is a matter of the strategy."""
    for group, label in cluster.topology.items():
        if label == _NODE_LABEL:
            fix = "every node is alone with its value of it: set cluster.placement to STRICT_PACK instead"
            yield Problem(f"cluster.topology.{group}", label, fix)


def changes_are_few(generation: GenerationConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """A step moves few weights far enough to change their bfloat16, and nearly all in float32."""
    if generation.delta and (generation.precision or policy.precision) == "float32":
        yield Problem(
            "generation.delta",
            True,
            "in float32 a step changes nearly every weight (in bfloat16 two to four in a hundred), so that "
            "nothing is saved and a copy is kept: set generation.precision to bfloat16, or this to false",
        )


def changes_have_a_base(generation: GenerationConfig) -> Iterator[Problem]:
    """Changes go onto what a receiver keeps."""
    if not isinstance(generation, TrtllmGenerationConfig) or generation.weight_delivery != "workers":
        return
    if generation.delta:
        yield Problem(
            "generation.delta",
            True,
            "TensorRT-LLM's workers keep nothing of what came, so every refit would be whole: set this to "
            "false, or generation.weight_delivery to handles",
        )


def files_hold_whole_versions(generation: GenerationConfig) -> Iterator[Problem]:
    """Whoever joins later reads one version and has no other."""
    if generation.delta and generation.transport == "files":
        yield Problem(
            "generation.delta",
            True,
            "files hold whole versions, which any engine may read at any time: set this to false, or "
            "generation.transport to auto",
        )


def nccl_wants_gpus(generation: GenerationConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """NCCL moves memory of GPUs only."""
    if generation.transport == "nccl" and not cluster.gpus_per_node:
        yield Problem(
            "generation.transport",
            "nccl",
            "NCCL moves the memory of GPUs, and cluster.gpus_per_node is 0: set this to auto or gloo",
        )


def cuda_ipc_is_for_gpus_of_one_machine(
    generation: GenerationConfig, cluster: ClusterConfig
) -> Iterator[Problem]:
    """Processes open each other's GPU memory."""
    if generation.transport != "cuda_ipc":
        return
    if not cluster.gpus_per_node:
        yield Problem(
            "generation.transport",
            "cuda_ipc",
            "CUDA IPC shares the memory of GPUs, and cluster.gpus_per_node is 0: set this to auto or "
            "shared_memory",
        )
    elif cluster.num_nodes > 1:
        yield Problem(
            "generation.transport",
            "cuda_ipc",
            f"CUDA IPC stays on one machine, and cluster.num_nodes is {cluster.num_nodes}: set this to auto "
            "or nccl",
        )


def critic_is_wanted(algorithm: AlgorithmConfig, critic: CriticConfig | None) -> Iterator[Problem]:
    """A critic learns where advantages are made of its values, and only there."""
    if isinstance(algorithm, OnlineConfig):
        advantage = algorithm.advantage
        needs = isinstance(advantage, TokenAdvantageBase) and advantage.needs_values
        if needs and algorithm.critic is None:
            of_name = "critic" in PRESETS[algorithm.name].settings  # without the null there would be one
            change = "remove this null" if of_name else "set `algorithm.critic: {}`, or take `name: ppo`"
            fix = f"the advantage `{advantage.name}` is made of a critic's values: {change}"
            yield Problem("algorithm.critic", None, f"{fix}, or take `token_returns` or `group`")
            return
        if not needs and algorithm.critic is not None:
            fix = f"the advantage `{advantage.name}` asks for no values: set this to null, or take `gae`"
            yield Problem("algorithm.critic", _given(algorithm.critic), fix)
            return
    if critic is not None and not algorithm.keeps_critic:
        fix = f"`{algorithm.name}` has no critic: remove this section, or take an algorithm such as `ppo`"
        yield Problem("critic", _given(critic), fix)


def reference_is_wanted(algorithm: AlgorithmConfig, reference: ReferenceConfig | None) -> Iterator[Problem]:
    """A reference in processes of its own serves online algorithms that look at one."""
    if reference is None:
        return
    if isinstance(algorithm, OnlineConfig):
        if not algorithm.keeps_reference:
            fix = "nothing looks at a reference: remove this section, or raise algorithm.kl.coefficient"
            yield Problem("reference", _given(reference), fix)
        return
    precomputes = isinstance(algorithm, OfflineBase) and algorithm.precomputes_reference
    looks = "keeps its reference in the policy's processes"
    if not (algorithm.keeps_reference or precomputes):
        looks = "looks at no reference"
    yield Problem("reference", _given(reference), f"`{algorithm.name}` {looks}: remove this section")


def teachers_are_wanted(algorithm: AlgorithmConfig, teachers: dict[str, TeacherConfig]) -> Iterator[Problem]:
    """Distillation has teachers, and of several it knows which sequence is whose."""
    if not isinstance(algorithm, DistillationAlgorithm):
        if teachers:
            fix = f"`{algorithm.name}` has no teachers: remove this section, or take `on_policy_distillation`"
            yield Problem("teachers", sorted(teachers), fix)
    elif not teachers:
        fix = f"`{algorithm.name}` learns from teachers: name one, such as {{main: {{model_path: FOLDER}}}}"
        yield Problem("teachers", {}, fix)
    elif len(teachers) > 1 and algorithm.teacher_key is None:
        fix = (
            f"there are {len(teachers)} teachers: give the column of the tasks that names the teacher of each"
        )
        yield Problem("algorithm.teacher_key", None, fix)
    elif len(teachers) == 1 and algorithm.teacher_key is not None:
        fix = "there is one teacher, of all tasks: remove this, or name more in teachers"
        yield Problem("algorithm.teacher_key", algorithm.teacher_key, fix)


def teachers_can_be_asked(
    algorithm: AlgorithmConfig, generation: GenerationConfig, teachers: dict[str, TeacherConfig]
) -> Iterator[Problem]:
    """A server tells logprobs of the distribution as it is, at an address."""
    temperature = generation.sampling.temperature
    for name, teacher in teachers.items():
        if isinstance(teacher, ModelTeacherConfig):
            continue
        if not is_address(teacher.base_url):
            fix = "an address such as http://127.0.0.1:8000/v1 is wanted"
            yield Problem(f"teachers.{name}.base_url", teacher.base_url, fix)
        if algorithm.online and temperature != 1:
            fix = (
                f"the server of teachers.{name} tells logprobs at temperature 1: take 1, or a teacher `model`"
            )
            yield Problem("generation.sampling.temperature", temperature, fix)


def critic_settings_are_used(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """One lambda is looked at, and after the critic alone the policy learns too."""
    if not isinstance(algorithm, OnlineConfig):
        return
    advantage, critic = algorithm.advantage, algorithm.critic
    if isinstance(advantage, GaeConfig):
        adapts = advantage.length_adaptive_alpha is not None
        if adapts and advantage.lam != GaeConfig.model_fields["lam"].default:
            fix = "length_adaptive_alpha stands in for it: remove this, or set that to null"
            yield Problem("algorithm.advantage.lam", advantage.lam, fix)
    if critic is not None and critic.warmup_steps >= algorithm.num_steps:
        fix = f"the run has {algorithm.num_steps} steps, so the policy would never learn: take fewer"
        yield Problem("algorithm.critic.warmup_steps", critic.warmup_steps, fix)


def groups_have_devices(
    policy: PolicyConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Problem]:
    """What shares the policy's devices finds one for each of its processes; others leave nobody theirs."""
    for name, group in _sections(critic, reference, teachers, rewards):
        if group.devices == "own":
            for part in ("weights", "optimizer"):
                if getattr(group.offload, part):
                    fix = f"{name}.devices is `own`, so nobody waits for them: set it to false"
                    yield Problem(f"{name}.offload.{part}", True, fix)
            continue
        size, places = group.worker_config(policy).layout.world_size, policy.layout.world_size
        if size > places:
            fix = f"the policy has devices for {places} processes: take a smaller layout, or `own` devices"
            yield Problem(f"{name}.layout", f"{size} processes", fix)


def groups_are_as_sound_as_policies(
    policy: PolicyConfig,
    algorithm: AlgorithmConfig,
    cluster: ClusterConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Problem]:
    """What is asked of a policy's section is asked of theirs, where they say something else than it.

    What a reward model scores is no optimizer step: it is filled up until it divides.
    """
    for name, group in _sections(critic, reference, teachers, rewards):
        config = group.worker_config(policy)
        of_steps = [
            *data_parallel_divides(config, algorithm),
            *interleaved_stages_have_work(config, algorithm),
        ]
        problems = [
            *(of_steps if not isinstance(group, LocalModelRewardConfig) else []),
            *micro_batch_holds_sequence(config),
            *kernels_want_gpus(cluster, config),
            *narrow_optimizer_has_its_kernel(cluster, config),
            *decay_follows_warmup(config),
            *decay_goes_down(config),
        ]
        for problem in problems:
            section, _, field = problem.field.partition(".")
            own = [part for part in type(group).model_fields if getattr(group, part) is not None]
            if section == "policy" and field.partition(".")[0] in own:
                fix = problem.fix
                for part in own:
                    fix = fix.replace(f"policy.{part}", f"{name}.{part}")
                yield replace(problem, field=f"{name}.{field}", fix=fix)


def reward_models_are_asked_while_sampling(
    algorithm: AlgorithmConfig, rewards: tuple[RewardConfig, ...]
) -> Iterator[Problem]:
    """What scores on the policy's devices finds them free."""
    if not isinstance(algorithm, OnlineBase) or not algorithm.max_staleness:
        return
    for place, reward in enumerate(rewards):
        if isinstance(reward, LocalModelRewardConfig) and reward.devices == "policy":
            fix = (
                "with algorithm.max_staleness answers are scored while the policy trains there: set it to own"
            )
            yield Problem(f"rewards.{place}.devices", "policy", fix)


def _sections(
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[tuple[str, ModelGroupConfig]]:
    if critic is not None:
        yield "critic", critic
    if reference is not None:
        yield "reference", reference
    yield from ((f"teachers.{name}", teacher) for name, teacher in teachers_held(teachers).items())
    for place, reward in enumerate(rewards):
        if isinstance(reward, LocalModelRewardConfig):
            yield f"rewards.{place}", reward


def _given(section: Config) -> object:
    """What was written of a section, for people."""
    return section.model_dump(mode="json", exclude_unset=True)
