"""gpt-oss (arXiv 2508.10925): attention sinks, every second layer with a window, biased clamped SwiGLU.

All experts of a layer lie in one tensor, input first, and gate and up take turns along its last dimension.
"""

from .family import ModelFamily, Split, layer_rule, layer_tensor
from .hf_config import HfConfig, decoder_shape, layer_windows
from .llama import ATTENTION, EMBEDDINGS
from .mixtral import expert, router, softmax_moe
from .qwen import QKV_BIAS
from .shape import Dim, ModelShape

_GATE_AND_UP = (Dim.EXPERT_FFN, Dim.TWO)
_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"
_WEIGHTS = (
    *EMBEDDINGS,
    *ATTENTION,
    QKV_BIAS,
    layer_rule(
        "self_attention.linear_proj.bias", Split.REPLICATED, layer_tensor("self_attn.o_proj.bias", Dim.HIDDEN)
    ),
    layer_rule(
        "self_attention.core_attention.softmax_offset",
        Split.ROWS,
        layer_tensor("self_attn.sinks", Dim.HEADS),
    ),
    router("weight", "mlp.router.weight", Dim.EXPERTS, Dim.HIDDEN),
    router("bias", "mlp.router.bias", Dim.EXPERTS),
    expert(
        "linear_fc1.weight",
        Split.ROWS,
        layer_tensor(_GATE_UP, Dim.EXPERTS, Dim.HIDDEN, _GATE_AND_UP, part=0, transposed=True),
        layer_tensor(_GATE_UP, Dim.EXPERTS, Dim.HIDDEN, _GATE_AND_UP, part=1, transposed=True),
    ),
    expert(
        "linear_fc1.bias",
        Split.ROWS,
        layer_tensor(f"{_GATE_UP}_bias", Dim.EXPERTS, _GATE_AND_UP, part=0),
        layer_tensor(f"{_GATE_UP}_bias", Dim.EXPERTS, _GATE_AND_UP, part=1),
    ),
    expert(
        "linear_fc2.weight",
        Split.COLUMNS,
        layer_tensor(_DOWN, Dim.EXPERTS, Dim.EXPERT_FFN, Dim.HIDDEN, transposed=True),
    ),
    expert("linear_fc2.bias", Split.REPLICATED, layer_tensor(f"{_DOWN}_bias", Dim.EXPERTS, Dim.HIDDEN)),
)


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702)
    if config.get("quantization_config"):
        raise config.unsupported(
            "quantization_config", "load the model in bfloat16 and save it without quantization first"
        )
    return decoder_shape(
        config,
        "gpt_oss",
        head_dim=config.get("head_dim", 64),
        windows=layer_windows(config, every=2, default_window=128),
        qkv_bias=True,
        linear_bias=True,
        activation="clamped_swiglu",
        sinks=True,
        moe=softmax_moe(config, experts="num_local_experts", ffn="intermediate_size", router_bias=True),
    )


GPT_OSS = ModelFamily("gpt_oss", ("GptOssForCausalLM",), _read, lambda shape: _WEIGHTS)
