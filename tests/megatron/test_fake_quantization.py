"""Training with rounded weights against training on a folder of weights that are rounded already."""

import copy
import gc
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.config.policy import FullRecompute, LoraConfig, SelectiveRecompute
from nemorl.config.quantization import CalibrationConfig, QuantizationConfig, QuantizationFormat
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import hf_tensors
from nemorl.models.quantized import Quantizer, dequantize, linear_groups
from nemorl.models.registry import load_shape
from nemorl.models.tensors import local_view
from tests.megatron.cases import LOSS, live, partition, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch, reference_logprobs
from tests.required import require_module
from tests.selection import in_all


def fake(format: QuantizationFormat, **fields: Any) -> QuantizationConfig:
    return QuantizationConfig(format=format, train="fake", **fields)


INT8 = fake("int8", ignore=("model.layers.1.*",))


def rounded(folder: Path, out: Path, quantization: QuantizationConfig) -> Path:
    """The model with the weights that an export in this format gives."""
    shutil.copytree(folder, out)
    shape, format = load_shape(folder), quantization.format
    tensors = load_file(folder / "model.safetensors")
    quantizer = Quantizer(shape, format, quantization.ignore, dict.fromkeys(tensors, torch.ones(())))
    written = dict(quantizer.stream(tensors.items()))
    for name in (name for group in linear_groups(shape, format, quantization.ignore) for name in group):
        tensors[name] = dequantize(format, name, written)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def one_step(folder, config, rendezvous):
    """Logprobs, what the first optimizer step measured, the worker's weights and those for engines."""
    worker = start_worker(0, 1, f"file://{rendezvous}", config)
    try:
        assert ("int8" in worker.header().get("weights", "")) == (config.quantization is not None)
        batch = ragged_batch(seed=3)
        micro_batches = partition(batch.num_sequences, 3)
        worker.load_batch(batch)
        logprobs = worker.compute_logprobs(micro_batches, old=True, reference=True)
        engines = {name: tensor.clone() for name, tensor in worker.merged_parameters().items()}
        own = {name: tensor.clone() for name, tensor in worker.parameters().items()}
        return logprobs, worker.train(micro_batches, LOSS), own, engines, worker.slices()
    finally:
        worker.close()


@pytest.mark.parametrize("recompute", [None, FullRecompute(name="full")], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["qwen3", "llama-tied", "gemma3", "gpt-oss"])
def test_a_step_is_that_of_rounded_weights(model, tmp_path, family, recompute):
    folder = model(family)[1]
    fields = {} if recompute is None else {"recompute": recompute}
    quantization = fake("int8", ignore=("*.experts.*",)) if family == "gpt-oss" else INT8
    mine = one_step(folder, policy_config(folder, quantization=quantization, **fields), tmp_path / "a")
    plain = policy_config(rounded(folder, tmp_path / "rounded", quantization), **fields)
    theirs = one_step(folder, plain, tmp_path / "b")
    assert mine[0] == theirs[0]
    assert mine[1].grad_norm == theirs[1].grad_norm
    assert mine[1].sums == theirs[1].sums

    _, _, own, engines, slices = mine
    groups = linear_groups(load_shape(folder), "int8", quantization.ignore)
    names = {name for group in groups for name in group}
    folders, stored = (HfFolder(folder), HfFolder(tmp_path / "rounded")), hf_tensors(load_shape(folder))
    for part in slices:
        whole = (files.tensor(part.name, stored[part.name]) for files in folders)
        kept, sent = (tensor.view(part.shape)[part.box] for tensor in whole)
        assert torch.equal(local_view(own, part), kept), part.name
        assert torch.equal(local_view(engines, part), sent), part.name
        assert torch.equal(kept, sent) != (part.name in names), part.name


def engine_weights(rank, world_size, rendezvous, config):
    """The parts of the weights that engines get from a rank."""
    worker = start_worker(rank, world_size, rendezvous, config)
    sent = worker.merged_parameters()
    found = [(part, local_view(sent, part).clone()) for part in worker.slices()]
    worker.close()
    return found


ALL = ("int8", "fp8", "fp8_channel", "fp8_block", "int4", "nvfp4", "nvfp4_w4a16")
TP2, EP2 = layout(tp=2, sp=True), layout(tp=2, sp=True, ep=2)


@pytest.mark.parametrize(
    ("family", "where", "formats"),
    [
        ("llama-wide", TP2, ALL),
        *in_all(("llama-wide", layout(), ALL)),
        pytest.param("llama-wide", layout(pp=2, vpp=2), ("fp8_block", "nvfp4"), marks=pytest.mark.ci),
        pytest.param("qwen3-two-groups", layout(tp=4), ("int8", "fp8"), marks=pytest.mark.ci),
        pytest.param("qwen3-moe", layout(dp=2, etp=2), ("int8", "fp8"), marks=pytest.mark.ci),
        pytest.param("mixtral", EP2, ("fp8", "nvfp4"), marks=pytest.mark.ci),
        pytest.param("deepseek-v3", EP2, ("int8", "fp8"), marks=pytest.mark.ci),
    ],
)
def test_engines_get_the_weights_that_an_export_has(pool, model, tmp_path, family, where, formats):
    """Bit by bit, though no rank has all of the rows, tensors and blocks that share a scale."""
    folder = model(family)[1]
    for format in formats:
        config = policy_config(folder, quantization=fake(format), layout=where)
        files = HfFolder(rounded(folder, tmp_path / format, fake(format)))
        for parts in pool.run(where.world_size, engine_weights, config):
            for part, values in parts:
                assert torch.equal(values, files.tensor(part.name, part.shape)[part.box]), part.name


LAYOUTS = {
    "TP2-SP": (TP2, {}),
    "PP2-VPP2": (layout(pp=2, vpp=2), {}),
    "CP2-TP2": (layout(cp=2, tp=2), {"recompute": FullRecompute(name="full")}),
    "EP2-TP2-SP": (EP2, {}),
    "DP2-ETP2": (layout(dp=2, etp=2), {"recompute": SelectiveRecompute(name="selective", modules=("moe",))}),
}
LORA = {"lora": LoraConfig(rank=4, alpha=8)}
INPUTS = fake("int8", activations=True)


@pytest.mark.parametrize(
    ("family", "name", "quantization", "fields"),
    [
        ("llama", "TP2-SP", fake("int8"), {}),
        *(pytest.param(*case, marks=pytest.mark.ci) for case in [
            ("llama", "PP2-VPP2", fake("int8"), {}),
            ("llama-wide", "TP2-SP", fake("nvfp4_w4a16"), {}),
            ("mixtral", "DP2-ETP2", fake("int8"), {}),
            ("llama", "TP2-SP", INPUTS, {}),
            ("llama", "PP2-VPP2", INPUTS, {}),
        ]),
        *in_all(
            ("llama", "CP2-TP2", fake("fp8"), {}),
            ("llama-wide", "TP2-SP", fake("fp8_block"), {}),
            ("qwen3-moe", "EP2-TP2-SP", fake("int8"), {}),
            ("deepseek-v3", "EP2-TP2-SP", fake("int8"), {}),
            ("llama", "TP2-SP", fake("int8"), LORA),
            ("mixtral", "EP2-TP2-SP", INPUTS, {}),
        ),
    ],
)  # fmt: skip
def test_steps_equal_one_process(pool, model, family, name, quantization, fields):
    """The first step to the bounds of unquantized runs.

    After it, sums in another order have moved some weights and inputs over the border of two values.
    """
    where, more = LAYOUTS[name]
    batches = [ragged_batch(seed=seed) for seed in range(3)]
    config = policy_config(model(family)[1], quantization=quantization, **fields)
    (alone,) = pool.run(1, live, config, batches, 8)
    spread = config.model_copy(update={"layout": where, **more})
    first = 1e-2 if quantization.activations else 1e-5  # inputs already lie at borders in the first step
    for life in pool.run(where.world_size, live, spread, batches, 1 if name == "PP2-VPP2" else 3):
        assert life.gap.gap_mean == pytest.approx(alone.gap.gap_mean, rel=first)
        for mine, its, bound in zip(life.steps, alone.steps, (first, 0.1, 0.1), strict=True):
            assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=bound)
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=bound)


@pytest.mark.parametrize("name", ["int8", "fp8_block"])
def test_the_reference_is_rounded_or_not(model, start_here, name):
    folder, batch = model("llama-wide")[1], ragged_batch(seed=3)
    found = {}
    for kind in ("fake", "none", "unquantized"):
        quantization = None if kind == "unquantized" else fake(name, reference=kind)
        worker = start_here(policy_config(folder, quantization=quantization))
        worker.load_batch(batch)
        worker.compute_logprobs(partition(batch.num_sequences, 3), old=True, reference=True)
        found[kind] = worker.batch.reference_logprobs, worker.batch.old_logprobs
        worker.train(partition(batch.num_sequences, 3), LOSS)
        worker.compute_logprobs(partition(batch.num_sequences, 3), old=True, reference=True)
        assert torch.equal(worker.batch.reference_logprobs, found[kind][0])  # as before the step
        worker.close()
    assert torch.equal(*found["fake"])
    assert torch.equal(found["none"][0], found["unquantized"][0])
    assert torch.equal(found["none"][1], found["fake"][1])


def test_engines_get_adapters_on_rounded_weights(model, tmp_path, start_here):
    """As of a run with adapters on a model whose weights are rounded already."""
    folder = model("qwen3")[1]
    sent = []
    for path, quantization in ((folder, INT8), (rounded(folder, tmp_path / "rounded", INT8), None)):
        worker = start_here(policy_config(path, quantization=quantization, **LORA))
        batch = ragged_batch(seed=3)
        worker.load_batch(batch)
        worker.train(partition(batch.num_sequences, 3), LOSS)
        sent.append({name: weight.clone() for name, weight in worker.merged_parameters().items()})
        worker.close()
    mine, theirs = sent
    own = load_file(folder / "model.safetensors")
    changed = mine["decoder.layers.1.mlp.linear_fc2.weight"] - own["model.layers.1.mlp.down_proj.weight"]
    assert changed.abs().max() > 0
    for name, weight in mine.items():
        assert torch.equal(weight, theirs[name]), name


def is_collected(rank, world_size, rendezvous, config, batch):
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_batch(batch)
    micro_batches = partition(batch.num_sequences, 3)
    worker.compute_logprobs(micro_batches, old=True, reference=True)
    worker.train(micro_batches, LOSS)
    worker.close()
    left = weakref.ref(worker)
    del worker
    gc.collect()
    return left() is None


def test_a_worker_that_is_gone_leaves_nothing(pool, model):
    calibrated = QuantizationConfig(format="fp8", train="fake", calibration=CalibrationConfig(prompts=1))
    for quantization in (INT8, calibrated):
        config = policy_config(model("llama")[1], quantization=quantization)
        assert pool.run(1, is_collected, config, ragged_batch()) == [True]


def by_modelopt(network, preset, batch, *, by_token):
    """Logprobs and gradient norm of a policy gradient step of a model that modelopt rounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = require_module("modelopt.torch.quantization")
    config = copy.deepcopy(getattr(quantization, preset))
    if by_token:  # as vLLM scales inputs, and not as a range of all tokens
        config["quant_cfg"].append(
            {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": 8, "axis": None, **BY_TOKEN}}
        )
        config["quant_cfg"].append({"quantizer_name": "*lm_head*", "enable": False})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = quantization.quantize(
            copy.deepcopy(network), config, lambda network: reference_logprobs(network, batch)
        )
    logprobs = reference_logprobs.__wrapped__(network, batch)
    (-(batch.weights * batch.advantages * logprobs).sum()).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
    return logprobs.detach(), gradients.double().norm()


BY_TOKEN = {"type": "dynamic", "block_sizes": {-1: None}}
MEASURED = CalibrationConfig(prompts=1)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("quantization", "preset", "bound"),
    [
        (fake("int8"), "INT8_WEIGHT_ONLY_CFG", 1e-5),
        (fake("fp8_block"), "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", 1e-5),
        (fake("int4"), "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", 1e-5),
        (fake("int8", activations=True), "INT8_DEFAULT_CFG", 1e-2),
        (fake("fp8_channel", activations=True), "FP8_PER_CHANNEL_PER_TOKEN_CFG", 1e-2),
        (fake("fp8", activations=True, calibration=MEASURED), "FP8_DEFAULT_CFG", 1e-2),
    ],
    ids=str,
)
def test_a_step_is_that_of_modelopt(model, start_here, quantization, preset, bound):
    """An input at the border of two values may fall to either side, and layers of random weights amplify it.

    tests/models/test_quantized.py compares the rounding of inputs itself.
    """
    network, folder = model("llama-wide")
    batch = ragged_batch(seed=3)
    worker = start_here(policy_config(folder, quantization=quantization))
    worker.load_batch(batch)
    micro_batches = partition(batch.num_sequences, batch.num_sequences)
    worker.compute_logprobs(micro_batches, old=True, reference=False)
    logprobs = worker.batch.old_logprobs
    step = worker.train(micro_batches, PolicyLoss(ClipLossConfig()))
    theirs, norm = by_modelopt(
        network, preset, batch, by_token=quantization.format == "int8" and quantization.activations
    )
    cost = (theirs - reference_logprobs(network, batch)).abs().mean()  # of rounding
    assert (logprobs - theirs).abs().mean() < (0.25 if quantization.activations else 1e-3) * cost
    assert step.grad_norm == pytest.approx(float(norm), rel=bound)
