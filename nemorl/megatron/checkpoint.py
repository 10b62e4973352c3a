"""Saving and loading one rank's training state: weights, optimizer, schedule, random generators.

Saving is a snapshot and its writing. The snapshot of a running training is a copy in host memory, which
another thread writes while the next steps go on.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from nemorl.config.policy import LayoutConfig
from nemorl.models.adapters import TrainedWeights
from nemorl.models.slices import TensorSlice

from .checkpoint_files import WEIGHT, SavedState, Shard, write_index, write_state
from .checkpoint_store import FileRecord, writing
from .device import DeviceKind, finish_copies, host_buffer, random_states, restore_random_states
from .optimizer import OptimizerProgress, PolicyOptimizer
from .safetensors_file import write_safetensors


@dataclass(frozen=True)
class Snapshot:
    """All that one rank adds to a checkpoint."""

    states: Mapping[str, Mapping[str, Shard]]  # by state (weights, moments) and parameter
    random: Mapping[str, Tensor]
    progress: OptimizerProgress

    @classmethod
    def of(cls, optimizer: PolicyOptimizer, device: DeviceKind) -> "Snapshot":
        """Of the tensors themselves, valid until the next step."""
        states = {
            state: {name: s for name, s in optimizer.shards(state).items() if optimizer.saves(name)}
            for state in optimizer.state_names
        }
        return cls(states, random_states(device), replace(optimizer.progress))


class SnapshotCopier:
    """Copies snapshots aside, into memory that it keeps: fresh memory would cost more than the copying."""

    def __init__(self, device: DeviceKind) -> None:
        self._device = device
        self._buffers: dict[tuple[str, str], Tensor] = {}  # by state and parameter

    @torch.no_grad()
    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The same in host memory, valid until the next copy."""
        states = {
            state: {
                name: replace(shard, values=self._copied(state, name, shard.values))
                for name, shard in shards.items()
            }
            for state, shards in snapshot.states.items()
        }
        finish_copies(self._device)
        return replace(snapshot, states=states)

    def _copied(self, state: str, name: str, values: Tensor) -> Tensor:
        key = state, name
        if key not in self._buffers:
            self._buffers[key] = host_buffer(self._device, values)
        return self._buffers[key].copy_(values, non_blocking=True)


def save(
    folder: Path, snapshot: Snapshot, *, rank: int, trained: TrainedWeights, layout: LayoutConfig
) -> tuple[FileRecord, ...]:
    """Write this rank's files; rank 0 also writes what all ranks share. Touches nothing of the training.

    Raises `UnwritableCheckpoint` naming the file.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    records = [write_state(folder, state, rank, shards) for state, shards in snapshot.states.items()]
    records.append(write_safetensors(_random_file(folder, rank), snapshot.random, {}))
    if rank == 0:
        write_index(folder, trained, layout, snapshot.states, asdict(snapshot.progress))
    return tuple(records)


@torch.no_grad()
def load(
    folder: Path,
    *,
    rank: int,
    trained: TrainedWeights,
    layout: LayoutConfig,
    slices: list[TensorSlice],
    parameters: dict[str, torch.Tensor],
    optimizer: PolicyOptimizer,
    device: DeviceKind,
) -> None:
    """Take a state that was saved under any layout; under the same layout the run continues bit by bit.

    Frozen parameters of which it has no weights stay as they are.

    Raises `UnfitCheckpoint` for another model, or another optimizer than the one that was saved.
    """
    saved = SavedState(folder, trained)
    optimizer.check_state_names(saved.states, folder)
    by_param: dict[str, list[TensorSlice]] = defaultdict(list)
    for part in slices:
        by_param[part.param].append(part)
    for name, parameter in parameters.items():
        mine = by_param[name]
        if name not in optimizer.trained and not all(saved.holds(part.name) for part in mine):
            continue
        for state in optimizer.states_of(name):
            # Rows that pad the vocabulary are in no slice; they are and stay zero.
            values = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            saved.fill(state, {name: values}, mine)
            if state == WEIGHT:
                parameter.copy_(values)
            optimizer.set_shard(name, state, values.flatten())
    optimizer.resume(OptimizerProgress(**saved.progress))
    if saved.layout == layout:
        # Another layout has other processes; the model draws nothing at random, so nothing hangs on it.
        restore_random_states(device, load_file(_random_file(folder, rank)))


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_{rank:05d}.safetensors"
