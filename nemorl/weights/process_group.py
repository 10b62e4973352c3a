"""Transport between machines: point-to-point messages of a process group.

    sender ──bucket──▶ first receiver ──bucket──▶ next ──▶ ...

While one bucket is passed on, the next arrives. Each is preceded by a message with its size.

All ranks are members of one group, created over a store that the driver serves; a member's place in it counts
senders first. Members stay connected from refit to refit; after a failure they form a new group. NCCL has not
been run on hardware yet.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from nemorl.device import current_gpu, make_current, wait_for_queue

from .messages import (
    SLOTS,
    Part,
    PartBucket,
    RefitFailed,
    RefitSession,
    SendingChannel,
    Slots,
    Transport,
    Venue,
    Waiting,
    receiver_name,
    sender_name,
)
from .nixl import GroupAborted, NixlGroup

_ABORTED = "Application timeout caused pair closure"  # gloo's error in all waits that `abort` ends
_ABORT_TAG = 1  # of a message that no rank sends
_POLL_SECONDS = 0.2  # how often a rank checks if the session is over
T = TypeVar("T")


def served_store(host: str) -> tuple[TCPStore, str]:
    """A store that this process serves as long as it holds it, and its place, host:port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


class GroupVenue(Venue):
    def __init__(self, transport: Transport, host: str, deadline_seconds: float) -> None:
        super().__init__(transport, deadline_seconds)
        self._store, self._place = served_store(host)
        self._attempt = 0

    @contextmanager
    def session(self, version: int, num_senders: int, num_receivers: int) -> Iterator[RefitSession]:
        self._attempt += 1
        members = (self._rendezvous, self._attempt, num_senders, num_receivers)
        session = RefitSession(version, self._transport, self._place, self._deadline_seconds, *members)
        try:
            yield session
        finally:
            self._store.set(_over_key(session), "")


class Members(Protocol):
    """One rank's part in a group, whose members are numbers. What fails raises RuntimeError."""

    @property
    def device(self) -> torch.device: ...  # of the slots

    def slots(self, part: Part, /) -> Slots: ...

    def has_joined(self, session: RefitSession, member: int, /) -> bool: ...

    def connect(self, member: int, *, first: bool) -> None:
        """Connect to a member, which does the same; one of the two is `first`."""

    def send_bucket(self, content: Tensor, member: int, /) -> Callable[[], None]:
        """Begin to send the beginning of a slot; the call returned waits until it has left."""

    def receive_size(self, member: int, /) -> int:
        """Bytes of the next bucket that the member sends."""

    def receive_content(self, content: Tensor, member: int, /) -> None:
        """Receive these bytes into a slot."""

    def abort(self) -> None:
        """End the waits of all threads and the use of the group."""

    def leave(self) -> None: ...


@dataclass(frozen=True)
class Group:
    """A process group of torch (`Members`)."""

    backend: Any  # ProcessGroupGloo or ProcessGroupNCCL
    store: TCPStore
    device: torch.device
    connected: set[int] = field(default_factory=set)  # members that this one has exchanged a message with

    @classmethod
    def join(cls, session: RefitSession, rank: int) -> "Group":
        store = _store_of(session)
        prefix = PrefixStore(f"group/{session.rendezvous}", store)
        size = session.num_senders + session.num_receivers
        timeout = timedelta(seconds=session.deadline_seconds)
        if session.transport == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            group = cls(ProcessGroupNCCL(prefix, rank, size, options), store, current_gpu())
        else:
            host, _, port = session.place.rpartition(":")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
                route.connect((host, int(port)))
                own_address = route.getsockname()[0]  # of this machine on the way to the store
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._threads = 1
            # lazy: of a thousand members, each exchanges messages with a few
            options._devices = [ProcessGroupGloo.create_device(own_address, lazy_init=True)]
            group = cls(ProcessGroupGloo(prefix, rank, size, options), store, torch.device("cpu"))
        store.set(_joined_key(session, rank), "")
        return group

    def send(self, values: Tensor, rank: int) -> Any:
        return self.backend.send([values], rank, 0)

    def receive(self, values: Tensor, rank: int) -> None:
        self.backend.recv([values], rank, 0).wait()
        wait_for_queue(self.device)  # NCCL's waits order streams only

    def connect(self, rank: int, *, first: bool) -> None:
        """Exchange a first message: gloo connects in it, and a wait for that cannot be aborted."""
        if rank in self.connected:
            return
        hello = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if first:
            self.send(hello, rank).wait()
        else:
            self.receive(hello, rank)
        self.connected.add(rank)

    def slots(self, part: Part) -> Slots:
        return Slots.allocate(part, self.device)

    def has_joined(self, session: RefitSession, member: int) -> bool:
        return bool(self.store.check([_joined_key(session, member)]))

    def send_bucket(self, content: Tensor, member: int) -> Callable[[], None]:
        messages = (torch.tensor([content.numel()], device=self.device), content)
        works = [(message, self.send(message, member)) for message in messages]  # works do not keep them

        def wait() -> None:
            for _, work in works:
                work.wait()
            wait_for_queue(self.device)

        return wait

    def receive_size(self, member: int) -> int:
        size = torch.empty(1, dtype=torch.int64, device=self.device)
        self.receive(size, member)
        return int(size)

    def receive_content(self, content: Tensor, member: int) -> None:
        self.receive(content, member)

    def leave(self) -> None:
        """Connections end with the last reference."""

    def abort(self) -> None:
        is_gloo = isinstance(self.backend, ProcessGroupGloo)
        if not is_gloo:
            self.backend.abort()
            return
        # gloo's own `abort` does nothing; a wait that times out closes all connections. A member that is gone
        # is not waited for.
        for rank in list(self.connected):
            try:
                self.backend.recv([torch.empty(1)], rank, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if _ABORTED in str(error):
                    return


class Membership:
    """A rank's group, in which it stays from refit to refit."""

    def __init__(self) -> None:
        self._rendezvous: tuple[str, int] | None = None
        self._group: Members | None = None
        self._lock = threading.Lock()  # a thread of a refit that has failed may end during the next one

    def join(self, session: RefitSession, rank: int, part: Part) -> Members:
        rendezvous = (session.place, session.rendezvous)
        with self._lock:
            if self._group is None or self._rendezvous != rendezvous:
                self._leave()
                if session.transport == "nixl":
                    self._group = NixlGroup(session, rank, part, _store_of(session))
                else:
                    self._group = Group.join(session, rank)
                self._rendezvous = rendezvous
            return self._group

    def leave(self, group: Members) -> None:
        """Leave this group, unless the rank has left it for another one."""
        with self._lock:
            if self._group is group:
                self._leave()

    def _leave(self) -> None:
        group, self._group, self._rendezvous = self._group, None, None
        if group is not None:
            group.leave()


@dataclass(frozen=True)
class _Rendezvous:
    group: Members
    waiting: Waiting
    place: int
    num_senders: int

    def name(self, place: int) -> str:
        return sender_name(place) if place < self.num_senders else receiver_name(place - self.num_senders)

    def neighbors(self, bucket: PartBucket) -> tuple[int | None, int | None]:
        way = [None, bucket.sender, *(self.num_senders + receiver for receiver in bucket.receivers), None]
        here = way.index(self.place)
        return way[here - 1], way[here + 1]

    def wait(self, operation: Callable[[], T], place: int, what: str) -> T:
        """Run an operation of the group that may wait for `what`, which the member there is to do."""
        began = time.monotonic()
        try:
            return operation()
        except RuntimeError as error:
            aborted = isinstance(error, GroupAborted) or _ABORTED in str(error)
            if aborted or time.monotonic() >= self.waiting.end:
                self.waiting.check(what, began)
            raise self.waiting.closed(what, self.name(place)) from error


class GroupSender(SendingChannel):
    def __init__(self, part: Part, rendezvous: _Rendezvous) -> None:
        super().__init__(part, rendezvous.group.slots(part))
        self._rendezvous = rendezvous

    def publish(self, number: int, num_bytes: int) -> None:
        meeting, group = self._rendezvous, self._rendezvous.group
        _, to = meeting.neighbors(self._part.buckets[number])
        if to is None:
            return
        content = self._slots.bucket(number, num_bytes)
        what = f"{meeting.name(to)} to receive bucket {number}"
        wait = meeting.wait(lambda: group.send_bucket(content, to), to, what)
        taken = f"{meeting.name(to)} to take bucket {number}"
        self._waits[number] = lambda: meeting.wait(wait, to, taken)


class GroupReceiver:
    """A receiver's side (`ReceivingChannel`): a thread receives and passes on while a bucket is emptied."""

    def __init__(self, part: Part, rendezvous: _Rendezvous) -> None:
        self._part = part
        self._rendezvous = rendezvous
        self._next = GroupSender(part, rendezvous)
        self._free = threading.Semaphore(SLOTS)
        self._ready: queue.SimpleQueue[Tensor | Exception | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._receive_all, daemon=True)
        self._thread.start()

    def next_bucket(self) -> Tensor:
        bucket = self._take_ready()
        assert bucket is not None, "there are no more buckets"
        return bucket

    def taken(self) -> None:
        wait_for_queue(self._rendezvous.group.device)  # the copies out of it
        self._free.release()

    def drain(self) -> None:
        self._take_ready()

    def close(self) -> None:
        self._closed = True
        self._free.release()
        self._thread.join()

    def _take_ready(self) -> Tensor | None:
        ready = self._ready.get()
        if isinstance(ready, Exception):
            raise ready
        return ready

    def _receive_all(self) -> None:
        """Put every bucket into `_ready`, then None once all have been passed on; or the error."""
        try:
            make_current(self._rendezvous.group.device)
            for number, bucket in enumerate(self._part.buckets):
                self._free.acquire()
                if self._closed:
                    return
                content = self._receive(bucket, self._next.slot(number))
                self._next.publish(number, content.numel())
                self._ready.put(content)
            self._next.drain()
            self._ready.put(None)
        except Exception as error:  # noqa: BLE001 - raised where the bucket is waited for
            self._ready.put(error)

    def _receive(self, bucket: PartBucket, slot: Tensor) -> Tensor:
        meeting, group = self._rendezvous, self._rendezvous.group
        source, _ = meeting.neighbors(bucket)
        assert source is not None, "a receiver is not the first on a bucket's way"
        peer = meeting.name(source)
        what = f"the next bucket of {sender_name(bucket.sender)}"
        if source != bucket.sender:
            what += f", which {peer} passes on"
        num_bytes = meeting.wait(lambda: group.receive_size(source), source, what)
        if not 0 <= num_bytes <= bucket.num_bytes:
            raise RefitFailed(f"{peer} sends {num_bytes} bytes where {bucket.num_bytes} were due")
        content = slot[:num_bytes]
        meeting.wait(lambda: group.receive_content(content, source), source, what)
        return content


@contextmanager
def group_sender(part: Part, session: RefitSession, member: Membership) -> Iterator[GroupSender]:
    with _joined(part, session, member, part.rank) as rendezvous:
        yield GroupSender(part, rendezvous)


@contextmanager
def group_receiver(part: Part, session: RefitSession, member: Membership) -> Iterator[GroupReceiver]:
    with _joined(part, session, member, session.num_senders + part.rank) as rendezvous:
        receiver = GroupReceiver(part, rendezvous)
        try:
            yield receiver
            receiver.drain()
        except BaseException:
            rendezvous.group.abort()
            raise
        finally:
            receiver.close()


@contextmanager
def _joined(part: Part, session: RefitSession, member: Membership, place: int) -> Iterator[_Rendezvous]:
    """Members who have all joined, watched until the block ends; after an error the rank leaves the group."""
    over = threading.Event()
    who = sender_name(part.rank) if place < session.num_senders else receiver_name(part.rank)
    waiting = Waiting(who, session, over=over.is_set)
    group = member.join(session, place, part)
    try:
        meeting = _Rendezvous(group, waiting, place, session.num_senders)
        neighbors = {peer for bucket in part.buckets for peer in meeting.neighbors(bucket)}
        # in the order of pairs in which all connect
        peers = sorted(peer for peer in neighbors if peer is not None)
        with _watch(session, group, over):
            for peer in peers:
                has_joined = partial(group.has_joined, session, peer)
                waiting.until(has_joined, f"{meeting.name(peer)} to join")
            for peer in peers:
                connect = partial(group.connect, peer, first=place < peer)
                meeting.wait(connect, peer, f"{meeting.name(peer)} to connect")
            yield meeting
    except BaseException:
        member.leave(group)
        raise


@contextmanager
def _watch(session: RefitSession, group: Members, over: threading.Event) -> Iterator[None]:
    """Abort the group when the driver ends the session, or is gone, before the block ends."""
    finished = threading.Event()
    end = time.monotonic() + session.deadline_seconds
    store = _store_of(session)

    def watch() -> None:
        while not finished.wait(_POLL_SECONDS):
            try:
                is_over = time.monotonic() >= end or store.check([_over_key(session)])
            except RuntimeError:  # the driver is gone
                is_over = True
            if is_over:
                over.set()
                group.abort()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _store_of(session: RefitSession) -> TCPStore:
    """Another connection to the store; one that waits is blocked for everything else."""
    host, _, port = session.place.rpartition(":")
    timeout = timedelta(seconds=session.deadline_seconds)
    return TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)


def _joined_key(session: RefitSession, place: int) -> str:
    return f"joined/{session.rendezvous}/{place}"


def _over_key(session: RefitSession) -> str:
    return f"over/{session.attempt}"
