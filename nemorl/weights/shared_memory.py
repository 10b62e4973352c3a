"""Transport between processes of one machine: two slots of shared memory per sender, and a socket per pair.

    sender    fill 0 | fill 1 | wait until 0 is taken, fill 2 | ...
    receiver         | take 0 | take 1                        | ...

A sender fills one slot while the receivers of the other one read it. The memory has no name: it is a memfd,
passed to receivers over the socket. The kernel frees it with the last process that maps it, so not even `kill
-9` leaves a segment behind, and the size of /dev/shm (64 MB in a container) does not matter. The sockets
carry bucket numbers only, order the memory accesses, and immediately report that the other side has died.
"""

import mmap
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .cuda_ipc import DeviceSlots
from .messages import SLOTS, Part, RefitFailed, RefitSession, Waiting, receiver_name, sender_name

_NUMBER = struct.Struct("<q")  # of a bucket; first of all, the rank of the receiver
_READY = struct.Struct("<qq")  # number of a bucket, its bytes
_HELLO = struct.Struct("<qq")  # version, bytes of a slot; what the memory is opened by follows
_MAX_OFFER_BYTES = 4096
_ALIGNMENT = 64


class SlotMemory(Protocol):
    """The slots of one sender, as it or a receiver has them. Bucket `n` lies in slot `n % 2`."""

    @property
    def num_bytes(self) -> int:
        """Of both slots."""
        ...

    def offer(self) -> tuple[bytes, list[int]]:
        """What one more receiver opens it by: a message, and descriptors that go with it."""
        ...

    def slot(self, number: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, a view."""
        ...

    def settle(self) -> None:
        """Wait until what this thread has queued to write or read it has been done."""
        ...


class HostSlots:
    """Two slots in a memfd (`SlotMemory`)."""

    def __init__(self, mapping: mmap.mmap, descriptor: int | None, slot_bytes: int) -> None:
        self.mapping = mapping
        self._descriptor = descriptor
        self._slot_bytes = slot_bytes

    @classmethod
    @contextmanager
    def make(cls, name: str, slot_bytes: int) -> Iterator["HostSlots"]:
        """A sender's, which ends with the block."""
        with ExitStack() as stack:
            descriptor = os.memfd_create(name)
            stack.callback(os.close, descriptor)
            os.ftruncate(descriptor, SLOTS * slot_bytes)
            mapping = mmap.mmap(descriptor, SLOTS * slot_bytes)
            # an exception keeps views of the mapping in its traceback; the memory behind it is freed anyway
            stack.callback(mapping.madvise, mmap.MADV_REMOVE)
            yield cls(mapping, descriptor, slot_bytes)

    @classmethod
    def open(cls, offer: bytes, descriptors: list[int], slot_bytes: int) -> "HostSlots":
        """A sender's, by what it offers."""
        (descriptor,) = descriptors
        return cls(mmap.mmap(descriptor, SLOTS * slot_bytes), None, slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Of both slots."""
        return len(self.mapping)

    def offer(self) -> tuple[bytes, list[int]]:
        """What one more receiver opens it by."""
        assert self._descriptor is not None, "a receiver offers nothing"
        return b"", [self._descriptor]

    def slot(self, number: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, a view."""
        start = number % SLOTS * self._slot_bytes
        return torch.frombuffer(self.mapping, dtype=torch.uint8, count=num_bytes, offset=start)

    def settle(self) -> None:
        """The processor has done it."""


class SocketSender:
    """A sender's side (`SendingChannel`). Its buckets are numbered over all its receivers."""

    def __init__(
        self, part: Part, waiting: Waiting, memory: SlotMemory, connections: Mapping[int, socket.socket]
    ) -> None:
        self._part = part
        self._waiting = waiting
        self._memory = memory
        self._connections = connections
        self._untaken: set[int] = set()  # buckets that are still in their slots

    @property
    def num_bytes(self) -> int:
        """Shared memory of this sender."""
        return self._memory.num_bytes

    def slot(self, number: int) -> Tensor:
        """Return the memory for bucket `number` ([bytes] uint8) once its slot is free."""
        self._wait_taken(number - SLOTS)
        return self._memory.slot(number, self._part.buckets[number].num_bytes)

    def publish(self, number: int, num_bytes: int) -> None:
        """Notify the receivers that the bucket is complete."""
        self._memory.settle()
        message = _READY.pack(number, num_bytes)
        for receiver in self._part.buckets[number].receivers:
            connection, peer = self._connections[receiver], receiver_name(receiver)
            self._waiting.call(
                connection,
                partial(connection.send, message),
                f"{peer} to receive the number of bucket {number}",
                peer,
            )
        self._untaken.add(number)

    def drain(self) -> None:
        """Wait until every bucket has been taken."""
        for number in sorted(self._untaken):
            self._wait_taken(number)

    def _wait_taken(self, number: int) -> None:
        if number not in self._untaken:
            return
        self._untaken.remove(number)
        for receiver in self._part.buckets[number].receivers:
            connection, peer = self._connections[receiver], receiver_name(receiver)
            (taken,) = self._waiting.call(
                connection, partial(_receive, connection, _NUMBER), f"{peer} to take bucket {number}", peer
            )
            if taken != number:
                sender = sender_name(self._part.rank)
                raise RefitFailed(f"{peer} took bucket {taken} where {sender} had sent bucket {number}")


class SocketReceiver:
    """A receiver's side (`ReceivingChannel`)."""

    def __init__(
        self,
        part: Part,
        waiting: Waiting,
        memories: Mapping[int, SlotMemory],
        connections: Mapping[int, socket.socket],
    ) -> None:
        self._order = iter(part.buckets)
        self._waiting = waiting
        self._memories = memories
        self._connections = connections
        self._open: tuple[int, int] | None = None  # sender and number of the bucket that is being emptied

    def next_bucket(self) -> Tensor:
        """[bytes that came] uint8: the next bucket, once it is complete."""
        sender = next(self._order).sender
        peer = sender_name(sender)
        connection = self._connections[sender]
        number, num_bytes = self._waiting.call(
            connection, lambda: _receive(connection, _READY), f"the next bucket of {peer}", peer
        )
        self._open = sender, number
        return self._memories[sender].slot(number, num_bytes)

    def taken(self) -> None:
        """Return the slot of the bucket to its sender."""
        assert self._open is not None
        sender, number = self._open
        self._memories[sender].settle()
        peer = sender_name(sender)
        connection, message = self._connections[sender], _NUMBER.pack(number)
        self._waiting.call(
            connection,
            lambda: connection.send(message),
            f"{peer} to receive the number of bucket {number}",
            peer,
        )


@contextmanager
def socket_sender(part: Part, session: RefitSession) -> Iterator[SocketSender]:
    """Make the memory and wait for the receivers. Connections end with the block, also after an error."""
    waiting = _waiting(sender_name(part.rank), session)
    receivers = {receiver for bucket in part.buckets for receiver in bucket.receivers}
    slot_bytes = -(-max(bucket.num_bytes for bucket in part.buckets) // _ALIGNMENT) * _ALIGNMENT
    with ExitStack() as stack:
        memory = stack.enter_context(_made(session, part, slot_bytes))
        listener = stack.enter_context(waiting.listen(session.socket_path(part.rank), len(receivers)))
        connections: dict[int, socket.socket] = {}
        while missing := sorted(receivers - connections.keys()):
            peer = receiver_name(missing[0])
            connection = waiting.call(listener, lambda: listener.accept()[0], f"{peer} to connect", peer)
            stack.enter_context(connection)
            connections[_greet(connection, waiting, session.version, slot_bytes, memory)] = connection
        yield SocketSender(part, waiting, memory, connections)


@contextmanager
def socket_receiver(part: Part, session: RefitSession) -> Iterator[SocketReceiver]:
    """Connect to the senders and map their memory. Connections end with the block, also after an error."""
    waiting = _waiting(receiver_name(part.rank), session)
    senders = sorted({bucket.sender for bucket in part.buckets})
    with ExitStack() as stack:
        connections = {
            sender: stack.enter_context(waiting.connect(session.socket_path(sender), sender_name(sender)))
            for sender in senders
        }
        for sender, connection in connections.items():
            _say_rank(connection, waiting, part.rank, sender_name(sender))
        memories = {
            sender: _receive_memory(connection, waiting, session, sender_name(sender))
            for sender, connection in connections.items()
        }
        yield SocketReceiver(part, waiting, memories, connections)


def _kind(session: RefitSession) -> type[HostSlots] | type[DeviceSlots]:
    return DeviceSlots if session.transport == "cuda_ipc" else HostSlots


def _made(session: RefitSession, part: Part, slot_bytes: int) -> AbstractContextManager[SlotMemory]:
    return _kind(session).make(f"nemorl-refit-{session.version}-{part.rank}", slot_bytes)


def _waiting(who: str, session: RefitSession) -> Waiting:
    """The session is over once its folder is gone."""
    folder = Path(session.place)
    return Waiting(who, session, over=lambda: not folder.exists())


def _greet(
    connection: socket.socket, waiting: Waiting, version: int, slot_bytes: int, memory: SlotMemory
) -> int:
    """Hand the memory to a receiver; its rank."""
    (receiver,) = waiting.call(
        connection, lambda: _receive(connection, _NUMBER), "a receiver to say its rank", "that receiver"
    )
    peer = receiver_name(receiver)
    offer, descriptors = memory.offer()
    hello = _HELLO.pack(version, slot_bytes) + offer
    waiting.call(
        connection, lambda: socket.send_fds(connection, [hello], descriptors), f"{peer} to map memory", peer
    )
    return int(receiver)


def _say_rank(connection: socket.socket, waiting: Waiting, rank: int, peer: str) -> None:
    message = _NUMBER.pack(rank)
    waiting.call(
        connection, lambda: connection.send(message), f"{peer} to receive the number of this rank", peer
    )


def _receive_memory(
    connection: socket.socket, waiting: Waiting, session: RefitSession, peer: str
) -> SlotMemory:
    hello, descriptors = waiting.call(
        connection, lambda: _receive_hello(connection), f"the memory of {peer}", peer
    )
    try:
        version, slot_bytes = _HELLO.unpack_from(hello)
        if version != session.version:
            raise RefitFailed(f"{peer} offers version {version} in the refit to version {session.version}")
        return _kind(session).open(hello[_HELLO.size :], descriptors, slot_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive_hello(connection: socket.socket) -> tuple[bytes, list[int]]:
    message, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size + _MAX_OFFER_BYTES, 1)
    if not message:
        raise EOFError
    return message, descriptors


def _receive(connection: socket.socket, message: struct.Struct) -> tuple[int, ...]:
    received = connection.recv(message.size)
    if not received:
        raise EOFError
    return message.unpack(received)
