"""OpenRLHF's keys of devices: layout, optimizer, adapters, engines and checkpoints."""

from collections.abc import Callable
from math import ceil
from typing import Any

from . import openrlhf_learning as learning
from . import shared
from .rules import CannotImport, Fields, Origin, not_imported
from .shared import layout, lora_targets, trained_sampling

_LENGTHS = {"ppo_ray": 2048, "sft": 2048, "dpo": 512, "rm": 512}
_RATES = {"sft": 5e-6, "dpo": 1e-5, "rm": 9e-6}
_NODE = 8  # GPUs of a node, where a command does not say how many it has
OPTIMIZER = (
    *("optim", "adam.lr", "adam.betas", "adam.eps", "adam.weight_decay"),
    *("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm"),
)


def model(x: Origin) -> Fields:
    key = "actor.model_name_or_path" if learning.is_online(x) else "model.model_name_or_path"
    if x.get(key) is None:
        raise CannotImport(f"{key}: give the model")
    return {"policy.model_path": x.get(key)}


def lengths(x: Origin) -> Fields:
    longest = x.get("data.max_len", _LENGTHS[learning.kind(x)])
    tokens = longest * x.get("train.micro_batch_size", 1)
    if x.get("train.dynamic_batch_enable"):
        tokens = x.get("train.max_tokens_per_gpu")
    least = 2 * longest if learning.kind(x) in ("dpo", "rm") else longest
    fields = {"policy.max_sequence_length": longest, "policy.micro_batch_tokens": max(tokens, least)}
    if not learning.is_online(x):
        return fields
    most = x.get("rollout.max_new_tokens", longest - 1)
    if learning.has_agent(x):
        how = "turns may fill the sequence, and prompts that leave less train nothing; there they are cut off"
        x.changed("rollout.max_new_tokens", how)
        fields["data.max_prompt_tokens"] = longest - most
        most = longest
    return fields | {"generation.max_new_tokens": min(most, longest - 1)}


def optimizer_of(section: str, ours: str) -> Callable[[Origin], Fields]:
    """The rule of the actor's, the critic's or the only model's optimizer."""

    def write(x: Origin) -> Fields:
        online = learning.is_online(x)
        is_critic = ours == "critic" and learning.estimator(x) != "gae"
        if online != bool(section) or is_critic:
            return {}
        if (name := x.get(f"{section}optim", "adam")) != "adam":
            raise not_imported(f"{section}optim", name, "optimizer", ("adam",))
        lr = x.get(f"{section}adam.lr", _RATES.get(learning.kind(x), 1e-6))
        beta1, beta2 = x.get(f"{section}adam.betas")
        adam: dict[str, Any] = {"name": "adam", "lr": lr, "beta1": beta1, "beta2": beta2}
        adam |= {"eps": x.get(f"{section}adam.eps"), "weight_decay": x.get(f"{section}adam.weight_decay")}
        if x.get("ds.adam_offload"):
            adam["on_host"] = True
        return {
            f"{ours}.optimizer": adam,
            f"{ours}.schedule": _schedule(x, section, lr),
            f"{ours}.max_grad_norm": x.get(f"{section}max_norm") or None,
        }

    return write


_SCHEDULES = ("cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup")


def _schedule(x: Origin, section: str, lr: float) -> dict[str, Any]:
    total = learning.scheduled_updates(x)
    warmup = ceil(total * x.get(f"{section}lr_warmup_ratio"))
    name = x.get(f"{section}lr_scheduler")
    schedule: dict[str, Any] = {"first_step": 0} | ({"warmup_steps": warmup} if warmup else {})
    match name:
        case "cosine_with_min_lr":
            end = max(total, warmup + 1)
            least = lr * x.get(f"{section}min_lr_ratio")
            return schedule | {"name": "cosine", "decay_steps": end, "min_lr": least}
        case "cosine" | "linear":
            return schedule | {"name": name, "decay_steps": max(total, warmup + 1)}
        case "constant" | "constant_with_warmup":
            return schedule if name == "constant_with_warmup" else {"first_step": 0}
    raise not_imported(f"{section}lr_scheduler", name, "schedule", _SCHEDULES)


def critic(x: Origin) -> Fields:
    if not learning.is_online(x) or learning.estimator(x) != "gae":
        return {}
    scores = () if learning.has_agent(x) else learning.split(x.get("reward.model_name_or_path"))
    given = x.get("critic.model_name_or_path") or (scores[0] if scores else None)
    own = str(given) if given else None
    fields: dict[str, Any] = {"critic.devices": "policy"}
    if own and own != x.get("actor.model_name_or_path"):
        fields["critic.model_path"] = own
    if scores and x.get("reward.normalize_enable"):
        if own in scores:
            fields["critic.normalize_values"] = True
        else:
            how = "of scores; set critic.normalize_values if config.json of the critic has mean and std"
            x.changed("reward.normalize_enable", how)
    section: dict[str, Any] = {"value_clip": x.get("critic.value_clip")}
    if (frozen := x.get("critic.freezing_steps")) > 0:
        section["warmup_steps"] = frozen
    return fields | {"algorithm.critic": section}


def _policy_gpus(x: Origin) -> int:
    if learning.is_online(x):
        return int(x.get("actor.num_nodes") * x.get("actor.num_gpus_per_node"))
    return int(x.get("nnodes", 1) * x.get("nproc_per_node", _NODE))


def _shares(x: Origin) -> bool:
    return bool(x.get("train.colocate_all") and not x.get("train.async_enable"))


def _engines(x: Origin) -> int:
    engines = int(x.get("vllm.num_engines", 0))
    if engines < 1:
        raise CannotImport("vllm.num_engines: OpenRLHF without vLLM is not imported; give their number")
    return engines


def layout_of(x: Origin) -> Fields:
    """The policy's GPUs, and those of engines that have their own."""
    policy = _policy_gpus(x)
    sizes = {"tensor": x.get("ds.tensor_parallel_size"), "context": x.get("ds.ring_attn_size")}
    fields = dict(layout(policy, sizes, "ds.tensor_parallel_size"))
    if sizes["tensor"] > 1:
        fields["policy.layout.sequence_parallel"] = True
    total = policy
    if learning.is_online(x) and not _shares(x):
        total += _engines(x) * x.get("vllm.tensor_parallel_size")
    if learning.is_online(x) and x.get("actor.num_nodes") > 1 and total == policy:
        nodes = x.get("actor.num_nodes")
    elif not learning.is_online(x):
        nodes = x.get("nnodes", 1)
    else:
        nodes = ceil(total / _NODE)
    per_node = ceil(total / nodes)
    if nodes * per_node != total or (nodes > 1 and total != policy):
        x.changed("actor.num_nodes", f"{nodes} nodes with {per_node} GPUs; correct cluster to those you have")
    return {"cluster.num_nodes": nodes, "cluster.gpus_per_node": per_node, **fields}


def generation(x: Origin) -> Fields:
    if not learning.is_online(x):
        return {}
    tensor, engines = x.get("vllm.tensor_parallel_size"), _engines(x)
    if _shares(x) and engines * tensor != _policy_gpus(x):
        problem = f"engines take {engines * tensor} GPUs, and the policy has {_policy_gpus(x)}"
        raise CannotImport(
            f"vllm.num_engines = {engines}: {problem}; with train.colocate_all they are the same"
        )
    section: dict[str, Any] = {"backend": "vllm", "replicas": engines, "tensor_parallel_size": tensor}
    section["gpu_memory_utilization"] = x.get("vllm.gpu_memory_utilization")
    section |= {"colocated": True} if _shares(x) else {}
    section |= {"enforce_eager": True} if x.get("vllm.enforce_eager") else {}
    section["enable_prefix_caching"] = x.get("vllm.enable_prefix_caching")
    top_p = x.get("rollout.top_p")
    filters = {"rollout.top_p": top_p} if top_p != 1 else {}
    section["sampling"] = trained_sampling(x, x.get("rollout.temperature"), filters)
    return {"generation": section}


def recompute(x: Origin) -> Fields:
    section = "actor" if learning.is_online(x) else "model"
    full = x.get(f"{section}.gradient_checkpointing_enable", False)
    return {"policy.recompute": {"name": "full"}} if full else {}


def lora(x: Origin) -> Fields:
    if not (rank := x.get("ds.lora.rank")):
        return {}
    names = x.values.get("ds.lora.target_modules", "all-linear")
    targets = lora_targets(x, "ds.lora.target_modules", names)
    return {"policy.lora": {"rank": rank, "alpha": x.get("ds.lora.alpha"), "targets": targets}}


def balance(x: Origin) -> Fields:
    coefficient = x.get("actor.aux_loss_coef", 0.0) or x.get("model.aux_loss_coef", 0.0)
    return {"policy.moe.load_balancing_loss_coefficient": coefficient} if coefficient else {}


def precision(x: Origin) -> Fields:
    if x.get("ds.param_dtype") == "fp16":
        raise CannotImport("ds.param_dtype = fp16: training is in bfloat16 or float32; give bf16")
    return {"policy.precision": "bfloat16"}


def checkpoints(x: Origin) -> Fields:
    folder = x.get("ckpt.path") or x.get("ckpt.output_dir")
    fields: dict[str, Any] = {"run_dir": str(folder)} if folder else {}
    section: dict[str, Any] = {"keep": x.get("ckpt.max_num")}
    if (period := x.get("ckpt.save_steps")) > 0:
        section["period"] = period
    if x.get("ckpt.save_hf"):
        section["export_hf"] = True
    if x.get("ckpt.output_dir"):
        section["save_hf"] = True
        x.changed(
            "ckpt.output_dir", "the model at the end is in `hf` of the run folder", changes_result=False
        )
    return fields | {"checkpointing": section}


def trackers(x: Origin) -> Fields:
    names = ["wandb"] if x.get("logger.wandb.key") else []
    names += ["tensorboard"] if x.get("logger.tensorboard_dir") else []
    if names and "logger.wandb.key" in x.values:
        x.changed("logger.wandb.key", "the key is read from WANDB_API_KEY", changes_result=False)
    given = {
        "project": x.get("logger.wandb.project"),
        "entity": x.get("logger.wandb.org"),
        "group": x.get("logger.wandb.group"),
    }
    sections = {"wandb": {key: value for key, value in given.items() if value is not None}}
    return shared.trackers(x, "logger.wandb.key", names, sections)
