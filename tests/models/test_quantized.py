"""Formats of quantized weights, compared bit by bit with modelopt's exports of the same models."""

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from nemorl.config.quantization import STATIC_INPUTS, QuantizationFormat
from nemorl.models.layout import hf_tensors
from nemorl.models.quantized import (
    Quantizer,
    Unquantizable,
    dequantize,
    fold,
    fold_inputs,
    linear_groups,
    quantization_config,
    quantize,
)
from nemorl.models.registry import shape_from_config
from nemorl.models.shape import ModelShape
from tests.models.tiny_models import CONFIGS, TinyModel
from tests.required import require_module

FORMATS: tuple[QuantizationFormat, ...] = get_args(QuantizationFormat)
PRESETS = {  # modelopt's names of the same formats
    "int8": "INT8_DEFAULT_CFG",
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8_block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "nvfp4_w4a16": "W4A16_NVFP4_CFG",
}
LAYER = "model.layers.0."
PROMPTS = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(3))
# Every matrix has several blocks of 128 x 128: modelopt gives matrices of one block a common scale.
CONFIG: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def network(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(dtype).eval()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5] = 0  # a row of zeros has no scale of its own
        model.model.layers[0].mlp.down_proj.weight[:4, :256] = 0  # nor have its blocks
    return model


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_from_config(LlamaConfig(**CONFIG).to_dict(), "config.json")


@pytest.fixture(scope="module")
def modelopt() -> Iterator[Any]:
    """modelopt's modules, with an operator for NVFP4 on a CPU, for which it requires CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = require_module("modelopt.torch.quantization")
        export = require_module("modelopt.torch.export")
        tensor = require_module("modelopt.torch.quantization.qtensor").NVFP4QTensor
        operators = require_module("modelopt.torch.quantization.tensor_quant")
    with pytest.MonkeyPatch.context() as patch:
        # It shapes only what modelopt computes while it calibrates, not what it exports.
        patch.setattr(operators, "dynamic_block_quantize_op", lambda inputs, *arguments: inputs.clone())
        yield SimpleNamespace(quantization=quantization, export=export, nvfp4=tensor, operators=operators)


def exported(
    modelopt: Any, format: QuantizationFormat, dtype: torch.dtype, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and `quantization_config` of modelopt's export."""
    preset = copy.deepcopy(getattr(modelopt.quantization, PRESETS[format]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = modelopt.quantization.quantize(network(dtype), preset, lambda model: model(PROMPTS))
        modelopt.export.export_hf_checkpoint(model, export_dir=folder)
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config["quantization_config"]


def measured_inputs(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The largest magnitude of the inputs of each linear layer, by its weight."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, weight=f"{name}.weight": found.update({weight: inputs[0].abs().amax()})
            )
    with torch.no_grad():
        model(PROMPTS)
    return found


def ours(shape: ModelShape, format: QuantizationFormat, dtype: torch.dtype) -> dict[str, Tensor]:
    model = network(dtype)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    amax = measured_inputs(model) if format in STATIC_INPUTS else None
    return dict(Quantizer(shape, format, input_amax=amax).stream(weights.items()))


def unpacked(format: QuantizationFormat, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The values of a weight without their scales; int4 in the layout of either side."""
    if format != "int4":
        return tensors[name].view(torch.uint8)
    packed = tensors.get(f"{name.removesuffix('.weight')}.weight_packed")
    if packed is None:  # modelopt's: two rows in a byte, in two's complement
        bytes_ = tensors[name].int()
        nibbles = torch.stack((bytes_ & 15, bytes_ >> 4), 1).flatten(0, 1)
        return nibbles - 16 * (nibbles > 7)
    return torch.stack([(packed >> shift & 15) - 8 for shift in range(0, 32, 4)], 2).flatten(1)


@pytest.mark.ci  # importing modelopt takes 20 s
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_values_and_scales_are_those_of_modelopt(
    format: QuantizationFormat, dtype: torch.dtype, modelopt: Any, shape: ModelShape, tmp_path: Path
) -> None:
    theirs, config = exported(modelopt, format, dtype, tmp_path / "theirs")
    mine = ours(shape, format, dtype)
    linear = [name for group in linear_groups(shape, format) for name in group]
    assert len(linear) == 14
    for name in linear:
        module = name.removesuffix(".weight")
        assert torch.equal(unpacked(format, name, mine), unpacked(format, name, theirs)), name
        for scale in ("weight_scale", "weight_scale_2", "input_scale"):
            ours_, other = mine.get(f"{module}.{scale}"), theirs.get(f"{module}.{scale}")
            if format == "int8" and scale == "input_scale":
                continue  # vLLM scales activations by token
            assert (ours_ is None) == (other is None), scale
            if ours_ is not None:
                assert ours_.dtype == other.dtype
                assert torch.equal(ours_.float().flatten(), other.float().flatten()), f"{module}.{scale}"
    for name in theirs.keys() - {other for other in theirs for weight in linear if weight[:-7] in other}:
        assert torch.equal(mine[name], theirs[name]), name
    described = quantization_config(shape, format, linear_groups(shape, format))
    if described["quant_method"] == "modelopt":
        assert described["quant_algo"] == config["quant_algo"].upper()
        assert described.get("group_size") == config.get("group_size", described.get("group_size"))


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_is_what_modelopt_reads(modelopt: Any, shape: ModelShape, dtype: torch.dtype) -> None:
    tensors, weights = ours(shape, "nvfp4", dtype), network(dtype).state_dict()
    for name in (name for group in linear_groups(shape, "nvfp4") for name in group):
        module = name.removesuffix(".weight")
        scale, scale_2 = (tensors[f"{module}.{kind}"] for kind in ("weight_scale", "weight_scale_2"))
        read = modelopt.nvfp4(weights[name].shape, torch.float32, tensors[name])
        values = read.dequantize(scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        assert torch.equal(values, dequantize("nvfp4", name, tensors))


@pytest.mark.ci
def test_inputs_are_rounded_as_by_modelopt(modelopt: Any) -> None:
    """But for the last bit, since modelopt multiplies by the inverse of a scale."""
    inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    of_all, by_token = inputs.abs().amax(), inputs.abs().amax(1, keepdim=True)
    theirs = {
        "fp8": modelopt.operators.scaled_e4m3(inputs, of_all, None, 4, 3),
        "fp8_channel": modelopt.operators.scaled_e4m3(inputs, by_token, None, 4, 3),
        "int8": modelopt.operators.fake_tensor_quant(inputs, by_token, None, 8, False, False),
    }
    for format, values in theirs.items():
        mine = fold_inputs(format, inputs, of_all if format == "fp8" else by_token)
        torch.testing.assert_close(mine, values, rtol=1e-6, atol=0)
    for format in ("int4", "nvfp4_w4a16"):
        assert fold_inputs(format, inputs, of_all) is inputs
    halves = inputs.view(64, 2, 128)
    runs = fold("fp8_channel", halves.flatten(0, 1)).view(64, 256)
    assert torch.equal(fold_inputs("fp8_block", inputs, by_token), runs)
    larger = fold_inputs("fp8", 2 * inputs, of_all)
    assert larger.abs().max() == of_all


# Half a step of the format relative to the largest magnitude that shares a scale; of floats, half the
# distance of the two largest values. NVFP4's scales are rounded too, by up to 1/16.
ROUNDING = {
    "int8": 0.5 / 127, "fp8": 16 / 448, "fp8_channel": 16 / 448, "fp8_block": 16 / 448, "int4": 0.5 / 7,
    "nvfp4": 1 / 6 + 1 / 16, "nvfp4_w4a16": 1 / 6 + 1 / 16,
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_weights_come_back_within_half_a_step(format: QuantizationFormat) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    values = dequantize(format, "x.weight", quantize(format, "x.weight", weight))
    assert values.shape == weight.shape
    assert (values - weight).abs().max() <= ROUNDING[format] * weight.abs().max() * (1 + 1e-5)
    again = dequantize(format, "x.weight", quantize(format, "x.weight", values))
    torch.testing.assert_close(again, values, rtol=1e-6, atol=0)


def test_float4_rounds_halfway_to_even() -> None:
    weight = torch.tensor(
        [[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -2.5, -5.0, 0, 1, 2, 6]]
    )
    amax = torch.tensor(6.0 * 448)  # scale_2 is 1, and so is the scale of the group
    values = dequantize("nvfp4", "x.weight", quantize("nvfp4", "x.weight", weight, amax))
    assert values.tolist() == [[0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -2, -4, 0, 1, 2, 6]]


def test_int4_packs_columns_from_the_lowest_bits() -> None:
    weight = torch.zeros(1, 128)
    weight[0, :9] = torch.tensor([-7.0, -1, 0, 1, 2, 3, 4, 7, 5])
    packed = quantize("int4", "x.weight", weight)["x.weight_packed"]
    nibbles = [1, 7, 8, 9, 10, 11, 12, 15]
    assert int(packed[0, 0]) % 2**32 == sum(nibble << 4 * place for place, nibble in enumerate(nibbles))
    assert int(packed[0, 1]) % 2**32 == 0x8888888D


@pytest.mark.parametrize("format", ["int8", "fp8_channel", "int4"])
def test_rows_fold_on_their_own(format: QuantizationFormat) -> None:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(2))
    assert torch.equal(fold(format, weight)[2:4], fold(format, weight[2:4]))


def test_ignored_layers_stay_as_they_are(shape: ModelShape) -> None:
    groups = linear_groups(shape, "int8", ("*self_attn*", "model.layers.1.mlp.down_proj"))
    assert groups == (
        (f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"),
        (f"{LAYER}mlp.down_proj.weight",),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    )
    quantizer = Quantizer(shape, "int8", ("*self_attn*", "model.layers.1.mlp.down_proj"))
    tensors = dict(quantizer.stream(network(torch.float32).state_dict().items()))
    assert tensors[f"{LAYER}self_attn.q_proj.weight"].dtype == torch.float32
    ignore = quantizer.config["ignore"]
    assert {"lm_head", f"{LAYER}self_attn.q_proj", "model.layers.1.mlp.down_proj"} <= set(ignore)
    assert f"{LAYER}mlp.down_proj" not in ignore
    assert hf_tensors(shape).keys() - {name for group in groups for name in group} <= tensors.keys()


@pytest.mark.parametrize(
    ("format", "ignore", "changes", "problem"),
    [
        ("int8", ("*q_proj",), {}, r"ignore all of them, also model.layers.0.self_attn.k_proj"),
        ("int8", ("*atention*",), {}, r"'\*atention\*': no layer has such a name"),
        ("int8", ("*",), {}, "no linear layer is left"),
        ("int4", (), {"intermediate_size": 320}, "down_proj.weight has 320 columns.* multiple of 128"),
        ("fp8_block", (), {"head_dim": 32}, "k_proj.weight has 64 rows.* multiple of 128"),
    ],
)
def test_what_a_format_does_not_support_is_refused(
    format: QuantizationFormat, ignore: tuple[str, ...], changes: dict[str, int], problem: str
) -> None:
    other = shape_from_config(LlamaConfig(**CONFIG | changes).to_dict(), "config.json")
    with pytest.raises(Unquantizable, match=problem):
        linear_groups(other, format, ignore)


def test_all_matrices_of_layers_but_routers_are_quantized(tiny: TinyModel) -> None:
    ignore = ("*.experts.*",) if tiny.shape.family == "gpt_oss" else ()
    names = [name for group in linear_groups(tiny.shape, "int8", ignore) for name in group]
    sizes = hf_tensors(tiny.shape)
    matrices = {name for name, size in sizes.items() if len(size) == 2 and not name.endswith("_bias")}
    routers = {name for name in matrices if name.endswith((".gate.weight", ".router.weight"))}
    assert bool(routers) == (tiny.shape.moe is not None)
    assert sorted(names) == sorted(matrices - routers - {"model.embed_tokens.weight", "lm_head.weight"})
    groups = linear_groups(tiny.shape, "int8", ignore)
    ignored = quantization_config(tiny.shape, "int8", groups)["ignore"]
    not_experts = {name for name in ignored if "experts" not in name}
    assert {"lm_head"} | {name.removesuffix(".weight") for name in routers} == not_experts
    assert bool(ignore) == (len(not_experts) < len(ignored))


def test_experts_that_are_one_tensor_stay_as_they_are() -> None:
    shape = shape_from_config(CONFIGS["gpt-oss"].to_dict() | {"architectures": ["GptOssForCausalLM"]}, "")
    with pytest.raises(Unquantizable, match=r"gate_up_proj has all experts of a layer.*'\*\.experts\.\*' to"):
        linear_groups(shape, "int8")
    for format, extra in (("int8", {r"re:model\.layers\.0\.mlp\.experts\..*"}), ("fp8", set())):
        groups = linear_groups(shape, format, ("*.experts.*",))
        assert all(".self_attn." in name for group in groups for name in group)
        ignored = quantization_config(shape, format, groups)["ignore"]
        assert {"model.layers.0.mlp.experts", "model.layers.0.mlp.router"} | extra <= set(ignored)


def test_engines_read_the_experts_of_a_layer_as_a_whole() -> None:
    shape = shape_from_config(CONFIGS["qwen3-moe"].to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}, "")
    with pytest.raises(Unquantizable, match=r"ignore model\.layers\.1\.mlp\.experts\.\* or none"):
        linear_groups(shape, "int8", ("model.layers.1.mlp.experts.1.*",))
    pattern = "model.layers.1.mlp.experts.*"
    groups = linear_groups(shape, "int8", (pattern,))
    ignored = quantization_config(shape, "int8", groups)["ignore"]
    assert {"model.layers.1.mlp.experts", "model.layers.1.mlp.experts.0.down_proj"} <= set(ignored)
    assert "model.layers.2.mlp.experts" not in ignored


def test_latent_attention_fuses_both_projections_down() -> None:
    config = CONFIGS["deepseek-v3"].to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    groups = linear_groups(shape_from_config(config, ""), "nvfp4", ("*mlp*", "*_b_proj", "*o_proj"))
    attention = "model.layers.0.self_attn."
    assert groups[0] == (f"{attention}q_a_proj.weight", f"{attention}kv_a_proj_with_mqa.weight")


def test_scales_of_activations_have_to_be_measured(shape: ModelShape) -> None:
    with pytest.raises(Unquantizable, match="which this checkpoint does not have; train with policy"):
        Quantizer(shape, "fp8")


@pytest.mark.parametrize("format", FORMATS)
def test_inputs_of_an_expert_without_tokens_stay_empty(format: QuantizationFormat) -> None:
    amax = torch.ones(()) if format in STATIC_INPUTS else torch.ones(0, 1)
    assert fold_inputs(format, torch.ones(0, 128), amax).shape == (0, 128)
