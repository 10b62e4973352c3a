"""One refit: where its ranks meet, how long they wait, and what a wait says when it fails."""

import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, TypeVar

from nemorl.errors import RunError

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
