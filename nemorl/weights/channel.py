"""What carries buckets from senders to receivers: one interface for every transport.

    sender    slot(n), fill it, publish(n) ... drain()     each side handles its own part's buckets in order
    receiver  next_bucket(), empty it, taken() ...

Each side has two slots of its largest bucket, so that filling, carrying and emptying overlap. A bucket is
bytes here; what they mean is known to the two ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from .files import file_sender
from .group_channel import group_receiver, group_sender
from .messages import Part
from .process_group import Membership
from .session import RefitSession
from .shared_memory import socket_receiver, socket_sender


class SendingChannel(Protocol):
    """A sender's side."""

    @property
    def num_bytes(self) -> int:
        """Memory for buckets."""
        ...

    def slot(self, number: int) -> Tensor:
        """[bytes of the bucket] uint8: where bucket `number` of the part is written, once it is free."""
        ...

    def publish(self, number: int, num_bytes: int) -> None:
        """Let its receiver have the bucket, which is the first `num_bytes` of its slot."""
        ...

    def drain(self) -> None:
        """Wait until every bucket has gone."""
        ...


class ReceivingChannel(Protocol):
    """A receiver's side."""

    def next_bucket(self) -> Tensor:
        """[bytes that came] uint8: the part's next bucket, once it is complete."""
        ...

    def taken(self) -> None:
        """Give the slot of that bucket back."""
        ...


@contextmanager
def sending_channel(part: Part, session: RefitSession, member: Membership) -> Iterator[SendingChannel]:
    """Meet the part's receivers. Connections that do not outlast the refit end with the block."""
    match session.transport:
        case "shared_memory" | "cuda_ipc":
            with socket_sender(part, session) as sockets:
                yield sockets
        case "gloo" | "nccl":
            with group_sender(part, session, member) as group:
                yield group
        case "files":
            with file_sender(part, session) as files:
                yield files


@contextmanager
def receiving_channel(part: Part, session: RefitSession, member: Membership) -> Iterator[ReceivingChannel]:
    """Meet the part's senders."""
    if session.transport in ("shared_memory", "cuda_ipc"):
        with socket_receiver(part, session) as sockets:
            yield sockets
    else:
        with group_receiver(part, session, member) as group:
            yield group
