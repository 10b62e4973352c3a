"""The models beside the policy: whether one is wanted, what it lives on, and how its batches divide."""

from collections.abc import Iterator
from dataclasses import replace

from nemorl.config.algorithm import (
    AlgorithmConfig,
    DistillationAlgorithm,
    OfflineBase,
    OnlineBase,
    OnlineConfig,
)
from nemorl.config.algorithm.presets import presets
from nemorl.config.algorithm.token_advantage import GaeConfig, TokenAdvantageBase
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
from nemorl.config.generation import GenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Violation

from .batches import data_parallel_divides, interleaved_stages_have_work
from .facts import is_address
from .lengths import micro_batch_holds_sequence
from .resources import kernels_want_gpus, narrow_optimizer_has_its_kernel
from .schedule import decay_follows_warmup, decay_goes_down


def critic_is_wanted(algorithm: AlgorithmConfig, critic: CriticConfig | None) -> Iterator[Violation]:
    """A critic learns where advantages are made of its values, and only there."""
    if isinstance(algorithm, OnlineConfig):
        advantage = algorithm.advantage
        needs = isinstance(advantage, TokenAdvantageBase) and advantage.needs_values
        if needs and algorithm.critic is None:
            of_name = "critic" in presets()[algorithm.name].settings  # without the null there would be one
            change = "remove this null" if of_name else "set `algorithm.critic: {}`, or take `name: ppo`"
            mend = f"the advantage `{advantage.name}` is made of a critic's values: {change}"
            yield Violation("algorithm.critic", None, f"{mend}, or take `token_returns` or `group`")
            return
        if not needs and algorithm.critic is not None:
            mend = f"the advantage `{advantage.name}` asks for no values: set this to null, or take `gae`"
            yield Violation("algorithm.critic", _given(algorithm.critic), mend)
            return
    if critic is not None and not algorithm.keeps_critic:
        mend = f"`{algorithm.name}` has no critic: remove this section, or take an algorithm such as `ppo`"
        yield Violation("critic", _given(critic), mend)


def reference_is_wanted(algorithm: AlgorithmConfig, reference: ReferenceConfig | None) -> Iterator[Violation]:
    """A reference in processes of its own serves online algorithms that look at one."""
    if reference is None:
        return
    if isinstance(algorithm, OnlineConfig):
        if not algorithm.keeps_reference:
            mend = "nothing looks at a reference: remove this section, or raise algorithm.kl.coefficient"
            yield Violation("reference", _given(reference), mend)
        return
    precomputes = isinstance(algorithm, OfflineBase) and algorithm.precomputes_reference
    looks = "keeps its reference in the policy's processes"
    if not (algorithm.keeps_reference or precomputes):
        looks = "looks at no reference"
    yield Violation("reference", _given(reference), f"`{algorithm.name}` {looks}: remove this section")


def teachers_are_wanted(
    algorithm: AlgorithmConfig, teachers: dict[str, TeacherConfig]
) -> Iterator[Violation]:
    """Distillation has teachers, and of several it knows which sequence is whose."""
    if not isinstance(algorithm, DistillationAlgorithm):
        if teachers:
            mend = (
                f"`{algorithm.name}` has no teachers: remove this section, or take `on_policy_distillation`"
            )
            yield Violation("teachers", sorted(teachers), mend)
    elif not teachers:
        mend = f"`{algorithm.name}` learns from teachers: name one, such as {{main: {{model_path: FOLDER}}}}"
        yield Violation("teachers", {}, mend)
    elif len(teachers) > 1 and algorithm.teacher_key is None:
        mend = (
            f"there are {len(teachers)} teachers: give the column of the tasks that names the teacher of each"
        )
        yield Violation("algorithm.teacher_key", None, mend)
    elif len(teachers) == 1 and algorithm.teacher_key is not None:
        mend = "there is one teacher, of all tasks: remove this, or name more in teachers"
        yield Violation("algorithm.teacher_key", algorithm.teacher_key, mend)


def teachers_can_be_asked(
    algorithm: AlgorithmConfig, generation: GenerationConfig, teachers: dict[str, TeacherConfig]
) -> Iterator[Violation]:
    """A server tells logprobs of the distribution as it is, at an address."""
    temperature = generation.sampling.temperature
    for name, teacher in teachers.items():
        if isinstance(teacher, ModelTeacherConfig):
            continue
        if not is_address(teacher.base_url):
            mend = "an address such as http://127.0.0.1:8000/v1 is wanted"
            yield Violation(f"teachers.{name}.base_url", teacher.base_url, mend)
        if algorithm.online and temperature != 1:
            mend = (
                f"the server of teachers.{name} tells logprobs at temperature 1: take 1, or a teacher `model`"
            )
            yield Violation("generation.sampling.temperature", temperature, mend)


def critic_settings_are_used(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """One lambda is looked at, and after the critic alone the policy learns too."""
    if not isinstance(algorithm, OnlineConfig):
        return
    advantage, critic = algorithm.advantage, algorithm.critic
    if isinstance(advantage, GaeConfig):
        adapts = advantage.length_adaptive_alpha is not None
        if adapts and advantage.lam != GaeConfig.model_fields["lam"].default:
            mend = "length_adaptive_alpha stands in for it: remove this, or set that to null"
            yield Violation("algorithm.advantage.lam", advantage.lam, mend)
    if critic is not None and critic.warmup_steps >= algorithm.num_steps:
        mend = f"the run has {algorithm.num_steps} steps, so the policy would never learn: take fewer"
        yield Violation("algorithm.critic.warmup_steps", critic.warmup_steps, mend)


def groups_have_devices(
    policy: PolicyConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Violation]:
    """What shares the policy's devices finds one for each of its processes; others leave nobody theirs."""
    for name, group in _sections(critic, reference, teachers, rewards):
        if group.devices == "own":
            for part in ("weights", "optimizer"):
                if getattr(group.offload, part):
                    mend = f"{name}.devices is `own`, so nobody waits for them: set it to false"
                    yield Violation(f"{name}.offload.{part}", True, mend)
            continue
        size, places = group.worker_config(policy).layout.world_size, policy.layout.world_size
        if size > places:
            mend = f"the policy has devices for {places} processes: take a smaller layout, or `own` devices"
            yield Violation(f"{name}.layout", f"{size} processes", mend)


def groups_are_as_sound_as_policies(
    policy: PolicyConfig,
    algorithm: AlgorithmConfig,
    cluster: ClusterConfig,
    critic: CriticConfig | None,
    reference: ReferenceConfig | None,
    teachers: dict[str, TeacherConfig],
    rewards: tuple[RewardConfig, ...],
) -> Iterator[Violation]:
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
                mend = problem.mend
                for part in own:
                    mend = mend.replace(f"policy.{part}", f"{name}.{part}")
                yield replace(problem, field=f"{name}.{field}", mend=mend)


def reward_models_are_asked_while_sampling(
    algorithm: AlgorithmConfig, rewards: tuple[RewardConfig, ...]
) -> Iterator[Violation]:
    """What scores on the policy's devices finds them free."""
    if not isinstance(algorithm, OnlineBase) or not algorithm.max_staleness:
        return
    for place, reward in enumerate(rewards):
        if isinstance(reward, LocalModelRewardConfig) and reward.devices == "policy":
            mend = (
                "with algorithm.max_staleness answers are scored while the policy trains there: set it to own"
            )
            yield Violation(f"rewards.{place}.devices", "policy", mend)


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
