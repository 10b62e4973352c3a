"""TRL's trainers that learn from data: SFTConfig, DPOConfig, RewardConfig and KTOConfig."""

from typing import Any

from . import trl_common as common
from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule, not_imported, take_given

# TRL's defaults of what the rules read (version 1.16).
_DEFAULTS: dict[str, Any] = {**common.DEFAULTS, "max_length": 1024, "train_sampling_strategy": "random"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {
        **_DEFAULTS,
        "learning_rate": 2e-5,
        "loss_type": "nll",
        "assistant_only_loss": False,
        "shuffle_dataset": False,
    },
    "dpo": {
        **_DEFAULTS,
        "learning_rate": 1e-6,
        "loss_type": "sigmoid",
        "beta": 0.1,
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "use_weighting": False,
        "precompute_ref_log_probs": False,
    },
    "reward": {**_DEFAULTS, "learning_rate": 1e-4},
    "kto": {
        **_DEFAULTS,
        "learning_rate": 1e-6,
        "train_sampling_strategy": "sequential",
        "loss_type": "kto",
        "beta": 0.1,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
        "precompute_ref_log_probs": False,
    },
}
LIKENESSES: dict[str, object] = {
    **common.LIKENESSES,
    "max_length": 1024,
    "max_seq_length": 1024,
    "ld_alpha": 0.5,
    "center_rewards_coefficient": 0.01,
    "completion_only_loss": True,
    "eval_on_start": False,
    "truncation_mode": ("keep_start", "keep_end"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
}
_ALGORITHMS = {"sft": "sft", "dpo": "dpo", "reward": "reward_model", "kto": "kto"}
_PAIRED = "dpo", "reward"
# DPO's losses by TRL's names.
_LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"name": "logistic"},
    "sigmoid_norm": {"name": "logistic", "logprobs": "mean"},
    "ipo": {"name": "squared", "logprobs": "mean"},
    "hinge": {"name": "hinge"},
    "robust": {"name": "robust"},
    "apo_zero": {"name": "anchored", "anchor": "zero"},
    "apo_down": {"name": "anchored", "anchor": "down"},
}
_COLUMNS = "TRL looks at the columns of the data"


def _steps(x: Origin) -> int:
    if (given := x.get("max_steps")) > 0:
        return int(given)
    return max(int(_per_epoch(x, "num_train_epochs") * x.get("num_train_epochs")), 1)


def _per_epoch(x: Origin, key: str) -> int:
    """Steps of an epoch. Raises CannotImport if the rows of the data are not known."""
    if x.options.rows is None:
        value = x.get(key)
        raise CannotImport(f"{key} = {value}: the number of rows of its data is not known; give --rows N")
    return x.options.rows // common.per_update(x)


def _period(x: Origin, strategy: str, key: str) -> int:
    """Steps between checkpoints or validations."""
    if x.get(strategy) == "epoch":
        return max(_per_epoch(x, strategy), 1)
    return common.interval(x.get(key, x.get("logging_steps", 10.0)), _steps(x))


def _algorithm(kind: str, x: Origin) -> Fields:
    head = {"policy.head": "scalar"} if kind == "reward" else {}
    fields = {"algorithm.name": _ALGORITHMS[kind], "algorithm.batch_size": common.per_update(x)}
    return {**fields, "algorithm.num_steps": _steps(x), **head}


def _lengths(kind: str, x: Origin) -> Fields:
    longest = x.get("max_seq_length", x.get("max_length"))
    if longest is None:
        return {}
    sequences = x.get("per_device_train_batch_size") * (2 if kind in _PAIRED else 1)
    return {"policy.max_sequence_length": longest, "policy.micro_batch_tokens": longest * sequences}


def _shuffle(kind: str, x: Origin) -> Fields:
    order = x.get("train_sampling_strategy")
    if order == "group_by_length":
        x.changed("train_sampling_strategy", "in a random order; micro-batches are packed by length")
    shuffled = order != "sequential" or (kind == "sft" and x.get("shuffle_dataset"))
    return {"data.shuffle": shuffled}


def _columns(kind: str, x: Origin) -> dict[str, Any]:
    """The name of the dataset of ours, and its columns."""
    if kind in _PAIRED:
        x.note("prompt", f"{_COLUMNS}: null if both answers repeat the prompt")
        return {"name": "preference", "prompt_key": "prompt"}
    if kind == "kto":
        return {"name": "feedback"}
    if x.get("completion_only_loss", False):
        return {"name": "tasks", "prompt_key": "prompt", "answer_key": "completion"}
    if not x.get("assistant_only_loss"):
        x.note("messages", f"{_COLUMNS}: of prompts with completions it trains on the completions")
    return {"name": "conversations", "messages_key": "messages"}


def _data(kind: str, x: Origin) -> Fields:
    columns = _columns(kind, x)
    fields: dict[str, Any] = {"data.train": common.train_data(x, columns)}
    if columns["name"] == "tasks":
        how = "prompts are texts without a chat template; set data.chat for messages"
        x.changed("completion_only_loss", how)
        fields["data.chat"] = False
    if not _validates(x):
        return fields
    if x.get("dataset_name") is None or x.get("datasets"):
        x.note("data/validation.jsonl", "write the rows of validation here")
        return {**fields, "data.validation": {**columns, "path": "data/validation.jsonl"}}
    split = x.get("dataset_test_split", "test")
    return {**fields, "data.validation": common.hub_data(x, split, columns)}


def _validates(x: Origin) -> bool:
    return str(x.get("eval_strategy")) != "no"


def _validation(kind: str, x: Origin) -> Fields:
    if not _validates(x):
        return {}
    section: dict[str, Any] = {"period": _period(x, "eval_strategy", "eval_steps")}
    if x.get("eval_on_start", False):
        section["at_start"] = True
    return {"algorithm.validation": section | ({"generate": False} if kind == "sft" else {})}


def _checkpoints(x: Origin) -> Fields:
    if x.get("save_strategy") == "best":
        x.changed("save_strategy", "by save_steps; checkpointing.metric also keeps the best one")
    enabled = x.get("save_strategy") != "no"
    return common.checkpoints(x, _period(x, "save_strategy", "save_steps") if enabled else 1)


def _sft_loss(x: Origin) -> Fields:
    if (kind := x.get("loss_type")) not in ("nll", "chunked_nll"):
        raise not_imported("loss_type", kind, "loss", ("nll", "chunked_nll"))
    fields: dict[str, Any] = {"algorithm.aggregation": "token-mean"}
    if not (x.get("completion_only_loss", False) or x.get("assistant_only_loss")):
        fields["algorithm.train_on"] = "all"
    return fields


def _dpo_loss(x: Origin) -> Fields:
    kinds = [str(kind) for kind in common.listed(x.get("loss_type"))]
    weights = dict(zip(kinds, map(float, x.get("loss_weights", [1.0] * len(kinds))), strict=True))
    cross_entropy = weights.pop("sft", 0.0)
    if unknown := [kind for kind in weights if kind not in _LOSSES]:
        raise not_imported("loss_type", ", ".join(unknown), "loss", (*_LOSSES, "sft"))
    if len(weights) != 1:
        raise CannotImport(
            f"loss_type = {', '.join(kinds)}: one of {', '.join(_LOSSES)} is imported, with sft"
        )
    ((kind, weight),) = weights.items()
    if weight != 1:
        raise CannotImport(f"loss_weights: {kind} has the weight {weight:g}; divide all of them by it")
    for key, plain in (("f_divergence_type", "reverse_kl"), ("use_weighting", False), ("ld_alpha", 1.0)):
        if (value := x.get(key, plain)) != plain:
            raise CannotImport(f"{key} = {value}: this loss is not imported; remove it, or use {plain}")
    section = {**_LOSSES[kind], "beta": x.get("beta")}
    smoothing = x.get("label_smoothing")
    if kind == "robust":
        section = section | {"label_smoothing": smoothing} if smoothing else section | {"name": "logistic"}
    elif smoothing:
        x.lost("label_smoothing", f"TRL's loss {kind} does not read it", changes_result=False)
    fields: dict[str, Any] = {"algorithm.loss": section}
    if cross_entropy:
        fields["algorithm.sft_coefficient"] = cross_entropy
        x.changed(
            "loss_type", "the cross entropy is the mean over the tokens of the batch, not of micro-batches"
        )
    return fields


def _reference(x: Origin) -> Fields:
    precomputed = x.get("precompute_ref_log_probs")
    return {"algorithm.reference": "precomputed" if precomputed else "live"}


def _kto_loss(x: Origin) -> Fields:
    if (kind := x.get("loss_type")) != "kto":
        raise not_imported("loss_type", kind, "loss", ("kto",))
    x.changed("beta", "the divergence is estimated on the whole batch, not on a micro-batch")
    weights = {f"algorithm.{name}": x.get(name) for name in ("desirable_weight", "undesirable_weight")}
    return {"algorithm.beta": x.get("beta"), **weights}


def _reward_loss(x: Origin) -> Fields:
    coefficient = x.get("center_rewards_coefficient", 0.0)
    return {"algorithm.loss": {"name": "bradley_terry", "center_coefficient": coefficient}}


_LOSS = {
    "sft": Part(
        ("loss_type", "completion_only_loss", "assistant_only_loss"),
        ("algorithm.train_on", "data.train"),
        _sft_loss,
    ),
    "dpo": Part(
        (
            *("loss_type", "loss_weights", "beta", "label_smoothing"),
            *("ld_alpha", "f_divergence_type", "use_weighting"),
        ),
        ("algorithm.loss", "algorithm.sft_coefficient"),
        _dpo_loss,
    ),
    "kto": Part(("loss_type", "beta", "desirable_weight", "undesirable_weight"), ("algorithm",), _kto_loss),
    "reward": Part(("center_rewards_coefficient",), ("algorithm.loss",), _reward_loss),
}
_REFERENCE_RULES: tuple[Rule, ...] = (
    Part(("precompute_ref_log_probs",), ("algorithm.reference",), _reference),
    Lost(("sync_ref_model",), "the reference is the model at the start"),
    Ignored(
        (
            *("precompute_ref_batch_size", "ref_model_mixup_alpha", "ref_model_sync_steps"),
            *("f_alpha_divergence_coef", "discopop_tau"),
        ),
        "how the reference is computed, or of what is not in use",
    ),
)
_TEXT_RULES: tuple[Rule, ...] = (
    take_given("chat_template_path", "policy.tokenizer.chat_template"),
    Lost(("eos_token", "pad_token"), "the tokenizer's", (None,)),
)
_SFT_RULES: tuple[Rule, ...] = (
    Lost(("packing", "eval_packing"), "a batch counts examples; there blocks of max_length tokens"),
    Lost(("dataset_text_field",), "rows are conversations, or prompts with completions", (None, "text")),
    Lost(("dataset_kwargs",), "rows are encoded by `nemorl train`", (None, {})),
    Lost(
        ("average_tokens_across_devices",), "the loss is the mean over the tokens of the batch", (True, None)
    ),
    Ignored(("packing_strategy",), "micro-batches are packed, and sequences in them do not see each other"),
)
_OWN: dict[str, tuple[Rule, ...]] = {
    "sft": (*_TEXT_RULES, *_SFT_RULES),
    "dpo": (*_REFERENCE_RULES, Lost(("pad_token",), "the tokenizer's", (None,))),
    "reward": _TEXT_RULES,
    "kto": _REFERENCE_RULES,
}


def rules_of(kind: str) -> tuple[Rule, ...]:
    """The rules of a trainer, by its name in TRL's commands."""
    lengths = ("max_length", "max_seq_length") if kind == "sft" else ("max_length",)
    order = ("train_sampling_strategy", "shuffle_dataset") if kind == "sft" else ("train_sampling_strategy",)
    return (
        *common.RULES,
        Part(
            (*common.SIZES, "max_steps", "num_train_epochs"),
            ("algorithm.batch_size", "algorithm.num_steps"),
            lambda x: _algorithm(kind, x),
        ),
        Part(
            lengths,
            ("policy.max_sequence_length", "policy.micro_batch_tokens"),
            lambda x: _lengths(kind, x),
            "longer examples are an error; there they are cut off",
        ),
        _LOSS[kind],
        Part(common.OPTIMIZER_KEYS, common.OPTIMIZER_FIELDS, lambda x: common.optimizer(x, _steps(x))),
        Part(common.DATA_KEYS, ("data.train",), lambda x: _data(kind, x)),
        Part(order, ("data.shuffle",), lambda x: _shuffle(kind, x)),
        Part(
            ("eval_strategy", "eval_steps", "eval_on_start", "dataset_test_split"),
            ("algorithm.validation", "data.validation"),
            lambda x: _validation(kind, x),
        ),
        Part(common.CHECKPOINT_KEYS, ("run_dir", "checkpointing"), _checkpoints),
        *_OWN[kind],
        Lost(("truncation_mode",), "longer examples are an error", ("keep_start", None)),
        Ignored(("padding_free", "average_tokens_across_devices"), "micro-batches are packed"),
    )
