"""Process groups of an exchange: senders and receivers on any machines, connected over a store.

All ranks are members of one group, created over a store that the driver serves and independent of the default
group of a process. Members stay connected from refit to refit; after a failure they form a new group.

NCCL is the same code with another class and device. It has not been run on hardware yet.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from .messages import RefitSession

ABORTED = "Application timeout caused pair closure"  # gloo's error in all waits that `abort` ends
_GLOO_THREADS = 1
_ABORT_TAG = 1  # of a message that no rank sends


class Membership:
    """Membership of a rank in the group, kept from refit to refit."""

    def __init__(self) -> None:
        self._rendezvous: tuple[str, int] | None = None
        self._group: Group | None = None

    def join(self, session: RefitSession, rank: int) -> "Group":
        """The group of the session's meeting; `rank` counts senders first."""
        rendezvous = (session.place, session.rendezvous)
        if self._group is None or self._rendezvous != rendezvous:
            self.leave()
            self._group, self._rendezvous = Group.join(session, rank), rendezvous
        return self._group

    def leave(self) -> None:
        """Close all connections."""
        self._group, self._rendezvous = None, None


@dataclass(frozen=True)
class Group:
    """A process group and the store over which its members met."""

    backend: Any  # ProcessGroupGloo or ProcessGroupNCCL
    store: TCPStore
    device: torch.device
    connected: set[int] = field(default_factory=set)  # members that this one has exchanged a message with

    @classmethod
    def join(cls, session: RefitSession, rank: int) -> "Group":
        """Become a member; others may come later."""
        store = store_of(session)
        prefix = PrefixStore(f"group/{session.rendezvous}", store)
        size = session.num_senders + session.num_receivers
        timeout = timedelta(seconds=session.deadline_seconds)
        if session.transport == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            device = torch.device("cuda", torch.cuda.current_device())
            group = cls(ProcessGroupNCCL(prefix, rank, size, options), store, device)
        else:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._threads = _GLOO_THREADS
            # lazy: of a thousand members, each talks to a few
            options._devices = [ProcessGroupGloo.create_device(_own_address(session.place), lazy_init=True)]
            group = cls(ProcessGroupGloo(prefix, rank, size, options), store, torch.device("cpu"))
        store.set(here_key(session, rank), "")
        return group

    def send(self, values: Tensor, rank: int) -> Any:
        """Begin to send; the work to wait for."""
        return self.backend.send([values], rank, 0)

    def receive(self, values: Tensor, rank: int) -> None:
        """Fill `values` from a member."""
        self.backend.recv([values], rank, 0).wait()
        self.synchronize()

    def connect(self, rank: int, *, first: bool) -> None:
        """Exchange a first message with a member. gloo connects in it, and a wait for that cannot be aborted.

        All have to do so in the order of pairs (lower rank, higher rank), of which the lower one is `first`
        to send, and only with who has joined.
        """
        if rank in self.connected:
            return
        hello = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if first:
            self.send(hello, rank).wait()
        else:
            self.receive(hello, rank)
        self.connected.add(rank)

    def synchronize(self) -> None:
        """NCCL's waits order streams only."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        """End the waits of all threads; the group is of no use afterwards."""
        if self.device.type == "cuda":
            self.backend.abort()
            return
        # gloo's own `abort` does nothing; a wait that times out closes all connections. A member that is gone
        # is not waited for.
        for rank in list(self.connected):
            try:
                self.backend.recv([torch.empty(1)], rank, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if ABORTED in str(error):
                    return


def served_store(host: str) -> tuple[TCPStore, str]:
    """A store that this process serves as long as it holds it, and its place, host:port with a free port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


class GroupVenue:
    """The driver's side: the store over which members meet, and how a session ends."""

    def __init__(self, transport: Literal["gloo", "nccl"], host: str, deadline_seconds: float) -> None:
        """Listen at an address of this machine, loopback when all ranks are on it."""
        self._transport = transport
        self._deadline_seconds = deadline_seconds
        self._store, self._place = served_store(host)
        self._rendezvous = self._attempt = 0

    @contextmanager
    def session(self, version: int, num_senders: int, num_receivers: int) -> Iterator[RefitSession]:
        """A session that ends with the block."""
        self._attempt += 1
        session = RefitSession(
            version,
            self._transport,
            self._place,
            self._deadline_seconds,
            self._rendezvous,
            self._attempt,
            num_senders,
            num_receivers,
        )
        try:
            yield session
        finally:
            self._store.set(over_key(session), "")

    def reset_rendezvous(self) -> None:
        """After a failure, or when other ranks may come."""
        self._rendezvous += 1


def store_of(session: RefitSession) -> TCPStore:
    """A connection of one's own to the store; one that waits is blocked for everything else."""
    host, _, port = session.place.rpartition(":")
    timeout = timedelta(seconds=session.deadline_seconds)
    return TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)


def _own_address(place: str) -> str:
    """The address of this machine on the way to the store."""
    host, _, port = place.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, int(port)))
        return str(way.getsockname()[0])


def here_key(session: RefitSession, place: int) -> str:
    """Is in the store once a member has joined."""
    return f"here/{session.rendezvous}/{place}"


def over_key(session: RefitSession) -> str:
    """Is in the store once the session is over."""
    return f"over/{session.attempt}"
