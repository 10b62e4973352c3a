"""NeMo-RL's keys of devices: layout, memory, optimizer, adapters, engines and checkpoints.

Its sections `policy` and `value` have the same keys, which become our `policy` and `critic`.
"""

import json
from collections.abc import Callable
from typing import Any, Literal

from . import shared
from .nemo_rl_learning import GENERATION, colocated, has_critic, updates_of_pass
from .nemo_rl_mopd import teacher_nodes
from .nemo_rl_sections import MEGATRON, distills, has_agents_teachers, is_online, kind
from .rules import CannotImport, Fields, Origin, not_imported
from .shared import OFFLOADED_HOW, layout, lora_targets, replicas, sampling, without_excluded

DTENSOR = "policy.dtensor_cfg"
OURS = {"policy": "policy", "value": "critic", "teacher": "teachers.main"}
VLLM = "policy.generation.vllm_cfg"
_BACKENDS = ("vllm", "megatron", "trtllm", "sglang", "dynamo")
# Devices.


def device_counts(x: Origin) -> tuple[int, int]:
    """GPUs of the policy and of generation, which are the same if they share. Teachers may have others."""
    nodes, per_node = x.get("cluster.num_nodes", 1) - teacher_nodes(x), x.get("cluster.gpus_per_node", 1)
    total = nodes * per_node
    if not is_online(x) or colocated(x):
        return total, total
    resources = f"{GENERATION}.colocated.resources"
    taken = x.get(f"{resources}.num_nodes", 1) * x.get(f"{resources}.gpus_per_node", per_node)
    if nodes > 1 and x.get(f"{resources}.num_nodes") is None:
        raise CannotImport(f"{resources}.num_nodes: give the nodes of generation")
    return total - taken, taken


def backend(x: Origin, model: str = "policy") -> str:
    """The section of the back end that computes the policy, the critic or the teacher."""
    name = "megatron_cfg" if x.get(f"{model}.megatron_cfg.enabled", False) else "dtensor_cfg"
    return f"{model}.{name}"


def model_layout(x: Origin, model: str = "policy") -> Fields:
    (gpus, _), section, path = device_counts(x), backend(x, model), f"{OURS[model]}.layout"
    megatron, dtensor = f"{model}.megatron_cfg", f"{model}.dtensor_cfg"
    if section == megatron:
        x.skip(dtensor, f"{megatron}.enabled is true, so nothing uses it")
        names = {
            "tensor": "tensor_model",
            "pipeline": "pipeline_model",
            "context": "context",
            "expert": "expert_model",
            "expert_tensor": "expert_tensor",
        }
    else:
        x.skip(megatron, f"{megatron}.enabled is false, so nothing uses it")
        names = {name: name for name in ("tensor", "context", "expert")}
    sizes = {ours: x.get(f"{section}.{name}_parallel_size", 1) for ours, name in names.items()}
    fields = dict(layout(gpus, sizes, section, path))
    for ours, stage in (("layers_in_first_stage", "first"), ("layers_in_last_stage", "last")):
        layers = x.get(f"{megatron}.num_layers_in_{stage}_pipeline_stage")
        if layers is not None and sizes.get("pipeline", 1) > 1:
            fields[f"{path}.{ours}"] = layers
    if x.get(f"{section}.sequence_parallel", False) and sizes["tensor"] > 1:
        fields[f"{path}.sequence_parallel"] = True
    return fields


SIZES = (
    *(f"{MEGATRON}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context")),
    *(f"{MEGATRON}.{name}_parallel_size" for name in ("expert_model", "expert_tensor")),
    *(f"{MEGATRON}.num_layers_in_{stage}_pipeline_stage" for stage in ("first", "last")),
    *(f"{MEGATRON}.sequence_parallel", f"{MEGATRON}.enabled"),
)
FSDP_SIZES = tuple(
    f"{DTENSOR}.{name}"
    for name in (
        *("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"),
        "sequence_parallel",
    )
)
RECOMPUTE = (
    *(f"{MEGATRON}.activation_checkpointing", f"{DTENSOR}.activation_checkpointing"),
    *(f"{MEGATRON}.recompute_granularity", f"{MEGATRON}.recompute_modules"),
)
DECAY = "norms and biases have no weight decay here"
SHARDING = "data parallelism shards the optimizer's state, and not the weights as FSDP does: more memory"


def recompute(x: Origin, model: str = "policy") -> Fields:
    section, path = backend(x, model), f"{OURS[model]}.recompute"
    if not x.get(f"{section}.activation_checkpointing", False):
        return {}
    if section.endswith("dtensor_cfg") or x.get(f"{section}.recompute_granularity", "full") == "full":
        return {path: {"name": "full"}}
    known = ("core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj")
    modules = x.get(f"{section}.recompute_modules", ["core_attn"])
    return {path: {"name": "selective", "modules": [name for name in modules if name in known]}}


OFFLOADED = (f"{MEGATRON}.fine_grained_activation_offloading", f"{MEGATRON}.fp8_cfg.enabled")


def offload_activations(x: Origin) -> Fields:
    """Megatron-LM offloads what some modules of each layer save, and nemorl what whole layers save."""
    key, modules = OFFLOADED[0], f"{MEGATRON}.offload_modules"
    if not (x.get(f"{MEGATRON}.enabled", False) and x.get(key, False)):
        return {}
    if x.get(OFFLOADED[1], False) or x.get(QUANTIZATION[0]) is not None:
        why = "layers that save weights in FP8 or rounded keep their activations on the device"
        x.lost(key, why, changes_result=False)
        return {}
    x.changed(key, OFFLOADED_HOW, changes_result=False)
    x.lost(modules, f"activations leave the device {OFFLOADED_HOW}", changes_result=False)
    return shared.OFFLOADED


def micro_batches(x: Origin) -> Fields:
    length = x.get("policy.max_total_sequence_length", 0)
    # A pass holds both answers of a pair.
    least = 2 * length if kind(x) in ("dpo", "rm") else length
    tokens = micro_batch_tokens(x, "policy")
    return {"policy.max_sequence_length": length, "policy.micro_batch_tokens": max(tokens, least)}


def micro_batch_tokens(x: Origin, model: str) -> int:
    tokens = x.get(f"{model}.max_total_sequence_length", 0) * x.get(f"{model}.train_micro_batch_size", 1)
    for name in ("sequence_packing", "dynamic_batching"):
        if x.get(f"{model}.{name}.enabled", False):
            tokens = x.get(f"{model}.{name}.train_mb_tokens", tokens)
    return int(tokens)


MICRO = tuple(
    f"policy.{name}"
    for name in (
        *("train_micro_batch_size", "sequence_packing.enabled", "sequence_packing.train_mb_tokens"),
        *("dynamic_batching.enabled", "dynamic_batching.train_mb_tokens", "max_total_sequence_length"),
    )
)


def optimizer(x: Origin, model: str = "policy") -> Fields:
    """Their schedules advance by one in a pass over the batch, ours with each optimizer step."""
    by_megatron, ours = backend(x, model).endswith("megatron_cfg"), OURS[model]
    section, schedule = megatron_optimizer(x, model) if by_megatron else torch_optimizer(x, model)
    updates = updates_of_pass(x)
    for name in ("warmup_steps", "decay_steps"):
        if name in schedule and updates > 1:
            schedule[name] *= updates
            key = f"{model}.megatron_cfg.scheduler.lr_warmup_iters" if by_megatron else f"{model}.scheduler"
            x.changed(key, "the rate changes with each optimizer step, and not once in a pass over the batch")
    fields: dict[str, Any] = {f"{ours}.optimizer": section}
    return fields | ({f"{ours}.schedule": schedule} if schedule else {})


def megatron_optimizer(x: Origin, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    megatron = f"{model}.megatron_cfg"
    o, s = f"{megatron}.optimizer", f"{megatron}.scheduler"
    why = f"{megatron}.enabled is true, so nothing uses it"
    x.skip(f"{model}.optimizer", why)
    for key in (f"{model}.optimizer", f"{model}.scheduler"):
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
        raise not_imported(f"{o}.optimizer", name, "optimizer", ("adam", "sgd"))
    schedule: dict[str, Any] = {}
    if warmup := x.get(f"{s}.lr_warmup_iters", 0):
        start = min(float(x.get(f"{s}.lr_warmup_init", 0.0)) / lr, 1.0)
        schedule = {"warmup_steps": warmup, "warmup_start": start, "first_step": 0}
    style = x.get(f"{s}.lr_decay_style", "constant")
    if style in ("linear", "cosine"):
        schedule |= {"name": style, "decay_steps": x.get(f"{s}.lr_decay_iters", 1000), "first_step": 0}
        schedule |= {"min_lr": float(x.get(f"{o}.min_lr", 0.0))}
    elif style != "constant":
        raise not_imported(f"{s}.lr_decay_style", style, "schedule", ("constant", "linear", "cosine"))
    return section, schedule


def torch_optimizer(x: Origin, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    k = f"{model}.optimizer.kwargs"
    name = str(x.get(f"{model}.optimizer.name", "AdamW")).rpartition(".")[2]
    if name not in ("AdamW", "FusedAdam", "Adam"):
        raise not_imported(f"{model}.optimizer.name", name, "optimizer", ("AdamW", "FusedAdam", "Adam"))
    betas = x.get(f"{k}.betas", [0.9, 0.999])
    section: dict[str, Any] = {
        "name": "adam",
        "lr": float(x.get(f"{k}.lr", 1e-3)),
        "weight_decay": x.get(f"{k}.weight_decay", 0.01),
        **{"beta1": betas[0], "beta2": betas[1], "eps": float(x.get(f"{k}.eps", 1e-8))},
    }
    for moment in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if (given := x.get(f"{k}.{moment}")) is not None:
            section[moment] = str(given).rpartition(".")[2]
    return section, torch_schedule(x, f"{model}.scheduler")


def torch_schedule(x: Origin, key: str) -> dict[str, Any]:
    """LinearLR up, then constant or cosine, as a SequentialLR of torch."""
    parts = x.get(key, [])
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
                x.changed(key, f"{name} has no counterpart and is left out")
    return schedule


OPTIMIZER = tuple(
    f"{MEGATRON}.{name}"
    for name in (
        *("optimizer.optimizer", "optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay"),
        *("optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.adam_eps", "optimizer.sgd_momentum"),
        *("optimizer.optimizer_cpu_offload", "scheduler.lr_warmup_iters", "scheduler.lr_warmup_init"),
        *("scheduler.lr_decay_style", "scheduler.lr_decay_iters"),
    )
)
TORCH_OPTIMIZER = (
    *("policy.optimizer.name", "policy.scheduler"),
    *(f"policy.optimizer.kwargs.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
    *(f"policy.optimizer.kwargs.{name}" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")),
)


def lora(x: Origin, model: str = "policy") -> Fields:
    section = backend(x, model)
    section += ".peft" if section.endswith("megatron_cfg") else ".lora_cfg"
    if not x.get(f"{section}.enabled", False):
        return {}
    names = x.get(f"{section}.target_modules", [])
    if x.get(f"{section}.match_all_linear", False):
        names = []
    targets = lora_targets(x, f"{section}.target_modules", names)
    targets = without_excluded(targets, x.get(f"{section}.exclude_modules", []))
    rank, alpha = x.get(f"{section}.dim", 8), x.get(f"{section}.alpha", 32)
    return {f"{OURS[model]}.lora": {"rank": rank, "alpha": alpha, "targets": targets}}


LORA = (
    *(f"{MEGATRON}.peft.{name}" for name in ("enabled", "dim", "alpha", "target_modules")),
    *(f"{DTENSOR}.lora_cfg.{name}" for name in ("enabled", "dim", "alpha", "target_modules")),
    *(f"{section}.exclude_modules" for section in (f"{MEGATRON}.peft", f"{DTENSOR}.lora_cfg")),
    f"{DTENSOR}.lora_cfg.match_all_linear",
)


def keys_of(model: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The policy's keys in the section of another model."""
    return tuple(key.replace("policy", model, 1) for key in keys)


CRITIC = ("value.model_name", "value.precision", "value.max_grad_norm")


def critic(x: Origin) -> Fields:
    """The section of a critic: which model it is, where it runs and how it computes."""
    if not has_critic(x):
        return {}
    section: dict[str, Any] = {"devices": "policy"}
    if (name := x.get("value.model_name")) not in (None, x.get("policy.model_name")):
        section["model_path"] = name
    if (precision := x.get("value.precision")) not in (None, x.get("policy.precision")):
        section["precision"] = precision
    section["max_grad_norm"] = x.get("value.max_grad_norm")
    length = x.get("policy.max_total_sequence_length", 0)
    section["micro_batch_tokens"] = max(micro_batch_tokens(x, "value"), length)
    if x.get("value.megatron_cfg.fp8_cfg.enabled", False) and "megatron" in backend(x, "value"):
        x.lost("value.megatron_cfg.fp8_cfg.enabled", "critics compute in bfloat16 or float32")
    return {"critic": section}


def of_critic(write: Callable[[Origin, str], Fields]) -> Callable[[Origin], Fields]:
    return lambda x: write(x, "value") if has_critic(x) else {}


def fp8(x: Origin) -> Fields:
    if not (x.get(f"{MEGATRON}.enabled", False) and x.get(f"{MEGATRON}.fp8_cfg.enabled", False)):
        return {}
    number, recipe = (
        x.get(f"{MEGATRON}.fp8_cfg.fp8", "hybrid"),
        x.get(f"{MEGATRON}.fp8_cfg.fp8_recipe", "tensorwise"),
    )
    return {"policy.fp8": {"format": number, "recipe": recipe}}


FURTHER_TOKENS = tuple(
    f"{MEGATRON}.mtp_{name}"
    for name in ("num_layers", "loss_scaling_factor", "use_repeated_layer", "detach_heads")
)


def further_tokens(x: Origin) -> Fields:
    number = int(x.get(f"{MEGATRON}.mtp_num_layers", 0))
    if not (x.get(f"{MEGATRON}.enabled", False) and number):
        return {}
    section: dict[str, Any] = {
        "loss_weight": float(x.get(f"{MEGATRON}.mtp_loss_scaling_factor", 0.1)),  # Megatron's default
        "detach": x.get(f"{MEGATRON}.mtp_detach_heads", False),
    }
    if x.get(f"{MEGATRON}.mtp_use_repeated_layer", False):
        section["depth"] = number
    elif number > 1:
        x.changed(f"{MEGATRON}.mtp_num_layers", "as many as the model's folder has", changes_result=False)
    return {"policy.multi_token_prediction": section}


_OF_DRAFT_HEAD = (
    *("enabled", "model_name", "aux_layer_indices", "learning_rate"),
    *("ttt_steps", "ttt_step_loss_decay"),
)
DRAFT_HEAD = tuple(f"policy.draft.{name}" for name in _OF_DRAFT_HEAD)


def draft_head(x: Origin) -> Fields:
    if not x.get("policy.draft.enabled", False):
        return {}
    x.changed("policy.draft.enabled", "its gradients are clipped by their own norm, not by the policy's")
    rate = x.get("policy.draft.learning_rate") or x.get(f"{MEGATRON}.optimizer.lr", 1e-6)
    section: dict[str, Any] = {"lr": float(rate)}
    section["depth"] = x.get("policy.draft.ttt_steps") or 1  # its Megatron back end trains one
    if section["depth"] > 1:
        section["step_decay"] = float(x.get("policy.draft.ttt_step_loss_decay", 1.0))
    if folder := x.get("policy.draft.model_name"):
        section["model_path"] = folder
    elif layers := x.get("policy.draft.aux_layer_indices"):  # numbers of layers, from 0
        section["layers"] = [layer + 1 for layer in layers]
    return {"policy.draft": section}


# By the last name of ModelOpt's configs in recipes, the format, and the linear layers that have it. Its
# defaults, too, leave out the head, routers and convolutions, which are none of ours.
_Layers = Literal["all", "mlp", "experts", "nano3"]
_QUANTIZED: dict[str, tuple[str, _Layers]] = {
    "NVFP4_DEFAULT_CFG": ("nvfp4", "all"),
    "NVFP4_MLP_WEIGHT_ONLY_CFG": ("nvfp4_w4a16", "mlp"),
    "nvfp4_a16_mlp_only": ("nvfp4_w4a16", "mlp"),
    "nano3_nvfp4_default": ("nvfp4", "nano3"),
    "nano3_nvfp4_weightonly": ("nvfp4_w4a16", "nano3"),
    "nvfp4_experts_weightonly": ("nvfp4_w4a16", "experts"),
    "nvfp4_experts": ("nvfp4", "experts"),
}
_ATTENTION = ("*self_attn*",)
_MIXERS = ("*.mixer.[qkvo]_proj*", "*.mixer.in_proj*", "*.mixer.out_proj*")  # of Nemotron's hybrid models
_NANO_3 = ("*.[qkvo]_proj*", *(f"*.layers.{number}.*" for number in (4, 11, 18, 25, 32, 41)))
QUANTIZATION = ("policy.quant_cfg", f"{GENERATION}.quant_cfg")


def quantization(x: Origin) -> Fields:
    """Training with rounded weights, which engines get as well: as they are, or in the format itself."""
    trained, sampled = (x.get(key) for key in QUANTIZATION)
    config = str(trained).rpartition("/")[2].removesuffix(".yaml")
    if config not in _QUANTIZED or sampled not in (None, trained):
        why = "no format of policy.quantization is known to be this; set one"
        for key in (*QUANTIZATION, f"{GENERATION}.real_quant"):
            x.lost(key, why, changes_result=x.values.get(key) not in (None, False))
        return {}
    name, layers = _QUANTIZED[config]
    hybrid = "nemotron" in str(x.get("policy.model_name")).lower()
    section: dict[str, Any] = {"format": name, "train": "fake"}
    if layers != "all":
        ignore = _NANO_3 if layers == "nano3" else _MIXERS if hybrid else _ATTENTION
        section["ignore"] = [*ignore, *(["*shared_expert*"] if layers == "experts" and hybrid else [])]
    if name == "nvfp4":
        section |= {"activations": True, "calibration": {"prompts": x.get("policy.quant_calib_size", 128)}}
        x.changed("policy.quant_cfg", "ranges of activations are measured on prompts of data.train")
    # Layers of Transformer Engine do not round weights.
    return {"policy.quantization": section, "policy.kernels": "local"}


def router(x: Origin) -> Fields:
    if not x.get(f"{MEGATRON}.enabled", False):
        return {}
    fields: dict[str, Any] = {}
    has_experts = x.get(f"{MEGATRON}.expert_model_parallel_size", 1) > 1
    if x.get(f"{MEGATRON}.freeze_moe_router", False) and has_experts:
        fields["policy.moe.freeze_router"] = True
    balance = x.get(f"{MEGATRON}.moe_router_load_balancing_type", "none")
    why = "its auxiliary loss; `policy.moe.load_balancing_loss_coefficient` has that of each sequence"
    x.lost(
        f"{MEGATRON}.moe_router_load_balancing_type", why, changes_result=has_experts and balance != "none"
    )
    if (rate := x.get(f"{MEGATRON}.moe_router_bias_update_rate", 0.0)) > 0 and has_experts:
        fields["policy.moe.bias_update_rate"] = rate
    if (coefficient := x.get(f"{MEGATRON}.moe_aux_loss_coeff", 0.0)) > 0:
        fields["policy.moe.load_balancing_loss_coefficient"] = coefficient
        x.changed(f"{MEGATRON}.moe_aux_loss_coeff", "the balance loss is of each sequence here")
    return fields


def model_folder(x: Origin) -> Fields:
    """What the folder of the model has to hold, as a comment on its path."""
    model, asks = x.get("policy.model_name"), []
    if rope := x.below("policy.hf_config_overrides.rope_scaling"):
        asks.append(f"set rope_scaling in config.json of a copy of this folder to {json.dumps(rope)}")
        for key in x.values:
            if key.startswith("policy.hf_config_overrides.rope_scaling."):
                x.changed(key, "a comment: config.json of the model's folder has it", changes_result=False)
    if x.get("policy.dequantize_base_checkpoint", False):
        asks.append("name a copy of this folder with weights in bfloat16")
        how = "a comment: the model's folder has weights that are not quantized"
        x.changed("policy.dequantize_base_checkpoint", how, changes_result=False)
    if asks:
        x.note(str(model), "; ".join(asks))
    return {}


# Generation.


def generation(x: Origin) -> Fields:
    if not is_online(x):
        return {}
    backend, (_, gpus) = x.get(f"{GENERATION}.backend", "vllm"), device_counts(x)
    # Sampling ends at the length of the conversation in both; a prompt has a token.
    longest = x.get("policy.max_total_sequence_length", 2) - 1
    section: dict[str, Any] = {
        "backend": backend,
        "max_new_tokens": min(x.get(f"{GENERATION}.max_new_tokens", longest), longest),
    }
    if x.get(f"{GENERATION}.max_new_tokens", longest) > longest:
        how = f"{longest}, as a prompt has a token; sampling ends at policy.max_sequence_length in both"
        x.changed(f"{GENERATION}.max_new_tokens", how, changes_result=False)
    engine = f"{GENERATION}.{backend}_cfg"
    match backend:
        case "vllm":
            section |= vllm(x, gpus)
        case "megatron" if colocated(x):
            pass
        case "megatron":
            tensor = x.get(f"{MEGATRON}.tensor_model_parallel_size", 1)
            section |= by_vllm(x, gpus, tensor, "Megatron samples in the policy's own processes only")
        case "trtllm" if colocated(x):
            tensor = x.get(f"{engine}.tensor_parallel_size", 1)
            section |= by_vllm(x, gpus, tensor, "TensorRT-LLM has GPUs of its own here")
            for name in ("max_batch_size", "max_num_tokens"):
                x.lost(f"{engine}.{name}", "of TensorRT-LLM; vLLM samples", changes_result=False)
        case "trtllm":
            tensor = x.get(f"{engine}.tensor_parallel_size", 1)
            section |= {"tensor_parallel_size": tensor, "replicas": replicas(gpus, tensor, engine)}
            if x.get(f"{kind(x)}.async_{kind(x)}.in_flight_weight_updates", False):
                section["prefix_caching"] = False  # sequences would leave an old cache for others
            for name in ("max_batch_size", "max_num_tokens"):
                if (value := x.get(f"{engine}.{name}")) is not None:
                    section[name] = (
                        max(value, x.get("policy.max_total_sequence_length", 0)) if "num" in name else value
                    )
        case "sglang" | "dynamo":
            server = f"{engine}.sglang_server_config.num_gpus_per_engine"
            tensor = x.get(server, x.get(f"{engine}.tp_size", x.get(f"{VLLM}.tensor_parallel_size", 1)))
            section |= by_vllm(x, gpus, tensor)
            memory = x.get(f"{engine}.mem_fraction_static", x.get(f"{VLLM}.gpu_memory_utilization"))
            section |= {"gpu_memory_utilization": memory} if memory is not None else {}
        case _:
            raise not_imported(f"{GENERATION}.backend", backend, "engine", _BACKENDS)
    for name in ("stop_token_ids", "stop_strings"):
        if values := x.get(f"{GENERATION}.{name}"):
            section[name] = values
    temperature, top_p, top_k = (
        x.get(f"{GENERATION}.{name}", neutral)
        for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", None))
    )
    section["sampling"] = sampling(temperature, top_p, top_k)
    if distills(x) or has_agents_teachers(x):
        section["sampling"] = {"temperature": temperature}
        for name in ("top_p", "top_k"):
            why = "distributions over all tokens are compared, so that samples are of all tokens"
            neutral = x.values.get(f"{GENERATION}.{name}") in (None, 1, 1.0, -1)
            x.lost(f"{GENERATION}.{name}", why, changes_result=not neutral)
    return {"generation": section}


def by_vllm(x: Origin, gpus: int, tensor: int, why: str = "") -> dict[str, Any]:
    """vLLM for another engine, with the same placement."""
    how = "vLLM samples; another engine's rounding differs"
    x.changed(f"{GENERATION}.backend", f"{why}; {how}" if why else how, changes_result=False)
    return {"backend": "vllm", **engines(x, gpus, tensor, 1)}


def engines(x: Origin, gpus: int, tensor: int, stages: int) -> dict[str, Any]:
    section: dict[str, Any] = {"replicas": replicas(gpus, tensor * stages, f"{VLLM}.tensor_parallel_size")}
    section |= {"tensor_parallel_size": tensor} if tensor > 1 else {}
    section |= {"pipeline_parallel_size": stages} if stages > 1 else {}
    return section | ({"colocated": True} if colocated(x) else {})


def vllm(x: Origin, gpus: int) -> dict[str, Any]:
    tensor, stages = x.get(f"{VLLM}.tensor_parallel_size", 1), x.get(f"{VLLM}.pipeline_parallel_size", 1)
    section = engines(x, gpus, tensor, stages)
    arguments = x.below(f"{GENERATION}.vllm_kwargs")
    if x.get(f"{VLLM}.expert_parallel_size", 1) > 1 or x.get(f"{VLLM}.enable_expert_parallel", False):
        arguments["enable_expert_parallel"] = True
        if x.get(f"{VLLM}.expert_parallel_size", 1) > tensor * stages:
            how = "experts are spread over the GPUs of an engine, and not over several engines"
            x.changed(f"{VLLM}.expert_parallel_size", how, changes_result=False)
    for name in ("gpu_memory_utilization", "kv_cache_dtype"):
        if (value := x.get(f"{VLLM}.{name}")) not in (None, "auto"):
            section[name] = "fp8" if str(value).startswith("fp8") else value
    if x.get(f"{VLLM}.enforce_eager", False):
        section["enforce_eager"] = True
    if x.values.get(f"{VLLM}.enable_prefix_caching") is False:
        section["enable_prefix_caching"] = False
    if x.get(f"{VLLM}.precision") == "fp8":  # blocks of 128, or of 32 with a power of two as their scale
        section |= {"quantization": "mxfp8" if x.get(f"{VLLM}.is_mx", False) else "fp8_per_block"}
        if words := x.get(f"{VLLM}.quantization_ignored_layer_kws", []):
            arguments["quantization_config"] = {"ignore": [f"*{word}*" for word in words]}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if name in arguments:
            section[name] = arguments.pop(name)
    for name in ("kv_cache_memory_bytes", "enable_chunked_prefill", "tokenizer"):
        if arguments.pop(name, None) is not None:
            x.lost(
                f"{GENERATION}.vllm_kwargs.{name}", "it follows from other fields here", changes_result=False
            )
    return section | ({"vllm_kwargs": arguments} if arguments else {})


ENGINE_KEYS = (
    *(f"{GENERATION}.{name}" for name in ("backend", "max_new_tokens", "temperature", "top_p", "top_k")),
    *(f"{GENERATION}.{name}" for name in ("stop_token_ids", "stop_strings", "colocated.enabled")),
    *(f"{GENERATION}.colocated.resources.{name}" for name in ("num_nodes", "gpus_per_node")),
    *(f"{VLLM}.{name}_parallel_size" for name in ("tensor", "pipeline", "expert")),
    *(
        f"{VLLM}.{name}"
        for name in ("gpu_memory_utilization", "kv_cache_dtype", "enforce_eager", "precision")
    ),
    *(f"{VLLM}.{name}" for name in ("enable_prefix_caching", "enable_expert_parallel")),
    *(f"{VLLM}.{name}" for name in ("is_mx", "quantization_ignored_layer_kws")),
    f"{GENERATION}.vllm_kwargs.*",
    *(
        f"{GENERATION}.trtllm_cfg.{name}"
        for name in ("tensor_parallel_size", "max_batch_size", "max_num_tokens")
    ),
    f"{GENERATION}.sglang_cfg.sglang_server_config.num_gpus_per_engine",
    *(f"{GENERATION}.sglang_cfg.{name}" for name in ("tp_size", "mem_fraction_static")),
)


# Checkpoints, tokenizer.


def checkpoints(x: Origin) -> Fields:
    section: dict[str, Any] = {}
    if not x.get("checkpointing.enabled", True):
        return {"checkpointing": {"enabled": False}}
    if (period := x.get("checkpointing.save_period", 10)) > 0:
        section["period"] = period
    section["keep"] = x.get("checkpointing.keep_top_k", 2)
    scheduled = x.get(f"{kind(x)}.val_period", 0) > 0
    if x.get("checkpointing.metric_name") == "val:accuracy" and scheduled and is_online(x):
        section |= {"metric": "validation/accuracy"}
        section |= {} if x.get("checkpointing.higher_is_better", True) else {"higher_is_better": False}
    elif x.get("checkpointing.metric_name") is not None:
        why = "the newest checkpoints are kept; set checkpointing.metric to one of this run"
        x.lost("checkpointing.metric_name", why, changes_result=False)
        x.lost("checkpointing.higher_is_better", why, changes_result=False)
    if x.get("checkpointing.save_consolidated", False):
        section["save_hf"] = True
    return {"checkpointing": section}


def trackers(x: Origin) -> Fields:
    sections: dict[str, dict[str, Any]] = {
        "wandb": {"project": x.get("logger.wandb.project"), "entity": x.get("logger.wandb.entity")},
        "swanlab": {"project": x.get("logger.swanlab.project")},
        "mlflow": {
            "experiment": x.get("logger.mlflow.experiment_name"),
            "tracking_uri": x.get("logger.mlflow.tracking_uri"),
        },
    }
    given = {
        name: {field: value for field, value in section.items() if value is not None}
        for name, section in sections.items()
    }
    names = [name for name in _TRACKERS if x.get(f"logger.{name}_enabled", False)]
    return shared.trackers(x, "logger.wandb_enabled", names, given)


_TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
TRACKERS = (
    *(f"logger.{name}_enabled" for name in _TRACKERS),
    *("logger.wandb.project", "logger.wandb.entity", "logger.swanlab.project"),
    *("logger.mlflow.experiment_name", "logger.mlflow.tracking_uri"),
)


def tokenizer(x: Origin) -> Fields:
    """Its folder, and a chat template that is given as a text or as a file."""
    fields: dict[str, Any] = {}
    name, key = x.get("policy.tokenizer.name"), "policy.tokenizer.chat_template"
    if name not in (None, x.get("policy.model_name")):
        fields["policy.tokenizer.path"] = name
    template = x.get(key, "default")
    if str(template).endswith(".jinja"):
        fields[key] = template
    elif template != "default" and x.options.template is not None:
        fields[key] = x.options.template
        x.files[x.options.template] = str(template)
    elif template != "default":
        x.lost(key, "with -o OUT it is written into a file next to the experiment")
    return fields
