"""An optimizer in host memory takes the steps of one on the device, and leaves the device its memory."""

import gc
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from nemorl.config.policy import AdamConfig, LoraConfig, PolicyConfig
from nemorl.data.losses import TrainStats
from nemorl.megatron import inner_optimizer
from nemorl.megatron.device import DeviceKind
from nemorl.megatron.inner_optimizer import HostAdam
from tests.megatron.cases import LOSS, partition, share, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch

ADAM = AdamConfig(lr=3e-3, weight_decay=0.1, beta2=0.99)
ON_HOST = ADAM.model_copy(update={"on_host": True})
CLIPPED = 0.1  # below every norm


def steps_of(kind: DeviceKind) -> tuple[list[Tensor], list[Tensor]]:
    """Three steps of shards of bfloat16 weights, and their float32 ones."""
    torch.manual_seed(0)
    params = [torch.randn(length).bfloat16() for length in (7, 100, 33)]
    adam = HostAdam(ADAM, kind)
    adam.param_groups = [{**adam.defaults, "params": params}]
    for param in params:
        adam.allocate(param)
    for _ in range(3):
        for param in params:
            param.decoupled_grad = torch.randn(param.shape)
        adam.step()
    return params, [adam.state[param]["weight"] for param in params]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_its_steps_are_torchs(monkeypatch: pytest.MonkeyPatch, kind: DeviceKind) -> None:
    """By way of the buffers that are between it and a GPU too, which are not pinned here."""
    monkeypatch.setattr(inner_optimizer, "host_buffer", lambda _, like: torch.empty_like(like))
    monkeypatch.setattr(inner_optimizer, "finish_copies", lambda _: None)
    torch.manual_seed(0)
    mains = [torch.randn(length).bfloat16().float().requires_grad_() for length in (7, 100, 33)]
    torchs = torch.optim.AdamW(
        mains, ADAM.lr, (ADAM.beta1, ADAM.beta2), ADAM.eps, ADAM.weight_decay, fused=True
    )
    for _ in range(3):
        for main in mains:
            main.grad = torch.randn(main.shape)
        torchs.step()

    params, weights = steps_of(kind)

    for param, weight, main in zip(params, weights, mains, strict=True):
        assert torch.equal(weight, main)
        assert torch.equal(param, main.bfloat16())


@dataclass(frozen=True)
class End:
    """Where a rank arrived, and what it held on the way."""

    steps: list[TrainStats]
    states: dict[str, Tensor]
    num_bytes: int  # of all tensors but those of a HostAdam


def five_steps(rank: int, world_size: int, rendezvous: str, config: PolicyConfig) -> End:
    """A step on each of five batches."""
    before = sum(storages().values())
    worker = start_worker(rank, world_size, rendezvous, config)
    steps = []
    for seed in range(5):
        batch = share(ragged_batch(seed=seed), rank, config)
        micro_batches = partition(batch.num_sequences, 3)
        worker.load_batch(batch)
        worker.compute_logprobs(micro_batches, old=True, reference=True)
        steps.append(worker.train(micro_batches, LOSS))
    inner = [one.optimizer for one in worker.optimizer.megatron.chained_optimizers]
    hosted = {
        tensor.untyped_storage().data_ptr()
        for optimizer in inner
        if isinstance(optimizer, HostAdam)
        for state in optimizer.state.values()
        for tensor in state.values()
    }
    held = sum(size for address, size in storages().items() if address not in hosted) - before
    states = {f"model {name}": weight.detach().clone() for name, weight in worker.parameters().items()}
    for state in worker.optimizer.state_names:
        shards = worker.optimizer.shards(state)
        states |= {f"{state} {name}": shard.values.detach().clone() for name, shard in shards.items()}
    worker.close()
    return End(steps, states, held)


def storages() -> dict[int, int]:
    """Bytes behind every tensor of this process, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # No tensors without memory, which other tests may have left in the process.
        if type(thing) in (Tensor, Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.parametrize(
    ("family", "world_size", "fields", "saved"),
    [
        # A process on its own holds Adam's moments of every parameter, and in bfloat16 float32 weights.
        ("llama-tied", 1, {"precision": "float32"}, 8),
        ("llama-tied", 1, {"precision": "bfloat16"}, 12),
        ("qwen3", 2, {"precision": "bfloat16", "layout": layout(dp=2)}, 6),
        ("qwen3-moe", 2, {"precision": "float32", "layout": layout(dp=2, ep=2)}, None),
        ("llama", 1, {"precision": "bfloat16", "lora": LoraConfig(rank=4, alpha=8)}, None),
    ],
)
def test_five_steps_are_those_of_adam_on_the_device(pool, model, family, world_size, fields, saved):
    reference, folder = model(family)
    configs = [
        policy_config(folder, optimizer=optimizer, max_grad_norm=CLIPPED, **fields)
        for optimizer in (ADAM, ON_HOST)
    ]

    on_device, on_host = (pool.run(world_size, five_steps, config) for config in configs)

    for there, here in zip(on_device, on_host, strict=True):
        assert all(step.grad_norm > CLIPPED for step in there.steps)
        assert here.steps == there.steps
        assert here.states.keys() == there.states.keys()
        assert all(torch.equal(here.states[name], there.states[name]) for name in there.states)
        if saved is not None:
            num_parameters = sum(p.numel() for p in reference.parameters())
            assert there.num_bytes - here.num_bytes == pytest.approx(saved * num_parameters, rel=0.02)
