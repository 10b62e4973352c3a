"""Receiving complete HF tensors, for engines with a loader that shards, fuses or quantizes them.

    buckets ──▶ tensors that are arriving ──complete──▶ batch ──full──▶ the engine's loader
                memory: the incomplete tensors                 about a bucket

No copy of the model is kept: memory is a batch of about a bucket, and the tensors with missing parts. The
loader writes into the weights in use, so an update that fails after the first batch leaves them corrupt.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view

from .endpoints import arriving, node_name
from .messages import Part, ReceiveReport, ReceiverLayout, RefitFailed, RefitSession, fingerprint
from .process_group import Membership


class Loader(Protocol):
    """Loads HF tensors into an engine, which is paused from before `receive` until `finish`."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load some complete tensors; their memory may be reused after the call."""
        ...

    def finish(self) -> None:
        """Finish loading after the last tensor."""
        ...


def whole_slices(tensors: Mapping[str, tuple[int, ...]]) -> tuple[TensorSlice, ...]:
    """Return each HF tensor as a slice of a contiguous parameter of the same name."""
    return tuple(
        TensorSlice(name, shape, (0,) * len(shape), shape, name, 0, _strides(shape))
        for name, shape in tensors.items()
    )


@dataclass
class _Arriving:
    """Tensors that have arrived in part."""

    device: torch.device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)  # elements
    num_bytes: int = 0

    def take(self, part: TensorSlice, values: Tensor) -> Tensor | None:
        """Store a part; return the tensor when it is complete."""
        name = part.name
        if name not in self.tensors:
            self.tensors[name] = torch.empty(part.shape, dtype=values.dtype, device=self.device)
            self.missing[name] = math.prod(part.shape)
            self.num_bytes += self.tensors[name].nbytes
        local_view(self.tensors, part).copy_(values)
        self.missing[name] -= part.num_elements
        if self.missing[name]:
            return None
        del self.missing[name]
        whole = self.tensors.pop(name)
        self.num_bytes -= whole.nbytes
        return whole


class WholeTensorReceiver:
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
        self._slices = whole_slices(tensors)
        self._dtypes = tuple(dtypes[name] for name in tensors)
        self._loader = loader
        self._device = device
        self._batch_bytes = batch_bytes
        self._part: Part | None = None
        self._member = Membership()
        self._received: int | None = None
        self._corruption: str | None = None
        self.peak_bytes = 0  # of tensors held at the same time in the last update

    @property
    def corruption(self) -> str | None:
        """Reason why the weights in use are not of one version; None if they are."""
        return self._corruption

    def describe(self) -> ReceiverLayout:
        """Return the layout of all complete tensors."""
        return ReceiverLayout(self._slices, self._dtypes, node_name(), takes_changes=False)

    def prepare(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._part = part

    def receive(self, session: RefitSession) -> ReceiveReport:
        """Pass all tensors to the loader and return their fingerprints. Raises `RefitFailed`."""
        part = self._part
        if part is None:
            raise RefitFailed("this rank takes part in a refit before it was given its part of the plan")
        self._received, self.peak_bytes = None, 0
        under_way, batch = _Arriving(self._device), dict[str, Tensor]()
        fingerprints: dict[str, int] = {}
        with arriving(part, self.describe(), session, self._member) as pieces:
            for piece, values in pieces:
                tensor = under_way.take(piece, values)
                if tensor is None:
                    continue
                if session.checks(piece.name):
                    fingerprints[piece.name] = fingerprint(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
                batch[piece.name] = tensor
                self._load_if_full(session, part, under_way, batch)
        self._load(session, part, batch)
        if under_way.missing:
            raise RefitFailed(
                f"refit to version {session.version}: generation rank {part.rank} received "
                f"{len(under_way.missing)} tensors incompletely, first {min(under_way.missing)}"
            )
        self._received = session.version
        return ReceiveReport({} if session.transport == "files" else fingerprints, pieces.num_bytes)

    def commit(self, version: int) -> None:
        """Finish loading the received version. Raises `RefitFailed` if another one was received."""
        if self._received != version:
            raise RefitFailed(
                f"requested to use version {version}, but "
                f"{'none' if self._received is None else f'version {self._received}'} was loaded completely"
            )
        self._loader.finish()
        self._received, self._corruption = None, None

    def abandon(self) -> None:
        """Forget an update that did not finish; weights that it has written to stay corrupt."""
        self._received = None

    def _load_if_full(
        self, session: RefitSession, part: Part, under_way: _Arriving, batch: dict[str, Tensor]
    ) -> None:
        batch_bytes = sum(tensor.nbytes for tensor in batch.values())
        self.peak_bytes = max(self.peak_bytes, batch_bytes + under_way.num_bytes)
        if batch_bytes >= self._batch_bytes:
            self._load(session, part, batch)

    def _load(self, session: RefitSession, part: Part, batch: dict[str, Tensor]) -> None:
        if not batch:
            return
        self._corruption = (
            f"generation rank {part.rank} was being brought to version {session.version} through its loader, "
            "which did not finish: its weights are of two versions until a complete refit"
        )
        self._loader.load(batch)
        batch.clear()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
