"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention, and experts chosen by groups and a bias."""

import math

from .family import LayerKind, ModelFamily, Split, WeightRule, layer_rule, layer_tensor, mtp_rules
from .hf_config import HfConfig, decoder_shape, yarn_sharpening
from .llama import EMBEDDINGS, INPUT_NORM, MLP, MLP_NORM, gated_mlp
from .mixtral import gated_experts, router
from .shape import Dim, MlaShape, ModelShape, MoeShape, MtpShape


def _projection(param: str, hf: str, split: Split, *dims: Dim) -> WeightRule:
    return layer_rule(f"self_attention.{param}.weight", split, layer_tensor(f"self_attn.{hf}.weight", *dims))


_QUERY = (_projection("linear_q_proj", "q_proj", Split.ROWS, Dim.QUERY, Dim.HIDDEN),)
_COMPRESSED_QUERY = (
    _projection("linear_q_down_proj", "q_a_proj", Split.ROWS, Dim.QUERY_LATENT, Dim.HIDDEN),
    _projection("q_layernorm", "q_a_layernorm", Split.REPLICATED, Dim.QUERY_LATENT),
    _projection("linear_q_up_proj", "q_b_proj", Split.ROWS, Dim.QUERY, Dim.QUERY_LATENT),
)
_KV_AND_ROTARY, _KV_FROM_LATENT = Dim.KEY_VALUE_LATENT_AND_ROTARY, Dim.KEY_VALUE_FROM_LATENT
_KEY_VALUE_AND_OUTPUT = (
    _projection("linear_kv_down_proj", "kv_a_proj_with_mqa", Split.ROWS, _KV_AND_ROTARY, Dim.HIDDEN),
    _projection("kv_layernorm", "kv_a_layernorm", Split.REPLICATED, Dim.KEY_VALUE_LATENT),
    _projection("linear_kv_up_proj", "kv_b_proj", Split.ROWS, _KV_FROM_LATENT, Dim.KEY_VALUE_LATENT),
    _projection("linear_proj", "o_proj", Split.COLUMNS, Dim.HIDDEN, Dim.VALUE),
)
_MOE = (
    *gated_experts("mlp"),
    router("expert_bias", "mlp.gate.e_score_correction_bias", Dim.EXPERTS, learns=False),
    *gated_mlp("mlp.shared_experts", Dim.SHARED_FFN, LayerKind.MOE),
)

_MTP = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}
# Of the checkpoint, and not of the model, in which these layers share both.
_COPIES = {
    "model.layers.{layer}.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.{layer}.shared_head.head.weight": "lm_head.weight",
}


def _weights(shape: ModelShape) -> tuple[WeightRule, ...]:
    query = _COMPRESSED_QUERY if shape.mla and shape.mla.query_rank else _QUERY
    rules = (*EMBEDDINGS, INPUT_NORM, *query, *_KEY_VALUE_AND_OUTPUT, MLP_NORM, *MLP, *_MOE)
    return (*rules, *mtp_rules(rules, _MTP)) if shape.mtp else rules


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=False, rope_interleave=True, scoring_func="sigmoid")
    config.require(topk_method="noaux_tc", norm_topk_prob=True, moe_layer_freq=1)
    query_rank, key_value_rank = config.fields.get("q_lora_rank", 1536), config.get("kv_lora_rank", 512)
    unrotated, rotary_dim = config.get("qk_nope_head_dim", 128), config.get("qk_rope_head_dim", 64)
    mla = MlaShape(query_rank, key_value_rank, unrotated, rotary_dim, config.get("v_head_dim", 128))
    head_dim = unrotated + rotary_dim
    # 1 / sqrt(head_dim), and YaRN's sharpening of all channels where `mscale_all_dim` says so
    _, rope = config.rope_fields()
    amount = rope.get("mscale_all_dim")
    sharpening = yarn_sharpening(float(rope["factor"]), amount) if config.rope().scaling and amount else 1.0
    scale, moe = sharpening**2 / math.sqrt(head_dim), _moe(config)
    mtp = MtpShape(layers) if (layers := config.get("num_nextn_predict_layers", 0)) else None
    return decoder_shape(
        config, "deepseek_v3", head_dim=head_dim, softmax_scale=scale, mla=mla, moe=moe, mtp=mtp
    )


def _moe(config: HfConfig) -> MoeShape:
    num_groups, per_token = config.get("n_group", 8), config.get("topk_group", 4)
    top_k, ffn = config.get("num_experts_per_tok", 8), config.integer("moe_intermediate_size")
    if per_token >= num_groups:
        num_groups = per_token = 1
    elif top_k // per_token != 2:
        # Megatron adds up as many as the share of the group, transformers the best two.
        raise config.unsupported("topk_group", "a group has to be judged by its two best experts")
    if top_k == 1:
        raise config.unsupported("num_experts_per_tok", "at least 2 are supported")
    return MoeShape(
        num_experts=config.integer("n_routed_experts"),
        top_k=top_k,
        ffn_hidden_size=ffn,
        first_layer=config.get("first_k_dense_replace", 3),
        shared_ffn_hidden_size=config.get("n_shared_experts", 1) * ffn,
        scores="sigmoid",
        scaling=config.get("routed_scaling_factor", 2.5),
        num_groups=num_groups,
        groups_per_token=per_token,
        expert_bias=True,
    )


DEEPSEEK_V3 = ModelFamily("deepseek_v3", ("DeepseekV3ForCausalLM",), _read, _weights, copies=_COPIES)
