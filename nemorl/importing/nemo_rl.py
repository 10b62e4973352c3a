"""NeMo-RL's configs: GRPO and its variants, SFT, DPO and reward models."""

from math import ceil
from pathlib import Path
from typing import Any

from .nemo_rl_data import DATA_RULES, data_rows
from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule, take, take_given
from .shared import UNBOUNDED, batch, layout, lora_targets, replicas, run_length, sampling
from .sources import read_inherited, resolved

KINDS = {"grpo": "grpo", "sft": "sft", "dpo": "dpo", "rm": "reward_model"}
_ABSENT = {
    "ppo": "PPO with NeMo-RL's value model",
    "distillation": "on-policy distillation with a mixed divergence over top-k logits",
    "token_aligner": "distillation between tokenizers",
}
_M, _D = "policy.megatron_cfg", "policy.dtensor_cfg"
_G, _V = "policy.generation", "policy.generation.vllm_cfg"


def read(file: Path) -> dict[str, Any]:
    """A recipe with its `defaults:` chain, interpolations and resolvers, as NeMo-RL resolves it."""
    return resolved(read_inherited(file), str(file))


def kind(x: Origin) -> str:
    """The section of the algorithm. Raises CannotImport for one without counterpart."""
    for name, what in _ABSENT.items():
        if x.has_section(name) or (name in x.values and x.values[name] is not None):
            raise CannotImport(f"{name}: {what} is not imported; docs/moving_in.md names what is")
    found = [name for name in KINDS if x.has_section(name)]
    if len(found) != 1:
        raise CannotImport("the config has none of the sections grpo, sft, dpo and rm; is it NeMo-RL's?")
    return found[0]


def _algorithm(x: Origin) -> Fields:
    name = KINDS[kind(x)]
    if name == "reward_model":
        return {"algorithm.name": name, "policy.head": "scalar"}
    if name != "grpo":
        return {"algorithm.name": name}
    return {"algorithm.name": name, **_batches(x), **_advantage(x)}


def _batches(x: Origin) -> Fields:
    prompts, members = x.get("grpo.num_prompts_per_step", 0), x.get("grpo.num_generations_per_prompt", 0)
    per_update = x.get("policy.train_global_batch_size", 0)
    return {
        "algorithm.num_prompts_per_step": prompts,
        "algorithm.num_generations_per_prompt": members,
        "algorithm.num_minibatches": batch(prompts * members, per_update, "policy.train_global_batch_size"),
    }


def _advantage(x: Origin) -> Fields:
    estimator = "grpo.adv_estimator"
    name = x.get(f"{estimator}.name", "grpo")
    normalize = x.get(f"{estimator}.normalize_rewards", x.get("grpo.normalize_rewards", True))
    alone = x.get(f"{estimator}.use_leave_one_out_baseline", x.get("grpo.use_leave_one_out_baseline", True))
    match name:
        case "grpo":
            section: dict[str, Any] = {"name": "group", "normalize": normalize, "leave_one_out": alone}
            if normalize and alone:
                section["deviation"] = "others"
        case "reinforce_plus_plus" if x.get(f"{estimator}.minus_baseline", True):
            section = {"name": "group_then_batch", "over": "tokens"}
            x.changed(f"{estimator}.name", "the variance of the batch is unbiased here; NeMo-RL divides by n")
        case "reinforce_plus_plus":
            section = {"name": "reinforce", "over": "tokens"}
            x.changed(f"{estimator}.name", "the variance of the batch is unbiased here; NeMo-RL divides by n")
        case _:
            raise CannotImport(f"{estimator}.name = {name}: this estimator is not imported")
    return {"algorithm.advantage": section}


_ADVANTAGE = (
    *(f"grpo.adv_estimator.{name}" for name in ("name", "normalize_rewards", "use_leave_one_out_baseline")),
    "grpo.adv_estimator.minus_baseline",
    *("grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"),
    *("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"),
)


def _offline_batch(x: Origin) -> Fields:
    if kind(x) == "grpo":
        return {}
    return {"algorithm.batch_size": x.get("policy.train_global_batch_size")}


def _num_steps(x: Origin) -> Fields:
    section = kind(x)
    steps, epochs = x.get(f"{section}.max_num_steps"), x.get(f"{section}.max_num_epochs")
    per_step = x.get("grpo.num_prompts_per_step") or x.get("policy.train_global_batch_size", 1)
    rows = data_rows(x)
    length = run_length(x, steps, epochs if epochs and epochs > 0 else None, rows, per_step)
    return {"algorithm.num_steps": length}


def _loss(x: Origin) -> Fields:
    """NeMo-RL's ClippedPGLossFn; of DPO only its own keys count."""
    match kind(x):
        case "dpo":
            return _dpo(x)
        case "grpo":
            pass
        case _:
            return {}
    low, high = x.get("loss_fn.ratio_clip_min", 0.2), x.get("loss_fn.ratio_clip_max", 0.2)
    tokens = x.get("loss_fn.token_level_loss", True)
    section: dict[str, Any] = {"aggregation": "token-mean" if tokens else "seq-mean-token-mean"}
    bounds = {"clip_low": low, "clip_high": high}
    if x.get("loss_fn.disable_ppo_ratio", False):
        section |= {"name": "reinforce"}
    elif x.get("loss_fn.use_cispo", False):
        section |= {"name": "cispo", **bounds}
        if low >= 1:
            del section["clip_low"]
    elif x.get("loss_fn.sequence_level_importance_ratios", False):
        section |= {"name": "gspo", **bounds}
        if x.get("loss_fn.ratio_clip_c") is not None:
            x.lost("loss_fn.ratio_clip_c", "GSPO has no dual clip here")
    else:
        section |= {"name": "clip", **bounds}
        if (dual := x.get("loss_fn.ratio_clip_c")) is not None:
            section["dual_clip"] = dual
    if x.get("loss_fn.force_on_policy_ratio", False) and x.get("algorithm.num_minibatches", 1) > 1:
        x.changed("loss_fn.force_on_policy_ratio", "a step has several updates, whose ratio is not forced to 1")
    fields: dict[str, Any] = {"algorithm.loss": section}
    weight = x.get("loss_fn.positive_example_nll_weight", 0.0)
    if weight:
        fields["algorithm.likelihood"] = {"coefficient": weight, "min_reward": 1e-9}
    return fields


def _dpo(x: Origin) -> Fields:
    average = x.get("dpo.preference_average_log_probs", False)
    section = {"beta": x.get("dpo.reference_policy_kl_penalty", 0.05), "logprobs": "mean" if average else "sum"}
    fields: dict[str, Any] = {"algorithm.loss": section}
    if weight := x.get("dpo.sft_loss_weight", 0):
        fields["algorithm.sft_coefficient"] = weight
        how = "the mean over the batch's tokens here; there the mean over answers of their sum"
        if x.get("dpo.sft_average_log_probs", False):
            how = "the mean over the batch's tokens here; there the mean over answers of their mean"
        x.changed("dpo.sft_loss_weight", how)
        x.changed("dpo.sft_average_log_probs", how)
    return fields


def _kl(x: Origin) -> Fields:
    if kind(x) != "grpo":
        return {}
    coefficient = x.get("loss_fn.reference_policy_kl_penalty", 0.01)
    if not coefficient or x.get("grpo.skip_reference_policy_logprobs_calculation", False):
        return {"algorithm.kl": {"coefficient": 0.0}}
    estimator = x.get("loss_fn.reference_policy_kl_type", "k3")
    if x.get("loss_fn.use_kl_in_reward", False):
        if estimator != "k1":
            x.changed("loss_fn.reference_policy_kl_type", "k1 here: others have a wrong gradient in a reward")
        return {"algorithm.kl": {"coefficient": coefficient, "estimator": "k1", "placement": "reward"}}
    by_engine = x.get("loss_fn.use_on_policy_kl_approximation", False)
    section = {
        "coefficient": coefficient,
        "estimator": estimator,
        "importance_weighted": True,
        "sampled_by": "engine" if by_engine else "current",
    }
    # Null means no clamp, and pydantic's default is NeMo-RL's 10.
    clamp = x.values.get("loss_fn.kl_output_clamp_value", 10.0)
    if clamp is not None:
        section["max_value"] = clamp
    bound = x.values.get("loss_fn.kl_input_clamp_value", 20.0)
    if bound != 20.0:
        x.changed("loss_fn.kl_input_clamp_value", "log ratios are clamped to 20 here, which is 5e8")
    return {"algorithm.kl": section}


def _correction(x: Origin) -> Fields:
    if kind(x) != "grpo" or not x.get("loss_fn.use_importance_sampling_correction", False):
        return {}
    name = x.get("loss_fn.truncated_importance_sampling_type")
    low = x.get("loss_fn.truncated_importance_sampling_ratio_min")
    high = x.get("loss_fn.truncated_importance_sampling_ratio")
    level = "sequence" if x.get("loss_fn.sequence_level_importance_ratios", False) else "token"
    section: dict[str, Any] = {"name": "tis", "level": level, "high": UNBOUNDED}
    match name:
        case "tis":
            section |= {"low": low or 0.0, "high": high}
        case "icepop":
            section |= {"name": "icepop", "low": low, "high": high}
        case "seq-mask-tis":
            section |= {"sequence_mask": {"low": low, "high": high}}
    return {"algorithm.correction": section}


def _filters(x: Origin) -> Fields:
    if kind(x) != "grpo":
        return {}
    section: dict[str, Any] = {}
    if x.get("grpo.overlong_filtering", False):
        section["drop_truncated"] = True
    if x.get("grpo.use_dynamic_sampling", False):
        batches = max(2, ceil(x.get("grpo.dynamic_sampling_max_gen_batches", 10)))
        section |= {"drop_equal_rewards": True, "refill": {"max_batches": batches, "at_cap": "stop"}}
        if _shaped(x):
            section["reward"] = "math"  # NeMo-RL compares the rewards before they are shaped
        if x.get("grpo.use_leave_one_out_baseline", True):
            how = "groups with different rewards are kept as a whole; there samples whose others are equal go"
            x.changed("grpo.use_dynamic_sampling", how)
    return {"algorithm.filters": section} if section else {}


def _shaped(x: Origin) -> bool:
    return bool(x.get("grpo.reward_shaping.enabled", False))


def _rewards(x: Origin) -> Fields:
    """DAPO's overlong penalty, and the scale of the environment's reward."""
    fields: dict[str, Any] = {}
    shaping, scaling = "grpo.reward_shaping", "grpo.reward_scaling"
    if _shaped(x) and x.get(f"{shaping}.stop_properly_penalty_coef") is None:
        longest, buffer = x.get(f"{shaping}.max_response_length"), x.get(f"{shaping}.overlong_buffer_length")
        fields["rewards"] = [
            {
                "function": "overlong_penalty",
                "weight": x.get(f"{shaping}.overlong_buffer_penalty", 1.0),
                "arguments": {"max_length": longest, "buffer": min(buffer, longest)},
            }
        ]
    if x.get(f"{scaling}.enabled", False):
        low, high = x.get(f"{scaling}.source_min", 0.0), x.get(f"{scaling}.source_max", 1.0)
        to_low, to_high = x.get(f"{scaling}.target_min", 0.0), x.get(f"{scaling}.target_max", 1.0)
        fields["env.weight"] = (to_high - to_low) / (high - low)
        how = "the reward is multiplied; what is added to all is left out, as baselines subtract it again"
        for name in ("source_min", "source_max", "target_min", "target_max"):
            x.changed(f"{scaling}.{name}", how, changes_result=False)
    return fields


def _asynchronous(x: Origin) -> Fields:
    """Both of its asynchronous loops: the older `async_grpo` and the single controller's `async_rl`."""
    old, new = "grpo.async_grpo", "async_rl.sampler"
    if x.has_section("async_rl"):
        age = x.get(f"{new}.max_staleness_versions", x.get(f"{new}.max_lookahead_versions", 0))
        restarts = x.get("async_rl.recompute_kv_cache_after_weight_updates", False)
        if x.get(f"{new}.name") not in ("in_order", None):
            x.changed(f"{new}.name", "groups are trained in the order in which they finish")
        fields = {"algorithm.max_staleness": age} if age else {}
        return fields | ({"generation.on_update": "restart" if restarts else "continue"} if age else {})
    if not x.get(f"{old}.enabled", False):
        return {}
    on_update = "finish"
    if x.get(f"{old}.in_flight_weight_updates", False):
        restarts = x.get(f"{old}.recompute_kv_cache_after_weight_updates", False)
        on_update = "restart" if restarts else "continue"
    if _colocated(x):
        raise CannotImport(f"{old}.enabled: engines that share the policy's GPUs cannot sample ahead here")
    age = x.get(f"{old}.max_trajectory_age_steps", 1)
    return {"algorithm.max_staleness": age, "generation.on_update": on_update}


def _validation(x: Origin) -> Fields:
    section = kind(x)
    period, start = x.get(f"{section}.val_period", 0), x.get(f"{section}.val_at_start", False)
    end = x.get(f"{section}.val_at_end", False)
    result: dict[str, Any] = {"at_start": start, "at_end": end}
    if period > 0:
        result["period"] = period
    if not (period > 0 or start or end):
        return {}
    if section != "grpo":
        batches, size = x.get(f"{section}.val_batches", -1), x.get(f"{section}.val_global_batch_size", 1)
        if batches > 0:
            result["num_prompts"] = batches * size
        if section == "sft":
            result["generate"] = False
        return {"algorithm.validation": result}
    if prompts := x.get("grpo.max_val_samples"):
        result["num_prompts"] = prompts
    if (samples := x.get("grpo.val_num_generations_per_prompt", 1)) > 1:
        result |= {"num_generations_per_prompt": samples, "pass_at_k": [1, samples]}
    names = ("temperature", "top_p", "top_k")
    own, shared = (tuple(x.get(f"{_G}.{prefix}{name}") for name in names) for prefix in ("val_", ""))
    if own != shared and own != (None, None, None):
        top_k, top_p = own[2], own[1] if own[1] is not None else 1.0
        result["sampling"] = sampling(own[0] if own[0] is not None else 1.0, top_p, top_k)
        if samples > 1 and own[0] == 0:
            del result["num_generations_per_prompt"], result["pass_at_k"]
    return {"algorithm.validation": result}


# Devices.


def _gpus(x: Origin) -> tuple[int, int]:
    """GPUs of the policy and of generation, which are the same if they share."""
    nodes, per_node = x.get("cluster.num_nodes", 1), x.get("cluster.gpus_per_node", 1)
    total = nodes * per_node
    if kind(x) != "grpo" or _colocated(x):
        return total, total
    resources = f"{_G}.colocated.resources"
    taken = x.get(f"{resources}.num_nodes", 1) * x.get(f"{resources}.gpus_per_node", per_node)
    if nodes > 1 and x.get(f"{resources}.num_nodes") is None:
        raise CannotImport(f"{resources}.num_nodes: give the nodes of generation")
    return total - taken, taken


def _colocated(x: Origin) -> bool:
    return bool(x.get(f"{_G}.colocated.enabled", True))


def _layout(x: Origin) -> Fields:
    gpus, _ = _gpus(x)
    if x.get(f"{_M}.enabled", False):
        x.skip(_D, f"{_M}.enabled is true, so nothing uses it")
        names = {
            "tensor": "tensor_model",
            "pipeline": "pipeline_model",
            "context": "context",
            "expert": "expert_model",
            "expert_tensor": "expert_tensor",
        }
        sizes = {ours: x.get(f"{_M}.{name}_parallel_size", 1) for ours, name in names.items()}
        fields = dict(layout(gpus, sizes, _M))
        for ours, stage in (("layers_in_first_stage", "first"), ("layers_in_last_stage", "last")):
            layers = x.get(f"{_M}.num_layers_in_{stage}_pipeline_stage")
            if layers is not None and sizes["pipeline"] > 1:
                fields[f"policy.layout.{ours}"] = layers
        splits = x.get(f"{_M}.sequence_parallel", False)
    else:
        x.skip(_M, f"{_M}.enabled is false, so nothing uses it")
        sizes = {name: x.get(f"{_D}.{name}_parallel_size", 1) for name in ("tensor", "context", "expert")}
        fields = dict(layout(gpus, sizes, _D))
        splits = x.get(f"{_D}.sequence_parallel", False)
    if splits and sizes["tensor"] > 1:
        fields["policy.layout.sequence_parallel"] = True
    return fields


_SIZES = (
    *(f"{_M}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context")),
    *(f"{_M}.{name}_parallel_size" for name in ("expert_model", "expert_tensor")),
    *(f"{_M}.num_layers_in_{stage}_pipeline_stage" for stage in ("first", "last")),
    *(f"{_M}.sequence_parallel", f"{_M}.enabled"),
)
_FSDP_SIZES = tuple(
    f"{_D}.{name}"
    for name in (
        *("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"),
        *("sequence_parallel", "enabled"),
    )
)
_SHARDING = "data parallelism shards the optimizer's state, and not the weights as FSDP does: more memory"


def _recompute(x: Origin) -> Fields:
    if not x.get(f"{_M}.enabled", False):
        full = x.get(f"{_D}.activation_checkpointing", False)
        return {"policy.recompute": {"name": "full"}} if full else {}
    if not x.get(f"{_M}.activation_checkpointing", False):
        return {}
    if x.get(f"{_M}.recompute_granularity", "full") == "full":
        return {"policy.recompute": {"name": "full"}}
    known = ("core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj")
    modules = x.get(f"{_M}.recompute_modules", ["core_attn"])
    return {"policy.recompute": {"name": "selective", "modules": [name for name in modules if name in known]}}


def _micro_batches(x: Origin) -> Fields:
    length = x.get("policy.max_total_sequence_length", 0)
    tokens = length * x.get("policy.train_micro_batch_size", 1)
    for name in ("sequence_packing", "dynamic_batching"):
        if x.get(f"policy.{name}.enabled", False):
            tokens = int(x.get(f"policy.{name}.train_mb_tokens", tokens))
    if (longest := x.get("data.max_input_seq_length")) is not None:
        why = "prompts are bounded by policy.max_sequence_length; there longer ones are left out"
        x.lost("data.max_input_seq_length", why, changes_result=longest < length)
    least = 2 * length if kind(x) in ("dpo", "rm") else length  # a pass holds both answers of a pair
    return {"policy.max_sequence_length": length, "policy.micro_batch_tokens": max(tokens, least)}


_MICRO = tuple(
    f"policy.{name}"
    for name in (
        *("train_micro_batch_size", "sequence_packing.enabled", "sequence_packing.train_mb_tokens"),
        *("dynamic_batching.enabled", "dynamic_batching.train_mb_tokens", "max_total_sequence_length"),
    )
)


def _optimizer(x: Origin) -> Fields:
    return _megatron_optimizer(x) if x.get(f"{_M}.enabled", False) else _torch_optimizer(x)


def _megatron_optimizer(x: Origin) -> Fields:
    o, s = f"{_M}.optimizer", f"{_M}.scheduler"
    why = f"{_M}.enabled is true, so nothing uses it"
    x.skip("policy.optimizer", why)
    for key in ("policy.optimizer", "policy.scheduler"):
        x.lost(key, why, changes_result=False)
    name, lr = x.get(f"{o}.optimizer", "adam"), float(x.get(f"{o}.lr", 1e-6))
    section: dict[str, Any] = {"name": "adam", "lr": lr, "weight_decay": x.get(f"{o}.weight_decay", 0.0)}
    if name == "adam":
        section |= {"beta1": x.get(f"{o}.adam_beta1", 0.9), "beta2": x.get(f"{o}.adam_beta2", 0.999)}
        section |= {"eps": float(x.get(f"{o}.adam_eps", 1e-8))}
        section |= {"on_host": True} if x.get(f"{o}.optimizer_cpu_offload", False) else {}
    elif name == "sgd":
        section |= {"name": "sgd", "momentum": x.get(f"{o}.sgd_momentum", 0.9)}
    else:
        raise CannotImport(f"{o}.optimizer = {name}: this optimizer is not imported")
    schedule: dict[str, Any] = {}
    if warmup := x.get(f"{s}.lr_warmup_iters", 0):
        start = min(float(x.get(f"{s}.lr_warmup_init", 0.0)) / lr, 1.0)
        schedule = {"warmup_steps": warmup, "warmup_start": start, "first_step": 0}
    style = x.get(f"{s}.lr_decay_style", "constant")
    if style in ("linear", "cosine"):
        schedule |= {"name": style, "decay_steps": x.get(f"{s}.lr_decay_iters", 1000), "first_step": 0}
        schedule |= {"min_lr": float(x.get(f"{o}.min_lr", 0.0))}
    elif style != "constant":
        raise CannotImport(f"{s}.lr_decay_style = {style}: this schedule is not imported")
    fields: dict[str, Any] = {"policy.optimizer": section}
    return fields | ({"policy.schedule": schedule} if schedule else {})


def _torch_optimizer(x: Origin) -> Fields:
    k = "policy.optimizer.kwargs"
    name = str(x.get("policy.optimizer.name", "AdamW")).rpartition(".")[2]
    if name not in ("AdamW", "FusedAdam", "Adam"):
        raise CannotImport(f"policy.optimizer.name = {name}: this optimizer is not imported")
    betas = x.get(f"{k}.betas", [0.9, 0.999])
    section: dict[str, Any] = {
        "lr": float(x.get(f"{k}.lr", 1e-3)),
        "weight_decay": x.get(f"{k}.weight_decay", 0.01),
        **{"beta1": betas[0], "beta2": betas[1], "eps": float(x.get(f"{k}.eps", 1e-8))},
    }
    for moment in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if (given := x.get(f"{k}.{moment}")) is not None:
            section[moment] = str(given).rpartition(".")[2]
    fields: dict[str, Any] = {"policy.optimizer": {"name": "adam", **section}}
    schedule = _torch_schedule(x)
    return fields | ({"policy.schedule": schedule} if schedule else {})


def _torch_schedule(x: Origin) -> dict[str, Any]:
    """LinearLR up, then constant or cosine, as a SequentialLR of torch."""
    parts = x.get("policy.scheduler", [])
    parts = parts if isinstance(parts, list) else [parts]
    schedule: dict[str, Any] = {}
    for part in (part for part in parts if "name" in part):
        name, given = part["name"].rpartition(".")[2], part.get("kwargs", {})
        match name:
            case "LinearLR" if given.get("end_factor", 1.0) == 1.0 and not schedule:
                if given.get("start_factor", 1 / 3) < 1:
                    steps, start = given.get("total_iters", 5), given.get("start_factor", 1 / 3)
                    schedule = {"warmup_steps": int(steps), "warmup_start": start, "first_step": 0}
            case "ConstantLR" if given.get("factor", 1 / 3) == 1.0:
                pass
            case "CosineAnnealingLR":
                end = schedule.get("warmup_steps", 0) + int(given["T_max"])
                schedule |= {"name": "cosine", "decay_steps": end, "first_step": 0}
                schedule |= {"min_lr": float(given.get("eta_min", 0.0))}
            case _:
                x.changed("policy.scheduler", f"{name} has no counterpart and is left out")
    return schedule


_OPTIMIZER = tuple(
    f"{_M}.{name}"
    for name in (
        *("optimizer.optimizer", "optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay"),
        *("optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.adam_eps", "optimizer.sgd_momentum"),
        *("optimizer.optimizer_cpu_offload", "scheduler.lr_warmup_iters", "scheduler.lr_warmup_init"),
        *("scheduler.lr_decay_style", "scheduler.lr_decay_iters"),
    )
)
_TORCH_OPTIMIZER = (
    *("policy.optimizer.name", "policy.optimizer", "policy.scheduler"),
    *(f"policy.optimizer.kwargs.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
    *(f"policy.optimizer.kwargs.{name}" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")),
)


def _lora(x: Origin) -> Fields:
    section = f"{_M}.peft" if x.get(f"{_M}.enabled", False) else f"{_D}.lora_cfg"
    if not x.get(f"{section}.enabled", False):
        return {}
    names = x.get(f"{section}.target_modules", [])
    if x.get(f"{section}.match_all_linear", False):
        names = []
    targets = lora_targets(x, f"{section}.target_modules", names)
    rank, alpha = x.get(f"{section}.dim", 8), x.get(f"{section}.alpha", 32)
    return {"policy.lora": {"rank": rank, "alpha": alpha, "targets": targets}}


_LORA = tuple(
    f"{section}.{name}"
    for section in (f"{_M}.peft", f"{_D}.lora_cfg")
    for name in ("enabled", "dim", "alpha", "target_modules", "match_all_linear")
)


def _fp8(x: Origin) -> Fields:
    if not (x.get(f"{_M}.enabled", False) and x.get(f"{_M}.fp8_cfg.enabled", False)):
        return {}
    number, recipe = x.get(f"{_M}.fp8_cfg.fp8", "hybrid"), x.get(f"{_M}.fp8_cfg.fp8_recipe", "tensorwise")
    return {"policy.fp8": {"format": number, "recipe": recipe}}


def _router(x: Origin) -> Fields:
    if not x.get(f"{_M}.enabled", False):
        return {}
    fields: dict[str, Any] = {}
    has_experts = x.get(f"{_M}.expert_model_parallel_size", 1) > 1
    if x.get(f"{_M}.freeze_moe_router", False) and has_experts:
        fields["policy.moe.freeze_router"] = True
    balance = x.get(f"{_M}.moe_router_load_balancing_type", "none")
    why = "its auxiliary loss; `policy.moe.load_balancing_loss_coefficient` has that of each sequence"
    x.lost(f"{_M}.moe_router_load_balancing_type", why, changes_result=has_experts and balance != "none")
    rate = x.get(f"{_M}.moe_router_bias_update_rate", 0.0)
    why = "the bias of routers, in models that have one, is not updated"
    x.lost(f"{_M}.moe_router_bias_update_rate", why, changes_result=has_experts and rate > 0)
    if (coefficient := x.get(f"{_M}.moe_aux_loss_coeff", 0.0)) > 0:
        fields["policy.moe.load_balancing_loss_coefficient"] = coefficient
        x.changed(f"{_M}.moe_aux_loss_coeff", "the balance loss is of each sequence here")
    return fields


# Generation.


def _generation(x: Origin) -> Fields:
    if kind(x) != "grpo":
        return {}
    backend, (_, gpus) = x.get(f"{_G}.backend", "vllm"), _gpus(x)
    # Sampling ends at the length of the conversation in both; a prompt has a token.
    longest = x.get("policy.max_total_sequence_length", 2) - 1
    section: dict[str, Any] = {
        "backend": backend,
        "max_new_tokens": min(x.get(f"{_G}.max_new_tokens", longest), longest),
    }
    engine = f"{_G}.{backend}_cfg"
    match backend:
        case "vllm":
            section |= _vllm(x, gpus)
        case "megatron":
            if not _colocated(x):
                raise CannotImport(f"{_G}.colocated.enabled: the policy's own processes sample here")
        case "trtllm":
            if _colocated(x):
                raise CannotImport(f"{_G}.colocated.enabled: TensorRT-LLM has GPUs of its own here")
            tensor = x.get(f"{engine}.tensor_parallel_size", 1)
            section |= {"tensor_parallel_size": tensor, "replicas": replicas(gpus, tensor, engine)}
            for name in ("max_batch_size", "max_num_tokens"):
                if (value := x.get(f"{engine}.{name}")) is not None:
                    section[name] = max(value, x.get("policy.max_total_sequence_length", 0)) if "num" in name else value
        case "sglang" | "dynamo":
            server = f"{engine}.sglang_server_config.num_gpus_per_engine"
            tensor = x.get(server, x.get(f"{engine}.tp_size", x.get(f"{_V}.tensor_parallel_size", 1)))
            x.changed(f"{_G}.backend", "vLLM samples; another engine's rounding differs", changes_result=False)
            section |= {"backend": "vllm", **_engines(x, gpus, tensor, 1)}
            memory = x.get(f"{engine}.mem_fraction_static", x.get(f"{_V}.gpu_memory_utilization"))
            section |= {"gpu_memory_utilization": memory} if memory is not None else {}
        case _:
            raise CannotImport(f"{_G}.backend = {backend}: this engine is not imported")
    for name in ("stop_token_ids", "stop_strings"):
        if values := x.get(f"{_G}.{name}"):
            section[name] = values
    section["sampling"] = _sampling(x)
    return {"generation": section}


def _sampling(x: Origin) -> dict[str, Any]:
    """Training requires the logprobs of all tokens, which NeMo-RL filters again as the engine did."""
    for name, neutral in (("top_p", (None, 1.0)), ("top_k", (None, -1))):
        if x.values.get(f"{_G}.{name}") not in neutral and x.get(f"{_G}.backend") != "megatron":
            x.lost(f"{_G}.{name}", "the loss would need the tokens that the engine's filter kept; left out")
    temperature = x.get(f"{_G}.temperature", 1.0)
    if x.get(f"{_G}.backend") == "megatron":
        return sampling(temperature, x.get(f"{_G}.top_p", 1.0), x.get(f"{_G}.top_k"))
    return sampling(temperature, 1.0, None)


def _engines(x: Origin, gpus: int, tensor: int, stages: int) -> dict[str, Any]:
    section: dict[str, Any] = {"replicas": replicas(gpus, tensor * stages, f"{_V}.tensor_parallel_size")}
    section |= {"tensor_parallel_size": tensor} if tensor > 1 else {}
    section |= {"pipeline_parallel_size": stages} if stages > 1 else {}
    return section | ({"colocated": True} if _colocated(x) else {})


def _vllm(x: Origin, gpus: int) -> dict[str, Any]:
    tensor, stages = x.get(f"{_V}.tensor_parallel_size", 1), x.get(f"{_V}.pipeline_parallel_size", 1)
    section = _engines(x, gpus, tensor, stages)
    arguments = x.below(f"{_G}.vllm_kwargs")
    if x.get(f"{_V}.expert_parallel_size", 1) > 1 or x.get(f"{_V}.enable_expert_parallel", False):
        arguments["enable_expert_parallel"] = True
        if x.get(f"{_V}.expert_parallel_size", 1) > tensor * stages:
            how = "experts are spread over the GPUs of an engine, and not over several engines"
            x.changed(f"{_V}.expert_parallel_size", how, changes_result=False)
    for name in ("gpu_memory_utilization", "kv_cache_dtype"):
        if (value := x.get(f"{_V}.{name}")) not in (None, "auto"):
            section[name] = "fp8" if str(value).startswith("fp8") else value
    if x.get(f"{_V}.enforce_eager", False):
        section["enforce_eager"] = True
    if x.values.get(f"{_V}.enable_prefix_caching") is False:
        section["enable_prefix_caching"] = False
    if x.get(f"{_V}.precision") == "fp8":
        section |= {"quantization": "fp8"}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if name in arguments:
            section[name] = arguments.pop(name)
    for name in ("kv_cache_memory_bytes", "enable_chunked_prefill", "tokenizer"):
        if arguments.pop(name, None) is not None:
            x.lost(f"{_G}.vllm_kwargs.{name}", "it follows from other fields here", changes_result=False)
    return section | ({"vllm_kwargs": arguments} if arguments else {})


_GENERATION = (
    *(f"{_G}.{name}" for name in ("backend", "max_new_tokens", "temperature", "top_p", "top_k")),
    *(f"{_G}.{name}" for name in ("stop_token_ids", "stop_strings", "colocated.enabled")),
    *(f"{_G}.colocated.resources.{name}" for name in ("num_nodes", "gpus_per_node")),
    *(f"{_V}.{name}_parallel_size" for name in ("tensor", "pipeline", "expert")),
    *(f"{_V}.{name}" for name in ("gpu_memory_utilization", "kv_cache_dtype", "enforce_eager", "precision")),
    *(f"{_V}.{name}" for name in ("enable_prefix_caching", "enable_expert_parallel")),
    f"{_G}.vllm_kwargs.*",
    *(f"{_G}.trtllm_cfg.{name}" for name in ("tensor_parallel_size", "max_batch_size", "max_num_tokens")),
    f"{_G}.sglang_cfg.sglang_server_config.num_gpus_per_engine",
    *(f"{_G}.sglang_cfg.{name}" for name in ("tp_size", "mem_fraction_static")),
)


# Checkpoints, tokenizer.


def _checkpoints(x: Origin) -> Fields:
    section: dict[str, Any] = {}
    if not x.get("checkpointing.enabled", True):
        return {"checkpointing": {"enabled": False}}
    if (period := x.get("checkpointing.save_period", 10)) > 0:
        section["period"] = period
    section["keep"] = x.get("checkpointing.keep_top_k", 2)
    scheduled = x.get(f"{kind(x)}.val_period", 0) > 0
    if x.get("checkpointing.metric_name") == "val:accuracy" and scheduled and kind(x) == "grpo":
        section |= {"metric": "validation/accuracy"}
        section |= {} if x.get("checkpointing.higher_is_better", True) else {"higher_is_better": False}
    elif x.get("checkpointing.metric_name") is not None:
        why = "the newest checkpoints are kept; set checkpointing.metric to one of this run"
        x.lost("checkpointing.metric_name", why, changes_result=False)
        x.lost("checkpointing.higher_is_better", why, changes_result=False)
    if x.get("checkpointing.save_consolidated", False):
        section["save_hf"] = True
    return {"checkpointing": section}


def _tokenizer(x: Origin) -> Fields:
    name = x.get("policy.tokenizer.name")
    if name in (None, x.get("policy.model_name")):
        return {}
    return {"policy.tokenizer.path": name}


_SETUP: tuple[Rule, ...] = (
    take("policy.model_name", "policy.model_path"),
    Part(("policy.tokenizer.name",), ("policy.tokenizer.path",), _tokenizer),
    take("policy.precision", "policy.precision"),
    take("policy.max_grad_norm", "policy.max_grad_norm"),
    take_given("policy.logprob_chunk_size", "policy.logprob_chunk_tokens"),
    Part(_MICRO, ("policy.max_sequence_length", "policy.micro_batch_tokens"), _micro_batches),
    Part(_SIZES, ("policy.layout",), _layout),
    Part(_FSDP_SIZES, ("policy.layout",), lambda x: {}, _SHARDING),
    Part(
        (
            *(f"{_M}.activation_checkpointing", f"{_D}.activation_checkpointing"),
            *(f"{_M}.recompute_granularity", f"{_M}.recompute_modules"),
        ),
        ("policy.recompute",),
        _recompute,
    ),
    Part(_OPTIMIZER, ("policy.optimizer", "policy.schedule"), _optimizer),
    Part(
        _TORCH_OPTIMIZER,
        ("policy.optimizer", "policy.schedule"),
        lambda x: {},
        "norms and biases have no weight decay here",
    ),
    Part(_LORA, ("policy.lora",), _lora),
    Part(tuple(f"{_M}.fp8_cfg.{name}" for name in ("enabled", "fp8", "fp8_recipe")), ("policy.fp8",), _fp8),
    Part(
        (f"{_M}.freeze_moe_router", f"{_M}.moe_aux_loss_coeff"),
        ("policy.moe.freeze_router", "policy.moe.load_balancing_loss_coefficient"),
        _router,
    ),
    take("policy.router_replay.enabled", "policy.moe.router_replay"),
    take("cluster.num_nodes", "cluster.num_nodes"),
    take("cluster.gpus_per_node", "cluster.gpus_per_node"),
    take("logger.tensorboard_enabled", "logger.tensorboard"),
    take("checkpointing.checkpoint_dir", "run_dir"),
    Part(
        tuple(
            f"checkpointing.{name}"
            for name in (
                *("enabled", "save_period", "keep_top_k", "metric_name", "higher_is_better"),
                "save_consolidated",
            )
        ),
        ("checkpointing",),
        _checkpoints,
    ),
)


def _each(*names: str) -> tuple[str, ...]:
    """The keys of all algorithms' sections."""
    return tuple(f"{section}.{name}" for section in KINDS for name in names)


_TRAINING: tuple[Rule, ...] = (
    Part(
        ("policy.train_global_batch_size", *_ADVANTAGE),
        ("algorithm",),
        _algorithm,
    ),
    Part(("policy.train_global_batch_size",), ("algorithm.batch_size",), _offline_batch),
    Part(_each("max_num_steps", "max_num_epochs"), ("algorithm.num_steps",), _num_steps),
    Part(_each("seed"), ("seed",), lambda x: {"seed": x.get(f"{kind(x)}.seed", 42)}),
    Part(
        (
            *(f"loss_fn.ratio_clip_{name}" for name in ("min", "max", "c")),
            *("loss_fn.token_level_loss", "loss_fn.disable_ppo_ratio", "loss_fn.use_cispo"),
            *("loss_fn.sequence_level_importance_ratios", "loss_fn.positive_example_nll_weight"),
            *("dpo.reference_policy_kl_penalty", "dpo.preference_average_log_probs"),
            *("dpo.sft_loss_weight", "dpo.sft_average_log_probs"),
        ),
        ("algorithm.loss", "algorithm.likelihood", "algorithm.sft_coefficient"),
        _loss,
    ),
    Part(
        (
            *(f"loss_fn.reference_policy_kl_{name}" for name in ("penalty", "type")),
            *(f"loss_fn.kl_{name}_clamp_value" for name in ("input", "output")),
            *("loss_fn.use_on_policy_kl_approximation", "loss_fn.use_kl_in_reward"),
            "grpo.skip_reference_policy_logprobs_calculation",
        ),
        ("algorithm.kl",),
        _kl,
    ),
    Part(
        (
            "loss_fn.use_importance_sampling_correction",
            *(f"loss_fn.truncated_importance_sampling_{name}" for name in ("type", "ratio", "ratio_min")),
        ),
        ("algorithm.correction",),
        _correction,
    ),
    Part(
        (
            *("grpo.overlong_filtering", "grpo.use_dynamic_sampling"),
            "grpo.dynamic_sampling_max_gen_batches",
        ),
        ("algorithm.filters",),
        _filters,
    ),
    Part(
        (
            *(f"grpo.reward_shaping.{name}" for name in ("enabled", "max_response_length")),
            *(f"grpo.reward_shaping.overlong_buffer_{name}" for name in ("length", "penalty")),
            "grpo.reward_scaling.enabled",
            *(f"grpo.reward_scaling.{name}_{end}" for name in ("source", "target") for end in ("min", "max")),
        ),
        ("rewards", "env.weight"),
        _rewards,
    ),
    Part(
        (
            *("grpo.async_grpo.enabled", "grpo.async_grpo.max_trajectory_age_steps"),
            "grpo.async_grpo.in_flight_weight_updates",
            "grpo.async_grpo.recompute_kv_cache_after_weight_updates",
            *("async_rl.sampler.max_staleness_versions", "async_rl.sampler.max_lookahead_versions"),
            *("async_rl.sampler.name", "async_rl.recompute_kv_cache_after_weight_updates"),
        ),
        ("algorithm.max_staleness", "generation.on_update"),
        _asynchronous,
    ),
    Part(
        (
            *_each("val_period", "val_at_start", "val_at_end", "val_batches", "val_global_batch_size"),
            *("grpo.max_val_samples", "grpo.val_num_generations_per_prompt"),
            *(f"{_G}.val_{name}" for name in ("temperature", "top_p", "top_k")),
        ),
        ("algorithm.validation",),
        _validation,
    ),
    Part(_GENERATION, ("generation",), _generation),
)

_OFF = (None, False, 0, 0.0, "none", [], {})
_WITHOUT: tuple[Rule, ...] = (
    Ignored(
        ("loss_fn.force_on_policy_ratio",),
        "with one update in a step the ratio is 1 here, too; NeMo-RL requires that",
    ),
    Lost(("grpo.reward_shaping.stop_properly_penalty_coef",), "rewards of truncated answers", (None, 1.0)),
    Lost(
        ("grpo.seq_logprob_error_threshold",),
        "sequences are not left out by the largest error; `algorithm.correction.sequence_mask` uses the mean",
    ),
    Lost(("grpo.advantage_clip_low", "grpo.advantage_clip_high"), "advantages are not clipped"),
    Lost(
        ("grpo.invalid_tool_call_advantage", "grpo.malformed_thinking_advantage"),
        "give the behavior a reward of its own",
    ),
    Lost(("reward_penalties.*",), "penalties of NeMo-Gym's rollouts; give them as rewards"),
    Lost(("grpo.adv_estimator.reward_weights",), "of GDPO"),
    Lost(("grpo.max_rollout_turns",), "turns are a field of an environment", (1, None)),
    Lost(("grpo.stop_at_validation_metric",), "`algorithm.early_stop` watches for the lack of improvement"),
    Lost(("grpo.val_start_at",), "validation starts with the run", (-1, 0, None)),
    Ignored(("grpo.stop_at_validation_threshold",), "of grpo.stop_at_validation_metric"),
    Ignored(
        ("grpo.batch_multiplier",), "how much is sampled at a time for dynamic sampling; the result is the same"
    ),
    Ignored(
        (
            *("grpo.val_batch_size", "grpo.debug_payload_metrics", "grpo.deduplicate_multimodal_data"),
            *("grpo.calculate_advantages_on_gpu", "grpo.async_grpo", "grpo.async_grpo.max_generation_failures"),
            *_each("val_micro_batch_size"),
        ),
        "of its own workers",
    ),
    Lost(("dpo.preference_loss_weight",), "the loss of pairs has the weight 1", (1, 1.0)),
    Lost(("sft.only_unmask_final",), "every turn of the assistant is trained on"),
    Lost(("policy.hf_config_overrides.*",), "edit the config.json of the model folder", _OFF),
    Lost(("policy.draft.enabled",), "no draft model is trained"),
    Ignored(("policy.draft.*",), "of the draft model, which is not trained"),
    Lost((f"{_M}.mtp_num_layers", f"{_M}.mtp_loss_scaling_factor"), "multi-token prediction is not trained", _OFF),
    Ignored((f"{_M}.mtp_use_repeated_layer", f"{_M}.mtp_detach_heads"), "of multi-token prediction"),
    Lost((f"{_M}.moe_router_enable_expert_bias",), "the bias of routers is as in the model's config.json"),
    Lost(
        (f"{_M}.peft.dropout", f"{_D}.lora_cfg.dropout"), "adapters have no dropout; nearly all recipes have 0", _OFF
    ),
    Lost(
        (f"{_M}.peft.exclude_modules", f"{_D}.lora_cfg.exclude_modules"),
        "matrices with adapters are named, not excluded",
        _OFF,
    ),
    Ignored(
        (
            *(f"{_M}.peft.{name}" for name in ("dropout_position", "lora_A_init_method", "lora_B_init_method")),
            *(f"{_M}.peft.{name}" for name in ("a2a_experimental", "lora_dtype")),
            *(f"{_D}.lora_cfg.{name}" for name in ("dropout_position", "use_triton")),
            f"{_D}.lora_cfg.lora_A_init",
        ),
        "adapters start as B = 0 and a random A, and compute in the policy's precision",
    ),
    Lost(
        (f"{_M}.freeze_config.*", f"{_D}.automodel_kwargs.freeze_config.*"),
        "parts of a model are not frozen; models here are language models",
        _OFF,
    ),
    Lost((f"{_M}.model_overrides.*", f"{_M}.moe_enable_deepep"), "not passed to Megatron", _OFF),
    Lost((f"{_M}.optimizer.params_dtype",), "weights are copied in float32", ("float32", None)),
    Lost((f"{_M}.optimizer.fp16",), "training is in bfloat16 or float32"),
    Lost((f"{_M}.optimizer.clip_grad",), "policy.max_grad_norm is used", (1.0, None, 0, 0.0)),
    Lost(
        (f"{_M}.scheduler.weight_decay_incr_style",), "the weight decay is constant", ("constant", None)
    ),
    Ignored(
        (f"{_M}.scheduler.start_weight_decay", f"{_M}.scheduler.end_weight_decay"),
        "the weight decay is that of the optimizer",
    ),
    Lost(("policy.quant_cfg",), "give the format as policy.quantization", (None,)),
    Lost((f"{_G}.quant_cfg", f"{_G}.real_quant"), "give the format as policy.quantization"),
    Lost((f"{_M}.scheduler.override_opt_param_scheduler", f"{_M}.train_iters"), "of checkpoints", (None, True)),
    Lost(
        ("policy.tokenizer.chat_template",),
        "write it into a file and set policy.tokenizer.chat_template to that",
        (None, "default"),
    ),
    Lost(("policy.tokenizer.chat_template_kwargs.*",), "chat templates get no arguments of the user's", _OFF),
    Ignored(("policy.tokenizer.*",), "of its tokenizer's implementation"),
    Lost((f"{_V}.num_first_layers_in_bf16", f"{_V}.num_last_layers_in_bf16"), "of FP8 in vLLM", _OFF),
    Lost((f"{_V}.quantization_ignored_layer_kws",), "vLLM decides which layers stay in bfloat16", _OFF),
    Lost((f"{_V}.is_mx",), "set policy.quantization.format to mxfp8"),
    Lost((f"{_V}.logprobs_mode",), "logprobs are those of the sampled distribution", ("processed_logprobs",)),
    Ignored(
        (f"{_M}.fp8_cfg.fp8_param", f"{_V}.use_deep_gemm"),
        "how FP8 is stored and multiplied; the policy's weights stay in bfloat16",
    ),
    Ignored(
        (f"{_M}.moe_router_dtype",), "router logits are computed in float32; higher precision rounds less"
    ),
    Lost(("policy.dequantize_base_checkpoint", "policy.disable_modelopt_layer_spec"), "of its checkpoints", _OFF),
)

_HOW_FAST = "how it computes, and not what: kernels, memory, communication"
_WORKERS: tuple[Rule, ...] = (
    Ignored(("policy.megatron_cfg.*", "policy.dtensor_cfg.*", "policy.optimizer.kwargs.*"), _HOW_FAST),
    Ignored(("policy.generation.*",), "how the engine computes and receives weights"),
    Ignored(
        (
            *("policy.sequence_packing.*", "policy.dynamic_batching.*", "policy.logprob_batch_size"),
            *("policy.generation_batch_size", "policy.make_sequence_length_divisible_by"),
            *("policy.offload_optimizer_for_logprob", "policy.refit_buffer_size_gb"),
            *("policy.activation_checkpointing_enabled", "policy.reward_model_cfg.*"),
            "policy.quant_batch_size",
        ),
        _HOW_FAST,
    ),
    Ignored(
        ("policy.quant_calib_data", "policy.quant_calib_size", "policy.quant_sequence_length"),
        "of the quantization, which is not imported",
    ),
    Ignored(("logger.*",), "trackers and their names; nemorl records all metrics in the run folder"),
    Ignored(("data_plane.*",), "how samples travel between processes"),
    Ignored(("async_rl.*",), "queues, retries and health checks; docs/faults.md has ours"),
    Ignored(("checkpointing.*",), "format and time of checkpoints"),
    Ignored(("cluster.*",), "ports and the topology of nodes; cluster.topology places workers"),
    Lost(("on_policy_distillation.*",), "distillation within GRPO"),
    Lost(("policy.generation.speculative_config",), "drafts"),
    Lost(("data.custom_dataloader", "data.num_prompts_per_dataloader"), "of several data loaders"),
)

RULES: tuple[Rule, ...] = (*_TRAINING, *_SETUP, *DATA_RULES, *_WITHOUT, *_WORKERS)
