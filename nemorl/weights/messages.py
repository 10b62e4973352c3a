"""Messages between the driver and the ranks of an exchange.

They are frozen and consist of integers, strings and tuples only, so that an engine may send them to its
processes as JSON (pydantic's `TypeAdapter`). Imports no torch.

One refit: where its ranks meet, how long they wait, and what a wait says when it fails.

Memory for buckets on their way: two slots, so that one is filled while the other travels.

A checksum of a tensor that does not depend on how the tensor is sharded.

    fingerprint = sum over elements of  bits(element) * weight(position)   mod 2^64

where `bits` is the element's storage read as a signed integer and `weight` an odd pseudo-random number
derived from the element's position in the full HF tensor. It is additive: the fingerprints of slices on any
ranks add up to that of the tensor. An odd weight cannot cancel a difference in one element, so any changed
bit is detected; different weights detect elements that were exchanged.

The weight of a position is the product of one odd number per axis (products of odd numbers are odd). A row
then costs one multiplication and one addition per element, a tenth of hashing every position: 0.2 s for
135 million elements on one core.
"""

import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from nemorl.errors import RunError
from nemorl.models.slices import TensorSlice

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of the types that travel, by torch's names


@dataclass(frozen=True)
class SenderLayout:
    """What a policy rank holds."""

    slices: tuple[TensorSlice, ...]
    node: str = ""  # the machine it runs on; receivers there are served first


@dataclass(frozen=True)
class ReceiverLayout:
    """What a generation rank needs. Raises ValueError for a type that does not travel."""

    slices: tuple[TensorSlice, ...]
    dtypes: tuple[str, ...]  # of each slice, by torch's name: "bfloat16"
    node: str = ""
    takes_changes: bool = True  # it keeps what came, so that a refit may bring only what changed since

    def __post_init__(self) -> None:
        if len(self.dtypes) != len(self.slices):
            raise ValueError(f"{len(self.dtypes)} types for {len(self.slices)} slices: give one for each")
        for part, dtype in zip(self.slices, self.dtypes, strict=True):
            if dtype not in ITEM_BYTES:
                raise ValueError(
                    f"the engine keeps {part.param} as {dtype}; the exchange carries {', '.join(ITEM_BYTES)}"
                )


@dataclass(frozen=True)
class PartBucket:
    """A bucket as one of its ranks handles it.

    In shared memory all its receivers read the same slot. By messages the sender sends it to the first
    receiver, and each receiver to the next one.
    """

    sender: int
    receivers: tuple[int, ...]
    dtype: str  # of all elements on the wire: the receivers'
    slices: tuple[TensorSlice, ...]  # they lie in the bucket in this order, without gaps

    @property
    def num_elements(self) -> int:
        """Elements of all slices."""
        return sum(part.num_elements for part in self.slices)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slices."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Part:
    """What one rank does in every refit, until a layout changes."""

    rank: int  # among all ranks of its side
    buckets: tuple[PartBucket, ...]


@dataclass(frozen=True)
class SendReport:
    """What one sender did."""

    fingerprints: Mapping[tuple[int, str], int]  # by receiver and tensor
    extra_bytes: int  # memory for buckets, while it lasted
    kept_bytes: int = 0  # host memory for the last version sent, kept from refit to refit
    of_pieces: tuple[int, ...] = ()  # fingerprints in the order of the part's slices, for files


@dataclass(frozen=True)
class ReceiveReport:
    """Weights that one receiver now has, staged or in place."""

    fingerprints: Mapping[str, int]  # by tensor
    num_bytes: int  # received; with files, read


_RETRY_SECONDS = 0.005
_LOOK_UP_SECONDS = 0.1  # how often a wait looks whether the session is over
_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux, 104 elsewhere

T = TypeVar("T")


class RefitFailed(RunError):
    """A refit did not finish. Receivers still have the version they had before."""


class CorruptWeights(RefitFailed):
    """What a receiver holds is not what was sent; the message names the tensors."""


class RefitDeadline(RefitFailed):
    """A rank waited until the deadline; the message says for whom, for what and since when."""


class PeerClosed(RefitFailed):
    """The other rank went away, mostly because it failed itself: then its own error is the cause."""


Transport = Literal["shared_memory", "cuda_ipc", "gloo", "nccl", "files"]


@dataclass(frozen=True)
class RefitSession:
    """What all ranks of one refit share."""

    version: int
    transport: Transport
    place: str  # where they meet: the folder of sockets or of files, or host:port of the store
    deadline_seconds: float  # of each rank, from its start
    rendezvous: int = 0  # ranks of a process group stay connected from refit to refit of one meeting
    attempt: int = 0  # number of this refit, counting failed ones
    num_senders: int = 0
    num_receivers: int = 0
    keep: bool = False  # senders keep what they send, so that the next refit may send only changes
    base: int | None = None  # version that all receivers hold; only changes to it are sent
    check_one_in: int = 1  # one of this number of tensors is checked, all in turn
    check_turn: int = 0  # number of this refit; its version may skip numbers

    def checks(self, tensor: str) -> bool:
        """Whether a tensor's fingerprints are compared in this refit."""
        return (zlib.crc32(tensor.encode()) + self.check_turn) % self.check_one_in == 0

    def socket_path(self, sender: int) -> Path:
        """Where a sender listens, of shared memory or CUDA IPC."""
        return Path(self.place) / f"{sender}.sock"


@contextmanager
def socket_session(
    version: int,
    deadline_seconds: float,
    transport: Literal["shared_memory", "cuda_ipc"] = "shared_memory",
) -> Iterator[RefitSession]:
    """A session whose folder exists as long as the block; leaving the block ends the waits of all ranks.

    All ranks are on this machine. The folder is private to the user.
    """
    folder = Path(tempfile.mkdtemp(prefix="nemorl-refit-"))  # of mode 0700
    try:
        session = RefitSession(version, transport, str(folder), deadline_seconds)
        length = len(str(session.socket_path(sender=10**6)))
        if length > _MAX_SOCKET_PATH:
            raise RefitFailed(
                f"{folder} is too long a path for sockets ({length} characters, at most {_MAX_SOCKET_PATH}); "
                "set TMPDIR to a shorter one"
            )
        yield session
    finally:
        # Renamed first: a sender that opens its socket during the removal would keep the folder alive.
        with suppress(FileNotFoundError):  # something else cleaned up already
            shutil.rmtree(folder.rename(f"{folder}.over"), ignore_errors=True)


class Waiting:
    """The waits of one rank in one refit: all end at the deadline or soon after the session."""

    def __init__(self, who: str, session: RefitSession, over: Callable[[], bool]) -> None:
        """`over` returns True if the driver has ended the session."""
        self._who = who
        self._session = session
        self._over = over
        self._end = time.monotonic() + session.deadline_seconds

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return max(0.0, self._end - time.monotonic())

    def call(self, connection: socket.socket, operation: Callable[[], T], what: str, peer: str) -> T:
        """Result of a socket operation that may have to wait for `what`, which `peer` is to do.

        The operation must leave nothing half done when it times out: it is then called again.
        """
        began, clock = time.monotonic(), datetime.now()
        connection.settimeout(_LOOK_UP_SECONDS)
        while True:
            # Looked up before the operation: a peer whose death ended the session is then still named.
            over = self._over()
            try:
                return operation()
            except TimeoutError:
                self._check(what, began, clock, over)
            except (ConnectionError, EOFError) as error:
                raise self.closed(what, peer) from error

    def until(self, there: Callable[[], bool], what: str) -> None:
        """Return once something is there."""
        began, clock = time.monotonic(), datetime.now()
        while not there():
            self._check(what, began, clock, self._over())
            time.sleep(_RETRY_SECONDS)

    def closed(self, what: str, peer: str) -> PeerClosed:
        """The error of a wait for `what` during which `peer` went away."""
        return PeerClosed(
            f"refit to version {self._session.version}: {self._who} waited for {what}, but {peer} "
            "closed its connection; its process ended or its own part failed"
        )

    def in_vain(self, what: str, began: float) -> None:
        """Raise if the deadline has passed or the session is over, in a wait that began then (monotonic)."""
        clock = datetime.now() - timedelta(seconds=time.monotonic() - began)
        self._check(what, began, clock, self._over())

    def connect(self, path: Path, peer: str) -> socket.socket:
        """A connection to the socket at `path`, which `peer` may yet have to open."""
        began, clock = time.monotonic(), datetime.now()
        while True:
            connection = refit_socket()
            connection.settimeout(_LOOK_UP_SECONDS)
            try:
                connection.connect(str(path))
                return connection
            except (
                FileNotFoundError,
                ConnectionRefusedError,
                BlockingIOError,
            ):  # not yet, or too many at once
                connection.close()
            self._check(f"{peer} to listen", began, clock, self._over())
            time.sleep(_RETRY_SECONDS)

    def listen(self, path: Path, backlog: int) -> socket.socket:
        """A socket listening at `path`. Raises `PeerClosed` where the session ended before."""
        listener = refit_socket()
        try:
            listener.bind(str(path))
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            if not self._over():
                raise
            raise PeerClosed(
                f"refit to version {self._session.version}: {self._who} started to listen after the driver "
                "had ended the refit, because another rank failed"
            ) from error
        return listener

    def _check(self, what: str, began: float, clock: datetime, over: bool) -> None:
        """Raise if a wait that began at `began` (monotonic) and `clock` (wall time) cannot succeed."""
        wait = (
            f"refit to version {self._session.version}: {self._who} waits for {what} since {clock:%H:%M:%S}"
        )
        seconds = f"({time.monotonic() - began:.1f} s)"
        if time.monotonic() >= self._end:
            raise RefitDeadline(f"{wait} {seconds}; the deadline is {self._session.deadline_seconds:g} s")
        if over:
            raise PeerClosed(f"{wait} {seconds}; the driver ended the refit, because another rank failed")


def refit_socket() -> socket.socket:
    """Return an unconnected socket of a refit. It keeps message boundaries."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def sender_name(rank: int) -> str:
    """What messages call a sender."""
    return f"policy rank {rank}"


def receiver_name(rank: int) -> str:
    """What messages call a receiver."""
    return f"generation rank {rank}"


SLOTS = 2  # bucket n lies in slot n % SLOTS


class Slots:
    """Slots of a part's largest bucket."""

    def __init__(self, part: Part, device: torch.device | None = None) -> None:
        largest = max((bucket.num_bytes for bucket in part.buckets), default=0)
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(SLOTS)]

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return sum(slot.numel() for slot in self._slots)

    def bucket(self, number: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8: the beginning of the slot in which bucket `number` lies."""
        return self._slots[number % SLOTS][:num_bytes]


_INTEGERS = {4: torch.int32, 2: torch.int16}  # by element size
_CHUNK_ELEMENTS = 1 << 16  # 512 KB of int64: stays in a core's cache


def fingerprint(values: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the fingerprint of a box, in [0, 2^64).

    `values` are its elements (float32, bfloat16 or float16, any strides), `start` its first corner in the
    full tensor of the given `shape`. Uses half a megabyte or one row of int64 in addition to the values.
    """
    bits = values.detach().view(_INTEGERS[values.element_size()])
    weights = [
        _axis_weights(axis, extent, values.device)[first : first + count]
        for axis, (extent, first, count) in enumerate(zip(shape, start, values.shape, strict=True))
    ]
    rows = max(1, _CHUNK_ELEMENTS // max(1, bits[0].numel()))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk, first_weights in zip(bits.split(rows), weights[0].split(rows), strict=True):
        sums = chunk
        for axis_weights in reversed((first_weights, *weights[1:])):
            sums = torch.mul(sums, axis_weights).sum(-1)  # int64, wrapping around at 2^64
        total += sums
    return int(total) % 2**64


def combine(fingerprints: list[int]) -> int:
    """The fingerprint of what non-overlapping boxes cover together."""
    return sum(fingerprints) % 2**64


@lru_cache(maxsize=64)
def _axis_weights(axis: int, extent: int, device: torch.device) -> Tensor:
    """[extent] int64, odd: SplitMix64 (Steele, Lea, Flood 2014) of the index, a stream for each axis."""
    state = torch.arange(1, extent + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    state += _signed(0xD1B54A32D192ED03 * (axis + 1))
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return (state ^ _shifted(state, 31)) | 1


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The same 64 bits as a signed number, which is what torch takes."""
    return (value + 2**63) % 2**64 - 2**63
