"""Training with rounded weights against training on a folder of weights that are rounded already."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemorl.config.policy import FullRecompute
from nemorl.config.quantization import QuantizationConfig
from nemorl.models.hf_folder import HfFolder
from nemorl.models.quantized import fold, linear_groups
from nemorl.models.registry import load_shape
from nemorl.models.tensors import local_view
from tests.megatron.cases import LOSS, partition, start_worker
from tests.megatron.examples import policy_config, ragged_batch

INT8 = QuantizationConfig(format="int8", ignore=("model.layers.1.*",), train="fake")


def rounded(folder: Path, out: Path) -> Path:
    """The model with the weights that `INT8` selects rounded."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    for name in (name for group in linear_groups(load_shape(folder), "int8", INT8.ignore) for name in group):
        tensors[name] = fold("int8", tensors[name])
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
@pytest.mark.parametrize("family", ["qwen3", "llama-tied", "gemma3"])
def test_a_step_is_that_of_rounded_weights(model, tmp_path, family, recompute):
    folder = model(family)[1]
    fields = {} if recompute is None else {"recompute": recompute}
    fake = policy_config(folder, quantization=INT8, **fields)
    plain = policy_config(rounded(folder, tmp_path / "rounded"), **fields)
    mine = one_step(folder, fake, tmp_path / "a")
    theirs = one_step(folder, plain, tmp_path / "b")
    assert mine[0] == theirs[0]
    assert mine[1].grad_norm == theirs[1].grad_norm
    assert mine[1].sums == theirs[1].sums

    _, _, own, engines, slices = mine
    groups = linear_groups(load_shape(folder), "int8", INT8.ignore)
    names = {name for group in groups for name in group}
    folders = HfFolder(folder), HfFolder(tmp_path / "rounded")
    for part in slices:
        kept, sent = (files.tensor(part.name, part.shape)[part.box] for files in folders)
        assert torch.equal(local_view(own, part), kept), part.name
        assert torch.equal(local_view(engines, part), sent), part.name
        assert torch.equal(kept, sent) != (part.name in names), part.name
