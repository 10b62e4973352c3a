"""NeMo-RL's configs: GRPO and its variants, PPO, distillation, SFT, DPO and reward models."""

from functools import partial
from pathlib import Path
from typing import Any

from . import nemo_rl_devices as devices
from . import nemo_rl_distillation as distillation
from . import nemo_rl_learning as learning
from . import nemo_rl_mopd as mopd
from .nemo_rl_data import DATA_RULES
from .nemo_rl_devices import DTENSOR, VLLM
from .nemo_rl_gym import GYM_RULES
from .nemo_rl_learning import GENERATION
from .nemo_rl_sections import KINDS, MEGATRON, ONLINE, REWARDED, kind, of_online, of_rewarded
from .rules import Ignored, Lost, Part, Rule, take, take_given
from .shared import template_arguments
from .sources import read_inherited, resolved

MARKS = (
    r"^(policy:\n(.*\n)*?  (model_name|megatron_cfg|dtensor_cfg|train_global_batch_size):|"
    r"(grpo|loss_fn|distillation|rm|ppo):$)"
)

_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
LIKENESSES: dict[str, object] = {
    **distillation.LIKENESSES,
    **mopd.LIKENESSES,
    "loss_fn.truncated_importance_sampling_type": ("tis", "icepop", "seq-mask-tis"),
    "loss_fn.truncated_importance_sampling_ratio": 2.0,
    "loss_fn.truncated_importance_sampling_ratio_min": 0.5,
    **{f"{name}.async_{name}.max_trajectory_age_steps": 1 for name in REWARDED},
    "data.num_prompts_per_dataloader": 1,
    **dict.fromkeys(of_online("max_val_samples"), 256),
    **{f"ppo.adv_estimator.gae_lambda{name}": 0.95 for name in ("", "_policy", "_value")},
    "value_loss_fn.cliprange": 0.2,
    "grpo.adv_estimator.reward_weights": [1.0, 1.0, 1.0],
    **dict.fromkeys(("grpo.invalid_tool_call_advantage", "grpo.malformed_thinking_advantage"), -5.0),
    **{key: ["<think>"] for key in learning.FLAGGED_BY},
    "loss_fn.kl_input_clamp_value": 20.0,
    "value.max_grad_norm": 1.0,
    "value.optimizer.kwargs.betas": [0.9, 0.999],
    "grpo.val_num_generations_per_prompt": 1,
    "data.validation.repeat": 1,
    "data.train.split_validation_size": 0.05,
    **{
        f"{GENERATION}.{prefix}{name}": value
        for prefix in ("", "val_")
        for name, value in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 50))
    },
    f"{GENERATION}.colocated.resources.num_nodes": 1,
    f"{GENERATION}.colocated.resources.gpus_per_node": 8,
    f"{VLLM}.precision": ("auto", "fp8", "bfloat16", "float16", "float32"),
    f"{VLLM}.enable_prefix_caching": True,
    f"{GENERATION}.sglang_cfg.sglang_server_config.num_gpus_per_engine": 1,
    f"{GENERATION}.sglang_cfg.mem_fraction_static": 0.7,
    "policy.sequence_packing.train_mb_tokens": 4096,
    "policy.dynamic_batching.train_mb_tokens": 4096,
    **dict.fromkeys((f"{MEGATRON}.{name}" for name in _STAGES), 8),
    **dict.fromkeys((f"value.megatron_cfg.{name}" for name in _STAGES), 8),
    **{f"{model}.megatron_cfg.recompute_granularity": ("full", "selective") for model in ("policy", "value")},
    **{f"{model}.megatron_cfg.scheduler.lr_warmup_init": 0.0 for model in ("policy", "value")},
    f"{MEGATRON}.fp8_cfg.fp8": ("hybrid", "e4m3"),
    f"{MEGATRON}.fp8_cfg.fp8_recipe": ("tensorwise", "delayed", "blockwise", "mxfp8"),
    "policy.optimizer.kwargs.betas": [0.9, 0.999],
    "checkpointing.higher_is_better": True,
    **{
        f"env.{name}.math_verify_impl": ("hf_math_verify", "dapo_math_verify")
        for name in ("math", "dapo", "math_multi_reward")
    },
    **dict.fromkeys(of_rewarded("reward_shaping.stop_properly_penalty_coef"), 0.5),
    "dpo.sft_average_log_probs": False,
    **dict.fromkeys(of_online("max_rollout_turns"), 1),
    "policy.quant_calib_size": 128,
    "data.add_system_prompt": True,
    "async_rl.sampler.name": ("windowed", "ready_first", "weight_fifo", "in_order", "custom"),
    f"{VLLM}.is_mx": True,
    f"{VLLM}.quantization_ignored_layer_kws": ["q_proj"],
    f"{MEGATRON}.peft.exclude_modules": ["*out_proj*"],
    f"{DTENSOR}.lora_cfg.exclude_modules": ["*out_proj*"],
    f"{MEGATRON}.moe_router_bias_update_rate": 0.001,
    f"{MEGATRON}.mtp_num_layers": 1,
    f"{MEGATRON}.mtp_loss_scaling_factor": 0.1,
    f"{MEGATRON}.mtp_use_repeated_layer": False,
    f"{MEGATRON}.mtp_detach_heads": False,
}


def read(file: Path) -> dict[str, Any]:
    """A recipe with its `defaults:` chain, interpolations and resolvers, as NeMo-RL resolves it."""
    return resolved(read_inherited(file), str(file))


_SETUP: tuple[Rule, ...] = (
    take("policy.model_name", "policy.model_path"),
    Part(
        ("policy.tokenizer.name", "policy.tokenizer.chat_template"),
        ("policy.tokenizer",),
        devices.tokenizer,
    ),
    Part(
        ("policy.tokenizer.chat_template_kwargs.*",),
        ("policy.tokenizer.template_arguments",),
        lambda x: template_arguments(x, "policy.tokenizer.chat_template_kwargs"),
    ),
    take("policy.precision", "policy.precision"),
    take("policy.max_grad_norm", "policy.max_grad_norm"),
    take_given("policy.logprob_chunk_size", "policy.logprob_chunk_tokens"),
    Part(devices.MICRO, ("policy.max_sequence_length", "policy.micro_batch_tokens"), devices.micro_batches),
    Part(devices.SIZES, ("policy.layout",), devices.model_layout),
    Part(devices.FSDP_SIZES, ("policy.layout",), lambda x: {}, devices.SHARDING),
    Part(
        devices.RECOMPUTE,
        ("policy.recompute",),
        devices.recompute,
    ),
    Part(devices.OFFLOADED, ("policy.offload_activations",), devices.offload_activations),
    Part(devices.OPTIMIZER, ("policy.optimizer", "policy.schedule"), devices.optimizer),
    Part(
        devices.TORCH_OPTIMIZER,
        ("policy.optimizer", "policy.schedule"),
        lambda x: {},
        devices.DECAY,
    ),
    Part(devices.LORA, ("policy.lora",), devices.lora),
    Part(
        (*devices.QUANTIZATION, "policy.quant_calib_size"),
        ("policy.quantization", "policy.kernels"),
        devices.quantization,
    ),
    Part(
        tuple(f"{MEGATRON}.fp8_cfg.{name}" for name in ("enabled", "fp8", "fp8_recipe")),
        ("policy.fp8",),
        devices.fp8,
    ),
    Part(devices.FURTHER_TOKENS, ("policy.multi_token_prediction",), devices.further_tokens),
    Part(devices.DRAFT_HEAD, ("policy.draft",), devices.draft_head),
    Part(
        tuple(
            f"{MEGATRON}.{name}"
            for name in ("freeze_moe_router", "moe_aux_loss_coeff", "moe_router_bias_update_rate")
        ),
        tuple(
            f"policy.moe.{name}"
            for name in ("freeze_router", "load_balancing_loss_coefficient", "bias_update_rate")
        ),
        devices.router,
    ),
    take("policy.router_replay.enabled", "policy.moe.router_replay"),
    take("cluster.num_nodes", "cluster.num_nodes"),
    take("cluster.gpus_per_node", "cluster.gpus_per_node"),
    Part(devices.TRACKERS, ("logger.trackers",), devices.trackers),
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
        devices.checkpoints,
    ),
)


_of_value = partial(devices.keys_of, "value")
_CRITIC: tuple[Rule, ...] = (
    Part(
        (*devices.CRITIC, *_of_value(devices.MICRO)),
        tuple(
            f"critic.{name}" for name in ("model_path", "precision", "max_grad_norm", "micro_batch_tokens")
        ),
        devices.critic,
    ),
    Part(_of_value(devices.SIZES), ("critic.layout",), devices.of_critic(devices.model_layout)),
    Part(_of_value(devices.FSDP_SIZES), ("critic.layout",), lambda x: {}, devices.SHARDING),
    Part(
        _of_value(devices.RECOMPUTE),
        ("critic.recompute",),
        devices.of_critic(devices.recompute),
    ),
    Part(
        _of_value(devices.OPTIMIZER),
        ("critic.optimizer", "critic.schedule"),
        devices.of_critic(devices.optimizer),
    ),
    Part(
        _of_value(devices.TORCH_OPTIMIZER),
        ("critic.optimizer", "critic.schedule"),
        lambda x: {},
        devices.DECAY,
    ),
    Part(_of_value(devices.LORA), ("critic.lora",), devices.of_critic(devices.lora)),
)


def _each(*names: str) -> tuple[str, ...]:
    """The keys of all algorithms' sections."""
    return tuple(f"{section}.{name}" for section in KINDS for name in names)


_ASYNCHRONOUS = (
    *("enabled", "max_trajectory_age_steps", "in_flight_weight_updates"),
    "recompute_kv_cache_after_weight_updates",
)
_RANGES = ("source", "target")
_TRAINING: tuple[Rule, ...] = (
    Part(
        ("policy.train_global_batch_size", *learning.ADVANTAGE, *learning.VALUES),
        ("algorithm",),
        learning.algorithm,
    ),
    Part(("policy.train_global_batch_size",), ("algorithm.batch_size",), learning.offline_batch),
    Part(_each("max_num_steps", "max_num_epochs"), ("algorithm.num_steps",), learning.num_steps),
    Part(_each("seed"), ("seed",), lambda x: {"seed": x.get(f"{kind(x)}.seed", 42)}),
    Part(
        (
            *(f"loss_fn.ratio_clip_{name}" for name in ("min", "max", "c")),
            *("loss_fn.token_level_loss", "loss_fn.disable_ppo_ratio", "loss_fn.use_cispo"),
            *("loss_fn.sequence_level_importance_ratios", "loss_fn.positive_example_nll_weight"),
            *("dpo.reference_policy_kl_penalty", "dpo.preference_average_log_probs"),
            *("dpo.sft_loss_weight", "dpo.sft_average_log_probs"),
        ),
        (
            *("algorithm.loss", "algorithm.likelihood", "algorithm.sft_coefficient"),
            "algorithm.sft_aggregation",
        ),
        learning.loss,
    ),
    Part(
        (
            *(f"loss_fn.reference_policy_kl_{name}" for name in ("penalty", "type")),
            *("loss_fn.kl_input_clamp_value", "loss_fn.kl_output_clamp_value"),
            *("loss_fn.use_on_policy_kl_approximation", "loss_fn.use_kl_in_reward"),
            *of_rewarded("skip_reference_policy_logprobs_calculation"),
        ),
        ("algorithm.kl",),
        learning.kl,
    ),
    Part(
        ("grpo.advantage_clip_low", "grpo.advantage_clip_high"),
        ("algorithm.advantage_clip",),
        learning.advantage_clip,
    ),
    Part(
        (
            *("grpo.invalid_tool_call_advantage", "grpo.malformed_thinking_advantage"),
            *learning.FLAGGED_BY,
        ),
        ("algorithm.flagged_advantages", "env.turn_flags"),
        learning.flagged_turns,
    ),
    Part(
        (
            "loss_fn.use_importance_sampling_correction",
            *(f"loss_fn.truncated_importance_sampling_{name}" for name in ("type", "ratio", "ratio_min")),
            *of_rewarded("seq_logprob_error_threshold"),
        ),
        ("algorithm.correction",),
        learning.correction,
    ),
    Part(
        of_rewarded("overlong_filtering", "use_dynamic_sampling", "dynamic_sampling_max_gen_batches"),
        ("algorithm.filters",),
        learning.filters,
    ),
    Part(
        (
            *of_rewarded("reward_shaping.enabled", "reward_shaping.max_response_length"),
            *of_rewarded("reward_shaping.stop_properly_penalty_coef", "reward_scaling.enabled"),
            *of_rewarded(*(f"reward_shaping.overlong_buffer_{name}" for name in ("length", "penalty"))),
            *of_rewarded(*(f"reward_scaling.{name}_{end}" for name in _RANGES for end in ("min", "max"))),
        ),
        ("rewards", "env.weight", "algorithm.truncated_reward"),
        learning.rewards,
    ),
    Part(
        (
            *(f"{section}.async_{section}.{name}" for section in REWARDED for name in _ASYNCHRONOUS),
            *("async_rl.sampler.max_staleness_versions", "async_rl.sampler.max_lookahead_versions"),
            "async_rl.sampler.name",
            "async_rl.recompute_kv_cache_after_weight_updates",
        ),
        ("algorithm.max_staleness", "generation.on_update"),
        learning.asynchronous,
    ),
    Part(
        (
            *_each("val_period", "val_at_start", "val_at_end"),
            *(key for key in _each("val_batches", "val_global_batch_size") if not key.startswith(ONLINE)),
            *of_online("max_val_samples"),
            *("grpo.val_num_generations_per_prompt", "data.validation.repeat"),
            *(f"{GENERATION}.val_{name}" for name in ("temperature", "top_p", "top_k")),
        ),
        ("algorithm.validation",),
        learning.validation,
    ),
    Part(devices.ENGINE_KEYS, ("generation",), devices.generation),
)

_OFF: tuple[object, ...] = (None, False, 0, 0.0, "none", [], {})
_WITHOUT: tuple[Rule, ...] = (
    Ignored(
        ("loss_fn.force_on_policy_ratio",),
        "off",
    ),
    Ignored(
        (
            *("grpo.penalize_invalid_tool_call", "grpo.penalize_malformed_thinking"),
            "grpo.invalid_tool_call_strategy",
        ),
        "NeMo-RL does not read it; the advantage of flagged turns is a key of its own",
    ),
    Lost(("reward_penalties.*",), "penalties of NeMo-Gym's rollouts; give them as rewards"),
    Lost(("grpo.stop_at_validation_metric",), "`algorithm.early_stop` watches for the lack of improvement"),
    Lost(("grpo.val_start_at",), "validation starts with the run", (-1, 0, None)),
    Ignored(("grpo.stop_at_validation_threshold",), "of grpo.stop_at_validation_metric"),
    Ignored(
        of_rewarded("batch_multiplier"),
        "how much is sampled at a time for dynamic sampling; num_steps counts the steps of an epoch with it",
    ),
    Ignored(
        (
            *of_rewarded("val_batch_size"),
            *("grpo.debug_payload_metrics", "grpo.deduplicate_multimodal_data"),
            *(
                "grpo.calculate_advantages_on_gpu",
                "grpo.async_grpo",
                "grpo.async_grpo.max_generation_failures",
            ),
            *_each("val_micro_batch_size"),
            *("ppo.async_ppo", "ppo.async_ppo.drop_incomplete_targets_on_restore"),
        ),
        "of its own workers",
    ),
    Ignored(
        ("ppo.async_ppo.warmup_generation_lead_steps",),
        "how far ahead is sampled while the policy does not change",
    ),
    Ignored((f"{DTENSOR}.enabled",), f"{MEGATRON}.enabled says which back end is used"),
    Ignored(("value.dtensor_cfg.enabled",), "value.megatron_cfg.enabled says which back end is used"),
    Ignored(("policy.optimizer", "value.optimizer", "value.scheduler"), "of the other back end"),
    Lost(("dpo.preference_loss_weight",), "the loss of pairs has the weight 1", (1, 1.0)),
    Lost(("sft.only_unmask_final",), "every turn of the assistant is trained on"),
    Ignored(
        ("policy.hf_config_overrides.max_position_embeddings",),
        "the longest sequence is policy.max_sequence_length; rotary embeddings do not depend on it",
    ),
    Part(
        ("policy.hf_config_overrides.rope_scaling.*", "policy.dequantize_base_checkpoint"),
        (),
        devices.model_folder,
    ),
    Lost(
        ("policy.hf_config_overrides.*", "value.hf_config_overrides.*"),
        "edit the config.json of the model folder",
        _OFF,
    ),
    Lost(("policy.draft.num_layers",), "a head for drafts has one layer", (None, False, 1)),
    Lost(("policy.draft.speculator_type",), "a head for drafts is one of EAGLE-3", (None, "eagle3")),
    Lost(
        ("policy.draft.train_embed_and_head",), "the head's output matrix is trained, and embeddings are not"
    ),
    Ignored(
        ("policy.draft.loss_weight",), "a head for drafts has an optimizer and a clipped norm of its own"
    ),
    Ignored(
        (f"{MEGATRON}.moe_router_enable_expert_bias",),
        "the model's config.json says whether routers have a bias",
    ),
    Lost(
        tuple(
            f"{model}.{name}.dropout"
            for model in ("policy", "value")
            for name in ("megatron_cfg.peft", "dtensor_cfg.lora_cfg")
        ),
        "adapters have no dropout; nearly all recipes have 0",
        _OFF,
    ),
    Ignored(
        (
            *(
                f"{MEGATRON}.peft.{name}"
                for name in ("dropout_position", "lora_A_init_method", "lora_B_init_method")
            ),
            *(f"{MEGATRON}.peft.{name}" for name in ("a2a_experimental", "lora_dtype")),
            *(f"{DTENSOR}.lora_cfg.{name}" for name in ("dropout_position", "use_triton")),
            f"{DTENSOR}.lora_cfg.lora_A_init",
        ),
        "adapters start as B = 0 and a random A, and compute in the policy's precision",
    ),
    Ignored(
        (
            *(f"{MEGATRON}.freeze_config.freeze_vision_{name}" for name in ("model", "projection")),
            *(
                f"{DTENSOR}.automodel_kwargs.freeze_config.freeze_{name}_tower"
                for name in ("audio", "vision")
            ),
        ),
        "text has no gradient there",
    ),
    Lost(
        (f"{MEGATRON}.freeze_config.*", f"{DTENSOR}.automodel_kwargs.freeze_config.*"),
        "parts of a model are not frozen; models here are language models",
        _OFF,
    ),
    Lost((f"{MEGATRON}.model_overrides.*",), "not passed to Megatron", _OFF),
    Ignored((f"{MEGATRON}.moe_enable_deepep",), "how tokens travel to experts"),
    Ignored(
        (f"{MEGATRON}.optimizer.params_dtype",),
        "Megatron's optimizer does not read it; master weights are float32 in both",
    ),
    Lost(
        (f"{MEGATRON}.optimizer.fp16", "value.megatron_cfg.optimizer.fp16"),
        "training is in bfloat16 or float32",
    ),
    Lost(
        (f"{MEGATRON}.optimizer.clip_grad", "value.megatron_cfg.optimizer.clip_grad"),
        "max_grad_norm of the model is used",
        (1.0, None, 0, 0.0),
    ),
    Lost(
        (f"{MEGATRON}.scheduler.weight_decay_incr_style",), "the weight decay is constant", ("constant", None)
    ),
    Ignored(
        (f"{MEGATRON}.scheduler.start_weight_decay", f"{MEGATRON}.scheduler.end_weight_decay"),
        "the weight decay is that of the optimizer",
    ),
    Lost((f"{MEGATRON}.scheduler.override_opt_param_scheduler",), "of checkpoints", (None, True)),
    Ignored(
        (f"{MEGATRON}.train_iters",),
        "NeMo-RL replaces it by the steps of the run",
    ),
    Ignored(("policy.tokenizer.*",), "of its tokenizer's implementation"),
    Lost((f"{VLLM}.num_first_layers_in_bf16", f"{VLLM}.num_last_layers_in_bf16"), "of FP8 in vLLM", _OFF),
    Lost(
        (f"{VLLM}.logprobs_mode",), "logprobs are those of the sampled distribution", ("processed_logprobs",)
    ),
    Ignored(
        (f"{MEGATRON}.fp8_cfg.fp8_param", f"{VLLM}.use_deep_gemm"),
        "how FP8 is stored and multiplied; the policy's weights stay in bfloat16",
    ),
    Ignored(
        (f"{GENERATION}.real_quant",),
        "weights of engines are rounded in both; rounded activations are computed in the format",
    ),
    Ignored(
        (f"{MEGATRON}.moe_router_dtype",),
        "router logits are computed in float32; higher precision rounds less",
    ),
    Ignored(
        ("policy.disable_modelopt_layer_spec",), "which layers of Megatron compute; ours are policy.kernels"
    ),
)

_HOW_FAST = "how it computes, and not what: kernels, memory, communication"
_WORKERS: tuple[Rule, ...] = (
    Ignored(("policy.megatron_cfg.*", "policy.dtensor_cfg.*", "policy.optimizer.kwargs.*"), _HOW_FAST),
    Ignored(
        ("value.*",),
        "how it computes, and not what; its tokens and their lengths are the policy's",
    ),
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
        ("policy.quant_calib_data", "policy.quant_sequence_length"),
        "of the calibration, which measures prompts of data.train",
    ),
    Ignored(("logger.*",), "how often and where a tracker shows; its names of runs"),
    Ignored(("data_plane.*",), "how samples travel between processes"),
    Ignored(("async_rl.*",), "queues, retries and health checks; docs/faults.md has ours"),
    Ignored(("checkpointing.*",), "format and time of checkpoints"),
    Ignored(("cluster.*",), "ports and the topology of nodes; cluster.topology places workers"),
    Lost(("policy.generation.speculative_config",), "drafts"),
)

RULES: tuple[Rule, ...] = (
    *(*_TRAINING, *distillation.RULES, *mopd.RULES, *_SETUP, *_CRITIC, *DATA_RULES, *GYM_RULES),
    *(*_WITHOUT, *_WORKERS),
)
