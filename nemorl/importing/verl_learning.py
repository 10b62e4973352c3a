"""verl's keys of what is trained: batches, advantages, losses, rewards, data and the length of a run."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .rules import CannotImport, Fields, Origin, not_imported
from .shared import batch, run_length, sampling
from .sources import home

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
# Rows of files that verl's scripts name, by a part of their path.
ROWS = {"gsm8k": 7_473, "dapo-math-17k": 1_791_700, "dapo_math": 1_791_700, "math": 7_500}
_ESTIMATORS = (
    *("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "gae", "reinforce_plus_plus"),
    *("reinforce_plus_plus_baseline", "opo", "remax", "gpg", "gdpo"),
    *("optimal_token_baseline", "tir_optimal_token_baseline"),
)
_LOSSES = ("vanilla", "gspo", "geo_mean", "cispo", "sapo", "gpg", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
_CRITERIA = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3", "geometric"),
)
# Loss and advantages.


def distills(x: Origin) -> bool:
    return bool(x.get("distillation.enabled", False) or x.get("distillation.enable", False))


def batches(x: Origin) -> Fields:
    prompts, minibatch = x.get("data.train_batch_size"), x.get(f"{ACTOR}.ppo_mini_batch_size")
    epochs = x.get(f"{ACTOR}.ppo_epochs")
    if distills(x) and epochs != 1:
        x.lost(f"{ACTOR}.ppo_epochs", "distillation trains once on each sample")
    return {
        "algorithm.num_prompts_per_step": prompts,
        "algorithm.num_generations_per_prompt": x.get(f"{ROLLOUT}.n"),
        "algorithm.num_minibatches": updates(x) if minibatch else 1,
        **({} if distills(x) else {"algorithm.num_epochs": epochs}),
    }


def updates(x: Origin) -> int:
    key = f"{ACTOR}.ppo_mini_batch_size"
    return batch(x.get("data.train_batch_size"), x.get(key), key, "prompts")


def advantage(x: Origin) -> Fields:
    if distills(x):
        return {}
    name, alone = str(x.get("algorithm.adv_estimator")), x.get(f"{ROLLOUT}.n") == 1
    gamma, normalize = x.get("algorithm.gamma"), x.get("algorithm.norm_adv_by_std_in_grpo")
    fields: dict[str, Any] = {"algorithm.name": "grpo"}
    match name:
        case "grpo" | "grpo_vectorized" | "rloo" | "rloo_vectorized" if alone:
            # A group of one has mean 0 and deviation 1 there: the advantage is the reward itself.
            section: dict[str, Any] = {"name": "reinforce", "normalization": "none"}
        case "grpo" | "grpo_vectorized":
            section = {"name": "group", "normalize": normalize}
        case "rloo" | "rloo_vectorized":
            section = {"name": "group", "normalize": False, "leave_one_out": True}
        case "gae":
            section = {"name": "gae", "gamma": gamma, "lam": x.get("algorithm.lam")}
            fields |= {"algorithm.name": "ppo", "algorithm.critic": critic_learning(x)}
        case "reinforce_plus_plus":
            section = {"name": "token_returns", "gamma": gamma}
        case "reinforce_plus_plus_baseline":
            section = {"name": "group_then_batch", "over": "tokens"}
        case "opo" | "remax":
            section = {"name": name}
        case "gpg":
            section = {"name": "gpg"}
        case "gdpo":
            section = {"name": "gdpo", "normalize": normalize, "over": "tokens", "batch_epsilon": 1e-8}
        case "optimal_token_baseline" | "tir_optimal_token_baseline" if alone:
            section = {"name": "token_returns", "whiten": False}  # there is no baseline then
        case "optimal_token_baseline" | "tir_optimal_token_baseline":
            section = {"name": "otb"}
        case _:
            raise not_imported("algorithm.adv_estimator", name, "estimator", _ESTIMATORS)
    return fields | {"algorithm.advantage": section}


def critic_learning(x: Origin) -> dict[str, Any]:
    section: dict[str, Any] = {"value_clip": x.get("critic.cliprange_value")}
    if x.get("critic.loss_agg_mode", x.get(f"{ACTOR}.loss_agg_mode")) == "seq-mean-token-mean":
        section["aggregation"] = "seq-mean-token-mean"
    if warmup := x.get("trainer.critic_warmup"):
        section["warmup_steps"] = warmup
    return section


def loss(x: Origin) -> Fields:
    if distills(x):
        return {}
    mode = x.get(f"{ACTOR}.policy_loss.loss_mode")
    low = x.get(f"{ACTOR}.clip_ratio_low", x.get(f"{ACTOR}.clip_ratio"))
    high = x.get(f"{ACTOR}.clip_ratio_high", x.get(f"{ACTOR}.clip_ratio"))
    if f"{ACTOR}.clip_ratio" in x.values and f"{ACTOR}.clip_ratio_low" not in x.values:
        how = "clip_ratio_low and clip_ratio_high are used, which have defaults of their own"
        x.changed(f"{ACTOR}.clip_ratio", how)
    bounds = {"clip_low": float(low), "clip_high": float(high)}
    of = f"{ACTOR}.policy_loss"
    match mode:
        case "vanilla":
            section: dict[str, Any] = {
                "name": "clip",
                **bounds,
                "dual_clip": float(x.get(f"{ACTOR}.clip_ratio_c")),
            }
        case "gspo":
            section = {"name": "gspo", **bounds}
        case "geo_mean":
            section = {"name": "gmpo", **bounds}
        case "cispo":
            section = {"name": "cispo", **bounds}
            if float(low) >= 1:
                del section["clip_low"]
        case "dppo_tv" | "dppo_kl":
            section = {"name": "dppo", "divergence": str(mode).removeprefix("dppo_"), **bounds}
            section |= {"max_ratio": float(x.get(f"{ACTOR}.clip_ratio_c"))}
        case "sapo":
            temperatures = (
                x.get(f"{of}.tau_pos", x.get(f"{ACTOR}.tau_pos")),
                x.get(f"{of}.tau_neg", x.get(f"{ACTOR}.tau_neg")),
            )
            section = {
                "name": "sapo",
                "temperature_positive": temperatures[0],
                "temperature_negative": temperatures[1],
            }
        case "gpg":
            section = {"name": "reinforce"}
        case "clip_cov":
            section = {"name": "clip_cov", **bounds, "fraction": x.get(f"{of}.clip_cov_ratio")}
            section |= {
                "covariance_low": x.get(f"{of}.clip_cov_lb"),
                "covariance_high": x.get(f"{of}.clip_cov_ub"),
            }
        case "kl_cov":
            section = {
                "name": "kl_cov",
                "fraction": x.get(f"{of}.kl_cov_ratio"),
                "coefficient": x.get(f"{of}.ppo_kl_coef"),
            }
        case _:
            raise not_imported(f"{of}.loss_mode", mode, "loss", _LOSSES)
    if x.get(f"{CORRECTION}.bypass_mode", False) and x.get(f"{CORRECTION}.loss_type") == "reinforce":
        section = {"name": "reinforce"}
    return {"algorithm.loss": section | aggregation(x, mode)}


def aggregation(x: Origin, mode: str) -> dict[str, Any]:
    given = x.get(f"{ACTOR}.loss_agg_mode")
    if mode in ("gspo", "geo_mean", "sapo"):
        if given != "seq-mean-token-mean" and x.get(f"{ACTOR}.use_kl_loss"):
            how = f"`{mode}` has seq-mean-token-mean; there divergence and entropy keep {given}"
            x.changed(f"{ACTOR}.loss_agg_mode", how)
        given = "seq-mean-token-mean"
    if given == "seq-mean-token-sum-norm":
        length = x.get(f"{ACTOR}.loss_scale_factor", x.get("data.max_response_length"))
        return {"aggregation": given, "aggregation_length": int(length)}
    return {"aggregation": given}


def kl(x: Origin) -> Fields:
    if distills(x):
        return {}
    in_loss, in_reward = x.get(f"{ACTOR}.use_kl_loss"), x.get("algorithm.use_kl_in_reward")
    if in_loss and x.get(f"{ACTOR}.kl_loss_coef"):
        kind = str(x.get(f"{ACTOR}.kl_loss_type"))
        section: dict[str, Any] = {"coefficient": x.get(f"{ACTOR}.kl_loss_coef"), "placement": "loss"}
        names = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
        if kind.rstrip("+") not in names:
            raise not_imported(f"{ACTOR}.kl_loss_type", kind, "estimator", names)
        section["estimator"] = names[kind.rstrip("+")]
        if kind.endswith("+") and section["estimator"] != "k2":
            section["straight_through"] = True
        elif section["estimator"] == "k1":
            section["straight_through"] = True
            x.changed(f"{ACTOR}.kl_loss_type", "with the gradient of k2; that of k1 is 0 in expectation")
        if section["estimator"] == "k3":
            section["max_value"] = 10.0
        if in_reward:
            x.lost("algorithm.use_kl_in_reward", "the divergence is in the loss already")
        return {"algorithm.kl": section}
    if in_reward and x.get("algorithm.kl_ctrl.kl_coef"):
        if x.get("algorithm.kl_penalty") not in ("kl", "k1"):
            x.changed("algorithm.kl_penalty", "k1 here: others have a wrong gradient in a reward")
        coefficient = x.get("algorithm.kl_ctrl.kl_coef")
        return {"algorithm.kl": {"coefficient": coefficient, "estimator": "k1", "placement": "reward"}}
    # Presets such as PPO's have a divergence of their own.
    return {"algorithm.kl": {"coefficient": 0.0}}


def entropy(x: Origin) -> Fields:
    coefficient = x.get(f"{ACTOR}.entropy_coeff")
    if distills(x) or not coefficient:
        return {}
    return {"algorithm.entropy.coefficient": float(coefficient)}


def correction(x: Origin) -> Fields:
    """Importance sampling and rejection of samples whose logprobs differ between engine and trainer."""
    level, section = x.get(f"{CORRECTION}.rollout_is"), dict[str, Any]()
    if distills(x):
        return {}
    if level and level != "null":
        low, high = bounds(x.get(f"{CORRECTION}.rollout_is_threshold"))
        section = {"name": "tis", "level": level, "high": high}
        if low is not None:
            section |= {"name": "icepop", "low": low}
        if x.get(f"{CORRECTION}.rollout_is_batch_normalize", False):
            section["normalize"] = True
    # In the bypass form the ratio of a loss corrects already, and what is left are masks.
    only_masks = x.get(f"{CORRECTION}.bypass_mode", False) and x.get(f"{CORRECTION}.loss_type") == "ppo_clip"
    if only_masks:
        section = {}
    without = []
    for name, low, high in criteria(x):
        rejected = rejection(name, low, high, section, only_masks=only_masks)
        if rejected is None:
            without.append(name)
        else:
            section |= rejected | {"divisor": "kept"}
    if without:
        why = f"{', '.join(without)} has no counterpart here (docs/off_policy.md lists those that have one)"
        x.lost(f"{CORRECTION}.rollout_rs", why)
        x.lost(f"{CORRECTION}.rollout_rs_threshold", f"of {', '.join(without)}")
    if section.get("normalize") and x.get(f"{CORRECTION}.bypass_mode", False):
        how = "by the mean over the step before its updates, which takes a pass; there over a micro-batch"
        x.changed(f"{CORRECTION}.rollout_is_batch_normalize", how)
    elif section.get("normalize") and any(name == "token_k1" for name, *_ in criteria(x)):
        x.changed(f"{CORRECTION}.rollout_is_batch_normalize", "weights of rejected tokens count as 0")
    if x.get(f"{CORRECTION}.bypass_mode", False):
        section = {name: value for name, value in section.items() if name != "divisor"} | {"form": "bypass"}
    return {"algorithm.correction": section} if section else {}


def computes_old_logprobs(x: Origin) -> bool:
    """True if several updates of a step compare themselves with the policy before them."""
    with_ratio = x.get(f"{ACTOR}.policy_loss.loss_mode") != "gpg"
    return with_ratio and not (distills(x) or x.get(f"{CORRECTION}.bypass_mode", False))


def criteria(x: Origin) -> list[tuple[str, float, float]]:
    """Those of `rollout_rs`, once each, with their bounds; 0 for no lower one. Raises `CannotImport`."""
    key, of_bounds = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"
    given = [one.strip(" '\"") for one in str(x.get(key) or "").split(",")]
    names = list(dict.fromkeys(name for name in given if name not in ("", "null", "None")))
    if not names:
        return []
    if unknown := [name for name in names if name not in _CRITERIA]:
        raise CannotImport(f"{key} = {unknown[0]}: unknown; expected some of {', '.join(_CRITERIA)}")
    text = str(x.get(of_bounds) or "").strip("'\" ")
    thresholds = [one.strip(" '\"") for one in text.split(",") if one.strip(" '\"")]
    if len(thresholds) not in (1, len(names)):
        fix = f"expected one, or one for each of {', '.join(names)}"
        raise CannotImport(f"{of_bounds} = {text or 'null'}: {len(thresholds)} thresholds; {fix}")
    found = []
    for name, threshold in zip(names, thresholds * (len(names) if len(thresholds) == 1 else 1), strict=True):
        on_both_sides = name.endswith("k1")
        low, _, high = threshold.rpartition("_") if on_both_sides else ("", "", threshold)
        try:
            upper = float(high)
            lower = float(low) if low else (1 / upper if on_both_sides else 0.0)
        except (ValueError, ZeroDivisionError):
            upper = lower = -1.0
        if not 0 <= lower <= upper or upper <= 0 or (on_both_sides and lower == 0):
            kind = (
                "bounds such as 0.5_2.0, or the upper one" if on_both_sides else "an upper bound such as 2.0"
            )
            raise CannotImport(f"{of_bounds} = {threshold}: for {name} expected {kind}")
        found.append((name, lower, upper))
    return found


def rejection(
    name: str, low: float, high: float, section: Mapping[str, Any], *, only_masks: bool
) -> dict[str, Any] | None:
    """Fields of a criterion of `rollout_rs`, next to those of `section`; None if there are none like it.

    k1 is `-log r`, so that bounds of its exponential are those of 1 / r; k2 is `log(r)^2 / 2`.
    """
    masks = dict(section.get("sequence_mask", {}))
    if name == "seq_max_k2":
        return {"sequence_mask": masks | {"max_difference": math.sqrt(2 * high)}}
    if name == "geometric" and high > 1:  # of former releases, of r itself
        return {"sequence_mask": masks | {"low": 1 / high, "high": high}}
    if not low < 1 < high:
        return None
    if name == "seq_mean_k1":
        return {"sequence_mask": masks | {"low": 1 / high, "high": 1 / low}}
    if name == "token_k1":
        weights = section.get("name"), section.get("level"), section.get("high", 0) >= 1 / low
        if only_masks or weights == ("tis", "token", True):  # which the bounds do not cut
            return {"name": "icepop", "level": "token", "low": 1 / high, "high": 1 / low}
    return None


def bounds(threshold: object) -> tuple[float | None, float]:
    """`2.0` bounds above; `0.5_5.0` on both sides."""
    low, _, high = str(threshold).strip("'\" ").rpartition("_")
    return (float(low) if low else None), float(high)


def filters(x: Origin) -> Fields:
    groups = "algorithm.filter_groups"
    if not x.get(f"{groups}.enable", False):
        return {}
    section: dict[str, Any] = {"drop_equal_rewards": True}
    batches = x.get(f"{groups}.max_num_gen_batches", 0)
    section["refill"] = {"max_batches": max(2, batches) if batches > 0 else 1000, "at_cap": "stop"}
    if x.get(f"{groups}.metric") == "acc" and overlong_penalty(x):
        section["reward"] = "math"
    return {"algorithm.filters": section}


# Rewards, data, length.


def overlong_penalty(x: Origin) -> dict[str, Any] | None:
    for section in ("reward", "reward_model"):
        kwargs = f"{section}.reward_kwargs"
        if x.get(f"{kwargs}.overlong_buffer_cfg.enable", False):
            longest = x.get(f"{kwargs}.max_resp_len", x.get("data.max_response_length"))
            arguments = {"max_length": longest, "buffer": x.get(f"{kwargs}.overlong_buffer_cfg.len")}
            weight = float(x.get(f"{kwargs}.overlong_buffer_cfg.penalty_factor", 1.0))
            return {"function": "overlong_penalty", "weight": weight, "arguments": arguments}
    return None


def rewards(x: Origin) -> Fields:
    fields: dict[str, Any] = {"env": {"name": "math"}}
    rewards: list[dict[str, Any]] = []
    key = "reward.custom_reward_function"
    key = key if x.get(f"{key}.path") else "custom_reward_function"
    if path := x.get(f"{key}.path"):
        module, name = Path(str(path)).stem, x.get(f"{key}.name", "compute_score")
        function = {"function": f"{module}:{name}", "signature": "verl"}
        rewards += [function | part for part in gdpo_parts(x)] or [function]
        x.changed(f"{key}.path", f"copy the file into the current folder as {module}.py")
        fields = {"env": {"name": "single_turn"}}
    if x.get("reward.reward_model.enable", False):
        model = x.get("reward.reward_model.model_path")
        rewards.append({"kind": "local_model", "model_path": model, "devices": "policy"})
        fields = {"env": {"name": "single_turn"}}
    if overlong := overlong_penalty(x):
        rewards.append(overlong)
    return fields | ({"rewards": rewards} if rewards else {})


def gdpo_parts(x: Origin) -> list[dict[str, Any]]:
    """Of GDPO's rewards, which are keys of what one function returns: name, key and weight."""
    if x.get("algorithm.adv_estimator") != "gdpo":
        return []
    keys = x.get("algorithm.gdpo_reward_keys", [])
    weights = x.get("algorithm.gdpo_reward_weights") or [1.0] * len(keys)
    if len(weights) != len(keys):
        problem = (
            f"{len(weights)} weights for {len(keys)} keys; give one for each of algorithm.gdpo_reward_keys"
        )
        raise CannotImport(f"algorithm.gdpo_reward_weights: {problem}")
    if len(keys) < 2:
        problem = "GDPO normalizes several rewards; name at least two keys of what the function returns"
        raise CannotImport(f"algorithm.gdpo_reward_keys = {keys}: {problem}")
    pairs = zip(keys, weights, strict=True)
    return [{"name": str(key), "score_key": str(key), "weight": float(weight)} for key, weight in pairs]


def files(x: Origin, key: str) -> list[str]:
    given = x.get(key)
    if key not in x.values:
        x.note(home(str(given)), f"{key} is not given, and this is verl's default")
    return [home(str(name)) for name in (given if isinstance(given, list) else [given])]


def dataset(x: Origin, file: str) -> dict[str, Any]:
    keys = {"prompt_key": x.get("data.prompt_key"), "answer_key": "reward_model.ground_truth"}
    return {"name": "tasks", "path": file, **keys}


def data(x: Origin) -> Fields:
    train, held_out = files(x, "data.train_files"), files(x, "data.val_files")
    fields: dict[str, Any] = {"data.train": dataset(x, train[0]), "data.shuffle": x.get("data.shuffle")}
    if len(train) > 1:
        sources = {source(file, i): {"dataset": dataset(x, file)} for i, file in enumerate(train)}
        fields["data.train"] = {"name": "mixture", "sources": sources}
    if not validation(x):
        return fields
    if len(held_out) == 1:
        fields["data.validation"] = dataset(x, held_out[0])
    else:
        fields["data.validation_sets"] = {
            source(file, i): dataset(x, file) for i, file in enumerate(held_out)
        }
    return fields


def source(file: str, place: int) -> str:
    name = "".join(c if c.isalnum() else "_" for c in Path(file).parent.name.lower())
    return name if name[:1].isalpha() else f"source_{place}"


def rows(x: Origin) -> int | None:
    counts = []
    for file in files(x, "data.train_files"):
        found = [rows for part, rows in ROWS.items() if part in file.lower()]
        if not found:
            return None
        counts.append(found[0])
    return sum(counts)


def num_steps(x: Origin) -> int:
    given, epochs = x.get("trainer.total_training_steps"), x.get("trainer.total_epochs")
    if given is not None:
        return int(given)
    return run_length(x, None, epochs, rows(x), x.get("data.train_batch_size"))


def lengths(x: Origin) -> Fields:
    prompt, response = x.get("data.max_prompt_length"), x.get("data.max_response_length")
    length = prompt + response
    if x.get(f"{ACTOR}.use_dynamic_bsz", False):
        tokens = x.get(f"{ACTOR}.ppo_max_token_len_per_gpu")
    else:
        tokens = length * x.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu", 1)
    filtered: dict[str, Any] = {}
    if x.get("data.filter_overlong_prompts", False):
        filtered = {"data.max_prompt_tokens": prompt}
        how = "longer ones are drawn and train nothing; there they leave the dataset before the run"
        x.changed("data.filter_overlong_prompts", how)
    return filtered | {
        "policy.max_sequence_length": length,
        "policy.micro_batch_tokens": max(int(tokens), length),
        "generation.max_new_tokens": response,
    }


def validation(x: Origin) -> dict[str, Any]:
    period, start = x.get("trainer.test_freq"), x.get("trainer.val_before_train")
    if period <= 0 and not (start and "trainer.val_before_train" in x.values):
        return {}
    section: dict[str, Any] = {"at_start": start} | ({"period": period} if period > 0 else {})
    own = f"{ROLLOUT}.val_kwargs"
    temperature, samples = float(x.get(f"{own}.temperature")), x.get(f"{own}.n")
    top_p, top_k = x.get(f"{own}.top_p"), x.get(f"{own}.top_k")
    section["sampling"] = sampling(temperature, top_p, top_k) if temperature else {"temperature": 0.0}
    if samples > 1:
        section |= {"num_generations_per_prompt": samples, "pass_at_k": [1, samples]}
    return section


def validated(x: Origin) -> Fields:
    section = validation(x)
    return {"algorithm.validation": section} if section else {}
