"""INT8 in vLLM on a CPU: an exported folder, and engines that quantize what they load and receive."""

import asyncio
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nemorl.config.quantization import QuantizationConfig, QuantizationFormat
from nemorl.device import has_int8_products
from nemorl.generation.vllm_engine import quantized
from nemorl.models.hf_folder import HfFolder
from nemorl.models.hf_writer import HfFolderWriter
from nemorl.models.layout import hf_tensors
from nemorl.models.quantized import (
    Quantizer,
    dequantize,
    input_keys,
    input_scale,
    input_scale_names,
    linear_groups,
    quantization_config,
    quantize,
)
from nemorl.models.registry import load_shape
from tests.generation.vllm_engine.exchange import checkpoint, exchange_of
from tests.generation.vllm_engine.models import make, write_tokenizer
from tests.generation.vllm_engine.test_engine import PLAIN, collect, gaps, group
from tests.required import require_module
from tests.selection import in_all

pytestmark = pytest.mark.ci  # two engines, each of which takes half a minute to start
INT8 = QuantizationConfig(format="int8", ignore=("model.layers.0.mlp.down_proj",))


class Int8Linear(nn.Module):
    """A product of int8 by definition: weights scaled by row, inputs by token, both by max / 127."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = _rounded(linear.weight.detach()), linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(_rounded(inputs), self.weight, self.bias)


def _rounded(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale).round() * scale


def in_int8(network: Any, ignored: tuple[str, ...] = INT8.ignore) -> Any:
    """The same network, in which all linear layers but the head and the ignored ones are of int8."""
    network = copy.deepcopy(network)
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear) and name not in ("lm_head", *ignored):
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, Int8Linear(module))
    return network


def with_weights(network: Any, weights: dict[str, Tensor]) -> Any:
    network = copy.deepcopy(network)
    network.load_state_dict(weights, strict=False)
    return network


def quantized_folder(source: Path, out: Path, ignored: tuple[str, ...] = INT8.ignore) -> Path:
    shape = load_shape(source)
    with HfFolderWriter(out, source, quantizer=Quantizer(shape, "int8", ignored)) as writer:
        for name, size in hf_tensors(shape).items():
            writer.add(name, HfFolder(source).tensor(name, size))
    return out


def printed_by(program: str, *arguments: str) -> Any:
    """The JSON in the line of a program of this folder that begins with a word in capitals."""
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.generation.vllm_engine.{program}", *arguments],
        env=os.environ | variables | {"GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE, text=True, check=True, timeout=500,
    )  # fmt: skip
    words = ("LOGPROBS ", "READERS ", "RELOADED ")
    (line,) = (line for line in finished.stdout.splitlines() if line.startswith(words))
    return json.loads(line.partition(" ")[2])


multiplies_int8 = pytest.mark.skipif(
    not has_int8_products(), reason="products of int8 overflow on a processor without VNNI"
)


@multiplies_int8
@pytest.mark.parametrize("family", ["llama", *in_all("gpt_oss")])
@torch.no_grad()
def test_vllm_loads_an_exported_folder(model_folder: Path, tmp_path: Path, family: str) -> None:
    """Of gpt-oss, whose experts are one tensor, with attention in int8."""
    network = make(family, tmp_path / family)
    write_tokenizer(tmp_path / family)
    ignored = ("*.experts.*",) if family == "gpt_oss" else INT8.ignore
    folder = quantized_folder(tmp_path / family, tmp_path / "int8", ignored)
    prompts = torch.randint(0, 97, (4, 24), generator=torch.Generator().manual_seed(0))
    found = torch.tensor(printed_by("prompt_logprobs", str(folder), json.dumps(prompts.tolist())))

    def distances(model: Any) -> Tensor:
        logprobs = model(prompts).logits.log_softmax(-1)[:, :-1]
        return (logprobs.gather(2, prompts[:, 1:, None]).squeeze(2) - found).abs()

    assert distances(in_int8(network, ignored)).mean() < 1e-3
    assert 0.01 < distances(network).mean() < 0.1  # what int8 costs this model of random weights


@pytest.mark.parametrize("family", ["llama", *in_all("qwen3_moe")])
def test_a_reload_of_vllm_takes_updates_with_scales_of_activations(
    tmp_path: Path, model_folder: Path, family: str
) -> None:
    """As far as kernels: parameters change with an update, and come back, to the bit, with an export's."""
    format: QuantizationFormat = "fp8"
    make(family, tmp_path / "plain")
    shape, config = load_shape(tmp_path / "plain"), QuantizationConfig(format=format, calibration={})
    names = input_scale_names(shape, format)
    weights = checkpoint(tmp_path / "plain")
    # Experts of a layer have one range, and so have fused matrices.
    keys = input_keys(shape, format)
    amax = {name: torch.tensor(float(1 + len(keys[name]))) for name in names}
    with HfFolderWriter(
        tmp_path / "hf", tmp_path / "plain", quantizer=Quantizer(shape, format, (), amax)
    ) as writer:
        for name, values in weights.items():
            writer.add(name, values)
    other = {name: 1.5 * values for name, values in weights.items()}
    scales = {name: input_scale(format, 1.5 * amax[weight]).view(1) for weight, name in names.items()}
    save_file(other | scales, tmp_path / "update.safetensors")
    folders = tmp_path / "hf", tmp_path / "plain"
    update = str(tmp_path / "update.safetensors")
    kept, back, reversed_back, count = printed_by(
        "quantized_reload", *map(str, folders), config.model_dump_json(), update
    )
    assert back == reversed_back == count
    # Values of a weight times 1.5 are the same in a format whose scale is of all of it.
    assert kept < count / 2


def test_a_reload_receives_one_scale_where_vllm_has_one_place_for_two(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    shape, config = load_shape(tmp_path), QuantizationConfig(format="fp8", calibration={})
    scales = {name: torch.ones(1) for name in input_scale_names(shape, "fp8").values()}
    loaded = [name for name, _ in quantized.of_update(shape, config, (checkpoint(tmp_path) | scales).items())]
    assert len(loaded) == len(set(loaded))
    lost = scales.keys() - set(loaded)
    up = [f"model.layers.{layer}.mlp.experts.{n}.up_proj.input_scale" for layer in range(2) for n in range(4)]
    assert sorted(lost) == sorted(up)


def test_readers_of_vllm_expect_the_tensors_of_each_format(dense: Any) -> None:
    # Sizes that all formats divide.
    shape = replace(load_shape(dense[0]), hidden_size=256, ffn_hidden_size=512, num_key_value_heads=8)
    ignore, layers = ("model.layers.1.*",), [name.removesuffix(".weight") for name in hf_tensors(shape)]
    layers = [name for name in layers if name.endswith("_proj")] + ["lm_head"]
    configs = {
        format: quantization_config(shape, format, linear_groups(shape, format, ignore))
        for format in get_args(QuantizationFormat)
    }
    found = printed_by("quantized_readers", json.dumps(configs), json.dumps(layers))
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(4))
    for format in configs:
        assert found[format]["ignored"] == [name for name in layers if "layers.1." in name] + ["lm_head"]
        ours = quantize(format, "x.weight", weight)
        if "tensors" in found[format]:
            # A scale of a tensor is read into a place of its own of the fused matrix.
            theirs = found[format]["tensors"].items()
            expected = {f"x.{name}": ([] if size == [1] else size, kind) for name, (size, kind) in theirs}
            assert {
                name: (list(values.shape), str(values.dtype)) for name, values in ours.items()
            } == expected


def test_int4_is_what_compressed_tensors_unpacks(dense: Any) -> None:
    unpack = require_module("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(5))
    tensors = quantize("int4", "x.weight", weight)
    values = unpack(tensors["x.weight_packed"], 4, torch.Size(tensors["x.weight_shape"].tolist()))
    scaled = values.view(16, 2, 128).float() * tensors["x.weight_scale"][..., None]
    assert torch.equal(scaled.view(16, 256), dequantize("int4", "x.weight", tensors))


@pytest.fixture(scope="module")
def engine(dense: Any) -> Iterator[Any]:
    from tests.generation.vllm_engine.conftest import Running

    engine = Running(dense[0], quantization=INT8)
    yield engine
    engine.close()


@multiplies_int8
def test_workers_quantize_what_they_load_and_receive(engine: Any, dense: Any) -> None:
    folder, network = dense
    requests = group("", 4, 20, PLAIN)
    loaded = engine.run(collect(engine.host, requests))
    for scale in (1.0, 1.2, 1.0):
        weights, version = checkpoint(folder, scale), engine.host.version + 1
        asyncio.run(exchange_of(engine, folder, weights).refit(version))
        found = engine.run(collect(engine.host, requests))
        plain = with_weights(network, weights)
        # A few inputs lie so close to the border of two values that the order of a sum decides.
        assert mean_gap(in_int8(plain), requests, found) < 0.01
        assert mean_gap(plain, requests, found) > 0.03
        for name, completion in found.items():
            assert set(completion.versions.tolist()) == {version}
            if scale == 1:
                assert completion.tokens.tolist() == loaded[name].tokens.tolist()
                assert completion.logprobs.tolist() == loaded[name].logprobs.tolist()


@pytest.mark.parametrize("quantizes", [*in_all(False), pytest.param(True, marks=multiplies_int8)])
def test_updates_reach_experts_that_are_one_tensor(
    tmp_path: Path, model_folder: Path, quantizes: bool
) -> None:
    """And sinks: vLLM's loader of gpt-oss copies both itself, which a reload does not see."""
    from tests.generation.vllm_engine.conftest import Running

    network = make("gpt_oss", tmp_path)
    write_tokenizer(tmp_path)
    quantization = QuantizationConfig(format="int8", ignore=("*.experts.*",)) if quantizes else None
    engine = Running(tmp_path, quantization=quantization, update="reload")
    try:
        requests = group("", 4, 20, PLAIN)
        for scale in (1.2, 1.0):
            weights, version = checkpoint(tmp_path, scale), engine.host.version + 1
            asyncio.run(exchange_of(engine, tmp_path, weights).refit(version))
            found = engine.run(collect(engine.host, requests))
            expected = with_weights(network, weights)
            expected = in_int8(expected, ()) if quantizes else expected
            assert mean_gap(expected, requests, found) < (0.01 if quantizes else 1e-4)
    finally:
        engine.close()


def mean_gap(network: Any, requests: Any, completions: Any) -> float:
    found = [gaps(network, asked.prompt, completions[asked.id]) for asked in requests]
    return float(torch.cat(found).mean())
