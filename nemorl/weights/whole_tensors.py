"""Receiving complete HF tensors, for engines with a loader that shards, fuses or quantizes them.

    buckets ──▶ tensors that are arriving ──complete──▶ batch ──full──▶ the engine's loader

Memory is a batch of about a bucket, and the tensors with missing parts. The loader writes into the weights in
use, so an update that fails after the first batch leaves them corrupt.
"""

import socket
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from nemorl.device import gpu_identity
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view

from .endpoints import Receiver, arriving, prepared
from .messages import (
    ReceiveReport,
    ReceiverLayout,
    RefitFailed,
    RefitSession,
    queue_fingerprint,
    read_fingerprints,
)


class Loader(Protocol):
    """Loads HF tensors into an engine, which is paused from before `receive` until `finish`."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load some complete tensors; their memory may be reused after the call."""

    def finish(self) -> None: ...


def whole_slices(tensors: Mapping[str, tuple[int, ...]]) -> tuple[TensorSlice, ...]:
    return tuple(TensorSlice.whole(name, shape) for name, shape in tensors.items())


class WholeTensorReceiver(Receiver):
    """Receives weights in the process of an engine's loader. Needs only names, shapes and types."""

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        loader: Loader,
        *,
        device: torch.device,
        batch_bytes: int,
    ) -> None:
        """`batch_bytes`: size of a batch of complete tensors for the loader; a larger tensor is a batch."""
        super().__init__()
        types = tuple(dtypes[name] for name in tensors)
        where = {"node": socket.gethostname(), "gpu": gpu_identity(device)}
        self._layout = ReceiverLayout(whole_slices(tensors), types, takes_changes=False, **where)
        self._loader, self._device, self._batch_bytes = loader, device, batch_bytes
        self.peak_bytes = 0  # of tensors held at the same time in the last update

    def describe(self) -> ReceiverLayout:
        return self._layout

    def receive(self, session: RefitSession) -> ReceiveReport:
        part = prepared(self._part)
        self._received, self.peak_bytes = None, 0
        partial: dict[str, Tensor] = {}  # tensors that have arrived in part, and their missing elements
        missing: dict[str, int] = {}
        batch: dict[str, Tensor] = {}
        held_bytes = batch_bytes = 0  # of both, and of the batch
        fingerprints: dict[str, Tensor] = {}
        with arriving(part, self._layout, session, self._member) as arrivals:
            for piece, values in arrivals.pieces:
                name = piece.name
                if name not in partial:
                    partial[name] = torch.empty(piece.shape, dtype=values.dtype, device=self._device)
                    missing[name] = partial[name].numel()
                    held_bytes += partial[name].nbytes
                local_view(partial, piece).copy_(values)
                missing[name] -= piece.num_elements
                if missing[name]:
                    continue
                del missing[name]
                tensor = batch[name] = partial.pop(name)
                batch_bytes += tensor.nbytes
                self.peak_bytes = max(self.peak_bytes, held_bytes)
                if (
                    session.checks(name) and session.transport != "files"
                ):  # those are checked as they are read
                    start = (0,) * tensor.dim()
                    fingerprints[name] = queue_fingerprint(tensor, start, tuple(tensor.shape))
                if batch_bytes >= self._batch_bytes:
                    self._load(session, batch)
                    held_bytes, batch_bytes = held_bytes - batch_bytes, 0
        if batch:
            self._load(session, batch)
        if missing:
            reason = f"{self._name} received {len(missing)} tensors incompletely, first {min(missing)}"
            raise RefitFailed(f"refit to version {session.version}: {reason}")
        self._received = session.version
        found = dict(zip(fingerprints, read_fingerprints(list(fingerprints.values())), strict=True))
        return ReceiveReport(found, arrivals.num_bytes)

    def commit(self, version: int) -> None:
        self._check_received(version)
        self._loader.finish()
        self._received, self.corruption = None, None

    def abandon(self) -> None:
        self._received = None  # weights that the update has written to stay corrupt

    def _load(self, session: RefitSession, batch: dict[str, Tensor]) -> None:
        self.corruption = self._unfinished(session, "through its loader")
        self._loader.load(batch)
        batch.clear()
