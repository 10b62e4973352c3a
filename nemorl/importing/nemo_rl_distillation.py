"""NeMo-RL's keys of on-policy distillation: its loss, and the teacher on the policy's GPUs."""

from typing import Any

from .nemo_rl_devices import FSDP_SIZES, SIZES, keys_of, model_layout
from .nemo_rl_learning import GENERATION
from .nemo_rl_sections import distills
from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule

_TEACHER, _PATH = "teacher", "teachers.main"
_LOSSES = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
LIKENESSES: dict[str, object] = {
    "loss_fn.kl_type": tuple(_LOSSES),
    "loss_fn.mixed_kl_weight": 0.5,
    "loss_fn.zero_outside_topk": False,
    "distillation.topk_logits_k": 64,
    "distillation.num_prompts_per_step": 128,
    "distillation.num_generations_per_prompt": 1,
    "teacher.precision": ("bfloat16", "float32"),
}


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


RULES: tuple[Rule, ...] = (
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
