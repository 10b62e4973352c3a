"""What the processes of the pool do: a policy worker's life under one layout, reported in plain values."""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm import KLConfig
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.config.generation import SamplingConfig
from nemorl.config.policy import LayoutConfig, PolicyConfig
from nemorl.data.losses import LogprobStats, TrainStats
from nemorl.data.packed import PackedBatch
from nemorl.data.trained import Trained
from nemorl.megatron import model, parallel
from nemorl.megatron.device import select_device
from nemorl.megatron.worker import PolicyWorker

LOSS = PolicyLoss(ClipLossConfig(), KLConfig(coefficient=0.05), entropy_coefficient=0.01)
LOSS_WITHOUT_REFERENCE = PolicyLoss(ClipLossConfig(), KLConfig())


@dataclass(frozen=True)
class Life:
    """What one rank saw."""

    gap: LogprobStats
    logprobs: Tensor  # [N] of this data-parallel rank
    steps: list[TrainStats]


def imported(rank: int, world_size: int, rendezvous: str) -> None:
    """Only what finding this function takes: the imports of its module, Megatron among them.

    The garbage collector leaves them out from here on: the pool collects after every call.
    """
    gc.freeze()


def num_threads(name: str) -> int:
    """Of this process, by the name that the kernel has of them."""
    return [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")].count(name)


def start_worker(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    temperature: float = 1.0,
    **options: Any,
) -> PolicyWorker:
    """A worker on one thread with its weights and a reference loaded."""
    worker = PolicyWorker(
        config,
        rank=rank,
        world_size=world_size,
        rendezvous=rendezvous,
        device="cpu",
        threads=1,
        temperature=temperature,
        keep_reference=True,
        deadline_seconds=30,
        **options,
    )
    worker.load_hf(config.model_path)
    return worker


def meet(rank: int, world_size: int, _rendezvous: str, address: str, late_seconds: float) -> float:
    """The number of ranks that have met at a store, the last one later than a collective may take."""
    select_device("cpu", rank)
    if rank == world_size - 1:
        time.sleep(late_seconds)
    parallel.join(
        LayoutConfig(data_parallel_size=world_size),
        rank=rank,
        world_size=world_size,
        rendezvous=f"tcp://{address}/late",
        device="cpu",
        deadline_seconds=late_seconds / 2,
    )
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    parallel.leave()
    return ranks.item()


def share(batch: PackedBatch, rank: int, config: PolicyConfig) -> PackedBatch:
    """The sequences of a rank's data-parallel copy, in Megatron's rank order tp, cp, dp, pp."""
    layout = config.layout
    sharing = layout.tensor_parallel_size * layout.context_parallel_size
    copy = rank // sharing % layout.data_parallel_size
    return batch.select(list(range(copy, batch.num_sequences, layout.data_parallel_size)))


def partition(num_sequences: int, per_micro_batch: int) -> list[list[int]]:
    """Neighboring sequences together."""
    return [
        list(range(start, min(start + per_micro_batch, num_sequences)))
        for start in range(0, num_sequences, per_micro_batch)
    ]


def assert_moved(
    policy: PolicyWorker, before: torch.nn.Module, gradients: Mapping[str, Tensor], atol: float = 1e-6
) -> None:
    """Weights are those of `before` less the gradients, as after a step of SGD with rate 1."""
    weights, parameters = before.state_dict(), policy.parameters()
    for part in policy.slices():
        mine = parameters[part.param]
        mine = mine.as_strided(part.size, part.strides, mine.storage_offset() + part.offset)
        box = tuple(slice(s, s + n) for s, n in zip(part.start, part.size, strict=True))
        moved, gradient = weights[part.name][box] - mine, gradients[part.name][box]
        torch.testing.assert_close(moved, gradient, atol=atol, rtol=1e-6)


def live(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    batches: Sequence[PackedBatch],
    per_micro_batch: int,
    filters: SamplingConfig | None = None,
) -> Life:
    """One optimizer step on each batch."""
    worker = start_worker(rank, world_size, rendezvous, config, filters=filters)
    steps: list[TrainStats] = []
    for batch in batches:
        mine = share(batch, rank, config)
        micro_batches = partition(mine.num_sequences, per_micro_batch)
        worker.load_batch(mine)
        gap = worker.compute_logprobs(micro_batches, old=True, reference=True)
        if not steps:
            first = gap, worker.batch.old_logprobs
        steps.append(worker.train(micro_batches, LOSS))
    worker.close()
    return Life(*first, steps)


def updates(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    batch: PackedBatch,
    per_micro_batch: int,
    losses: Sequence[PolicyLoss],
) -> list[TrainStats]:
    """One batch learned from several times, each time by another loss; all but the first are off policy."""
    worker = start_worker(rank, world_size, rendezvous, config)
    mine = share(batch, rank, config)
    micro_batches = partition(mine.num_sequences, per_micro_batch)
    worker.load_batch(mine)
    worker.compute_logprobs(micro_batches, old=True, reference=True, entropy=True)
    steps = [worker.train(micro_batches, loss) for loss in losses]
    worker.close()
    return steps


def weights_after_steps(
    rank: int,
    world_size: int,
    rendezvous: str,
    config: PolicyConfig,
    batch: PackedBatch,
    per_micro_batch: int,
    overlaps: bool,
) -> dict[str, Tensor]:
    """Of a rank, after three steps in which gradients are reduced during the backward pass, or after it.

    Buckets are so small that there are several.
    """
    model.overlaps_reductions = lambda: overlaps
    buckets = model.distributed.DistributedDataParallelConfig
    model.distributed.DistributedDataParallelConfig = partial(buckets, bucket_size=5000)
    try:
        worker = start_worker(rank, world_size, rendezvous, config)
    finally:
        model.distributed.DistributedDataParallelConfig = buckets
    mine = share(batch, rank, config)
    micro_batches = partition(mine.num_sequences, per_micro_batch)
    worker.load_batch(mine)
    worker.compute_logprobs(micro_batches, old=True, reference=True)
    for _ in range(3):
        worker.train(micro_batches, LOSS)
    if worker._place.pp_rank == 0:  # later stages, which wait less, have one bucket
        found = [len(chunk.bucket_groups) for chunk in worker._chunks]
        assert not overlaps or min(found) > 2, found
    weights = {name: values.clone() for name, values in worker.parameters().items()}
    worker.close()
    return weights


def recorded(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig, batch: PackedBatch, folder: Path
) -> tuple[PackedBatch, Tensor, list[Trained]]:
    """Train on two minibatches and record all sequences; the rank's batch and its logprobs before.

    Sequences are named by data-parallel rank and number.
    """
    worker = start_worker(rank, world_size, rendezvous, config)
    mine = share(batch, rank, config)
    worker.load_batch(mine)
    halves = partition(mine.num_sequences, -(-mine.num_sequences // 2))
    worker.compute_logprobs([[number] for half in halves for number in half], old=True, reference=False)
    before = worker.batch.old_logprobs
    assert before is not None
    worker.load_batch(mine)
    for half in halves:
        worker.train([[number] for number in half], LOSS_WITHOUT_REFERENCE, keep=True)
    sharing = config.layout.tensor_parallel_size * config.layout.context_parallel_size
    copy, of_copy = divmod(rank, sharing)
    writes = not of_copy and copy < config.layout.data_parallel_size  # in the first stage
    names = {number: f"{copy}/{number}" for number in range(mine.num_sequences) if writes}
    trained, problem = worker.record(names, folder, 7)
    assert not problem, problem
    worker.close()
    return mine, before, trained
