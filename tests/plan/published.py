"""Step times that NVIDIA publishes for NeMo-RL, and each run as an experiment of ours.

Origin: docs/about/performance-summary.md of github.com/NVIDIA-NeMo/RL, v0.6 at commit 66059ab4d (2026-05-25)
and v0.5 at 9dbd9adc9 (2026-02-06), the mean of five GRPO steps on OpenMathInstruct-2 in bfloat16. Of runs
that both releases have, the newer one is used. What the table does not say is of the recipes of the same name
in examples/configs/recipes/llm/performance at 7ea279abf: uneven stages, recomputation, the split of the
devices. Left out: the run of an agent (its model has Mamba layers, which we do not have).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import ModelShape
from nemorl.plan.costs import Attained
from nemorl.plan.hardware import HARDWARE
from nemorl.plan.step_time import Measured, RunPlan
from nemorl.plan.training_time import Lengths

# Not published: tokens of a prompt of the data set with its instruction, and how much lengths differ.
PROMPT_TOKENS = 150
SIGMA = 0.5

_QWEN: dict[str, Any] = {
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
}
_QWEN_MOE = _QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
# Fields of each config.json on the hub, and whether its recipes recompute every layer.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "eos_token_id": 128009,
    },
    "Qwen3-32B": _QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": _QWEN_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "Qwen3-235B-A22B": _QWEN_MOE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    },
}
_RECOMPUTES = {"Llama-3.1-8B", "Qwen3-235B-A22B", "DeepSeek-V3"}
# Layers of the first and the last stage, by model and stages, where they are not the even share.
_STAGES = {
    ("Qwen3-235B-A22B", 8): (11, 11),
    ("Qwen3-235B-A22B", 4): (23, 23),
    ("DeepSeek-V3", 16): (3, 2),
    ("DeepSeek-V3", 8): (7, 6),
}


@dataclass(frozen=True)
class Published:
    release: str
    hardware: str
    model: str
    staleness: int
    max_length: int
    mean_length: int
    gpus: int
    samples: int  # of a step; an update has 512
    engine: int  # tensor parallelism of generation
    layout: tuple[int, int, int, int]  # TP, CP, EP, PP
    seconds: float
    policy_gpus: int | None = None  # of a run ahead of its training; half of all if None

    @property
    def name(self) -> str:
        way = f"{self.staleness}-step off" if self.staleness else "on policy"
        return f"{self.model}, {self.gpus} {self.hardware.upper()}, {way} ({self.release})"


_L, _D, _3, _2, _Q = ("Llama-3.1-8B", "DeepSeek-V3", "Qwen3-30B-A3B", "Qwen3-32B", "Qwen3-235B-A22B")
PUBLISHED = (
    Published("v0.6", "h100", _D, 0, 1536, 701, 256, 512, 32, (1, 1, 16, 16), 134),
    Published("v0.6", "h100", _D, 0, 1536, 697, 512, 512, 32, (1, 1, 16, 16), 111),
    Published("v0.6", "h100", _D, 1, 1536, 710, 512, 512, 32, (1, 1, 16, 16), 64.1),
    Published("v0.6", "h100", _Q, 0, 8192, 5698, 128, 512, 16, (2, 2, 16, 8), 395),
    Published("v0.6", "h100", _Q, 0, 8192, 5713, 256, 512, 16, (2, 2, 16, 8), 312),
    Published("v0.6", "h100", _Q, 1, 8192, 5721, 256, 512, 8, (4, 1, 16, 8), 231),
    Published("v0.6", "h100", _3, 0, 4096, 3203, 32, 2048, 2, (1, 1, 8, 1), 192),
    Published("v0.6", "h100", _3, 1, 4096, 3201, 32, 2048, 2, (1, 1, 8, 2), 152),
    Published("v0.6", "h100", _3, 8, 4096, 3206, 192, 2048, 2, (1, 1, 8, 1), 34.5, policy_gpus=128),
    Published("v0.6", "gb200", _D, 0, 1536, 711, 128, 512, 32, (1, 1, 16, 8), 108),
    Published("v0.6", "gb200", _D, 0, 1536, 700, 256, 512, 32, (1, 1, 16, 8), 98.7),
    Published("v0.6", "gb200", _D, 1, 1536, 708, 256, 512, 16, (1, 1, 16, 8), 61.7),
    Published("v0.6", "gb200", _Q, 0, 8192, 5709, 64, 512, 8, (2, 2, 16, 4), 286),
    Published("v0.6", "gb200", _Q, 0, 8192, 5693, 128, 512, 8, (2, 2, 16, 4), 345),
    Published("v0.6", "gb200", _Q, 1, 8192, 5705, 128, 512, 8, (4, 1, 16, 4), 278),
    Published("v0.6", "gb200", _3, 0, 4096, 3199, 16, 2048, 1, (1, 1, 16, 1), 221),
    # The table says EP 16, and eight devices train: they hold the experts in eight parts at most.
    Published("v0.6", "gb200", _3, 1, 4096, 3197, 16, 2048, 1, (1, 1, 8, 1), 301),
    Published("v0.5", "h100", _L, 0, 4096, 1019, 16, 2048, 1, (1, 1, 1, 2), 92.8),
    Published("v0.5", "h100", _L, 1, 4096, 1123, 16, 2048, 1, (1, 1, 1, 1), 64.8),
    Published("v0.5", "h100", _2, 0, 4096, 3251, 32, 2048, 4, (4, 1, 1, 4), 376),
    Published("v0.5", "h100", _2, 1, 4096, 3252, 64, 2048, 4, (4, 1, 1, 4), 200),
    Published("v0.5", "gb200", _L, 0, 4096, 1066, 8, 2048, 1, (1, 1, 1, 1), 91.0),
    Published("v0.5", "gb200", _L, 1, 4096, 1107, 8, 2048, 1, (1, 1, 1, 1), 71.1),
    Published("v0.5", "gb200", _3, 1, 4096, 3204, 32, 2048, 1, (1, 1, 16, 1), 136),
    Published("v0.5", "gb200", _2, 0, 4096, 3253, 16, 2048, 1, (2, 1, 1, 1), 381),
    Published("v0.5", "gb200", _2, 1, 4096, 3258, 32, 2048, 1, (2, 1, 1, 1), 210),
)


def shape_of(model: str) -> ModelShape:
    return shape_from_config(MODELS[model], f"{model}/config.json")


def experiment_of(run: Published, file: Path) -> Experiment:
    """`file` is a sound experiment, of which everything that matters here is replaced."""
    tensor, context, experts, stages = run.layout
    policy_gpus = run.gpus if run.staleness == 0 else run.policy_gpus or run.gpus // 2
    engines = (run.gpus if run.staleness == 0 else run.gpus - policy_gpus) // run.engine
    colocated = str(run.staleness == 0).lower()
    share = 0.6 if run.staleness == 0 else 0.8
    sections = [
        "policy.precision=bfloat16",
        f"policy.max_sequence_length={run.max_length}",
        f"policy.micro_batch_tokens={run.max_length}",
        "policy.share_prefixes=false",
        f"policy.layout.tensor_parallel_size={tensor}",
        f"policy.layout.sequence_parallel={str(tensor > 1).lower()}",
        f"policy.layout.context_parallel_size={context}",
        f"policy.layout.expert_parallel_size={experts}",
        f"policy.layout.pipeline_parallel_size={stages}",
        f"policy.layout.data_parallel_size={policy_gpus // (tensor * context * stages)}",
        f"policy.recompute={{name: {'full' if run.model in _RECOMPUTES else 'none'}}}",
        f"generation={{backend: vllm, tensor_parallel_size: {run.engine}, replicas: {engines}, "
        f"max_num_seqs: 256, gpu_memory_utilization: {share}, colocated: {colocated}, "
        f"max_new_tokens: {run.max_length - PROMPT_TOKENS}}}",
        f"algorithm.num_prompts_per_step={run.samples // 32}",
        "algorithm.num_generations_per_prompt=32",
        f"algorithm.num_minibatches={run.samples // 512}",
        f"algorithm.max_staleness={run.staleness}",
        # Both passes of the recipes before the update: the policy's logprobs and the reference's.
        "algorithm.kl={coefficient: 0.01, placement: reward, estimator: k1}",
        f"cluster.num_nodes={run.gpus // 4}",
        "cluster.gpus_per_node=4",
    ]
    if (run.model, stages) in _STAGES:
        first, last = _STAGES[run.model, stages]
        sections.append(f"policy.layout.layers_in_first_stage={first}")
        sections.append(f"policy.layout.layers_in_last_stage={last}")
    return load_experiment(file, sections)


def lengths_of(run: Published) -> Lengths:
    return Lengths(PROMPT_TOKENS, run.mean_length - PROMPT_TOKENS, run.max_length - PROMPT_TOKENS, SIGMA)


def plan_of(run: Published, experiment: Experiment, attained: Attained) -> RunPlan:
    return RunPlan(experiment, shape_of(run.model), HARDWARE[run.hardware], lengths_of(run), attained)


def measured(run: Published, experiment: Experiment) -> Measured:
    plan = plan_of(run, experiment, Attained())
    return Measured(run.seconds, lambda attained: replace(plan, attained=attained).step().seconds)
