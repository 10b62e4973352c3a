"""TRL's GRPOConfig and the arguments of GRPOTrainer."""

from typing import Any

from . import trl_common as common
from .rules import Fields, Ignored, Lost, Origin, Part, Rule, not_imported, take_given
from .shared import batch, run_length, trained_sampling
from .trl_trainers import read as read

# TRL's defaults of what the rules read (commit f2cd5771).
DEFAULTS: dict[str, Any] = {
    **common.DEFAULTS,
    "num_generations": 8,
    "max_completion_length": 512,
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
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "shuffle_dataset": True,
}
LIKENESSES: dict[str, object] = {
    **common.LIKENESSES,
    "scale_rewards": (True, False, "group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "importance_sampling_level": ("token", "sequence"),
    "delta": 1.0,
    "epsilon_high": 0.2,
    "vllm_importance_sampling_clip_min": 0.0,
    "vllm_importance_sampling_cap": 3.0,
    "off_policy_mask_threshold": 0.5,
    "vllm_max_model_length": 1024,
    "generation_batch_size": 8,
    "steps_per_generation": 1,
    "min_p": 0.1,
}
MARKS = (
    r"\btrl (sft|dpo|grpo|kto|reward|rloo)\b|from trl import|import trl|trl\.scripts|"
    r"^(model_name_or_path|per_device_train_batch_size|reward_funcs|num_generations|max_completion_length):"
)


def _sizes(x: Origin) -> tuple[int, int, int]:
    """Completions of an optimizer step, and of a generation; updates per generation."""
    per_update = common.per_update(x)
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
        return {"algorithm.advantage": {"name": "gdpo", "epsilon": 1e-4, "batch_epsilon": 1e-4}}
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
        raise not_imported("loss_type", kind, "loss", _AGGREGATION)
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


def _updates(x: Origin) -> int:
    """Optimizer steps of a step of ours."""
    _, _, updates = _sizes(x)
    return int(updates * x.get("num_iterations"))


def _optimizer(x: Origin) -> Fields:
    return common.optimizer(x, int(_num_steps(x)["algorithm.num_steps"]) * _updates(x))


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
    filters = {
        key: x.get(key)
        for key, neutral in (("top_p", (1,)), ("top_k", (0, -1)), ("min_p", (None, 0)))
        if x.get(key) not in neutral
    }
    if "top_p" in filters and filters.pop("min_p", None) is not None:
        x.lost("min_p", "engines differ in which of min_p and top_p is first; left out")
    section["sampling"] = trained_sampling(x, x.get("temperature"), filters)
    return {"generation": section}


def _lengths(x: Origin) -> Fields:
    """TRL bounds the completion only; a conversation has as many tokens again for the prompt."""
    longest = x.get("vllm_max_model_length", 2 * x.get("max_completion_length"))
    tokens = longest * x.get("per_device_train_batch_size")
    return {"policy.max_sequence_length": longest, "policy.micro_batch_tokens": tokens}


def _data(x: Origin) -> Fields:
    train = common.train_data(x, {"name": "tasks", "answer_key": None})
    return {"data.train": train, "data.shuffle": x.get("shuffle_dataset")}


# Of `trl grpo`, which takes others by module and name.
_FUNCTIONS = (
    *("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"),
    "get_soft_overlong_punishment",
)


def _rewards(x: Origin) -> Fields:
    names, weights = x.get("reward_funcs"), x.get("reward_weights")
    if names is None:
        x.note("rewards:reward", "name the module and the function here; reward_funcs is not given")
        return {"rewards": [{"function": "rewards:reward", "signature": "trl"}]}
    rewards, modules = [], []
    for place, name in enumerate(common.listed(names)):
        module, _, function = str(name).rpartition(".")
        if not module and name not in _FUNCTIONS:
            raise not_imported("reward_funcs", name, "function of TRL", (*_FUNCTIONS, "module.function"))
        modules += [module] if module else []
        reward: dict[str, Any] = {"function": f"{module or 'trl.rewards'}:{function}", "signature": "trl"}
        rewards.append(reward | ({"weight": weights[place]} if weights else {}))
    if modules:
        how = f"as TRL calls them; keep {', '.join(dict.fromkeys(modules))} where a run can import it"
    else:
        how = "functions of TRL, which has to be installed where a run starts"
    x.changed("reward_funcs", how, changes_result=False)
    return {"rewards": rewards}


def _checkpoints(x: Origin) -> Fields:
    per_step = _updates(x)
    total = int(_num_steps(x)["algorithm.num_steps"]) * per_step
    return common.checkpoints(x, common.interval(x.get("save_steps"), total) // per_step)


RULES: tuple[Rule, ...] = (
    *common.RULES,
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
    Part(common.OPTIMIZER_KEYS, common.OPTIMIZER_FIELDS, _optimizer),
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
    Part((*common.DATA_KEYS, "shuffle_dataset"), ("data.train", "data.shuffle"), _data),
    Part(("reward_funcs", "reward_weights"), ("rewards",), _rewards),
    Part(common.CHECKPOINT_KEYS, ("run_dir", "checkpointing"), _checkpoints),
    take_given("chat_template_path", "policy.tokenizer.chat_template"),
    Lost(("sync_ref_model",), "the reference is the model at the start"),
    Lost(("repetition_penalty",), "the loss would need the penalized distribution", (1.0, None)),
    take_given("chat_template_kwargs", "policy.tokenizer.template_arguments"),
    Lost(("generation_kwargs",), "no such arguments", (None, {})),
    Lost(("eval_strategy",), "set algorithm.validation and data.validation", ("no", None)),
    Lost(
        ("environment_factory", "rollout_func", "tools"),
        "an environment of ours (docs/environments.md)",
        (None,),
    ),
    Lost(("max_tool_calling_iterations",), "max_turns of an environment (docs/environments.md)", (None,)),
    Lost(("reward_model_name_or_path",), "a reward with kind: local_model (docs/reward_models.md)", (None,)),
    Lost(("vllm_structured_outputs_regex",), "samples are not constrained", (None,)),
    Lost(("cast_lm_head_to_fp32",), "the output layer is in policy.precision"),
    Lost(("entropy_coef_min",), "the weight stays above 0", (0.0, None)),
    Ignored(("vllm_mode",), "engines share the policy's GPUs"),
    Ignored(
        (
            *("log_completions", "num_completions_to_print", "log_unique_prompts", "steps"),
            *("ds3_gather_for_generation", "cache_implementation", "train_sampling_strategy"),
            *("eval_steps", "eval_on_start", "dataset_test_split", "num_generations_eval"),
            *("ref_model_mixup_alpha", "ref_model_sync_steps", "average_tokens_across_devices"),
            *("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_server_base_url"),
            *("vllm_group_port", "vllm_enable_sleep_mode", "vllm_model_impl", "use_transformers_paged"),
            *("use_transformers_continuous_batching", "transformers_continuous_batching_config"),
            *("log_multimodal", "log_completions_hub_repo"),
            *("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
        ),
        "how samples are shown, and how engines are started",
    ),
)
