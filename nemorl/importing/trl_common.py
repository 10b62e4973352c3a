"""What the trainers of TRL have in common: the model, devices, optimizer, trackers, data and checkpoints."""

from pathlib import PurePath
from typing import Any

from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule, not_imported, take
from .shared import OFFLOADED, OFFLOADED_HOW, layout, lora_targets, trackers

# Defaults of what the rules read, of TRL and of transformers' TrainingArguments.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "seed": 42,
    "save_steps": 500.0,
    "save_strategy": "steps",
    "eval_strategy": "no",
    "bf16": True,
    "gradient_checkpointing": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "num_processes": 1,
    "num_machines": 1,
}
LIKENESSES: dict[str, object] = {
    "save_strategy": ("no", "steps", "epoch", "best"),
    "eval_strategy": ("no", "steps", "epoch"),
    "eval_steps": 500.0,
    "save_total_limit": 1,
    "lora_r": 16,
    "lora_alpha": 32,
}
SIZES = "per_device_train_batch_size", "gradient_accumulation_steps"
_MODEL = "model_name_or_path", "model"


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def per_update(x: Origin) -> int:
    """Examples of an optimizer step, over all devices."""
    size = x.get("per_device_train_batch_size") * x.get("gradient_accumulation_steps")
    return int(size * x.get("num_processes"))


_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")


def optimizer(x: Origin, total: int) -> Fields:
    """`total`: optimizer steps of the run."""
    section = {"name": "adam", "lr": x.get("learning_rate"), "weight_decay": x.get("weight_decay")}
    section |= {"beta1": x.get("adam_beta1"), "beta2": x.get("adam_beta2"), "eps": x.get("adam_epsilon")}
    fields: dict[str, Any] = {
        "policy.optimizer": section,
        "policy.max_grad_norm": x.get("max_grad_norm") or None,
    }
    warmup = x.get("warmup_steps")
    if 0 < warmup < 1:
        warmup = int(warmup * total)
    if not warmup and (share := x.get("warmup_ratio", 0.0)):
        warmup = int(share * total)
    kind = x.get("lr_scheduler_type")
    schedule: dict[str, Any] = {"first_step": 0} | ({"warmup_steps": int(warmup)} if warmup else {})
    if kind in ("linear", "cosine"):
        schedule |= {"name": kind, "decay_steps": max(total, int(warmup) + 1)}
    elif kind not in ("constant", "constant_with_warmup"):
        raise not_imported("lr_scheduler_type", kind, "schedule", _SCHEDULES)
    return fields | {"policy.schedule": schedule}


def interval(given: float, total: int) -> int:
    """Optimizer steps between two events: `given`, or below 1 as a share of the run's `total`."""
    return max(int(given * total if 0 < given < 1 else given), 1)


OPTIMIZER_KEYS = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("lr_scheduler_type", "warmup_steps", "warmup_ratio"),
)
OPTIMIZER_FIELDS = "policy.optimizer", "policy.schedule", "policy.max_grad_norm"


def _model(x: Origin) -> Fields:
    name = next((x.get(key) for key in _MODEL if x.get(key)), None)
    if not isinstance(name, str):
        raise CannotImport(
            "model_name_or_path: give the model; a trainer's argument model=… with a text counts, too"
        )
    return {"policy.model_path": name}


DATA_KEYS = "dataset_name", "dataset_config", "dataset_train_split", "datasets"


def train_data(x: Origin, keys: dict[str, Any]) -> dict[str, Any]:
    """The section `data.train`, of one dataset or of a mixture; `keys` are its name and columns."""
    if entries := x.get("datasets"):
        found = [_entry(x, entry, keys) for entry in entries]
        if len(found) == 1:
            return found[0]
        names = [PurePath(str(entry["path"])).name.replace(".", "_") for entry in entries]
        sources = {
            name if names.count(name) == 1 else f"{name}_{number}": {"dataset": one}
            for number, (name, one) in enumerate(zip(names, found, strict=True), start=1)
        }
        return {"name": "mixture", "sources": sources}
    if x.get("dataset_name") is None:
        x.note("data/train.jsonl", "write the rows of the dataset here; dataset_name is not given")
        return {**keys, "path": "data/train.jsonl"}
    return hub_data(x, x.get("dataset_train_split", "train"), keys)


def hub_data(x: Origin, split: str, keys: dict[str, Any]) -> dict[str, Any]:
    section = {**keys, "path": x.get("dataset_name"), "split": split}
    if config := x.get("dataset_config"):
        section["subset"] = config
    return section


def _entry(x: Origin, entry: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    section = {**keys, "path": entry["path"], "split": entry.get("split", "train")}
    if name := entry.get("name"):
        section["subset"] = name
    left = [key for key in ("data_dir", "data_files", "columns", "fraction") if entry.get(key) is not None]
    if left:
        x.changed("datasets", f"without {', '.join(left)}; write the rows as the origin loads them")
    return section


def _trackers(x: Origin) -> Fields:
    names = [] if x.get("report_to") is None else listed(x.get("report_to"))
    project, space = x.get("project"), x.get("trackio_space_id")
    sections = {
        "trackio": ({"project": project} if project else {}) | ({"space_id": space} if space else {}),
        "wandb": {"project": project} if project else {},
    }
    return trackers(x, "report_to", names, sections)


def _offloaded(x: Origin) -> Fields:
    if not x.get("activation_offloading", False):
        return {}
    x.changed("activation_offloading", OFFLOADED_HOW, changes_result=False)
    return OFFLOADED


_PEFT_TARGETS = ["q_proj", "v_proj"]  # PEFT's for Llama, Mistral, Mixtral, Qwen and Gemma; others have none


def _lora(x: Origin) -> Fields:
    if not x.get("use_peft", False):
        return {}
    names = x.get("lora_target_modules", x.get("target_modules", _PEFT_TARGETS))
    targets = lora_targets(x, "lora_target_modules", names)
    return {"policy.lora": {"rank": x.get("lora_r"), "alpha": x.get("lora_alpha"), "targets": targets}}


def _devices(x: Origin) -> Fields:
    processes, machines = x.get("num_processes"), x.get("num_machines")
    if processes % machines:
        raise CannotImport(f"num_processes = {processes}: they are no multiple of num_machines = {machines}")
    nodes = {"cluster.num_nodes": machines} if machines > 1 else {}
    return {**nodes, "cluster.gpus_per_node": processes // machines, **layout(processes, {}, "num_processes")}


def checkpoints(x: Origin, period: int) -> Fields:
    """`period`: steps of ours between checkpoints."""
    fields: dict[str, Any] = {"run_dir": x.get("output_dir", "runs/trl")}
    if x.get("save_strategy") == "no":
        return fields | {"checkpointing": {"enabled": False}}
    kept = {"keep": x.get("save_total_limit")} if x.get("save_total_limit") else {}
    return fields | {"checkpointing": {"period": max(period, 1), **kept}}


CHECKPOINT_KEYS = "output_dir", "save_steps", "save_strategy", "save_total_limit"

RULES: tuple[Rule, ...] = (
    Part(_MODEL, ("policy.model_path",), _model),
    Part(
        ("bf16",),
        ("policy.precision",),
        lambda x: {"policy.precision": "bfloat16" if x.get("bf16") else "float32"},
    ),
    Part(
        ("gradient_checkpointing",),
        ("policy.recompute",),
        lambda x: {"policy.recompute": {"name": "full"}} if x.get("gradient_checkpointing") else {},
    ),
    Part(
        ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "target_modules"), ("policy.lora",), _lora
    ),
    Part(
        ("num_processes", "num_machines"),
        ("cluster.num_nodes", "cluster.gpus_per_node", "policy.layout"),
        _devices,
    ),
    Part(("activation_offloading",), ("policy.offload_activations",), _offloaded),
    Part(("report_to", "project", "trackio_space_id"), ("logger.trackers",), _trackers),
    take("seed", "seed"),
    Lost(("lora_dropout",), "adapters have no dropout", (0.0, None)),
    Lost(
        ("lora_modules_to_save", "lora_target_parameters"),
        "only the matrices of layers have adapters",
        (None,),
    ),
    Lost(("use_rslora",), "adapters are scaled by alpha / rank; raise policy.lora.alpha"),
    Lost(("use_dora",), "adapters are those of LoRA"),
    Lost(("load_in_4bit", "load_in_8bit"), "the frozen weights are in policy.precision"),
    Lost(
        ("optim",),
        "AdamW",
        ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf", None),
    ),
    Lost(("optim_args", "optim_target_modules"), "AdamW has no such arguments", (None,)),
    Lost(("lr_scheduler_kwargs",), "set min_lr of policy.schedule", (None, {})),
    Lost(("fp16",), "bfloat16 or float32"),
    Lost(("model_init_kwargs",), "no such arguments", (None, {})),
    Lost(("label_smoothing_factor",), "the targets are the tokens of the data", (0.0, None)),
    Lost(("neftune_noise_alpha",), "embeddings have no noise", (0.0, None)),
    Lost(("auto_find_batch_size",), "policy.micro_batch_tokens bounds memory; the batch stays"),
    Lost(("parallelism_config",), "set policy.layout", (None, {})),
    Lost(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "checkpointing.metric keeps the checkpoint with the best value",
    ),
    Lost(("eval_delay",), "validation begins with the first period", (0, None)),
    Lost(("test_split_size",), "give the rows of validation as data.validation", (None,)),
    Lost(
        ("router_aux_loss_coef",),
        "policy.moe.load_balancing_loss_coefficient is of each sequence",
        (0.0, None),
    ),
    Ignored(
        (
            *("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_level"),
            *("log_level_replica", "log_on_each_node", "logging_nan_inf_filter", "run_name", "disable_tqdm"),
            *("include_num_input_tokens_seen", "trackio_bucket_id", "trackio_static_space_id", "debug"),
            *("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"),
            *("hub_always_push", "hub_revision", "skip_memory_metrics"),
        ),
        "metrics and trackers; `nemorl push` uploads",
    ),
    Ignored(
        (
            *("dataloader_num_workers", "dataloader_drop_last", "dataloader_in_order"),
            *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
            *("dataloader_multiprocessing_context", "dataset_num_proc", "dataset_streaming", "streaming"),
            *("remove_unused_columns", "label_names", "length_column_name", "data_seed"),
            *("pad_to_multiple_of", "accelerator_config"),
        ),
        "how rows are loaded and padded",
    ),
    Ignored(
        (
            *("dtype", "attn_implementation", "trust_remote_code", "model_revision", "use_cache", "use_cpu"),
            *("ddp_timeout", "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_static_graph"),
            *("ddp_find_unused_parameters", "deepspeed", "fsdp", "fsdp_config", "tf32", "local_rank"),
            *("gradient_checkpointing_kwargs", "torch_empty_cache_steps"),
            *("use_liger_kernel", "liger_kernel_config", "torch_compile", "torch_compile_backend"),
            *(
                "torch_compile_mode",
                "bf16_full_eval",
                "fp16_full_eval",
                "full_determinism",
                "disable_dropout",
            ),
            *("ignore_bias_buffers", "bnb_4bit_quant_type", "bnb_4bit_quant_storage"),
            *("use_bnb_nested_quant", "lora_task_type", "task_type", "bias"),
        ),
        "kernels and how processes are started",
    ),
    Ignored(
        (
            *("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "ignore_data_skip"),
            *("restore_callback_states_from_checkpoint", "overwrite_output_dir", "config", "trainer"),
            *("save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
        ),
        "`nemorl train` trains, and resumes from the newest checkpoint of the run folder",
    ),
    Ignored(
        (
            *("per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches"),
            *("eval_use_gather_object", "prediction_loss_only", "include_for_metrics", "batch_eval_metrics"),
        ),
        "how validation is computed",
    ),
)
