"""One rank of a model: its weights and optimizer, on the device, on the host, in files and sent to engines.

`worker.py` has what it computes on a batch.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.config.policy import PolicyConfig
from nemorl.models.adapters import TrainedWeights
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import SCALAR_HEAD, chunk_prefix, policy_rank, policy_slices
from nemorl.models.megatron_names import local_name
from nemorl.models.registry import load_shape
from nemorl.models.slices import TensorSlice
from nemorl.weights.endpoints import WeightSender

from . import checkpoint, parallel
from .checkpoint_store import FileRecord
from .decode import CachedModel, DecodingCopy
from .device import DeviceKind, select_device
from .kernels import Installed, check_optimizer, choose
from .lora import Adapters
from .model import PolicyModel, build_model
from .moe import Routers
from .offload import Holdings, Offload, ReferenceWeights
from .optimizer import PolicyOptimizer
from .packing import micro_batch_maker
from .parallel import recompute_notes


class ModelRank:
    """One rank of a model. Methods are collective where they do not say otherwise: all ranks call them, in
    the same order.
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        rank: int,
        world_size: int,
        rendezvous: str,
        device: DeviceKind,
        threads: int | None,
        temperature: float,
        keep_reference: bool,
        deadline_seconds: float,
        seed: int = 0,
        trains: bool = True,
        load: bool = False,
    ) -> None:
        """Join the other ranks at `rendezvous` (see `parallel.join`) and build the model.

        With `load` it has the weights of `config.model_path`, else none before `load_hf`. One that does not
        train has no optimizer and no room for gradients.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self._config = config
        self._kind: DeviceKind = device
        self._device = select_device(device, rank)
        self._temperature = temperature
        self._keep_reference = keep_reference
        self._shape = load_shape(config.model_path, config.head)
        self._installed = Installed.find()
        check_optimizer(config.optimizer, self._installed)
        self._kernels = choose(
            config.kernels,
            kind=device,
            precision=config.precision,
            activation=self._shape.activation,
            installed=self._installed,
        )
        self._seed = seed  # of adapters and heads that no folder holds
        parallel.join(
            config.layout,
            rank=rank,
            world_size=world_size,
            rendezvous=rendezvous,
            device=device,
            deadline_seconds=deadline_seconds,
        )
        self._place = policy_rank(config.layout, rank)
        self._trained = TrainedWeights(self._shape, config.lora)
        self._adapters = Adapters(self._shape, config.lora, self._place) if config.lora else None
        self._chunks = build_model(
            self._shape, config, device, self._device, self._kernels, self._adapters, trains=trains
        )
        self._optimizer = PolicyOptimizer(config, self._chunks, device, self._trained) if trains else None
        self._maker = micro_batch_maker(self._shape, config, self._kernels, self._device)
        self._routers = Routers(self._modules, self._shape.num_moe_layers, config.moe)
        self._reference: ReferenceWeights | Adapters | None = None
        self._offload = Offload(device)
        self._copier = checkpoint.SnapshotCopier(device)
        self._copy: checkpoint.Snapshot | None = None
        if load:
            self.load_hf(config.model_path)
        # Engines take weights with adapters in them, or adapters: what one does not ask for is not computed.
        self.sender = WeightSender((*self.slices(), *self.adapter_slices()), self.merged_parameters)

    def header(self) -> dict[str, str]:
        """Device, layout, kernels and versions in use; for the header of a run's log."""
        return {
            "device": str(self._device),
            "backend": dist.get_backend(),
            "precision": self._config.precision,
            "layout": self._config.layout.name,
            **({"head": "scalar"} if self._shape.head == "scalar" else {}),
            **(self._adapters.described() if self._adapters else {}),
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            **self._kernels.described(self._installed, self._kind, self._config.optimizer),
            **recompute_notes(self._shape, self._config.recompute, self._kernels.layers),
        }

    def load_hf(self, folder: Path) -> None:
        """Read this rank's part of a Hugging Face folder; it also becomes the reference when one is kept.

        A resumed run calls this first, for the reference and for weights that are frozen, and then
        `load_checkpoint`. Adapters are drawn again, and without them the model is its own reference.
        """
        weights = HfFolder(folder)
        there = weights.names()
        # A scalar head that the folder lacks, as a language model's does, begins at zero.
        parts = [s for s in self.slices() if s.param != SCALAR_HEAD.param or s.name in there]
        weights.load_into(self.parameters(), parts)
        if self._adapters is not None:
            self._adapters.draw(self.parameters(), self._seed)
        if self._optimizer is not None:
            self._optimizer.weights_changed()
        if self._keep_reference:
            self._reference = self._adapters or ReferenceWeights(self._modules)

    def slices(self) -> list[TensorSlice]:
        """The parts of the HF checkpoint in each of `parameters` and `merged_parameters`."""
        return policy_slices(self._shape, self._place)

    def adapter_slices(self) -> list[TensorSlice]:
        """The parts of the adapters, in PEFT's names, in each of `parameters`; empty without adapters."""
        return [] if self._adapters is None else self._adapters.slices

    def parameters(self) -> dict[str, Tensor]:
        """This rank's weights by Megatron's names; the tensors themselves, not copies."""
        self._offload.require_back()
        return {
            chunk_prefix(chunk) + local_name(name): weight
            for chunk, module in enumerate(self._modules)
            for name, weight in module.weights().items()
        }

    def merged_parameters(self) -> Mapping[str, Tensor]:
        """The weights that engines sample with: `parameters`, with adapters added when one is asked for."""
        if self._adapters is None:
            return self.parameters()
        return self._adapters.merged(self.parameters())

    def decoding_copy(self, max_kv_tokens: int) -> DecodingCopy:
        """This rank's part in sampling with the weights in place; layouts without CP and VPP have one."""
        (model,) = self._modules
        moe = self._shape.moe if self._config.moe.router_replay else None
        experts = None if moe is None else (self._shape.num_moe_layers, moe.top_k)
        cached = CachedModel(model, self._maker, self._shape.vocab_size, max_kv_tokens, experts)
        return DecodingCopy(cached, self._config.layout, self._device)

    def offload(self) -> int:
        """Leave the device to generation, as far as `policy.offload` says; bytes that it then has."""
        reference = self._reference.tensors() if isinstance(self._reference, ReferenceWeights) else ()
        holdings = Holdings.of(self._chunks, self._optimizer, reference)
        offload = self._config.offload
        return self._offload.out(holdings, weights=offload.weights, optimizer=offload.optimizer)

    def onload(self) -> None:
        """Undo `offload`: weights and optimizer are what they were, to the bit; gradients are zero."""
        self._offload.back()

    def save_checkpoint(self, folder: Path) -> tuple[FileRecord, ...]:
        """Write weights, optimizer, schedule and random states into a folder that all ranks share."""
        self._offload.require_back()
        return self._save(folder, checkpoint.Snapshot.of(self.optimizer, self._kind))

    def copy_for_checkpoint(self) -> None:
        """Copy aside what `write_copy` writes; the next steps may then change the state."""
        self._offload.require_back()
        self._copy = self._copier.copy(checkpoint.Snapshot.of(self.optimizer, self._kind))

    def write_copy(self, folder: Path) -> tuple[FileRecord, ...]:
        """`save_checkpoint` of the state that was copied. Not collective, and for another thread.

        It has to end before the next copy begins.
        """
        if self._copy is None:
            raise RuntimeError("nothing was copied: call copy_for_checkpoint before write_copy")
        return self._save(folder, self._copy)

    def load_checkpoint(self, folder: Path) -> None:
        """Take what `save_checkpoint` wrote, under this or another layout; the reference stays as it is."""
        slices = self._trained.slices(self._place)
        trained = {part.param for part in slices}
        checkpoint.load(
            folder,
            rank=dist.get_rank(),
            trained=self._trained,
            layout=self._config.layout,
            slices=slices,
            parameters={name: p for name, p in self.parameters().items() if name in trained},
            optimizer=self.optimizer,
            device=self._kind,
        )

    def close(self) -> None:
        """Leave the process group; the process may join another afterwards."""
        parallel.leave()

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    @property
    def optimizer(self) -> PolicyOptimizer:
        """That of a model which trains."""
        if self._optimizer is None:
            raise RuntimeError("this model was started without training: it has no optimizer")
        return self._optimizer

    @property
    def _kept_reference(self) -> "ReferenceWeights | Adapters":
        if self._reference is None:
            raise RuntimeError(
                "no reference weights are kept: start the worker with keep_reference and load_hf"
            )
        return self._reference

    @property
    def _modules(self) -> list[PolicyModel]:
        return [chunk.module for chunk in self._chunks]

    def _save(self, folder: Path, snapshot: checkpoint.Snapshot) -> tuple[FileRecord, ...]:
        return checkpoint.save(
            folder, snapshot, rank=dist.get_rank(), trained=self._trained, layout=self._config.layout
        )
