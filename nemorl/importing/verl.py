"""verl's configs: `main_ppo` with its advantages, losses and teachers, as a script, overrides or a YAML."""

from pathlib import Path
from typing import Any

from . import verl_devices as devices
from . import verl_distillation as distillation
from . import verl_learning as learning
from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule, take
from .shared import template_arguments
from .sources import (
    home,
    omegaconf,
    overridden,
    read_command,
    read_text,
    read_yaml,
    resolved,
    words_with_values,
)
from .verl_devices import MEGATRON, MODEL, TRANSFORMER, VEOMNI
from .verl_learning import ACTOR, CORRECTION, ROLLOUT

# verl's defaults of what the rules read (commit 1dda039b, ppo_trainer.yaml and ppo_megatron_trainer.yaml).
DEFAULTS: dict[str, Any] = {
    **distillation.DEFAULTS,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    f"{CORRECTION}.rollout_is_threshold": "2.0",
    f"{CORRECTION}.loss_type": "ppo_clip",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.tau_pos": 1.0,
    f"{ACTOR}.tau_neg": 1.05,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.clip_cov_ratio": 2e-4,
    f"{ACTOR}.policy_loss.clip_cov_lb": 1.0,
    f"{ACTOR}.policy_loss.clip_cov_ub": 5.0,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 2e-4,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ACTOR}.optim.clip_grad": 1.0,
    f"{ACTOR}.optim.lr_warmup_steps": -1,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{MEGATRON}.sequence_parallel": True,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.mtp.mtp_loss_scaling_factor": 0.1,
    f"{MODEL}.mtp.num_speculative_tokens": 1,
    f"{MODEL}.mtp.speculative_num_steps": 3,
    f"{MODEL}.mtp.detach_encoder": False,
    f"{MODEL}.lora.alpha": 32,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.cliprange_value": 0.5,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.max_num_seqs": 256,
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
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
MARKS = r"actor_rollout_ref|verl\.trainer"
_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_BUFFERS = ("reward.reward_kwargs", "reward_model.reward_kwargs")
LIKENESSES: dict[str, object] = {
    **distillation.LIKENESSES,
    f"{ACTOR}.loss_agg_mode": _AGGREGATIONS,
    "critic.loss_agg_mode": _AGGREGATIONS,
    f"{ACTOR}.kl_loss_coef": 0.001,
    "algorithm.kl_penalty": ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"),
    f"{CORRECTION}.loss_type": ("ppo_clip", "reinforce"),
    **dict.fromkeys((f"{section}.max_resp_len" for section in _BUFFERS), 1024),
    **dict.fromkeys((f"{section}.overlong_buffer_cfg.len" for section in _BUFFERS), 1024),
    **dict.fromkeys((f"{section}.overlong_buffer_cfg.penalty_factor" for section in _BUFFERS), 1.0),
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    **dict.fromkeys(
        (
            f"{MEGATRON}.{name}_parallel_size"
            for name in (
                *("tensor_model", "pipeline_model", "virtual_pipeline_model"),
                *("context", "expert_model", "expert_tensor"),
            )
        ),
        1,
    ),
    **dict.fromkeys((f"{MODEL}.mtp.{name}" for name in ("enable", "enable_train", "enable_rollout")), True),
    f"{MODEL}.mtp.mtp_loss_scaling_factor": 0.1,
    f"{MODEL}.mtp.detach_encoder": False,
    f"{MODEL}.mtp.num_speculative_tokens": 1,
    f"{MODEL}.mtp.speculative_num_steps": 3,
    f"{MEGATRON}.sequence_parallel": True,
    f"{TRANSFORMER}.num_layers_in_first_pipeline_stage": 8,
    f"{TRANSFORMER}.num_layers_in_last_pipeline_stage": 8,
    f"{TRANSFORMER}.recompute_granularity": ("full", "selective"),
    f"{TRANSFORMER}.recompute_method": ("uniform", "block"),
    f"{TRANSFORMER}.recompute_num_layers": 1,
    f"{TRANSFORMER}.moe_router_load_balancing_type": (
        "none",
        '"none"',
        "aux_loss",
        "seq_aux_loss",
        "sinkhorn",
    ),
    f"{ACTOR}.optim.lr_warmup_init": 0.0,
    **dict.fromkeys((f"{ACTOR}.optim.{name}" for name in ("lr_min", "lr_start", "lr_decay_ratio")), 0.0),
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.lora.alpha": 32,
    f"{ACTOR}.router_replay.mode": ("disabled", "R2", "R3"),
    f"{MEGATRON}.router_replay.mode": ("disabled", "R2", "R3"),
    f"{VEOMNI}.router_replay.mode": ("disabled", "R2", "R3"),
    f"{VEOMNI}.ulysses_parallel_size": 1,
    f"{VEOMNI}.expert_parallel_size": 1,
    "algorithm.gdpo_reward_keys": ["accuracy_reward", "format_reward"],
    "algorithm.gdpo_reward_weights": [1.0, 1.0],
    f"{ROLLOUT}.enable_prefix_caching": True,
    f"{ROLLOUT}.quantization": ("fp8", "torchao"),
    f"{ACTOR}.checkpoint.save_contents": ["model"],
}
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
    text = read_text(file)
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


def _refuse(x: Origin) -> Fields:
    """Runs of something that nemorl does not have in this form."""
    if x.get(f"{ROLLOUT}.multi_turn.enable", False):
        raise CannotImport(f"{ROLLOUT}.multi_turn.enable: give the tools as an environment (docs/tools.md)")
    if x.get("actor_rollout_ref.hybrid_engine", True) is False:
        raise CannotImport("actor_rollout_ref.hybrid_engine: separate rollouts are not imported")
    return {}


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
            f"{ROLLOUT}.multi_turn.enable",
            "actor_rollout_ref.hybrid_engine",
        ),
        (),
        _refuse,
    ),
    Part(
        ("data.train_batch_size", *_below(ACTOR, "ppo_mini_batch_size", "ppo_epochs"), f"{ROLLOUT}.n"),
        tuple(f"algorithm.{name}" for name in ("num_prompts_per_step", "num_minibatches", "num_epochs")),
        learning.batches,
    ),
    Part(
        (
            *_below("algorithm", "adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo"),
            *("critic.cliprange_value", "critic.loss_agg_mode", "trainer.critic_warmup"),
        ),
        ("algorithm.advantage", "algorithm.critic"),
        learning.advantage,
    ),
    Part(
        (
            *_below(
                ACTOR, "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode"
            ),
            *_below(ACTOR, "loss_scale_factor", "tau_pos", "tau_neg"),
            *_below(
                f"{ACTOR}.policy_loss", "loss_mode", "tau_pos", "tau_neg", "clip_cov_ratio", "clip_cov_lb"
            ),
            *_below(f"{ACTOR}.policy_loss", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef"),
        ),
        ("algorithm.loss",),
        learning.loss,
    ),
    Part(
        (
            *_below(ACTOR, "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
            *_below("algorithm", "use_kl_in_reward", "kl_penalty", "kl_ctrl.kl_coef"),
        ),
        ("algorithm.kl",),
        learning.kl,
    ),
    Part((f"{ACTOR}.entropy_coeff",), ("algorithm.entropy",), learning.entropy),
    Part(
        (
            *_below(CORRECTION, "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"),
            *_below(CORRECTION, "rollout_is_batch_normalize", "bypass_mode", "loss_type"),
        ),
        ("algorithm.correction",),
        learning.correction,
    ),
    Part(
        _below("algorithm.filter_groups", "enable", "metric", "max_num_gen_batches"),
        ("algorithm.filters",),
        learning.filters,
    ),
    Part(
        (
            *("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
            *_below("reward.custom_reward_function", "path", "name"),
            *_below("custom_reward_function", "path", "name"),
            *_OVERLONG,
            *_below("reward.reward_model", "enable", "model_path"),
        ),
        ("rewards", "env"),
        learning.rewards,
    ),
    Part(
        ("data.train_files", "data.val_files", "data.prompt_key", "data.shuffle"),
        ("data.train", "data.validation"),
        learning.data,
        _OF_SCORES,
    ),
    Part(
        ("trainer.total_training_steps", "trainer.total_epochs"),
        ("algorithm.num_steps",),
        lambda x: {"algorithm.num_steps": learning.num_steps(x)},
    ),
    Part(
        (
            *("data.max_prompt_length", "data.max_response_length", "data.filter_overlong_prompts"),
            *_below(ACTOR, "ppo_max_token_len_per_gpu", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"),
        ),
        (
            *("policy.max_sequence_length", "policy.micro_batch_tokens", "generation.max_new_tokens"),
            "data.max_prompt_tokens",
        ),
        learning.lengths,
    ),
    Part(
        (
            *("trainer.test_freq", "trainer.val_before_train"),
            *_below(f"{ROLLOUT}.val_kwargs", "temperature", "top_p", "top_k", "n"),
        ),
        ("algorithm.validation",),
        learning.validated,
    ),
    take(f"{MODEL}.path", "policy.model_path", lambda path: home(str(path))),
    Part(
        (f"{MODEL}.tokenizer_path",),
        ("policy.tokenizer.path",),
        lambda x: (
            {"policy.tokenizer.path": x.get(f"{MODEL}.tokenizer_path")}
            if x.get(f"{MODEL}.tokenizer_path")
            else {}
        ),
    ),
    Part(
        (
            *("trainer.nnodes", "trainer.n_gpus_per_node"),
            *("distillation.nnodes", "distillation.n_gpus_per_node"),
        ),
        ("cluster.num_nodes", "cluster.gpus_per_node"),
        distillation.cluster,
    ),
    *distillation.RULES,
    Part(
        (
            *_below(MEGATRON, *_MEGATRON_SIZES),
            *_below(TRANSFORMER, "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("model_engine", f"{ACTOR}.strategy"),
        ),
        ("policy.layout",),
        devices.policy_layout,
    ),
    Part(
        (
            f"{ACTOR}.ulysses_sequence_parallel_size",
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            *_below(VEOMNI, "ulysses_parallel_size", "expert_parallel_size"),
        ),
        ("policy.layout.context_parallel_size", "policy.layout.expert_parallel_size"),
        lambda x: {},
        "data parallelism shards the optimizer's state, and not the weights as FSDP does: more memory",
    ),
    Part(
        (
            f"{MODEL}.enable_gradient_checkpointing",
            *_below(
                TRANSFORMER,
                "recompute_granularity",
                "recompute_method",
                "recompute_num_layers",
                "recompute_modules",
            ),
        ),
        ("policy.recompute",),
        devices.recompute,
    ),
    Part(
        (
            *_below(
                f"{ACTOR}.optim", "optimizer", "lr", "weight_decay", "betas", "clip_grad", "lr_warmup_steps"
            ),
            *_below(
                f"{ACTOR}.optim",
                "lr_warmup_steps_ratio",
                "lr_warmup_init",
                *("lr_min", "lr_start", "lr_decay_ratio"),
                "lr_decay_style",
                "lr_decay_steps",
            ),
            *_below(f"{ACTOR}.optim", "lr_scheduler_type", "min_lr", "min_lr_ratio"),
            *(f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload", f"{ACTOR}.grad_clip"),
        ),
        ("policy.optimizer", "policy.schedule", "policy.max_grad_norm"),
        devices.optimizer,
    ),
    Part(
        (
            *_below(MODEL, "lora_rank", "lora_alpha", "target_modules", "lora_adapter_path"),
            *_below(f"{MODEL}.lora", "rank", "alpha", "target_modules", "adapter_path"),
        ),
        ("policy.lora",),
        devices.lora,
    ),
    Part(
        (
            *(
                f"{ACTOR}.router_replay.mode",
                f"{MEGATRON}.router_replay.mode",
                f"{VEOMNI}.router_replay.mode",
                f"{ROLLOUT}.enable_rollout_routing_replay",
            ),
            f"{MODEL}.override_config.moe_config.freeze_moe_router",
            *_below(TRANSFORMER, "moe_aux_loss_coeff", "moe_router_load_balancing_type"),
            *_below(TRANSFORMER, "moe_z_loss_coeff", "moe_router_bias_update_rate"),
        ),
        ("policy.moe",),
        devices.router,
    ),
    Part(
        _below(f"{MODEL}.mtp", "enable", "enable_train", "mtp_loss_scaling_factor", "detach_encoder"),
        ("policy.multi_token_prediction",),
        devices.further_tokens,
    ),
    Part(
        _below(f"{MODEL}.mtp", "enable", "enable_rollout", "num_speculative_tokens", "speculative_num_steps"),
        ("generation.speculation",),
        devices.drafts,
    ),
    Part(
        ("critic.optim.lr", "critic.optim.weight_decay", "critic.model.path"),
        ("critic",),
        devices.critic,
    ),
    Part(
        (
            *_below(ROLLOUT, "name", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
            *_below(
                ROLLOUT, "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager"
            ),
            *_below(ROLLOUT, "enable_prefix_caching", "quantization", "temperature", "top_p", "top_k"),
            *_below(ROLLOUT, "expert_parallel_size", "engine_kwargs.vllm.*"),
        ),
        ("generation",),
        devices.generation,
    ),
    Part(
        (
            *_below("trainer", "save_freq", "max_actor_ckpt_to_keep", "default_local_dir"),
            *_below("trainer", "project_name", "experiment_name"),
            f"{ACTOR}.checkpoint.save_contents",
        ),
        ("run_dir", "checkpointing"),
        devices.checkpoints,
    ),
    Part(("data.seed", "trainer.seed"), ("seed",), devices.seed),
    Part(("trainer.logger", "trainer.project_name"), ("logger.trackers",), devices.trackers),
    # Without counterpart, and the result changes.
    Lost((f"{ACTOR}.shuffle",), "minibatches are in the order of the batch"),
    Lost(("algorithm.use_pf_ppo",), "preference feedback PPO"),
    Lost(("algorithm.kl_ctrl.type",), "the coefficient is fixed", ("fixed", None)),
    Ignored(
        (f"{ROLLOUT}.val_kwargs.do_sample",),
        "verl's agent loops sample validation by its temperature, whatever this is",
    ),
    Ignored(
        (f"{TRANSFORMER}.moe_router_enable_expert_bias",),
        "the model's config.json says whether routers have a bias",
    ),
    Lost(
        (f"{TRANSFORMER}.dsa_indexer_loss_coeff",),
        "sparse attention's indexer is not trained",
        (None, 0, 0.0),
    ),
    Lost((f"{MODEL}.override_config.*",), "edit the config.json of the model folder", (None, {})),
    Lost(
        (f"{MODEL}.custom_chat_template", "data.chat_template"),
        "write it into a file: policy.tokenizer.chat_template",
        (None,),
    ),
    Part(
        ("data.apply_chat_template_kwargs.*",),
        ("policy.tokenizer.template_arguments",),
        lambda x: template_arguments(x, "data.apply_chat_template_kwargs"),
    ),
    Lost(("data.train_max_samples", "data.val_max_samples"), "all rows of a file are used", (-1, None)),
    Lost(
        ("data.custom_cls.path", "data.sampler.class_path", "data.datagen.path"),
        "give the data as rows",
        (None,),
    ),
    Lost((f"{ACTOR}.policy_loss.dro_beta",), "of DRO", (None,)),
    Lost((f"{ROLLOUT}.ignore_eos",), "an answer ends at the model's end token"),
    Lost(
        (f"{ROLLOUT}.over_sample_rate",),
        "`algorithm.oversampling` trains on the first groups to finish",
        (0, 0.0, None),
    ),
    Lost(
        (f"{ACTOR}.qat.enable", f"{ACTOR}.fsdp_config.qat.enable"), "give the format as policy.quantization"
    ),
    Lost(
        (f"{ACTOR}.fsdp_config.dtype", f"{MEGATRON}.dtype"),
        "training is in bfloat16",
        ("bfloat16", "bf16", None),
    ),
    Lost((f"{ACTOR}.optim.weight_decay_incr_style",), "the weight decay is constant", ("constant", None)),
    Lost((f"{ACTOR}.optim.num_cycles",), "the cosine has half a cycle", (0.5, None)),
    Lost(
        ("trainer.resume_from_path",),
        "`nemorl train --resume` continues the run in run_dir",
        (None, "checkpoints/"),
    ),
    Lost(
        tuple(f"skip.{name}.enable" for name in ("rollout", "rollout_tq", "async_rollout")),
        "`nemorl train --replay` trains on the trajectories of another run",
    ),
    # Without counterpart, and the result is the same.
    Ignored(("skip.*",), "how samples of an earlier run are stored"),
    Ignored(("data.truncation",), "no prompt is cut off; groups with one that is too long train nothing"),
    Ignored((f"{TRANSFORMER}.moe_router_dtype",), "router logits are computed in float32"),
    Ignored(("data.*",), "how rows are read"),
    Ignored((f"{ACTOR}.*",), "how it computes, and not what: kernels, memory, sharding, checkpoints"),
    Ignored(("actor_rollout_ref.ref.*",), "the reference has the policy's layout and micro-batches"),
    Ignored((f"{ROLLOUT}.*",), "how the engine computes and receives weights"),
    Ignored((f"{MODEL}.*",), "how the model is loaded and computed"),
    Ignored(("critic.*",), "the critic has the policy's layout, schedule and micro-batches"),
    Ignored(
        ("reward.*", "reward_model.*", "reward_manager.*", "custom_reward_function.*", "sandbox_fusion.*"),
        "how rewards are computed",
    ),
    Ignored(
        (
            *(
                "trainer.*",
                "ray_kwargs.*",
                "global_profiler.*",
                "transfer_queue.*",
                "actor_rollout_ref.nccl_timeout",
            ),
            *("ray_init.*", "profiler.*"),
        ),
        "trackers, profiling, the start of Ray, the order of samples",
    ),
    Ignored(("algorithm.*",), "of a method that is off"),
    Ignored(("distillation.*",), "how the teachers' engines compute"),
)
