"""verl's section `distillation`: its losses, and teachers on GPUs of their own."""

from typing import Any

from .rules import CannotImport, Fields, Ignored, Origin, Part, Rule, not_imported
from .shared import layout
from .verl_learning import ACTOR, CORRECTION, ROLLOUT, distills, updates

_LOSS, _TEACHERS, _ONLY = "distillation.distillation_loss", "distillation.teacher_models", "teacher_model"
_SAMPLED = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_HIGHEST_K3 = 10.0  # at which verl clamps this estimate
_SIZES = {"tensor": "tensor_model", "pipeline": "pipeline_model"}
# verl's distillation.yaml at the commit of its other defaults.
DEFAULTS: dict[str, Any] = {
    "distillation.nnodes": 0,
    "distillation.n_gpus_per_node": 8,
    f"{_LOSS}.loss_mode": "k3",
    f"{_LOSS}.topk": 32,
    f"{_LOSS}.use_task_rewards": True,
    f"{_LOSS}.use_policy_gradient": False,
}
LIKENESSES: dict[str, object] = {
    **dict.fromkeys(("distillation.enabled", "distillation.enable"), False),
    f"{_LOSS}.loss_max_clamp": 10.0,
    f"{_LOSS}.log_prob_min_clamp": -10.0,
    **{
        f"{_TEACHERS}.{_ONLY}.inference.{name}_parallel_size": 1
        for name in (*_SIZES.values(), "data", "expert")
    },
}
_OF_POLICY_LOSS = (
    *("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff", "clip_ratio", "clip_ratio_low"),
    *("clip_ratio_high", "clip_ratio_c"),
)


def algorithm(x: Origin) -> Fields:
    """verl's distillation_loss without the loss of the rewards, which is off in all of its examples."""
    if not distills(x):
        x.skip("distillation", "distillation is off, so nothing uses it")
        return {}
    if x.get(f"{_LOSS}.use_task_rewards"):
        problem = "a loss of rewards and of a teacher together is not imported"
        raise CannotImport(f"{_LOSS}.use_task_rewards = true: {problem}; set it to false")
    aggregation = x.get(f"{ACTOR}.loss_agg_mode")
    if aggregation == "seq-mean-token-sum-norm":
        known = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
        raise not_imported(f"{ACTOR}.loss_agg_mode", aggregation, "aggregation of distillation", known)
    for key in (*(f"{ACTOR}.{name}" for name in _OF_POLICY_LOSS), "algorithm.adv_estimator"):
        if key in x.values:
            why = f"of the loss of rewards, which {_LOSS}.use_task_rewards leaves out"
            x.lost(key, why, changes_result=False)
    name = "algorithm.aggregation"
    return {"algorithm.name": "on_policy_distillation", "algorithm.loss": loss(x), name: aggregation}


def loss(x: Origin) -> dict[str, Any]:
    mode, by_gradient = str(x.get(f"{_LOSS}.loss_mode")), x.get(f"{_LOSS}.use_policy_gradient")
    highest, lowest = x.get(f"{_LOSS}.loss_max_clamp"), x.get(f"{_LOSS}.log_prob_min_clamp")
    if mode not in _SAMPLED and mode != "forward_kl_topk":
        raise not_imported(f"{_LOSS}.loss_mode", mode, "loss", (*_SAMPLED, "forward_kl_topk"))
    estimator = _SAMPLED.get(mode)
    if by_gradient != (estimator == "k1"):
        asked = "false" if by_gradient else "true"
        problem = "k1 is imported as a policy gradient, and other losses as losses"
        raise CannotImport(
            f"{_LOSS}.use_policy_gradient = {str(bool(by_gradient)).lower()}: {problem}; set it to {asked}"
        )
    if by_gradient:
        _without_ratio(x)
    section: dict[str, Any] = {} if highest is None else {"max_value": highest}
    if estimator is None:
        section |= {"name": "forward_kl", "tokens": x.get(f"{_LOSS}.topk"), "rest": "unscaled"}
        return section | ({} if lowest is None else {"min_logprob": lowest})
    for key in (f"{_LOSS}.log_prob_min_clamp", f"{_LOSS}.topk"):
        if key in x.values:
            x.lost(key, "of forward_kl_topk", changes_result=False)
    if estimator == "k1" and highest is None:
        x.changed(f"{_LOSS}.loss_max_clamp", "the factor of a token's gradient is clamped to 20")
    if estimator == "k3":
        section["max_value"] = _HIGHEST_K3 if highest is None else min(highest, _HIGHEST_K3)
    return section | {"name": "reverse_kl"} | ({} if estimator == "k1" else {"estimator": estimator})


def _without_ratio(x: Origin) -> None:
    """Remarks where the ratio of verl's clipped loss, which is 1 in the first update, has an effect."""
    if updates(x) > 1:
        how = "each update compares the current policy with the teacher, and has no clipped ratio"
        x.changed(f"{ACTOR}.ppo_mini_batch_size", how)
    for key in (f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"):
        if x.get(key) not in (None, "null"):
            x.lost(key, "distillation does not correct for the engine's logprobs")


def teachers(x: Origin) -> Fields:
    if not distills(x):
        return {}
    sections = x.below(_TEACHERS)
    if len(sections) > 1:
        sections.pop(_ONLY, None)
    if not sections:
        raise CannotImport(f"{_TEACHERS}: there is no teacher; name its model_path")
    fields: dict[str, Any] = {}
    for name, given in sections.items():
        if (folder := given.get("model_path")) is None:
            raise CannotImport(f"{_TEACHERS}.{name}.model_path: name the model of the teacher")
        inference, path = given.get("inference", {}), f"teachers.{name}"
        sizes = {ours: _size(inference, f"{theirs}_parallel_size") for ours, theirs in _SIZES.items()}
        pool = x.get("distillation.nnodes") * x.get("distillation.n_gpus_per_node")
        if name != _ONLY:
            copies = int(given.get("num_replicas") or 0) * _size(inference, "data_parallel_size")
            pool = copies * sizes["tensor"] * sizes["pipeline"]
        if (experts := _size(inference, "expert_parallel_size")) > 1:
            sizes |= {"expert": experts, "expert_tensor": 1}
        fields |= {f"{path}.model_path": str(folder), f"{path}.devices": "own"}
        fields |= layout(pool, sizes, f"{_TEACHERS}.{name}", f"{path}.layout")
        if len(sections) > 1 and given.get("key") is not None:
            fields[f"{path}.key"] = given["key"]
    if len(sections) > 1:
        fields["algorithm.teacher_key"] = x.get("distillation.teacher_key")
    _remark(x)
    return fields


def _size(inference: dict[str, Any], name: str) -> int:
    """verl's default of a size is 1, but of tensor parallelism 2."""
    return int(inference.get(name) or (2 if name.startswith("tensor") else 1))


def _remark(x: Origin) -> None:
    """On keys of teachers of which nothing is taken, and on the temperature."""
    taken = ("model_path", "key", "num_replicas", "_parallel_size")
    for key in x.values:
        if key.startswith(f"{_TEACHERS}.") and not key.endswith(taken):
            x.lost(key, "teachers run in processes like the policy's, not in engines", changes_result=False)
    if float(x.get(f"{ROLLOUT}.temperature")) != 1:
        how = "the teacher has the temperature of sampling, too; there it is 1"
        x.changed(f"{ROLLOUT}.temperature", how)


def cluster(x: Origin) -> Fields:
    """The nodes of the policy, and those of the teachers."""
    nodes, gpus = x.get("trainer.nnodes"), x.get("trainer.n_gpus_per_node")
    if distills(x) and (further := x.get("distillation.nnodes")):
        nodes, gpus = nodes + further, max(gpus, x.get("distillation.n_gpus_per_node"))
    return {"cluster.num_nodes": nodes, "cluster.gpus_per_node": gpus}


_OTHER_ROUNDING = "teachers run in processes like the policy's, not in engines: other rounding"
RULES: tuple[Rule, ...] = (
    Part(
        (
            *("distillation.enabled", "distillation.enable", f"{ACTOR}.loss_agg_mode"),
            *(f"{_LOSS}.{name}" for name in ("loss_mode", "topk", "use_task_rewards", "loss_max_clamp")),
            *(f"{_LOSS}.{name}" for name in ("log_prob_min_clamp", "use_policy_gradient")),
        ),
        ("algorithm.name", "algorithm.loss", "algorithm.aggregation"),
        algorithm,
    ),
    Part(
        (
            *(f"{_TEACHERS}.{_ONLY}.inference.{name}_parallel_size" for name in _SIZES.values()),
            *(f"{_TEACHERS}.{_ONLY}.inference.expert_parallel_size", f"{_TEACHERS}.*"),
            "distillation.teacher_key",
        ),
        ("teachers", "algorithm.teacher_key"),
        teachers,
        _OTHER_ROUNDING,
    ),
    Ignored(
        (f"{_LOSS}.distillation_loss_coef", f"{_LOSS}.policy_loss_mode"),
        "of the loss of rewards, and one value alone is allowed",
    ),
    Ignored(
        tuple(f"{_LOSS}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")),
        "the ratio is 1 in the first update of a step, which is remarked on where there are others",
    ),
)
