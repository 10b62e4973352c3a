"""Messages between the driver and the ranks of an exchange, and what every transport uses.

    layouts  what ranks hold and require            parts    what each rank does in every refit
    session  where the ranks of one refit meet      reports  fingerprints, bytes, seconds

The messages consist of integers, strings and tuples only, so that an engine may send them to its processes as
JSON (pydantic's `TypeAdapter`).
"""

import pickle
import socket
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from nemorl.errors import RunError
from nemorl.models.slices import TensorSlice

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of the types that travel, by torch's names
SLOTS = 2  # bucket n lies in slot n % SLOTS
_ALIGNMENT = 64  # bytes
_RETRY_SECONDS = 0.005
_POLL_SECONDS = 0.1  # how often a wait checks if the session is over

Transport = Literal["shared_memory", "cuda_ipc", "gloo", "nccl", "nixl", "files"]
T = TypeVar("T")


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


@dataclass(frozen=True)
class SenderLayout:
    slices: tuple[TensorSlice, ...]  # that a policy rank holds
    node: str = ""  # the machine it runs on; receivers there are served first
    gpu: str = ""  # the identity of the one that holds the weights; empty for memory of the host

    def __reduce__(self) -> tuple[object, ...]:
        return _sender_layout, (pickle.dumps(self.slices), self.node, self.gpu)


@dataclass(frozen=True)
class ReceiverLayout:
    """Slices that a generation rank requires. Raises ValueError for a type that does not travel."""

    slices: tuple[TensorSlice, ...]
    dtypes: tuple[str, ...]  # of each slice, by torch's name: "bfloat16"
    node: str = ""
    takes_changes: bool = True  # it keeps what came, so that a refit may bring only what changed since
    gpu: str = ""  # the identity of the one that the weights are written to; empty for memory of the host

    def __post_init__(self) -> None:
        if len(self.dtypes) != len(self.slices):
            raise ValueError(f"{len(self.dtypes)} types for {len(self.slices)} slices: give one for each")
        for part, dtype in zip(self.slices, self.dtypes, strict=True):
            if dtype not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise ValueError(f"the engine keeps {part.param} as {dtype}; the exchange carries {known}")

    def __reduce__(self) -> tuple[object, ...]:
        where = self.node, self.takes_changes, self.gpu
        return _receiver_layout, (pickle.dumps((self.slices, self.dtypes)), *where)


@lru_cache(maxsize=1024)
def _shared(pickled: bytes) -> Any:
    """Objects of a layout, once for all ranks with an equal one: thousands of ranks have few layouts."""
    return pickle.loads(pickled)  # noqa: S301 - a part of an object that is unpickled


def _sender_layout(slices: bytes, node: str, gpu: str) -> SenderLayout:
    return SenderLayout(_shared(slices), node, gpu)


def _receiver_layout(requirements: bytes, node: str, takes_changes: bool, gpu: str) -> ReceiverLayout:
    slices, dtypes = _shared(requirements)
    return ReceiverLayout(slices, dtypes, node, takes_changes, gpu)


@dataclass(frozen=True)
class PartBucket:
    """A bucket as one of its ranks handles it; by messages each rank sends it to the next receiver."""

    sender: int
    receivers: tuple[int, ...]
    dtype: str  # of all elements on the wire: the receivers'
    slices: tuple[TensorSlice, ...]  # they lie in the bucket in this order, without gaps

    @property
    def num_bytes(self) -> int:
        return sum(part.num_elements for part in self.slices) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Part:
    rank: int  # among all ranks of its side
    buckets: tuple[PartBucket, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of its largest bucket, aligned for every type."""
        return -(-max((bucket.num_bytes for bucket in self.buckets), default=0) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class SendReport:
    fingerprints: Mapping[tuple[int, str], int]  # by receiver and tensor
    extra_bytes: int  # memory for buckets, while it lasted
    kept_bytes: int = 0  # host memory for the last version sent, kept from refit to refit
    boxes: tuple["WrittenBox", ...] = ()  # in the order of the part's slices, for files
    num_bytes: int = 0  # packed and sent, once for all receivers; with files, written
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage, see `StageClock`


@dataclass(frozen=True)
class WrittenBox:
    """A box as a sender has written it to its file, after the one before."""

    fingerprint: int  # of its values
    num_bytes: int
    changes: int | None  # CRC-32 of these bytes, if they are changes since the last version; None: the values


@dataclass(frozen=True)
class ReceiveReport:
    fingerprints: Mapping[str, int]  # by tensor
    num_bytes: int  # received; with files, read
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage, see `StageClock`


class StageClock:
    """Seconds of one rank in the stages of a refit: `end` counts the time since the last `end`.

        connect      meet the other side; map, allocate and free memory
        wait         until a receiver, or the disk, has taken a bucket; until the next bucket has come
        pack         copy slices into buckets, in the receivers' type
        fingerprint  of what was packed, and of what lies in the weights at the end
        encode       changes since the last version
        read         boxes of files, and check them
        copy         into the weights, or into tensors for a loader
        load         by an engine's loader

    A device's queued work is counted where the host waits for it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


class RefitFailed(RunError):
    """A refit did not finish. Receivers still have the version they had before."""


class CorruptWeights(RefitFailed):
    """A receiver does not hold what was sent; the message names the tensors."""


class RefitDeadline(RefitFailed):
    """A rank waited until the deadline; the message says for whom, for what and since when."""


class PeerClosed(RefitFailed):
    """The other rank went away, mostly because it failed itself: then its own error is the cause."""


@dataclass(frozen=True)
class RefitSession:
    """Settings that all ranks of one refit share."""

    version: int
    transport: Transport
    place: str  # where they meet: the folder of sockets, the URL of files, or host:port of the store
    deadline_seconds: float  # of each rank, from its start
    rendezvous: int = 0  # ranks of a process group stay connected from refit to refit of one meeting
    attempt: int = 0  # number of this refit, counting failed ones; with files a random one
    num_senders: int = 0
    num_receivers: int = 0
    keep: bool = False  # senders keep what they send, so that the next refit may send only changes
    base: int | None = None  # version that all receivers hold; only changes to it are sent
    check_one_in: int = 1  # one of this number of tensors is checked, all in turn
    check_turn: int = 0  # number of this refit; its version may skip numbers

    def checks(self, tensor: str) -> bool:
        return (zlib.crc32(tensor.encode()) + self.check_turn) % self.check_one_in == 0

    def socket_path(self, sender: int) -> Path:
        return Path(self.place) / f"{sender}.sock"


class Venue(ABC):
    """The driver's side of a transport, at which the ranks of a refit meet."""

    def __init__(self, transport: Transport, deadline_seconds: float) -> None:
        self._transport = transport
        self._deadline_seconds = deadline_seconds
        self._rendezvous = 0

    @abstractmethod
    def session(
        self, version: int, num_senders: int, num_receivers: int
    ) -> AbstractContextManager[RefitSession]:
        """A session; the end of the block ends the waits of all ranks."""

    def bucket_bytes(self, requested: int) -> int:
        """Size of buckets; at most `requested`."""
        return requested

    def reset_rendezvous(self) -> None:
        """Keep no connections: a refit has failed, or other ranks may come."""
        self._rendezvous += 1


class Waiting:
    """The waits of one rank in one refit: all end at the deadline or soon after the session."""

    def __init__(self, who: str, session: RefitSession, over: Callable[[], bool]) -> None:
        """`over` returns True if the driver has ended the session."""
        self._refit = f"refit to version {session.version}: {who}"
        self._over = over
        self._deadline_seconds = session.deadline_seconds
        self.end = time.monotonic() + session.deadline_seconds

    def call(self, connection: socket.socket, operation: Callable[[], T], what: str, peer: str) -> T:
        """The operation's result; it is called again after a timeout, so it must leave nothing half done."""
        began = time.monotonic()
        connection.settimeout(_POLL_SECONDS)
        while True:
            # Read before the operation: a peer whose death ended the session is then still named.
            over = self._over()
            try:
                return operation()
            except TimeoutError:
                self.check(what, began, over)
            except (ConnectionError, EOFError) as error:
                raise self.closed(what, peer) from error

    def until(self, is_there: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        while not is_there():
            self.check(what, began)
            time.sleep(_RETRY_SECONDS)

    def connect(self, connection: socket.socket, path: Path, peer: str) -> None:
        connection.settimeout(_POLL_SECONDS)

        def is_connected() -> bool:
            with suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                connection.connect(str(path))
                return True
            return False  # not yet, or too many at once

        self.until(is_connected, f"{peer} to listen")

    def listen(self, path: Path, backlog: int) -> socket.socket:
        listener = refit_socket()
        try:
            listener.bind(str(path))
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            if not self._over():
                raise
            late = "started to listen after the driver had ended the refit, because another rank failed"
            raise PeerClosed(f"{self._refit} {late}") from error
        return listener

    def closed(self, what: str, peer: str) -> PeerClosed:
        reason = f"{peer} closed its connection; its process ended or its own part failed"
        return PeerClosed(f"{self._refit} waited for {what}, but {reason}")

    def check(self, what: str, began: float, over: bool | None = None) -> None:
        """Raise if a wait that began at `began` (monotonic) has met the deadline or the session's end."""
        now, seconds = time.monotonic(), time.monotonic() - began
        since = datetime.now() - timedelta(seconds=seconds)
        wait = f"{self._refit} waits for {what} since {since:%H:%M:%S} ({seconds:.1f} s)"
        if now >= self.end:
            raise RefitDeadline(f"{wait}; the deadline is {self._deadline_seconds:g} s")
        if self._over() if over is None else over:
            raise PeerClosed(f"{wait}; the driver ended the refit, because another rank failed")


def refit_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps message boundaries


def sender_name(rank: int) -> str:
    return f"policy rank {rank}"


def machine() -> str:
    """This machine, or the container: of two with one host name, each has a file system of its own."""
    return f"{socket.gethostname()} {Path('/').stat().st_dev:x}"


def receiver_name(rank: int) -> str:
    return f"generation rank {rank}"


class Slots:
    """Two slots in one piece of memory ([bytes] uint8), so that one is filled while the other travels."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @classmethod
    def allocate(cls, part: Part, device: torch.device | None = None) -> "Slots":
        return cls(torch.empty(SLOTS * part.slot_bytes, dtype=torch.uint8, device=device))

    def bucket(self, number: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8: the beginning of the slot in which bucket `number` lies."""
        start = number % SLOTS * (self.memory.numel() // SLOTS)
        return self.memory[start : start + num_bytes]


class SendingChannel(ABC):
    """A sender's side: slot(n), fill it, publish(n) ... drain(), in the order of its part's buckets."""

    def __init__(self, part: Part, slots: Slots) -> None:
        self._part = part
        self._slots = slots
        self._waits: dict[int, Callable[[], None]] = {}  # each until a published bucket has left its slot

    @property
    def num_bytes(self) -> int:
        return self._slots.memory.numel()

    def slot(self, number: int) -> Tensor:
        """[bytes of the bucket] uint8 to write to, once its slot is free."""
        self._wait_free(number - SLOTS)
        return self._slots.bucket(number, self._part.buckets[number].num_bytes)

    @abstractmethod
    def publish(self, number: int, num_bytes: int) -> None:
        """Let the receivers have the bucket, which is the first `num_bytes` of its slot."""

    def drain(self) -> None:
        for number in sorted(self._waits):
            self._wait_free(number)

    def _wait_free(self, number: int) -> None:
        if number in self._waits:
            self._waits.pop(number)()


class ReceivingChannel(Protocol):
    """A receiver's side: next_bucket(), empty it, taken() ..., in the order of its part's buckets."""

    def next_bucket(self) -> Tensor:
        """[bytes that came] uint8: the part's next bucket, once it is complete."""

    def taken(self) -> None:
        """Return the slot of that bucket."""


# A checksum of a tensor that does not depend on how the tensor is sharded:
#
#     fingerprint = sum over words of  word * weight(position)   mod 2^32, twice, with different weights
#
# A word is 32 bits of a row: one float32, or two neighbors in bfloat16, of which a slice may have only one
# (the other counts as zero). `weight` is a pseudo-random number derived from the word's position in the full
# HF tensor, the product of one number per axis. So the fingerprints of slices on any ranks add up to that of
# the tensor.
#
# Odd weights, as in the first sum, detect any changed bit; different weights detect exchanged elements. In
# the second sum the numbers along the last axis are of any parity: an even number of changed highest bits,
# which cancel in the first, shows there with probability 1/2 in each tensor.
#
# Sums modulo 2^32 are products of int32 matrices. One product gives both, so that each word is read once.
_WORD_BYTES = 4
_HALF = 2**32
_WORDS_PER_PASS = 1 << 24  # of a device without products of integers: theirs take 128 MB


def fingerprint(values: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The fingerprint, in [0, 2^64), of `values` (any strides) from `start` on in a tensor of `shape`."""
    return read_fingerprints([queue_fingerprint(values, start, shape)])[0]


def queue_fingerprint(values: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Both sums ([2] int32) on the device of `values`; the host waits for nothing."""
    words, first = _words(values.detach(), start[-1])
    per_word = _WORD_BYTES // values.element_size()
    *axes, last = range(len(shape))
    of_words = _axis_weights(last, -(-shape[-1] // per_word), first, words.shape[-1], values.device)
    sums = _row_sums(words, of_words)
    for axis in reversed(axes):
        weights = _axis_weights(axis, shape[axis], start[axis], words.shape[axis], values.device)
        sums = _weighted(sums, weights[0])
    return sums


def read_fingerprints(queued: Sequence[Tensor]) -> list[int]:
    """Values of fingerprints from `queue_fingerprint`, in order. Reads each device once."""
    values = [0] * len(queued)
    for device in {total.device for total in queued}:
        there = [number for number, total in enumerate(queued) if total.device == device]
        pairs = torch.stack([queued[number] for number in there]).tolist()
        for number, (odd, mixed) in zip(there, pairs, strict=True):
            values[number] = odd % _HALF + _HALF * (mixed % _HALF)
    return values


def combine(fingerprints: Sequence[int]) -> int:
    """The fingerprint of what these are the slices of."""
    return (
        sum(f % _HALF for f in fingerprints) % _HALF + sum(f // _HALF for f in fingerprints) % _HALF * _HALF
    )


def _words(values: Tensor, start: int) -> tuple[Tensor, int]:
    """Rows of `values`, which begin at element `start` of their axis, as int32, and the first word's number.

    Copies where a row begins or ends within a word, or where its elements are not neighbors in memory.
    """
    per_word = _WORD_BYTES // values.element_size()
    first, before = divmod(start, per_word)
    count = values.shape[-1]
    *rows, step = values.stride()
    places = (values.storage_offset(), before, count, *rows)
    if per_word == 1 or (step == 1 and not any(place % per_word for place in places)):
        return values.view(torch.int32), first
    bits = values.view(torch.int16)
    num_words = -(-(before + count) // per_word)
    padded = bits.new_zeros((*bits.shape[:-1], num_words * per_word))
    padded[..., before : before + count] = bits
    return padded.view(torch.int32), first


def _row_sums(words: Tensor, weights: Tensor) -> Tensor:
    """[2, ...] int32: the sums of each row in `words` ([..., n] int32) with both `weights` ([2, n] int32)."""
    rows = words.flatten(0, -2) if words.dim() > 1 else words.unsqueeze(0)
    if _has_integer_products(words.device):
        sums = torch.mm(weights, rows.t())
    else:
        chunks = rows.split(max(1, _WORDS_PER_PASS // max(1, rows.shape[-1])))
        sums = torch.cat([_weighted(chunk, weights.unsqueeze(1)) for chunk in chunks], dim=1)
    return sums.view(2, *words.shape[:-1])


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """[...] int32: sums of rows of `values` ([..., n] int32) with `weights` ([n] int32, or more axes)."""
    if _has_integer_products(values.device):
        return torch.matmul(values, weights)
    return torch.mul(values, weights).sum(-1, dtype=torch.int32)


def _has_integer_products(device: torch.device) -> bool:
    """Whether torch multiplies matrices of integers there."""
    return device.type == "cpu"


@lru_cache(maxsize=1024)
def _axis_weights(axis: int, extent: int, start: int, count: int, device: torch.device) -> Tensor:
    """[2, count] int32: the weights of the words from `start` on, of `extent` along an axis."""
    return _all_axis_weights(axis, extent, device)[:, start : start + count]


@lru_cache(maxsize=64)
def _all_axis_weights(axis: int, extent: int, device: torch.device) -> Tensor:
    """[2, extent] int32: SplitMix64 (Steele, Lea, Flood 2014) of the index, a stream for each axis.

    The lower halves, made odd, are the first row, and the upper halves the second.
    """
    state = torch.arange(1, extent + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    state += _signed(0xD1B54A32D192ED03 * (axis + 1))
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    state = (state ^ _shifted(state, 31)) | 1
    return torch.stack([state.to(torch.int32), (state >> 32).to(torch.int32)])


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The same 64 bits as a signed number, which is what torch takes."""
    return (value + 2**63) % 2**64 - 2**63
