"""A refit: the driver's side. It sees metadata only, never a weight.

    driver                    every policy rank              every generation rank
    describe  ------------->  its slices                     its slices and their types
    plan, prepare  -------->  keeps its part                 keeps its part            (once per layout)
    send, receive  -------->  fills buckets      ==bytes==>  copies into staging tensors, or in place
    compare fingerprints  <-  of what it wrote               of what now lies there
    commit  -------------------------------------------->    this becomes the version
    (abandon, if any of these fails)  ------------------>    the version before stays in use

The driver computes the plan and hands each rank its part. Letting every rank compute it would repeat work
that grows with both sides on each of thousands of ranks, and send all metadata to all of them; a part is as
small as what the rank itself holds. It is sent once, and again only when a layout changes.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nemorl.errors import NemorlError

from .channel import TransportOptions, Venue, make_venue
from .files import FileVenue
from .messages import (
    CorruptWeights,
    Part,
    PeerClosed,
    ReceiveReport,
    ReceiverLayout,
    RefitSession,
    SenderLayout,
    SendReport,
    combine,
)
from .plan import TransferPlan, plan_files, plan_transfers


@dataclass(frozen=True)
class RefitStats:
    """Metrics of one refit."""

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

    async def describe(self) -> Sequence[SenderLayout]: ...

    async def prepare(self, parts: Sequence[Part]) -> None: ...

    async def send(self, session: RefitSession) -> Sequence[SendReport]: ...


class ReceiverGroup(Protocol):
    """All generation ranks: each call reaches the `WeightReceiver` of every rank at once; results by rank."""

    async def describe(self) -> Sequence[ReceiverLayout]: ...

    async def prepare(self, parts: Sequence[Part]) -> None: ...

    async def receive(self, session: RefitSession) -> Sequence[ReceiveReport]: ...

    async def commit(self, version: int) -> None: ...

    async def abandon(self) -> None: ...


class WeightExchange:
    """Brings generation to the policy's weights, version by version. Belongs to one event loop at a time."""

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
        """Ask both sides for their layouts before the next refit, which is a full one."""
        self._route = self._committed = None

    async def refit(self, version: int) -> RefitStats:
        """Bring all generation ranks to `version`, or leave all at the version they had.

        Ranks that are written in place answer nothing after a failure, until a later refit succeeds.
        Raises `RefitFailed`, among them `CorruptWeights` naming tensors and rank, `RefitDeadline` and
        `PeerClosed`; or whatever the groups raise for a lost worker.
        """
        began = time.perf_counter()
        route = self._route = self._route or await self._find_route()
        try:
            transfer_began = time.perf_counter()
            sent, received = await self._transfer(version, route)
            seconds_transfer = time.perf_counter() - transfer_began
            _compare(version, sent, received)
            await self._receivers.commit(version)
            self._committed = version
        except Exception as error:
            await self._abandon(error)
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

    async def _find_route(self) -> "_Route":
        held, needed = await self._senders.describe(), await self._receivers.describe()
        venue = make_venue(self._options, held, needed, self._deadline_seconds)
        read = isinstance(venue, FileVenue)  # receivers read what they need, written by any rank
        # In a thread, since plans of large models take seconds.
        plan: TransferPlan = await asyncio.to_thread(
            plan_files if read else plan_transfers, held, needed, self._bucket_bytes
        )
        sender_parts = plan.sender_parts(len(held))
        await self._senders.prepare(sender_parts)
        await self._receivers.prepare(
            [Part(rank, ()) for rank in range(len(needed))] if read else plan.receiver_parts(len(needed))
        )
        delta = self._options.delta and all(layout.takes_changes for layout in needed)
        if self._options.delta and not delta:
            logger.warning(
                "generation.delta: the engines keep no tensors that changes could be applied to; all weights "
                "are sent with every update"
            )
        return _Route(venue, sender_parts, len(needed), plan.num_bytes, delta)

    async def _abandon(self, cause: Exception) -> None:
        """Have the receivers discard what came. A receiver that died cannot; `cause` reports its death."""
        self._committed = None
        if self._route is not None:
            self._route.venue.reset_rendezvous()
        try:
            await self._receivers.abandon()
        except NemorlError as error:
            cause.add_note(f"when the update was given up: {error}")

    async def _transfer(
        self, version: int, route: "_Route"
    ) -> tuple[Sequence[SendReport], Sequence[ReceiveReport]]:
        venue = route.venue
        if isinstance(venue, FileVenue):  # the version is complete before it is read
            with route.session(version) as session:
                sent = await self._senders.send(session)
                await asyncio.to_thread(venue.complete, session, route.sender_parts, sent)
                return sent, await self._receivers.receive(session)
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
            sending = asyncio.ensure_future(self._senders.send(session))
            receiving = asyncio.ensure_future(self._receivers.receive(session))
            calls: list[asyncio.Future[Any]] = [sending, receiving]
            try:
                finished, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError:
                for call in calls:
                    call.cancel()
                raise
        # The session is over now: after an error, ranks that still wait give up.
        await asyncio.wait(calls)
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


def _raise_cause(calls: Sequence[asyncio.Future[Any]]) -> None:
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
