"""Activations that wait in host memory give the same gradients to the bit."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nemorl.config.policy import (
    ActivationOffloadConfig,
    FullRecompute,
    NoRecompute,
    PolicyConfig,
    SelectiveRecompute,
)
from nemorl.data.losses import TrainStats
from nemorl.megatron.activation_offload import saves_weights
from tests.megatron.cases import LOSS, partition, share, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch

BATCHES = [ragged_batch(seed=seed) for seed in (1, 2)]
FULL = FullRecompute(name="full")
SELECTIVE = SelectiveRecompute(name="selective", modules=("core_attn", "layernorm", "mlp"))


@dataclass(frozen=True)
class End:
    """Where a rank arrived after two steps."""

    steps: list[TrainStats]
    gradients: list[Tensor]  # of the last step
    weights: dict[str, Tensor]
    host_bytes: list[int]  # after each step
    left: int  # of the rank's tensors, that are on the host without anything that waits for them


def two_steps(rank: int, world_size: int, rendezvous: str, config: PolicyConfig, per_micro_batch: int) -> End:
    worker = start_worker(rank, world_size, rendezvous, config)
    steps, host_bytes = [], []
    for batch in BATCHES:
        mine = share(batch, rank, config)
        micro_batches = partition(mine.num_sequences, per_micro_batch)
        worker.load_batch(mine)
        worker.compute_logprobs(micro_batches, old=True, reference=True)
        steps.append(worker.train(micro_batches, LOSS))
        host_bytes.append(worker.activations.buffers.num_bytes if worker.activations else 0)
    buffers = [b for chunk in worker._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = [buffer.grad_data.clone() for buffer in buffers]
    weights = {name: values.clone() for name, values in worker.parameters().items()}
    free = 0
    if worker.activations is not None:
        free = sum(map(len, worker.activations.buffers._free))
    left = host_bytes[-1] - free
    worker.close()
    return End(steps, gradients, weights, host_bytes, left)


CASES = {
    "one process": ("llama", {}, 2),
    "more layers than there are": ("llama", {}, 9),
    "full": ("llama", {"recompute": FULL}, 3),
    "full, two layers at a time": ("llama", {"recompute": FullRecompute(name="full", num_layers=2)}, 2),
    "block": ("llama", {"recompute": FullRecompute(name="full", method="block", num_layers=2)}, 3),
    "selective": ("qwen3", {"recompute": SELECTIVE}, 3),
    "TP2-SP": ("llama", {"layout": layout(tp=2, sp=True)}, 2),
    "PP2": ("llama-tied", {"layout": layout(pp=2)}, 1),
    "PP2, all layers": ("llama", {"layout": layout(pp=2), "recompute": FULL}, 2),
    "PP2-VPP2": ("llama", {"layout": layout(pp=2, vpp=2)}, 1),
    "experts": ("qwen3-moe", {"layout": layout(dp=2, ep=2)}, 3),
    "latent attention": (
        "deepseek-v3",
        {"recompute": SelectiveRecompute(name="selective", modules=("mla_up_proj", "moe"))},
        3,
    ),
    "bfloat16": ("gemma3", {"precision": "bfloat16"}, 3),
}


_LONGER = ("TP2-SP", "latent attention", "bfloat16", "block")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci) if name in _LONGER else name for name in CASES]
)
def test_gradients_are_the_same_to_the_bit(pool, model, name):
    family, fields, layers = CASES[name]
    kept = policy_config(model(family)[1], **fields)
    left = kept.model_copy(update={"offload_activations": ActivationOffloadConfig(layers=layers)})
    world = kept.layout.world_size

    for before, after in zip(
        pool.run(world, two_steps, kept, 1), pool.run(world, two_steps, left, 1), strict=True
    ):
        assert after.steps == before.steps
        assert all(map(torch.equal, after.gradients, before.gradients))
        assert all(torch.equal(after.weights[name], before.weights[name]) for name in before.weights)
        assert after.host_bytes[0] > 0 == before.host_bytes[0]
        # Buffers are used again, and nothing is left in one. Experts get other numbers of tokens.
        assert after.host_bytes[1] < 1.05 * after.host_bytes[0]
        assert after.left == 0


@pytest.mark.parametrize(
    ("recompute", "layers", "expected"),
    [
        (NoRecompute(), 0, False),
        (NoRecompute(), 1, True),
        (SELECTIVE, 1, True),
        (FULL, 4, False),
        (FullRecompute(name="full", method="block", num_layers=3), 2, False),
        # The layer behind the last offloaded one is not computed again.
        (FullRecompute(name="full", method="block", num_layers=3), 3, True),
    ],
)
def test_weights_are_saved_unless_only_inputs_are(tmp_path, recompute, layers, expected):
    """The hooks give a backward pass another tensor than the parameter: no kernel may look for it there."""
    offload = ActivationOffloadConfig(layers=layers) if layers else None
    policy = policy_config(tmp_path, recompute=recompute, offload_activations=offload)
    assert saves_weights(policy) == expected
