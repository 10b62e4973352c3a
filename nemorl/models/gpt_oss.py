"""gpt-oss (arXiv 2508.10925): attention sinks, every second layer with a window, biased clamped SwiGLU.

All experts of a layer lie in one tensor, input first, and gate and up take turns along its last dimension.
"""

from .family import HfTensor, LayerKind, ModelFamily, Split, WeightRule
from .hf_config import HfConfig, decoder_shape, layer_windows
from .llama import ATTENTION, EMBEDDINGS
from .mixture import EXPERT, ROUTER, router_weight, softmax_top_k
from .qwen import QKV_BIAS
from .shape import Dim, ModelShape, MoeShape

_ATTENTION = "decoder.layers.{layer}.self_attention."
_HF_ATTENTION = "model.layers.{layer}.self_attn."
_HF_MLP = "model.layers.{layer}.mlp."
_EXPERTS = _HF_MLP + "experts."
_GATE_AND_UP = (Dim.EXPERT_FFN, Dim.TWO)


def _expert(param: str, tensors: tuple[HfTensor, ...], split: Split) -> WeightRule:
    return WeightRule(EXPERT + param, tensors, split, layers=LayerKind.MOE, experts=True)


ATTENTION_EXTRAS = (
    QKV_BIAS,
    WeightRule(
        _ATTENTION + "linear_proj.bias",
        (HfTensor(_HF_ATTENTION + "o_proj.bias", (Dim.HIDDEN,)),),
        Split.REPLICATED,
    ),
    WeightRule(
        _ATTENTION + "core_attention.softmax_offset",
        (HfTensor(_HF_ATTENTION + "sinks", (Dim.HEADS,)),),
        Split.ROWS,
    ),
)
EXPERTS = (
    router_weight(_HF_MLP + "router.weight"),
    WeightRule(
        ROUTER + "bias",
        (HfTensor(_HF_MLP + "router.bias", (Dim.EXPERTS,)),),
        Split.REPLICATED,
        layers=LayerKind.MOE,
    ),
    _expert(
        "linear_fc1.weight",
        tuple(
            HfTensor(
                _EXPERTS + "gate_up_proj",
                (Dim.EXPERTS, Dim.HIDDEN, _GATE_AND_UP),
                part=part,
                transposed=True,
            )
            for part in (0, 1)
        ),
        Split.ROWS,
    ),
    _expert(
        "linear_fc1.bias",
        tuple(
            HfTensor(_EXPERTS + "gate_up_proj_bias", (Dim.EXPERTS, _GATE_AND_UP), part=part)
            for part in (0, 1)
        ),
        Split.ROWS,
    ),
    _expert(
        "linear_fc2.weight",
        (HfTensor(_EXPERTS + "down_proj", (Dim.EXPERTS, Dim.EXPERT_FFN, Dim.HIDDEN), transposed=True),),
        Split.COLUMNS,
    ),
    _expert(
        "linear_fc2.bias",
        (HfTensor(_EXPERTS + "down_proj_bias", (Dim.EXPERTS, Dim.HIDDEN)),),
        Split.REPLICATED,
    ),
)


def _read(config: HfConfig) -> ModelShape:
    config.require(hidden_act="silu", attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702)
    if config.get("quantization_config"):
        raise config.unsupported(
            "quantization_config", "load the model in bfloat16 and save it without quantization first"
        )
    num_experts = config.integer("num_local_experts")
    moe = MoeShape(
        num_experts=num_experts,
        top_k=softmax_top_k(config, num_experts),
        ffn_hidden_size=config.integer("intermediate_size"),
        router_bias=True,
    )
    return decoder_shape(
        config,
        "gpt_oss",
        head_dim=config.get("head_dim", 64),
        windows=_windows(config),
        qkv_bias=True,
        linear_bias=True,
        activation="clamped_swiglu",
        sinks=True,
        moe=moe,
    )


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    if config.get("layer_types"):
        return layer_windows(config)
    window: int = config.get("sliding_window", 128)
    return tuple(None if layer % 2 else window for layer in range(config.integer("num_hidden_layers")))


GPT_OSS = ModelFamily(
    "gpt_oss",
    ("GptOssForCausalLM",),
    _read,
    lambda shape: (*EMBEDDINGS, *ATTENTION, *ATTENTION_EXTRAS, *EXPERTS),
)
