"""The policy's weights as a Hugging Face folder, gathered tensor by tensor to rank 0."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.models.hf_writer import HfFolderWriter
from nemorl.models.local_view import local_view
from nemorl.models.slices import TensorSlice


@dataclass(frozen=True)
class HeldBox:
    """A box of an HF tensor and the one rank that gives it."""

    rank: int
    part: TensorSlice


def boxes_by_tensor(ranks: Sequence[Sequence[TensorSlice]]) -> dict[str, list[HeldBox]]:
    """For every HF tensor its boxes, each once: copies, such as those of data parallelism, are left out."""
    found: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], HeldBox]] = {}
    for rank, parts in enumerate(ranks):
        for part in parts:
            found.setdefault(part.name, {}).setdefault((part.start, part.size), HeldBox(rank, part))
    return {name: list(boxes.values()) for name, boxes in found.items()}


def export_hf(
    out: Path,
    source: Path,
    ranks: Sequence[Sequence[TensorSlice]],
    parameters: Mapping[str, Tensor],
) -> None:
    """Write `out` with config and tokenizer of `source`; every rank of the default group calls it.

    `ranks` describes what each rank holds. Rank 0 needs memory for the largest tensor and one output file.
    """
    first = dist.get_rank() == 0
    with HfFolderWriter(out, source) if first else nullcontext() as writer:
        for name, tensor in _whole_tensors(ranks, parameters):
            if writer is not None:
                writer.add(name, tensor)


def _whole_tensors(
    ranks: Sequence[Sequence[TensorSlice]], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor in turn, whole on rank 0 and empty elsewhere."""
    rank = dist.get_rank()
    any_parameter = next(iter(parameters.values()))
    for name, boxes in boxes_by_tensor(ranks).items():
        whole = torch.empty(boxes[0].part.shape if rank == 0 else 0, dtype=any_parameter.dtype)
        for box in boxes:
            if rank not in (0, box.rank):
                continue
            part = box.part
            if rank == box.rank:
                data = local_view(parameters, part).contiguous()
                if rank != 0:
                    dist.send(data, dst=0)
                    continue
            else:
                data = any_parameter.new_empty(part.size)
                dist.recv(data, src=box.rank)
            place = tuple(slice(s, s + n) for s, n in zip(part.start, part.size, strict=True))
            whole[place] = data.cpu()
        yield name, whole
