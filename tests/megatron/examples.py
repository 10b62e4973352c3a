"""Tiny random models of each family and ragged batches of sequences."""

import itertools
from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import Categorical
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemorl.config.policy import AdamConfig, LayoutConfig, PolicyConfig
from nemorl.data.packed import PackedBatch
from tests.models.mtp_models import DeepseekV3WithMtp, MiMoConfig, model_of
from tests.models.tiny_models import DEEPSEEK

VOCABULARY = 53  # not a multiple of the tensor-parallel size, so it gets padded
MAX_LENGTH = 48
LENGTHS = (7, 20, 33, 3, 48, 2, 8, 8)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.15,  # large enough that distributions are not flat
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}
LATENT = (
    COMMON
    | DEEPSEEK
    | {
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-2,  # not that of the latents, which transformers fixes
        "rope_parameters": YARN,
    }
)
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "llama-tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama-rope3": LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(**COMMON, sliding_window=6),
    "mixtral": MixtralConfig(**COMMON, **EXPERTS),
    "qwen2": Qwen2Config(**COMMON),
    "mimo": MiMoConfig(**COMMON),
    "mimo-mtp": MiMoConfig(**COMMON, num_nextn_predict_layers=1),
    "mimo-mtp-tied": MiMoConfig(**COMMON, num_nextn_predict_layers=1, tie_word_embeddings=True),
    "mimo-mtp-two": MiMoConfig(**COMMON, num_nextn_predict_layers=2),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "qwen3-two-groups": Qwen3Config(**(COMMON | {"num_key_value_heads": 2}), head_dim=16),
    "qwen3-moe": Qwen3MoeConfig(
        **COMMON,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        mlp_only_layers=[0, 1],
    ),
    "gemma3": Gemma3TextConfig(
        **COMMON,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=6,
        sliding_window_pattern=3,
        rope_parameters=GEMMA_ROPES,
    ),
    "gpt-oss": GptOssConfig(**COMMON, **EXPERTS, head_dim=16, sliding_window=8, attn_implementation="eager"),
    "deepseek-v3": DeepseekV3Config(**LATENT, num_nextn_predict_layers=0),
    "deepseek-v3-plain-query": DeepseekV3Config(
        **(LATENT | {"q_lora_rank": None}), num_nextn_predict_layers=0
    ),
    "deepseek-v3-mtp": DeepseekV3Config(**LATENT, num_nextn_predict_layers=1),
    # Every rank of TP2 has complete blocks of 128 x 128, some of which have rows of several heads.
    "llama-wide": LlamaConfig(**(COMMON | {"hidden_size": 256, "intermediate_size": 512}), head_dim=64),
}
FAMILIES = tuple(
    name for name in CONFIGS if name not in ("qwen3-two-groups", "llama-wide") and "-mtp" not in name
)


@torch.no_grad()
def random_model(family: str) -> PreTrainedModel:
    """A model in which nothing is constant: norms, biases and sinks are drawn, too."""
    torch.manual_seed(5)
    model = model_of(CONFIGS[family])
    for name, values in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            values.normal_(std=0.2)
        elif "norm" in name:
            values.normal_(values.mean().item(), 0.3)
        elif "bias" in name or "sinks" in name:
            values.normal_(std=0.5)
    if family == "gemma3":
        # The row of the token that pads is zero, and a norm of zeros has a gradient like no other.
        model.get_input_embeddings().weight.normal_(std=0.15)
    if isinstance(model, DeepseekV3WithMtp):
        model.share()
    return model


def policy_config(model_path: Path, **fields: object) -> PolicyConfig:
    """A float32 policy with an optimizer whose steps are large enough to be seen."""
    return PolicyConfig(
        **{
            "model_path": model_path,
            "precision": "float32",
            "max_sequence_length": MAX_LENGTH,
            "micro_batch_tokens": 128,
            "logprob_chunk_tokens": 32,
            "optimizer": AdamConfig(lr=3e-3),
            **fields,
        }
    )


SHORT_NAMES = {
    "tp": "tensor_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "first": "layers_in_first_stage",
    "last": "layers_in_last_stage",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def layout(**sizes: int | bool) -> LayoutConfig:
    """A layout by the short names of its axes, such as `layout(tp=2, sp=True)`."""
    return LayoutConfig(**{SHORT_NAMES[name]: size for name, size in sizes.items()})


def ragged_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> PackedBatch:
    """Random sequences: the first third of each is a prompt, the rest was sampled."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    prompts = torch.cat([torch.full((n,), max(1, n // 3)) for n in lengths])
    loss_mask = positions >= prompts
    return PackedBatch(
        tokens=torch.randint(0, VOCABULARY, (num_tokens,), generator=generator),
        cu_seqlens=cu_seqlens,
        position_ids=positions,
        loss_mask=loss_mask,
        weights=loss_mask / loss_mask.sum(),
        # All positive: a policy loss that cancels to nothing could not be compared relatively.
        advantages=0.5 + torch.rand(num_tokens, generator=generator),
        logprobs=-torch.rand(num_tokens, generator=generator) * loss_mask,
    )


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
    """Logprobs [N] by transformers, one sequence at a time, 0 where the loss mask is False."""
    logprobs = torch.zeros(batch.num_tokens)
    bounds = batch.cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        tokens = batch.tokens[start:end]
        logits = model(tokens.unsqueeze(0)).logits[0] / temperature
        log_softmax = logits[:-1].float().log_softmax(-1)
        logprobs[start + 1 : end] = log_softmax.gather(1, tokens[1:, None]).squeeze(1)
    return logprobs * batch.loss_mask


def reference_collisions(model: PreTrainedModel, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
    """Sums [N] of squared probabilities of the distribution before each token, by transformers' logits."""
    collisions = torch.zeros(batch.num_tokens)
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        logits = model(batch.tokens[start:end].unsqueeze(0)).logits[0, :-1] / temperature
        collisions[start + 1 : end] = logits.double().softmax(-1).square().sum(-1).float()
    return collisions * batch.loss_mask


def reference_entropies(model: PreTrainedModel, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
    """Entropies [N] of the distribution before each token by transformers, 0 where the loss mask is False."""
    entropies = torch.zeros(batch.num_tokens)
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        logits = model(batch.tokens[start:end].unsqueeze(0)).logits[0, :-1] / temperature
        entropies[start + 1 : end] = Categorical(logits=logits.float()).entropy()
    return entropies * batch.loss_mask
