"""Transport between processes of one machine: two slots of memory per sender, and a socket per pair.

    sender    fill 0 | fill 1 | wait until 0 is taken, fill 2 | ...
    receiver         | take 0 | take 1                        | ...

The memory is a memfd, passed to receivers over the socket: `kill -9` leaves no segment, and the size of
/dev/shm (64 MB in a container) does not matter. Sockets carry bucket numbers only, order the memory accesses,
and immediately report that the other side has died.

With CUDA IPC the slots are in a GPU's memory, which receivers open by a handle that goes over the socket as
JSON. All that touches CUDA is `CudaDevice`. It has not run on hardware; tests replace it.
"""

import mmap
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from nemorl.device import gpu_identity

from .messages import (
    SLOTS,
    Part,
    RefitFailed,
    RefitSession,
    SendingChannel,
    Slots,
    Venue,
    Waiting,
    receiver_name,
    refit_socket,
    sender_name,
)

# Each refit maps new memory, of which the system clears every page; what is small also stays in caches.
MAX_HOST_BUCKET_BYTES = 8 * 2**20
_NUMBER = struct.Struct("<q")  # of a bucket; first of all, the rank of the receiver
_READY = struct.Struct("<qq")  # number of a bucket, its bytes
_HELLO = struct.Struct("<qq")  # version, bytes of a slot; what the memory is opened by follows
_MAX_OFFER_BYTES = 4096
_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux, 104 elsewhere


class SocketVenue(Venue):
    """A folder of sockets, private to the user; it exists as long as the session."""

    @contextmanager
    def session(self, version: int, num_senders: int, num_receivers: int) -> Iterator[RefitSession]:
        folder = Path(tempfile.mkdtemp(prefix="nemorl-refit-"))  # of mode 0700
        try:
            session = RefitSession(version, self._transport, str(folder), self._deadline_seconds)
            length = len(str(session.socket_path(sender=10**6)))
            if length > _MAX_SOCKET_PATH:
                problem = f"too long a path for sockets ({length} characters, at most {_MAX_SOCKET_PATH})"
                raise RefitFailed(f"{folder} is {problem}; set TMPDIR to a shorter one")
            yield session
        finally:
            # Renamed first: a sender that opens its socket during the removal would keep the folder alive.
            with suppress(FileNotFoundError):  # something else cleaned up already
                shutil.rmtree(folder.rename(f"{folder}.over"), ignore_errors=True)

    def bucket_bytes(self, requested: int) -> int:
        return min(requested, MAX_HOST_BUCKET_BYTES) if self._transport == "shared_memory" else requested


class HostSlots(Slots):
    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        self._descriptor = descriptor
        self.mapping = mmap.mmap(descriptor, SLOTS * slot_bytes)
        super().__init__(torch.frombuffer(self.mapping, dtype=torch.uint8))

    @classmethod
    @contextmanager
    def make(cls, name: str, slot_bytes: int) -> Iterator["HostSlots"]:
        with ExitStack() as stack:
            descriptor = os.memfd_create(name)
            stack.callback(os.close, descriptor)
            os.ftruncate(descriptor, SLOTS * slot_bytes)
            slots = cls(descriptor, slot_bytes)
            # an exception keeps views of the mapping in its traceback; the memory behind it is freed anyway
            stack.callback(slots.mapping.madvise, mmap.MADV_REMOVE)
            yield slots

    @classmethod
    def open(cls, offer: bytes, descriptors: list[int], slot_bytes: int) -> "HostSlots":
        return cls(descriptors[0], slot_bytes)

    def offer(self) -> tuple[bytes, list[int]]:
        """A message by which one more receiver opens the slots, and descriptors that go with it."""
        return b"", [self._descriptor]

    def settle(self) -> None:
        """Reads and writes of the processor are done when they return."""


@dataclass(frozen=True)
class SharedStorage:
    """Result of torch's `_share_cuda_`, for one process to open."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    device: str  # identity of the GPU, since processes number their visible GPUs
    handle: bytes
    num_bytes: int
    offset: int  # bytes, in the allocation
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


_STORAGE = TypeAdapter(SharedStorage)


class CudaDevice:
    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def share(self, memory: Tensor) -> SharedStorage:
        """Let one more process open memory from `allocate`: each call counts one that has to close it."""
        _, *shared = memory.untyped_storage()._share_cuda_()
        return SharedStorage(gpu_identity(memory.device), *shared)

    def open(self, shared: SharedStorage) -> Tensor:
        """[num_bytes] uint8: another process's memory. Raises RefitFailed if its GPU is not visible here."""
        names = [gpu_identity(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        if shared.device not in names:
            seen = f"lie on GPU {shared.device}, and this process sees {', '.join(names) or 'none'}"
            fix = "set generation.transport to nccl, or to shared_memory"
            raise RefitFailed(f"the policy's buckets {seen}: {fix}")
        device, *handles = astuple(shared)
        storage = torch.UntypedStorage._new_shared_cuda(names.index(device), *handles)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def synchronize(self, memory: Tensor) -> None:
        """Wait for this thread's queued reads and writes; a copy between two GPUs is queued on both."""
        for device in {memory.device.index, torch.cuda.current_device()}:
            torch.cuda.current_stream(device).synchronize()

    def collect(self) -> None:
        torch.cuda.ipc_collect()


class DeviceSlots(Slots):
    device: ClassVar[CudaDevice] = CudaDevice()

    @classmethod
    @contextmanager
    def make(cls, name: str, slot_bytes: int) -> Iterator["DeviceSlots"]:
        """A sender's slots; receivers that still have them open keep them until they close them."""
        try:
            yield cls(cls.device.allocate(SLOTS * slot_bytes))
        finally:
            cls.device.collect()

    @classmethod
    def open(cls, offer: bytes, descriptors: list[int], slot_bytes: int) -> "DeviceSlots":
        try:
            return cls(cls.device.open(_STORAGE.validate_json(offer)))
        except ValidationError as error:
            raise RefitFailed(f"a handle of a GPU's memory cannot be read: {error}") from error

    def offer(self) -> tuple[bytes, list[int]]:
        return _STORAGE.dump_json(self.device.share(self.memory)), []

    def settle(self) -> None:
        self.device.synchronize(self.memory)


@dataclass(frozen=True)
class _Peer:
    name: str
    connection: socket.socket
    waiting: Waiting

    def send(self, message: bytes, what: str, descriptors: Sequence[int] = ()) -> None:
        operation = partial(socket.send_fds, self.connection, [message], descriptors)
        self.waiting.call(self.connection, operation, f"{self.name} to {what}", self.name)

    def receive(self, message: struct.Struct, what: str) -> tuple[int, ...]:
        return message.unpack(self.receive_with_descriptors(message.size, what)[0])

    def receive_with_descriptors(self, max_bytes: int, what: str) -> tuple[bytes, list[int]]:
        def operation() -> tuple[bytes, list[int]]:
            message, descriptors, _, _ = socket.recv_fds(self.connection, max_bytes, 1)
            if not message:
                raise EOFError
            return message, descriptors

        return self.waiting.call(self.connection, operation, what, self.name)


class SocketSender(SendingChannel):
    def __init__(self, part: Part, slots: HostSlots | DeviceSlots, peers: Mapping[int, _Peer]) -> None:
        super().__init__(part, slots)
        self._settle, self._peers = slots.settle, peers

    def publish(self, number: int, num_bytes: int) -> None:
        self._settle()
        for receiver in self._part.buckets[number].receivers:
            message = _READY.pack(number, num_bytes)
            self._peers[receiver].send(message, f"receive the number of bucket {number}")
        self._waits[number] = partial(self._wait_taken, number)

    def _wait_taken(self, number: int) -> None:
        for receiver in self._part.buckets[number].receivers:
            peer = self._peers[receiver]
            (taken,) = peer.receive(_NUMBER, f"{peer.name} to take bucket {number}")
            if taken != number:
                sender = sender_name(self._part.rank)
                raise RefitFailed(f"{peer.name} took bucket {taken} where {sender} had sent bucket {number}")


class SocketReceiver:
    def __init__(self, part: Part, senders: Mapping[int, tuple[_Peer, HostSlots | DeviceSlots]]) -> None:
        self._order = (senders[bucket.sender] for bucket in part.buckets)

    def next_bucket(self) -> Tensor:
        self._peer, self._slots = next(self._order)
        self._number, num_bytes = self._peer.receive(_READY, f"the next bucket of {self._peer.name}")
        return self._slots.bucket(self._number, num_bytes)

    def taken(self) -> None:
        self._slots.settle()
        self._peer.send(_NUMBER.pack(self._number), f"receive the number of bucket {self._number}")


@contextmanager
def socket_sender(part: Part, session: RefitSession) -> Iterator[SocketSender]:
    """Make the memory and wait for the receivers; connections end with the block."""
    waiting = _waiting(sender_name(part.rank), session)
    receivers = {receiver for bucket in part.buckets for receiver in bucket.receivers}
    with ExitStack() as stack:
        name = f"nemorl-refit-{session.version}-{part.rank}"
        memory: AbstractContextManager[HostSlots | DeviceSlots] = _kind(session).make(name, part.slot_bytes)
        slots = stack.enter_context(memory)
        listener = stack.enter_context(waiting.listen(session.socket_path(part.rank), len(receivers)))
        peers: dict[int, _Peer] = {}
        while missing := sorted(receivers - peers.keys()):
            name = receiver_name(missing[0])
            connection = waiting.call(listener, lambda: listener.accept()[0], f"{name} to connect", name)
            peer = _Peer("that receiver", stack.enter_context(connection), waiting)
            (receiver,) = peer.receive(_NUMBER, "a receiver to say its rank")
            peers[receiver] = peer = replace(peer, name=receiver_name(receiver))
            offer, descriptors = slots.offer()
            peer.send(_HELLO.pack(session.version, part.slot_bytes) + offer, "map memory", descriptors)
        yield SocketSender(part, slots, peers)


@contextmanager
def socket_receiver(part: Part, session: RefitSession) -> Iterator[SocketReceiver]:
    """Connect to the senders and map their memory; connections end with the block."""
    waiting = _waiting(receiver_name(part.rank), session)
    with ExitStack() as stack:
        peers: dict[int, _Peer] = {}
        for sender in sorted({bucket.sender for bucket in part.buckets}):
            name = sender_name(sender)
            connection = stack.enter_context(refit_socket())
            waiting.connect(connection, session.socket_path(sender), name)
            peers[sender] = _Peer(name, connection, waiting)
        for peer in peers.values():
            peer.send(_NUMBER.pack(part.rank), "receive the number of this rank")
        yield SocketReceiver(part, {rank: (peer, _open_slots(peer, session)) for rank, peer in peers.items()})


def _open_slots(peer: _Peer, session: RefitSession) -> HostSlots | DeviceSlots:
    max_bytes = _HELLO.size + _MAX_OFFER_BYTES
    hello, descriptors = peer.receive_with_descriptors(max_bytes, f"the memory of {peer.name}")
    try:
        other, slot_bytes = _HELLO.unpack_from(hello)
        if other != session.version:
            raise RefitFailed(f"{peer.name} offers version {other} in the refit to version {session.version}")
        return _kind(session).open(hello[_HELLO.size :], descriptors, slot_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _kind(session: RefitSession) -> type[HostSlots] | type[DeviceSlots]:
    return DeviceSlots if session.transport == "cuda_ipc" else HostSlots


def _waiting(who: str, session: RefitSession) -> Waiting:
    """The session is over once its folder is gone."""
    folder = Path(session.place)
    return Waiting(who, session, over=lambda: not folder.exists())
