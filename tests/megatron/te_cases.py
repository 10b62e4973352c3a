"""What a process does that imports the stand-in of Transformer Engine: see transformer_engine_stand_in."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from nemorl.config.policy import PolicyConfig
from nemorl.data.packed import PackedBatch
from nemorl.megatron import parallel
from nemorl.megatron.device import building, select_device
from nemorl.megatron.kernels import Kernels
from nemorl.megatron.model import PolicyModel
from nemorl.megatron.model_config import transformer_config
from nemorl.models.layout import policy_rank, policy_slices
from nemorl.models.megatron_names import local_name
from nemorl.models.shape import ModelShape
from tests.megatron.cases import Life, live

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
    shape, place = ModelShape.load(config.model_path), policy_rank(config.layout, rank)
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
