"""NeMo-RL's keys of distillation: losses, and teachers on the policy's GPUs.

A section `teacher` has the policy's tokens and scores samples. The models of a list `teachers` read texts,
with tokens of their own (x_token).
"""

from typing import Any

from nemorl.config.yaml import leaves

from .nemo_rl_devices import FSDP_SIZES, SIZES, keys_of, model_layout
from .nemo_rl_learning import GENERATION
from .nemo_rl_sections import TEACHERS, aligns, distills
from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule, not_imported

_TEACHER, _PATH = "teacher", "teachers.main"
_METRIC, _BY_SIZE = "loss_fn.sum_weights_metric", "loss_fn.normalize_teacher_by_vocab"
_LOSSES = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
LIKENESSES: dict[str, object] = {
    "loss_fn.kl_type": tuple(_LOSSES),
    "loss_fn.mixed_kl_weight": 0.5,
    "loss_fn.zero_outside_topk": False,
    "distillation.topk_logits_k": 64,
    "distillation.num_prompts_per_step": 128,
    "distillation.num_generations_per_prompt": 1,
    "teacher.precision": ("bfloat16", "float32"),
    **dict.fromkeys((f"loss_fn.{name}" for name in ("gold_loss", "xtoken_loss", "reverse_kl")), False),
    "loss_fn.dynamic_loss_scaling": False,
    _BY_SIZE: False,
    "loss_fn.alpha": 1.0,
    **dict.fromkeys((f"loss_fn.{name}" for name in ("kl_loss_weight", "ce_loss_scale", "temperature")), 1.0),
    **dict.fromkeys(("loss_fn.vocab_topk", "loss_fn.uncommon_topk"), 8192),
}
_OF_SAMPLES = (
    *("loss_fn.kl_type", "loss_fn.mixed_kl_weight", "loss_fn.zero_outside_topk"),
    *(
        f"distillation.{name}"
        for name in ("topk_logits_k", "num_generations_per_prompt", "max_rollout_turns", "max_val_samples")
    ),
)


def loss(x: Origin) -> Fields:
    """NeMo-RL's DistillationLossFn: the teacher's logits of the top are always scaled to sum to 1."""
    if not distills(x):
        return {}
    kind, weight = x.get("loss_fn.kl_type", "mixed"), x.get("loss_fn.mixed_kl_weight", 0.5)
    if kind == "mixed" and weight in (0, 1):
        kind = "forward" if weight == 1 else "reverse"
    section: dict[str, Any] = {"name": _LOSSES[kind], "tokens": x.get("distillation.topk_logits_k", 64)}
    if kind == "mixed":
        section["forward_weight"] = weight
    section["rest"] = "zero" if x.get("loss_fn.zero_outside_topk", False) else "leave_out"
    return {"algorithm.loss": section}


def teacher(x: Origin) -> Fields:
    """The teacher in processes on the policy's GPUs, which the two use in turn there, too."""
    if not distills(x):
        return {}
    if (folder := x.get(f"{_TEACHER}.model_name")) is None:
        raise CannotImport(f"{_TEACHER}.model_name: distillation has a teacher; name its model")
    fields = {f"{_PATH}.model_path": folder, f"{_PATH}.devices": "policy"}
    if (precision := x.get(f"{_TEACHER}.precision")) is not None:
        fields[f"{_PATH}.precision"] = precision
    own, policy = (x.get(f"{of}.temperature", 1.0) for of in (f"{_TEACHER}.generation", GENERATION))
    if own != policy:
        how = "the policy's temperature is that of both distributions"
        x.lost(f"{_TEACHER}.generation.temperature", how)
    return fields


def teacher_layout(x: Origin) -> Fields:
    return model_layout(x, _TEACHER) if distills(x) else {}


def aligned_loss(x: Origin) -> Fields:
    """NeMo-RL's CrossTokenizerDistillationLossFn: P-KL, the gold loss, or that with first pieces (H-KL)."""
    if not aligns(x):
        return {}
    for key in _OF_SAMPLES:
        if key in x.values:
            x.lost(key, "of distillation on samples", changes_result=False)
    gold, pieces = _mode(x)
    if gold and _averages(x):
        x.lost("loss_fn.gold_loss", "teachers of the mean have the policy's tokens", changes_result=False)
        gold = False
    section: dict[str, Any] = {"name": "common_kl" if gold else "projected_kl"}
    section |= {"tokens": x.get("loss_fn.vocab_topk", 8192), "temperature": x.get("loss_fn.temperature", 1.0)}
    section["reverse"] = x.get("loss_fn.reverse_kl", False)
    how = "tokens of the largest probabilities in each text; there of the largest logits in a micro-batch"
    if gold:
        how = "the teacher's tokens that are compared; there all are"
        section["common"] = "likeliest" if pieces else "exact"
        section["rest_tokens"] = x.get("loss_fn.uncommon_topk", 8192)
    x.changed("loss_fn.vocab_topk", how)
    fields: dict[str, Any] = {"algorithm.loss": section}
    if x.get("loss_fn.dynamic_loss_scaling", False):
        x.changed("loss_fn.dynamic_loss_scaling", "by text; there by micro-batch")
        return fields | {"algorithm.match_sft": True}
    return fields | {
        "algorithm.distillation_coefficient": x.get("loss_fn.kl_loss_weight", 1.0),
        "algorithm.sft_coefficient": x.get("loss_fn.ce_loss_scale", 1.0),
    }


def _mode(x: Origin) -> tuple[bool, bool]:
    """`gold_loss` and `xtoken_loss` of the teachers that have other tokens than the policy."""
    shared = x.get("loss_fn.gold_loss", False), x.get("loss_fn.xtoken_loss", False)
    given = _listed(x) if _kd_mode(x) == "sum" else []  # in others those of teachers do not count
    own = {_of_teacher(one, shared) for one in given if one.get("projection_matrix_path")}
    own |= {_of_teacher(one, shared) for one in given if one.get("gold_loss") is not None}
    modes = own or {shared}
    if len(modes) > 1:
        raise CannotImport(
            f"{TEACHERS}: they have several losses; give all the same gold_loss and xtoken_loss"
        )
    (mode,) = modes
    if mode[1] and not mode[0]:
        raise CannotImport("loss_fn.xtoken_loss = true: it is a variant of gold_loss; set that to true, too")
    return mode


def _listed(x: Origin) -> list[dict[str, Any]]:
    given = x.values[TEACHERS]
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise CannotImport(f"{TEACHERS} = {given}: expected a list of sections; correct the value")
    return given


def _of_teacher(one: dict[str, Any], shared: tuple[bool, bool]) -> tuple[bool, bool]:
    gold, pieces = one.get("gold_loss"), one.get("xtoken_loss")
    return shared[0] if gold is None else bool(gold), shared[1] if pieces is None else bool(pieces)


_MODES = ("sum", "averaged_logits", "select_teacher")
_SCORES = {"ce": "cross_entropy", "entropy": "entropy", "max_prob": "max_probability"}


def _kd_mode(x: Origin) -> str:
    """How the teachers are combined. Raises CannotImport for what NeMo-RL refuses, too."""
    mode = x.get("loss_fn.kd_loss_mode", "sum") or "sum"
    if mode not in _MODES:
        raise not_imported("loss_fn.kd_loss_mode", mode, "mode", _MODES)
    for key in (_METRIC, _BY_SIZE):
        if mode != "sum" and (value := x.get(key)):
            raise CannotImport(f"{key} = {value}: NeMo-RL has it with kd_loss_mode sum only; remove one")
    return str(mode)


def _has_constant_weights(x: Origin) -> bool:
    """True if weights of teachers count: a teacher alone is scaled to 1 in the other modes."""
    mode = _kd_mode(x)
    if mode == "sum":
        return not x.get(_METRIC)
    return mode == "averaged_logits" and len(_listed(x)) > 1


def _averages(x: Origin) -> bool:
    """True if logits have a mean: NeMo-RL adds divergences where some teacher has other tokens."""
    if _kd_mode(x) != "averaged_logits" or len(_listed(x)) == 1:
        return False
    return not any(one.get("projection_matrix_path") for one in _listed(x))


def combination(x: Origin) -> Fields:
    """How NeMo-RL adds, weighs, selects or averages several teachers."""
    if not aligns(x):
        return {}
    mode, metric, given = _kd_mode(x), x.get(_METRIC), _listed(x)
    by_size = bool(x.get(_BY_SIZE, False))
    if metric is not None and metric not in _SCORES:
        raise not_imported(_METRIC, metric, "score", _SCORES)
    if metric is None and "loss_fn.alpha" in x.values:
        x.lost("loss_fn.alpha", f"of {_METRIC}", changes_result=False)
    if len(given) == 1:
        return {}
    scaled = {"scale_by_vocabulary": True} if by_size else {}
    if mode == "select_teacher":
        x.changed("loss_fn.kd_loss_mode", "by text; there by micro-batch")
        return {"algorithm.combination": {"name": "select"}}
    if mode == "averaged_logits":
        if not _averages(x):
            how = "some teachers have other tokens, so divergences are added, as there"
            x.changed("loss_fn.kd_loss_mode", how, changes_result=False)
            return {}
        how = "over the tokens that all teachers compare; there over the complete vocabulary"
        x.changed("loss_fn.kd_loss_mode", how)
        return {"algorithm.combination": {"name": "average"}}
    if metric is not None:
        x.changed(_METRIC, "by text; there by micro-batch")
        section = {"name": "trust", "score": _SCORES[metric], "sharpness": x.get("loss_fn.alpha", 1.0)}
        return {"algorithm.combination": section | scaled}
    return {"algorithm.combination": {"name": "sum"} | scaled} if scaled else {}


def aligned_teachers(x: Origin) -> Fields:
    """Each teacher of the list, in processes on the policy's GPUs, which all use in turn there, too."""
    if not aligns(x):
        return {}
    given, fields, weighted = _listed(x), dict[str, Any](), _has_constant_weights(x)
    hows = ["projections are built from the tokenizers at the start of a run"]
    for number, one in enumerate(given):
        name = "main" if len(given) == 1 else f"teacher_{number}"
        if (folder := one.get("model_name")) is None:
            raise CannotImport(f"{TEACHERS}.{number}.model_name: a teacher is a model; name it")
        path = f"{TEACHERS}.{name}"
        fields |= {f"{path}.model_path": folder, f"{path}.devices": "policy"}
        if (precision := one.get("precision")) is not None:
            fields[f"{path}.precision"] = precision
        others = {key: value for key, value in x.values.items() if not key.startswith(f"{_TEACHER}.")}
        alone = Origin(others | {f"{_TEACHER}.{key}": value for key, value in leaves(one)}, x.options)
        layouts = model_layout(alone, _TEACHER)
        fields |= {key.replace(f"{_PATH}.", f"{path}.", 1): value for key, value in layouts.items()}
        if (weight := one.get("weight", 1.0)) != 1 and weighted:
            fields[f"algorithm.teacher_weights.{name}"] = weight
        tokenizer = (one.get("tokenizer") or {}).get("name", folder)
        if tokenizer != folder:
            hows.append(f"the tokenizer of {name} is that of its folder, and not {tokenizer}")
    x.changed(TEACHERS, "; ".join(hows))
    return fields


RULES: tuple[Rule, ...] = (
    Part(
        tuple(
            f"loss_fn.{name}"
            for name in (
                *("gold_loss", "xtoken_loss", "temperature", "vocab_topk", "uncommon_topk", "reverse_kl"),
                *("kl_loss_weight", "ce_loss_scale", "dynamic_loss_scaling"),
            )
        ),
        ("algorithm.loss", "algorithm.distillation_coefficient", "algorithm.sft_coefficient"),
        aligned_loss,
    ),
    Part((TEACHERS,), ("teachers", "algorithm.teacher_weights"), aligned_teachers),
    Part(
        ("loss_fn.kd_loss_mode", _METRIC, "loss_fn.alpha", _BY_SIZE),
        ("algorithm.combination", "algorithm.teacher_weights"),
        combination,
    ),
    Ignored(
        ("loss_fn.exact_token_match_only",),
        "chunks always have the same text under both tokenizers, and no others are compared",
    ),
    Ignored((_TEACHER,), "null: the list teachers has them"),
    Part(
        (
            *(f"loss_fn.{name}" for name in ("kl_type", "mixed_kl_weight", "zero_outside_topk")),
            "distillation.topk_logits_k",
        ),
        ("algorithm.loss",),
        loss,
    ),
    Part(
        (f"{_TEACHER}.model_name", f"{_TEACHER}.precision"),
        (f"{_PATH}.model_path", f"{_PATH}.precision"),
        teacher,
    ),
    Part(
        keys_of(_TEACHER, (*SIZES, *FSDP_SIZES)),
        (f"{_PATH}.layout",),
        teacher_layout,
    ),
    Ignored(
        ("distillation.val_batch_size",), "how many tasks of a validation are sampled at the same time there"
    ),
    Ignored(
        (f"{_TEACHER}.hf_config_overrides.router_aux_loss_coef",),
        "the weight of a loss of training, which a teacher does not do",
    ),
    Lost((f"{_TEACHER}.hf_config_overrides.*",), "edit the config.json of the teacher's folder", (None, {})),
    Lost((f"{_TEACHER}.quant_cfg",), "teachers are not quantized", (None,)),
    Ignored((f"{_TEACHER}.tokenizer.*",), "the teacher has the policy's tokens"),
    Ignored(
        (f"{_TEACHER}.*",),
        "of training and sampling, which a teacher does not do, or how it computes; its micro-batches are"
        " those of the policy",
    ),
)
