"""The files of a policy's training state, readable under any layout.

    policy.json                      layout, names of the states, progress of the optimizer
    <state>_<rank>.safetensors       the rank's float32 share of one state (the weights, or a moment of the
                                     optimizer): of each local parameter the run of elements that it updates
    random_<rank>.safetensors        states of the random generators
    draft_<rank>.safetensors         the head for drafts with its optimizer, of ranks that hold different rows
                                     of its output matrix, in the order of these

`TrainedWeights` describes the parameters of the writing and of the reading layout in HF coordinates (PEFT's,
for adapters), so reading is copying boxes.

Megatron's `dist_checkpointing` reads its metadata by `pickle.load`, so opening another person's checkpoint
runs their code; it forks writers inside the worker, and its distributed optimizer formats support Adam's
states only (megatron-core 0.16.1).
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nemorl.config.policy import LayoutConfig
from nemorl.errors import RunError
from nemorl.models.adapters import TrainedWeights
from nemorl.models.hf_shards import StoredTensor, whole, write_pieces
from nemorl.models.layout import PolicyRank, policy_rank
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view
from nemorl.weights.plan import Box, box_of, intersection, narrow

from .checkpoint_store import FileRecord, writing


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a file in pieces and flush it to disk; the record's checksum is of what was to be written.

    The library's `save_file` holds the interpreter's lock, which would slow the training meanwhile.
    Raises `UnwritableCheckpoint` where the disk is full or refuses the file.
    """
    stored = {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}
    with writing(path), path.open("wb") as file:
        size, digest = write_pieces(file, stored, metadata, whole(tensors))
    return FileRecord(path.name, size, digest)


INDEX = "policy.json"
FORMAT = 2
_OPEN_FILES = 64
WEIGHT = "weight"  # the state that is the float32 weights themselves


class UnfitCheckpoint(RunError, ValueError):
    """A training state of another model or format."""


@dataclass(frozen=True)
class Shard:
    """A run of elements of a local parameter, flattened: those that one data-parallel rank updates."""

    start: int
    values: Tensor  # [number of elements] float32
    is_first: bool = True  # of the ranks that update the same elements: the one that saves them


def write_state(folder: Path, state: str, rank: int, shards: Mapping[str, Shard]) -> FileRecord:
    tensors = {name: shard.values for name, shard in shards.items()}
    starts = {name: shard.start for name, shard in shards.items()}
    return write_safetensors(_state_file(folder, state, rank), tensors, {"starts": json.dumps(starts)})


def write_index(
    folder: Path, trained: TrainedWeights, layout: LayoutConfig, states: list[str], progress: dict[str, Any]
) -> None:
    index = {
        "format": FORMAT,
        "layout": layout.model_dump(),
        "tensors": trained.tensors(),
        "adapter_scale": trained.lora.scale if trained.lora else None,
        "states": states,
        "progress": progress,
    }
    with writing(folder / INDEX):
        (folder / INDEX).write_text(json.dumps(index))


class SavedState:
    """A training state on disk. Raises `UnfitCheckpoint` when it is not of this model."""

    def __init__(self, folder: Path, trained: TrainedWeights) -> None:
        self.folder = folder
        index = json.loads((folder / INDEX).read_text())
        if (found := index["format"]) != FORMAT:
            raise UnfitCheckpoint(f"{folder / INDEX} is of format {found}; this version reads {FORMAT}")
        here, there = trained.tensors(), index["tensors"]
        for name in sorted(here.keys() | there.keys()):
            if tuple(there.get(name, ())) != here.get(name, ()):
                sizes = [list(size) if size else "missing" for size in (there.get(name), here.get(name))]
                raise UnfitCheckpoint(
                    f"{folder} is of another model: {name} is {sizes[0]} there and {sizes[1]} here; set "
                    "policy.model_path, policy.lora and policy.multi_token_prediction as they were"
                )
        if trained.lora and index["adapter_scale"] != trained.lora.scale:
            raise UnfitCheckpoint(
                f"{folder} holds adapters that were trained with alpha / rank = {index['adapter_scale']:g}; "
                f"policy.lora says {trained.lora.scale:g}: set policy.lora.alpha as it was"
            )
        self.layout = LayoutConfig(**index["layout"])
        self.states: tuple[str, ...] = tuple(index["states"])
        self.progress: dict[str, Any] = index["progress"]
        # By tensor: its boxes as ranks of the writing layout held them, with the ranks that updated the
        # parameter, each a share of it; the optimizer spreads a parameter over all ranks that hold it.
        ranks_of: dict[PolicyRank, list[int]] = defaultdict(list)
        for rank in range(self.layout.world_size):
            ranks_of[policy_rank(self.layout, rank)].append(rank)
        holders: dict[TensorSlice, list[int]] = defaultdict(list)
        for place, ranks in ranks_of.items():
            for part in trained.slices(place):
                holders[part] += ranks
        self._sources: dict[str, list[tuple[TensorSlice, tuple[int, ...]]]] = defaultdict(list)
        for part, held_by in holders.items():
            self._sources[part.name].append((part, tuple(held_by)))
        self._starts = lru_cache(maxsize=None)(self._read_starts)
        # A file is opened once for the many boxes that are read from it: mapped, not in memory.
        self._open = lru_cache(maxsize=_OPEN_FILES)(self._open_file)

    def holds(self, name: str) -> bool:
        """True if a tensor was trained: what was frozen is in no checkpoint."""
        return all(
            any(part.param in self._starts(WEIGHT, rank) for rank in ranks)
            for part, ranks in self._sources[name]
        )

    def fill(self, state: str, targets: Mapping[str, Tensor], slices: Iterable[TensorSlice]) -> None:
        """Copy the boxes of one state to where `slices` say in `targets`."""
        for part in slices:
            copied: set[Box] = set()
            for source, ranks in self._sources[part.name]:
                shared = intersection(box_of(part), box_of(source))
                if shared is None or shared in copied:
                    continue
                needed = narrow(source, shared)
                held = {source.param: self._read_run(state, ranks, needed)}
                local_view(targets, narrow(part, shared)).copy_(local_view(held, replace(needed, offset=0)))
                copied.add(shared)

    def hf_shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name][0][0].shape

    def hf_box(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, float32, by Hugging Face's name or an adapter's by PEFT's."""
        values = torch.empty(box.size)
        strides = tuple(values.stride())
        part = TensorSlice(name, self.hf_shape(name), box.start, box.size, name, 0, strides)
        self.fill(WEIGHT, {name: values}, [part])
        return values

    def hf_tensor(self, name: str) -> Tensor:
        """A whole tensor, as `hf_box`."""
        extents = self.hf_shape(name)
        return self.hf_box(name, Box((0,) * len(extents), extents))

    def _read_run(self, state: str, ranks: tuple[int, ...], part: TensorSlice) -> Tensor:
        """[elements of a local parameter] from the first to the last of a slice, of the ranks' shares."""
        reach = sum((n - 1) * stride for n, stride in zip(part.size, part.strides, strict=True))
        first, end = part.offset, part.offset + reach + 1
        run: Tensor | None = None
        for rank in ranks:
            start = self._starts(state, rank).get(part.param)
            if start is None:
                continue
            share = self._open(state, rank).get_slice(part.param)
            run = torch.empty(end - first) if run is None else run
            # Copies on several tensor-parallel ranks are equal.
            low, high = max(first, start), min(end, start + share.get_shape()[0])
            if low < high:
                run[low - first : high - first] = share[low - start : high - start]
        if run is None:
            raise UnfitCheckpoint(
                f"{self.folder} holds no {state} of {part.param}, which was frozen when it was saved: train "
                "what the run began with"
            )
        return run

    def _open_file(self, state: str, rank: int) -> safe_open:
        return safe_open(_state_file(self.folder, state, rank), framework="pt")

    def _read_starts(self, state: str, rank: int) -> dict[str, int]:
        return json.loads(self._open(state, rank).metadata()["starts"])  # type: ignore[no-any-return]


def draft_file(folder: Path, rank: int) -> Path:
    return folder / f"draft_{rank:05d}.safetensors"


def read_draft(
    folder: Path, by_rows: str, rows: range, tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The head for drafts that a checkpoint holds, with the states of its optimizer, by name.

    Of the tensor `by_rows`, which the ranks divided, and of its states these rows. Raises `UnfitCheckpoint`
    if there is none, or one of other `tensors`.
    """
    found: dict[str, list[Tensor]] = defaultdict(list)
    extents: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("draft_*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                size = tuple(part.get_shape())
                if not name.endswith(by_rows):
                    extents[name], found[name] = size, [part[...]]
                    continue
                start = extents.get(name, (0,))[0]
                extents[name] = (start + size[0], *size[1:])
                low, high = max(rows.start - start, 0), min(rows.stop - start, size[0])
                found[name].append(part[low : max(low, high)])
    if not found:
        raise UnfitCheckpoint(
            f"{folder} holds no head for drafts: resume without policy.draft, or begin another run with it"
        )
    for name, size in tensors.items():
        if extents.get(name) != size:
            raise UnfitCheckpoint(
                f"{folder} holds another head for drafts: {name} is {extents.get(name, 'missing')} there and "
                f"{size} here; set policy.draft as it was"
            )
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def _state_file(folder: Path, state: str, rank: int) -> Path:
    return folder / f"{state}_{rank:05d}.safetensors"
