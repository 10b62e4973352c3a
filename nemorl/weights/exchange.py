"""A refit: the driver's side, and the two small objects that workers hold for it.

    driver                    every policy rank              every generation rank
    describe  ------------->  its slices                     its slices and their types
    plan, prepare  -------->  keeps its part                 keeps its part            (once per layout)
    send, receive  -------->  fills buckets      ==bytes==>  copies into staging tensors, or in place
    compare fingerprints  <-  of what it wrote               of what now lies there
    commit  -------------------------------------------->    this becomes the version
    (abandon, if any of these fails)  ------------------>    the version before stays in use

The driver computes the plan and hands each rank its part. Letting every rank compute it would repeat work
that grows with both sides on each of thousands of ranks, and send everybody's metadata to everybody; a part
is as small as what the rank itself holds. It is sent once, and again only when a layout changes.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nemorl.errors import NemorlError

from .channel import TransportOptions, Venue, make_venue
from .files import FileVenue
from .fingerprint import combine
from .messages import Part, ReceiveReport, ReceiverLayout, SenderLayout, SendReport
from .plan import TransferPlan, plan_files, plan_transfers
from .session import CorruptWeights, PeerClosed, RefitSession


@dataclass(frozen=True)
class RefitStats:
    """Figures of one refit."""

    version: int
    seconds: float  # all of it
    seconds_transfer: float  # sending and receiving
    num_bytes: int  # that came, over all receivers; of files, that were read
    num_bytes_whole: int  # of a full refit; of files, that were written
    num_buckets: int
    extra_bytes: int  # memory for buckets, of all senders together
    kept_bytes: int  # host memory of all senders for what they sent last

    @property
    def gigabytes_per_second(self) -> float:
        """Of the transfer."""
        return self.num_bytes / self.seconds_transfer / 1e9


logger = logging.getLogger(__name__)


class SenderGroup(Protocol):
    """All policy ranks: each call reaches the `WeightSender` of every rank at once; results by rank."""

    def describe(self) -> Sequence[SenderLayout]: ...

    def prepare(self, parts: Sequence[Part]) -> None: ...

    def send(self, session: RefitSession) -> Sequence[SendReport]: ...


class ReceiverGroup(Protocol):
    """All generation ranks: each call reaches the `WeightReceiver` of every rank at once; results by rank."""

    def describe(self) -> Sequence[ReceiverLayout]: ...

    def prepare(self, parts: Sequence[Part]) -> None: ...

    def receive(self, session: RefitSession) -> Sequence[ReceiveReport]: ...

    def commit(self, version: int) -> None: ...

    def abandon(self) -> None: ...


class WeightExchange:
    """Hands weights over, version by version. Sees metadata only, never a weight."""

    def __init__(
        self,
        senders: SenderGroup,
        receivers: ReceiverGroup,
        bucket_bytes: int,
        deadline_seconds: float,
        options: TransportOptions | None = None,
    ) -> None:
        self._senders = senders
        self._receivers = receivers
        self._bucket_bytes = bucket_bytes
        self._deadline_seconds = deadline_seconds
        self._options = options or TransportOptions()
        self._route: _Route | None = None
        self._num_refits = 0  # begun
        self._committed: int | None = None  # the version that all hold, if the last refit succeeded

    def layout_changed(self) -> None:
        """Ask both sides anew before the next refit, which is a full one."""
        self._route = self._committed = None

    def refit(self, version: int) -> RefitStats:
        """Bring all generation ranks to `version`, whole, or leave all at the version they had.

        Ranks that are written in place answer nothing after a failure, until a later refit succeeds.
        Raises `RefitFailed`, among them `CorruptWeights` naming tensors and rank, `RefitDeadline` and
        `PeerClosed`; or whatever the groups raise for a lost worker.
        """
        began = time.perf_counter()
        route = self._route = self._route or self._find_route()
        try:
            transfer_began = time.perf_counter()
            sent, received = self._transfer(version, route)
            seconds_transfer = time.perf_counter() - transfer_began
            _compare(version, sent, received)
            self._receivers.commit(version)
            self._committed = version
        except Exception as error:
            self._abandon(error)
            raise
        return RefitStats(
            version=version,
            seconds=time.perf_counter() - began,
            seconds_transfer=seconds_transfer,
            num_bytes=sum(report.num_bytes for report in received),
            num_bytes_whole=route.num_bytes,
            num_buckets=sum(len(part.buckets) for part in route.sender_parts),
            extra_bytes=sum(report.extra_bytes for report in sent),
            kept_bytes=sum(report.kept_bytes for report in sent),
        )

    def _find_route(self) -> "_Route":
        held, layouts = self._senders.describe(), self._receivers.describe()
        venue = make_venue(self._options, held, layouts, self._deadline_seconds)
        plan: TransferPlan
        if isinstance(venue, FileVenue):
            plan = plan_files(held, layouts, self._bucket_bytes)
            receiver_parts = [Part(rank, ()) for rank in range(len(layouts))]
        else:
            plan = plan_transfers(held, layouts, self._bucket_bytes)
            receiver_parts = plan.receiver_parts(len(layouts))
        sender_parts = plan.sender_parts(len(held))
        self._senders.prepare(sender_parts)
        self._receivers.prepare(receiver_parts)
        delta = self._options.delta and all(layout.takes_changes for layout in layouts)
        if self._options.delta and not delta:
            logger.warning(
                "generation.delta: engines keep nothing that changes could go onto; refits are whole"
            )
        return _Route(venue, sender_parts, len(layouts), plan.num_bytes, delta)

    def _abandon(self, cause: Exception) -> None:
        """Have the receivers forget what came. Those that are gone cannot; `cause` tells of that."""
        self._committed = None
        if self._route is not None:
            self._route.venue.reset_rendezvous()
        try:
            self._receivers.abandon()
        except NemorlError as error:
            cause.add_note(f"when the update was given up: {error}")

    def _transfer(
        self, version: int, route: "_Route"
    ) -> tuple[Sequence[SendReport], Sequence[ReceiveReport]]:
        venue = route.venue
        if isinstance(venue, FileVenue):  # nobody reads before all is written
            with route.session(version) as session:
                sent = self._senders.send(session)
                venue.complete(session, route.sender_parts, sent)
                return sent, self._receivers.receive(session)
        with ThreadPoolExecutor(max_workers=2) as pool:
            with route.session(version) as met:
                base = self._committed if route.delta else None
                self._num_refits += 1
                session = replace(
                    met,
                    keep=route.delta,
                    base=base,
                    check_one_in=self._options.check_one_in,
                    check_turn=self._num_refits,
                )
                sending = pool.submit(self._senders.send, session)
                receiving = pool.submit(self._receivers.receive, session)
                calls: list[Future[Any]] = [sending, receiving]
                finished = wait(calls, return_when=FIRST_EXCEPTION).done
            # the session is over now: after an error, ranks that still wait give up
            _raise_cause(sorted(calls, key=lambda call: call not in finished))
            return sending.result(), receiving.result()


@dataclass(frozen=True)
class _Route:
    """What lasts until a layout changes."""

    venue: Venue
    sender_parts: Sequence[Part]
    num_receivers: int
    num_bytes: int  # of a full refit
    delta: bool

    def session(self, version: int) -> AbstractContextManager[RefitSession]:
        return self.venue.session(version, len(self.sender_parts), self.num_receivers)


def _raise_cause(calls: Sequence[Future[Any]]) -> None:
    """Raise the error that caused the others, which become its notes. `calls` are in order of time."""
    errors = [error for call in calls if (error := call.exception()) is not None]
    if not errors:
        return
    cause = next((error for error in errors if not isinstance(error, PeerClosed)), errors[0])
    for error in errors:
        if error is not cause:
            cause.add_note(f"on the other side: {error}")
    raise cause


def _compare(version: int, sent: Sequence[SendReport], received: Sequence[ReceiveReport]) -> None:
    expected: dict[tuple[int, str], list[int]] = defaultdict(list)
    for send_report in sent:
        for key, value in send_report.fingerprints.items():
            expected[key].append(value)
    found = {
        (rank, name): value
        for rank, report in enumerate(received)
        for name, value in report.fingerprints.items()
    }
    wrong = [
        f"{key[1]} at generation rank {key[0]}"
        for key in sorted(expected.keys() | found.keys())
        if combine(expected[key]) != found.get(key)
    ]
    if wrong:
        raise CorruptWeights(
            f"refit to version {version}: {len(wrong)} tensors did not arrive as they were sent, first "
            f"{wrong[0]}; generation keeps the version it had"
        )
