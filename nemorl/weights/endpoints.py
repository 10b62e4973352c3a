"""Ends of the weight exchange: a sender on each policy rank, a receiver on each engine rank."""

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from nemorl.device import gpu_identity
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view

from .delta import BrokenChanges, LastSent, apply
from .files import VersionFolder, file_sender
from .messages import (
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
    combine,
    fingerprint,
    machine,
    queue_fingerprint,
    read_fingerprints,
    receiver_name,
    sender_name,
)
from .process_group import Membership, group_receiver, group_sender
from .shared_memory import socket_receiver, socket_sender

_CPU = torch.device("cpu")
Piece = tuple[TensorSlice, Tensor]  # of the receiver's slices, and its elements in the piece's shape
Change = Callable[[PartBucket, Tensor], None]  # adds changes to the weights held; see `delta`
K = TypeVar("K")


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


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
    fingerprint: int | None = None  # of the last piece, if it was checked when it was read
    clock: StageClock = field(default_factory=StageClock)  # who takes a piece ends the stage of that


@contextmanager
def arriving(
    part: Part,
    layout: ReceiverLayout,
    session: RefitSession,
    member: Membership,
    change: Change | None = None,
) -> Iterator[Arrivals]:
    """Meet the senders, or open their files. Buckets of changes go to `change` and give no pieces."""
    arrivals = Arrivals()
    clock = arrivals.clock

    def read(folder: VersionFolder) -> Iterator[Piece]:
        for need, dtype in zip(layout.slices, layout.dtypes, strict=True):
            for piece, values, arrivals.fingerprint in folder.pieces(need, torch_dtype(dtype)):
                arrivals.num_bytes = folder.num_bytes
                clock.end("read")
                yield piece, values

    def receive(channel: ReceivingChannel) -> Iterator[Piece]:
        for bucket in part.buckets:
            content = channel.next_bucket()
            clock.end("wait")
            arrivals.num_bytes += content.numel()
            if content.numel() == bucket.num_bytes:
                yield from _pieces_of(bucket, content)
            else:
                assert change is not None, "a refit sends changes only if all receivers take them"
                change(bucket, content)
                clock.end("copy")
            channel.taken()

    if session.transport == "files":
        with closing(VersionFolder(Path(session.place), session.version)) as folder:
            clock.end("connect")
            arrivals.pieces = read(folder)
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
        meeting: AbstractContextManager[SendingChannel]
        match session.transport:
            case "shared_memory" | "cuda_ipc":
                meeting = socket_sender(part, session)
            case "gloo" | "nccl":
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
                if session.keep:
                    changes = last.changes(number, slot.cpu(), compare=compare)
                    if changes is not None:
                        sent_bytes = len(changes)
                        slot[:sent_bytes] = torch.frombuffer(changes, dtype=torch.uint8)
                    clock.end("encode")
                channel.publish(number, sent_bytes)
                num_bytes += sent_bytes
            channel.drain()
            clock.end("wait")
        clock.end("connect")
        last.version = session.version if session.keep else None
        # with files, receivers check what they read by the manifest
        fingerprints = {} if session.transport == "files" else _combined(sums)
        in_order = tuple(read_fingerprints(of_pieces)) if session.transport == "files" else ()
        clock.end("fingerprint")
        return SendReport(fingerprints, channel.num_bytes, last.num_bytes, in_order, num_bytes, clock.seconds)


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

    def _about_to_write(self, update: UpdateCall) -> None:
        with self._lock:
            self._check_not_over(update)
            if self._writes is not None and self.corruption is None:
                self.corruption = self._unfinished(update.session, self._writes)

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

    def _receive(self, update: UpdateCall) -> ReceiveReport:
        self._check_not_over(update)
        session, held = update.session, update.held
        part, layout = prepared(self._part), self.describe()
        weights = self._weights()

        def change(bucket: PartBucket, content: Tensor) -> None:
            if held is None or held != session.base:
                there = "no complete version" if held is None else f"version {held}"
                changes = f"the changes since version {session.base}"
                raise RefitFailed(f"{self._name} received {changes}, but holds {there}")
            self._about_to_write(update)
            try:
                apply(bucket, content, weights)
            except BrokenChanges as error:
                changes = f"the changes for version {session.version} from {sender_name(bucket.sender)}"
                raise CorruptWeights(f"{self._name} cannot decode {changes}: {error}") from error

        read: dict[str, list[int]] = defaultdict(list)  # fingerprints, of files: no sender reports them
        with arriving(part, layout, session, self._member, change) as arrivals:
            for piece, values in arrivals.pieces:
                self._about_to_write(update)
                local_view(weights, piece).copy_(values)
                arrivals.clock.end("copy")
                if session.transport == "files":
                    known = arrivals.fingerprint
                    if known is None:
                        known = fingerprint(values, piece.start, piece.shape)
                    read[piece.name].append(known)
                    arrivals.clock.end("fingerprint")
        held_sums: dict[str, list[Tensor]] = defaultdict(list)
        for need in self._slices:
            if session.checks(need.name):
                values = local_view(weights, need)
                held_sums[need.name].append(queue_fingerprint(values, need.start, need.shape))
        found = _combined(held_sums)
        for name, expected in read.items():
            if combine(expected) != found[name]:
                reason = f"read {name} for version {session.version}, but holds other values"
                raise CorruptWeights(f"{self._name} {reason}")
        self._has_received(update)
        arrivals.clock.end("fingerprint")
        return ReceiveReport({} if read else found, arrivals.num_bytes, arrivals.clock.seconds)

    def commit(self, version: int) -> None:
        self._check_received(version)
        self._commit(version)
        self._held, self._received, self.corruption = version, None, None


def _combined(sums: Mapping[K, list[Tensor]]) -> dict[K, int]:
    """Combined fingerprints by key, from those that were queued."""
    values = iter(read_fingerprints([total for queued in sums.values() for total in queued]))
    return {key: combine([next(values) for _ in queued]) for key, queued in sums.items()}
