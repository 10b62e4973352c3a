"""Bringing figures and logprobs from where they arise to all ranks of the policy."""

import json
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemorl.data.losses import LossOutput


def global_figures(
    outputs: list[LossOutput], device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima of the loss's metrics over micro-batches, data-parallel ranks and stages.

    Only ranks of the last stage have outputs; all ranks get the same figures.
    """
    figures: dict[str, dict[str, float]] = {}
    if parallel_state.is_pipeline_last_stage():
        sums = _over_data_parallel([o.sums for o in outputs], torch.sum, dist.ReduceOp.SUM)
        maxima = _over_data_parallel([o.maxima for o in outputs], torch.amax, dist.ReduceOp.MAX)
        figures = {"sums": sums, "maxima": maxima}
    figures = _broadcast_json(figures, device)
    return figures["sums"], figures["maxima"]


def over_data_parallel(values: Tensor, device: torch.device) -> Tensor:
    """Values [n] of the data-parallel ranks, which may have differently many, end to end; on the CPU."""
    group = parallel_state.get_data_parallel_group()
    counts = torch.zeros(group.size(), dtype=torch.int64, device=device)
    counts[group.rank()] = len(values)
    dist.all_reduce(counts, group=group)
    padded = values.new_zeros(int(counts.max()), device=device)
    padded[: len(values)] = values.to(device)
    gathered = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(gathered, counts.tolist(), strict=True)]).cpu()


def from_last_stage(values: Tensor) -> Tensor:
    """The last pipeline stage's tensor on all its stages; the others pass a tensor of the same shape."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, source, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def _over_data_parallel(
    figures: list[dict[str, Tensor]], reduce: Any, op: dist.ReduceOp.RedOpType
) -> dict[str, float]:
    names = sorted(figures[0])
    if not names:
        return {}
    values = reduce(torch.stack([torch.stack([f[name].double() for name in names]) for f in figures]), dim=0)
    dist.all_reduce(values, op=op, group=parallel_state.get_data_parallel_group())
    return dict(zip(names, values.tolist(), strict=True))


def _broadcast_json(value: Any, device: torch.device) -> Any:
    """A JSON value of the last stage on all stages; `broadcast_object_list` would pickle it."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    text = bytearray(json.dumps(value), "utf-8")
    length = from_last_stage(torch.tensor([len(text)], device=device))
    if parallel_state.is_pipeline_last_stage():
        encoded = torch.frombuffer(text, dtype=torch.uint8).to(device)
    else:
        encoded = torch.empty(int(length), dtype=torch.uint8, device=device)
    return json.loads(bytes(from_last_stage(encoded).tolist()))
