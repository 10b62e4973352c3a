"""Ranges of inputs against those that hooks on transformers' modules see, training and updates with them."""

import asyncio
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemorl.config.quantization import CalibrationConfig, QuantizationConfig
from nemorl.data.examples import Example
from nemorl.data.packed import pack_examples
from nemorl.generation.vllm_engine import quantized
from nemorl.megatron.calibration import FILE, input_amax_of
from nemorl.megatron.export import export_hf
from nemorl.models.quantized import input_keys, linear_groups, quantize
from nemorl.models.registry import load_shape
from nemorl.models.tensors import local_view
from nemorl.weights.exchange import WeightExchange
from nemorl.weights.whole_tensors import WholeTensorReceiver
from tests.megatron.cases import LOSS, partition, share, start_worker
from tests.megatron.examples import (
    LENGTHS,
    VOCABULARY,
    layout,
    policy_config,
    ragged_batch,
    reference_logprobs,
)
from tests.weights.ranks import Threads

MEASURED = CalibrationConfig(prompts=2 * len(LENGTHS))
FP8 = QuantizationConfig(format="fp8", train="fake", calibration=MEASURED)
ROUNDS_INPUTS = FP8.model_copy(update={"activations": True})


def trained(rank, world_size, rendezvous, config, folder, resumed=None):
    """Three steps, each of which follows a checkpoint, or the steps after one of these."""
    worker = start_worker(rank, world_size, rendezvous, config)
    if resumed is not None:
        worker.load_checkpoint(folder / str(resumed))
    steps = []
    for seed in range(resumed or 0, 3):
        if resumed is None:
            worker.save_checkpoint(folder / str(seed))
        batch = share(ragged_batch(seed=seed), rank, config)
        worker.load_batch(batch)
        steps.append(worker.train(partition(batch.num_sequences, 1), LOSS))
    if resumed is None:
        worker.save_checkpoint(folder / "last")
    worker.close()
    return steps


PROMPTS = [
    Example(tokens.astype(np.int32), np.arange(len(tokens)) > 0)
    for tokens in (np.random.default_rng(n).integers(0, VOCABULARY, 8 + 4 * n) for n in range(5))
]


def of_prompts(rank, world_size, rendezvous, config):
    """The ranges before any conversation, and the number of conversations that count."""
    worker = start_worker(rank, world_size, rendezvous, config, calibration_prompts=PROMPTS)
    state = worker._ranges.state()
    worker.close()
    return state


def around_an_update(rank, world_size, rendezvous, config):
    """The range of one layer that is used at first, in a step, and after the update that follows it."""
    worker = start_worker(rank, world_size, rendezvous, config, calibration_prompts=PROMPTS)
    used = []
    for after in (lambda: None, lambda: None, worker.sender._parameters):
        after()
        used.append(float(worker._ranges.of("decoder.layers.0.mlp.linear_fc2.weight")))
        if len(used) == 1:
            worker.load_batch(ragged_batch(seed=1))
            worker.compute_logprobs(partition(len(LENGTHS), 2), old=True, reference=False)
    worker.close()
    return used


def sent_to_engines(rank, world_size, rendezvous, config, folder):
    """What a rank holds of an update after a step, and the checkpoint of the same weights in `folder`."""
    worker = start_worker(rank, world_size, rendezvous, config)
    batch = share(ragged_batch(seed=1), rank, config)
    worker.load_batch(batch)
    worker.train(partition(batch.num_sequences, 1), LOSS)
    worker.save_checkpoint(folder)
    tensors = worker.merged_parameters()
    parts = worker.sender.describe().slices
    found = [(part, local_view(tensors, part).clone()) for part in parts]
    worker.close()
    return found


def largest_inputs(network, batches):
    """By the name of a weight, over all tokens."""
    found = {}

    def watch(_, inputs, name):
        largest = inputs[0].detach().abs().amax() if inputs[0].numel() else torch.zeros(())
        found[name] = torch.maximum(found.get(name, torch.zeros(())), largest)

    hooks = [
        module.register_forward_pre_hook(lambda *given, name=f"{name}.weight": watch(*given, name))
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    for batch in batches:
        reference_logprobs(network, batch)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(
    "where",
    [
        layout(tp=2, sp=True),
        pytest.param(layout(pp=2, vpp=2), marks=pytest.mark.ci),
        pytest.param(layout(cp=2, dp=2), marks=pytest.mark.ci),
    ],
)
def test_ranges_are_those_of_the_first_sequences(pool, model, tmp_path, where):
    """Of 16 of 24 sequences: those of two steps, before the weights of either change."""
    network, folder = model("llama")
    config = policy_config(folder, quantization=FP8, layout=where, optimizer={"name": "sgd", "lr": 1e-9})
    pool.run(where.world_size, trained, config, tmp_path)
    shape = load_shape(folder)
    seen = largest_inputs(network, [ragged_batch(seed=seed) for seed in range(2)])
    measured = input_amax_of(tmp_path / "last", shape, FP8)
    for name in (name for group in linear_groups(shape, "fp8") for name in group):
        torch.testing.assert_close(measured[name], seen[name], rtol=1e-5, atol=0)
    assert torch.equal(load_file(tmp_path / "2" / FILE)["num_sequences"], torch.tensor(16.0))
    assert not input_amax_of(tmp_path / "0", shape, FP8)["model.layers.0.mlp.up_proj.weight"]

    export_hf(tmp_path / "last", tmp_path / "hf", config, FP8)
    written = load_file(tmp_path / "hf/model.safetensors")
    for name, amax in measured.items():
        scale = written[name.replace(".weight", ".input_scale")]
        assert torch.equal(scale, amax / 448), name


@pytest.mark.ci
def test_experts_of_a_layer_have_one_range(pool, model, tmp_path):
    folder, where = model("mixtral")[1], layout(tp=2, sp=True, ep=2)
    shape = load_shape(folder)
    for name, sizes in (("alone", layout()), ("spread", where)):
        config = policy_config(folder, quantization=FP8, layout=sizes)
        pool.run(sizes.world_size, trained, config, tmp_path / name)
    alone, spread = (load_file(tmp_path / name / "1" / FILE) for name in ("alone", "spread"))
    assert alone.keys() == spread.keys() == {*input_keys(shape, "fp8").values(), "num_sequences"}
    assert {
        "model.layers.0.block_sparse_moe.experts.w1",
        "model.layers.0.block_sparse_moe.experts.w2",
    } <= alone.keys()
    for name, values in alone.items():
        torch.testing.assert_close(spread[name], values, rtol=1e-5, atol=0)


@pytest.mark.ci
@pytest.mark.parametrize("where", [layout(), layout(tp=2, sp=True)], ids=["one process", "TP2-SP"])
def test_ranges_continue_bit_by_bit(pool, model, tmp_path, where):
    """Also from the middle of their measurement, with inputs that are rounded by them."""
    config = policy_config(model("llama")[1], quantization=ROUNDS_INPUTS, layout=where)
    (steps, *_) = pool.run(where.world_size, trained, config, tmp_path)
    for number in (1, 2):
        (again, *_) = pool.run(where.world_size, trained, config, tmp_path, number)
        assert again == steps[number:]


@pytest.mark.parametrize(
    "where",
    [
        layout(dp=2),
        pytest.param(layout(tp=2, sp=True, pp=2, vpp=2), marks=pytest.mark.ci),
        pytest.param(layout(cp=2, dp=2), marks=pytest.mark.ci),
    ],
)
def test_prompts_are_measured_before_the_first_conversation(pool, model, where):
    network, folder = model("llama")
    config = policy_config(folder, quantization=ROUNDS_INPUTS, layout=where)
    found = pool.run(where.world_size, of_prompts, config)
    seen = largest_inputs(network, [pack_examples(PROMPTS, [0.0] * len(PROMPTS))])
    keys = input_keys(load_shape(folder), "fp8")
    for state in found:
        for name, key in keys.items():
            torch.testing.assert_close(state[key], seen[name], rtol=1e-5, atol=0)
        assert not state["num_sequences"]


def test_wider_ranges_are_used_from_the_next_samples_on(pool, model):
    config = policy_config(model("llama")[1], quantization=ROUNDS_INPUTS)
    ((first, in_step, updated),) = pool.run(1, around_an_update, config)
    assert first == in_step < updated


UPDATED = (
    QuantizationConfig(format="fp8", calibration=MEASURED),
    QuantizationConfig(format="nvfp4", train="fake", activations=True, calibration=MEASURED),
    QuantizationConfig(format="nvfp4", calibration=MEASURED, ignore=("*layers.0.*",)),
)


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("llama", layout(tp=2, sp=True)),
        pytest.param("llama", layout(pp=2, dp=2), marks=pytest.mark.ci),
        pytest.param("mixtral", layout(tp=2, sp=True, ep=2), marks=pytest.mark.ci),
    ],
)
def test_vllm_loads_the_tensors_of_an_export(pool, model, tmp_path, family, where):
    """Bit by bit, and in any order. Both scales of gate and up of an expert have one place in `fp8`."""
    folder = model(family)[1]
    shape = load_shape(folder)
    for number, quantization in enumerate(UPDATED):
        config = policy_config(folder, quantization=quantization, layout=where)
        held = pool.run(where.world_size, sent_to_engines, config, tmp_path / f"checkpoint {number}")
        shapes, types = quantized.update_tensors(shape, quantization, "float32")
        update = {name: torch.full(size, torch.nan) for name, size in shapes.items()}
        for part, values in (part for of_rank in held for part in of_rank):
            update[part.name][part.box] = values
        assert set(types.values()) == {"float32"}
        order = list(update.items())
        random.Random(number).shuffle(order)
        loaded = list(quantized.of_update(shape, quantization, order))

        out = tmp_path / f"hf {number}"
        export_hf(tmp_path / f"checkpoint {number}", out, config, quantization)
        written = load_file(out / "model.safetensors")
        left_out = written.keys() - dict(loaded).keys()
        experts = family == "mixtral" and quantization.format == "fp8"
        assert all(name.endswith(".w3.input_scale") for name in left_out)
        assert bool(left_out) == experts
        assert len(loaded) == len(written) - len(left_out)
        for name, values in loaded:
            assert values.dtype == written[name].dtype, name
            assert torch.equal(values, written[name]), name


class Loader:
    """In place of vLLM's: keeps what a real one would load."""

    def __init__(self, shape, quantization):
        self._of_update = partial(quantized.of_update, shape, quantization)

    def load(self, tensors):
        self.tensors = {name: values.clone() for name, values in self._of_update(tensors)}

    def finish(self):
        pass


def test_an_update_carries_scales_in_float32(model, start_here, tmp_path):
    """Next to weights in bfloat16, through a real exchange, as the policy has measured them by then."""
    folder = model("llama")[1]
    shape, quantization = load_shape(folder), UPDATED[0]
    worker = start_here(policy_config(folder, quantization=quantization))
    loader = Loader(shape, quantization)
    names = quantized.update_tensors(shape, quantization, "bfloat16")
    receiver = WholeTensorReceiver(*names, loader, device=torch.device("cpu"))
    sides = (Threads([SimpleNamespace(exchange=side)]) for side in (worker.sender, receiver))
    exchange = WeightExchange(*sides, 4096, 30.0)
    measured = []
    for version in (1, 2):
        batch = ragged_batch(seed=version)
        worker.load_batch(batch)
        worker.train(partition(batch.num_sequences, 1), LOSS)
        asyncio.run(exchange.refit(version))
        scales = {name: loader.tensors[name] for name in names[0] if name.endswith(".input_scale")}
        worker.save_checkpoint(tmp_path / str(version))
        amax = input_amax_of(tmp_path / str(version), shape, quantization)
        for name, values in amax.items():
            assert torch.equal(scales[name.replace(".weight", ".input_scale")], values / 448), name
        weight = worker.parameters()["decoder.layers.0.mlp.linear_fc2.weight"].bfloat16()
        name = "model.layers.0.mlp.down_proj.weight"
        expected = quantize("fp8", name, weight)
        assert all(torch.equal(loader.tensors[name], values) for name, values in expected.items())
        measured.append(torch.stack(list(scales.values())))
    assert (measured[1] >= measured[0]).all()
    assert (measured[1] > measured[0]).any()


def test_engines_begin_with_scales_of_1(model):
    """Until the first update, before which they do not sample."""
    folder = model("llama")[1]
    shape, quantization = load_shape(folder), UPDATED[1]
    tensors = load_file(folder / "model.safetensors")
    loaded = dict(quantized.of_folder(shape, quantization, tensors.items()))
    scales = [values for name, values in loaded.items() if name.endswith(".input_scale")]
    assert len(scales) == sum(map(len, linear_groups(shape, "nvfp4")))
    assert all(torch.equal(values, torch.ones(())) for values in scales)
