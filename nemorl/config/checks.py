"""Checks between sections of an experiment; those of one section are methods of its class.

The parameter `auxiliary` are the models that have a section, by its path; `sections` are all valid ones.
"""

from collections.abc import Mapping
from dataclasses import replace

from nemorl.errors import ABSENT, Problem, Problems

from .algorithm import AlgorithmConfig, OfflineBase, OnlineBase, OnlineConfig
from .algorithm.advantages import GdpoAdvantageConfig, TurnAdvantageConfig
from .auxiliary import (
    CriticConfig,
    EndpointTeacherConfig,
    ModelGroupConfig,
    ReferenceConfig,
    Teachers,
    auxiliary_models,
    default_teacher,
    teachers_by_key,
    used_models,
)
from .base import check, check_of_training, counted, did_you_mean, problems_in, run_checks, suggestion
from .data import DataConfig, PreferenceDataset, TaskRows, TasksDataset, TextsDataset
from .environment import (
    ByTaskEnvConfig,
    CalculatorEnvConfig,
    EnvConfig,
    Rewards,
    SingleTurnEnvConfig,
    environments_in,
)
from .experiment import derived_fields, field_value
from .facts import acted_on, datasets, group_name, metric_names, reward_names, server_urls
from .generation import ADAPTER_RANKS, GenerationConfig, is_loopback, server_host
from .policy import PolicyConfig
from .run import CheckpointingConfig, ClusterConfig, LoggerConfig

Auxiliary = dict[str, ModelGroupConfig]
Sections = Mapping[str, object]


def check_sections(sections: Sections, *, training: bool = True) -> list[Problem]:
    """All problems of these sections and between them; others of the experiment are not valid.

    Without `training` those are left out that only training has.
    """
    known = {**sections, "sections": sections}
    if {"critic", "reference", "teachers", "rewards"} <= sections.keys():
        known["auxiliary"] = auxiliary_models(sections)
    problems = [
        problem for name, section in sections.items() for problem in problems_in(section, name, sections)
    ]
    checks = [value for value in globals().values() if getattr(value, "is_check", False)]
    applied = [each for each in checks if training or not getattr(each, "is_of_training", False)]
    return [*problems, *run_checks(applied, known)]


# Batches, lengths and sampling: what must divide or fit into what.


@check
def data_parallel_divides(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Problems:
    """Every data-parallel rank has the same number of sequences of an optimizer step."""
    size = policy.layout.data_parallel_size
    if isinstance(algorithm, OfflineBase) and algorithm.batch_size % size:
        fix = f"policy.layout.data_parallel_size, {size}, must divide it; change one of the two"
        yield Problem("algorithm.batch_size", algorithm.batch_size, fix)
    if not isinstance(algorithm, OnlineConfig):  # selected samples are filled up
        return
    per_minibatch, rest = divmod(algorithm.trajectories_per_step, algorithm.num_minibatches)
    if per_minibatch % size and not rest:
        several = algorithm.num_minibatches > 1
        share = f", in {algorithm.num_minibatches} minibatches of {per_minibatch}" if several else ""
        step = f"a step has {algorithm.described_trajectories}{share}"
        fix = f"it must divide the trajectories of an optimizer step; {step}"
        yield Problem("policy.layout.data_parallel_size", size, fix)


@check
def interleaved_stages_have_work(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Problems:
    layout = policy.layout
    share = algorithm.units_per_update // layout.data_parallel_size
    units = "sequences" if algorithm.units_per_update == algorithm.sequences_per_update else "pairs"
    if layout.virtual_pipeline_parallel_size > 1 and share < layout.pipeline_parallel_size:
        have = f"an optimizer step has {share} {units} for the {layout.pipeline_parallel_size} stages"
        fix = f"interleaved stages need a micro-batch each, and {have}; set this to 1, or use larger batches"
        field = "policy.layout.virtual_pipeline_parallel_size"
        yield Problem(field, layout.virtual_pipeline_parallel_size, fix)


@check
def choices_of_experts_can_be_replayed(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Problems:
    if not policy.moe.update_replay:
        return
    field = "policy.moe.update_replay"
    if not (isinstance(algorithm, OnlineConfig) and algorithm.needs_old_logprobs):
        fix = "no pass for old logprobs chooses experts (docs/off_policy.md); remove this"
        yield Problem(field, True, fix)
    elif algorithm.updates_per_step == 1:
        fix = "the only update of a step has the weights of that pass; raise algorithm.num_minibatches"
        yield Problem(field, True, f"{fix}, or remove this")


@check
def turn_and_cache_fit_sequence(
    policy: PolicyConfig, generation: GenerationConfig, algorithm: AlgorithmConfig
) -> Problems:
    if not algorithm.generates:
        return
    longest = policy.max_sequence_length
    if generation.max_new_tokens >= longest:
        filled = f"max_new_tokens ({generation.max_new_tokens}) fills policy.max_sequence_length ({longest})"
        fix = f"{filled}, so no prompt fits; lower the first or raise the second"
        yield Problem("generation.max_new_tokens", generation.max_new_tokens, fix)
    tokens = getattr(generation, "max_kv_tokens", None)
    if tokens is not None and tokens < longest:
        limit = f"policy.max_sequence_length ({longest})"
        fix = f"the cache must hold a complete conversation; set it to at least {limit}"
        yield Problem("generation.max_kv_tokens", tokens, fix)


@check
def adapters_fit_the_engine(policy: PolicyConfig, generation: GenerationConfig) -> Problems:
    separate, largest = getattr(generation, "adapters", "merged") == "separate", ADAPTER_RANKS[-1]
    if policy.lora is not None and separate and policy.lora.rank > largest:
        fix = f"the engine takes at most {largest}; lower it, or set generation.adapters to merged"
        yield Problem("policy.lora.rank", policy.lora.rank, fix)


@check
def micro_batch_holds_pair(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Problems:
    if algorithm.sequences_per_update == algorithm.units_per_update:
        return
    longest = 2 * policy.max_sequence_length
    if policy.max_sequence_length <= policy.micro_batch_tokens < longest:
        fix = f"one pass must hold both answers of a pair; set it to twice max_sequence_length, {longest}"
        yield Problem("policy.micro_batch_tokens", policy.micro_batch_tokens, fix)


@check
def head_suits_algorithm(policy: PolicyConfig, algorithm: AlgorithmConfig) -> Problems:
    if policy.head != algorithm.head:
        reason = f"`{algorithm.name}` samples or imitates tokens (reward models have a scalar head)"
        if algorithm.head == "scalar":
            reason = "a reward model produces one number"
        yield Problem("policy.head", policy.head, f"{reason}; set it to {algorithm.head}")


_FILTERS = ("top_k", "top_p", "min_p")  # of `generation.sampling`


@check_of_training
def samples_can_be_learned_from(generation: GenerationConfig, algorithm: AlgorithmConfig) -> Problems:
    """They differ, and are of a distribution of which engine and trainer have the logprobs."""
    if algorithm.online and generation.sampling.temperature == 0:
        fix = "greedy samples of a task are all the same, with nothing to learn from; set it to more than 0"
        yield Problem("generation.sampling.temperature", 0.0, f"{fix} (for validation 0 is allowed)")
    elif algorithm.online and generation.sampling.top_k == 1:
        fix = "samples of a task are all the same, with nothing to learn from; set it to more than 1"
        yield Problem("generation.sampling.top_k", 1, f"{fix}, or remove it")

    sampling, elsewhere = generation.sampling, "remove it here (validation may have it)"
    if isinstance(algorithm, OnlineBase) and algorithm.compares_all_tokens:
        reason = f"the teacher's distribution has all tokens, and is compared with the policy's; {elsewhere}"
        yield from sampling.without_effect(_FILTERS, reason, "generation.sampling.")
    elif algorithm.trains_filtered and not generation.filters_logprobs:
        reason = "the server may return logprobs of all tokens, and the loss is of those that it samples from"
        yield from sampling.without_effect(_FILTERS, f"{reason}; {elsewhere}", "generation.sampling.")
    elif algorithm.trains_filtered and sampling.min_p and sampling.top_p < 1:
        fix = "engines differ in which of min_p and top_p is first, and the loss is of what is left"
        yield Problem("generation.sampling.min_p", sampling.min_p, f"{fix}; remove one of the two")


# Tasks, rewards and measuring: datasets that fit algorithm and environment, and metrics that exist.


@check
def chat_template_is_used(data: DataConfig, policy: PolicyConfig) -> Problems:
    if not data.chat:
        fix = "data.chat is false, so prompts are plain text; remove this, or set data.chat to true"
        if policy.tokenizer.chat_template is not None:
            yield Problem("policy.tokenizer.chat_template", str(policy.tokenizer.chat_template), fix)
        yield from policy.tokenizer.without_effect(("template_arguments",), fix, "policy.tokenizer.")


@check
def prompts_have_a_limit_that_counts(
    data: DataConfig, policy: PolicyConfig, algorithm: AlgorithmConfig, env: EnvConfig
) -> Problems:
    limit = data.max_prompt_tokens
    if limit is None:
        return
    if limit >= policy.max_sequence_length:
        fix = f"policy.max_sequence_length is {policy.max_sequence_length}, which longer prompts exceed"
        yield Problem("data.max_prompt_tokens", limit, f"{fix}; lower it, or remove it")
    elif not algorithm.generates:
        yield Problem("data.max_prompt_tokens", limit, "this run samples nothing; remove it")
    elif owners := [one.name for one in env.environments.values() if one.calls_model]:
        fix = f"episodes of `{owners[0]}` write their own prompts; remove it"
        yield Problem("data.max_prompt_tokens", limit, fix)


@check
def data_fits_the_algorithm(data: DataConfig, algorithm: AlgorithmConfig) -> Problems:
    if not isinstance(algorithm, OfflineBase):
        return
    kind, names = algorithm.learns_from
    for path, dataset in datasets(data):
        if dataset.name not in names:
            fix = f"`{algorithm.name}` learns from {kind}; use a dataset `{'`, `'.join(names)}`"
            yield Problem(f"{path}.name", dataset.name, fix)
    for path, dataset in data.trained_on:
        if isinstance(dataset, TaskRows) and dataset.answer_key is None and dataset.name in names:
            fix = f"`{algorithm.name}` learns the answers; set it to the key that holds them"
            yield Problem(f"{path}.answer_key", None, fix)
        if isinstance(dataset, TasksDataset) and dataset.stream is not None:
            fix = f"`{algorithm.name}` encodes all examples before the first step; remove it"
            yield Problem(f"{path}.stream", dataset.stream.model_dump(), fix)
    for name in ("curriculum", "pass_rate", "replay"):
        if (section := getattr(data.sampling, name)) is not None:
            fix = f"`{algorithm.name}` learns from data without sampling; remove the section"
            yield Problem(f"data.sampling.{name}", section.model_dump(), fix)
    scale = algorithm.margin_scale
    for path, dataset in datasets(data):
        key = dataset.margin_key if isinstance(dataset, PreferenceDataset) else None
        if scale and key is None:
            fix = f"{path} has no margins; set {path}.margin_key to their key, or remove this"
            yield Problem("algorithm.loss.margin_scale", scale, fix)
        elif algorithm.takes_margins and key is not None and not scale:
            fix = "the loss uses no margins; remove this, or set algorithm.loss.margin_scale"
            yield Problem(f"{path}.margin_key", key, fix)


@check
def environment_fits_the_tasks(env: EnvConfig, data: DataConfig, algorithm: AlgorithmConfig) -> Problems:
    if isinstance(env, ByTaskEnvConfig):
        return  # which tasks an environment gets is in their rows
    for path, dataset in acted_on(data, algorithm):
        if env.compares_answers and isinstance(dataset, TaskRows) and dataset.answer_key is None:
            fix = f"the environment `{env.name}` compares with the task's answer; set it to its key"
            yield Problem(f"{path}.answer_key", None, fix)
        if env.dataset is not None and dataset.name != env.dataset:
            fix = f"the environment `{env.name}` supports `{env.dataset}` datasets only; change one"
            yield Problem(f"{path}.name", dataset.name, fix)


@check
def texts_are_not_sampled(data: DataConfig, algorithm: AlgorithmConfig) -> Problems:
    for path, dataset in acted_on(data, algorithm) if algorithm.generates else ():
        if isinstance(dataset, TextsDataset):
            fix = "texts have no prompts that could be sampled; use `tasks`"
            other = "" if algorithm.online else ", or set algorithm.validation.generate to false"
            yield Problem(f"{path}.name", dataset.name, f"{fix}{other}")


@check
def environment_has_messages(env: EnvConfig, data: DataConfig) -> Problems:
    separate = [one.name for one in env.environments.values() if one.needs_chat]
    if separate and not data.chat:
        fix = f"the environment `{separate[0]}` answers in separate messages; set data.chat to true"
        yield Problem("data.chat", False, fix)


@check
def trajectories_are_sampled(logger: LoggerConfig, algorithm: AlgorithmConfig) -> Problems:
    if logger.trajectories not in ("none", "sampled", 0) and not algorithm.online:
        fix = f"algorithm.name is `{algorithm.name}`, which samples no trajectories; remove this"
        yield Problem("logger.trajectories", logger.trajectories, fix)


@check
def turns_can_be_compared(algorithm: AlgorithmConfig, env: EnvConfig) -> Problems:
    if not isinstance(algorithm, OnlineConfig) or not isinstance(algorithm.advantage, TurnAdvantageConfig):
        return
    for path, one in environments_in(env):
        if isinstance(one, CalculatorEnvConfig) and one.call_weight == 0:
            fix = (
                f"no turn before the last has a reward; set {path}.call_weight, or use the advantage `group`"
            )
            yield Problem("algorithm.advantage.name", "turn", fix)
    if all(one.has_one_turn for one in env.environments.values()):
        fix = f"conversations in `{env.name}` have one turn; use another env, or the advantage `group`"
        yield Problem("algorithm.advantage.name", "turn", fix)


@check
def branches_can_be_compared(algorithm: AlgorithmConfig, env: EnvConfig) -> Problems:
    compares = isinstance(algorithm, OnlineConfig) and algorithm.compares == "branches"
    if compares and all(one.has_one_turn for one in env.environments.values()):
        fix = f"conversations in `{env.name}` have one turn, so one branch; remove this, or use another env"
        yield Problem("algorithm.compares", "branches", fix)


@check
def something_is_rewarded(env: EnvConfig, rewards: Rewards, algorithm: AlgorithmConfig) -> Problems:
    """`single_turn` has no reward of its own; a teacher is enough if nothing is measured."""
    without_rewards = any(isinstance(one, SingleTurnEnvConfig) for one in env.environments.values())
    if not without_rewards or not algorithm.needs_rewards:
        return
    if rewards and not any(reward.weight for reward in rewards):
        fix = "all weights are 0, so every reward would be 0; set one of them to another value"
        yield Problem("rewards.0.weight", rewards[0].weight, fix)
    elif not rewards:
        add = "add a reward function, such as `[{function: exact_match}]`, or use another env"
        fix = f"the environment `single_turn` has no reward, so every reward would be 0; {add}"
        yield Problem("rewards", [], fix)


@check
def reward_names_differ(env: EnvConfig, rewards: Rewards) -> Problems:
    """A metric holds one reward; a function without a name has the one after the colon."""
    used = set(reward_names(env, ()))
    for index, reward in enumerate(rewards):
        name, field = reward.metric, f"rewards.{index}.{reward.field}"
        if name in ("mean", "std", "of_greedy"):
            fix = f"the metric reward/{name} is of all rewards together; set another `name`"
            yield Problem(field, getattr(reward, reward.field), fix)
        if name in used:
            fix = f"another reward has the name `{name}`; remove one, or set another `name`"
            yield Problem(field, getattr(reward, reward.field), fix)
        used.add(name)


@check
def rewards_of_the_algorithm_exist(algorithm: AlgorithmConfig, env: EnvConfig, rewards: Rewards) -> Problems:
    if not isinstance(algorithm, OnlineBase):
        return
    name, known = algorithm.filters.reward, sorted(reward_names(env, rewards))
    if isinstance(getattr(algorithm, "advantage", None), GdpoAdvantageConfig) and len(known) == 1:
        fix = f"it normalizes several rewards, and there is only `{known[0]}`; add one, or use `group`"
        yield Problem("algorithm.advantage.name", "gdpo", fix)
    if name is not None and name not in known:
        yield Problem("algorithm.filters.reward", name, f"unknown reward; {suggestion(name, known)}")


@check
def validation_has_tasks(data: DataConfig, algorithm: AlgorithmConfig) -> Problems:
    """A validation needs tasks, each once. Tasks without a validation are for `nemorl eval`."""
    sampled = bool(data.validation_sets) and algorithm.generates
    if algorithm.validation.scheduled and data.validation is None and not sampled:
        fix = "algorithm.validation needs tasks; set a dataset, or remove period, at_start and at_end"
        yield Problem("data.validation", ABSENT, fix)
    prompts = algorithm.validation.num_prompts
    size = getattr(data.validation, "size", None)  # the size of a file is not known here
    if prompts is not None and size is not None and prompts > size:
        fix = f"data.validation has {size} tasks; lower this, or raise data.validation.size"
        yield Problem("algorithm.validation.num_prompts", prompts, fix)
    if data.validation_sets and algorithm.validation.scheduled and not algorithm.generates:
        fix = f"`{algorithm.name}` samples nothing here; remove this, or set algorithm.validation.generate"
        yield Problem("data.validation_sets", sorted(data.validation_sets), fix)


@check
def flags_are_known(algorithm: AlgorithmConfig, env: EnvConfig) -> Problems:
    """Those whose turns have an advantage of their own."""
    known = sorted({name for _, one in environments_in(env) for name in one.turn_flags})
    given = algorithm.flagged_advantages if isinstance(algorithm, OnlineConfig) else {}
    for name, advantage in given.items():
        if name not in known:
            fix = f"no environment has this flag in its turn_flags; {suggestion(name, known)}"
            yield Problem(f"algorithm.flagged_advantages.{name}", advantage, fix)


@check
def named_metrics_are_measured(
    algorithm: AlgorithmConfig,
    env: EnvConfig,
    rewards: Rewards,
    data: DataConfig,
    teachers: Teachers,
    sections: Sections,
) -> Problems:
    """The metrics of the best checkpoint and of the early stop."""
    checkpointing, named = sections.get("checkpointing"), {}
    if isinstance(checkpointing, CheckpointingConfig) and checkpointing.enabled:
        named["checkpointing.metric"] = checkpointing.metric
    if algorithm.early_stop is not None:
        named["algorithm.early_stop.metric"] = algorithm.early_stop.metric
    known = sorted(metric_names(algorithm, env, rewards, data, teachers))
    for field, metric in named.items():
        if metric is None:
            continue
        if metric.startswith("validation/") and algorithm.validation.period is None:
            scheduled = algorithm.validation.model_copy(update={"period": 1})
            possible = algorithm.model_copy(update={"validation": scheduled})
            near = did_you_mean(metric, sorted(metric_names(possible, env, rewards, teachers=teachers)))
            near = "" if f"`{metric}`" in near else near
            fix = f"{near}only validation measures it; set algorithm.validation.period"
            yield Problem(field, metric, fix)
        elif metric not in known:
            yield Problem(field, metric, f"unknown metric of this run; {suggestion(metric, known)}")


# Processes and devices: auxiliary models, GPUs for all, labels of nodes, servers that workers reach.


@check
def gpus_for_all_processes(
    cluster: ClusterConfig,
    policy: PolicyConfig,
    generation: GenerationConfig,
    algorithm: AlgorithmConfig,
    auxiliary: Auxiliary,
) -> Problems:
    """With GPUs every process of a model has one, and every engine that does not share the policy's."""
    engines = 0
    if algorithm.generates and not generation.takes_turns:
        engines = generation.replicas * generation.ranks_per_replica
    models = used_models(algorithm, auxiliary).values()
    others = sum(model.worker_config(policy).layout.world_size for model in models if model.devices == "own")
    available = cluster.num_nodes * cluster.gpus_per_node
    if 0 < available < policy.layout.world_size + others + engines:
        have = f"{counted(available, 'GPU')} {'is' if available == 1 else 'are'} too few for"
        of_models = f", {others} of auxiliary models" if others else ""
        share = ", `devices: policy` for the others" if others else ""
        needed = f"{counted(policy.layout.world_size, 'policy process')}{of_models}"
        problem = f"{have} {needed} and {counted(engines, 'engine')}"
        fix = f"raise it, or use a smaller policy.layout{share} or fewer generation.replicas"
        yield Problem("cluster.gpus_per_node", cluster.gpus_per_node, f"{problem}; {fix}")


@check
def labels_name_groups(
    cluster: ClusterConfig, generation: GenerationConfig, algorithm: AlgorithmConfig, auxiliary: Auxiliary
) -> Problems:
    placed = {"policy": True, "rollout": True}  # each group, and if it has its own devices
    if generation.has_engines:
        placed["generation"] = not (generation.shares_devices and cluster.gpus_per_node)
    for path, model in used_models(algorithm, auxiliary).items():
        placed[group_name(path)] = model.devices == "own"
    for field, groups in (("labels", cluster.labels), ("topology", cluster.topology)):
        for group, value in groups.items():
            fix = f"this run has no such group of workers; use one of {', '.join(placed)}"
            if group in placed:
                fix = f"it shares the policy's devices; name the nodes in cluster.{field}.policy"
            if not placed.get(group, False):
                yield Problem(f"cluster.{field}.{group}", value, fix)


@check
def auxiliary_models_are_used(
    algorithm: AlgorithmConfig, critic: CriticConfig | None, reference: ReferenceConfig | None
) -> Problems:
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
def teachers_are_used(algorithm: AlgorithmConfig, teachers: Teachers) -> Problems:
    """Distillation has teachers, and if several, a column that names the teacher of each task."""
    key = getattr(algorithm, "teacher_key", None)
    if teachers and not algorithm.keeps_teachers:
        fix = f"`{algorithm.name}` has no teachers; remove this section, or use `on_policy_distillation`"
        yield Problem("teachers", sorted(teachers), fix)
    elif algorithm.keeps_teachers and not teachers:
        fix = f"`{algorithm.name}` learns from teachers; add one, such as {{main: {{model_path: FOLDER}}}}"
        yield Problem("teachers", {}, fix)
    elif len(teachers) > 1 and key is None and not algorithm.aligns_teachers:
        fix = f"there are {len(teachers)} teachers; set it to the column of the tasks that names the teacher"
        yield Problem("algorithm.teacher_key", None, fix)
    elif len(teachers) == 1 and key is not None:
        fix = "there is one teacher, of all tasks; remove this, or add teachers"
        yield Problem("algorithm.teacher_key", key, fix)
    names, default = teachers_by_key(teachers), default_teacher(teachers)
    for name, teacher in teachers.items():
        if key is None:
            reason = "no column names the teacher of a task; remove this, or set algorithm.teacher_key"
            if algorithm.aligns_teachers:
                reason = "all teachers teach all tasks; remove this"
            yield from teacher.without_effect(("key", "default"), reason, f"teachers.{name}.")
            continue
        if others := [one for one in teacher.keys(name) if names[one] != name]:
            fix = f"teachers.{names[others[0]]} has it too; give each teacher a value of its own"
            yield Problem(f"teachers.{name}.key", teacher.key, fix)
        if teacher.default and default != name:
            fix = f"teachers.{default} teaches all other tasks; remove one of the two"
            yield Problem(f"teachers.{name}.default", True, fix)


@check
def teachers_score_at_temperature_1(
    algorithm: AlgorithmConfig, generation: GenerationConfig, teachers: Teachers
) -> Problems:
    temperature = generation.sampling.temperature
    for name, teacher in teachers.items():
        if isinstance(teacher, EndpointTeacherConfig) and algorithm.online and temperature != 1:
            of_server = f"the server of teachers.{name} returns logprobs at temperature 1"
            fix = f"{of_server}; set it to 1, or use a teacher `model`"
            yield Problem("generation.sampling.temperature", temperature, fix)


@check
def auxiliary_layouts_divide(
    policy: PolicyConfig, algorithm: AlgorithmConfig, auxiliary: Auxiliary
) -> Problems:
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
def reward_models_run_while_sampling(algorithm: AlgorithmConfig, auxiliary: Auxiliary) -> Problems:
    """A model on the policy's devices scores while these are free."""
    for path, model in auxiliary.items():
        if algorithm.allows_staleness and path.startswith("rewards.") and model.devices == "policy":
            fix = "with algorithm.max_staleness answers are scored while the policy trains; set it to own"
            yield Problem(f"{path}.devices", "policy", fix)


@check
def groups_have_no_deadline_while_training(
    algorithm: AlgorithmConfig, generation: GenerationConfig
) -> Problems:
    """Their environments' clocks do not wait for engines that sleep."""
    seconds = getattr(algorithm, "group_seconds", None)
    if seconds is not None and algorithm.allows_staleness and generation.takes_turns:
        fix = "groups wait while the policy trains on the devices that sample, and this time would count"
        yield Problem("algorithm.group_seconds", seconds, f"{fix}; remove it, or set max_staleness to 0")


@check
def shared_devices_are_freed(sections: Sections) -> Problems:
    """Engines on the policy's GPUs need the memory of the models there, which they have unless it is set."""
    for field in derived_fields(sections):
        if not field_value(sections, field):
            fix = "generation.colocated is true, and engines need the memory that this occupies; remove it"
            yield Problem(field, False, fix)


@check
def servers_are_reached_from_all_nodes(
    cluster: ClusterConfig, generation: GenerationConfig, teachers: Teachers, rewards: Rewards
) -> Problems:
    """Workers send requests to them, and on another node a loopback address is another machine."""
    for field, url in server_urls(generation, rewards, teachers).items():
        if cluster.num_nodes > 1 and is_loopback(server_host(url)):
            fix = f"cluster.num_nodes is {cluster.num_nodes}, and on each node this address is that node"
            yield Problem(field, url, f"{fix}; use one by which all nodes reach the server")
