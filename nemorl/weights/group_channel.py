"""Transport between machines: point-to-point messages of a process group.

    sender ──bucket──▶ first receiver ──bucket──▶ next ──▶ ...

A bucket that several receivers take goes once over its sender's link and over that of each receiver but the
last, which is as many bytes as a multicast would need of the sender; while one bucket is passed on, the next
arrives. Each bucket is preceded by a message with its size.
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

from .messages import (
    SLOTS,
    Part,
    PartBucket,
    RefitFailed,
    RefitSession,
    Slots,
    Waiting,
    receiver_name,
    sender_name,
)
from .process_group import ABORTED, Group, Membership, here_key, over_key, store_of

_LOOK_UP_SECONDS = 0.2  # how often a rank looks whether the session is over


@dataclass(frozen=True)
class _Rendezvous:
    """One rank's connection with the others during a refit. Places in the group count senders first."""

    group: Group
    waiting: Waiting
    place: int
    num_senders: int

    def name(self, place: int) -> str:
        """What messages call a member."""
        return sender_name(place) if place < self.num_senders else receiver_name(place - self.num_senders)

    def before(self, bucket: PartBucket) -> int:
        """From whose place a bucket comes here."""
        way = self._way(bucket)
        return way[way.index(self.place) - 1]

    def after(self, bucket: PartBucket) -> int | None:
        """To whose place a bucket goes from here."""
        way = self._way(bucket)
        here = way.index(self.place)
        return way[here + 1] if here + 1 < len(way) else None

    def wait(self, operation: Callable[[], None], place: int, what: str) -> None:
        """Run an operation of the group that may wait for `what`, which the member there is to do."""
        began = time.monotonic()
        try:
            operation()
        except RuntimeError as error:
            if ABORTED in str(error) or self.waiting.seconds_left == 0.0:
                self.waiting.in_vain(what, began)
            raise self.waiting.closed(what, self.name(place)) from error

    def _way(self, bucket: PartBucket) -> list[int]:
        return [bucket.sender, *(self.num_senders + receiver for receiver in bucket.receivers)]


class _Sending:
    """Buckets that this rank is sending."""

    def __init__(self, rendezvous: _Rendezvous) -> None:
        self._rendezvous = rendezvous
        # by bucket: the receiving rank, and each message with its work
        self._under_way: dict[int, tuple[int, list[tuple[Tensor, Any]]]] = {}

    def begin(self, number: int, content: Tensor, to: int) -> None:
        """Start sending a bucket, after a message with its size."""
        group = self._rendezvous.group
        messages = (torch.tensor([content.numel()], device=group.device), content)

        def send() -> None:
            self._under_way[number] = to, [(message, group.send(message, to)) for message in messages]

        self._rendezvous.wait(send, to, f"{self._rendezvous.name(to)} to receive bucket {number}")

    def wait_gone(self, number: int) -> None:
        """Wait until a bucket's memory is of use again."""
        if number not in self._under_way:
            return
        to, messages = self._under_way.pop(number)
        for _, work in messages:
            self._rendezvous.wait(work.wait, to, f"{self._rendezvous.name(to)} to take bucket {number}")
        self._rendezvous.group.synchronize()

    def wait_all_gone(self) -> None:
        """Wait until nothing is on its way."""
        for number in sorted(self._under_way):
            self.wait_gone(number)


class GroupSender:
    """A sender's side (`SendingChannel`)."""

    def __init__(self, part: Part, rendezvous: _Rendezvous) -> None:
        self._part = part
        self._rendezvous = rendezvous
        self._slots = Slots(part, rendezvous.group.device)
        self._sending = _Sending(rendezvous)

    @property
    def num_bytes(self) -> int:
        """Memory for buckets."""
        return self._slots.num_bytes

    def slot(self, number: int) -> Tensor:
        """[bytes of the bucket] uint8: where bucket `number` is to be written, once its slot is free."""
        self._sending.wait_gone(number - SLOTS)
        return self._slots.bucket(number, self._part.buckets[number].num_bytes)

    def publish(self, number: int, num_bytes: int) -> None:
        """Begin to send the bucket."""
        to = self._rendezvous.after(self._part.buckets[number])
        assert to is not None, "a bucket has a receiver"
        self._sending.begin(number, self._slots.bucket(number, num_bytes), to)

    def drain(self) -> None:
        """Wait until every bucket has gone."""
        self._sending.wait_all_gone()


class GroupReceiver:
    """A receiver's side (`ReceivingChannel`): a thread receives and passes on while a bucket is emptied."""

    def __init__(self, part: Part, rendezvous: _Rendezvous) -> None:
        self._part = part
        self._rendezvous = rendezvous
        self._slots = Slots(part, rendezvous.group.device)
        self._sending = _Sending(rendezvous)
        self._free = threading.Semaphore(SLOTS)
        self._ready: queue.SimpleQueue[Tensor | Exception | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._receive_all, daemon=True)
        self._thread.start()

    def next_bucket(self) -> Tensor:
        """[bytes that came] uint8: the next bucket, once it is complete."""
        bucket = self._ready.get()
        if isinstance(bucket, Exception):
            raise bucket
        assert bucket is not None, "there are no more buckets"
        return bucket

    def taken(self) -> None:
        """Let the next but one bucket come into this slot."""
        self._rendezvous.group.synchronize()  # the copies out of it
        self._free.release()

    def drain(self) -> None:
        """Wait until all that others get from here has gone."""
        last = self._ready.get()
        if isinstance(last, Exception):
            raise last

    def close(self) -> None:
        """Receive no more."""
        self._closed = True
        self._free.release()
        self._thread.join()

    def _receive_all(self) -> None:
        try:
            if self._rendezvous.group.device.type == "cuda":
                torch.cuda.set_device(self._rendezvous.group.device)
            for number, bucket in enumerate(self._part.buckets):
                self._free.acquire()
                if self._closed:
                    return
                self._sending.wait_gone(number - SLOTS)
                content = self._receive(number, bucket)
                to = self._rendezvous.after(bucket)
                if to is not None:
                    self._sending.begin(number, content, to)
                self._ready.put(content)
            self._sending.wait_all_gone()
            self._ready.put(None)
        except Exception as error:  # noqa: BLE001 - raised where the bucket is waited for
            self._ready.put(error)

    def _receive(self, number: int, bucket: PartBucket) -> Tensor:
        group, source = self._rendezvous.group, self._rendezvous.before(bucket)
        peer = self._rendezvous.name(source)
        what = f"the next bucket of {sender_name(bucket.sender)}"
        if source != bucket.sender:
            what += f", which {peer} passes on"
        size = torch.empty(1, dtype=torch.int64, device=group.device)
        self._rendezvous.wait(lambda: group.receive(size, source), source, what)
        num_bytes = int(size)
        if not 0 <= num_bytes <= bucket.num_bytes:
            raise RefitFailed(f"{peer} sends {num_bytes} bytes where {bucket.num_bytes} were due")
        slot = self._slots.bucket(number, num_bytes)
        self._rendezvous.wait(lambda: group.receive(slot, source), source, what)
        return slot


@contextmanager
def group_sender(part: Part, session: RefitSession, member: Membership) -> Iterator[GroupSender]:
    """Join the group and wait for those to have joined to whom buckets go."""
    with _met(part, session, member, part.rank) as rendezvous:
        yield GroupSender(part, rendezvous)


@contextmanager
def group_receiver(part: Part, session: RefitSession, member: Membership) -> Iterator[GroupReceiver]:
    """Join the group and wait until all ranks have joined that send or are forwarded buckets."""
    with _met(part, session, member, session.num_senders + part.rank) as rendezvous:
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
def _met(part: Part, session: RefitSession, member: Membership, place: int) -> Iterator[_Rendezvous]:
    """Members who have all joined, watched until the block ends; after an error the rank leaves the group."""
    over = threading.Event()
    who = sender_name(part.rank) if place < session.num_senders else receiver_name(part.rank)
    waiting = Waiting(who, session, over=over.is_set)
    try:
        group = member.join(session, place)
        rendezvous = _Rendezvous(group, waiting, place, session.num_senders)
        peers = _peers(part, rendezvous)
        with _watch(session, group, over):
            for peer in peers:
                there = partial(group.store.check, [here_key(session, peer)])
                waiting.until(there, f"{rendezvous.name(peer)} to join")
            for peer in peers:
                connect = partial(group.connect, peer, first=place < peer)
                rendezvous.wait(connect, peer, f"{rendezvous.name(peer)} to connect")
            yield rendezvous
    except BaseException:
        member.leave()
        raise


def _peers(part: Part, rendezvous: _Rendezvous) -> list[int]:
    """Who exchanges messages with this rank, in the order of pairs in which all connect."""
    found = {rendezvous.after(bucket) for bucket in part.buckets} - {None}
    if rendezvous.place >= rendezvous.num_senders:
        found |= {rendezvous.before(bucket) for bucket in part.buckets}
    return sorted(place for place in found if place is not None)


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
