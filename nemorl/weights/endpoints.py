"""Ends of the weight exchange: a sender on each policy rank, a receiver on each engine rank."""

import threading
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from nemorl.device import gpu_identity
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view

from .delta import BrokenChanges, LastSent, apply
from .files import StoredVersion, file_sender
from .messages import (
    ITEM_BYTES,
    CorruptWeights,
    Part,
    PartBucket,
    ReceiveReport,
    ReceiverLayout,
    ReceivingChannel,
    RefitFailed,
    RefitSession,
    SenderLayout,
    SendingChannel,
    SendReport,
    StageClock,
    WrittenBox,
    combine,
    machine,
    queue_fingerprint,
    read_fingerprints,
    receiver_name,
    sender_name,
    torch_dtype,
)
from .process_group import Membership, group_receiver, group_sender
from .shared_memory import socket_receiver, socket_sender

_CPU = torch.device("cpu")
Piece = tuple[TensorSlice, Tensor]  # of the receiver's slices, and its elements in the piece's shape
# Adds changes to the weights held, see `delta`; of files, to a box, with the folder of its new values.
Change = Callable[[PartBucket, Tensor, str | None], None]
NOTHING: Mapping[TensorSlice, str] = MappingProxyType({})
K = TypeVar("K")


def prepared(part: Part | None) -> Part:
    if part is None:
        raise RefitFailed("this rank takes part in a refit before it was given its part of the plan")
    return part


def _pieces_of(bucket: PartBucket, content: Tensor) -> list[Piece]:
    values = content.view(torch_dtype(bucket.dtype))
    flat = values.split([part.num_elements for part in bucket.slices])
    return [(part, values.view(part.size)) for part, values in zip(bucket.slices, flat, strict=True)]


@dataclass
class Arrivals:
    """All pieces of a layout. The values of a piece are valid until the next one is requested."""

    pieces: Iterator[Piece] = iter(())
    num_bytes: int = 0  # received; with files, read
    read: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # see `arriving`
    folder: str | None = None  # that has the last piece as a complete box
    version: StoredVersion | None = None  # that is read
    clock: StageClock = field(default_factory=StageClock)  # who takes a piece ends the stage of that


@contextmanager
def arriving(
    part: Part,
    layout: ReceiverLayout,
    session: RefitSession,
    member: Membership,
    change: Change | None = None,
    held: Mapping[TensorSlice, str] = NOTHING,
) -> Iterator[Arrivals]:
    """Meet the senders, or open their files. Buckets of changes go to `change` and give no pieces.

    Of files, the fingerprints of all boxes are in `read`, by tensor, for `Receiver._check_read`; values that
    are `held` are not read.
    """
    arrivals = Arrivals()
    clock = arrivals.clock

    def read(version: StoredVersion) -> Iterator[Piece]:
        needs = zip(layout.slices, map(torch_dtype, layout.dtypes), strict=True)
        for found in version.pieces(needs, held):
            arrivals.num_bytes = version.num_bytes
            arrivals.read[found.piece.name].append(found.fingerprint)
            clock.end("read")
            for folder, content in found.changes:
                assert change is not None, "only a receiver that takes changes holds boxes"
                change(PartBucket(0, (), found.dtype, (found.piece,)), content, folder)
                clock.end("copy")
            if found.values is not None:
                arrivals.folder = found.folder
                yield found.piece, found.values

    def receive(channel: ReceivingChannel) -> Iterator[Piece]:
        for bucket in part.buckets:
            content = channel.next_bucket()
            clock.end("wait")
            arrivals.num_bytes += content.numel()
            if content.numel() == bucket.num_bytes:
                yield from _pieces_of(bucket, content)
            else:
                assert change is not None, "a refit sends changes only if all receivers take them"
                try:
                    change(bucket, content, None)
                except CorruptWeights:
                    channel.taken()  # raises if the sender ended, since its memory is cleared then
                    raise
                clock.end("copy")
            channel.taken()

    if session.transport == "files":
        version = StoredVersion(session.place, session.version)
        clock.end("connect")
        arrivals.version, arrivals.pieces = version, read(version)
        yield arrivals
    elif not part.buckets:
        yield arrivals
    else:
        meeting: AbstractContextManager[ReceivingChannel] = (
            socket_receiver(part, session)
            if session.transport in ("shared_memory", "cuda_ipc")
            else group_receiver(part, session, member)
        )
        with meeting as channel:
            clock.end("connect")
            arrivals.pieces = receive(channel)
            yield arrivals
        clock.end("wait")


class WeightSender:
    def __init__(
        self,
        slices: Sequence[TensorSlice],
        parameters: Callable[[], Mapping[str, Tensor]],
        device: torch.device = _CPU,
    ) -> None:
        """`device`: of the parameters."""
        self._slices, self._parameters, self._gpu = tuple(slices), parameters, gpu_identity(device)
        self._part: Part | None = None
        self._member = Membership()

    def describe(self) -> SenderLayout:
        return SenderLayout(self._slices, machine(), self._gpu)

    def prepare(self, part: Part) -> None:
        self._part, self._last = part, LastSent(part)

    def send(self, session: RefitSession) -> SendReport:
        part = prepared(self._part)
        if not part.buckets:
            return SendReport({}, extra_bytes=0)
        clock, num_bytes = StageClock(), 0
        last, parameters = self._last, self._parameters()
        compare = session.base is not None and last.version == session.base
        last.version = None  # until all buckets are sent
        known: dict[tuple[str, TensorSlice], Tensor] = {}  # a sender may have the same for several groups
        sums: dict[tuple[int, str], list[Tensor]] = defaultdict(list)  # fingerprints by receiver and tensor
        of_pieces: list[Tensor] = []  # fingerprints in the order of the part's slices
        boxes: list[tuple[int, int | None]] = []  # with files: bytes of each, and the checksum of changes
        meeting: AbstractContextManager[SendingChannel]
        match session.transport:
            case "shared_memory" | "cuda_ipc":
                meeting = socket_sender(part, session)
            case "gloo" | "nccl" | "nixl":
                meeting = group_sender(part, session, self._member)
            case "files":
                meeting = file_sender(part, session)
        with meeting as channel:
            clock.end("connect")
            for number, bucket in enumerate(part.buckets):
                slot = channel.slot(number)
                clock.end("wait")
                for piece, values in _pieces_of(bucket, slot):
                    values.copy_(local_view(parameters, piece))
                    clock.end("pack")
                    if not session.checks(piece.name):
                        continue
                    key = bucket.dtype, piece
                    if key not in known:
                        known[key] = queue_fingerprint(values, piece.start, piece.shape)
                    of_pieces.append(known[key])
                    for receiver in bucket.receivers:
                        sums[receiver, piece.name].append(known[key])
                    clock.end("fingerprint")
                sent_bytes = bucket.num_bytes
                sizes = [sent_bytes]
                if session.transport == "files":  # each box of a bucket can be read alone
                    sizes = [part.num_elements * ITEM_BYTES[bucket.dtype] for part in bucket.slices]
                changes: list[bytearray | None] = [None] * len(sizes)
                if session.keep:
                    content = slot.cpu()
                    changes = last.changes(number, content, sizes, compare=compare)
                    if any(changes):
                        parts = zip(changes, content.split(sizes), strict=True)
                        encoded = torch.cat([_bytes_of(one) if one else whole for one, whole in parts])
                        sent_bytes = encoded.numel()
                        slot[:sent_bytes] = encoded
                    clock.end("encode")
                for one, size in zip(changes, sizes, strict=True):
                    boxes.append((len(one), zlib.crc32(one)) if one else (size, None))
                channel.publish(number, sent_bytes)
                num_bytes += sent_bytes
            channel.drain()
            clock.end("wait")
        clock.end("connect")
        last.version = session.version if session.keep else None
        written: tuple[WrittenBox, ...] = ()
        if session.transport == "files":  # receivers check what they read by the manifest
            found = read_fingerprints(of_pieces)
            written = tuple(WrittenBox(value, *box) for value, box in zip(found, boxes, strict=True))
        fingerprints = {} if written else _combined(sums)
        clock.end("fingerprint")
        return SendReport(fingerprints, channel.num_bytes, last.num_bytes, written, num_bytes, clock.seconds)


def _bytes_of(encoded: bytearray) -> Tensor:
    return torch.frombuffer(encoded, dtype=torch.uint8)


@dataclass(eq=False)
class UpdateCall:
    """One call of `Receiver.receive`."""

    session: RefitSession
    held: int | None  # version of all weights that the receiver keeps, at its start
    over: bool = False  # abandoned, or another refit has started


class Receiver(ABC):
    corruption: str | None = None  # reason why the weights in use are not of one version
    _part: Part | None = None
    _received: int | None = None  # version that is not in use yet
    _held: int | None = None  # version of weights that are kept for the next update, all of them
    _update: UpdateCall | None = None

    def __init__(self, writes: str | None) -> None:
        """`writes`: how an update writes into the weights in use; None if it does not."""
        self._writes = writes
        self._member = Membership()
        self._lock = threading.Lock()  # an abandoned update writes nothing afterwards

    @abstractmethod
    def describe(self) -> ReceiverLayout: ...

    def prepare(self, part: Part) -> None:
        self._part = part

    def receive(self, session: RefitSession) -> ReceiveReport:
        """Take all buckets and fingerprint what came. Raises `RefitFailed`."""
        return self.begin(session)()

    def begin(self, session: RefitSession) -> Callable[[], ReceiveReport]:
        """Return `receive` for a call in another thread; `abandon` stops it from now on."""
        with self._lock:
            if self._update is not None:
                self._update.over = True
            update = self._update = UpdateCall(session, self._held)
            self._held, self._received = None, None
        return lambda: self._receive(update)

    @abstractmethod
    def _receive(self, update: UpdateCall) -> ReceiveReport: ...

    def abandon(self) -> None:
        """Forget an update that did not finish, and stop it; weights in use that it wrote stay corrupt."""
        with self._lock:
            self._received = None
            if self._update is not None:
                self._update.over = True

    @contextmanager
    def _writing(self, update: UpdateCall) -> Iterator[None]:
        """An update is abandoned before the block or after it. Raises `RefitFailed` if it was."""
        with self._lock:
            self._check_not_over(update)
            if self._writes is not None and self.corruption is None:
                self.corruption = self._unfinished(update.session, self._writes)
            yield

    def _has_received(self, update: UpdateCall) -> None:
        with self._lock:
            self._check_not_over(update)
            self._received = update.session.version

    def _check_not_over(self, update: UpdateCall) -> None:
        if update.over:
            reason = f"{self._name} was still receiving when the refit was abandoned"
            raise RefitFailed(f"refit to version {update.session.version}: {reason}")

    @property
    def _name(self) -> str:
        return "this generation rank" if self._part is None else receiver_name(self._part.rank)

    def _check_received(self, version: int) -> None:
        if self._received != version:
            received = "none" if self._received is None else f"version {self._received}"
            reason = f"was requested to use version {version}, but has received {received}"
            raise RefitFailed(f"{self._name} {reason}")

    def _check_read(self, arrivals: Arrivals, layout: ReceiverLayout, found: Mapping[str, int]) -> None:
        """Compare fingerprints, by tensor, with those of files, which no sender reports.

        Raises `CorruptWeights`, which names the box if it is another than was written.
        """
        for name, expected in arrivals.read.items():
            if combine(expected) == found[name]:
                continue
            assert arrivals.version is not None, "only files have been read"
            for need, dtype in zip(layout.slices, layout.dtypes, strict=True):
                if need.name == name:
                    arrivals.version.verify(need, torch_dtype(dtype))
            reason = f"read {name} for version {arrivals.version.version}, but holds other values"
            raise CorruptWeights(f"{self._name} {reason}")

    def _unfinished(self, session: RefitSession, how: str) -> str:
        update = f"{self._name} was being brought to version {session.version} {how}, which did not finish"
        return f"{update}: its weights are of two versions until a complete refit"


class WeightReceiver(Receiver):
    """Receives weights in the process that owns an engine's parameters.

    *Staged*: `weights` are separate from the tensors in use until `commit`; a failed refit leaves the engine
    unchanged. *In place*: they are the tensors in use, written while the engine is paused. A failed refit may
    leave them corrupt: the engine must not answer until a complete refit is committed.
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
        super().__init__("in place" if in_place else None)
        self._slices, self._weights, self._commit = tuple(slices), weights, commit
        self._takes_changes = takes_changes
        self._layout: ReceiverLayout | None = None
        # Of files, the folder whose values a box has: another version, or an attempt to repeat one that was
        # interrupted, reads only what is not there yet.
        self._boxes: dict[TensorSlice, str] = {}

    def describe(self) -> ReceiverLayout:
        if self._layout is None:
            weights = self._weights()
            dtypes = (str(weights[part.param].dtype).removeprefix("torch.") for part in self._slices)
            gpus = {gpu_identity(weights[part.param].device) for part in self._slices}
            # tensors for a loader may wait in memory of the host, next to parameters on a GPU
            where = {"node": machine(), "gpu": max(gpus, default="")}
            self._layout = ReceiverLayout(
                self._slices, tuple(dtypes), takes_changes=self._takes_changes, **where
            )
        return self._layout

    def prepare(self, part: Part) -> None:
        super().prepare(part)
        self._boxes.clear()  # those of another plan do not come again

    def _receive(self, update: UpdateCall) -> ReceiveReport:
        self._check_not_over(update)
        session, held = update.session, update.held
        part, layout = prepared(self._part), self.describe()
        weights, boxes = self._weights(), self._boxes
        if session.transport != "files" or not self._takes_changes:
            boxes.clear()

        def change(bucket: PartBucket, content: Tensor, folder: str | None) -> None:
            if folder is None and (held is None or held != session.base):
                there = "no complete version" if held is None else f"version {held}"
                changes = f"the changes since version {session.base}"
                raise RefitFailed(f"{self._name} received {changes}, but holds {there}")
            with self._writing(update):
                try:
                    apply(bucket, content, weights)
                except BrokenChanges as error:
                    changes = f"the changes for version {session.version} from {sender_name(bucket.sender)}"
                    raise CorruptWeights(f"{self._name} cannot decode {changes}: {error}") from error
                if folder is not None:
                    boxes[bucket.slices[0]] = folder

        with arriving(part, layout, session, self._member, change, boxes) as arrivals:
            for piece, values in arrivals.pieces:
                with self._writing(update):
                    boxes.pop(piece, None)
                    local_view(weights, piece).copy_(values)
                    if arrivals.folder is not None:
                        boxes[piece] = arrivals.folder
                arrivals.clock.end("copy")
        held_sums: dict[str, list[Tensor]] = defaultdict(list)
        for need in self._slices:
            if session.checks(need.name):
                values = local_view(weights, need)
                held_sums[need.name].append(queue_fingerprint(values, need.start, need.shape))
        found = _combined(held_sums)
        try:
            self._check_read(arrivals, layout, found)
        except RefitFailed:  # or the store cannot say which box it is
            boxes.clear()
            raise
        self._has_received(update)
        arrivals.clock.end("fingerprint")
        return ReceiveReport({} if arrivals.read else found, arrivals.num_bytes, arrivals.clock.seconds)

    def commit(self, version: int) -> None:
        self._check_received(version)
        self._commit(version)
        self._held, self._received, self.corruption = version, None, None


def _combined(sums: Mapping[K, list[Tensor]]) -> dict[K, int]:
    """Combined fingerprints by key, from those that were queued."""
    values = iter(read_fingerprints([total for queued in sums.values() for total in queued]))
    return {key: combine([next(values) for _ in queued]) for key, queued in sums.items()}
