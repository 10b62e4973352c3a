"""Ends of the weight exchange: a sender on each policy rank, a receiver on each engine rank.

`arriving` yields pieces of tensors in sequence, independent of the transport.
"""

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view

from .channel import ReceivingChannel, receiving_channel, sending_channel
from .delta import BrokenChanges, LastSent, apply
from .files import VersionFolder
from .messages import (
    CorruptWeights,
    Part,
    PartBucket,
    ReceiveReport,
    ReceiverLayout,
    RefitFailed,
    RefitSession,
    SenderLayout,
    SendReport,
    combine,
    fingerprint,
    receiver_name,
    sender_name,
)
from .process_group import Membership

Piece = tuple[TensorSlice, Tensor]  # of the receiver's slices, and its elements in the piece's shape
Change = Callable[[PartBucket, Tensor], None]  # adds changes to the weights held; see `delta`


class Arrivals:
    """All pieces of a layout. The values of a piece are valid until the next one is requested."""

    def __init__(self, pieces: Callable[["Arrivals"], Iterator[Piece]]) -> None:
        self._pieces = pieces
        self.num_bytes = 0  # received; with files, read

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces(self)


@contextmanager
def arriving(
    part: Part,
    layout: ReceiverLayout,
    session: RefitSession,
    member: Membership,
    change: Change | None = None,
) -> Iterator[Arrivals]:
    """Meet the senders, or open their files. Buckets of changes go to `change` and give no pieces."""
    if session.transport == "files":
        with closing(VersionFolder(Path(session.place), session.version)) as folder:
            yield Arrivals(lambda arrivals: _read(arrivals, folder, layout))
    elif not part.buckets:
        yield Arrivals(lambda arrivals: iter(()))
    else:
        with receiving_channel(part, session, member) as channel:
            yield Arrivals(lambda arrivals: _received(arrivals, part, channel, change))


def torch_dtype(name: str) -> torch.dtype:
    """torch's type by its name in messages."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def pieces_of(bucket: PartBucket, content: Tensor) -> list[Piece]:
    """The slices of a bucket and their elements, of each slice's shape; `content` has all its bytes."""
    values = content.view(torch_dtype(bucket.dtype))
    flat = values.split([part.num_elements for part in bucket.slices])
    return [(part, values.view(part.size)) for part, values in zip(bucket.slices, flat, strict=True)]


def _read(arrivals: Arrivals, folder: VersionFolder, layout: ReceiverLayout) -> Iterator[Piece]:
    for part, dtype in zip(layout.slices, layout.dtypes, strict=True):
        for piece in folder.pieces(part, torch_dtype(dtype)):
            arrivals.num_bytes = folder.num_bytes
            yield piece


def _received(
    arrivals: Arrivals, part: Part, channel: ReceivingChannel, change: Change | None
) -> Iterator[Piece]:
    for bucket in part.buckets:
        content = channel.next_bucket()
        arrivals.num_bytes += content.numel()
        if content.numel() == bucket.num_bytes:
            yield from pieces_of(bucket, content)
        elif change is not None:
            change(bucket, content)
        else:
            raise RefitFailed(
                f"{receiver_name(part.rank)} received changes without holding the version that they apply to"
            )
        channel.taken()


class WeightSender:
    """Sends the weights of a policy worker. `parameters` is called in each refit."""

    def __init__(self, slices: Sequence[TensorSlice], parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        self._slices = tuple(slices)
        self._parameters = parameters
        self._part: Part | None = None
        self._last: LastSent | None = None
        self._member = Membership()

    def describe(self) -> SenderLayout:
        """Return the slices that this rank holds, and its machine."""
        return SenderLayout(self._slices, node_name())

    def prepare(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._part, self._last = part, LastSent(part)

    def send(self, session: RefitSession) -> SendReport:
        """Send all buckets, converted to the receivers' types. Raises `RefitFailed`."""
        part, last = _prepared(self._part), self._last
        assert last is not None
        if not part.buckets:
            return SendReport({}, extra_bytes=0)
        compare = session.base is not None and last.version == session.base
        last.version = None  # until all buckets are sent
        filling = _Filling(self._parameters(), session)
        with sending_channel(part, session, self._member) as channel:
            for number, bucket in enumerate(part.buckets):
                slot = channel.slot(number)
                filling.fill(bucket, slot)
                changes = last.changes(number, slot.cpu(), compare=compare) if session.keep else None
                if changes is not None:
                    slot[: len(changes)] = torch.frombuffer(changes, dtype=torch.uint8)
                channel.publish(number, bucket.num_bytes if changes is None else len(changes))
            channel.drain()
            extra_bytes = channel.num_bytes
        last.version = session.version if session.keep else None
        if session.transport == "files":  # receivers check what they read by the manifest
            return SendReport({}, extra_bytes, of_pieces=tuple(filling.of_pieces))
        return SendReport(filling.combined(), extra_bytes, last.num_bytes)


class _Filling:
    """Fills buckets from parameters and computes fingerprints of the values."""

    def __init__(self, parameters: Mapping[str, Tensor], session: RefitSession) -> None:
        self._parameters = parameters
        self._session = session
        self._known: dict[tuple[str, TensorSlice], int] = {}  # a sender may have the same for several groups
        self._sums: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.of_pieces: list[int] = []  # in order

    def fill(self, bucket: PartBucket, slot: Tensor) -> None:
        """Convert the bucket's slices into its slot ([bytes] uint8)."""
        for piece, values in pieces_of(bucket, slot):
            values.copy_(local_view(self._parameters, piece))
            if not self._session.checks(piece.name):
                continue
            key = bucket.dtype, piece
            if key not in self._known:
                self._known[key] = fingerprint(values, piece.start, piece.shape)
            self.of_pieces.append(self._known[key])
            for receiver in bucket.receivers:
                self._sums[receiver, piece.name].append(self._known[key])

    def combined(self) -> dict[tuple[int, str], int]:
        """Return the fingerprints by receiver and tensor."""
        return {key: combine(found) for key, found in self._sums.items()}


@dataclass(eq=False)
class _Update:
    """A refit at one receiver."""

    session: RefitSession
    held: int | None  # version of all of `weights` at its start
    over: bool = False  # abandoned, or another refit has started


class WeightReceiver:
    """Receives weights in the process that owns an engine's parameters.

    *Staged*: `weights` are separate from the tensors in use, and `commit` puts them into use; a failed refit
    leaves the engine unchanged. They keep the committed version, so that the next refit may send only
    changes.

    *In place*: `weights` are the tensors in use, written while the engine is paused, without memory other
    than the buckets. A failed refit may leave them corrupt: the engine must not answer until a complete refit
    has been committed.
    """

    def __init__(
        self,
        slices: Sequence[TensorSlice],
        weights: Callable[[], Mapping[str, Tensor]],
        commit: Callable[[int], None],
        *,
        in_place: bool = False,
        takes_changes: bool = True,
    ) -> None:
        """`takes_changes`: `weights` still hold the committed version after `commit`."""
        self._slices = tuple(slices)
        self._weights = weights
        self._commit = commit
        self._in_place = in_place
        self._takes_changes = takes_changes
        self._layout: ReceiverLayout | None = None
        self._held: int | None = None  # version of all of `weights`
        self._part: Part | None = None
        self._member = Membership()
        self._received: int | None = None
        self._corruption: str | None = None
        self._update: _Update | None = None
        self._lock = threading.Lock()  # an abandoned update writes nothing afterwards

    @property
    def corruption(self) -> str | None:
        """Reason why the weights in use are not of one version; None if they are."""
        return self._corruption

    def describe(self) -> ReceiverLayout:
        """Return the slices that this rank needs, and its machine."""
        if self._layout is None:
            weights = self._weights()
            dtypes = (str(weights[part.param].dtype).removeprefix("torch.") for part in self._slices)
            self._layout = ReceiverLayout(self._slices, tuple(dtypes), node_name(), self._takes_changes)
        return self._layout

    def prepare(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._part = part

    def receive(self, session: RefitSession) -> ReceiveReport:
        """Write all buckets and fingerprint the result. Raises `RefitFailed`."""
        return self.begin(session)()

    def begin(self, session: RefitSession) -> Callable[[], ReceiveReport]:
        """Return `receive` for a call in another thread; `abandon` stops it from now on."""
        with self._lock:
            if self._update is not None:
                self._update.over = True
            update = self._update = _Update(session, self._held)
            self._held, self._received = None, None
        return lambda: self._receive(update)

    def _receive(self, update: _Update) -> ReceiveReport:
        self._check_not_over(update)
        session, held = update.session, update.held
        part, layout = _prepared(self._part), self.describe()
        weights = self._weights()

        def change(bucket: PartBucket, content: Tensor) -> None:
            if held is None or held != session.base:
                raise RefitFailed(
                    f"{self._name} received the changes since version {session.base}, but holds "
                    f"{'no complete version' if held is None else f'version {held}'}"
                )
            self._about_to_write(update)
            try:
                apply(bucket, content, weights)
            except BrokenChanges as error:
                raise CorruptWeights(
                    f"{self._name} cannot decode the changes for version {session.version} from "
                    f"{sender_name(bucket.sender)}: {error}"
                ) from error

        sums: dict[str, list[int]] = defaultdict(list)
        with arriving(part, layout, session, self._member, change) as pieces:
            for piece, values in pieces:
                self._about_to_write(update)
                local_view(weights, piece).copy_(values)
                if session.transport == "files":  # no sender reports fingerprints
                    sums[piece.name].append(fingerprint(values, piece.start, piece.shape))
        found = self._fingerprints(weights, session)
        for name, expected in sums.items():
            if combine(expected) != found[name]:
                raise CorruptWeights(
                    f"{self._name} read {name} for version {session.version}, but holds other values"
                )
        with self._lock:
            self._check_not_over(update)
            self._received = session.version
        return ReceiveReport({} if sums else found, pieces.num_bytes)

    def commit(self, version: int) -> None:
        """Put the received weights into use. Raises `RefitFailed` if they are of another version."""
        if self._received != version:
            raise RefitFailed(
                f"{self._name} was requested to use version {version}, but has received "
                f"{'none' if self._received is None else f'version {self._received}'}"
            )
        self._commit(version)
        self._held, self._received, self._corruption = version, None, None

    def abandon(self) -> None:
        """Forget an update that did not finish; weights in use that it has written to stay corrupt.

        It writes nothing after this, even if another thread is still receiving.
        """
        with self._lock:
            self._received = None
            if self._update is not None:
                self._update.over = True

    @property
    def _name(self) -> str:
        return "this generation rank" if self._part is None else f"generation rank {self._part.rank}"

    def _about_to_write(self, update: _Update) -> None:
        with self._lock:
            self._check_not_over(update)
            if self._in_place and self._corruption is None:
                self._corruption = (
                    f"{self._name} was being brought to version {update.session.version} in place, which "
                    "did not finish: its weights are of two versions until a complete refit"
                )

    def _check_not_over(self, update: _Update) -> None:
        if update.over:
            raise RefitFailed(
                f"refit to version {update.session.version}: {self._name} was still receiving when the refit "
                "was abandoned"
            )

    def _fingerprints(self, weights: Mapping[str, Tensor], session: RefitSession) -> dict[str, int]:
        sums: dict[str, list[int]] = defaultdict(list)
        for part in filter(lambda part: session.checks(part.name), self._slices):
            sums[part.name].append(fingerprint(local_view(weights, part), part.start, part.shape))
        return {name: combine(found) for name, found in sums.items()}


def node_name() -> str:
    """The machine that this process runs on, as both sides of an exchange name it."""
    return socket.gethostname()


def _prepared(part: Part | None) -> Part:
    if part is None:
        raise RefitFailed("this rank takes part in a refit before it was given its part of the plan")
    return part
