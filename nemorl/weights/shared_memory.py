"""Transport between processes of one machine: two slots of shared memory per sender, and a socket per pair.

    sender    fill 0 | fill 1 | wait until 0 is taken, fill 2 | ...
    receiver         | take 0 | take 1                        | ...

A sender fills one slot while a receiver empties the other. The memory has no name: it is a memfd, handed to
receivers over the socket. The kernel frees it with the last process that maps it, so not even `kill -9`
leaves a segment behind, and the size of /dev/shm (64 MB in a container) does not matter. The sockets carry
bucket numbers only, order the memory accesses, and tell at once when the other side has died.
"""

import mmap
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .session import RefitFailed, RefitSession, Waiting

_NUMBER = struct.Struct("<q")  # of a bucket; first of all, the rank of the receiver
_HELLO = struct.Struct("<qq")  # version, bytes of a slot
_SLOTS = 2
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Memory:
    """The slots of one sender. Bucket `n` lies in slot `n % 2`."""

    mapping: mmap.mmap
    slot_bytes: int

    def slot(self, number: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """[num_elements], a view."""
        start = number % _SLOTS * self.slot_bytes
        return torch.frombuffer(self.mapping, dtype=dtype, count=num_elements, offset=start)


class BucketSender:
    """A sender's side. Its buckets are numbered from 0, over all its receivers."""

    def __init__(
        self, who: str, waiting: Waiting, memory: _Memory, connections: Mapping[int, socket.socket]
    ) -> None:
        self._who = who
        self._waiting = waiting
        self._memory = memory
        self._connections = connections
        self._untaken: dict[int, int] = {}  # receiver of each bucket that is still in its slot

    @property
    def num_bytes(self) -> int:
        """Shared memory of this sender."""
        return len(self._memory.mapping)

    def slot(self, number: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """[num_elements]: where bucket `number` is to be written, once its slot is free."""
        self._wait_taken(number - _SLOTS)
        return self._memory.slot(number, num_elements, dtype)

    def publish(self, number: int, receiver: int) -> None:
        """Tell the receiver that the bucket is complete."""
        peer = _receiver_name(receiver)
        connection = self._connections[receiver]
        message = _NUMBER.pack(number)
        self._waiting.call(
            connection, lambda: connection.send(message), f"{peer} to hear of bucket {number}", peer
        )
        self._untaken[number] = receiver

    def drain(self) -> None:
        """Wait until every bucket has been taken."""
        for number in sorted(self._untaken):
            self._wait_taken(number)

    def _wait_taken(self, number: int) -> None:
        if number not in self._untaken:
            return
        receiver = self._untaken.pop(number)
        peer = _receiver_name(receiver)
        connection = self._connections[receiver]
        taken = self._waiting.call(
            connection, lambda: _receive_number(connection), f"{peer} to take bucket {number}", peer
        )
        if taken != number:
            raise RefitFailed(f"{peer} took bucket {taken} where {self._who} had sent bucket {number}")


class BucketReceiver:
    """A receiver's side: buckets of each sender come in the order of their numbers."""

    def __init__(
        self, waiting: Waiting, memories: Mapping[int, _Memory], connections: Mapping[int, socket.socket]
    ) -> None:
        self._waiting = waiting
        self._memories = memories
        self._connections = connections

    def next_bucket(self, sender: int, num_elements: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Number and elements [num_elements] of the sender's next bucket for this rank, once complete."""
        peer = _sender_name(sender)
        connection = self._connections[sender]
        number = self._waiting.call(
            connection, lambda: _receive_number(connection), f"the next bucket of {peer}", peer
        )
        return number, self._memories[sender].slot(number, num_elements, dtype)

    def taken(self, sender: int, number: int) -> None:
        """Give the slot of a bucket back to its sender."""
        peer = _sender_name(sender)
        connection = self._connections[sender]
        message = _NUMBER.pack(number)
        self._waiting.call(
            connection, lambda: connection.send(message), f"{peer} to hear of bucket {number}", peer
        )


@contextmanager
def bucket_sender(
    rank: int, session: RefitSession, receivers: Sequence[int], slot_bytes: int
) -> Iterator[BucketSender]:
    """Make the memory and wait for the receivers. Connections end with the block, also after an error."""
    who = _sender_name(rank)
    waiting = Waiting(who, session)
    slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
    with ExitStack() as stack:
        descriptor = os.memfd_create(f"nemorl-refit-{session.version}-{rank}")
        stack.callback(os.close, descriptor)
        os.ftruncate(descriptor, _SLOTS * slot_bytes)
        memory = _Memory(mmap.mmap(descriptor, _SLOTS * slot_bytes), slot_bytes)
        # an exception keeps views of the mapping in its traceback; the memory behind it is freed anyway
        stack.callback(memory.mapping.madvise, mmap.MADV_REMOVE)
        listener = stack.enter_context(waiting.listen(session.socket_path(rank), len(receivers)))
        connections: dict[int, socket.socket] = {}
        while missing := sorted(set(receivers) - connections.keys()):
            peer = _receiver_name(missing[0])
            connection = waiting.call(listener, lambda: listener.accept()[0], f"{peer} to connect", peer)
            stack.enter_context(connection)
            connections[_greet(connection, waiting, session.version, slot_bytes, descriptor)] = connection
        yield BucketSender(who, waiting, memory, connections)


@contextmanager
def bucket_receiver(rank: int, session: RefitSession, senders: Sequence[int]) -> Iterator[BucketReceiver]:
    """Connect to the senders and map their memory. Connections end with the block, also after an error."""
    waiting = Waiting(_receiver_name(rank), session)
    with ExitStack() as stack:
        connections = {
            sender: stack.enter_context(waiting.connect(session.socket_path(sender), _sender_name(sender)))
            for sender in senders
        }
        for sender, connection in connections.items():
            _say_rank(connection, waiting, rank, _sender_name(sender))
        memories = {
            sender: _receive_memory(connection, waiting, session.version, _sender_name(sender))
            for sender, connection in connections.items()
        }
        yield BucketReceiver(waiting, memories, connections)


def _greet(
    connection: socket.socket, waiting: Waiting, version: int, slot_bytes: int, descriptor: int
) -> int:
    """Hand the memory to a receiver; its rank."""
    receiver = waiting.call(
        connection, lambda: _receive_number(connection), "a receiver to say its rank", "that receiver"
    )
    peer = _receiver_name(receiver)
    hello = _HELLO.pack(version, slot_bytes)
    waiting.call(
        connection, lambda: socket.send_fds(connection, [hello], [descriptor]), f"{peer} to map memory", peer
    )
    return receiver


def _say_rank(connection: socket.socket, waiting: Waiting, rank: int, peer: str) -> None:
    message = _NUMBER.pack(rank)
    waiting.call(connection, lambda: connection.send(message), f"{peer} to hear of this rank", peer)


def _receive_memory(connection: socket.socket, waiting: Waiting, version: int, peer: str) -> _Memory:
    hello, descriptors = waiting.call(
        connection, lambda: _receive_hello(connection), f"the memory of {peer}", peer
    )
    try:
        sent_version, slot_bytes = _HELLO.unpack(hello)
        if sent_version != version:
            raise RefitFailed(f"{peer} offers version {sent_version} in the refit to version {version}")
        return _Memory(mmap.mmap(descriptors[0], _SLOTS * slot_bytes), slot_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive_hello(connection: socket.socket) -> tuple[bytes, list[int]]:
    message, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    if not message:
        raise EOFError
    return message, descriptors


def _receive_number(connection: socket.socket) -> int:
    message = connection.recv(_NUMBER.size)
    if not message:
        raise EOFError
    (number,) = _NUMBER.unpack(message)
    return int(number)


def _sender_name(rank: int) -> str:
    return f"policy rank {rank}"


def _receiver_name(rank: int) -> str:
    return f"generation rank {rank}"
