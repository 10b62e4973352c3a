"""NeMo-RL's MOPD (arXiv 2601.02780): `adv_estimator.name: opd`, with teachers of NeMo-Gym's agents.

Its advantage of a token is the teacher's logprob less the policy's, in a policy gradient without a ratio:
the gradient of `reverse_kl` of the sampled token.
"""

from typing import Any

from .nemo_rl_gym import AGENT
from .nemo_rl_learning import batches
from .nemo_rl_sections import MEGATRON, has_agents_teachers
from .rules import CannotImport, Fields, Ignored, Origin, Part, Rule
from .shared import UNBOUNDED, layout

_SECTION = "on_policy_distillation"
_MODELS, _APART = f"{_SECTION}.teacher_model_by_agent_name", f"{_SECTION}.non_colocated_teachers"
_DEFAULT = f"{_APART}.default_teacher_cfg"
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
_OF_POLICY = {"expert_tensor": "expert_tensor_parallel_size", "sequence": "sequence_parallel"}
_TAKEN = (*_SIZES.values(), *_OF_POLICY.values(), "num_nodes", "gpus_per_node")
_OVERRIDES = "megatron_cfg_overrides"
LIKENESSES: dict[str, object] = {
    **dict.fromkeys((f"{_SECTION}.enabled", f"{_APART}.enabled"), True),
    f"{_SECTION}.strict_agent_name_match": False,
    f"{_SECTION}.deduplicate_shared_teacher_checkpoints": True,
    **{f"{_DEFAULT}.{name}": 1 for name in (*_SIZES.values(), "num_nodes", "gpus_per_node")},
    **{
        f"{section}.{name}": likeness
        for section in (_DEFAULT, f"{_DEFAULT}.{_OVERRIDES}")
        for name, likeness in (("expert_tensor_parallel_size", 1), ("sequence_parallel", False))
    },
}
_CLIP = ("grpo.advantage_clip_low", "grpo.advantage_clip_high")
_OF_RATIO = tuple(
    f"loss_fn.{name}"
    for name in ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "disable_ppo_ratio", "use_cispo")
)
_OF_REFERENCE = (
    *("loss_fn.reference_policy_kl_type", "loss_fn.kl_input_clamp_value", "loss_fn.kl_output_clamp_value"),
    *("loss_fn.use_on_policy_kl_approximation", "loss_fn.use_kl_in_reward"),
    "grpo.skip_reference_policy_logprobs_calculation",
)
_OF_REWARDS = (
    *(f"grpo.adv_estimator.{name}" for name in ("normalize_rewards", "use_leave_one_out_baseline")),
    *("grpo.adv_estimator.minus_baseline", "grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"),
)


def loss(x: Origin) -> Fields:
    if not has_agents_teachers(x):
        return {}
    _remark(x)
    by_token = x.get("loss_fn.token_level_loss", True)
    return {
        "algorithm.loss": {"name": "reverse_kl", "max_value": _bound(x)},
        "algorithm.aggregation": "token-mean" if by_token else "seq-mean-token-mean",
    }


def _bound(x: Origin) -> float:
    """Of the divergence of a token, whose negative is the advantage; without a clip there is none."""
    low, high = (x.get(key) for key in _CLIP)
    if low is None and high is None:
        return UNBOUNDED
    bound = UNBOUNDED if low is None or high is None else max(abs(float(low)), abs(float(high)))
    if low is None or high is None or -low != high:
        for key in _CLIP:
            x.changed(key, f"the divergence of a token is clamped to ±{bound:g}")
    return bound


def _remark(x: Origin) -> None:
    """On keys of a loss of rewards, and on what several updates of a step change."""
    forced = x.get("loss_fn.force_on_policy_ratio", False)
    has_ratio = not (forced or x.get("loss_fn.disable_ppo_ratio", False) or x.get("loss_fn.use_cispo", False))
    by_sequence = "loss_fn.sequence_level_importance_ratios"
    if has_ratio and x.get(by_sequence, False):
        problem = "the tokens of a sequence would share the teacher's logprobs"
        raise CannotImport(f"{by_sequence} = true: {problem}; set it to false")
    if batches(x)["algorithm.num_minibatches"] > 1:
        how = "each update compares the current policy with the teacher; there the one before the step"
        x.changed("policy.train_global_batch_size", f"{how}, with the ratio of the loss")
    for key in (*_OF_RATIO, by_sequence, "loss_fn.force_on_policy_ratio"):
        if key in x.values and (key != by_sequence or not x.values[key]):
            x.lost(key, "of the ratio, which is 1 in the first update of a step", changes_result=False)
    penalty, skipped = "loss_fn.reference_policy_kl_penalty", _OF_REFERENCE[-1]
    has_penalty = bool(x.get(penalty, 0.01)) and not x.get(skipped, False)
    x.lost(penalty, "distillation keeps no reference besides its teachers", changes_result=has_penalty)
    for key in (*_OF_REFERENCE, *_OF_REWARDS):
        if key in x.values:
            why = "of rewards" if key in _OF_REWARDS else f"of {penalty}"
            x.lost(key, why, changes_result=False)
    weight = "loss_fn.positive_example_nll_weight"
    x.lost(weight, "rewards are only shown", changes_result=bool(x.get(weight, 0.0)))


def teachers(x: Origin) -> Fields:
    """A teacher for each model, with the agents whose samples it scores; one alone scores all."""
    if not has_agents_teachers(x):
        x.skip(_SECTION, "grpo.adv_estimator.name is not opd, so nothing uses it")
        return {}
    found, of_models = x.below(_MODELS), _agents_of_models(x)
    strict, default = f"{_SECTION}.strict_agent_name_match", f"{_SECTION}.default_teacher_alias"
    _remark_on_teachers(x)
    if len(of_models) == 1:
        (only,) = of_models
        x.lost(default, "the one teacher scores all samples", changes_result=False)
        x.lost(strict, "the one teacher scores all samples, of other agents too", changes_result=False)
        return _teacher(x, only, "main", str(found[only]))
    fields: dict[str, Any] = {"algorithm.teacher_key": AGENT}
    for name, agents in of_models.items():
        fields |= _teacher(x, name, name, str(found[name]))
        if agents != [name]:
            fields[f"teachers.{name}.key"] = agents
    if not x.get(strict, False) and (alias := x.get(default)) is not None:
        others = next((name for name, agents in of_models.items() if alias in agents), None)
        if others is None:
            problem = f"no agent of {_MODELS} has this name; expected one of {', '.join(found)}"
            raise CannotImport(f"{default} = {alias}: {problem}")
        fields[f"teachers.{others}.default"] = True
    return fields


def _agents_of_models(x: Origin) -> dict[str, list[str]]:
    """The agents of each teacher, by the first of them, which has the teacher's name in NeMo-RL."""
    for key in (f"{_SECTION}.enabled", f"{_APART}.enabled"):
        if not x.get(key, False):
            raise CannotImport(f"{key} = false: the estimator opd requires teachers; set it to true")
    models = x.below(_MODELS)
    if not models:
        raise CannotImport(f"{_MODELS}: there is no teacher; name the model of at least one agent")
    shared = x.get(f"{_SECTION}.deduplicate_shared_teacher_checkpoints", True)
    agents: dict[str, list[str]] = {}
    firsts: dict[str, str] = {}
    for name, model in models.items():
        first = firsts.setdefault(str(model), name) if shared else name
        agents.setdefault(first, []).append(name)
    return agents


def _settings(x: Origin, name: str) -> dict[str, Any]:
    """What a teacher has: the defaults, its own, and settings of Megatron, of which both may have some."""
    given: dict[str, Any] = x.below(_DEFAULT) | x.below(f"{_APART}.teacher_overrides").get(name, {})
    return {**given, **given.get(_OVERRIDES, {})}


def _nodes(settings: dict[str, Any]) -> int:
    return int(settings.get("num_nodes", 1))


def teacher_nodes(x: Origin) -> int:
    """Nodes of the teachers of agents, which neither the policy nor generation has."""
    if not has_agents_teachers(x):
        return 0
    return sum(_nodes(_settings(x, name)) for name in _agents_of_models(x))


def _teacher(x: Origin, name: str, ours: str, model: str) -> Fields:
    settings, path = _settings(x, name), f"teachers.{ours}"
    sizes = {axis: int(settings.get(key, 1)) for axis, key in _SIZES.items()}
    of_policy = {
        axis: settings.get(key, x.get(f"{MEGATRON}.{key}", 1 if axis == "expert_tensor" else False))
        for axis, key in _OF_POLICY.items()
    }
    sizes["expert_tensor"] = int(of_policy["expert_tensor"])
    gpus = _nodes(settings) * int(settings.get("gpus_per_node", 8))
    fields: dict[str, Any] = {f"{path}.model_path": model, f"{path}.devices": "own"}
    fields |= layout(gpus, sizes, f"{_APART} of {name}", f"{path}.layout")
    if of_policy["sequence"] and sizes["tensor"] > 1:
        fields[f"{path}.layout.sequence_parallel"] = True
    return fields


def _remark_on_teachers(x: Origin) -> None:
    """On settings of single teachers of which nothing is taken."""
    for key in x.values:
        if key.startswith(f"{_APART}.teacher_overrides.") and not key.endswith(_TAKEN):
            x.lost(key, _HOW, changes_result=False)


_HOW = "how a teacher computes; its precision is the policy's, in NeMo-RL, too"
RULES: tuple[Rule, ...] = (
    Part(
        ("loss_fn.token_level_loss", *_CLIP),
        ("algorithm.loss", "algorithm.aggregation"),
        loss,
    ),
    Part(
        (
            *(f"{_MODELS}.*", f"{_SECTION}.default_teacher_alias", f"{_SECTION}.strict_agent_name_match"),
            f"{_SECTION}.deduplicate_shared_teacher_checkpoints",
            *(f"{_DEFAULT}.{name}" for name in _TAKEN),
            *(f"{_DEFAULT}.{_OVERRIDES}.{name}" for name in _OF_POLICY.values()),
            f"{_APART}.teacher_overrides.*",
        ),
        ("teachers", "algorithm.teacher_key"),
        teachers,
    ),
    Ignored((_SECTION, _APART), "off"),
    Ignored((f"{_SECTION}.enabled", f"{_APART}.enabled"), "the estimator opd requires it"),
    Ignored((f"{_DEFAULT}.*",), _HOW),
    Ignored(("_teachers.*",), "models by names, to which values of teacher_model_by_agent_name refer"),
    Ignored(
        (f"{_SECTION}.use_orm_advantage", f"{_SECTION}.orm_advantage_weight"), "NeMo-RL does not read it"
    ),
)
