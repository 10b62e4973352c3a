"""Tasks, rewards and measuring: datasets that fit algorithm and environment, and metrics that exist."""

import difflib
from collections.abc import Iterator

from nemorl.config.algorithm import AlgorithmConfig, OfflineBase, OnlineBase, OnlineConfig
from nemorl.config.algorithm.advantages import GdpoAdvantageConfig, TurnAdvantageConfig
from nemorl.config.base import check
from nemorl.config.data import DataConfig, JsonlDataset, PreferenceDataset
from nemorl.config.environment import CalculatorEnvConfig, EnvConfig, RewardConfig, SingleTurnEnvConfig
from nemorl.config.facts import acted_on, datasets, metric_names, reward_names
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import CheckpointingConfig
from nemorl.errors import ABSENT, Problem

_OF_ALL_REWARDS = ("mean", "std", "of_greedy")


@check
def chat_template_is_used(data: DataConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Plain text has no messages and no template."""
    if not data.chat and policy.tokenizer.chat_template is not None:
        fix = "data.chat is false, so prompts are plain text; remove this, or set data.chat to true"
        yield Problem("policy.tokenizer.chat_template", str(policy.tokenizer.chat_template), fix)


@check
def data_fits_the_algorithm(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Pairs, judged answers, judged steps and answers come from datasets that have them."""
    if not isinstance(algorithm, OfflineBase):
        return
    kind, names = algorithm.learns_from
    for path, dataset in datasets(data):
        if dataset.name not in names:
            fix = f"`{algorithm.name}` learns from {kind}; use a dataset `{'`, `'.join(names)}`"
            yield Problem(f"{path}.name", dataset.name, fix)
    if isinstance(data.train, JsonlDataset) and data.train.answer_key is None and "jsonl" in names:
        fix = f"`{algorithm.name}` learns the answers; set it to the key that holds them"
        yield Problem("data.train.answer_key", None, fix)


@check
def margins_are_used(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Margins of pairs need a loss that uses them, and the other way round."""
    if not isinstance(algorithm, OfflineBase):
        return
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
def environment_fits_the_tasks(
    env: EnvConfig, data: DataConfig, algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """Some environments need the task's answer, or tasks of one kind of dataset."""
    for path, dataset in acted_on(data, algorithm):
        if env.needs_answer and isinstance(dataset, JsonlDataset) and dataset.answer_key is None:
            fix = f"the environment `{env.name}` compares with the task's answer; set it to its key"
            yield Problem(f"{path}.answer_key", None, fix)
        if env.dataset is not None and dataset.name != env.dataset:
            fix = f"the environment `{env.name}` supports `{env.dataset}` datasets only; change one"
            yield Problem(f"{path}.name", dataset.name, fix)


@check
def environment_has_messages(env: EnvConfig, data: DataConfig) -> Iterator[Problem]:
    """Messages of a tool cannot be separated from the policy's in plain text."""
    if env.needs_chat and not data.chat:
        fix = f"the environment `{env.name}` answers in separate messages; set data.chat to true"
        yield Problem("data.chat", False, fix)


@check
def turns_can_be_compared(algorithm: AlgorithmConfig, env: EnvConfig) -> Iterator[Problem]:
    """Advantages of turns are for conversations with several."""
    if not isinstance(algorithm, OnlineConfig) or not isinstance(algorithm.advantage, TurnAdvantageConfig):
        return
    if isinstance(env, CalculatorEnvConfig) and env.call_weight == 0:
        fix = "no turn before the last has a reward; set env.call_weight, or use the advantage `group`"
        yield Problem("algorithm.advantage.name", "turn", fix)
    if env.has_one_turn:
        fix = f"conversations in `{env.name}` have one turn; use another env, or the advantage `group`"
        yield Problem("algorithm.advantage.name", "turn", fix)


@check
def something_is_rewarded(
    env: EnvConfig, rewards: tuple[RewardConfig, ...], algorithm: AlgorithmConfig
) -> Iterator[Problem]:
    """`single_turn` has no reward of its own; a teacher is enough if nothing is measured."""
    if not isinstance(env, SingleTurnEnvConfig) or not algorithm.needs_rewards:
        return
    if rewards and not any(reward.weight for reward in rewards):
        fix = "all weights are 0, so every reward would be 0; set one of them to another value"
        yield Problem("rewards.0.weight", rewards[0].weight, fix)
    elif not rewards:
        fix = (
            "the environment `single_turn` has no reward, so every reward would be 0; add a reward function, "
            "such as `[{function: exact_match}]`, or use another env"
        )
        yield Problem("rewards", [], fix)


@check
def reward_names_differ(env: EnvConfig, rewards: tuple[RewardConfig, ...]) -> Iterator[Problem]:
    """A metric holds one reward; a function without a name has the one after the colon."""
    used = set(reward_names(env, ()))
    for index, reward in enumerate(rewards):
        name, field = reward.metric, f"rewards.{index}.{reward.field}"
        if name in _OF_ALL_REWARDS:
            fix = f"the metric reward/{name} is of all rewards together; set another `name`"
            yield Problem(field, getattr(reward, reward.field), fix)
        if name in used:
            fix = f"another reward has the name `{name}`; remove one, or set another `name`"
            yield Problem(field, getattr(reward, reward.field), fix)
        used.add(name)


@check
def several_rewards_to_normalize(
    algorithm: AlgorithmConfig, env: EnvConfig, rewards: tuple[RewardConfig, ...]
) -> Iterator[Problem]:
    """GDPO is for several rewards."""
    if isinstance(algorithm, OnlineConfig) and isinstance(algorithm.advantage, GdpoAdvantageConfig):
        names = reward_names(env, rewards)
        if len(names) == 1:
            fix = f"it normalizes several rewards, and there is only `{names[0]}`; add one, or use `group`"
            yield Problem("algorithm.advantage.name", "gdpo", fix)


@check
def filtered_reward_exists(
    algorithm: AlgorithmConfig, env: EnvConfig, rewards: tuple[RewardConfig, ...]
) -> Iterator[Problem]:
    """The reward by which groups are dropped is one of the run."""
    if not isinstance(algorithm, OnlineBase) or algorithm.filters.reward is None:
        return
    name, known = algorithm.filters.reward, sorted(reward_names(env, rewards))
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known) or 'no rewards'}"
        yield Problem("algorithm.filters.reward", name, f"unknown reward; {fix}")


@check
def validation_has_tasks(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[Problem]:
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
def best_checkpoint_is_measured(
    checkpointing: CheckpointingConfig,
    algorithm: AlgorithmConfig,
    env: EnvConfig,
    rewards: tuple[RewardConfig, ...],
    data: DataConfig,
) -> Iterator[Problem]:
    """The best checkpoint has the best value of a metric that the run produces."""
    if checkpointing.metric is not None and checkpointing.enabled:
        known = metric_names(algorithm, env, rewards, data)
        yield from _is_measured("checkpointing.metric", checkpointing.metric, algorithm, known)


@check
def early_stop_is_measured(
    algorithm: AlgorithmConfig, env: EnvConfig, rewards: tuple[RewardConfig, ...], data: DataConfig
) -> Iterator[Problem]:
    """A run ends early by a metric that it produces."""
    if algorithm.early_stop is not None:
        known = metric_names(algorithm, env, rewards, data)
        yield from _is_measured("algorithm.early_stop.metric", algorithm.early_stop.metric, algorithm, known)


def _is_measured(
    field: str, metric: str, algorithm: AlgorithmConfig, known: frozenset[str]
) -> Iterator[Problem]:
    if metric.startswith("validation/") and algorithm.validation.period is None:
        fix = "only validation measures it; set algorithm.validation.period"
        yield Problem(field, metric, fix)
    elif metric not in known:
        close = difflib.get_close_matches(metric, known, n=1)
        fix = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(sorted(known))}"
        yield Problem(field, metric, f"unknown metric of this run; {fix}")
