"""What a process does that imports a stand-in: see transformer_engine_stand_in and apex_stand_in."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from nemorl.config.policy import PolicyConfig
from nemorl.data.losses import TrainStats
from nemorl.data.packed import PackedBatch
from nemorl.megatron import parallel
from nemorl.megatron.device import building, select_device
from nemorl.megatron.kernels import Kernels
from nemorl.megatron.model import PolicyModel, local_name, transformer_config
from nemorl.models.layout import policy_rank, policy_slices
from nemorl.models.registry import load_shape
from tests.megatron.cases import Life, live, start_worker
from tests.megatron.test_checkpoint import train

LOCAL, TRANSFORMER_ENGINE = Kernels(), Kernels(layers="transformer_engine")
Parameters = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Names:
    """Parameters of one rank by name, with their shapes."""

    local: Parameters  # of Megatron's local layers
    transformer_engine: Parameters  # of its Transformer Engine layers, as it calls them
    mapped: set[str]  # what the family's rules put into parameters
    unmarked: list[str]  # shards of tensor parallelism that are not marked as such for the gradient norm


def names_of_rank(_: int, __: int, ___: str, config: PolicyConfig, rank: int) -> Names:
    """Both models of one rank of a layout, built without the other ranks."""
    shape, place = load_shape(config.model_path), policy_rank(config.layout, rank)
    select_device("cpu", rank)
    with alone(config, rank), building("cpu"):
        local, engine = (
            PolicyModel(transformer_config(shape, config, "cpu", kernels), shape, config, chunk=0)
            for kernels in (LOCAL, TRANSFORMER_ENGINE)
        )
    marks = {name: getattr(p, "tensor_model_parallel", False) for name, p in local.named_parameters()}
    return Names(
        shapes(local),
        shapes(engine),
        {part.param for part in policy_slices(shape, place)},
        [
            name
            for name, parameter in engine.named_parameters()
            if marks[local_name(name)] and not getattr(parameter, "tensor_model_parallel", False)
        ],
    )


def shapes(model: PolicyModel) -> Parameters:
    return {name: tuple(weight.shape) for name, weight in model.weights().items()}


@contextmanager
def alone(config: PolicyConfig, rank: int) -> Iterator[None]:
    """Groups of a layout in which this process is one rank and the others do not exist."""
    init = dist.init_process_group

    def pretend(*_: object, rank: int, world_size: int, **__: object) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    with mock.patch.object(dist, "init_process_group", pretend):
        parallel.join(
            config.layout,
            rank=rank,
            world_size=config.layout.world_size,
            rendezvous="file:///",
            device="cpu",
            deadline_seconds=30,
        )
    try:
        yield
    finally:
        parallel.leave()


@dataclass(frozen=True)
class Resumed:
    """Two steps, and two more by the process that took them and by one that began with its checkpoint."""

    first: list[TrainStats]
    went_on: list[TrainStats]
    resumed: list[TrainStats]
    adams: set[str]  # classes of the inner optimizers
    offloaded: list[int]  # bytes
    states: dict[str, list[torch.dtype]]  # types of the optimizer's states as they are held
    changed: list[str]  # weights that are others where the run was resumed


def resume_with_fused_adam(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig, folder: Path
) -> Resumed:
    """With the library's Adam, which Megatron would not take on a CPU."""
    select_device("cpu", rank)
    with mock.patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False):
        worker = start_worker(rank, world_size, rendezvous, config)
        first = [train(worker, rank, config, seed) for seed in (0, 1)]
        offloaded = [worker.offload()]
        worker.onload()
        worker.save_checkpoint(folder)
        went_on = [train(worker, rank, config, seed) for seed in (2, 3)]
        weights = {name: weight.clone() for name, weight in worker.parameters().items()}
        worker.close()

        worker = start_worker(rank, world_size, f"{rendezvous}-again", config)
        worker.load_checkpoint(folder)
        resumed = [train(worker, rank, config, seed) for seed in (2, 3)]
        inner = [one.optimizer for one in worker.optimizer.megatron.chained_optimizers]
        states = {
            name: sorted({getattr(s[name], "_data", s[name]).dtype for s in adam.state.values()}, key=str)
            for adam in inner
            for name in ("master_param", "exp_avg", "exp_avg_sq")
        }
        again = worker.parameters()
        worker.close()
    return Resumed(
        first,
        went_on,
        resumed,
        {type(adam).__module__ for adam in inner},
        offloaded,
        states,
        [name for name, weight in weights.items() if not torch.equal(again[name], weight)],
    )


def live_with(
    rank: int,
    world_size: int,
    rendezvous: str,
    kernels: Kernels,
    config: PolicyConfig,
    batches: Sequence[PackedBatch],
) -> Life:
    """`live` with kernels that a CPU would not be given."""
    with mock.patch("nemorl.megatron.worker.choose", return_value=kernels):
        return live(rank, world_size, rendezvous, config, batches, 3)


def live_with_its_adam(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    batches: Sequence[PackedBatch],
) -> tuple[str, Life]:
    """`live` with the Adam that Megatron imported, which a CPU would not be given, and its module."""
    select_device("cpu", rank)
    with mock.patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False):
        lived = live(rank, world_size, rendezvous, config, batches, 3)
    return megatron_optimizer.Adam.__module__, lived
