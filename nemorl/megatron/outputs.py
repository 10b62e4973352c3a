"""What the weights in place say about a batch: outputs token by token, and figures of them over all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemorl.data.packed import PackedBatch

from .collect import from_last_stage
from .micro_batch import MicroBatch
from .model import PolicyParallel
from .schedule import run_outputs, run_top
from .stats import LogprobStats, ValueStats


def batch_outputs(
    chunks: Sequence[PolicyParallel],
    batch: PackedBatch,
    made: Sequence[MicroBatch],
    wanted: Sequence[Tensor],
    *,
    temperature: float,
    device: torch.device,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the head gives [N], on the CPU, at the wanted places of each micro-batch; 0 elsewhere.

    And, of a vocabulary and if asked for, the entropies [N] likewise.
    """
    outputs = run_outputs(chunks, made, temperature, entropy=entropy)
    places = torch.cat([micro.places[mine.cpu()] for micro, mine in zip(made, wanted, strict=True)])

    def laid_out(of_micros: Sequence[Tensor]) -> Tensor:
        flat = torch.zeros(len(places), device=device)
        if of_micros:
            flat = torch.cat([of_micro[mine] for of_micro, mine in zip(of_micros, wanted, strict=True)])
        values = torch.zeros(batch.num_tokens)
        values[places] = from_last_stage(flat).cpu()
        return values

    values = laid_out([given for given, _ in outputs])
    return values, laid_out([spread for _, spread in outputs if spread is not None]) if entropy else None


def batch_top(
    chunks: Sequence[PolicyParallel],
    batch: PackedBatch,
    made: Sequence[MicroBatch],
    k: int,
    *,
    temperature: float,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Ids [N, k] int32 and logprobs [N, k] of the likeliest tokens where the mask is set, on the CPU."""
    ids = torch.zeros((batch.num_tokens, k), dtype=torch.int32)
    logprobs = torch.zeros((batch.num_tokens, k))
    outputs = run_top(chunks, made, k, temperature)
    places = torch.cat([micro.places for micro in made])
    flat_ids = torch.zeros((len(places), k), dtype=torch.int32, device=device)
    flat = torch.zeros((len(places), k), device=device)
    if outputs:
        flat_ids = torch.cat([of_micro.int() for of_micro, _ in outputs])
        flat = torch.cat([of_micro for _, of_micro in outputs])
    ids[places] = from_last_stage(flat_ids).cpu()
    logprobs[places] = from_last_stage(flat).cpu()
    return ids, logprobs


def logprob_gap(batch: PackedBatch, trainer: Tensor | None, device: torch.device) -> LogprobStats:
    """How far the engine's logprobs are from the trainer's [N], over all data-parallel ranks."""
    gaps = torch.zeros(0)
    if trainer is not None and batch.logprobs is not None:
        gaps = (trainer - batch.logprobs)[batch.loss_mask].abs()
    sums = torch.tensor([gaps.double().sum(), batch.loss_mask.sum()], dtype=torch.float64, device=device)
    largest = torch.tensor([gaps.max() if len(gaps) else 0.0], device=device)
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(sums, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total, count = sums.tolist()
    return LogprobStats(total / max(count, 1.0), float(largest), int(count))


def value_figures(batch: PackedBatch, device: torch.device) -> ValueStats:
    """The mean of `values` where the loss mask is set, over all data-parallel ranks."""
    assert batch.values is not None
    mask = batch.loss_mask
    sums = torch.stack((batch.values[mask].double().sum(), mask.sum().double())).to(device)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    total, count = sums.tolist()
    return ValueStats(total / max(count, 1.0), int(count))
