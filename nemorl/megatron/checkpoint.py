"""Saving and loading one rank's training state: weights, optimizer, schedule, random generators.

Also import from and export to megatron-core's own checkpoints (`dist_checkpointing`), as Megatron-LM has
them: weights only, named as Transformer Engine's layers name them; the files load under any layout.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from nemorl.config.policy import LayoutConfig, PolicyConfig
from nemorl.errors import RunError
from nemorl.models.adapters import TrainedWeights
from nemorl.models.hf_writer import HfFolderWriter, ImportedModel, writing_folder
from nemorl.models.layout import PolicyRank, hf_tensors, policy_slices
from nemorl.models.registry import load_shape, policy_shape
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view

from . import calibration, device, parallel
from . import checkpoint_files as files
from .checkpoint_store import FileRecord, writing
from .export import hf_weights
from .kernels import Kernels
from .model import PolicyModel, transformer_config
from .optimizer import OptimizerProgress, PolicyOptimizer


@dataclass(frozen=True)
class Snapshot:
    states: Mapping[str, Mapping[str, files.Shard]]  # by state (weights, moments) and parameter
    random: Mapping[str, Tensor]
    progress: OptimizerProgress
    inputs: Mapping[str, Tensor]  # ranges of the inputs of linear layers, where a format stores them
    draft: Mapping[str, Tensor]  # the head for drafts with its optimizer, on ranks that save it

    @classmethod
    def of(
        cls,
        optimizer: PolicyOptimizer,
        kind: device.DeviceKind,
        inputs: Mapping[str, Tensor],
        draft: Mapping[str, Tensor],
    ) -> "Snapshot":
        """References to the tensors, valid until the next step."""
        states = {
            state: {name: shard for name, shard in optimizer.shards(state).items() if shard.is_first}
            for state in optimizer.state_names
        }
        return cls(states, device.random_states(kind), replace(optimizer.progress), inputs, draft)


class SnapshotCopier:
    """Copies snapshots aside, into memory that it keeps: fresh memory would cost more than the copying."""

    def __init__(self, kind: device.DeviceKind) -> None:
        self._kind = kind
        self._buffers: dict[tuple[str, str], Tensor] = {}  # by state and parameter

    @torch.no_grad()
    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The same in host memory, valid until the next copy."""
        states: dict[str, dict[str, files.Shard]] = {state: {} for state in snapshot.states}
        for state, shards in snapshot.states.items():
            for name, shard in shards.items():
                states[state][name] = replace(shard, values=self._copy(state, name, shard.values))
        draft = {name: self._copy("draft", name, values) for name, values in snapshot.draft.items()}
        device.finish_copies(self._kind)
        return replace(snapshot, states=states, draft=draft)

    def _copy(self, state: str, name: str, values: Tensor) -> Tensor:
        if (state, name) not in self._buffers:
            self._buffers[state, name] = device.host_buffer(self._kind, values)
        return self._buffers[state, name].copy_(values, non_blocking=True)


def save(
    folder: Path, snapshot: Snapshot, *, trained: TrainedWeights, layout: LayoutConfig
) -> tuple[FileRecord, ...]:
    """Write this rank's files; rank 0 also writes what all ranks share. Raises `UnwritableCheckpoint`."""
    rank = dist.get_rank()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    records = [files.write_state(folder, state, rank, shards) for state, shards in snapshot.states.items()]
    records.append(files.write_safetensors(_random_file(folder, rank), snapshot.random, {}))
    if snapshot.draft:
        records.append(files.write_safetensors(files.draft_file(folder, rank), snapshot.draft, {}))
    if rank == 0:
        if snapshot.inputs:
            records.append(files.write_safetensors(folder / calibration.FILE, snapshot.inputs, {}))
        files.write_index(folder, trained, layout, list(snapshot.states), asdict(snapshot.progress))
    return tuple(records)


@torch.no_grad()
def load(
    folder: Path,
    trained: TrainedWeights,
    place: PolicyRank,
    parameters: Mapping[str, Tensor],
    optimizer: PolicyOptimizer,
    kind: device.DeviceKind,
) -> None:
    """Take a state that was saved under any layout; under the same layout the run continues bit by bit.

    Raises `UnfitCheckpoint` for another model or optimizer than the one that was saved.
    """
    saved = files.SavedState(folder, trained)
    if saved.states != optimizer.state_names:
        raise files.UnfitCheckpoint(
            f"{folder} holds the optimizer states {', '.join(saved.states)}; policy.optimizer "
            f"{optimizer.name!r} requires {', '.join(optimizer.state_names)}: resume with the optimizer the "
            "run began with"
        )
    by_param: dict[str, list[TensorSlice]] = defaultdict(list)
    for part in trained.slices(place):
        by_param[part.param].append(part)
    for name, parts in by_param.items():
        parameter = parameters[name]
        if name not in optimizer.trained and not all(saved.holds(part.name) for part in parts):
            continue  # it is frozen, and stays as it is
        for state in optimizer.states_of(name):
            # Rows that pad the vocabulary are in no slice; they are and stay zero.
            values = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            saved.fill(state, {name: values}, parts)
            if state == files.WEIGHT:
                parameter.copy_(values)
            optimizer.set_shard(name, state, values.flatten())
    optimizer.resume(OptimizerProgress(**saved.progress))
    if saved.layout == place.layout:
        # Another layout has other processes; the model draws nothing at random.
        device.restore_random_states(kind, load_file(_random_file(folder, dist.get_rank())))


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_{rank:05d}.safetensors"


# Where Megatron-LM looks: the tracker names an iteration, or weights that belong to none.
_TRACKER, _RELEASE = "latest_checkpointed_iteration.txt", "release"
_MAX_REASON_CHARACTERS = 300


class UnfitMegatronCheckpoint(RunError, ValueError):
    """The folder to import is not a checkpoint of megatron-core, or is one of another model."""


def export_megatron(checkpoint: Path, out: Path, config: PolicyConfig) -> None:
    """Write `out` as `export_hf`, the whole model in memory. Raises FileExistsError where `out` exists."""
    shape = policy_shape(config)
    with writing_folder(out) as folder:
        with _whole_model(shape, config) as (model, weights, boxes):
            for name, tensor in hf_weights(checkpoint, config):
                for part in boxes[name]:
                    local_view(weights, part).copy_(tensor.view(part.shape)[part.box])
            release = folder / _RELEASE
            release.mkdir()
            dist_checkpointing.save({**sharded_state(model, shape), "checkpoint_version": 3.0}, str(release))
        (folder / _TRACKER).write_text(_RELEASE)


def import_megatron(source: Path, out: Path, like: Path) -> ImportedModel:
    """Write a Hugging Face folder `out` from a checkpoint of megatron-core of the model in the folder `like`.

    Runs code that the checkpoint contains: megatron-core unpickles its metadata. config.json, its type of
    weights and the tokenizer come from `like`. Raises `UnfitMegatronCheckpoint`, and FileExistsError where
    `out` exists.
    """
    shape = load_shape(like)
    config = PolicyConfig.model_validate({"model_path": like, "precision": "float32"})  # exact for every type
    dtype: torch.dtype = getattr(torch, shape.torch_dtype)
    count = 0
    tracker = source / _TRACKER
    if tracker.is_file():  # the newest that Megatron-LM has named
        named = tracker.read_text().strip()
        source = source / (named if named == _RELEASE else f"iter_{int(named):07d}")
    if not dist_checkpointing.check_is_distributed_checkpoint(str(source)):
        raise UnfitMegatronCheckpoint(
            f"{source} is no checkpoint of megatron-core's dist_checkpointing (no metadata.json): name a "
            f"folder that holds one, or {_TRACKER}"
        )
    with HfFolderWriter(out, like) as writer, _whole_model(shape, config) as (model, weights, boxes):
        try:
            state = dist_checkpointing.load(sharded_state(model, shape), str(source))
        except (CheckpointException, CheckpointingException) as error:
            reason: BaseException = error
            if isinstance(error, CheckpointException):
                reason, _ = error.failures[0]  # of the one rank there is
            text = str(reason)  # may be a list of all names that Megatron knows
            text = text if len(text) <= _MAX_REASON_CHARACTERS else f"{text[:_MAX_REASON_CHARACTERS]} …"
            raise UnfitMegatronCheckpoint(
                f"{source} does not hold the model that --like names: name the folder it was trained from. "
                f"Megatron says: {text}"
            ) from reason
        for name, weight in weights.items():
            weight.copy_(state[name])
        buffers = dict(model.named_buffers())  # a router's bias keeps its own type
        for name, extents in hf_tensors(shape).items():
            parts = boxes[name]
            tensor = torch.empty(parts[0].shape, dtype=weights[parts[0].param].dtype)
            for part in parts:
                tensor[part.box] = local_view(weights, part)
            tensor = tensor.view(extents)
            count += tensor.numel()
            writer.add(name, tensor if parts[0].param in buffers else tensor.to(dtype))
    return ImportedModel(shape, count, count * dtype.itemsize, left_out=())


def sharded_state(model: PolicyModel, shape: ModelShape) -> dict[str, Any]:
    """A model's shards as `dist_checkpointing` takes them, under the names of Transformer Engine's layers."""
    # Layers of equal structure are stacked to one tensor, as Megatron-LM does it.
    kinds = {shape.is_moe(layer) for layer in range(shape.num_layers)}
    if len(kinds) == 1:
        model.config.moe_layer_freq = 1
    # The norms that Transformer Engine keeps with the matrix behind them.
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if shape.mla is not None:
        names = {
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
    dense = {**names, "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    further = [layer.transformer_layer for layer in model.mtp.layers] if shape.mtp else []
    for layer in (*model.decoder.layers, *further):
        is_moe = shape.is_moe(layer.layer_number - 1)
        layer.submodules_config.sharded_state_dict_keys_map = names if is_moe else dense
    return model.sharded_state_dict()  # type: ignore[no-any-return]


@contextmanager
def _whole_model(
    shape: ModelShape, config: PolicyConfig
) -> Iterator[tuple[PolicyModel, dict[str, Tensor], dict[str, list[TensorSlice]]]]:
    """An undivided model, its weights by Megatron's names, and the boxes in them by Hugging Face's."""
    boxes: dict[str, list[TensorSlice]] = defaultdict(list)
    for part in policy_slices(shape, PolicyRank()):
        boxes[part.name].append(part)
    alone = config.model_copy(update={"layout": LayoutConfig(), "lora": None})
    device.select_device("cpu", 0)
    with tempfile.TemporaryDirectory(prefix="nemorl-whole-") as folder:
        file = f"file://{folder}/meet"
        parallel.join(alone.layout, rank=0, world_size=1, rendezvous=file, device="cpu", deadline_seconds=600)
        try:
            with device.building("cpu"):
                model = PolicyModel(transformer_config(shape, alone, "cpu", Kernels()), shape, alone, 0)
                yield model, model.weights(), boxes
        finally:
            parallel.leave()
