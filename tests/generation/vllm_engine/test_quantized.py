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
from torch import Tensor, nn

from nemorl.config.quantization import QuantizationConfig, QuantizationFormat
from nemorl.models.hf_folder import HfFolder
from nemorl.models.hf_writer import HfFolderWriter
from nemorl.models.layout import hf_tensors
from nemorl.models.quantized import Quantizer, dequantize, linear_groups, quantization_config, quantize
from nemorl.models.registry import load_shape
from tests.generation.vllm_engine.exchange import checkpoint, exchange_of
from tests.generation.vllm_engine.test_engine import PLAIN, collect, gaps, group
from tests.required import require_module

pytestmark = pytest.mark.ci  # two engines, each of which takes half a minute to start
INT8 = QuantizationConfig(format="int8", ignore=("model.layers.0.mlp.down_proj",))


class Int8Linear(nn.Module):
    """A product of int8 by definition: weights scaled by row, inputs by token, both by max / 127."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = _rounded(weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return _rounded(inputs) @ self.weight.T


def _rounded(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale).round() * scale


def in_int8(network: Any, ignored: tuple[str, ...] = INT8.ignore) -> Any:
    """The same network, in which all linear layers but the head and the ignored ones are of int8."""
    network = copy.deepcopy(network)
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear) and name not in ("lm_head", *ignored):
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, Int8Linear(module.weight.detach()))
    return network


def with_weights(network: Any, weights: dict[str, Tensor]) -> Any:
    network = copy.deepcopy(network)
    network.load_state_dict(weights, strict=False)
    return network


def quantized_folder(source: Path, out: Path) -> Path:
    shape = load_shape(source)
    with HfFolderWriter(out, source, quantizer=Quantizer(shape, "int8", INT8.ignore)) as writer:
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
    words = ("LOGPROBS ", "READERS ")
    (line,) = (line for line in finished.stdout.splitlines() if line.startswith(words))
    return json.loads(line.partition(" ")[2])


@torch.no_grad()
def test_vllm_loads_an_exported_folder(dense: Any, tmp_path: Path) -> None:
    folder, network = quantized_folder(dense[0], tmp_path / "int8"), dense[1]
    prompts = torch.randint(0, 97, (4, 24), generator=torch.Generator().manual_seed(0))
    found = torch.tensor(printed_by("prompt_logprobs", str(folder), json.dumps(prompts.tolist())))

    def distances(model: Any) -> Tensor:
        logprobs = model(prompts).logits.log_softmax(-1)[:, :-1]
        return (logprobs.gather(2, prompts[:, 1:, None]).squeeze(2) - found).abs()

    assert distances(in_int8(network)).mean() < 1e-3
    assert 0.01 < distances(network).mean() < 0.1  # what int8 costs this model of random weights


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


def mean_gap(network: Any, requests: Any, completions: Any) -> float:
    found = [gaps(network, asked.prompt, completions[asked.id]) for asked in requests]
    return float(torch.cat(found).mean())
