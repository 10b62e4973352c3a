"""The tensors of a policy on its device, and their offload while generation uses the device.

Everything moves by storage: Megatron's parameters and gradients are views of a few large buffers, and in
float32 the optimizer's weights are views of the same, so tensors stay as they are and get their memory back
behind them. On a CPU it is the same path, to the same memory; gradients are freed there too.

The reference policy: the weights as they were loaded, kept in addition to those that are trained.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, UntypedStorage

from .device import DeviceKind, finish_copies, host_buffer, release_memory
from .optimizer import PolicyOptimizer


@dataclass(frozen=True)
class Holdings:
    """Tensors of a policy by what becomes of them; several may share one storage."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    optimizer: Sequence[Tensor]

    @classmethod
    def of(
        cls,
        chunks: Sequence[DistributedDataParallel],
        optimizer: PolicyOptimizer | None,
        reference: Iterable[Tensor],
    ) -> "Holdings":
        """The tensors of a policy's layers, of its optimizer if it trains, and of the reference weights."""
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        modules = [chunk.module for chunk in chunks]
        return cls(
            weights=[
                *(p.data for module in modules for p in module.parameters()),
                *(b for module in modules for b in module.buffers()),
                *(buffer.param_data for buffer in buffers),
                *reference,
            ],
            gradients=[buffer.grad_data for buffer in buffers],
            optimizer=[] if optimizer is None else list(optimizer.device_tensors()),
        )


class Offload:
    """Takes memory from the device and gives it back, to the bit."""

    def __init__(self, kind: DeviceKind) -> None:
        self._kind = kind
        self._moved: list[tuple[UntypedStorage, Tensor]] = []  # with the copy of its bytes
        self._freed: list[tuple[UntypedStorage, int]] = []  # with its size in bytes

    def require_back(self) -> None:
        """Raise RuntimeError while something is away: reading it would read memory that is not there."""
        if self._is_out:
            raise RuntimeError("the policy has left its device to generation: call onload first")

    def out(self, holdings: Holdings, *, weights: bool, optimizer: bool) -> int:
        """Move the weights; free the gradients and move the state; bytes that the device then has.

        Where weights and optimizer share memory, as in float32, it goes with the weights.
        """
        self.require_back()
        theirs, state = self._storages(holdings.weights), self._storages(holdings.optimizer)
        state = {address: storage for address, storage in state.items() if address not in theirs}
        moving = [*(theirs.values() if weights else ()), *(state.values() if optimizer else ())]
        freeing = self._storages(holdings.gradients).values() if optimizer else ()
        num_bytes: int = sum(storage.nbytes() for storage in (*moving, *freeing))
        for storage in freeing:
            self._freed.append((storage, storage.nbytes()))
            storage.resize_(0)
        for storage in moving:
            self._moved.append((storage, self._copy(storage)))
            storage.resize_(0)
        release_memory(self._kind)
        return num_bytes

    def back(self) -> None:
        """Bring everything back; gradients are zero."""
        for storage, num_bytes in self._freed:
            storage.resize_(num_bytes)
            _bytes(storage).zero_()
        for storage, copy in self._moved:
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy, non_blocking=True)
        finish_copies(self._kind)
        self._freed, self._moved = [], []

    @property
    def _is_out(self) -> bool:
        return bool(self._moved or self._freed)

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
        """Storages on the policy's device by address, each once."""
        storages = (t.untyped_storage() for t in tensors if t.device.type == self._kind)
        return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}

    def _copy(self, storage: UntypedStorage) -> Tensor:
        original = _bytes(storage)
        copy = host_buffer(self._kind, original)
        copy.copy_(original, non_blocking=True)
        finish_copies(self._kind)
        return copy


def _bytes(storage: UntypedStorage) -> Tensor:
    """A storage as a tensor [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class ReferenceWeights:
    """A frozen copy of a model's local parameters that can take their place for a forward pass."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._copies = [(p, p.detach().clone()) for module in modules for p in module.parameters()]

    def tensors(self) -> list[Tensor]:
        """The copies."""
        return [copy for _, copy in self._copies]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the reference weights; nothing is copied."""
        current = [p.data for p, _ in self._copies]
        for parameter, copy in self._copies:
            parameter.data = copy
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._copies, current, strict=True):
                parameter.data = data
