"""Receiving complete HF tensors, for engines with a loader that shards, fuses or quantizes them.

    buckets ──▶ tensors that are arriving ──complete──▶ the engine's loader, which may take several at a time

Memory is the tensors with missing parts, and those that the loader keeps until it has used them. The loader
writes into the weights in use, so an update that fails after the first tensor leaves them corrupt.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from nemorl.device import gpu_identity
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view

from .endpoints import Arrivals, Receiver, UpdateCall, arriving, prepared
from .messages import (
    ReceiveReport,
    ReceiverLayout,
    RefitFailed,
    machine,
    queue_fingerprint,
    read_fingerprints,
)


class Loader(Protocol):
    """Loads HF tensors into an engine, which is paused from before `receive` until `finish`."""

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load all tensors of a model, each as it arrives; no other tensor uses its memory afterwards."""

    def finish(self) -> None: ...


def whole_slices(tensors: Mapping[str, tuple[int, ...]]) -> tuple[TensorSlice, ...]:
    return tuple(TensorSlice.whole(name, shape) for name, shape in tensors.items())


def batches(tensors: Iterable[tuple[str, Tensor]], min_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in groups of at least `min_bytes`, except for the last."""
    batch: dict[str, Tensor] = {}
    for name, tensor in tensors:
        batch[name] = tensor
        if sum(one.nbytes for one in batch.values()) >= min_bytes:
            yield batch
            batch = {}
    if batch:
        yield batch


class WholeTensorReceiver(Receiver):
    """Receives weights in the process of an engine's loader. Needs only names, shapes and types."""

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        loader: Loader,
        *,
        device: torch.device,
    ) -> None:
        super().__init__("through its loader")
        types = tuple(dtypes[name] for name in tensors)
        where = {"node": machine(), "gpu": gpu_identity(device)}
        self._layout = ReceiverLayout(whole_slices(tensors), types, takes_changes=False, **where)
        self._loader, self._device = loader, device
        self.peak_bytes = 0  # of incomplete tensors and the one that became complete, in the last update

    def describe(self) -> ReceiverLayout:
        return self._layout

    def _receive(self, update: UpdateCall) -> ReceiveReport:
        self._check_not_over(update)
        session, part = update.session, prepared(self._part)
        queued: dict[str, Tensor] = {}  # fingerprints
        with arriving(part, self._layout, session, self._member) as arrivals:
            self._loader.load(self._complete(update, arrivals, queued))
            arrivals.clock.end("load")
        found = dict(zip(queued, read_fingerprints(list(queued.values())), strict=True))
        self._check_read(arrivals, self._layout, found)
        self._has_received(update)
        arrivals.clock.end("fingerprint")
        return ReceiveReport({} if arrivals.read else found, arrivals.num_bytes, arrivals.clock.seconds)

    def _complete(
        self, update: UpdateCall, arrivals: Arrivals, queued: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor when all of it has arrived; its fingerprint goes to `queued`."""
        session, clock = update.session, arrivals.clock
        clock.end("load")
        partial: dict[str, Tensor] = {}  # tensors that have arrived in part, and their missing elements
        missing: dict[str, int] = {}
        held_bytes = self.peak_bytes = 0
        for piece, values in arrivals.pieces:
            name = piece.name
            if name not in partial:
                partial[name] = torch.empty(piece.shape, dtype=values.dtype, device=self._device)
                missing[name] = partial[name].numel()
                held_bytes += partial[name].nbytes
                self.peak_bytes = max(self.peak_bytes, held_bytes)
            local_view(partial, piece).copy_(values)
            missing[name] -= piece.num_elements
            clock.end("copy")
            if missing[name]:
                continue
            del missing[name]
            tensor = partial.pop(name)
            held_bytes -= tensor.nbytes
            if session.checks(name):
                queued[name] = queue_fingerprint(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
                clock.end("fingerprint")
            with self._writing(update):
                pass  # by the loader, from now on
            yield name, tensor
            clock.end("load")
        if missing:
            reason = f"{self._name} received {len(missing)} tensors incompletely, first {min(missing)}"
            raise RefitFailed(f"refit to version {session.version}: {reason}")

    def commit(self, version: int) -> None:
        self._check_received(version)
        self._loader.finish()
        self._received, self.corruption = None, None
