"""Saving and loading one rank's training state: weights, optimizer, schedule, random generators."""

from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nemorl.config.policy import LayoutConfig
from nemorl.models.adapters import TrainedWeights
from nemorl.models.slices import TensorSlice

from .checkpoint_files import WEIGHT, SavedState, write_index, write_state
from .device import DeviceKind, random_states, restore_random_states
from .optimizer import OptimizerProgress, PolicyOptimizer


def save(
    folder: Path,
    *,
    rank: int,
    trained: TrainedWeights,
    layout: LayoutConfig,
    optimizer: PolicyOptimizer,
    device: DeviceKind,
) -> None:
    """Write this rank's files; rank 0 also writes what all ranks share."""
    folder.mkdir(parents=True, exist_ok=True)
    for state in optimizer.state_names:
        write_state(folder, state, rank, optimizer.shards(state))
    save_file(random_states(device), _random_file(folder, rank))
    if rank == 0:
        write_index(folder, trained, layout, optimizer.state_names, asdict(optimizer.progress))


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

    Raises `UnfitCheckpoint` for another model, or another optimizer than the one that was saved.
    """
    saved = SavedState(folder, trained)
    optimizer.check_state_names(saved.states, folder)
    for name, parameter in parameters.items():
        mine = [part for part in slices if part.param == name]
        for state in saved.states:
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
