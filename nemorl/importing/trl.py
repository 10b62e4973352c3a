"""TRL's GRPOConfig and the arguments of GRPOTrainer."""

from pathlib import Path
from typing import Any

from . import trl_files
from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule, take, take_given
from .shared import batch, layout, lora_targets, run_length, trackers

# TRL's defaults of what the rules read (commit f2cd5771), and those of transformers' TrainingArguments.
DEFAULTS: dict[str, Any] = {
    "num_generations": 8,
    "max_completion_length": 512,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "entropy_target": 0.2,
    "entropy_coef_delta": 0.005,
    "entropy_coef_max": 1.0,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": 42,
    "save_steps": 500,
    "save_strategy": "steps",
    "eval_strategy": "no",
    "bf16": True,
    "gradient_checkpointing": True,
    "shuffle_dataset": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "num_processes": 1,
    "num_machines": 1,
}
LIKENESSES: dict[str, object] = {
    "scale_rewards": (True, False, "group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "importance_sampling_level": ("token", "sequence"),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "delta": 1.0,
    "epsilon_high": 0.2,
    "vllm_importance_sampling_clip_min": 0.0,
    "vllm_importance_sampling_cap": 3.0,
    "off_policy_mask_threshold": 0.5,
    "vllm_max_model_length": 1024,
    "save_total_limit": 1,
    "generation_batch_size": 8,
    "steps_per_generation": 1,
    "lora_r": 16,
    "lora_alpha": 32,
    "min_p": 0.1,
}
_KEPT_MODEL = ("model_name_or_path", "model")


TRAINERS = {"grpo": "GRPOConfig"}  # config classes by the names of commands
MARKS = (
    r"\btrl (sft|dpo|grpo|kto|reward|rloo)\b|from trl import|import trl|trl\.scripts|"
    r"^(model_name_or_path|per_device_train_batch_size|reward_funcs|num_generations|max_completion_length):"
)


def read(file: Path) -> dict[str, Any]:
    """The arguments of a YAML, a script or a Python file. Raises CannotImport."""
    return trl_files.read(file, TRAINERS)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _sizes(x: Origin) -> tuple[int, int, int]:
    """Completions of an optimizer step, and of a generation; updates per generation."""
    per_update = (
        x.get("per_device_train_batch_size") * x.get("gradient_accumulation_steps") * x.get("num_processes")
    )
    micro = x.get("per_device_train_batch_size") * x.get("num_processes")
    generated = x.get("generation_batch_size")
    if generated is None:
        generated = micro * x.get("steps_per_generation", x.get("gradient_accumulation_steps"))
    return per_update, generated, batch(generated, per_update, "gradient_accumulation_steps")


def _batches(x: Origin) -> Fields:
    members = x.get("num_generations")
    _, generated, updates = _sizes(x)
    return {
        "algorithm.name": "grpo",
        "algorithm.num_prompts_per_step": batch(generated, members, "num_generations"),
        "algorithm.num_generations_per_prompt": members,
        "algorithm.num_minibatches": updates,
        "algorithm.num_epochs": x.get("num_iterations"),
    }


def _num_steps(x: Origin) -> Fields:
    """TRL counts optimizer steps, of which a step of ours has several."""
    _, generated, updates = _sizes(x)
    per_step = updates * x.get("num_iterations")
    given = x.get("max_steps")
    if given > 0:
        return {"algorithm.num_steps": max(given // per_step, 1)}
    prompts = generated // x.get("num_generations")
    epochs = x.get("num_train_epochs")
    rows = None if x.options.rows is None else int(x.options.rows * epochs)
    if rows is None:
        return {"algorithm.num_steps": run_length(x, None, 1, None, prompts)}
    return {"algorithm.num_steps": max(rows // prompts, 1)}


def _advantage(x: Origin) -> Fields:
    scale = x.get("scale_rewards")
    if x.get("multi_objective_aggregation") == "normalize_then_sum":
        return {"algorithm.advantage": {"name": "gdpo", "epsilon": 1e-4}}
    if scale == "batch":
        x.changed("scale_rewards", "the deviation is of the advantages of the batch; there of its rewards")
        return {"algorithm.advantage": {"name": "group_then_batch", "over": "trajectories", "epsilon": 1e-4}}
    if scale in ("none", False):
        return {"algorithm.advantage": {"name": "group", "normalize": False}}
    return {"algorithm.advantage": {"name": "group", "epsilon": 1e-4}}


_AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def _loss(x: Origin) -> Fields:
    kind = x.get("loss_type")
    if kind not in _AGGREGATION:
        raise CannotImport(f"loss_type = {kind}: this loss is not imported")
    low, high = x.get("epsilon"), x.get("epsilon_high", x.get("epsilon"))
    section: dict[str, Any] = {"aggregation": _AGGREGATION[kind]}
    if kind == "dr_grpo":
        section["aggregation_length"] = x.get("max_completion_length")
    if kind == "bnpo":
        x.changed("loss_type", "the mean over the tokens of the batch, and not of each micro-batch")
    if (quantile := x.get("top_entropy_quantile")) < 1:
        section["top_entropy_quantile"] = quantile
        x.changed("top_entropy_quantile", "of the tokens of an update, and not of a micro-batch")
    if kind == "cispo":
        section |= {"name": "cispo", "clip_high": high - 1}
    elif kind == "sapo":
        section |= {"name": "sapo", "temperature_positive": x.get("sapo_temperature_pos")}
        section |= {"temperature_negative": x.get("sapo_temperature_neg")}
    elif x.get("importance_sampling_level") == "sequence":
        section |= {"name": "gspo", "clip_low": low, "clip_high": high}
    else:
        section |= {"name": "clip", "clip_low": low, "clip_high": high}
        if (delta := x.get("delta")) is not None:
            section["dual_clip"] = delta
    return {"algorithm.loss": section}


def _kl(x: Origin) -> Fields:
    if not x.get("beta"):
        return {"algorithm.kl": {"coefficient": 0.0}}
    section = {"coefficient": x.get("beta"), "estimator": "k3"}
    if x.get("use_bias_correction_kl", False):
        section["importance_weighted"] = True
    return {"algorithm.kl": section}


def _entropy(x: Origin) -> Fields:
    if x.get("use_adaptive_entropy", False):
        section = {"name": "adaptive", "target": x.get("entropy_target"), "initial": x.get("entropy_coef")}
        section |= {"change": x.get("entropy_coef_delta"), "max_coefficient": x.get("entropy_coef_max")}
        return {"algorithm.entropy": section}
    coefficient = x.get("entropy_coef")
    return {"algorithm.entropy": {"coefficient": coefficient}} if coefficient else {}


def _correction(x: Origin) -> Fields:
    """Of vLLM's samples: `token_truncate`, `token_mask`, `sequence_truncate` and `sequence_mask`."""
    section: dict[str, Any] = {}
    if x.get("use_vllm", False) and x.get("vllm_importance_sampling_correction"):
        level, _, how = x.get("vllm_importance_sampling_mode").partition("_")
        low = x.get("vllm_importance_sampling_clip_min", 0.0)
        high = x.get("vllm_importance_sampling_cap", x.get("vllm_importance_sampling_clip_max"))
        section = {"name": "tis", "level": level, "low": low, "high": high}
        if how == "mask":
            section |= {"name": "icepop"}
    if (threshold := x.get("off_policy_mask_threshold")) is not None:
        section["off_policy_threshold"] = threshold
    return {"algorithm.correction": section} if section else {}


def _optimizer(x: Origin) -> Fields:
    section = {"name": "adam", "lr": x.get("learning_rate"), "weight_decay": x.get("weight_decay")}
    section |= {"beta1": x.get("adam_beta1"), "beta2": x.get("adam_beta2"), "eps": x.get("adam_epsilon")}
    fields: dict[str, Any] = {
        "policy.optimizer": section,
        "policy.max_grad_norm": x.get("max_grad_norm") or None,
    }
    _, _, updates = _sizes(x)
    total = int(_num_steps(x)["algorithm.num_steps"]) * updates * x.get("num_iterations")
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
        raise CannotImport(f"lr_scheduler_type = {kind}: this schedule is not imported")
    return fields | {"policy.schedule": schedule}


def _generation(x: Origin) -> Fields:
    section: dict[str, Any] = {"max_new_tokens": x.get("max_completion_length"), "backend": "megatron"}
    gpus = x.get("num_processes")
    if x.get("use_vllm", False):
        tensor = x.get("vllm_tensor_parallel_size")
        section |= {"backend": "vllm", "gpu_memory_utilization": x.get("vllm_gpu_memory_utilization")}
        section |= {"tensor_parallel_size": tensor, "replicas": max(gpus // tensor, 1), "colocated": True}
    else:
        how = "the policy's own processes sample, as there; use vLLM for speed"
        x.changed("use_vllm", how, changes_result=False)
    section["sampling"] = {"temperature": x.get("temperature")}
    for key, neutral in (("top_p", (1, 1.0)), ("top_k", (0, -1)), ("min_p", (None, 0.0))):
        if x.get(key) not in neutral:
            x.lost(key, "the loss would need the tokens that the engine's filter kept; left out")
    return {"generation": section}


def _lengths(x: Origin) -> Fields:
    """TRL bounds the completion only; a conversation has as many tokens again for the prompt."""
    longest = x.get("vllm_max_model_length", 2 * x.get("max_completion_length"))
    tokens = longest * x.get("per_device_train_batch_size")
    return {"policy.max_sequence_length": longest, "policy.micro_batch_tokens": tokens}


def _model(x: Origin) -> Fields:
    name = next((x.get(key) for key in _KEPT_MODEL if x.get(key)), None)
    if not isinstance(name, str):
        raise CannotImport("model_name_or_path: give the model; GRPOTrainer(model=…) with a text counts, too")
    return {"policy.model_path": name}


def _data(x: Origin) -> Fields:
    name, split = x.get("dataset_name"), x.get("dataset_train_split", "train")
    if name is None:
        x.note("data/train.jsonl", "write the rows of the dataset here; dataset_name is not given")
        return {"data.train": {"name": "tasks", "path": "data/train.jsonl", "answer_key": None}}
    section = {"name": "tasks", "path": name, "split": split, "answer_key": None}
    if config := x.get("dataset_config"):
        section["subset"] = config
    return {"data.train": section, "data.shuffle": x.get("shuffle_dataset")}


def _rewards(x: Origin) -> Fields:
    names, weights = x.get("reward_funcs"), x.get("reward_weights")
    if names is None:
        x.note("rewards:reward", "name the module and the function here; reward_funcs is not given")
        return {"rewards": [{"function": "rewards:reward", "signature": "trl"}]}
    rewards = []
    for place, name in enumerate(_listed(names)):
        module, _, function = str(name).rpartition(".")
        reward: dict[str, Any] = {"function": f"{module or 'trl.rewards'}:{function}", "signature": "trl"}
        rewards.append(reward | ({"weight": weights[place]} if weights else {}))
    return {"rewards": rewards}


def _trackers(x: Origin) -> Fields:
    names = [] if x.get("report_to") is None else _listed(x.get("report_to"))
    project, space = x.get("project"), x.get("trackio_space_id")
    sections = {
        "trackio": ({"project": project} if project else {}) | ({"space_id": space} if space else {}),
        "wandb": {"project": project} if project else {},
    }
    return trackers(x, "report_to", names, sections)


def _lora(x: Origin) -> Fields:
    if not x.get("use_peft", False):
        return {}
    names = x.get("lora_target_modules", x.get("target_modules", "all-linear"))
    targets = lora_targets(x, "lora_target_modules", names)
    return {"policy.lora": {"rank": x.get("lora_r"), "alpha": x.get("lora_alpha"), "targets": targets}}


def _checkpoints(x: Origin) -> Fields:
    fields: dict[str, Any] = {"run_dir": x.get("output_dir", "runs/trl")}
    if x.get("save_strategy") == "no":
        return fields | {"checkpointing": {"enabled": False}}
    _, _, updates = _sizes(x)
    period = max(int(x.get("save_steps")) // (updates * x.get("num_iterations")), 1)
    kept = {"keep": x.get("save_total_limit")} if x.get("save_total_limit") else {}
    return fields | {"checkpointing": {"period": period, **kept}}


RULES: tuple[Rule, ...] = (
    Part(_KEPT_MODEL, ("policy.model_path",), _model),
    Part(
        (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
            *("generation_batch_size", "num_generations", "num_iterations"),
        ),
        ("algorithm.num_prompts_per_step", "algorithm.num_minibatches", "algorithm.num_epochs"),
        _batches,
    ),
    Part(("max_steps", "num_train_epochs"), ("algorithm.num_steps",), _num_steps),
    Part(("scale_rewards", "multi_objective_aggregation"), ("algorithm.advantage",), _advantage),
    Part(
        (
            *("loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level"),
            *("sapo_temperature_pos", "sapo_temperature_neg", "top_entropy_quantile"),
        ),
        ("algorithm.loss",),
        _loss,
    ),
    Part(("beta", "use_bias_correction_kl"), ("algorithm.kl",), _kl),
    Part(
        (
            *("entropy_coef", "use_adaptive_entropy", "entropy_target", "entropy_coef_delta"),
            "entropy_coef_max",
        ),
        ("algorithm.entropy",),
        _entropy,
    ),
    Part(
        (
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
            *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
            *("vllm_importance_sampling_cap", "off_policy_mask_threshold"),
        ),
        ("algorithm.correction",),
        _correction,
    ),
    Part(
        ("mask_truncated_completions",),
        ("algorithm.filters.drop_truncated",),
        lambda x: (
            {"algorithm.filters.drop_truncated": True} if x.get("mask_truncated_completions", False) else {}
        ),
    ),
    Part(
        (
            *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
            *("lr_scheduler_type", "warmup_steps", "warmup_ratio"),
        ),
        ("policy.optimizer", "policy.schedule", "policy.max_grad_norm"),
        _optimizer,
    ),
    Part(
        (
            *(
                "max_completion_length",
                "use_vllm",
                "vllm_tensor_parallel_size",
                "vllm_gpu_memory_utilization",
            ),
            *("temperature", "top_p", "top_k", "min_p"),
        ),
        ("generation",),
        _generation,
    ),
    Part(
        ("vllm_max_model_length",),
        ("policy.max_sequence_length", "policy.micro_batch_tokens"),
        _lengths,
    ),
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
        lambda x: _devices(x),
    ),
    Part(("report_to", "project", "trackio_space_id"), ("logger.trackers",), _trackers),
    Part(
        ("dataset_name", "dataset_config", "dataset_train_split", "shuffle_dataset"),
        ("data.train", "data.shuffle"),
        _data,
    ),
    Part(("reward_funcs", "reward_weights"), ("rewards",), _rewards),
    Part(
        ("output_dir", "save_steps", "save_strategy", "save_total_limit"),
        ("run_dir", "checkpointing"),
        _checkpoints,
    ),
    take("seed", "seed"),
    take_given("chat_template_path", "policy.tokenizer.chat_template"),
    Lost(("sync_ref_model",), "the reference is the model at the start"),
    Lost(("repetition_penalty",), "the loss would need the penalized distribution", (1.0, None)),
    Lost(("lora_dropout",), "adapters have no dropout", (0.0, None)),
    Lost(("optim",), "AdamW", ("adamw_torch", "adamw_torch_fused", None)),
    Lost(("generation_kwargs", "model_init_kwargs", "chat_template_kwargs"), "no such arguments", (None, {})),
    Lost(
        ("router_aux_loss_coef",),
        "policy.moe.load_balancing_loss_coefficient is of each sequence",
        (0.0, None),
    ),
    Lost(("eval_strategy",), "set algorithm.validation and data.validation", ("no", None)),
    Lost(
        ("environment_factory", "rollout_func", "tools"),
        "an environment of ours (docs/environments.md)",
        (None,),
    ),
    Lost(("entropy_coef_min",), "the weight stays above 0", (0.0, None)),
    Ignored(("vllm_mode",), "engines share the policy's GPUs"),
    Ignored(
        (
            *("logging_steps", "run_name", "log_completions", "num_completions_to_print"),
            *("push_to_hub", "hub_model_id", "logging_strategy", "log_unique_prompts"),
            *(
                "dataloader_num_workers",
                "disable_dropout",
                "remove_unused_columns",
                "ds3_gather_for_generation",
            ),
            *(
                "dtype",
                "attn_implementation",
                "trust_remote_code",
                "ddp_timeout",
                "deepspeed",
                "fsdp",
                "tf32",
            ),
            *(
                "gradient_checkpointing_kwargs",
                "eval_steps",
                "per_device_eval_batch_size",
                "overwrite_output_dir",
            ),
            *("ref_model_mixup_alpha", "ref_model_sync_steps", "dataset_test_split", "num_generations_eval"),
            *(
                "vllm_server_host",
                "vllm_server_port",
                "vllm_server_timeout",
                "vllm_server_base_url",
                "vllm_group_port",
            ),
            *(
                "vllm_enable_sleep_mode",
                "vllm_model_impl",
                "cache_implementation",
                "pad_to_multiple_of",
                "do_eval",
            ),
            *(
                "resume_from_checkpoint",
                "trainer",
                "save_only_model",
                "logging_first_step",
                "use_liger_kernel",
                "task_type",
            ),
            *(
                "logging_dir",
                "lora_task_type",
                "bias",
                "config",
                "hub_strategy",
                "log_level",
                "model_revision",
            ),
            "steps",
        ),
        "trackers, kernels and how processes are started",
    ),
)


def _devices(x: Origin) -> Fields:
    processes, machines = x.get("num_processes"), x.get("num_machines")
    if processes % machines:
        raise CannotImport(f"num_processes = {processes}: they are no multiple of num_machines = {machines}")
    nodes = {"cluster.num_nodes": machines} if machines > 1 else {}
    return {**nodes, "cluster.gpus_per_node": processes // machines, **layout(processes, {}, "num_processes")}
