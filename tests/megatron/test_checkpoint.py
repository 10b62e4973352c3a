"""A loaded state continues the run that was saved: bit by bit, or as closely as layouts agree."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from nemorl.config.policy import AdamConfig, DecaySchedule, SgdConfig
from nemorl.config.quantization import QuantizationConfig
from nemorl.megatron.checkpoint_files import SavedState
from nemorl.megatron.export import export_hf
from nemorl.megatron.model import PolicyParallel
from nemorl.models.adapters import TrainedWeights
from nemorl.models.quantized import quantize
from nemorl.models.registry import load_shape
from tests.megatron.cases import LOSS, partition, share, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch
from tests.selection import in_all

SCHEDULE = DecaySchedule(name="cosine", warmup_steps=2, decay_steps=6)
ROUNDED = QuantizationConfig(format="fp8", train="fake")


def train(worker, rank, config, seed):
    batch = share(ragged_batch(seed=seed), rank, config)
    micro_batches = partition(batch.num_sequences, 3)
    worker.load_batch(batch)
    worker.compute_logprobs(micro_batches, old=True, reference=True)
    return worker.train(micro_batches, LOSS)


def save_in_the_middle(rank, world_size, rendezvous, config, folder):
    """Two steps, a checkpoint, two steps."""
    worker = start_worker(rank, world_size, rendezvous, config)
    for seed in range(2):
        train(worker, rank, config, seed)
    worker.save_checkpoint(folder)
    steps = [train(worker, rank, config, seed) for seed in range(2, 4)]
    weights = {name: p.clone() for name, p in worker.parameters().items()}
    worker.close()
    return steps, weights


def continue_from(rank, world_size, rendezvous, config, folder):
    """The checkpoint, two steps."""
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_checkpoint(folder)
    steps = [train(worker, rank, config, seed) for seed in range(2, 4)]
    weights = {name: p.clone() for name, p in worker.parameters().items()}
    worker.close()
    return steps, weights


@pytest.mark.parametrize(
    ("where", "fields"),
    [
        (layout(), {}),
        (layout(), {"optimizer": SgdConfig(name="sgd", lr=0.1)}),
        (layout(), {"precision": "bfloat16"}),
        (layout(tp=2, dp=2), {}),
        (layout(pp=2, dp=2), {"precision": "bfloat16"}),
        (layout(tp=2, sp=True), {"precision": "bfloat16", "quantization": ROUNDED}),
    ],
    ids=["one process", "sgd", "bfloat16", "TP2-DP2", "PP2-DP2 bfloat16", "TP2-SP rounded"],
)
def test_same_layout_continues_bit_by_bit(pool, model, tmp_path, where, fields):
    config = policy_config(model("llama-tied")[1], layout=where, schedule=SCHEDULE, **fields)
    saved = pool.run(where.world_size, save_in_the_middle, config, tmp_path)
    loaded = pool.run(where.world_size, continue_from, config, tmp_path)
    for (steps, weights), (steps_again, weights_again) in zip(saved, loaded, strict=True):
        assert steps_again == steps
        for name, weight in weights.items():
            assert torch.equal(weights_again[name], weight), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("goes_to_host", [True, False])
def test_the_optimizer_moves_to_host_memory_and_back(pool, model, tmp_path, precision, goes_to_host):
    """A run that was saved with its optimizer in one place continues with it in the other."""
    here, there = (
        policy_config(
            model("llama-tied")[1],
            layout=layout(dp=2),
            schedule=SCHEDULE,
            precision=precision,
            optimizer=AdamConfig(lr=3e-3, on_host=on_host),
        )
        for on_host in (not goes_to_host, goes_to_host)
    )
    saved = pool.run(2, save_in_the_middle, here, tmp_path)
    loaded = pool.run(2, continue_from, there, tmp_path)
    for (steps, weights), (steps_again, weights_again) in zip(saved, loaded, strict=True):
        assert steps_again == steps
        for name, weight in weights.items():
            assert torch.equal(weights_again[name], weight), name


@pytest.mark.parametrize(
    "there", [layout(), layout(pp=2, dp=2), *in_all(layout(tp=2, sp=True), layout(tp=2, pp=2))]
)
def test_another_layout_continues_the_same_run(pool, model, tmp_path, there):
    folder = model("llama-tied")[1]
    saved = pool.run(4, save_in_the_middle, policy_config(folder, layout=layout(tp=2, dp=2)), tmp_path)
    config = policy_config(folder, layout=there)
    for steps, _ in pool.run(there.world_size, continue_from, config, tmp_path):
        for mine, its in zip(steps, saved[0][0], strict=True):
            assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (layout(pp=2, vpp=2), layout(cp=2)),
        (layout(pp=2, last=1, dp=2), layout(pp=2, vpp=2, tp=2, sp=True)),
        *in_all((layout(tp=2, pp=2), layout(dp=4)), (layout(cp=2, dp=2), layout(pp=2, first=1, cp=2))),
    ],
    ids=lambda where: where.name,
)
def test_stages_and_shares_of_sequences_continue_as_others(pool, model, tmp_path, here, there):
    folder = model("llama-tied")[1]
    saved = pool.run(here.world_size, save_in_the_middle, policy_config(folder, layout=here), tmp_path)
    config = policy_config(folder, layout=there)
    for steps, _ in pool.run(there.world_size, continue_from, config, tmp_path):
        for mine, its in zip(steps, saved[0][0], strict=True):
            assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)


def test_layers_for_further_tokens_continue_in_another_layout(pool, model, tmp_path):
    folder, further = model("mimo-mtp-tied")[1], {"loss_weight": 0.3}
    here, there = layout(pp=2, dp=2), layout(tp=2, sp=True)
    config = policy_config(folder, layout=here, multi_token_prediction=further)
    saved = pool.run(4, save_in_the_middle, config, tmp_path)
    config = policy_config(folder, layout=there, multi_token_prediction=further)
    for steps, _ in pool.run(2, continue_from, config, tmp_path):
        for mine, its in zip(steps, saved[0][0], strict=True):
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)
            assert mine.mtp == pytest.approx(its.mtp, rel=1e-4)


def test_experts_continue_in_another_layout_and_buffers_stay(pool, model, tmp_path):
    """DeepSeek-V3: experts shared by EP continue under TP; the router's bias is exported as it was read."""
    folder, saved = model("deepseek-v3")[1], tmp_path / "saved"
    config = policy_config(folder, layout=layout(dp=2, ep=2))
    before = pool.run(2, save_in_the_middle, config, saved)
    there = policy_config(folder, layout=layout(tp=2, sp=True))
    for steps, _ in pool.run(2, continue_from, there, saved):
        for mine, its in zip(steps, before[0][0], strict=True):
            assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)

    export_hf(saved, tmp_path / "out", policy_config(folder, precision="bfloat16"))
    source, out = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert source.keys() == out.keys()
    for name, tensor in out.items():
        if name.endswith("e_score_correction_bias"):
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, source[name])
        else:
            assert tensor.dtype == torch.bfloat16
            assert not torch.equal(tensor.float(), source[name].bfloat16().float()), name


def test_weights_are_read_as_hf_tensors_without_a_worker(pool, model, tmp_path):
    folder = model("qwen3")[1]
    config = policy_config(folder, layout=layout(tp=2, dp=2))
    pool.run(4, save_untrained, config, tmp_path)
    saved = SavedState(tmp_path, TrainedWeights(load_shape(folder)))
    for name, expected in model("qwen3")[0].state_dict().items():
        assert torch.equal(saved.hf_tensor(name), expected), name


def save_untrained(rank, world_size, rendezvous, config, folder):
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.save_checkpoint(folder)
    worker.close()


def copy_and_go_on(rank, world_size, rendezvous, config, folder):
    """A checkpoint; and the same from a copy, whose first file waits for the disk until a step is done."""
    worker = start_worker(rank, world_size, rendezvous, config)
    train(worker, rank, config, seed=0)
    records = worker.save_checkpoint(folder / "at once")
    worker.copy_for_checkpoint()
    disk = threading.Event()
    with mock.patch("os.fsync", side_effect=lambda _: disk.wait(60)), ThreadPoolExecutor() as beside:
        writing = beside.submit(worker.write_copy, folder / "meanwhile")
        train(worker, rank, config, seed=1)
        was_done = writing.done()
        disk.set()
        again = writing.result()
    worker.close()
    return was_done, records, again


def test_training_continues_while_a_copy_is_written(pool, model, tmp_path):
    config = policy_config(model("llama")[1], layout=layout(dp=2))
    first, second = tmp_path / "at once", tmp_path / "meanwhile"
    for was_done, records, again in pool.run(2, copy_and_go_on, config, tmp_path):
        assert not was_done
        assert again == records  # names, sizes and checksums
    names = sorted(p.name for p in first.iterdir())
    assert len(names) == 9  # three states and the random states of two ranks, and what they share
    assert sorted(p.name for p in second.iterdir()) == names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def with_frozen_gates(story, *args):
    """What a story reports when the first matrices of the MLPs do not learn."""
    wrap = PolicyParallel

    def frozen(config, ddp_config, module, **options):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("linear_fc1" not in name)
        return wrap(config, ddp_config, module, **options)

    with mock.patch("nemorl.megatron.model.PolicyParallel", frozen):
        return story(*args)


def save_with_frozen_gates(*args):
    return with_frozen_gates(save_in_the_middle, *args)


def continue_with_frozen_gates(*args):
    return with_frozen_gates(continue_from, *args)


def test_what_is_frozen_comes_from_the_model(pool, model, tmp_path):
    original, folder = model("llama-tied")
    config = policy_config(folder, layout=layout(tp=2))
    saved = pool.run(2, save_with_frozen_gates, config, tmp_path / "saved")
    there = policy_config(folder, layout=layout(pp=2))
    for steps, _ in pool.run(2, continue_with_frozen_gates, there, tmp_path / "saved"):
        for mine, its in zip(steps, saved[0][0], strict=True):
            assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)

    export_hf(tmp_path / "saved", tmp_path / "hf", config)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in exported.items():
        same = torch.equal(tensor, original.state_dict()[name])
        assert same == ("gate_proj" in name or "up_proj" in name), name

    # Quantized, the same weights.
    quantization = QuantizationConfig(format="int8", ignore=("*o_proj",))
    export_hf(tmp_path / "saved", tmp_path / "int8", config, quantization)
    quantized = load_file(tmp_path / "int8" / "model.safetensors")
    described = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.o_proj" in described["ignore"]
    for name, tensor in exported.items():
        if "_proj" in name and "o_proj" not in name:
            for part, values in quantize("int8", name, tensor).items():
                assert torch.equal(quantized.pop(part), values), part
        else:
            assert torch.equal(quantized.pop(name), tensor), name
    assert quantized == {}

    (error,) = pool.run(1, load_error, policy_config(folder), tmp_path / "saved")
    assert "holds no weight of decoder.layers.0.mlp.linear_fc1.weight, which was frozen" in error


def load_error(rank, world_size, rendezvous, config, folder):
    worker = start_worker(rank, world_size, rendezvous, config)
    try:
        worker.load_checkpoint(folder)
    except ValueError as error:
        return str(error)
    finally:
        worker.close()
    return None


def test_another_optimizer_or_model_is_refused(pool, model, tmp_path):
    folder = model("llama")[1]
    pool.run(1, save_untrained, policy_config(folder, optimizer=AdamConfig()), tmp_path)

    (error,) = pool.run(
        1, load_error, policy_config(folder, optimizer=SgdConfig(name="sgd", lr=0.1)), tmp_path
    )
    assert "holds the optimizer states weight, exp_avg, exp_avg_sq" in error
    assert "'sgd' requires weight, momentum_buffer" in error

    (error,) = pool.run(1, load_error, policy_config(model("llama-tied")[1]), tmp_path)
    assert (
        "is of another model: lm_head.weight is [53, 64] there and missing here; set policy.model_path"
        in error
    )

    index = json.loads((tmp_path / "policy.json").read_text())
    (Path(tmp_path) / "policy.json").write_text(json.dumps({**index, "format": 9}))
    (error,) = pool.run(1, load_error, policy_config(folder), tmp_path)
    assert "is of format 9; this version reads 2" in error
