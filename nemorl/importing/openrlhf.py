"""OpenRLHF's command lines: PPO and its critic-free relatives, SFT, DPO and reward models."""

from pathlib import Path
from typing import Any

from . import openrlhf_devices as devices
from . import openrlhf_learning as learning
from .openrlhf_learning import KINDS
from .rules import CannotImport, Ignored, Lost, Part, Rule, take
from .sources import options_of, read_command, read_text

# OpenRLHF's defaults of what the rules read (commit 3c3be623, train_ppo_ray.py); the others are in the rules.
DEFAULTS: dict[str, Any] = {
    "trainer": "ppo_ray",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.eps_clip": 0.2,
    "actor.policy_loss_type": "ppo",
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.adam.eps": 1e-8,
    "actor.adam.weight_decay": 0.0,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
    "actor.max_norm": 1.0,
    "critic.adam.lr": 9e-6,
    "critic.adam.betas": [0.9, 0.95],
    "critic.adam.eps": 1e-8,
    "critic.adam.weight_decay": 0.0,
    "critic.lr_scheduler": "cosine_with_min_lr",
    "critic.lr_warmup_ratio": 0.03,
    "critic.min_lr_ratio": 0.1,
    "critic.max_norm": 1.0,
    "critic.value_clip": 0.5,
    "critic.freezing_steps": -1,
    "adam.betas": [0.9, 0.95],
    "adam.eps": 1e-8,
    "adam.weight_decay": 0.0,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "max_norm": 1.0,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.advantage.is_correction_type": "tis",
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "algo.dynamic_filtering_enable": False,
    "algo.dynamic_filtering_range": [0.0, 1.0],
    "reward.normalize_enable": False,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "train.batch_size": 128,
    "train.num_episodes": 1,
    "train.max_tokens_per_gpu": 16192,
    "train.async_enable": False,
    "train.async_queue_size": 1,
    "train.partial_rollout_enable": False,
    "train.dynamic_batch_enable": False,
    "train.colocate_all": False,
    "train.seed": 42,
    "vllm.tensor_parallel_size": 1,
    "vllm.gpu_memory_utilization": 0.95,
    "vllm.enforce_eager": False,
    "vllm.enable_prefix_caching": False,
    "ds.tensor_parallel_size": 1,
    "ds.ring_attn_size": 1,
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ds.adam_offload": False,
    "ds.param_dtype": "bf16",
    "data.prompt_split": "train",
    "data.dataset_split": "train",
    "data.apply_chat_template": False,
    "data.chosen_key": "chosen",
    "data.rejected_key": "rejected",
    "reward.overlong_penalty_factor": 1.0,
    "eval.steps": -1,
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
    "ckpt.save_hf": False,
    "model.beta": 0.1,
    "model.label_smoothing": 0.0,
    "model.ipo_enable": False,
    "model.nll_loss_coef": 0.0,
    "model.loss_type": "sigmoid",
    "model.margin_loss_enable": False,
    "model.pretrain_mode_enable": False,
}
LIKENESSES: dict[str, object] = {
    "algo.advantage.is_correction_type": ("tis", "icepop", "seq-mask-tis"),
    "algo.kl.estimator": ("k1", "k2", "k3"),
    "ds.param_dtype": ("bf16", "fp16"),
    "actor.dual_clip": 3.0,
    "actor.entropy_coef": 0.01,
    "actor.aux_loss_coef": 0.01,
    "model.aux_loss_coef": 0.01,
    "adam.lr": 1e-6,
    "data.max_len": 2048,
    "data.max_samples": 100_000,
    "rollout.max_new_tokens": 1024,
    "train.micro_batch_size": 1,
    "train.max_epochs": 1,
    "reward.overlong_buffer_len": 1024.0,
    "reward.stop_properly_penalty_coef": 0.5,
    "vllm.num_engines": 1,
    "model.gradient_checkpointing_enable": True,
    "nproc_per_node": 8,
    "nnodes": 1,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "train.max_tokens_per_gpu": 16192,
}
MARKS = r"openrlhf\.cli|--(actor|model)\.model_name_or_path|--(advantage_estimator|micro_train_batch_size)\b"

# Names of options before version 0.10, whose sections came later.
_OLD = {
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "ref_pretrain": "ref.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "save_hf_ckpt": "ckpt.save_hf",
    "max_ckpt_num": "ckpt.max_num",
    "load_checkpoint": "ckpt.load_enable",
    "logging_steps": "logger.logging_steps",
    "micro_train_batch_size": "train.micro_batch_size",
    "train_batch_size": "train.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "seed": "train.seed",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable",
    "agent_func_path": "train.agent_func_path",
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "max_len": "data.max_len",
    "max_samples": "data.max_samples",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "dataset": "data.dataset",
    "dataset_probs": "data.dataset_probs",
    "input_key": "data.input_key",
    "output_key": "data.output_key",
    "label_key": "data.label_key",
    "prompt_key": "data.prompt_key",
    "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "tokenizer_chat_template": "data.tokenizer_chat_template",
    "multiturn": "data.multiturn",
    "eval_dataset": "eval.dataset",
    "eval_steps": "eval.steps",
    "eval_split": "eval.split",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "learning_rate": "adam.lr",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type",
    "entropy_loss_coef": "actor.entropy_coef",
    "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "beta": "model.beta",
    "ipo": "model.ipo_enable",
    "label_smoothing": "model.label_smoothing",
    "nll_loss_coef": "model.nll_loss_coef",
    "loss": "model.loss_type",
    "margin_loss": "model.margin_loss_enable",
    "compute_fp32_loss": "model.compute_fp32_loss_enable",
    "pretrain_mode": "model.pretrain_mode_enable",
    "zero_stage": "ds.zero_stage",
    "adam_offload": "ds.adam_offload",
    "packing_samples": "ds.packing_samples",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "flash_attn": "ds.flash_attn",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "load_in_4bit": "ds.load_in_4bit",
    "param_dtype": "ds.param_dtype",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_sync_backend": "vllm.sync_backend",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size",
    "enforce_eager": "vllm.enforce_eager",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
    "enable_ema": "train.enable_ema",
    **{
        f"{model}_num_{what}": f"{model}.num_{what}"
        for model in ("actor", "critic", "ref", "reward")
        for what in ("nodes", "gpus_per_node")
    },
    "ref_reward_offload": "ref.offload",
}
_SHARED = {  # of the actor and the critic, or of the only model
    "lr_scheduler": "lr_scheduler",
    "lr_warmup_ratio": "lr_warmup_ratio",
    "min_lr_ratio": "min_lr_ratio",
    "max_norm": "max_norm",
    "adam_betas": "adam.betas",
    "l2": "adam.weight_decay",
}


def read(file: Path) -> dict[str, Any]:
    """The options of a command in a script or a text. Raises CannotImport."""
    text = read_text(file)
    if "openrlhf.cli" not in text:
        return _from_words(["", *text.replace("\\\n", " ").split()], [], str(file))
    launch: list[str] = []

    def find(words: list[str]) -> list[str]:
        """From the module on; the launcher's words are kept."""
        for place, word in enumerate(words):
            if word.startswith("openrlhf.cli."):
                launch[:] = [one for one in words[:place] if one not in ("-m", "--module")]
                return words[place:]
        return []

    return _from_words(read_command(text, find=find), launch, str(file))


def _from_words(words: list[str], launch: list[str], source: str) -> dict[str, Any]:
    module, *rest = words
    trainer = module.removeprefix("openrlhf.cli.train_")
    if module and trainer not in KINDS:
        known = ", ".join(f"openrlhf.cli.train_{one}" for one in KINDS)
        raise CannotImport(f"{source}: {module} is not imported; {known} are")
    given = options_of(rest)
    values: dict[str, Any] = {}
    if not trainer:
        trainer = (
            "ppo_ray" if any(key.startswith(("actor", "rollout", "prompt_data")) for key in given) else ""
        )
    if not trainer:
        raise CannotImport(f"{source}: the text has no command such as `-m openrlhf.cli.train_sft`; add it")
    for key, value in given.items():
        for name in _current(key, trainer):
            values[name] = _as_current(name, value)
    values |= {key: value for key, value in options_of(launch).items() if key in ("nproc_per_node", "nnodes")}
    longest = values.pop("prompt_max_len", None)
    if longest is not None:
        values.setdefault("data.max_len", longest + values.get("rollout.max_new_tokens", 1024))
    return {"trainer": trainer, **values}


def _current(key: str, trainer: str) -> tuple[str, ...]:
    """Today's names of an option, which may be of an earlier version."""
    if key == "pretrain":
        return ("actor.model_name_or_path",) if trainer == "ppo_ray" else ("model.model_name_or_path",)
    if key in ("gradient_checkpointing", "gradient_checkpointing_use_reentrant", "aux_loss_coef"):
        name = {
            "gradient_checkpointing": "gradient_checkpointing_enable",
            "gradient_checkpointing_use_reentrant": "gradient_checkpointing_reentrant",
        }.get(key, key)
        return (f"{'actor' if trainer == 'ppo_ray' else 'model'}.{name}",)
    if key in _SHARED:
        names = ("actor.", "critic.") if trainer == "ppo_ray" else ("",)
        return tuple(f"{name}{_SHARED[key]}" for name in names)
    if key == "bf16":
        return ("ds.param_dtype",)
    return (_OLD.get(key, key),)


def _as_current(name: str, value: Any) -> Any:
    return "bf16" if name == "ds.param_dtype" and isinstance(value, bool) else value


def _of(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


RULES: tuple[Rule, ...] = (
    Part(
        (
            *("trainer", "rollout.batch_size", "rollout.n_samples_per_prompt"),
            *("train.batch_size", "train.max_epochs"),
        ),
        ("algorithm", "policy.head"),
        learning.algorithm,
    ),
    Part(("train.num_episodes", "data.max_samples"), ("algorithm.num_steps",), learning.num_steps),
    Part(
        (*_of("algo.advantage", "estimator", "gamma", "lambd", "no_std_norm"),),
        ("algorithm.advantage",),
        learning.advantage,
    ),
    Part(
        _of("actor", "eps_clip", "eps_clip_low_high", "dual_clip", "policy_loss_type"),
        ("algorithm.loss",),
        learning.policy_loss,
    ),
    Part(
        (
            *_of("model", "beta", "label_smoothing", "ipo_enable", "nll_loss_coef"),
            *_of("model", "loss_type", "margin_loss_enable", "pretrain_mode_enable"),
        ),
        (*_of("algorithm", "loss", "sft_coefficient", "sft_aggregation"), "algorithm.train_on"),
        learning.offline_loss,
    ),
    Part(_of("algo.kl", "init_coef", "estimator", "use_loss"), ("algorithm.kl",), learning.kl),
    Part(("actor.entropy_coef",), ("algorithm.entropy",), learning.entropy),
    Part(
        _of("algo.advantage", "is_correction_enable", "is_correction_threshold", "is_correction_type"),
        ("algorithm.correction",),
        learning.correction,
    ),
    Part(
        _of("algo", "dynamic_filtering_enable", "dynamic_filtering_range"),
        ("algorithm.filters",),
        learning.filters,
    ),
    Part(
        (
            *_of("reward", "remote_url", "model_name_or_path", "normalize_enable", "overlong_buffer_len"),
            *("reward.overlong_penalty_factor", "train.agent_func_path"),
        ),
        ("env", "rewards"),
        learning.rewards,
    ),
    Part(
        ("reward.stop_properly_penalty_coef",),
        ("algorithm.truncated_reward",),
        learning.truncated_reward,
    ),
    Part(
        _of("train", "async_enable", "async_queue_size", "partial_rollout_enable"),
        ("algorithm.max_staleness", "generation.on_update"),
        learning.asynchronous,
    ),
    Part(
        (
            *_of("data", "prompt_dataset", "prompt_split", "dataset", "dataset_split", "max_samples"),
            *_of("data", "input_key", "output_key", "label_key", "prompt_key", "chosen_key", "rejected_key"),
            *_of("data", "apply_chat_template", "input_template", "multiturn", "tokenizer_chat_template"),
            *("eval.dataset", "eval.split"),
        ),
        ("data", "policy.tokenizer.chat_template"),
        learning.data,
    ),
    Part(
        ("eval.steps", "eval.temperature", "eval.n_samples_per_prompt"),
        ("algorithm.validation",),
        learning.validated,
    ),
    Part(
        (
            *("data.max_len", "rollout.max_new_tokens"),
            *_of("train", "micro_batch_size", "dynamic_batch_enable", "max_tokens_per_gpu"),
        ),
        (
            *("policy.max_sequence_length", "policy.micro_batch_tokens", "generation.max_new_tokens"),
            "data.max_prompt_tokens",
        ),
        devices.lengths,
    ),
    Part(("actor.model_name_or_path", "model.model_name_or_path"), ("policy.model_path",), devices.model),
    Part(
        (
            *("critic.model_name_or_path", "critic.value_clip", "critic.freezing_steps"),
            "reward.normalize_enable",
        ),
        ("critic", "algorithm.critic"),
        devices.critic,
    ),
    *(
        Part(
            tuple(f"{section}{name}" for name in devices.OPTIMIZER),
            (f"{ours}.optimizer", f"{ours}.schedule", f"{ours}.max_grad_norm"),
            devices.optimizer_of(section, ours),
        )
        for section, ours in (("actor.", "policy"), ("critic.", "critic"), ("", "policy"))
    ),
    Part(
        (
            *_of("actor", "num_nodes", "num_gpus_per_node"),
            *("nproc_per_node", "nnodes", "ds.tensor_parallel_size", "ds.ring_attn_size"),
        ),
        ("cluster", "policy.layout"),
        devices.layout_of,
    ),
    Part(
        (
            *_of("vllm", "num_engines", "tensor_parallel_size", "gpu_memory_utilization", "enforce_eager"),
            *("vllm.enable_prefix_caching", "train.colocate_all", "rollout.temperature", "rollout.top_p"),
        ),
        ("generation",),
        devices.generation,
    ),
    Part(
        ("actor.gradient_checkpointing_enable", "model.gradient_checkpointing_enable"),
        ("policy.recompute",),
        devices.recompute,
    ),
    Part(("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules"), ("policy.lora",), devices.lora),
    Part(
        ("actor.aux_loss_coef", "model.aux_loss_coef"),
        ("policy.moe.load_balancing_loss_coefficient",),
        devices.balance,
        "the balance loss is of each sequence here",
    ),
    Part(("ds.param_dtype",), ("policy.precision",), devices.precision),
    take("train.seed", "seed"),
    Part(
        _of("ckpt", "path", "save_steps", "max_num", "save_hf", "output_dir"),
        ("run_dir", "checkpointing"),
        devices.checkpoints,
    ),
    Part(
        (*_of("logger.wandb", "key", "project", "org", "group"), "logger.tensorboard_dir"),
        ("logger.trackers",),
        devices.trackers,
    ),
    # Without counterpart, and the result changes.
    Lost(("algo.kl.target",), "the coefficient is fixed", (None,)),
    Lost(("reward.clip_range",), "rewards are not clipped; OpenRLHF clips to -10 and 10", (None,)),
    Lost(("train.enable_ema",), "no average of weights is kept"),
    Lost(
        ("data.prompt_probs", "data.dataset_probs"), "write the datasets as a mixture (docs/data.md)", (None,)
    ),
    Lost(("ds.load_in_4bit",), "give the format as policy.quantization"),
    Lost(("ds.lora.dropout",), "adapters have no dropout", (0, 0.0, None)),
    Lost(("ref.model_name_or_path",), "the reference is the model at the start", (None,)),
    Lost(("ds.grad_accum_dtype",), "policy.optimizer.main_grads_dtype is float32", (None, "fp32")),
    Lost(("actor.freeze_visual_encoder", "data.max_images_per_prompt"), "of models for images", (False, 0)),
    # Without counterpart, and the result is the same.
    Ignored(("algo.kl.horizon",), "of algo.kl.target"),
    Ignored(
        ("rollout.micro_batch_size", "rollout.max_tokens_per_gpu", "rollout.vllm_generate_batch_size"),
        "how much is computed at a time",
    ),
    Ignored(
        (
            *("ds.*", "vllm.*", "ref.*", "reward.num_nodes", "reward.num_gpus_per_node", "reward.offload"),
            *("critic.num_nodes", "critic.num_gpus_per_node", "critic.save_value_network"),
            *("actor.gradient_checkpointing_reentrant", "model.gradient_checkpointing_reentrant"),
            *("train.colocate_actor_ref", "train.colocate_critic_reward", "train.full_determinism_enable"),
            *("model.compute_fp32_loss_enable", "local_rank", "use_ms", "data.image_key"),
            *("data.disable_fast_tokenizer", "data.dataloader_num_workers", "train.ema_beta"),
            *(f"{of}muon.{name}" for of in ("", "actor.", "critic.") for name in ("lr", "momentum")),
            *(f"{of}muon.{name}" for of in ("", "actor.", "critic.") for name in ("ns_steps", "nesterov")),
            *(f"{of}muon.no_nesterov" for of in ("", "actor.", "critic.")),
        ),
        "how it computes, and where",
    ),
    Ignored(
        ("ckpt.load_enable", "ckpt.disable_ds", "ckpt.max_mem", "ckpt.best_metric_key"),
        "format of checkpoints; `nemorl train --resume` continues a run",
    ),
    Ignored(("logger.logging_steps", "logger.wandb.run_name"), "every step is reported"),
)
