"""What carries buckets from senders to receivers: one interface for every transport.

    sender    slot(n), fill it, publish(n) ... drain()     each side handles its own part's buckets in order
    receiver  next_bucket(), empty it, taken() ...

Each side has two slots of its largest bucket, so that filling, carrying and emptying overlap. A bucket is
bytes here; what they mean is known to the two ends.

The driver's side of a transport: where ranks meet in a refit.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from .files import FileVenue, file_sender
from .group_channel import group_receiver, group_sender
from .messages import Part, ReceiverLayout, RefitSession, SenderLayout, Transport, socket_session
from .process_group import GroupVenue, Membership
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


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class TransportOptions:
    """Settings of the weight transport."""

    transport: Transport | Literal["auto"] = "auto"
    folder: Path = Path("weights")  # of the versions, for files
    delta: bool = False  # send only changes if the receivers hold the previous version
    check_one_in: int = 1  # a refit checks one of this number of tensors; files are checked completely
    share_gpus: bool = False  # receivers use the senders' GPUs
    host: str = LOOPBACK  # address of this machine at which ranks on other machines reach the driver


class Venue(Protocol):
    """Where the ranks of a refit meet."""

    def session(
        self, version: int, num_senders: int, num_receivers: int
    ) -> AbstractContextManager[RefitSession]:
        """A session; the end of the block ends the waits of all ranks."""
        ...

    def reset_rendezvous(self) -> None:
        """Keep no connections: a refit has failed, or other ranks may come."""
        ...


class SocketVenue:
    """A folder of sockets, for memory that processes of one machine share."""

    def __init__(self, transport: Literal["shared_memory", "cuda_ipc"], deadline_seconds: float) -> None:
        self._transport = transport
        self._deadline_seconds = deadline_seconds

    @contextmanager
    def session(self, version: int, num_senders: int, num_receivers: int) -> Iterator[RefitSession]:
        """A session of ranks on this machine."""
        with socket_session(version, self._deadline_seconds, self._transport) as session:
            yield session

    def reset_rendezvous(self) -> None:
        """Connections last for one refit."""


def make_venue(
    options: TransportOptions,
    senders: Sequence[SenderLayout],
    receivers: Sequence[ReceiverLayout],
    deadline_seconds: float,
) -> Venue:
    """The venue of a transport.

    `auto` is gloo between machines, and on one CUDA IPC where GPUs are shared, else shared memory. Raises
    ValueError for memory that several machines were to share.
    """
    nodes = sorted({sender.node for sender in senders} | {receiver.node for receiver in receivers})
    transport = options.transport
    if transport == "auto":
        here: Transport = "cuda_ipc" if options.share_gpus else "shared_memory"
        transport = here if len(nodes) == 1 else "gloo"
    match transport:
        case "shared_memory" | "cuda_ipc":
            if len(nodes) > 1:
                raise ValueError(
                    f"weights cannot travel by {transport} between {len(nodes)} machines "
                    f"({', '.join(nodes[:3])}{', ...' if len(nodes) > 3 else ''}): set generation.transport "
                    "to auto, gloo or files"
                )
            return SocketVenue(transport, deadline_seconds)
        case "files":
            return FileVenue(options.folder, deadline_seconds)
        case _:
            host = LOOPBACK if len(nodes) == 1 else options.host
            return GroupVenue(transport, host, deadline_seconds)
