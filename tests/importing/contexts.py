"""Values with which mapped keys have an effect: small runs of each project, and contexts of single keys."""

from typing import Any

from nemorl.importing.document import PROJECTS
from nemorl.importing.rules import Options, Part
from tests.importing.recipes import FOLDER, ROWS

OPTIONS = Options(rows=ROWS, folder=str(FOLDER), template="experiment.jinja")
NEMO_RL = {
    "policy.model_name": "org/model",
    "policy.train_global_batch_size": 64,
    "policy.max_total_sequence_length": 512,
    "cluster.gpus_per_node": 8,
    "data.train.dataset_name": "DeepScaler",
}
GRPO = NEMO_RL | {
    "grpo.num_prompts_per_step": 16,
    "grpo.num_generations_per_prompt": 4,
    "grpo.max_num_steps": 30,
}
PPO = NEMO_RL | {
    "ppo.num_prompts_per_step": 16,
    "ppo.num_generations_per_prompt": 4,
    "ppo.max_num_steps": 30,
    "value.model_name": "org/model",
}
SFT, DPO, RM = (NEMO_RL | {f"{name}.max_num_steps": 30} for name in ("sft", "dpo", "rm"))
OFF = {"sft.max_num_steps": -1, "dpo.max_num_steps": -1, "rm.max_num_steps": -1}
MEGATRON = GRPO | {"policy.megatron_cfg.enabled": True}
VERL = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.path": "org/model",
    "actor_rollout_ref.rollout.n": 4,
    "trainer.total_training_steps": 30,
    "trainer.test_freq": 5,
}
GAE = VERL | {"algorithm.adv_estimator": "gae"}
TRL: dict[str, Any] = {
    "trainer": "grpo",
    "model_name_or_path": "org/model",
    "reward_funcs": ["a.b"],
    "max_steps": 30,
    "dataset_name": "org/data",
}
VLLM = TRL | {"use_vllm": True}
OPENRLHF: dict[str, Any] = {
    "trainer": "ppo_ray",
    "actor.model_name_or_path": "org/model",
    "reward.remote_url": "reward_func.py",
    "data.prompt_dataset": "org/data",
    "data.max_samples": 10_000,
    "vllm.num_engines": 8,
    "train.colocate_all": True,
    "rollout.n_samples_per_prompt": 4,
}
GROUPED = OPENRLHF | {"algo.advantage.estimator": "group_norm"}
OFFLINE = {
    name: {
        "trainer": name,
        "model.model_name_or_path": "org/model",
        "data.dataset": "org/data",
        "data.max_samples": 10_000,
    }
    for name in ("sft", "dpo", "rm")
}
BASES = {"nemo-rl": GRPO, "verl": VERL, "openrlhf": OPENRLHF, "trl": TRL}

# By the beginning of a key of NeMo-RL's PPO, a config that reads it.
PPO_BASES: dict[str, dict[str, Any]] = {}

# Of keys that recipes do not show: values of others with which they have an effect, and two of their own.
Context = tuple[dict[str, Any], Any, Any]
_SHAPED = GRPO | {
    "grpo.reward_shaping.enabled": True,
    "grpo.reward_shaping.max_response_length": 100,
    "grpo.reward_shaping.overlong_buffer_length": 10,
}
_SCALED = {
    name: base | {f"{name}.reward_scaling.enabled": True} for name, base in (("grpo", GRPO), ("ppo", PPO))
}
_PPO = PPO | {
    **{key.replace("grpo.", "ppo."): value for key, value in _SHAPED.items() if "shaping" in key},
    "ppo.use_dynamic_sampling": True,
    "ppo.reward_scaling.enabled": True,
    "ppo.async_ppo.enabled": True,
    "ppo.async_ppo.in_flight_weight_updates": True,
    "policy.generation.colocated.enabled": False,
    "policy.generation.colocated.resources.gpus_per_node": 4,
    "value.max_total_sequence_length": 512,
}
_CRITIC_MEGATRON = PPO | {
    "value.megatron_cfg.enabled": True,
    "value.megatron_cfg.activation_checkpointing": True,
    "value.megatron_cfg.pipeline_model_parallel_size": 2,
    "value.megatron_cfg.scheduler.lr_decay_style": "cosine",
    "value.megatron_cfg.scheduler.lr_warmup_iters": 2,
    "value.megatron_cfg.peft.enabled": True,
}
_CRITIC_LORA = PPO | {"value.dtensor_cfg.lora_cfg.enabled": True}
_CRITIC_PACKED = PPO | {
    "value.max_total_sequence_length": 512,
    "value.sequence_packing.enabled": True,
    "value.sequence_packing.train_mb_tokens": 4096,
    "value.dynamic_batching.enabled": True,
    "value.dynamic_batching.train_mb_tokens": 4096,
}
_ASYNC = GRPO | {
    "grpo.async_grpo.enabled": True,
    "policy.generation.colocated.enabled": False,
    "policy.generation.colocated.resources.gpus_per_node": 4,
}
_TRTLLM = GRPO | {
    "policy.generation.backend": "trtllm",
    "policy.generation.colocated.enabled": False,
    "policy.generation.colocated.resources.gpus_per_node": 4,
}
_PACKED = GRPO | {
    "policy.sequence_packing.train_mb_tokens": 4096,
    "policy.dynamic_batching.train_mb_tokens": 4096,
}
_RECOMPUTED = MEGATRON | {
    "policy.megatron_cfg.activation_checkpointing": True,
    "policy.megatron_cfg.recompute_granularity": "selective",
}
_DECAYED = MEGATRON | {"policy.megatron_cfg.scheduler.lr_decay_style": "cosine"}
_PEFT = MEGATRON | {"policy.megatron_cfg.peft.enabled": True}
_LORA = GRPO | {"policy.dtensor_cfg.lora_cfg.enabled": True}
_PUZZLE = GRPO | {"data.default.env_name": "sliding_puzzle_game"}
_GAME = "env.sliding_puzzle_game.cfg"
_NVFP4 = GRPO | {"policy.quant_cfg": "quant_configs/nvfp4_experts.yaml"}
_FP8 = GRPO | {"policy.generation.vllm_cfg.precision": "fp8"}
_LOADERS = GRPO | {
    "data.train": [{"dataset_name": "DeepScaler"}, {"data_path": "sums.jsonl"}],
    "data.use_multiple_dataloader": True,
    "data.custom_dataloader": "examples.custom_dataloader.custom_dataloader.example_custom_dataloader",
    "data.num_prompts_per_dataloader": 8,  # of the 16 of a step
}
_DISTILLED = NEMO_RL | {
    "distillation.num_prompts_per_step": 128,
    "distillation.max_num_steps": 30,
    "distillation.val_period": 5,
    "teacher.model_name": "org/teacher",
}
ALIGNED = NEMO_RL | {
    "distillation.num_prompts_per_step": 64,
    "distillation.max_num_steps": 30,
    "teachers": [{"model_name": "org/a"}],
    "data.train.dataset_name": "arrow_text",
    "data.train.data_files": "texts/*.parquet",
}
_TAUGHT_BY_TWO = ALIGNED | {"teachers": [{"model_name": "org/a", "weight": 0.5}, {"model_name": "org/b"}]}
_TEXTS_HELD_OUT = ALIGNED | {
    "distillation.val_period": 5,
    "data.validation.dataset_name": "arrow_text",
    "data.validation.data_files": "others/*.parquet",
}
_TAUGHT_BY_MEGATRON = _DISTILLED | {"teacher.megatron_cfg.enabled": True}
_STAGED = _TAUGHT_BY_MEGATRON | {"teacher.megatron_cfg.pipeline_model_parallel_size": 2}
_TEACHER_SIZES = {
    **{
        f"teacher.megatron_cfg.{name}_parallel_size": (_TAUGHT_BY_MEGATRON, 1, 2)
        for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    },
    **{
        f"teacher.dtensor_cfg.{name}_parallel_size": (_DISTILLED, 1, 2)
        for name in ("tensor", "context", "expert")
    },
    **{
        f"teacher.megatron_cfg.num_layers_in_{stage}_pipeline_stage": (_STAGED, 8, 9)
        for stage in ("first", "last")
    },
    "teacher.megatron_cfg.sequence_parallel": (
        _TAUGHT_BY_MEGATRON | {"teacher.megatron_cfg.tensor_model_parallel_size": 2},
        True,
        False,
    ),
    "teacher.dtensor_cfg.sequence_parallel": (
        _DISTILLED | {"teacher.dtensor_cfg.tensor_parallel_size": 2},
        True,
        False,
    ),
}
_VALIDATED = {
    name: base | {f"{name}.val_period": 5, f"{name}.val_batches": 2}
    for name, base in (("dpo", DPO), ("rm", RM))
}
_A, _C, _V = "actor_rollout_ref.actor", "algorithm.rollout_correction", "actor_rollout_ref.rollout.val_kwargs"
_FURTHER = MEGATRON | {"policy.megatron_cfg.mtp_num_layers": 2}
_DRAFT = MEGATRON | {"policy.draft.enabled": True}
_MTP = "actor_rollout_ref.model.mtp"
_MTP_TRAINED = VERL | {f"{_MTP}.enable": True, f"{_MTP}.enable_train": True}
_MTP_SAMPLED = VERL | {f"{_MTP}.enable": True, f"{_MTP}.enable_rollout": True}
_D, _M = "distillation.distillation_loss", "distillation.teacher_models"
_TAUGHT = VERL | {
    "distillation.enabled": True,
    "distillation.nnodes": 1,
    f"{_D}.use_task_rewards": False,
    f"{_M}.teacher_model.model_path": "org/teacher",
}
_BY_TOP = _TAUGHT | {f"{_D}.loss_mode": "forward_kl_topk"}
_TWO = {
    f"{_M}.{name}": {"model_path": f"org/{name}", "key": f"of/{name}", "num_replicas": 1}
    for name in ("prose", "sums")
}
_OVERLONG = VERL | {"reward.reward_kwargs.overlong_buffer_cfg.enable": True}
_VEOMNI = VERL | {"model_engine": "veomni", f"{_A}.optim.lr_warmup_steps_ratio": 0.1}
_GDPO = VERL | {
    "algorithm.adv_estimator": "gdpo",
    "algorithm.gdpo_reward_keys": ["one", "two"],
    "reward.custom_reward_function.path": "a.py",
}
_COSINE = VERL | {"model_engine": "megatron", f"{_A}.optim.lr_decay_style": "cosine"}
_FSDP_COSINE = VERL | {f"{_A}.optim.lr_scheduler_type": "cosine"}


def _of_loss(mode: str) -> dict[str, Any]:
    return VERL | {f"{_A}.policy_loss.loss_mode": mode}


def _offline(section: str, base: dict[str, Any]) -> dict[str, Context]:
    return {
        f"{section}.max_num_steps": (base, 30, 40),
        f"{section}.max_num_epochs": (base | {f"{section}.max_num_steps": -1}, 1, 2),
        f"{section}.seed": (base, 1, 2),
        f"{section}.val_period": (base, 5, 6),
        f"{section}.val_at_start": (base, True, False),
        f"{section}.val_at_end": (base, True, False),
        f"{section}.val_batches": (base | {f"{section}.val_period": 5}, 2, 3),
        f"{section}.val_global_batch_size": (
            base | {f"{section}.val_period": 5, f"{section}.val_batches": 2},
            8,
            9,
        ),
    }


PPO_BASES |= {
    "ppo.": _PPO,
    "value.megatron_cfg.optimizer.sgd": _CRITIC_MEGATRON | {"value.megatron_cfg.optimizer.optimizer": "sgd"},
    "value.megatron_cfg": _CRITIC_MEGATRON,
    "value.dtensor_cfg.lora_cfg": _CRITIC_LORA,
    "value.sequence_packing": _CRITIC_PACKED,
    "value.dynamic_batching": _CRITIC_PACKED,
    "value": PPO,
}

CONTEXTS: dict[str, dict[str, Context]] = {
    "nemo-rl": {
        **_TEACHER_SIZES,
        "teacher.megatron_cfg.enabled": (
            _DISTILLED | {"teacher.megatron_cfg.tensor_model_parallel_size": 2},
            True,
            False,
        ),
        "teachers": (ALIGNED, [{"model_name": "org/a"}], [{"model_name": "org/b", "weight": 0.5}]),
        **{
            f"data.{part}.{key}": (
                base | ({f"data.{part}.data_files": "org/texts"} if key == "subset" else {}),
                *two,
            )
            for part, base in (("train", ALIGNED), ("validation", _TEXTS_HELD_OUT))
            for key, two in {
                "data_files": ("one/*.parquet", "one/two.jsonl"),
                "text_key": ("text", "content"),
                "characters_per_sample": (16384, None),
                "subset": ("one", "two"),
            }.items()
        },
        "loss_fn.kd_loss_mode": (_TAUGHT_BY_TWO, "select_teacher", "averaged_logits"),
        "loss_fn.sum_weights_metric": (_TAUGHT_BY_TWO, "ce", None),
        "loss_fn.alpha": (_TAUGHT_BY_TWO | {"loss_fn.sum_weights_metric": "entropy"}, 1.0, 2.0),
        "loss_fn.normalize_teacher_by_vocab": (_TAUGHT_BY_TWO, True, False),
        "loss_fn.gold_loss": (ALIGNED, True, False),
        "loss_fn.xtoken_loss": (ALIGNED | {"loss_fn.gold_loss": True}, True, False),
        "loss_fn.vocab_topk": (ALIGNED, 8192, 1024),
        "loss_fn.uncommon_topk": (ALIGNED | {"loss_fn.gold_loss": True}, 8192, 1024),
        "loss_fn.temperature": (ALIGNED, 1.0, 2.0),
        "loss_fn.reverse_kl": (ALIGNED, True, False),
        "loss_fn.kl_loss_weight": (ALIGNED, 1.0, 2.0),
        "loss_fn.ce_loss_scale": (ALIGNED, 0.1, 0.2),
        "loss_fn.dynamic_loss_scaling": (ALIGNED, True, False),
        "loss_fn.kl_type": (_DISTILLED, "forward", "reverse"),
        "loss_fn.mixed_kl_weight": (_DISTILLED, 0.5, 0.4),
        "loss_fn.zero_outside_topk": (_DISTILLED, True, False),
        "distillation.topk_logits_k": (_DISTILLED, 64, 32),
        "distillation.num_prompts_per_step": (_DISTILLED, 64, 128),
        "distillation.num_generations_per_prompt": (_DISTILLED, 1, 2),
        "distillation.max_num_steps": (_DISTILLED, 30, 40),
        "distillation.max_num_epochs": (_DISTILLED | {"distillation.max_num_steps": -1}, 1, 2),
        "distillation.max_val_samples": (_DISTILLED, 256, 512),
        "distillation.val_period": (_DISTILLED, 5, 6),
        "distillation.val_at_start": (_DISTILLED, True, False),
        "distillation.val_at_end": (_DISTILLED, True, False),
        "distillation.seed": (_DISTILLED, 1, 2),
        "distillation.max_rollout_turns": (
            _DISTILLED | {"data.default.env_name": "sliding_puzzle_game"},
            5,
            6,
        ),
        "teacher.model_name": (_DISTILLED, "org/a", "org/b"),
        "teacher.precision": (_DISTILLED, "bfloat16", "float32"),
        **_offline("sft", SFT),
        **_offline("dpo", DPO),
        **_offline("rm", RM),
        "grpo.adv_estimator.name": (GRPO, "grpo", "reinforce_plus_plus"),
        "grpo.adv_estimator.minus_baseline": (
            GRPO | {"grpo.adv_estimator.name": "reinforce_plus_plus"},
            True,
            False,
        ),
        "grpo.normalize_rewards": (GRPO, True, False),
        "grpo.advantage_clip_low": (GRPO, -5.0, None),
        "grpo.advantage_clip_high": (GRPO, 5.0, None),
        "grpo.invalid_tool_call_advantage": (GRPO, -5.0, None),
        "grpo.malformed_thinking_advantage": (GRPO, -5.0, None),
        "env.nemo_gym.invalid_tool_call_patterns": (
            GRPO | {"grpo.invalid_tool_call_advantage": -5.0},
            ["<tool_call>"],
            ["<call>"],
        ),
        "env.nemo_gym.thinking_tags": (
            GRPO | {"grpo.malformed_thinking_advantage": -5.0},
            ["<think>"],
            ["[THINK]"],
        ),
        "loss_fn.kl_input_clamp_value": (GRPO, 20.0, None),
        "grpo.seq_logprob_error_threshold": (GRPO, 2.0, 3.0),
        "ppo.seq_logprob_error_threshold": (PPO, 2.0, 3.0),
        "grpo.use_leave_one_out_baseline": (GRPO, True, False),
        "dpo.reference_policy_kl_penalty": (DPO, 0.1, 0.2),
        "dpo.preference_average_log_probs": (DPO, True, False),
        "dpo.sft_loss_weight": (DPO, 0.1, 0.2),
        "dpo.sft_average_log_probs": (DPO | {"dpo.sft_loss_weight": 0.1}, True, False),
        "grpo.reward_shaping.stop_properly_penalty_coef": (_SHAPED, 0.5, 0.0),
        "grpo.max_rollout_turns": (_PUZZLE, 5, 6),
        "data.add_system_prompt": (_PUZZLE, True, False),
        "data.use_multiple_dataloader": (_LOADERS, False, True),
        "data.custom_dataloader": (_LOADERS, _LOADERS["data.custom_dataloader"], "my_loaders.hard_ones"),
        "env.dapo.math_verify_impl": (
            GRPO | {"data.default.env_name": "dapo"},
            "hf_math_verify",
            "dapo_math_verify",
        ),
        "policy.quant_calib_size": (_NVFP4, 16, 32),
        "policy.generation.quant_cfg": (_NVFP4, "quant_configs/nvfp4_experts.yaml", "another.yaml"),
        "policy.generation.vllm_cfg.is_mx": (_FP8, True, False),
        "policy.generation.vllm_cfg.quantization_ignored_layer_kws": (_FP8, [], ["q_proj"]),
        "policy.megatron_cfg.peft.exclude_modules": (_PEFT, [], ["*linear_proj"]),
        "policy.dtensor_cfg.lora_cfg.exclude_modules": (_LORA, [], ["*o_proj"]),
        "grpo.dynamic_sampling_max_gen_batches": (GRPO | {"grpo.use_dynamic_sampling": True}, 5, 6),
        "grpo.reward_shaping.max_response_length": (_SHAPED, 100, 90),
        "grpo.reward_shaping.overlong_buffer_length": (_SHAPED, 10, 20),
        "grpo.reward_shaping.overlong_buffer_penalty": (_SHAPED, 1.0, 0.5),
        **{
            f"{section}.reward_scaling.{name}": (base, -1.0, 2.0)
            for section, base in _SCALED.items()
            for name in ("source_min", "source_max", "target_min", "target_max")
        },
        "grpo.async_grpo.in_flight_weight_updates": (_ASYNC, True, False),
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates": (
            _ASYNC | {"grpo.async_grpo.in_flight_weight_updates": True},
            True,
            False,
        ),
        **{
            f"policy.generation.trtllm_cfg.{name}": (_TRTLLM, first, 2 * first)
            for name, first in (("tensor_parallel_size", 1), ("max_batch_size", 32), ("max_num_tokens", 4096))
        },
        "policy.generation.sglang_cfg.tp_size": (GRPO | {"policy.generation.backend": "sglang"}, 1, 2),
        "policy.sequence_packing.enabled": (_PACKED, True, False),
        "policy.dynamic_batching.enabled": (_PACKED, True, False),
        "policy.megatron_cfg.fine_grained_activation_offloading": (MEGATRON, True, False),
        "policy.megatron_cfg.recompute_modules": (_RECOMPUTED, ["mlp"], ["moe"]),
        "policy.megatron_cfg.optimizer.optimizer": (MEGATRON, "adam", "sgd"),
        "policy.megatron_cfg.optimizer.sgd_momentum": (
            MEGATRON | {"policy.megatron_cfg.optimizer.optimizer": "sgd"},
            0.9,
            0.8,
        ),
        "policy.megatron_cfg.optimizer.min_lr": (_DECAYED, 1e-8, 1e-9),
        "policy.megatron_cfg.scheduler.lr_decay_style": (MEGATRON, "constant", "cosine"),
        "policy.megatron_cfg.scheduler.lr_decay_iters": (_DECAYED, 100, 200),
        "policy.megatron_cfg.peft.dim": (_PEFT, 8, 16),
        "policy.megatron_cfg.peft.alpha": (_PEFT, 8, 16),
        "policy.megatron_cfg.peft.target_modules": (_PEFT, ["linear_qkv"], ["linear_fc1"]),
        "policy.dtensor_cfg.lora_cfg.dim": (_LORA, 8, 16),
        "policy.dtensor_cfg.lora_cfg.alpha": (_LORA, 8, 16),
        "policy.dtensor_cfg.lora_cfg.target_modules": (_LORA, ["q_proj"], ["o_proj"]),
        "policy.dtensor_cfg.lora_cfg.match_all_linear": (
            _LORA | {"policy.dtensor_cfg.lora_cfg.target_modules": ["q_proj"]},
            True,
            False,
        ),
        "data.dataset_name": (
            {key: value for key, value in GRPO.items() if key != "data.train.dataset_name"},
            "DeepScaler",
            "DAPOMath17K",
        ),
        "policy.generation.vllm_cfg.enable_expert_parallel": (GRPO, True, False),
        "policy.megatron_cfg.moe_aux_loss_coeff": (MEGATRON, 0.0, 0.01),
        "policy.megatron_cfg.mtp_num_layers": (MEGATRON, 0, 1),
        "policy.draft.enabled": (MEGATRON, False, True),
        "policy.draft.model_name": (_DRAFT, None, "org/head"),
        "policy.draft.aux_layer_indices": (_DRAFT, [1, 2, 3], [1, 2, 4]),
        "policy.draft.learning_rate": (_DRAFT, None, 1e-4),
        "policy.draft.ttt_steps": (_DRAFT, None, 4),
        "policy.draft.ttt_step_loss_decay": (_DRAFT | {"policy.draft.ttt_steps": 4}, 1.0, 0.8),
        "policy.megatron_cfg.mtp_loss_scaling_factor": (_FURTHER, 0.1, 0.2),
        "policy.megatron_cfg.mtp_use_repeated_layer": (_FURTHER, False, True),
        "policy.megatron_cfg.mtp_detach_heads": (_FURTHER, False, True),
        "data.train.data_path": (GRPO, "one.jsonl", "two.jsonl"),
        "data.validation.data_path": (GRPO | {"grpo.val_period": 5}, "one.jsonl", "two.jsonl"),
        "data.default.prompt_file": (GRPO, "prompt.txt", None),
        "data.default.system_prompt_file": (GRPO, "prompt.txt", None),
        "policy.tokenizer.chat_template": (GRPO, "default", "one"),
        "grpo.skip_reference_policy_logprobs_calculation": (GRPO, False, True),
        "data.prompt_file": (GRPO, "prompt.txt", None),
        "data.system_prompt_file": (GRPO, "prompt.txt", None),
        "policy.generation.colocated.resources.num_nodes": (
            _ASYNC | {"cluster.num_nodes": 4, "policy.generation.colocated.resources.gpus_per_node": 8},
            1,
            2,
        ),
        "policy.dynamic_batching.train_mb_tokens": (
            GRPO | {"policy.dynamic_batching.enabled": True},
            4096,
            8192,
        ),
        "policy.megatron_cfg.recompute_granularity": (
            MEGATRON | {"policy.megatron_cfg.activation_checkpointing": True},
            "full",
            "selective",
        ),
        "policy.dtensor_cfg.sequence_parallel": (
            GRPO | {"policy.dtensor_cfg.tensor_parallel_size": 2},
            True,
            False,
        ),
        "logger.wandb.project": (GRPO | {"logger.wandb_enabled": True}, "a", "b"),
        "logger.wandb.entity": (GRPO | {"logger.wandb_enabled": True}, "a", "b"),
        "logger.swanlab.project": (GRPO | {"logger.swanlab_enabled": True}, "a", "b"),
        "logger.mlflow.experiment_name": (GRPO | {"logger.mlflow_enabled": True}, "a", "b"),
        "logger.mlflow.tracking_uri": (GRPO | {"logger.mlflow_enabled": True}, "a", "b"),
        f"{_GAME}.game_config.size": (_PUZZLE, 3, 4),
        f"{_GAME}.game_config.shuffle_moves": (_PUZZLE, 3, 4),
        f"{_GAME}.max_moves": (_PUZZLE, 3, 4),
    },
    "verl": {
        "distillation.enabled": (_TAUGHT, False, True),
        "distillation.enable": (_TAUGHT | {"distillation.enabled": False}, False, True),
        "distillation.nnodes": (_TAUGHT, 1, 2),
        "distillation.n_gpus_per_node": (_TAUGHT, 4, 8),
        "distillation.teacher_key": (_TAUGHT | _TWO, "data_source", "of"),
        f"{_D}.loss_mode": (_TAUGHT, "k3", "forward_kl_topk"),
        f"{_D}.topk": (_BY_TOP, 32, 64),
        f"{_D}.loss_max_clamp": (_BY_TOP, 10.0, 5.0),
        f"{_D}.log_prob_min_clamp": (_BY_TOP, None, -10.0),
        f"{_M}.*": (_TAUGHT, {"model_path": "a", "num_replicas": 1}, {"model_path": "b", "num_replicas": 1}),
        **{
            f"{_M}.teacher_model.inference.{name}_parallel_size": (_TAUGHT, 2, 4)
            for name in ("tensor_model", "pipeline_model", "expert")
        },
        f"{_MTP}.enable": (VERL | {f"{_MTP}.enable_train": True}, False, True),
        f"{_MTP}.enable_train": (VERL | {f"{_MTP}.enable": True}, False, True),
        f"{_MTP}.enable_rollout": (VERL | {f"{_MTP}.enable": True}, False, True),
        f"{_MTP}.mtp_loss_scaling_factor": (_MTP_TRAINED, 0.1, 0.2),
        f"{_MTP}.detach_encoder": (_MTP_TRAINED, False, True),
        f"{_MTP}.num_speculative_tokens": (_MTP_SAMPLED, 1, 2),
        f"{_MTP}.speculative_num_steps": (
            _MTP_SAMPLED | {"actor_rollout_ref.rollout.name": "sglang"},
            1,
            2,
        ),
        "algorithm.gamma": (GAE, 1.0, 0.9),
        "algorithm.lam": (GAE, 1.0, 0.9),
        "critic.cliprange_value": (GAE, 0.5, 0.4),
        "critic.loss_agg_mode": (GAE, "token-mean", "seq-mean-token-mean"),
        "trainer.critic_warmup": (GAE, 0, 5),
        "critic.optim.lr": (GAE, 1e-5, 2e-5),
        "critic.optim.weight_decay": (GAE, 0.0, 0.1),
        "critic.model.path": (GAE, "org/model", "org/critic"),
        "actor_rollout_ref.model.lora_adapter_path": (
            VERL | {"actor_rollout_ref.model.lora_rank": 8},
            "one",
            "two",
        ),
        "actor_rollout_ref.model.lora.adapter_path": (
            VERL | {"actor_rollout_ref.model.lora.rank": 8},
            "one",
            "two",
        ),
        f"{_A}.clip_ratio": (VERL | {f"{_A}.clip_ratio_low": None}, 0.2, 0.3),
        f"{_A}.loss_scale_factor": (VERL | {f"{_A}.loss_agg_mode": "seq-mean-token-sum-norm"}, 100, 200),
        **{f"{_A}.{name}": (_of_loss("sapo"), 1.0, 1.1) for name in ("tau_pos", "tau_neg")},
        **{f"{_A}.policy_loss.{name}": (_of_loss("sapo"), 1.0, 1.1) for name in ("tau_pos", "tau_neg")},
        **{
            f"{_A}.policy_loss.clip_cov_{name}": (_of_loss("clip_cov"), 0.2, 0.3)
            for name in ("ratio", "lb", "ub")
        },
        f"{_A}.policy_loss.kl_cov_ratio": (_of_loss("kl_cov"), 0.2, 0.3),
        f"{_A}.policy_loss.ppo_kl_coef": (_of_loss("kl_cov"), 0.2, 0.3),
        f"{_A}.kl_loss_type": (VERL | {f"{_A}.use_kl_loss": True}, "low_var_kl", "mse"),
        "algorithm.kl_ctrl.kl_coef": (VERL | {"algorithm.use_kl_in_reward": True}, 0.1, 0.2),
        f"{_C}.rollout_is_threshold": (VERL | {f"{_C}.rollout_is": "token"}, 2.0, "0.5_5.0"),
        f"{_C}.rollout_is_batch_normalize": (VERL | {f"{_C}.rollout_is": "token"}, False, True),
        f"{_C}.rollout_rs": (VERL | {f"{_C}.rollout_rs_threshold": "0.9_1.1"}, None, "seq_mean_k1"),
        f"{_C}.rollout_rs_threshold": (VERL | {f"{_C}.rollout_rs": "seq_mean_k1"}, "0.9_1.1", "0.8_1.2"),
        f"{_C}.loss_type": (VERL | {f"{_C}.bypass_mode": True}, "ppo_clip", "reinforce"),
        "algorithm.filter_groups.metric": (
            _OVERLONG | {"algorithm.filter_groups.enable": True},
            "acc",
            "score",
        ),
        "algorithm.filter_groups.max_num_gen_batches": (
            VERL | {"algorithm.filter_groups.enable": True},
            5,
            6,
        ),
        "reward.custom_reward_function.name": (
            VERL | {"reward.custom_reward_function.path": "a.py"},
            "one",
            "two",
        ),
        "custom_reward_function.name": (VERL | {"custom_reward_function.path": "a.py"}, "one", "two"),
        "reward.reward_kwargs.max_resp_len": (_OVERLONG, 100, 200),
        "reward.reward_kwargs.overlong_buffer_cfg.len": (_OVERLONG, 10, 20),
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": (_OVERLONG, 1.0, 0.5),
        f"{_V}.top_k": (VERL | {f"{_V}.temperature": 1.0}, -1, 10),
        f"{_V}.top_p": (VERL | {f"{_V}.temperature": 1.0}, 1.0, 0.7),
        "trainer.max_actor_ckpt_to_keep": (VERL | {"trainer.save_freq": 5}, 1, 2),
        "model_engine": (VERL, "dp", "megatron"),
        f"{_A}.megatron.override_transformer_config.moe_router_load_balancing_type": (
            VERL | {f"{_A}.megatron.override_transformer_config.moe_aux_loss_coeff": 0.01},
            "none",
            "aux_loss",
        ),
        f"{_A}.megatron.override_transformer_config.recompute_modules": (
            VERL
            | {
                "model_engine": "megatron",
                f"{_A}.megatron.override_transformer_config.recompute_granularity": "selective",
            },
            ["mlp"],
            ["moe"],
        ),
        f"{_A}.optim.betas": (VERL, [0.9, 0.999], [0.9, 0.98]),
        f"{_A}.optim.lr_start": (_VEOMNI, 0.0, 1e-7),
        "algorithm.gdpo_reward_weights": (_GDPO, [1.0, 1.0], [1.0, 0.5]),
        f"{_A}.optim.lr_decay_style": (VERL | {"model_engine": "megatron"}, "constant", "cosine"),
        f"{_A}.optim.lr_decay_steps": (_COSINE, 100, 200),
        f"{_A}.optim.lr_scheduler_type": (VERL, "constant", "cosine"),
        f"{_A}.optim.min_lr": (_COSINE, 1e-8, 1e-9),
        f"{_A}.optim.min_lr_ratio": (_FSDP_COSINE, 0.1, 0.2),
        f"{_A}.grad_clip": (VERL | {f"{_A}.optim.clip_grad": None}, 1.0, 2.0),
        "actor_rollout_ref.model.target_modules": (
            VERL | {"actor_rollout_ref.model.lora_rank": 8},
            "all-linear",
            ["q_proj"],
        ),
        f"{_A}.router_replay.mode": (VERL, "disabled", "R3"),
        f"{_A}.megatron.router_replay.mode": (VERL, "disabled", "R3"),
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": (VERL, False, True),
        f"{_A}.checkpoint.save_contents": (VERL | {"trainer.save_freq": 5}, ["model"], ["hf_model"]),
    },
    "openrlhf": {
        "trainer": (OFFLINE["dpo"], "dpo", "rm"),
        "train.agent_func_path": (OPENRLHF, None, "agents/one.py"),
        "logger.tensorboard_dir": (OPENRLHF, None, "runs"),
        "algo.advantage.no_std_norm": (
            OPENRLHF | {"algo.advantage.estimator": "reinforce_baseline"},
            True,
            False,
        ),
        "algo.advantage.estimator": (OPENRLHF, "gae", "reinforce"),
        "algo.advantage.gamma": (OPENRLHF, 1.0, 0.9),
        "algo.advantage.is_correction_threshold": (
            OPENRLHF | {"algo.advantage.is_correction_enable": True},
            [0.5, 5.0],
            [0.5, 2.0],
        ),
        "actor.eps_clip_low_high": (OPENRLHF, [0.2, 0.2], [0.2, 0.28]),
        "actor.dual_clip": (OPENRLHF, None, 3.0),
        "actor.policy_loss_type": (OPENRLHF, "ppo", "gspo"),
        "actor.entropy_coef": (OPENRLHF, 0.0, 0.1),
        "actor.eps_clip": (OPENRLHF, 0.2, 0.1),
        "model.beta": (OFFLINE["dpo"], 0.1, 0.2),
        "model.label_smoothing": (OFFLINE["dpo"], 0.1, 0.2),
        "model.ipo_enable": (OFFLINE["dpo"], True, False),
        "model.nll_loss_coef": (OFFLINE["dpo"], 0.1, 0.2),
        "model.loss_type": (OFFLINE["rm"], "sigmoid", "logexp"),
        "model.margin_loss_enable": (OFFLINE["rm"], True, False),
        "model.pretrain_mode_enable": (OFFLINE["sft"], True, False),
        "algo.kl.estimator": (OPENRLHF | {"algo.kl.use_loss": True}, "k2", "k3"),
        "algo.advantage.is_correction_type": (
            OPENRLHF | {"algo.advantage.is_correction_enable": True},
            "tis",
            "seq-mask-tis",
        ),
        "algo.dynamic_filtering_range": (
            GROUPED | {"algo.dynamic_filtering_enable": True},
            [0.0, 1.0],
            [0.2, 0.8],
        ),
        "reward.normalize_enable": (
            OPENRLHF | {"reward.remote_url": None, "reward.model_name_or_path": "org/rm"},
            True,
            False,
        ),
        "reward.overlong_buffer_len": (OPENRLHF, 100.0, 200.0),
        "reward.overlong_penalty_factor": (OPENRLHF | {"reward.overlong_buffer_len": 100.0}, 1.0, 0.5),
        "train.async_queue_size": (OPENRLHF | {"train.async_enable": True}, 1, 2),
        "train.partial_rollout_enable": (OPENRLHF | {"train.async_enable": True}, True, False),
        "data.prompt_key": (OFFLINE["dpo"], "a", "b"),
        "data.output_key": (OFFLINE["sft"], "a", "b"),
        "data.input_template": (OPENRLHF, "a {}", "b {}"),
        "data.multiturn": (OFFLINE["sft"], True, False),
        "data.tokenizer_chat_template": (OFFLINE["sft"], None, "{{ messages }}"),
        "eval.split": (OPENRLHF | {"eval.steps": 5, "eval.dataset": "org/held_out"}, "train", "test"),
        "critic.model_name_or_path": (OPENRLHF, "org/a", "org/b"),
        "critic.value_clip": (OPENRLHF, 0.5, 0.2),
        "critic.freezing_steps": (OPENRLHF, -1, 5),
        **{
            f"{section}adam.{name}": (base, first, second)
            for section, base in (("actor.", OPENRLHF), ("critic.", OPENRLHF), ("", OFFLINE["sft"]))
            for name, first, second in (
                ("betas", [0.9, 0.95], [0.9, 0.98]),
                ("eps", 1e-8, 1e-7),
                ("weight_decay", 0.0, 0.1),
            )
        },
        **{
            f"{section}{name}": (base, first, second)
            for section, base in (("actor.", OPENRLHF), ("critic.", OPENRLHF), ("", OFFLINE["sft"]))
            for name, first, second in (
                ("lr_scheduler", "constant", "linear"),
                ("lr_warmup_ratio", 0.03, 0.1),
                ("min_lr_ratio", 0.1, 0.2),
                ("max_norm", 1.0, 2.0),
            )
        },
        "nproc_per_node": (OFFLINE["sft"], 4, 8),
        "nnodes": (OFFLINE["sft"], 1, 2),
        "ds.tensor_parallel_size": (OPENRLHF, 1, 2),
        "ds.ring_attn_size": (OPENRLHF, 1, 2),
        "vllm.enable_prefix_caching": (OPENRLHF, True, False),
        "rollout.temperature": (OPENRLHF, 1.0, 0.5),
        "ds.lora.target_modules": (OFFLINE["sft"] | {"ds.lora.rank": 8}, "all-linear", ["q_proj"]),
        "ds.lora.alpha": (OFFLINE["sft"] | {"ds.lora.rank": 8}, 8, 16),
        "actor.aux_loss_coef": (OPENRLHF, 0.0, 0.1),
        "logger.wandb.key": (OPENRLHF, None, "x"),
        **{
            f"logger.wandb.{name}": (OPENRLHF | {"logger.wandb.key": "x"}, "a", "b")
            for name in ("project", "org", "group")
        },
        "vllm.num_engines": (OPENRLHF | {"train.colocate_all": False}, 1, 2),
        "train.colocate_all": (OPENRLHF, True, False),
        "ckpt.max_num": (OPENRLHF, 2, 3),
    },
    "trl": {
        "datasets": (TRL, [{"path": "org/a"}], [{"path": "org/b"}]),
        "model": ({key: value for key, value in TRL.items() if key != "model_name_or_path"}, "a/b", "a/c"),
        "generation_batch_size": (TRL, 8, 16),
        "num_train_epochs": (TRL | {"max_steps": -1}, 1.0, 2.0),
        "scale_rewards": (TRL, "group", "none"),
        "multi_objective_aggregation": (TRL, "sum_then_normalize", "normalize_then_sum"),
        "loss_type": (TRL, "dapo", "grpo"),
        "importance_sampling_level": (TRL, "token", "sequence"),
        "sapo_temperature_pos": (TRL | {"loss_type": "sapo"}, 1.0, 1.1),
        "sapo_temperature_neg": (TRL | {"loss_type": "sapo"}, 1.0, 1.1),
        "use_bias_correction_kl": (TRL | {"beta": 0.1}, True, False),
        **{
            f"entropy_{name}": (TRL | {"use_adaptive_entropy": True}, 0.1, 0.2)
            for name in ("target", "coef_delta", "coef_max")
        },
        "vllm_importance_sampling_correction": (VLLM, True, False),
        "vllm_importance_sampling_mode": (VLLM, "sequence_mask", "token_truncate"),
        "vllm_importance_sampling_clip_max": (VLLM, 3.0, 2.0),
        "vllm_importance_sampling_clip_min": (VLLM, 0.1, 0.2),
        "vllm_importance_sampling_cap": (VLLM, 3.0, 2.0),
        "vllm_tensor_parallel_size": (VLLM | {"num_processes": 2}, 1, 2),
        "vllm_gpu_memory_utilization": (VLLM, 0.3, 0.4),
        "lr_scheduler_type": (TRL, "linear", "cosine"),
        "lora_r": (TRL | {"use_peft": True}, 8, 16),
        "lora_alpha": (TRL | {"use_peft": True}, 8, 16),
        "lora_target_modules": (TRL | {"use_peft": True}, ["q_proj"], ["o_proj"]),
        "target_modules": (TRL | {"use_peft": True}, ["q_proj"], ["o_proj"]),
        "save_strategy": (TRL, "steps", "no"),
        "num_machines": (TRL | {"num_processes": 4}, 1, 2),
        "report_to": (TRL, "none", ["tensorboard", "wandb"]),
        "project": (TRL | {"report_to": "wandb"}, "a", "b"),
        "trackio_space_id": (TRL | {"report_to": "trackio"}, "a", "b"),
    },
}
# Keys with one supported value, or whose other value is remarked on: what is written does not depend on them.
REFUSED = {
    "nemo-rl": {
        "data.num_prompts_per_dataloader": 5,
        "policy.optimizer.name": "SGD",
        "value.optimizer.name": "SGD",
    },
    "verl": {
        f"{_A}.optim.optimizer": "SGD",
        "actor_rollout_ref.rollout.name": "trtllm",
        f"{_D}.use_task_rewards": True,
        f"{_D}.use_policy_gradient": True,
    },
    "openrlhf": {
        **{f"{section}optim": "muon" for section in ("actor.", "critic.", "")},
        "ds.param_dtype": "fp16",
    },
    "trl": {},
}
REMARKED = {
    "nemo-rl": {"async_rl.sampler.name": "windowed"},
    "verl": {"algorithm.kl_penalty": "low_var_kl"},
}


def base_of(project: str, key: str) -> dict[str, Any]:
    """Values of a run in which the key is read."""
    if key.startswith("value."):
        return PPO
    if key.endswith("dataloader"):
        return _LOADERS
    return _TAUGHT if key.startswith(f"{_D}.") else BASES[project]


def mapped(project: str) -> list[str]:
    keys = [
        key for rule in PROJECTS[project].rules if isinstance(rule, Part) and rule.fields for key in rule.keys
    ]
    return list(dict.fromkeys(keys))


def _of_critic(context: Context) -> Context:
    """A context of a key of the policy, for the same key of the critic."""
    base, first, second = context
    own = {key.replace("policy.", "value.", 1): value for key, value in base.items() if key not in GRPO}
    return PPO | {"value.max_total_sequence_length": 512} | own, first, second


_CRITIC_KEYS = {
    key.replace("policy.", "value.", 1): _of_critic(context)
    for key, context in CONTEXTS["nemo-rl"].items()
    if key.startswith(("policy.megatron_cfg.", "policy.dtensor_cfg.", "policy.sequence_", "policy.dynamic_"))
}
_GYM = GRPO | {"env.should_use_nemo_gym": True, "data.default.env_name": "nemo_gym"}
_GYM_MODEL = "env.nemo_gym.policy_model.responses_api_models.vllm_model"
_GYM_TEMPLATES = (
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.default_chat_template_kwargs",
    f"{_GYM_MODEL}.chat_template_kwargs",
    f"{_GYM_MODEL}.extra_body.chat_template_kwargs",
)
_OPD = "on_policy_distillation"
_OPD_APART = f"{_OPD}.non_colocated_teachers"
_OPD_DEFAULT = f"{_OPD_APART}.default_teacher_cfg"
_OPD_MODELS = f"{_OPD}.teacher_model_by_agent_name"
MOPD = _GYM | {
    "cluster.num_nodes": 5,
    "grpo.adv_estimator.name": "opd",
    "data.train.data_path": "rows.jsonl",
    f"{_OPD}.enabled": True,
    f"{_OPD_APART}.enabled": True,
    f"{_OPD_DEFAULT}.num_nodes": 1,
    f"{_OPD_MODELS}.sums": "org/sums",
}
_SEVERAL_TEACHERS = MOPD | {f"{_OPD_MODELS}.prose": "org/prose", f"{_OPD_MODELS}.tales": "org/prose"}
_OPD_KEYS: dict[str, Context] = {
    f"{_OPD_MODELS}.*": (MOPD, "org/one", "org/two"),
    f"{_OPD}.default_teacher_alias": (_SEVERAL_TEACHERS, "sums", "tales"),
    f"{_OPD}.strict_agent_name_match": (
        _SEVERAL_TEACHERS | {f"{_OPD}.default_teacher_alias": "sums"},
        True,
        False,
    ),
    f"{_OPD}.deduplicate_shared_teacher_checkpoints": (_SEVERAL_TEACHERS, True, False),
    **{
        f"{_OPD_DEFAULT}.{name}": (MOPD, 1, 2)
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size", "num_nodes"),
        )
    },
    f"{_OPD_DEFAULT}.gpus_per_node": (MOPD, 4, 8),
    **{
        f"{section}.sequence_parallel": (
            MOPD | {f"{_OPD_DEFAULT}.tensor_model_parallel_size": 2},
            True,
            False,
        )
        for section in (_OPD_DEFAULT, f"{_OPD_DEFAULT}.megatron_cfg_overrides")
    },
    f"{_OPD_DEFAULT}.megatron_cfg_overrides.expert_tensor_parallel_size": (MOPD, 1, 2),
    f"{_OPD_APART}.teacher_overrides.*": (
        _SEVERAL_TEACHERS | {f"{_OPD_MODELS}.*": "org/others"},
        {"tensor_model_parallel_size": 1},
        {"tensor_model_parallel_size": 2},
    ),
}
_SEVERAL_REWARDS = GRPO | {
    "grpo.adv_estimator.name": "gdpo",
    "data.default.env_name": "math_multi_reward",
}
_COSINE_OF_TORCH = {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 10}}
CONTEXTS["nemo-rl"] |= {key: context for key, context in _CRITIC_KEYS.items() if key in mapped("nemo-rl")} | {
    **_OPD_KEYS,
    "env.should_use_nemo_gym": (GRPO | {"data.train.data_path": "rows.jsonl"}, True, False),
    "env.should_mask_flagged_samples": (_GYM, True, False),
    **{
        f"{section}.{name}": (_GYM, True, False)
        for section in _GYM_TEMPLATES
        for name in ("enable_thinking", "truncate_history_thinking", "force_nonempty_content")
    },
    "grpo.adv_estimator.reward_weights": (_SEVERAL_REWARDS, [1.0, 1.0, 1.0], [1.0, 0.5, 0.25]),
    "ppo.adv_estimator.name": (PPO, "gae", "raw_reward"),
    "ppo.dynamic_sampling_max_gen_batches": (PPO | {"ppo.use_dynamic_sampling": True}, 5, 6),
    "ppo.max_rollout_turns": (PPO | {"data.default.env_name": "sliding_puzzle_game"}, 5, 6),
    "value.megatron_cfg.peft.enabled": (PPO | {"value.megatron_cfg.enabled": True}, True, False),
    "value.dtensor_cfg.expert_parallel_size": (PPO, 1, 2),
    "value.scheduler": (PPO, [], [_COSINE_OF_TORCH]),
    "value.optimizer.kwargs.betas": (PPO, [0.9, 0.999], [0.9, 0.95]),
    "value.optimizer.kwargs.exp_avg_dtype": (PPO, None, "torch.bfloat16"),
    "value.optimizer.kwargs.exp_avg_sq_dtype": (PPO, None, "torch.bfloat16"),
}
