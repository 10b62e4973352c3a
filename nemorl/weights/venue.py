"""The driver's side of a transport: where ranks meet in a refit."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from .files import FileVenue
from .messages import ReceiverLayout, SenderLayout
from .process_group import GroupVenue
from .session import RefitSession, Transport, socket_session

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class TransportOptions:
    """How weights travel."""

    transport: Transport | Literal["auto"] = "auto"
    folder: Path = Path("weights")  # of versions, for files
    delta: bool = False  # bring only what changed, where the receivers hold the version before
    check_one_in: int = 1  # of so many tensors one is checked in a refit; files are checked whole
    share_gpus: bool = False  # receivers are on the senders' own GPUs
    host: str = LOOPBACK  # address of this machine at which ranks on other machines reach the driver


class Venue(Protocol):
    """Where the ranks of a refit meet."""

    def session(
        self, version: int, num_senders: int, num_receivers: int
    ) -> AbstractContextManager[RefitSession]:
        """A session; the end of the block ends the waits of all ranks."""
        ...

    def meet_anew(self) -> None:
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

    def meet_anew(self) -> None:
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
