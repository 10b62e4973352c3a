"""gpt-oss (arXiv 2508.10925): attention sinks, every second layer with a window, biased clamped SwiGLU.

All experts of a layer lie in one tensor, input first, and gate and up take turns along its last dimension.
"""

from .family import ModelFamily, Split, layer_rule, layer_tensor
from .hf_config import HfConfig, decoder_shape, layer_windows
from .llama import ATTENTION, EMBEDDINGS
from .mixtral import expert, router, softmax_moe
from .qwen import QKV_BIAS
from .shape import Dim, ModelShape

_OUTPUT_BIAS = layer_tensor("self_attn.o_proj.bias", Dim.HIDDEN)
_SINKS = layer_tensor("self_attn.sinks", Dim.HEADS)
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_PARTS, _BOTH = (0, 1), (Dim.EXPERT_FFN, Dim.TWO)
_FIRST = [layer_tensor(_GATE_UP, Dim.EXPERTS, Dim.HIDDEN, _BOTH, part=i, transposed=True) for i in _PARTS]
_FIRST_BIAS = [layer_tensor(f"{_GATE_UP}_bias", Dim.EXPERTS, _BOTH, part=i) for i in _PARTS]
_SECOND = layer_tensor(_DOWN, Dim.EXPERTS, Dim.EXPERT_FFN, Dim.HIDDEN, transposed=True)
_SECOND_BIAS = layer_tensor(f"{_DOWN}_bias", Dim.EXPERTS, Dim.HIDDEN)
_WEIGHTS = (
    *EMBEDDINGS,
    *ATTENTION,
    QKV_BIAS,
    layer_rule("self_attention.linear_proj.bias", Split.REPLICATED, _OUTPUT_BIAS),
    layer_rule("self_attention.core_attention.softmax_offset", Split.ROWS, _SINKS),
    router("weight", "mlp.router.weight", Dim.EXPERTS, Dim.HIDDEN),
    router("bias", "mlp.router.bias", Dim.EXPERTS),
    expert("linear_fc1.weight", Split.ROWS, *_FIRST),
    expert("linear_fc1.bias", Split.ROWS, *_FIRST_BIAS),
    expert("linear_fc2.weight", Split.COLUMNS, _SECOND),
    expert("linear_fc2.bias", Split.REPLICATED, _SECOND_BIAS),
)


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702)
    if config.get("quantization_config"):
        fix = "load the model in bfloat16 and save it without quantization first"
        raise config.unsupported("quantization_config", fix)
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
