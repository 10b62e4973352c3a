"""A policy that leaves its device and comes back is the policy that it was."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from nemorl.config.policy import AdamConfig, DraftHeadConfig, OffloadConfig, PolicyConfig, SgdConfig
from nemorl.data.losses import TrainStats
from nemorl.megatron.worker import PolicyWorker
from tests.megatron.cases import LOSS, partition, share, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch

BOTH = OffloadConfig(weights=True, optimizer=True)
ON_HOST = AdamConfig(lr=3e-3, on_host=True)
BATCHES = [ragged_batch(seed=seed) for seed in (1, 2, 3)]


@dataclass(frozen=True)
class End:
    """Where a rank arrived."""

    steps: list[TrainStats]
    states: dict[str, Tensor]
    num_bytes: list[int]  # that each `offload` gave the device


def three_steps(rank: int, world_size: int, rendezvous: str, config: PolicyConfig, leaves: bool) -> End:
    """Logprobs and a step on each batch, with or without leaving the device before each."""
    worker = start_worker(rank, world_size, rendezvous, config)
    steps, num_bytes = [], []
    for batch in BATCHES:
        if leaves:
            num_bytes.append(worker.offload())
            worker.onload()
        mine = share(batch, rank, config)
        micro_batches = partition(mine.num_sequences, 3)
        worker.load_batch(mine)
        worker.compute_logprobs(micro_batches, old=True, reference=True)
        steps.append(worker.train(micro_batches, LOSS))
    states = {f"weight {name}": weight.detach().clone() for name, weight in worker.parameters().items()}
    for state in worker.optimizer.state_names:
        shards = worker.optimizer.shards(state)
        states |= {f"{state} {name}": shard.values.detach().clone() for name, shard in shards.items()}
    worker.close()
    return End(steps, states, num_bytes)


@pytest.mark.parametrize(
    ("family", "world_size", "fields"),
    [
        ("llama", 1, {"offload": BOTH}),
        ("llama-tied", 1, {"offload": BOTH, "optimizer": SgdConfig(name="sgd", lr=0.1)}),
        ("qwen3", 2, {"offload": BOTH, "precision": "bfloat16", "layout": layout(dp=2)}),
        ("qwen3", 1, {"offload": OffloadConfig(weights=True), "precision": "bfloat16"}),
        ("qwen3", 1, {"offload": OffloadConfig(optimizer=True), "precision": "bfloat16"}),
        ("llama", 1, {"offload": OffloadConfig(optimizer=True)}),
        ("qwen3-moe", 2, {"offload": BOTH, "layout": layout(dp=2, ep=2)}),
        ("qwen3", 1, {"offload": BOTH, "precision": "bfloat16", "optimizer": ON_HOST}),
        ("qwen3", 1, {"offload": BOTH, "precision": "bfloat16", "draft": DraftHeadConfig(lr=3e-3)}),
    ],
)
def test_training_continues_to_the_bit(pool, model, family, world_size, fields):
    config = policy_config(model(family)[1], **{"optimizer": AdamConfig(lr=3e-3), **fields})

    stayed = pool.run(world_size, three_steps, config, False)
    left = pool.run(world_size, three_steps, config, True)

    for before, after in zip(stayed, left, strict=True):
        assert after.steps == before.steps
        assert after.states.keys() == before.states.keys()
        assert all(torch.equal(after.states[name], before.states[name]) for name in before.states)


def read_while_away(rank: int, world_size: int, rendezvous: str, config: PolicyConfig) -> list[str]:
    """What each use of the policy answers."""
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_batch(BATCHES[0])
    worker.offload()
    answers = []
    for use in (
        worker.offload,
        worker.parameters,
        lambda: worker.compute_logprobs([[0]], old=True, reference=False),
        lambda: worker.train([[0]], LOSS),
        lambda: worker.save_checkpoint(Path("/nowhere")),
        worker.copy_for_checkpoint,
    ):
        with pytest.raises(RuntimeError) as refusal:
            use()
        answers.append(str(refusal.value))
    worker.close()
    return answers


def test_what_is_away_cannot_be_used(pool, model):
    config = policy_config(model("llama")[1], offload=BOTH)

    (answers,) = pool.run(1, read_while_away, config)

    assert answers == ["the policy has left its device to generation: call onload first"] * 6


PARAMETERS = 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


@pytest.mark.parametrize(
    ("offload", "optimizer", "bytes_per_parameter"),
    [
        # Two bytes of weight and two of the reference's.
        (OffloadConfig(weights=True), AdamConfig(), 4),
        # A gradient, a weight and Adam's two moments in float32.
        (OffloadConfig(optimizer=True), AdamConfig(), 16),
        (BOTH, AdamConfig(), 20),
        (OffloadConfig(), AdamConfig(), 0),
        # Of these the device has the gradient only.
        (BOTH, ON_HOST, 8),
    ],
)
def test_what_the_device_gets(pool, tmp_path, offload, optimizer, bytes_per_parameter):
    llama(tmp_path, vocabulary=1000, hidden=64, layers=2)
    config = policy_config(tmp_path, offload=offload, precision="bfloat16", optimizer=optimizer)

    (end,) = pool.run(1, three_steps, config, True)

    # Megatron pads what lies in its buffers.
    assert end.num_bytes == pytest.approx([PARAMETERS * bytes_per_parameter] * 3, rel=0.01)


def llama(folder: Path, *, vocabulary: int, hidden: int, layers: int) -> int:
    """Write a tied random model; the number of its parameters."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def resident_bytes() -> int:
    """Memory of this process that is in RAM, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure(rank: int, world_size: int, rendezvous: str, config: PolicyConfig) -> tuple[int, int, int]:
    """Resident memory before, during and after an absence."""
    worker: PolicyWorker = start_worker(rank, world_size, rendezvous, config)
    # Pages that no one has written to are not in memory yet.
    worker.optimizer.zero_grad()
    for state in worker.optimizer.state_names:
        for shard in worker.optimizer.shards(state).values():
            shard.values.detach().add_(0)
    before = resident_bytes()
    worker.offload()
    during = resident_bytes()
    worker.onload()
    after = resident_bytes()
    worker.close()
    return before, during, after


def test_memory_that_a_cpu_gets_back(pool, tmp_path):
    """Weights and states move to the same memory there, but the gradients are gone: 4 bytes a parameter."""
    num_parameters = llama(tmp_path, vocabulary=80_000, hidden=256, layers=4)
    config = policy_config(tmp_path, offload=BOTH, max_sequence_length=64)

    ((before, during, after),) = pool.run(1, measure, config)

    assert before - during > 0.95 * 4 * num_parameters
    assert after - during > 0.95 * 4 * num_parameters
