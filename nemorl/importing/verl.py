"""verl's configs: `main_ppo` with its advantages and losses, as overrides, a script or a resolved YAML."""

from math import ceil
from pathlib import Path
from typing import Any

from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule, leaves, take
from .shared import UNBOUNDED, batch, layout, lora_targets, replicas, run_length, sampling
from .sources import (
    home,
    omegaconf,
    overridden,
    read_command,
    read_yaml,
    resolved,
    words_with_values,
)

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_MG, _T = f"{_A}.megatron", f"{_A}.megatron.override_transformer_config"
_C = "algorithm.rollout_correction"
# verl's defaults of what the rules read (commit 1dda039b, ppo_trainer.yaml and ppo_megatron_trainer.yaml).
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    f"{_C}.rollout_is_threshold": 2.0,
    f"{_C}.loss_type": "ppo_clip",
    f"{_A}.ppo_mini_batch_size": 256,
    f"{_A}.ppo_epochs": 1,
    f"{_A}.ppo_max_token_len_per_gpu": 16384,
    f"{_A}.clip_ratio": 0.2,
    f"{_A}.clip_ratio_low": 0.2,
    f"{_A}.clip_ratio_high": 0.2,
    f"{_A}.clip_ratio_c": 3.0,
    f"{_A}.tau_pos": 1.0,
    f"{_A}.tau_neg": 1.05,
    f"{_A}.policy_loss.loss_mode": "vanilla",
    f"{_A}.policy_loss.clip_cov_ratio": 2e-4,
    f"{_A}.policy_loss.clip_cov_lb": 1.0,
    f"{_A}.policy_loss.clip_cov_ub": 5.0,
    f"{_A}.policy_loss.kl_cov_ratio": 2e-4,
    f"{_A}.policy_loss.ppo_kl_coef": 0.1,
    f"{_A}.loss_agg_mode": "token-mean",
    f"{_A}.entropy_coeff": 0,
    f"{_A}.use_kl_loss": False,
    f"{_A}.kl_loss_coef": 0.001,
    f"{_A}.kl_loss_type": "low_var_kl",
    f"{_A}.optim.lr": 1e-6,
    f"{_A}.optim.weight_decay": 0.01,
    f"{_A}.optim.betas": [0.9, 0.999],
    f"{_A}.optim.clip_grad": 1.0,
    f"{_A}.optim.lr_warmup_steps": -1,
    f"{_A}.optim.lr_warmup_steps_ratio": 0.0,
    f"{_MG}.sequence_parallel": True,
    f"{_M}.enable_gradient_checkpointing": True,
    f"{_M}.lora_alpha": 16,
    f"{_M}.lora.alpha": 32,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.cliprange_value": 0.5,
    f"{_R}.n": 1,
    f"{_R}.temperature": 1.0,
    f"{_R}.top_p": 1.0,
    f"{_R}.top_k": -1,
    f"{_R}.tensor_model_parallel_size": 2,
    f"{_R}.gpu_memory_utilization": 0.5,
    f"{_R}.max_num_seqs": 256,
    f"{_R}.val_kwargs.temperature": 0,
    f"{_R}.val_kwargs.top_p": 1.0,
    f"{_R}.val_kwargs.top_k": -1,
    f"{_R}.val_kwargs.n": 1,
    f"{_R}.val_kwargs.do_sample": False,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.shuffle": True,
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.critic_warmup": 0,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
}
# Rows of files that verl's scripts name, by a part of their path.
_ROWS = {"gsm8k": 7_473, "dapo-math-17k": 1_791_700, "dapo_math": 1_791_700, "math": 7_500}
_SFT = "verl.trainer.sft_trainer"
_PPO = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync")


def read(file: Path) -> dict[str, Any]:
    """The values that a script, a list of overrides or a YAML of Hydra gives. Raises CannotImport."""
    if file.suffix in (".yaml", ".yml"):
        config = read_yaml(file)
        groups = [str(one) for one in config.pop("defaults", None) or [] if one != "_self_"]
        config.pop("hydra", None)
        tree = resolved(config, str(file))
        if any("megatron" in group for group in groups):
            tree["model_engine"] = "megatron"
        return tree
    text = file.read_text(encoding="utf-8")
    words = read_command(text) if "python" in text else ["", *text.split()]
    return from_words(words, str(file))


def from_words(words: list[str], source: str) -> dict[str, Any]:
    """The values of a command: its module, then overrides."""
    module, *rest = words
    if module and module not in _PPO:
        raise CannotImport(f"{source}: `-m {module}` is not imported; {_PPO[0]} is")
    if groups := [word for word in rest if "@" in word.partition("=")[0]]:
        raise CannotImport(f"{source}: {groups[0]}: config groups of other packages are not imported")
    options = [word for word in rest if word.startswith("--")]
    given = [word for word in words_with_values(rest) if not word.startswith("--")]
    config = overridden(omegaconf().create({}), given)
    tree: dict[str, Any] = omegaconf().to_container(config, resolve=False)
    if any("megatron" in option for option in options):
        tree.setdefault("model_engine", "megatron")
    return tree


def _engine(x: Origin) -> str:
    engine = x.get("model_engine") or x.get(f"{_A}.strategy", "fsdp")
    if engine not in ("megatron", "dp", "fsdp", "fsdp2", "fsdp_turbo"):
        raise CannotImport(f"model_engine = {engine}: its layouts are not imported")
    return "megatron" if engine == "megatron" else "fsdp"


def _refuse(x: Origin) -> Fields:
    """Runs of something that nemorl does not have in this form."""
    if x.get(f"{_R}.multi_turn.enable", False):
        raise CannotImport(f"{_R}.multi_turn.enable: give the tools as an environment (docs/tools.md)")
    if x.get("distillation.enabled", False) or x.get("distillation.enable", False):
        raise CannotImport("distillation: on-policy distillation of verl is not imported (docs/distillation.md)")
    if x.get("actor_rollout_ref.hybrid_engine", True) is False:
        raise CannotImport("actor_rollout_ref.hybrid_engine: separate rollouts are not imported")
    return {}


# Loss and advantages.


def _batches(x: Origin) -> Fields:
    prompts, minibatch = x.get("data.train_batch_size"), x.get(f"{_A}.ppo_mini_batch_size")
    return {
        "algorithm.num_prompts_per_step": prompts,
        "algorithm.num_generations_per_prompt": x.get(f"{_R}.n"),
        "algorithm.num_minibatches": _updates(x) if minibatch else 1,
        "algorithm.num_epochs": x.get(f"{_A}.ppo_epochs"),
    }


def _updates(x: Origin) -> int:
    return batch(x.get("data.train_batch_size"), x.get(f"{_A}.ppo_mini_batch_size"), f"{_A}.ppo_mini_batch_size")


def _advantage(x: Origin) -> Fields:
    name, alone = str(x.get("algorithm.adv_estimator")), x.get(f"{_R}.n") == 1
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
            fields |= {"algorithm.name": "ppo", "algorithm.critic": _critic_learning(x)}
        case "reinforce_plus_plus":
            section = {"name": "token_returns", "gamma": gamma}
        case "reinforce_plus_plus_baseline":
            section = {"name": "group_then_batch", "over": "tokens"}
        case "opo" | "remax":
            section = {"name": name}
        case "gpg":
            section = {"name": "gpg"}
        case "gdpo":
            section = {"name": "gdpo"}
        case _:
            raise CannotImport(f"algorithm.adv_estimator = {name}: this estimator is not imported")
    return fields | {"algorithm.advantage": section}


def _critic_learning(x: Origin) -> dict[str, Any]:
    section: dict[str, Any] = {"value_clip": x.get("critic.cliprange_value")}
    if x.get("critic.loss_agg_mode", x.get(f"{_A}.loss_agg_mode")) == "seq-mean-token-mean":
        section["aggregation"] = "seq-mean-token-mean"
    if warmup := x.get("trainer.critic_warmup"):
        section["warmup_steps"] = warmup
    return section


def _loss(x: Origin) -> Fields:
    mode = x.get(f"{_A}.policy_loss.loss_mode")
    low = x.get(f"{_A}.clip_ratio_low", x.get(f"{_A}.clip_ratio"))
    high = x.get(f"{_A}.clip_ratio_high", x.get(f"{_A}.clip_ratio"))
    if f"{_A}.clip_ratio" in x.values and f"{_A}.clip_ratio_low" not in x.values:
        how = "clip_ratio_low and clip_ratio_high are used, which have defaults of their own"
        x.changed(f"{_A}.clip_ratio", how)
    bounds = {"clip_low": float(low), "clip_high": float(high)}
    of = f"{_A}.policy_loss"
    match mode:
        case "vanilla":
            section: dict[str, Any] = {"name": "clip", **bounds, "dual_clip": float(x.get(f"{_A}.clip_ratio_c"))}
        case "gspo":
            section = {"name": "gspo", **bounds}
        case "geo_mean":
            section = {"name": "gmpo", **bounds}
        case "cispo":
            section = {"name": "cispo", **bounds}
            if float(low) >= 1:
                del section["clip_low"]
        case "sapo":
            temperatures = (x.get(f"{of}.tau_pos", x.get(f"{_A}.tau_pos")), x.get(f"{of}.tau_neg", x.get(f"{_A}.tau_neg")))
            section = {"name": "sapo", "temperature_positive": temperatures[0], "temperature_negative": temperatures[1]}
        case "gpg":
            section = {"name": "reinforce"}
        case "clip_cov":
            section = {"name": "clip_cov", **bounds, "fraction": x.get(f"{of}.clip_cov_ratio")}
            section |= {"covariance_low": x.get(f"{of}.clip_cov_lb"), "covariance_high": x.get(f"{of}.clip_cov_ub")}
        case "kl_cov":
            section = {"name": "kl_cov", "fraction": x.get(f"{of}.kl_cov_ratio"), "coefficient": x.get(f"{of}.ppo_kl_coef")}
        case _:
            raise CannotImport(f"{of}.loss_mode = {mode}: this loss is not imported")
    if x.get(f"{_C}.bypass_mode", False) and x.get(f"{_C}.loss_type") == "reinforce":
        section = {"name": "reinforce"}
    return {"algorithm.loss": section | _aggregation(x, mode)}


def _aggregation(x: Origin, mode: str) -> dict[str, Any]:
    given = x.get(f"{_A}.loss_agg_mode")
    if mode in ("gspo", "geo_mean", "sapo"):
        if given != "seq-mean-token-mean" and x.get(f"{_A}.use_kl_loss"):
            how = f"`{mode}` has seq-mean-token-mean; there divergence and entropy keep {given}"
            x.changed(f"{_A}.loss_agg_mode", how)
        given = "seq-mean-token-mean"
    if given == "seq-mean-token-sum-norm":
        length = x.get(f"{_A}.loss_scale_factor", x.get("data.max_response_length"))
        return {"aggregation": given, "aggregation_length": int(length)}
    return {"aggregation": given}


def _kl(x: Origin) -> Fields:
    in_loss, in_reward = x.get(f"{_A}.use_kl_loss"), x.get("algorithm.use_kl_in_reward")
    if in_loss and x.get(f"{_A}.kl_loss_coef"):
        kind = str(x.get(f"{_A}.kl_loss_type"))
        section: dict[str, Any] = {"coefficient": x.get(f"{_A}.kl_loss_coef"), "placement": "loss"}
        names = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
        if kind.rstrip("+") not in names:
            raise CannotImport(f"{_A}.kl_loss_type = {kind}: this estimator is not imported")
        section["estimator"] = names[kind.rstrip("+")]
        if kind.endswith("+") and section["estimator"] != "k2":
            section["straight_through"] = True
        elif section["estimator"] == "k1":
            section["straight_through"] = True
            x.changed(f"{_A}.kl_loss_type", "with the gradient of k2; that of k1 is 0 in expectation")
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


def _entropy(x: Origin) -> Fields:
    coefficient = x.get(f"{_A}.entropy_coeff")
    return {"algorithm.entropy.coefficient": float(coefficient)} if coefficient else {}


def _correction(x: Origin) -> Fields:
    """Importance sampling and rejection of samples whose logprobs differ between engine and trainer."""
    level, rejects = x.get(f"{_C}.rollout_is"), str(x.get(f"{_C}.rollout_rs", "") or "")
    section: dict[str, Any] = {}
    if level and level != "null":
        low, high = _bounds(x.get(f"{_C}.rollout_is_threshold"))
        section = {"name": "tis", "level": level, "high": high}
        if low is not None:
            section |= {"name": "icepop", "low": low}
    names = [name.strip(" '\"") for name in rejects.split(",") if name.strip(" '\"") not in ("", "null")]
    thresholds = str(x.get(f"{_C}.rollout_rs_threshold", "")).strip("'\"").split(",")
    for name, threshold in zip(names, thresholds, strict=False):
        low, high = _bounds(threshold)
        if name in ("seq_mean_k1", "geometric") and high > 1:
            section |= {"sequence_mask": {"low": low or 1 / high, "high": high}, "divisor": "kept"}
        else:
            x.lost(f"{_C}.rollout_rs", f"`{name}` has no counterpart; seq_mean_k1 is a sequence_mask")
            x.lost(f"{_C}.rollout_rs_threshold", "of rollout_rs")
    if x.get(f"{_C}.bypass_mode", False):
        if x.get(f"{_C}.loss_type") == "ppo_clip":  # the ratio corrects already
            section = {name: value for name, value in section.items() if name in ("sequence_mask",)}
        section = {name: value for name, value in section.items() if name != "divisor"} | {"form": "bypass"}
    return {"algorithm.correction": section} if section else {}


def _bounds(threshold: object) -> tuple[float | None, float]:
    """`2.0` bounds above; `0.5_5.0` on both sides."""
    low, _, high = str(threshold).strip("'\" ").rpartition("_")
    return (float(low) if low else None), float(high)


def _filters(x: Origin) -> Fields:
    groups = "algorithm.filter_groups"
    if not x.get(f"{groups}.enable", False):
        return {}
    section: dict[str, Any] = {"drop_equal_rewards": True}
    batches = x.get(f"{groups}.max_num_gen_batches", 0)
    section["refill"] = {"max_batches": max(2, batches) if batches > 0 else 1000, "at_cap": "stop"}
    if x.get(f"{groups}.metric") == "acc" and _overlong(x):
        section["reward"] = "math"
    return {"algorithm.filters": section}


# Rewards, data, length.


def _overlong(x: Origin) -> dict[str, Any] | None:
    for section in ("reward", "reward_model"):
        kwargs = f"{section}.reward_kwargs"
        if x.get(f"{kwargs}.overlong_buffer_cfg.enable", False):
            longest = x.get(f"{kwargs}.max_resp_len", x.get("data.max_response_length"))
            arguments = {"max_length": longest, "buffer": x.get(f"{kwargs}.overlong_buffer_cfg.len")}
            weight = float(x.get(f"{kwargs}.overlong_buffer_cfg.penalty_factor", 1.0))
            return {"function": "overlong_penalty", "weight": weight, "arguments": arguments}
    return None


def _rewards(x: Origin) -> Fields:
    fields: dict[str, Any] = {"env": {"name": "math"}}
    rewards: list[dict[str, Any]] = []
    key = "reward.custom_reward_function"
    key = key if x.get(f"{key}.path") else "custom_reward_function"
    if path := x.get(f"{key}.path"):
        module, name = Path(str(path)).stem, x.get(f"{key}.name", "compute_score")
        rewards.append({"function": f"{module}:{name}", "signature": "verl"})
        x.changed(f"{key}.path", f"copy the file into the current folder as {module}.py")
        fields = {"env": {"name": "single_turn"}}
    if x.get("reward.reward_model.enable", False):
        model = x.get("reward.reward_model.model_path")
        rewards.append({"kind": "local_model", "model_path": model, "devices": "policy"})
        fields = {"env": {"name": "single_turn"}}
    if overlong := _overlong(x):
        rewards.append(overlong)
    return fields | ({"rewards": rewards} if rewards else {})


def _files(x: Origin, key: str) -> list[str]:
    given = x.get(key)
    return [home(str(name)) for name in (given if isinstance(given, list) else [given])]


def _dataset(x: Origin, file: str) -> dict[str, Any]:
    keys = {"prompt_key": x.get("data.prompt_key"), "answer_key": "reward_model.ground_truth"}
    return {"name": "tasks", "path": file, **keys}


def _data(x: Origin) -> Fields:
    train, held_out = _files(x, "data.train_files"), _files(x, "data.val_files")
    fields: dict[str, Any] = {"data.train": _dataset(x, train[0]), "data.shuffle": x.get("data.shuffle")}
    if len(train) > 1:
        sources = {_source(file, i): {"dataset": _dataset(x, file)} for i, file in enumerate(train)}
        fields["data.train"] = {"name": "mixture", "sources": sources}
    if not _validation(x):
        return fields
    if len(held_out) == 1:
        fields["data.validation"] = _dataset(x, held_out[0])
    else:
        fields["data.validation_sets"] = {_source(file, i): _dataset(x, file) for i, file in enumerate(held_out)}
    return fields


def _source(file: str, place: int) -> str:
    name = "".join(c if c.isalnum() else "_" for c in Path(file).parent.name.lower())
    return name if name[:1].isalpha() else f"source_{place}"


def _rows(x: Origin) -> int | None:
    counts = []
    for file in _files(x, "data.train_files"):
        found = [rows for part, rows in _ROWS.items() if part in file.lower()]
        if not found:
            return None
        counts.append(found[0])
    return sum(counts)


def _num_steps(x: Origin) -> int:
    given, epochs = x.get("trainer.total_training_steps"), x.get("trainer.total_epochs")
    if given is not None:
        return int(given)
    return run_length(x, None, epochs, _rows(x), x.get("data.train_batch_size"))


def _lengths(x: Origin) -> Fields:
    prompt, response = x.get("data.max_prompt_length"), x.get("data.max_response_length")
    length = prompt + response
    tokens = x.get(f"{_A}.ppo_max_token_len_per_gpu")
    if not x.get(f"{_A}.use_dynamic_bsz", False):
        tokens = length * x.get(f"{_A}.ppo_micro_batch_size_per_gpu", 1)
    return {
        "policy.max_sequence_length": length,
        "policy.micro_batch_tokens": max(int(tokens), length),
        "generation.max_new_tokens": response,
    }


def _validation(x: Origin) -> dict[str, Any]:
    period, start = x.get("trainer.test_freq"), x.get("trainer.val_before_train")
    if period <= 0 and not (start and "trainer.val_before_train" in x.values):
        return {}
    section: dict[str, Any] = {"at_start": start} | ({"period": period} if period > 0 else {})
    own = f"{_R}.val_kwargs"
    samples = x.get(f"{own}.n")
    if x.get(f"{own}.do_sample"):
        section["sampling"] = sampling(float(x.get(f"{own}.temperature")), x.get(f"{own}.top_p"), x.get(f"{own}.top_k"))
        if samples > 1:
            section |= {"num_generations_per_prompt": samples, "pass_at_k": [1, samples]}
    else:
        section["sampling"] = {"temperature": 0.0}
    return section


def _validated(x: Origin) -> Fields:
    section = _validation(x)
    return {"algorithm.validation": section} if section else {}


# Devices.


def _gpus(x: Origin) -> int:
    return int(x.get("trainer.nnodes") * x.get("trainer.n_gpus_per_node"))


def _layout(x: Origin) -> Fields:
    if _engine(x) != "megatron":
        sizes = {"context": x.get(f"{_A}.ulysses_sequence_parallel_size", 1)}
        sizes["context"] = max(sizes["context"], x.get(f"{_A}.fsdp_config.ulysses_sequence_parallel_size", 1))
        return layout(_gpus(x), sizes, f"{_A}.ulysses_sequence_parallel_size")
    names = {
        "tensor": "tensor_model",
        "pipeline": "pipeline_model",
        "virtual_pipeline": "virtual_pipeline_model",
        "context": "context",
        "expert": "expert_model",
        "expert_tensor": "expert_tensor",
    }
    given = {ours: x.get(f"{_MG}.{name}_parallel_size", 1) for ours, name in names.items()}
    sizes = {ours: size if isinstance(size, int) else 1 for ours, size in given.items()}
    fields = dict(layout(_gpus(x), sizes, _MG))
    if x.get(f"{_MG}.sequence_parallel") and sizes["tensor"] > 1:
        fields["policy.layout.sequence_parallel"] = True
    for ours, stage in (("layers_in_first_stage", "first"), ("layers_in_last_stage", "last")):
        layers = x.get(f"{_T}.num_layers_in_{stage}_pipeline_stage")
        if layers is not None and sizes["pipeline"] > 1:
            fields[f"policy.layout.{ours}"] = int(layers)
    return fields


def _recompute(x: Origin) -> Fields:
    if _engine(x) != "megatron":
        full = x.get(f"{_M}.enable_gradient_checkpointing")
        return {"policy.recompute": {"name": "full"}} if full else {}
    match x.get(f"{_T}.recompute_granularity"):
        case "full":
            section: dict[str, Any] = {"name": "full", "method": x.get(f"{_T}.recompute_method", "uniform")}
            return {"policy.recompute": section | {"num_layers": int(x.get(f"{_T}.recompute_num_layers", 1))}}
        case "selective":
            known = ("core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj")
            modules = [one for one in x.get(f"{_T}.recompute_modules", ["core_attn"]) if one in known]
            return {"policy.recompute": {"name": "selective", "modules": modules}}
    return {}


def _optimizer(x: Origin) -> Fields:
    o = f"{_A}.optim"
    name = str(x.get(f"{o}.optimizer", "adam")).lower()
    if name not in ("adam", "adamw"):
        raise CannotImport(f"{o}.optimizer = {name}: this optimizer is not imported")
    beta1, beta2 = x.get(f"{o}.betas")
    section = {"name": "adam", "lr": float(x.get(f"{o}.lr")), "weight_decay": float(x.get(f"{o}.weight_decay"))}
    section |= {"beta1": beta1, "beta2": beta2}
    if x.get(f"{o}.override_optimizer_config.optimizer_cpu_offload", False):
        section["on_host"] = True
    fields: dict[str, Any] = {"policy.optimizer": section}
    fields["policy.max_grad_norm"] = x.get(f"{o}.clip_grad", x.get(f"{_A}.grad_clip", 1.0))
    schedule = _schedule(x, o)
    return fields | ({"policy.schedule": schedule} if schedule else {})


def _schedule(x: Origin, o: str) -> dict[str, Any]:
    """verl changes the rate once in a step, and nemorl with each of its optimizer steps."""
    updates, steps = _updates(x) * x.get(f"{_A}.ppo_epochs"), _num_steps(x)
    warmup = x.get(f"{o}.lr_warmup_steps")
    if warmup <= 0:
        warmup = int(x.get(f"{o}.lr_warmup_steps_ratio") * steps)
    schedule: dict[str, Any] = {}
    if warmup > 0:
        schedule = {"warmup_steps": warmup * updates, "first_step": 0}
        if start := float(x.get(f"{o}.lr_warmup_init", 0.0)) / float(x.get(f"{o}.lr")):
            schedule["warmup_start"] = min(start, 1.0)
        if updates > 1:
            how = "the rate rises with each optimizer step, and not once in a step"
            x.changed(f"{o}.lr_warmup_steps", how)
    style = x.get(f"{o}.lr_decay_style" if _engine(x) == "megatron" else f"{o}.lr_scheduler_type", "constant")
    if style in ("cosine", "linear"):
        end = int(x.get(f"{o}.lr_decay_steps", steps)) * updates
        peak = float(x.get(f"{o}.lr"))
        least = float(x.get(f"{o}.min_lr", peak * float(x.get(f"{o}.min_lr_ratio", 0.0))))
        schedule |= {"name": style, "decay_steps": end, "min_lr": least, "first_step": 0}
    elif style != "constant":
        raise CannotImport(f"{o}: the schedule {style} is not imported")
    return schedule


def _lora(x: Origin) -> Fields:
    if rank := x.get(f"{_M}.lora_rank", 0):
        targets = lora_targets(x, f"{_M}.target_modules", x.get(f"{_M}.target_modules", "all-linear"))
        return {"policy.lora": {"rank": rank, "alpha": x.get(f"{_M}.lora_alpha"), "targets": targets}}
    if rank := x.get(f"{_M}.lora.rank", 0):
        names = x.get(f"{_M}.lora.target_modules", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
        targets = lora_targets(x, f"{_M}.lora.target_modules", names)
        return {"policy.lora": {"rank": rank, "alpha": x.get(f"{_M}.lora.alpha"), "targets": targets}}
    return {}


def _router(x: Origin) -> Fields:
    fields: dict[str, Any] = {}
    modes = (x.get(f"{section}.router_replay.mode", "disabled") for section in (_A, _MG))
    if any(mode == "R3" for mode in modes) or x.get(f"{_R}.enable_rollout_routing_replay", False):
        fields["policy.moe.router_replay"] = True
    if x.get(f"{_M}.override_config.moe_config.freeze_moe_router", False):
        fields["policy.moe.freeze_router"] = True
    kind = str(x.get(f"{_T}.moe_router_load_balancing_type", "aux_loss")).strip('"')
    if kind != "none" and (coefficient := float(x.get(f"{_T}.moe_aux_loss_coeff", 0.0))) > 0:
        fields["policy.moe.load_balancing_loss_coefficient"] = coefficient
        x.changed(f"{_T}.moe_aux_loss_coeff", "the balance loss is of each sequence here")
    return fields


def _critic(x: Origin) -> Fields:
    if x.get("algorithm.adv_estimator") != "gae":
        return {}
    optimizer = {"lr": float(x.get("critic.optim.lr")), "weight_decay": float(x.get("critic.optim.weight_decay"))}
    section: dict[str, Any] = {"devices": "policy", "optimizer": {"name": "adam", **optimizer}}
    if (model := x.get("critic.model.path")) and model != x.get(f"{_M}.path"):
        section["model_path"] = model
    return {"critic": section}


def _generation(x: Origin) -> Fields:
    name, gpus = x.get(f"{_R}.name", "vllm"), _gpus(x)
    if name not in ("vllm", "sglang"):
        raise CannotImport(f"{_R}.name = {name}: engines on the policy's GPUs are vLLM's here")
    if name == "sglang":
        x.changed(f"{_R}.name", "vLLM samples; another engine's rounding differs", changes_result=False)
    tensor, stages = x.get(f"{_R}.tensor_model_parallel_size"), x.get(f"{_R}.pipeline_model_parallel_size", 1)
    number = replicas(gpus, tensor * stages, f"{_R}.tensor_model_parallel_size")
    fields: dict[str, Any] = {
        "generation.backend": "vllm",
        "generation.colocated": True,
        "generation.replicas": number,
        "generation.tensor_parallel_size": tensor,
        "generation.gpu_memory_utilization": x.get(f"{_R}.gpu_memory_utilization"),
        "generation.max_num_seqs": x.get(f"{_R}.max_num_seqs"),
    }
    if stages > 1:
        fields["generation.pipeline_parallel_size"] = stages
    if x.get(f"{_R}.enforce_eager", False):
        fields["generation.enforce_eager"] = True
    if x.values.get(f"{_R}.enable_prefix_caching") is False:
        fields["generation.enable_prefix_caching"] = False
    if tokens := x.get(f"{_R}.max_num_batched_tokens"):
        fields["generation.max_num_batched_tokens"] = tokens
    if format_ := x.get(f"{_R}.quantization"):
        fields["generation.quantization"] = format_
    fields["generation.sampling"] = {"temperature": float(x.get(f"{_R}.temperature"))}
    for key, neutral in (("top_p", 1), ("top_k", -1)):
        if x.get(f"{_R}.{key}") != neutral:
            x.lost(f"{_R}.{key}", "the loss would need the tokens that the engine's filter kept; left out")
    return fields | _engine_arguments(x)


def _engine_arguments(x: Origin) -> dict[str, Any]:
    arguments = x.below(f"{_R}.engine_kwargs.vllm")
    if x.get(f"{_R}.expert_parallel_size", 1) > 1:
        arguments["enable_expert_parallel"] = True
    fields: dict[str, Any] = {}
    if (cache := arguments.pop("kv_cache_dtype", None)) is not None:
        fields["generation.kv_cache_dtype"] = "fp8" if str(cache).startswith("fp8") else "auto"
    if arguments.pop("max_model_len", None) is not None:
        x.lost(f"{_R}.engine_kwargs.vllm.max_model_len", "it is policy.max_sequence_length", changes_result=False)
    return fields | ({"generation.vllm_kwargs": arguments} if arguments else {})


def _checkpoints(x: Origin) -> Fields:
    period, kept = x.get("trainer.save_freq"), x.get("trainer.max_actor_ckpt_to_keep")
    folder = x.get("trainer.default_local_dir")
    if folder is None or str(folder).startswith("$"):
        folder = f"checkpoints/{x.get('trainer.project_name')}/{x.get('trainer.experiment_name')}"
    fields: dict[str, Any] = {"run_dir": home(str(folder))}
    if period <= 0:
        return fields | {"checkpointing": {"enabled": False}}
    section: dict[str, Any] = {"period": period} | ({"keep": kept} if kept else {})
    if "hf_model" in x.get(f"{_A}.checkpoint.save_contents", []):
        section["export_hf"] = True
    return fields | {"checkpointing": section}


def _seed(x: Origin) -> Fields:
    seed = x.get("data.seed", x.get("trainer.seed"))
    return {} if seed is None else {"seed": int(seed)}


def _below(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


_OF_SCORES = "answers are compared by math-verify; verl has a scorer for each data source"
_OVERLONG = tuple(
    f"{section}.reward_kwargs.{name}"
    for section in ("reward", "reward_model")
    for name in (
        *("max_resp_len", "overlong_buffer_cfg.enable", "overlong_buffer_cfg.len"),
        "overlong_buffer_cfg.penalty_factor",
    )
)
_MEGATRON_SIZES = (
    *(f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model")),
    *(f"{name}_parallel_size" for name in ("context", "expert_model", "expert_tensor")),
    "sequence_parallel",
)

RULES: tuple[Rule, ...] = (
    Part(
        (
            *(f"{_R}.multi_turn.enable", "distillation.enabled", "distillation.enable"),
            "actor_rollout_ref.hybrid_engine",
        ),
        (),
        _refuse,
    ),
    Part(
        ("data.train_batch_size", *_below(_A, "ppo_mini_batch_size", "ppo_epochs"), f"{_R}.n"),
        tuple(f"algorithm.{name}" for name in ("num_prompts_per_step", "num_minibatches", "num_epochs")),
        _batches,
    ),
    Part(
        (
            *_below("algorithm", "adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo"),
            *("critic.cliprange_value", "critic.loss_agg_mode", "trainer.critic_warmup"),
        ),
        ("algorithm.advantage", "algorithm.critic"),
        _advantage,
    ),
    Part(
        (
            *_below(_A, "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode"),
            *_below(_A, "loss_scale_factor", "tau_pos", "tau_neg"),
            *_below(f"{_A}.policy_loss", "loss_mode", "tau_pos", "tau_neg", "clip_cov_ratio", "clip_cov_lb"),
            *_below(f"{_A}.policy_loss", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"),
        ),
        ("algorithm.loss",),
        _loss,
    ),
    Part(
        (
            *_below(_A, "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
            *_below("algorithm", "use_kl_in_reward", "kl_penalty", "kl_ctrl.kl_coef"),
        ),
        ("algorithm.kl",),
        _kl,
    ),
    Part((f"{_A}.entropy_coeff",), ("algorithm.entropy",), _entropy),
    Part(
        (
            *_below(_C, "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"),
            *_below(_C, "bypass_mode", "loss_type"),
        ),
        ("algorithm.correction",),
        _correction,
    ),
    Part(
        _below("algorithm.filter_groups", "enable", "metric", "max_num_gen_batches"),
        ("algorithm.filters",),
        _filters,
    ),
    Part(
        (
            *_below("reward.custom_reward_function", "path", "name"),
            *_below("custom_reward_function", "path", "name"),
            *_OVERLONG,
            *_below("reward.reward_model", "enable", "model_path"),
        ),
        ("rewards", "env"),
        _rewards,
    ),
    Part(
        ("data.train_files", "data.val_files", "data.prompt_key", "data.shuffle"),
        ("data.train", "data.validation"),
        _data,
        _OF_SCORES,
    ),
    Part(
        ("trainer.total_training_steps", "trainer.total_epochs"),
        ("algorithm.num_steps",),
        lambda x: {"algorithm.num_steps": _num_steps(x)},
    ),
    Part(
        (
            *("data.max_prompt_length", "data.max_response_length"),
            *_below(_A, "ppo_max_token_len_per_gpu", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"),
        ),
        ("policy.max_sequence_length", "policy.micro_batch_tokens", "generation.max_new_tokens"),
        _lengths,
    ),
    Part(
        (
            *("trainer.test_freq", "trainer.val_before_train"),
            *_below(f"{_R}.val_kwargs", "temperature", "top_p", "top_k", "n", "do_sample"),
        ),
        ("algorithm.validation",),
        _validated,
    ),
    take(f"{_M}.path", "policy.model_path", lambda path: home(str(path))),
    Part((f"{_M}.tokenizer_path",), ("policy.tokenizer.path",), lambda x: {"policy.tokenizer.path": x.get(f"{_M}.tokenizer_path")} if x.get(f"{_M}.tokenizer_path") else {}),
    take("trainer.nnodes", "cluster.num_nodes"),
    Part(("trainer.n_gpus_per_node",), ("cluster.gpus_per_node",), lambda x: {"cluster.gpus_per_node": x.get("trainer.n_gpus_per_node")}),
    Part(
        (
            *_below(_MG, *_MEGATRON_SIZES),
            *_below(_T, "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("model_engine", f"{_A}.strategy"),
        ),
        ("policy.layout",),
        _layout,
    ),
    Part(
        (
            f"{_A}.ulysses_sequence_parallel_size",
            f"{_A}.fsdp_config.ulysses_sequence_parallel_size",
        ),
        ("policy.layout.context_parallel_size",),
        lambda x: {},
        "data parallelism shards the optimizer's state, and not the weights as FSDP does: more memory",
    ),
    Part(
        (
            f"{_M}.enable_gradient_checkpointing",
            *_below(_T, "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
        ),
        ("policy.recompute",),
        _recompute,
    ),
    Part(
        (
            *_below(f"{_A}.optim", "optimizer", "lr", "weight_decay", "betas", "clip_grad", "lr_warmup_steps"),
            *_below(f"{_A}.optim", "lr_warmup_steps_ratio", "lr_warmup_init", "lr_decay_style", "lr_decay_steps"),
            *_below(f"{_A}.optim", "lr_scheduler_type", "min_lr", "min_lr_ratio"),
            *(f"{_A}.optim.override_optimizer_config.optimizer_cpu_offload", f"{_A}.grad_clip"),
        ),
        ("policy.optimizer", "policy.schedule", "policy.max_grad_norm"),
        _optimizer,
    ),
    Part(
        (
            *_below(_M, "lora_rank", "lora_alpha", "target_modules"),
            *_below(f"{_M}.lora", "rank", "alpha", "target_modules"),
        ),
        ("policy.lora",),
        _lora,
    ),
    Part(
        (
            *(f"{_A}.router_replay.mode", f"{_MG}.router_replay.mode", f"{_R}.enable_rollout_routing_replay"),
            f"{_M}.override_config.moe_config.freeze_moe_router",
            *_below(_T, "moe_aux_loss_coeff", "moe_router_load_balancing_type"),
        ),
        ("policy.moe",),
        _router,
    ),
    Part(
        ("critic.optim.lr", "critic.optim.weight_decay", "critic.model.path"),
        ("critic",),
        _critic,
    ),
    Part(
        (
            *_below(_R, "name", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *_below(_R, "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager"),
            *_below(_R, "enable_prefix_caching", "quantization", "temperature", "top_p", "top_k"),
            *_below(_R, "expert_parallel_size", "engine_kwargs.vllm.*"),
        ),
        ("generation",),
        _generation,
    ),
    Part(
        (
            *_below("trainer", "save_freq", "max_actor_ckpt_to_keep", "default_local_dir"),
            *_below("trainer", "project_name", "experiment_name"),
            f"{_A}.checkpoint.save_contents",
        ),
        ("run_dir", "checkpointing"),
        _checkpoints,
    ),
    Part(("data.seed", "trainer.seed"), ("seed",), _seed),
    # Without counterpart, and the result changes.
    Lost((f"{_C}.rollout_is_batch_normalize",), "weights are not divided by their mean"),
    Lost((f"{_A}.shuffle",), "minibatches are in the order of the batch"),
    Lost(("algorithm.use_pf_ppo",), "preference feedback PPO"),
    Lost(("algorithm.kl_ctrl.type",), "the coefficient is fixed", ("fixed", None)),
    Lost(("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"), "give each as a reward of its own", (None,)),
    Lost((f"{_T}.moe_z_loss_coeff",), "router logits have no loss of their own", (None, 0, 0.0)),
    Lost((f"{_T}.moe_router_bias_update_rate",), "the bias of routers is not updated", (None, 0, 0.0)),
    Lost((f"{_T}.moe_router_enable_expert_bias",), "the bias of routers is as in the model's config.json"),
    Lost((f"{_T}.dsa_indexer_loss_coeff",), "sparse attention's indexer is not trained", (None, 0, 0.0)),
    Lost((f"{_M}.mtp.enable_train", f"{_M}.mtp.enable"), "multi-token prediction is not trained"),
    Lost((f"{_M}.override_config.*",), "edit the config.json of the model folder", (None, {})),
    Lost((f"{_M}.lora_adapter_path", f"{_M}.lora.adapter_path"), "merge the adapter into the model first", (None,)),
    Lost((f"{_M}.custom_chat_template", "data.chat_template"), "write it into a file: policy.tokenizer.chat_template", (None,)),
    Lost(("data.apply_chat_template_kwargs.*",), "chat templates get no arguments of the user's", (None, {})),
    Lost(("data.train_max_samples", "data.val_max_samples"), "all rows of a file are used", (-1, None)),
    Lost(("data.custom_cls.path", "data.sampler.class_path", "data.datagen.path"), "give the data as rows", (None,)),
    Lost((f"{_A}.policy_loss.dro_beta",), "of DRO", (None,)),
    Lost((f"{_R}.ignore_eos",), "an answer ends at the model's end token"),
    Lost((f"{_R}.over_sample_rate",), "`algorithm.oversampling` trains on the first groups to finish", (0, 0.0, None)),
    Lost((f"{_A}.qat.enable", f"{_A}.fsdp_config.qat.enable"), "give the format as policy.quantization"),
    Lost((f"{_A}.fsdp_config.dtype", f"{_MG}.dtype"), "training is in bfloat16", ("bfloat16", "bf16", None)),
    Lost((f"{_A}.optim.weight_decay_incr_style",), "the weight decay is constant", ("constant", None)),
    Lost((f"{_A}.optim.num_cycles",), "the cosine has half a cycle", (0.5, None)),
    Lost(("trainer.resume_from_path",), "`nemorl train --resume` continues the run in run_dir", (None, "checkpoints/")),
    # Without counterpart, and the result is the same.
    Ignored(
        ("data.filter_overlong_prompts", "data.truncation"),
        "prompts longer than policy.max_sequence_length end with the stop reason `length`",
    ),
    Ignored((f"{_T}.moe_router_dtype",), "router logits are computed in float32"),
    Ignored(("data.*",), "how rows are read"),
    Ignored((f"{_A}.*",), "how it computes, and not what: kernels, memory, sharding, checkpoints"),
    Ignored(("actor_rollout_ref.ref.*",), "the reference has the policy's layout and micro-batches"),
    Ignored((f"{_R}.*",), "how the engine computes and receives weights"),
    Ignored((f"{_M}.*",), "how the model is loaded and computed"),
    Ignored(("critic.*",), "the critic has the policy's layout, schedule and micro-batches"),
    Ignored(("reward.*", "reward_model.*", "reward_manager.*", "custom_reward_function.*"), "how rewards are computed"),
    Ignored(
        (
            *("trainer.*", "ray_kwargs.*", "global_profiler.*", "transfer_queue.*", "actor_rollout_ref.nccl_timeout"),
            *("ray_init.*", "profiler.*"),
        ),
        "trackers, profiling, the start of Ray, the order of samples",
    ),
    Ignored(("algorithm.*",), "of a method that is off"),
    Ignored(("distillation.*",), "distillation is off"),
)
