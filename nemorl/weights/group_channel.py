"""Transport between machines: point-to-point messages of a process group.

Each bucket is preceded by a message with its size.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .messages import Part
from .process_group import ABORTED, Group, Membership, here_key, over_key, store_of
from .session import RefitFailed, RefitSession, Waiting, receiver_name, sender_name
from .slots import SLOTS, Slots

_LOOK_UP_SECONDS = 0.2  # how often a rank looks whether the session is over


@dataclass(frozen=True)
class _Meeting:
    """One rank's connection with its peers during a refit."""

    group: Group
    waiting: Waiting
    first_peer: int  # rank in the group of the first of this side's peers
    name: Callable[[int], str]  # of a peer

    def wait(self, operation: Callable[[], None], peer: int, what: str) -> None:
        """Run an operation of the group that may wait for `what`, which `peer` is to do."""
        began = time.monotonic()
        try:
            operation()
        except RuntimeError as error:
            if ABORTED in str(error) or self.waiting.seconds_left == 0.0:
                self.waiting.in_vain(what, began)
            raise self.waiting.closed(what, self.name(peer)) from error


class GroupSender:
    """A sender's side (`SendingChannel`)."""

    def __init__(self, part: Part, meeting: _Meeting) -> None:
        self._part = part
        self._meeting = meeting
        self._slots = Slots(part, meeting.group.device)
        self._on_the_way: dict[int, list[tuple[Tensor, Any]]] = {}  # by bucket: what is sent, and its work

    @property
    def num_bytes(self) -> int:
        """Memory for buckets."""
        return self._slots.num_bytes

    def slot(self, number: int) -> Tensor:
        """[bytes of the bucket] uint8: where bucket `number` is to be written, once its slot is free."""
        self._wait_gone(number - SLOTS)
        return self._slots.bucket(number, self._part.buckets[number].num_bytes)

    def publish(self, number: int, num_bytes: int) -> None:
        """Begin to send the bucket."""
        peer = self._part.buckets[number].peer
        group, to = self._meeting.group, self._meeting.first_peer + peer
        size = torch.tensor([num_bytes], device=group.device)
        messages = (size, self._slots.bucket(number, num_bytes))

        def send() -> None:
            self._on_the_way[number] = [(message, group.send(message, to)) for message in messages]

        self._meeting.wait(send, peer, f"{self._meeting.name(peer)} to hear of bucket {number}")

    def drain(self) -> None:
        """Wait until every bucket has gone."""
        for number in sorted(self._on_the_way):
            self._wait_gone(number)

    def _wait_gone(self, number: int) -> None:
        if number not in self._on_the_way:
            return
        peer = self._part.buckets[number].peer
        for _, work in self._on_the_way.pop(number):
            self._meeting.wait(work.wait, peer, f"{self._meeting.name(peer)} to take bucket {number}")
        self._meeting.group.synchronize()


class GroupReceiver:
    """A receiver's side (`ReceivingChannel`): a thread receives the next bucket while one is emptied."""

    def __init__(self, part: Part, meeting: _Meeting) -> None:
        self._part = part
        self._meeting = meeting
        self._slots = Slots(part, meeting.group.device)
        self._free = threading.Semaphore(SLOTS)
        self._ready: queue.SimpleQueue[Tensor | Exception] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._receive_all, daemon=True)
        self._thread.start()

    def next_bucket(self) -> Tensor:
        """[bytes that came] uint8: the next bucket, once it is complete."""
        bucket = self._ready.get()
        if isinstance(bucket, Exception):
            raise bucket
        return bucket

    def taken(self) -> None:
        """Let the next but one bucket come into this slot."""
        self._meeting.group.synchronize()  # the copies out of it
        self._free.release()

    def close(self) -> None:
        """Receive no more."""
        self._closed = True
        self._free.release()
        self._thread.join()

    def _receive_all(self) -> None:
        try:
            if self._meeting.group.device.type == "cuda":
                torch.cuda.set_device(self._meeting.group.device)
            for number, bucket in enumerate(self._part.buckets):
                self._free.acquire()
                if self._closed:
                    return
                self._ready.put(self._receive(number, bucket.peer, bucket.num_bytes))
        except Exception as error:  # noqa: BLE001 - raised where the bucket is waited for
            self._ready.put(error)

    def _receive(self, number: int, peer: int, most_bytes: int) -> Tensor:
        group, sender = self._meeting.group, self._meeting.first_peer + peer
        size = torch.empty(1, dtype=torch.int64, device=group.device)
        what = f"the next bucket of {self._meeting.name(peer)}"
        self._meeting.wait(lambda: group.receive(size, sender), peer, what)
        num_bytes = int(size)
        if num_bytes > most_bytes:
            raise RefitFailed(
                f"{self._meeting.name(peer)} sends {num_bytes} bytes where {most_bytes} were due"
            )
        slot = self._slots.bucket(number, num_bytes)
        self._meeting.wait(lambda: group.receive(slot, sender), peer, what)
        return slot


@contextmanager
def group_sender(part: Part, session: RefitSession, member: Membership) -> Iterator[GroupSender]:
    """Join the group and wait for the receivers to have joined."""
    with _met(part, session, member, sender_name(part.rank), part.rank) as meeting:
        yield GroupSender(part, meeting)


@contextmanager
def group_receiver(part: Part, session: RefitSession, member: Membership) -> Iterator[GroupReceiver]:
    """Join the group and wait for the senders to have joined."""
    place = session.num_senders + part.rank
    with _met(part, session, member, receiver_name(part.rank), place) as meeting:
        receiver = GroupReceiver(part, meeting)
        try:
            yield receiver
        except BaseException:
            meeting.group.abort()
            raise
        finally:
            receiver.close()


@contextmanager
def _met(part: Part, session: RefitSession, member: Membership, who: str, place: int) -> Iterator[_Meeting]:
    """Members who have all joined, watched until the block ends; after an error the rank leaves the group."""
    sends = place < session.num_senders
    first_peer, name = (session.num_senders, receiver_name) if sends else (0, sender_name)
    over = threading.Event()
    waiting = Waiting(who, session, over=over.is_set)
    try:
        group = member.join(session, place)
        peers = sorted({bucket.peer for bucket in part.buckets})
        with _watch(session, group, over):
            for peer in peers:
                key = here_key(session, first_peer + peer)
                waiting.until(partial(group.store.check, [key]), f"{name(peer)} to join")
            meeting = _Meeting(group, waiting, first_peer, name)
            for peer in peers:
                connect = partial(group.connect, first_peer + peer, sends=sends)
                meeting.wait(connect, peer, f"{name(peer)} to connect")
            yield meeting
    except BaseException:
        member.leave()
        raise


@contextmanager
def _watch(session: RefitSession, group: Group, over: threading.Event) -> Iterator[None]:
    """Abort the group when the driver ends the session, or is gone, before the block ends."""
    finished = threading.Event()
    end = time.monotonic() + session.deadline_seconds
    store = store_of(session)

    def watch() -> None:
        while not finished.wait(_LOOK_UP_SECONDS):
            if time.monotonic() < end and not _is_over(store, session):
                continue
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


def _is_over(store: TCPStore, session: RefitSession) -> bool:
    try:
        return bool(store.check([over_key(session)]))
    except RuntimeError:  # the driver is gone
        return True
