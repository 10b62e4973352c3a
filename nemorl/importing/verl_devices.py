"""verl's keys of devices: layout, memory, optimizer, adapters, engines and checkpoints."""

from typing import Any

from . import shared
from . import verl_learning as learning
from .rules import CannotImport, Fields, Origin, not_imported
from .shared import layout, lora_targets, replicas, trained_sampling
from .sources import home
from .verl_learning import ACTOR, ROLLOUT

MODEL = "actor_rollout_ref.model"
VEOMNI = f"{ACTOR}.veomni"
MEGATRON, TRANSFORMER = f"{ACTOR}.megatron", f"{ACTOR}.megatron.override_transformer_config"


def engine(x: Origin) -> str:
    key = "model_engine" if x.get("model_engine") else f"{ACTOR}.strategy"
    engine = x.get(key, "fsdp")
    if engine not in ("megatron", "dp", "fsdp", "fsdp2", "fsdp_turbo", "veomni"):
        raise CannotImport(f"{key} = {engine}: its layouts are not imported")
    return str(engine) if engine in ("megatron", "veomni") else "fsdp"


# Devices.


def count_gpus(x: Origin) -> int:
    return int(x.get("trainer.nnodes") * x.get("trainer.n_gpus_per_node"))


def policy_layout(x: Origin) -> Fields:
    if engine(x) == "veomni":
        sizes = {"context": x.get(f"{VEOMNI}.ulysses_parallel_size", 1)}
        sizes["expert"] = x.get(f"{VEOMNI}.expert_parallel_size", 1)
        return layout(count_gpus(x), sizes, f"{VEOMNI}.ulysses_parallel_size")
    if engine(x) != "megatron":
        sizes = {"context": x.get(f"{ACTOR}.ulysses_sequence_parallel_size", 1)}
        sizes["context"] = max(
            sizes["context"], x.get(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 1)
        )
        return layout(count_gpus(x), sizes, f"{ACTOR}.ulysses_sequence_parallel_size")
    names = {
        "tensor": "tensor_model",
        "pipeline": "pipeline_model",
        "virtual_pipeline": "virtual_pipeline_model",
        "context": "context",
        "expert": "expert_model",
        "expert_tensor": "expert_tensor",
    }
    sizes = {ours: _size(x, f"{MEGATRON}.{name}_parallel_size") for ours, name in names.items()}
    fields = dict(layout(count_gpus(x), sizes, MEGATRON))
    per_update = x.get("data.train_batch_size") * x.get(f"{ROLLOUT}.n") // learning.updates(x)
    if per_update % fields["policy.layout.data_parallel_size"]:
        copies = f"{fields['policy.layout.data_parallel_size']} copies of the policy"
        problem = f"{copies} do not divide {per_update} trajectories, which verl refuses, too; change one"
        raise CannotImport(f"{ACTOR}.ppo_mini_batch_size: {problem}")
    if x.get(f"{MEGATRON}.sequence_parallel") and sizes["tensor"] > 1:
        fields["policy.layout.sequence_parallel"] = True
    for ours, stage in (("layers_in_first_stage", "first"), ("layers_in_last_stage", "last")):
        layers = x.get(f"{TRANSFORMER}.num_layers_in_{stage}_pipeline_stage")
        if layers is not None and sizes["pipeline"] > 1:
            fields[f"policy.layout.{ours}"] = int(layers)
    return fields


def _size(x: Origin, key: str) -> int:
    """1 where a script leaves it to a variable that is not set."""
    return 1 if str(x.values.get(key)).startswith("$") else int(x.get(key, 1))


def recompute(x: Origin) -> Fields:
    if engine(x) != "megatron":
        full = x.get(f"{MODEL}.enable_gradient_checkpointing")
        return {"policy.recompute": {"name": "full"}} if full else {}
    match x.get(f"{TRANSFORMER}.recompute_granularity"):
        case "full":
            section: dict[str, Any] = {
                "name": "full",
                "method": x.get(f"{TRANSFORMER}.recompute_method", "uniform"),
            }
            return {
                "policy.recompute": section
                | {"num_layers": int(x.get(f"{TRANSFORMER}.recompute_num_layers", 1))}
            }
        case "selective":
            known = ("core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj")
            modules = [
                one for one in x.get(f"{TRANSFORMER}.recompute_modules", ["core_attn"]) if one in known
            ]
            return {"policy.recompute": {"name": "selective", "modules": modules}}
    return {}


def optimizer(x: Origin) -> Fields:
    o = f"{ACTOR}.optim"
    name = str(x.get(f"{o}.optimizer", "adam")).lower()
    if name not in ("adam", "adamw"):
        raise not_imported(f"{o}.optimizer", name, "optimizer", ("adam", "adamw"))
    beta1, beta2 = x.get(f"{o}.betas")
    section = {
        "name": "adam",
        "lr": float(x.get(f"{o}.lr")),
        "weight_decay": float(x.get(f"{o}.weight_decay")),
    }
    section |= {"beta1": beta1, "beta2": beta2}
    if engine(x) != "megatron":
        x.changed(f"{o}.weight_decay", "norms and biases have no weight decay here")
    if x.get(f"{o}.override_optimizer_config.optimizer_cpu_offload", False):
        section["on_host"] = True
    fields: dict[str, Any] = {"policy.optimizer": section}
    fields["policy.max_grad_norm"] = x.get(f"{o}.clip_grad", x.get(f"{ACTOR}.grad_clip", 1.0))
    schedule = rate_schedule(x, o)
    return fields | ({"policy.schedule": schedule} if schedule else {})


def rate_schedule(x: Origin, o: str) -> dict[str, Any]:
    """verl changes the rate once in a step, and nemorl with each of its optimizer steps."""
    updates, steps = learning.updates(x) * x.get(f"{ACTOR}.ppo_epochs"), learning.num_steps(x)
    warmup = x.get(f"{o}.lr_warmup_steps")
    by_veomni = engine(x) == "veomni"  # which has names and a default of its own, and counts by shares
    if warmup <= 0 or by_veomni:
        warmup = int(x.get(f"{o}.lr_warmup_steps_ratio") * steps)
    schedule: dict[str, Any] = {}
    if warmup > 0:
        schedule = {"warmup_steps": warmup * updates, "first_step": 0}
        name = "lr_start" if by_veomni else "lr_warmup_init"
        if start := float(x.get(f"{o}.{name}", 0.0)) / float(x.get(f"{o}.lr")):
            schedule["warmup_start"] = min(start, 1.0)
        if updates > 1:
            how = "the rate rises with each optimizer step, and not once in a step"
            x.changed(f"{o}.lr_warmup_steps", how)
    key = f"{o}.lr_decay_style" if engine(x) == "megatron" else f"{o}.lr_scheduler_type"
    style = x.get(key, "cosine" if by_veomni else "constant")
    if style in ("cosine", "linear"):
        end, peak = x.get(f"{o}.lr_decay_steps", steps), float(x.get(f"{o}.lr"))
        least = x.get(f"{o}.min_lr", peak * float(x.get(f"{o}.min_lr_ratio", 0.0)))
        if by_veomni:
            end, least = steps * x.get(f"{o}.lr_decay_ratio", 1.0), x.get(f"{o}.lr_min", 0.0)
        end, least = int(end) * updates, float(least)
        schedule |= {"name": style, "decay_steps": end, "min_lr": least, "first_step": 0}
    elif style != "constant":
        raise not_imported(key, style, "schedule", ("constant", "cosine", "linear"))
    return schedule


_ADAPTED = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]  # verl's default


def lora(x: Origin) -> Fields:
    for prefix, names, adapter in (
        (f"{MODEL}.lora_", f"{MODEL}.target_modules", f"{MODEL}.lora_adapter_path"),
        (f"{MODEL}.lora.", f"{MODEL}.lora.target_modules", f"{MODEL}.lora.adapter_path"),
    ):
        if rank := x.get(f"{prefix}rank", 0):
            default = "all-linear" if prefix.endswith("_") else _ADAPTED
            targets = lora_targets(x, names, x.values.get(names) or default)
            section: dict[str, Any] = {"rank": rank, "alpha": x.get(f"{prefix}alpha"), "targets": targets}
            start = {"start": str(x.get(adapter))} if x.get(adapter) is not None else {}
            return {"policy.lora": section | start}
    return {}


def router(x: Origin) -> Fields:
    fields: dict[str, Any] = {}
    modes = {
        x.get(key, "disabled"): key
        for key in (f"{section}.router_replay.mode" for section in (ACTOR, MEGATRON, VEOMNI))
    }
    if "R3" in modes or x.get(f"{ROLLOUT}.enable_rollout_routing_replay", False):
        fields["policy.moe.router_replay"] = True
    # A single update has the weights of the pass for old logprobs, and so chooses the same experts.
    elif "R2" in modes and learning.updates(x) * x.get(f"{ACTOR}.ppo_epochs") > 1:
        if learning.computes_old_logprobs(x):
            fields["policy.moe.update_replay"] = True
        else:
            x.lost(modes["R2"], "there is no pass for old logprobs, whose experts updates could have")
    if x.get(f"{MODEL}.override_config.moe_config.freeze_moe_router", False):
        fields["policy.moe.freeze_router"] = True
    kind = str(x.get(f"{TRANSFORMER}.moe_router_load_balancing_type", "aux_loss")).strip('"')
    if kind != "none" and (coefficient := float(x.get(f"{TRANSFORMER}.moe_aux_loss_coeff", 0.0))) > 0:
        fields["policy.moe.load_balancing_loss_coefficient"] = coefficient
        x.changed(f"{TRANSFORMER}.moe_aux_loss_coeff", "the balance loss is of each sequence here")
    for name, field in (
        ("moe_z_loss_coeff", "z_loss_coefficient"),
        ("moe_router_bias_update_rate", "bias_update_rate"),
    ):
        if value := float(x.get(f"{TRANSFORMER}.{name}", 0.0)):
            fields[f"policy.moe.{field}"] = value
    return fields


def further_tokens(x: Origin) -> Fields:
    if not x.get(f"{MODEL}.mtp.enable", False):
        return {}
    if not x.get(f"{MODEL}.mtp.enable_train", False):
        why = "layers for further tokens stay those of the model's folder, also in exports"
        x.lost(f"{MODEL}.mtp.enable", why, changes_result=False)
        return {}
    weight, detach = f"{MODEL}.mtp.mtp_loss_scaling_factor", f"{MODEL}.mtp.detach_encoder"
    section = {"loss_weight": float(x.get(weight)), "detach": x.get(detach)}
    how = "its loss is a mean over the minibatch, not each micro-batch"
    if section["detach"]:
        x.changed(detach, "gradients of these layers are clipped by a norm of their own")
    else:  # verl never trains the head by it
        how += ", and trains the head too"
    x.changed(f"{MODEL}.mtp.enable_train", how)
    return {"policy.multi_token_prediction": section}


def drafts(x: Origin) -> Fields:
    if not (x.get(f"{MODEL}.mtp.enable", False) and x.get(f"{MODEL}.mtp.enable_rollout", False)):
        return {}
    name = (
        "speculative_num_steps" if x.get(f"{ROLLOUT}.name", "vllm") == "sglang" else "num_speculative_tokens"
    )
    tokens = x.get(f"{MODEL}.mtp.{name}")
    return {"generation.speculation": {"method": "mtp", "max_tokens": int(tokens)}}


def critic(x: Origin) -> Fields:
    if x.get("algorithm.adv_estimator") != "gae":
        return {}
    optimizer = {
        "lr": float(x.get("critic.optim.lr")),
        "weight_decay": float(x.get("critic.optim.weight_decay")),
    }
    section: dict[str, Any] = {"devices": "policy", "optimizer": {"name": "adam", **optimizer}}
    if (model := x.get("critic.model.path")) and model != x.get(f"{MODEL}.path"):
        section["model_path"] = model
    return {"critic": section}


def generation(x: Origin) -> Fields:
    name, gpus = x.get(f"{ROLLOUT}.name", "vllm"), count_gpus(x)
    if name not in ("vllm", "sglang"):
        raise CannotImport(f"{ROLLOUT}.name = {name}: engines on the policy's GPUs are vLLM's here")
    if name == "sglang":
        x.changed(f"{ROLLOUT}.name", "vLLM samples; another engine's rounding differs", changes_result=False)
    tensor, stages = (
        x.get(f"{ROLLOUT}.tensor_model_parallel_size"),
        x.get(f"{ROLLOUT}.pipeline_model_parallel_size", 1),
    )
    number = replicas(gpus, tensor * stages, f"{ROLLOUT}.tensor_model_parallel_size")
    fields: dict[str, Any] = {
        "generation.backend": "vllm",
        "generation.colocated": True,
        "generation.replicas": number,
        "generation.tensor_parallel_size": tensor,
        "generation.gpu_memory_utilization": x.get(f"{ROLLOUT}.gpu_memory_utilization"),
        "generation.max_num_seqs": x.get(f"{ROLLOUT}.max_num_seqs"),
    }
    if stages > 1:
        fields["generation.pipeline_parallel_size"] = stages
    if x.get(f"{ROLLOUT}.enforce_eager", False):
        fields["generation.enforce_eager"] = True
    if x.values.get(f"{ROLLOUT}.enable_prefix_caching") is False:
        fields["generation.enable_prefix_caching"] = False
    if tokens := x.get(f"{ROLLOUT}.max_num_batched_tokens"):
        fields["generation.max_num_batched_tokens"] = tokens
    if format_ := x.get(f"{ROLLOUT}.quantization"):
        fields["generation.quantization"] = format_
    filters = {
        f"{ROLLOUT}.{name}": x.get(f"{ROLLOUT}.{name}")
        for name, neutral in (("top_p", (1,)), ("top_k", (-1, 0)))
        if x.get(f"{ROLLOUT}.{name}") not in neutral
    }
    temperature = float(x.get(f"{ROLLOUT}.temperature"))
    fields["generation.sampling"] = trained_sampling(x, temperature, filters)
    return fields | engine_arguments(x)


def engine_arguments(x: Origin) -> dict[str, Any]:
    arguments = x.below(f"{ROLLOUT}.engine_kwargs.vllm")
    if x.get(f"{ROLLOUT}.expert_parallel_size", 1) > 1:
        arguments["enable_expert_parallel"] = True
    fields: dict[str, Any] = {}
    if (cache := arguments.pop("kv_cache_dtype", None)) is not None:
        fields["generation.kv_cache_dtype"] = "fp8" if str(cache).startswith("fp8") else "auto"
    if arguments.pop("max_model_len", None) is not None:
        x.lost(
            f"{ROLLOUT}.engine_kwargs.vllm.max_model_len",
            "it is policy.max_sequence_length",
            changes_result=False,
        )
    return fields | ({"generation.vllm_kwargs": arguments} if arguments else {})


def checkpoints(x: Origin) -> Fields:
    period, kept = x.get("trainer.save_freq"), x.get("trainer.max_actor_ckpt_to_keep")
    default = f"checkpoints/{x.get('trainer.project_name')}/{x.get('trainer.experiment_name')}"
    folder = home(str(x.get("trainer.default_local_dir", default)))
    fields: dict[str, Any] = {"run_dir": folder}
    if period <= 0:
        return fields | {"checkpointing": {"enabled": False}}
    section: dict[str, Any] = {"period": period} | ({"keep": kept} if kept else {})
    if "hf_model" in x.get(f"{ACTOR}.checkpoint.save_contents", []):
        section["export_hf"] = True
    return fields | {"checkpointing": section}


def seed(x: Origin) -> Fields:
    seed = x.get("data.seed", x.get("trainer.seed"))
    return {} if seed is None else {"seed": int(seed)}


def trackers(x: Origin) -> Fields:
    given, project = x.values.get("trainer.logger") or [], x.get("trainer.project_name")
    names = given if isinstance(given, list) else [given]
    sections = {name: {"project": project} for name in ("wandb", "swanlab", "trackio")}
    return shared.trackers(x, "trainer.logger", names, sections | {"mlflow": {"experiment": project}})
