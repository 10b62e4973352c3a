"""Saved activations of layers in memory of the host, from their forward to their backward pass.

    forward    layer 1     layer 2     layer 3        backward    layer 2     layer 1
    copies                 1 > host    2 > host       copies      1 > device

torch's hooks of saved tensors (`torch.autograd.graph.saved_tensors_hooks`) are around the layers of a stage.
A layer's tensors leave the device while the next layer computes, and come back while the layer behind it
computes its gradients, so that the device holds two layers of them. What recomputation leaves is what is
saved, and what leaves; nothing is saved while it computes a layer again. Gradients are the same to the bit.

Copies run in a queue of their own, in order, and hosts wait for none. That of Megatron (megatron-core 0.16.1,
`fine_grained_activation_offload`) requires Transformer Engine, CUDA and a choice of modules, and torch's
`save_on_cpu` copies in the queue that computes, tensor by tensor.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nemorl.config.policy import FullRecompute, PolicyConfig
from nemorl.device import smallest_offload

from .device import CopyQueue, DeviceKind, host_buffer
from .packing import PackedLayout

_PIECE = 32  # of host memory, as a multiple of the smallest copy
_ALIGNED = 512  # bytes of the host


def saves_weights(policy: PolicyConfig) -> bool:
    """True if tensors that pass through the hooks include weights, whose attributes hooks do not keep."""
    layers, recompute = policy.offloaded_layers, policy.recompute
    # With the layer behind the last offloaded one, which starts the copies back.
    only_inputs = isinstance(recompute, FullRecompute) and (
        recompute.method == "uniform" or recompute.num_layers > layers
    )
    return layers > 0 and not only_inputs


class HostBuffers:
    """Pinned memory of the host in pieces of one size, which are used again and not returned."""

    def __init__(self, kind: DeviceKind, piece_bytes: int) -> None:
        """`piece_bytes` is a power of two, which torch takes as it is."""
        self.num_bytes, self.piece_bytes = 0, piece_bytes
        self._kind = kind
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> list[Tensor]:
        """Pieces of together at least this number of bytes."""
        return [
            self._free.pop() if self._free else self._made() for _ in range(0, num_bytes, self.piece_bytes)
        ]

    def give(self, pieces: list[Tensor]) -> None:
        self._free += pieces

    def places(self, pieces: list[Tensor], start: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of `data`, which is bytes, each with its place if it begins `start` bytes after the first."""
        done = 0
        while done < len(data):
            number, offset = divmod(start + done, self.piece_bytes)
            size = min(self.piece_bytes - offset, len(data) - done)
            yield data[done : done + size], pieces[number][offset : offset + size]
            done += size

    def _made(self) -> Tensor:
        self.num_bytes += self.piece_bytes
        return host_buffer(self._kind, torch.empty(self.piece_bytes, dtype=torch.uint8, device="meta"))


class _Storage:
    """Memory of the device that saved tensors of a layer share."""

    def __init__(self, tensor: Tensor) -> None:
        # All of it, in the type of the tensor.
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.on_device: Tensor | None = tensor.detach().as_strided((size,), (1,), 0)
        self.num_bytes = size * tensor.element_size()
        self.start: int | None = None  # on the host, in the pieces of its layer

    @property
    def is_empty(self) -> bool:
        """True if recomputation has discarded the data, and will compute it in the same place."""
        return self.on_device is not None and self.on_device.untyped_storage().nbytes() == 0


class _Layer:
    """A layer in one forward pass."""

    def __init__(self, number: int, of_pass: int, before: "_Layer | None", leaves: bool) -> None:
        """`before` is the last layer before it in the same pass that has left the device."""
        self.number, self.of_pass, self.before, self.leaves = number, of_pass, before, leaves
        self.has_begun = False  # its backward pass
        self.is_back = False
        self.copied: Any = None  # event of its newest copies
        self.pieces: list[Tensor] = []  # of memory of the host
        self.own: dict[int, _Storage] = {}  # while it computes, and until they have left
        self._left: list[weakref.ref[_Storage]] = []

    def leave(self) -> None:
        """Let the device memory of what was copied go. From now on only autograd keeps the rest."""
        for storage in self.own.values():
            if storage.start is not None:
                storage.on_device = None
        self.stay()

    def stay(self) -> None:
        """Keep the device memory as long as autograd needs it."""
        self._left = [weakref.ref(storage) for storage in self.own.values() if storage.start is not None]
        self.own = {}

    def left(self) -> list[_Storage]:
        """What is on the host and will be asked for."""
        found = (reference() for reference in self._left)
        return [storage for storage in found if storage is not None]


class _Saved:
    """What autograd keeps in place of a tensor."""

    def __init__(self, layer: _Layer, tensor: Tensor, storage: _Storage | None) -> None:
        self.layer, self._storage = layer, storage
        self._kept = tensor.detach() if storage is None else None
        self._dtype = tensor.dtype
        self._view = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        if self._storage is None:
            assert self._kept is not None, "what has no storage of its own was kept"
            return self._kept
        assert self._storage.on_device is not None, "a layer is back before its backward pass"
        return self._storage.on_device.view(self._dtype).as_strided(*self._view)


class ActivationOffload:
    """Of a rank: the first layers of each of its runs of layers leave the device between their passes."""

    def __init__(self, layers: int, kind: DeviceKind, device: torch.device) -> None:
        self._layers, self._device, self._least = layers, device, smallest_offload(device)
        self.buffers = HostBuffers(kind, _PIECE * self._least)
        self._queue = CopyQueue(kind)
        self._hooks: saved_tensors_hooks | None = None  # while a forward pass is in them
        self._layer: _Layer | None = None  # that computes
        self._leaving: _Layer | None = None  # that was copied, and whose memory is not free yet
        self._passes = 0
        self._weights: set[int] = set()
        self._held: set[int] = set()  # storages that do not leave

    def attach(self, model: Any) -> None:
        """Offload activations of a run of layers, in forward passes with gradients.

        Its weights do not change their storages after this.
        """
        owner = weakref.ref(self)  # or a worker that is gone would stay: see `FakeQuantization.attach`
        self._weights |= {_address(parameter) for parameter in model.parameters()}

        def begin(_: Any, __: tuple[Any, ...], options: dict[str, Any]) -> None:
            if torch.is_grad_enabled() and (offload := owner()) is not None:
                offload._begin(options["packed_seq_params"])

        def end(_: Any, __: Any, ___: Any) -> None:
            if (offload := owner()) is not None:
                offload._end()

        def enter(number: int) -> Any:
            def enter_layer(_: Any, __: Any) -> None:
                if (offload := owner()) is not None:
                    offload._enter(number)

            return enter_layer

        model.decoder.register_forward_pre_hook(begin, with_kwargs=True)
        model.decoder.register_forward_hook(end, always_call=True)
        for number, layer in enumerate(model.decoder.layers):
            layer.register_forward_pre_hook(enter(number))

    def _begin(self, layout: PackedLayout) -> None:
        """A forward pass comes to the first layer."""
        self._passes += 1
        angles = (*(layout.rotary or ()), *(layout.local_rotary or ()))  # of all layers
        self._held = self._weights | {_address(tensor) for tensor in angles}
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def _enter(self, number: int) -> None:
        """A forward pass comes to a layer; while layers are computed again there is none."""
        if self._hooks is None:
            return
        before = self._finish_layer()
        if number > self._layers:
            self._free_leaving()
            self._end()
        else:
            self._layer = _Layer(number, self._passes, before, leaves=number < self._layers)

    def _end(self) -> None:
        """Layers from here on keep what they save."""
        if self._hooks is not None:
            self._finish_layer()
            self._hooks.__exit__()
            self._hooks = None

    def _finish_layer(self) -> _Layer | None:
        """Copy what the layer has saved, and free what the layer before it has; the last one that leaves."""
        layer, self._layer = self._layer, None
        if layer is None:
            return None
        size = 0
        for storage in layer.own.values():
            if not storage.is_empty:
                storage.start = size
                size += -(-storage.num_bytes // _ALIGNED) * _ALIGNED
        if not size:
            return layer.before
        self._free_leaving()
        layer.pieces = self.buffers.take(size)
        with self._queue.after_computation():
            for storage in layer.own.values():
                if storage.start is not None and storage.on_device is not None:
                    data = storage.on_device.view(torch.uint8)
                    for part, place in self.buffers.places(layer.pieces, storage.start, data):
                        place.copy_(part, non_blocking=True)
            layer.copied = self._queue.mark()
        self._leaving = layer
        return layer

    def _free_leaving(self) -> None:
        if self._leaving is not None:
            self._queue.computation_waits(self._leaving.copied)
            self._leaving.leave()
            self._leaving = None

    def _pack(self, tensor: Tensor) -> Any:
        layer = self._layer
        # Parameters do not leave, and have no graph behind them that would keep itself alive.
        if layer is None or isinstance(tensor, torch.nn.Parameter):
            return tensor
        storage = None
        if layer.leaves and tensor.layout is torch.strided and tensor.device == self._device:
            address = _address(tensor)
            if address not in self._held and tensor.untyped_storage().nbytes() >= self._least:
                storage = layer.own.get(address)
                if storage is None:
                    storage = layer.own[address] = _Storage(tensor)
        return _Saved(layer, tensor, storage)

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved  # type: ignore[no-any-return]
        if not saved.layer.has_begun:
            self._begin_backward(saved.layer)
        return saved.tensor()

    def _begin_backward(self, layer: _Layer) -> None:
        """Have a layer on the device, and the one before it, whose gradients are next, on its way there."""
        layer.has_begun = True
        if self._leaving is not None and self._leaving.of_pass != layer.of_pass:
            self._free_leaving()
        self._bring_back(layer)
        self._queue.computation_waits(layer.copied)
        if layer.before is not None:
            self._bring_back(layer.before)

    def _bring_back(self, layer: _Layer) -> None:
        if layer.is_back or not layer.leaves:
            return
        layer.is_back = True
        if layer is self._leaving:  # it still is on the device
            self._leaving = None
            layer.stay()
        else:
            storages = layer.left()
            for storage in storages:  # by the queue that computes, which will free it
                storage.on_device = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self._device)
            with self._queue.after_computation():
                for storage in storages:
                    assert storage.on_device is not None, "it was made above"
                    assert storage.start is not None, "what has not left is not listed"
                    for part, place in self.buffers.places(layer.pieces, storage.start, storage.on_device):
                        part.copy_(place, non_blocking=True)
                layer.copied = self._queue.mark()
        # The next copies into these come after those that read them: there is one queue of copies.
        self.buffers.give(layer.pieces)
        layer.pieces = []


def _address(tensor: Tensor) -> int:
    """Identity of a storage as long as it lives."""
    address: int = tensor.untyped_storage()._cdata
    return address
