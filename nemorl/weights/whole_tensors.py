"""Receiving whole HF tensors, for engines whose own loader cuts, fuses or quantises them.

    buckets ──▶ tensors that are arriving ──whole──▶ batch ──full──▶ the engine's loader
                memory: what is under way between senders                 a bucket

Nothing of the model is kept: memory is a batch of about a bucket, and the tensors of which parts are missing.
The loader writes into the weights in use, so an update that fails after the first batch leaves them torn.
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
from .fingerprint import fingerprint
from .messages import Part, ReceiveReport, ReceiverLayout
from .process_group import Membership
from .session import RefitFailed, RefitSession


class Loader(Protocol):
    """An engine's own way to take HF tensors, which stands still from before `receive` until `finish`."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take some whole tensors; they may be reused after the call."""
        ...

    def finish(self) -> None:
        """All have come: do what is done once after loading."""
        ...


def whole_slices(tensors: Mapping[str, tuple[int, ...]]) -> tuple[TensorSlice, ...]:
    """Every HF tensor, by its name and shape, as a slice of a contiguous parameter of the same name."""
    return tuple(
        TensorSlice(name, shape, (0,) * len(shape), shape, name, 0, _strides(shape))
        for name, shape in tensors.items()
    )


@dataclass
class _Arriving:
    """Tensors of which parts are here."""

    device: torch.device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)  # elements
    num_bytes: int = 0

    def take(self, part: TensorSlice, values: Tensor) -> Tensor | None:
        """Put a part into its place; the tensor, once it is whole."""
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
    """Sits where the engine's loader is. All it needs are names, shapes and types."""

    def __init__(
        self,
        tensors: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        loader: Loader,
        *,
        device: torch.device,
        batch_bytes: int,
    ) -> None:
        """`batch_bytes` of whole tensors are handed to the loader at once, or one that is larger."""
        self._slices = whole_slices(tensors)
        self._dtypes = tuple(dtypes[name] for name in tensors)
        self._loader = loader
        self._device = device
        self._batch_bytes = batch_bytes
        self._part: Part | None = None
        self._member = Membership()
        self._received: int | None = None
        self._torn: str | None = None
        self.peak_bytes = 0  # of tensors that were here at once, in the last update

    @property
    def torn(self) -> str | None:
        """Why the weights in use are not those of any version; None where they are."""
        return self._torn

    def describe(self) -> ReceiverLayout:
        """All tensors, whole."""
        return ReceiverLayout(self._slices, self._dtypes, node_name(), takes_changes=False)

    def prepare(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._part = part

    def receive(self, session: RefitSession) -> ReceiveReport:
        """Hand everything that comes to the loader, and say what that was. Raises `RefitFailed`."""
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
                f"refit to version {session.version}: {len(under_way.missing)} tensors did not come whole to "
                f"generation rank {part.rank}, first {min(under_way.missing)}"
            )
        self._received = session.version
        return ReceiveReport({} if session.transport == "files" else fingerprints, pieces.num_bytes)

    def commit(self, version: int) -> None:
        """Make what was loaded the weights in use. Raises `RefitFailed` where another version was."""
        if self._received != version:
            raise RefitFailed(
                f"told to use version {version}, but "
                f"{'nothing' if self._received is None else f'version {self._received}'} was loaded whole"
            )
        self._loader.finish()
        self._received, self._torn = None, None

    def abandon(self) -> None:
        """Forget an update that did not finish; weights that it has written to stay `torn`."""
        self._received = None

    def _load_if_full(
        self, session: RefitSession, part: Part, under_way: _Arriving, batch: dict[str, Tensor]
    ) -> None:
        here = sum(tensor.nbytes for tensor in batch.values())
        self.peak_bytes = max(self.peak_bytes, here + under_way.num_bytes)
        if here >= self._batch_bytes:
            self._load(session, part, batch)

    def _load(self, session: RefitSession, part: Part, batch: dict[str, Tensor]) -> None:
        if not batch:
            return
        self._torn = (
            f"generation rank {part.rank} was being brought to version {session.version} through its loader, "
            "and that did not finish: its weights are of two versions until a whole refit has been done"
        )
        self._loader.load(batch)
        batch.clear()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
