"""NeMo-RL's keys of what is trained: batches, advantages, losses, filters, staleness and validation."""

from math import ceil
from typing import Any

from .nemo_rl_data import data_rows, has_loaders, repeats
from .nemo_rl_sections import (
    KINDS,
    aligns,
    distills,
    get,
    has_agents_teachers,
    has_rewards,
    is_online,
    kind,
    of_online,
)
from .rules import CannotImport, Fields, Origin, not_imported
from .shared import UNBOUNDED, batch, run_length, sampling

GENERATION = "policy.generation"
_MAX_LOG_RATIO = 20.0  # NeMo-RL's default, and ours


def algorithm(x: Origin) -> Fields:
    name = KINDS[kind(x)]
    if name == "reward_model":
        return {"algorithm.name": name, "policy.head": "scalar"}
    if aligns(x):
        return {"algorithm.name": "aligned_distillation", "algorithm.train_on": "all"}
    if not is_online(x):
        return {"algorithm.name": name}
    if name == "ppo":
        return {**batches(x), **values_and_advantage(x)}
    if has_agents_teachers(x):
        name = KINDS["distillation"]
    estimator = {} if name == KINDS["distillation"] else advantage(x)
    return {"algorithm.name": name, **batches(x), **estimator}


def batches(x: Origin) -> Fields:
    prompts = get(x, "num_prompts_per_step", 0)
    members = get(x, "num_generations_per_prompt", 1 if distills(x) else 0)
    per_update = x.get("policy.train_global_batch_size", 0)
    fields = {
        "algorithm.num_prompts_per_step": prompts,
        "algorithm.num_generations_per_prompt": members,
        "algorithm.num_minibatches": batch(prompts * members, per_update, "policy.train_global_batch_size"),
    }
    return fields | ({"algorithm.num_epochs": x.get("ppo.ppo_epochs", 4)} if kind(x) == "ppo" else {})


def updates_of_pass(x: Origin) -> int:
    """Optimizer steps of the policy in a pass over the batch, in which schedules advance by one there."""
    if not is_online(x) or x.has_section("async_rl"):
        return 1
    return int(batches(x)["algorithm.num_minibatches"])


def has_critic(x: Origin) -> bool:
    return kind(x) == "ppo" and x.get("ppo.adv_estimator.name", "gae") == "gae"


def values_and_advantage(x: Origin) -> Fields:
    """PPO's estimator, and how its critic learns."""
    estimator = "ppo.adv_estimator"
    whiten = x.get(f"{estimator}.normalize_advantages", True)
    match x.get(f"{estimator}.name", "gae"):
        case "gae":
            pass
        case "raw_reward":
            x.skip("value", "the advantage is the reward, so no critic is used")
            x.skip("value_loss_fn", "the advantage is the reward, so no critic is used")
            scaled = {"over": "tokens", "variance": "biased"} if whiten else {"normalization": "none"}
            return {"algorithm.name": "grpo", "algorithm.advantage": {"name": "reinforce", **scaled}}
        case name:
            raise not_imported(f"{estimator}.name", name, "estimator", ("gae", "raw_reward"))
    lam = x.get(f"{estimator}.gae_lambda", 0.95)
    of_policy = x.get(f"{estimator}.gae_lambda_policy", lam)
    of_values = x.get(f"{estimator}.gae_lambda_value", lam)
    alpha = x.get(f"{estimator}.length_adaptive_alpha", 0.0)
    section: dict[str, Any] = {"name": "gae", "gamma": x.get(f"{estimator}.gae_gamma", 1.0)}
    section |= {"length_adaptive_alpha": alpha} if alpha > 0 else {"lam": of_policy}
    if alpha > 0 or of_values != of_policy:
        section["critic_lam"] = of_values
    if not whiten:
        section["whiten"] = False
    learning: dict[str, Any] = {
        "value_clip": x.get("value_loss_fn.cliprange") or None,
        "loss_scale": x.get("value_loss_fn.scale", 1.0),
    }
    if warmup := x.get("ppo.policy_training_start_step", 0):
        learning["warmup_steps"] = warmup
    per_update, of_critic = (x.get(f"{model}.train_global_batch_size", 0) for model in ("policy", "value"))
    if of_critic not in (0, per_update):
        x.changed("value.train_global_batch_size", f"{per_update}, as many as the policy's updates have")
    fields = {"algorithm.advantage": section, "algorithm.critic": learning}
    return {"algorithm.name": "ppo", **fields}


def advantage(x: Origin) -> Fields:
    estimator = "grpo.adv_estimator"
    name = x.get(f"{estimator}.name", "grpo")
    normalize = x.get(f"{estimator}.normalize_rewards", x.get("grpo.normalize_rewards", True))
    alone = x.get(f"{estimator}.use_leave_one_out_baseline", x.get("grpo.use_leave_one_out_baseline", True))
    match name:
        case "grpo" | "gdpo":
            section: dict[str, Any] = {"normalize": normalize, "leave_one_out": alone}
            section |= {"name": "group"} if name == "grpo" else {"name": "gdpo", "batch_epsilon": 0.0}
            if normalize and alone:
                section["deviation"] = "others"
        case "reinforce_plus_plus" if x.get(f"{estimator}.minus_baseline", True):
            section = {"name": "group_then_batch", "over": "tokens", "variance": "biased"}
        case "reinforce_plus_plus":
            section = {"name": "reinforce", "over": "tokens", "variance": "biased"}
        case _:
            known = ("grpo", "gdpo", "opd", "reinforce_plus_plus")
            raise not_imported(f"{estimator}.name", name, "estimator", known)
    return {"algorithm.advantage": section}


ADVANTAGE = (
    *(f"grpo.adv_estimator.{name}" for name in ("name", "normalize_rewards", "use_leave_one_out_baseline")),
    "grpo.adv_estimator.minus_baseline",
    *("grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"),
    *of_online("num_prompts_per_step", "num_generations_per_prompt"),
)
VALUES = (
    *(f"ppo.adv_estimator.{name}" for name in ("name", "gae_gamma", "gae_lambda", "gae_lambda_policy")),
    *(f"ppo.adv_estimator.{name}" for name in ("gae_lambda_value", "length_adaptive_alpha")),
    *("ppo.adv_estimator.normalize_advantages", "ppo.ppo_epochs", "ppo.policy_training_start_step"),
    *("value_loss_fn.cliprange", "value_loss_fn.scale"),
)


def offline_batch(x: Origin) -> Fields:
    if is_online(x):
        return {}
    return {"algorithm.batch_size": x.get("policy.train_global_batch_size")}


def num_steps(x: Origin) -> Fields:
    section = kind(x)
    steps, epochs = x.get(f"{section}.max_num_steps"), x.get(f"{section}.max_num_epochs")
    per_step = x.get(f"{section}.num_prompts_per_step") or x.get("policy.train_global_batch_size", 1)
    if x.get(f"{section}.use_dynamic_sampling", False):
        per_step = int(per_step * x.get(f"{section}.batch_multiplier", 1.0))  # rows drawn at a time
    if has_loaders(x):
        x.lost(f"{section}.max_num_epochs", "several loaders have no end there", changes_result=False)
        epochs = None
    rows = data_rows(x)
    if epochs and epochs > 0 and rows is None and x.options.rows is None:
        how = "the rows of the data are not known, so max_num_steps alone ends the run; give --rows N"
        x.changed(f"{section}.max_num_epochs", how)
    length = run_length(x, steps, epochs if epochs and epochs > 0 else None, rows, per_step)
    return {"algorithm.num_steps": length}


def loss(x: Origin) -> Fields:
    """NeMo-RL's ClippedPGLossFn; of DPO only its own keys count."""
    match kind(x):
        case "dpo":
            return dpo(x)
        case "grpo" | "ppo" if not has_agents_teachers(x):
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
    if x.get("loss_fn.force_on_policy_ratio", False):
        shape = batches(x)
        several = shape["algorithm.num_minibatches"] * shape.get("algorithm.num_epochs", 1) > 1
        why = "with one update in a step the ratio is 1 here, too"
        x.lost("loss_fn.force_on_policy_ratio", why, changes_result=several)
    fields: dict[str, Any] = {"algorithm.loss": section}
    weight = x.get("loss_fn.positive_example_nll_weight", 0.0)
    if weight:
        fields["algorithm.likelihood"] = {"coefficient": weight, "min_reward": 1e-9}
    return fields


def dpo(x: Origin) -> Fields:
    average = x.get("dpo.preference_average_log_probs", False)
    section = {
        "beta": x.get("dpo.reference_policy_kl_penalty", 0.05),
        "logprobs": "mean" if average else "sum",
    }
    fields: dict[str, Any] = {"algorithm.loss": section}
    if weight := x.get("dpo.sft_loss_weight", 0.0):
        of_answers = "mean" if x.get("dpo.sft_average_log_probs", False) else "sum"
        fields["algorithm.sft_coefficient"] = weight
        fields["algorithm.sft_aggregation"] = f"seq-mean-token-{of_answers}"
    return fields


def kl(x: Origin) -> Fields:
    if not has_rewards(x) or has_agents_teachers(x):
        return {}
    coefficient = x.get("loss_fn.reference_policy_kl_penalty", 0.01)
    if not coefficient or get(x, "skip_reference_policy_logprobs_calculation", kind(x) == "ppo"):
        return {"algorithm.kl": {"coefficient": 0.0}}
    estimator = x.get("loss_fn.reference_policy_kl_type", "k3")
    if x.get("loss_fn.use_kl_in_reward", False):
        if estimator != "k1":
            x.changed("loss_fn.reference_policy_kl_type", "k1 here: others have a wrong gradient in a reward")
        section = {"coefficient": coefficient, "estimator": "k1", "placement": "reward"}
        return {"algorithm.kl": section | {"max_value": 10.0}}  # whatever the loss clamps
    by_engine = x.get("loss_fn.use_on_policy_kl_approximation", False)
    section = {
        "coefficient": coefficient,
        "placement": "loss",
        "estimator": estimator,
        "importance_weighted": True,
        "sampled_by": "engine" if by_engine else "current",
    }
    # Null means no clamp; an absent key has NeMo-RL's default.
    if (clamp := x.values.get("loss_fn.kl_input_clamp_value", _MAX_LOG_RATIO)) != _MAX_LOG_RATIO:
        section["max_log_ratio"] = clamp
    if (clamp := x.values.get("loss_fn.kl_output_clamp_value", 10.0)) is not None:
        section["max_value"] = clamp
    return {"algorithm.kl": section}


def correction(x: Origin) -> Fields:
    if not has_rewards(x):
        return {}
    section = _weights_of_samples(x)
    threshold, name = f"{kind(x)}.seq_logprob_error_threshold", section.get("name")
    if (factor := x.get(threshold)) is not None:
        distills, masked = has_agents_teachers(x), {"sequence_mask": {"max_mean_factor": factor}}
        if "sequence_mask" in section or (name == "icepop" and not distills):
            x.lost(threshold, "next to masks of another kind sequences are not left out by it")
        elif distills:
            x.changed(threshold, "tokens of sequences that are left out count in the divisor; there not")
            section = {"name": "none"} | section | masked
        else:
            section = {"name": "none"} | section | masked | {"divisor": "kept"}
    return {"algorithm.correction": section} if section else {}


def _weights_of_samples(x: Origin) -> dict[str, Any]:
    if not x.get("loss_fn.use_importance_sampling_correction", False):
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
    return section


def advantage_clip(x: Origin) -> Fields:
    bounds = {"low": x.get("grpo.advantage_clip_low"), "high": x.get("grpo.advantage_clip_high")}
    given = {name: float(value) for name, value in bounds.items() if value is not None}
    clips = kind(x) == "grpo" and not has_agents_teachers(x)
    return {"algorithm.advantage_clip": given} if given and clips else {}


FLAGGED_BY = ("env.nemo_gym.invalid_tool_call_patterns", "env.nemo_gym.thinking_tags")
_PATTERNS, _TAGS = FLAGGED_BY
_CALL_TEXTS = ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"]  # NeMo-RL's default


def flagged_turns(x: Origin) -> Fields:
    """Texts of calls that nothing executed, and tags of reasoning, which reasoning may have once."""
    calls, tags = x.get(_PATTERNS) or _CALL_TEXTS, x.get(_TAGS) or ["<think>", "</think>"]
    flags: dict[str, tuple[str, dict[str, Any]]] = {
        "invalid_tool_call": (_PATTERNS, {"texts": calls}),
        "malformed_thinking": (_TAGS, {"texts": tags, "max_in_reasoning": 1}),
    }
    fields: dict[str, Any] = {}
    for name, (texts, flag) in flags.items():
        if (advantage := x.get(f"grpo.{name}_advantage")) is None:
            x.lost(texts, f"grpo.{name}_advantage is not set", changes_result=False)
            continue
        if has_agents_teachers(x):
            for key in (f"grpo.{name}_advantage", texts):
                x.lost(key, "tokens have a teacher's logprobs, and no advantages that could be replaced")
            continue
        fields[f"algorithm.flagged_advantages.{name}"] = float(advantage)
        fields[f"env.turn_flags.{name}"] = flag
        if name == "malformed_thinking":
            how = "a further complete pair of tags in the content counts, which is taken out of it there"
            x.changed(f"grpo.{name}_advantage", how)
    return fields


def filters(x: Origin) -> Fields:
    if not has_rewards(x):
        return {}
    section: dict[str, Any] = {}
    if get(x, "overlong_filtering", False):
        section["drop_truncated"] = True
    if get(x, "use_dynamic_sampling", False):
        most = get(x, "dynamic_sampling_max_gen_batches", 10.0)
        batches = max(2, ceil(most))
        if batches != most:
            how = f"{batches}: at least 2, and whole batches"
            x.changed(f"{kind(x)}.dynamic_sampling_max_gen_batches", how)
        section |= {"drop_equal_rewards": True, "refill": {"max_batches": batches, "at_cap": "stop"}}
        if shaped(x):
            section["reward"] = "math"  # NeMo-RL compares the rewards before they are shaped
        if kind(x) == "grpo" and x.get("grpo.use_leave_one_out_baseline", True):
            how = "groups with different rewards are kept as a whole; there samples whose others are equal go"
            x.changed("grpo.use_dynamic_sampling", how)
    return {"algorithm.filters": section} if section else {}


def shaped(x: Origin) -> bool:
    return bool(get(x, "reward_shaping.enabled", False))


def rewards(x: Origin) -> Fields:
    """DAPO's overlong penalty, and the scale of the environment's reward."""
    if not has_rewards(x):
        return {}
    fields: dict[str, Any] = {}
    shaping, scaling = f"{kind(x)}.reward_shaping", f"{kind(x)}.reward_scaling"
    if has_agents_teachers(x):
        for section in (shaping, scaling):
            x.skip(section, "teachers are learned from, and rewards are only shown")
        return {}
    if (scale := x.get(f"{shaping}.stop_properly_penalty_coef")) is not None and shaped(x):
        fields["algorithm.truncated_reward"] = {"scale": float(scale)}
    elif shaped(x):
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
        if kind(x) == "ppo":  # a critic first has to learn it
            how = "the reward is multiplied, and what is added to all is a reward of its own"
            added = to_low - low * fields["env.weight"]
            constant = [{"function": "constant", "weight": added}] if added else []
            fields["rewards"] = [*fields.get("rewards", []), *constant]
        for name in ("source_min", "source_max", "target_min", "target_max"):
            x.changed(f"{scaling}.{name}", how, changes_result=False)
    return fields


def asynchronous(x: Origin) -> Fields:
    """Its asynchronous loops: `async_grpo` and `async_ppo`, and the single controller's `async_rl`."""
    old, new = f"{kind(x)}.async_{kind(x)}", "async_rl.sampler"
    if x.has_section("async_rl"):
        age = x.get(f"{new}.max_staleness_versions", x.get(f"{new}.max_lookahead_versions", 0))
        section, in_flight = "async_rl", True
        match x.get(f"{new}.name", "in_order"):
            case "windowed":
                x.changed(f"{new}.name", "sampling ahead ends at max_staleness steps; there at a full buffer")
            case "custom":
                raise CannotImport(f"{new}.name = custom: its class is not imported")
            case "weight_fifo":
                x.changed(f"{new}.name", "groups train as they finish; there the oldest weights come first")
    elif x.get(f"{old}.enabled", False):
        age, section = x.get(f"{old}.max_trajectory_age_steps", 1), old
        in_flight = x.get(f"{old}.in_flight_weight_updates", False)
    else:
        return {}
    recompute = f"{section}.recompute_kv_cache_after_weight_updates"
    on_update = "finish"
    if in_flight:
        on_update = "restart" if x.get(recompute, False) else "continue"
    if not age:
        return {}
    if colocated(x) and on_update != "restart":
        how = "sequences in progress are read again when engines have the devices again"
        x.changed(f"{old}.in_flight_weight_updates" if section == old else recompute, how)
        on_update = "restart"
    return {"algorithm.max_staleness": age, "generation.on_update": on_update}


def validation(x: Origin) -> Fields:
    section = kind(x)
    period, start = x.get(f"{section}.val_period", 0), x.get(f"{section}.val_at_start", False)
    end = x.get(f"{section}.val_at_end", False)
    result: dict[str, Any] = {"at_start": start, "at_end": end}
    if period > 0:
        result["period"] = period
    if not (period > 0 or start or end):
        return {}
    if not is_online(x):
        batches, size = x.get(f"{section}.val_batches", -1), x.get(f"{section}.val_global_batch_size", 1)
        if batches > 0:
            result["num_prompts"] = batches * size
        if section == "sft" or aligns(x):
            result["generate"] = False
        return {"algorithm.validation": result}
    repeated = repeats(x)  # each row, whose copies are samples of one task
    if prompts := get(x, "max_val_samples"):
        result["num_prompts"] = max(prompts // repeated, 1)
    if (samples := repeated * x.get("grpo.val_num_generations_per_prompt", 1)) > 1:
        result |= {"num_generations_per_prompt": samples, "pass_at_k": [1, samples]}
    names = ("temperature", "top_p", "top_k")
    own, shared = (tuple(x.get(f"{GENERATION}.{prefix}{name}") for name in names) for prefix in ("val_", ""))
    if own != shared and own != (None, None, None):
        top_k, top_p = own[2], own[1] if own[1] is not None else 1.0
        result["sampling"] = sampling(own[0] if own[0] is not None else 1.0, top_p, top_k)
        if samples > 1 and own[0] == 0:
            del result["num_generations_per_prompt"], result["pass_at_k"]
    return {"algorithm.validation": result}


def colocated(x: Origin) -> bool:
    return bool(x.get(f"{GENERATION}.colocated.enabled", True))
