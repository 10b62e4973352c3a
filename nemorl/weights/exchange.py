"""A refit: the driver's side. It sees metadata only, never a weight.

    driver                    every policy rank              every generation rank
    describe  ------------->  its slices                     its slices and their types
    plan, prepare  -------->  keeps its part                 keeps its part            (once per layout)
    send, receive  -------->  fills buckets      ==bytes==>  copies into staging tensors, or in place
    compare fingerprints  <-  of what it wrote               of what now lies there
    commit  -------------------------------------------->    this becomes the version
    (abandon, if any of these fails)  ------------------>    the version before stays in use

The plan grows with both sides; a rank gets only its part of it.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from nemorl.config.generation import LOOPBACK
from nemorl.errors import NemorlError

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
    Transport,
    Venue,
    combine,
)
from .plan import plan_files, plan_transfers
from .process_group import GroupVenue
from .shared_memory import SocketVenue

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransportOptions:
    transport: Transport | Literal["auto"] = "auto"
    url: str = "weights"  # of the versions, for files: a folder, or any URL of fsspec
    delta: bool = False  # send only changes if the receivers hold the previous version
    full_version_every: int = 1  # with `delta` and files: one in this number of versions has all weights
    check_one_in: int = 1  # a refit checks one of this number of tensors; files are checked completely
    host: str = LOOPBACK  # address of this machine at which ranks on other machines reach the driver


def make_venue(
    options: TransportOptions,
    senders: Sequence[SenderLayout],
    receivers: Sequence[ReceiverLayout],
    deadline_seconds: float,
) -> Venue:
    """The venue of a transport.

    Raises ValueError for memory that several machines were to share, and `RefitFailed` for an unknown URL.
    """
    nodes = sorted({sender.node for sender in senders} | {receiver.node for receiver in receivers})
    transport = options.transport
    if transport == "auto":
        transport = _automatic(senders, receivers, num_nodes=len(nodes))
    if transport == "files":
        return FileVenue(options.url, deadline_seconds, options.full_version_every if options.delta else 1)
    if transport in ("gloo", "nccl", "nixl"):
        return GroupVenue(transport, LOOPBACK if len(nodes) == 1 else options.host, deadline_seconds)
    if len(nodes) > 1:
        names = ", ".join([*nodes[:3], "..."] if len(nodes) > 3 else nodes)
        problem = f"weights cannot travel by {transport} between {len(nodes)} machines ({names})"
        raise ValueError(f"{problem}: set generation.transport to auto, gloo or files")
    return SocketVenue(transport, deadline_seconds)


def _automatic(
    senders: Sequence[SenderLayout], receivers: Sequence[ReceiverLayout], *, num_nodes: int
) -> Transport:
    """A transport between the devices of both sides; through memory of hosts only if there is no other."""
    of_senders, of_receivers = [layout.gpu for layout in senders], [layout.gpu for layout in receivers]
    gpus = [*of_senders, *of_receivers]
    if all(gpus):
        if len(set(gpus)) == len(gpus):  # NCCL takes one process on each
            return "nccl"
        if num_nodes == 1 and set(of_receivers) <= set(of_senders):
            return "cuda_ipc"
    return "shared_memory" if num_nodes == 1 else "gloo"


@dataclass(frozen=True)
class RefitStats:
    version: int
    seconds: float  # all of it
    seconds_transfer: float  # sending and receiving
    num_bytes: int  # that came, over all receivers; of files, that were read
    num_bytes_whole: int  # of a full refit; of files, that were written
    num_buckets: int
    extra_bytes: int  # memory for buckets, of all senders together
    kept_bytes: int  # host memory of all senders for what they sent last
    max_sent_bytes: int = 0  # by one rank
    max_received_bytes: int = 0  # by one rank
    seconds_of_stages: Mapping[str, float] = field(default_factory=dict)  # of the slowest rank in each

    @property
    def gigabytes_per_second(self) -> float:
        return self.num_bytes / self.seconds_transfer / 1e9

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of a step: sizes in GB, and seconds by stage."""
        return {
            "refit/gigabytes": self.num_bytes / 1e9,
            "refit/gigabytes_per_second": self.gigabytes_per_second,
            "refit/max_gigabytes_sent": self.max_sent_bytes / 1e9,
            "refit/max_gigabytes_received": self.max_received_bytes / 1e9,
            **{f"refit/seconds/{stage}": seconds for stage, seconds in self.seconds_of_stages.items()},
        }


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
        self._senders, self._receivers = senders, receivers
        self._bucket_bytes, self._deadline_seconds = bucket_bytes, deadline_seconds
        self._options = options or TransportOptions()
        self._route: _Route | None = None
        self._num_refits = 0  # begun
        self._committed: int | None = None  # the version that all hold, if the last refit succeeded

    def layout_changed(self) -> None:
        """Ask both sides for their layouts before the next refit, which is a full one."""
        self._route = self._committed = None

    async def refit(self, version: int) -> RefitStats:
        """Bring all generation ranks to `version`, or leave all at the version they had.

        Ranks that are written in place answer nothing after a failure, until a later refit succeeds. Raises
        `RefitFailed` or a subclass, or whatever the groups raise for a lost worker.
        """
        began = time.perf_counter()
        route = self._route = self._route or await self._find_route()
        try:
            transfer_began = time.perf_counter()
            sent, received = await self._transfer(version, route)
            seconds_transfer = time.perf_counter() - transfer_began
            _compare(version, sent, received)
            commit_began = time.perf_counter()
            await self._receivers.commit(version)
            seconds_commit = time.perf_counter() - commit_began
            self._committed = version
        except Exception as error:
            self._committed = None
            route.venue.reset_rendezvous()
            try:  # have the receivers discard what came; one that died cannot, and `error` reports its death
                await self._receivers.abandon()
            except NemorlError as failure:
                error.add_note(f"when the update was given up: {failure}")
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
            max_sent_bytes=max((report.num_bytes for report in sent), default=0),
            max_received_bytes=max((report.num_bytes for report in received), default=0),
            seconds_of_stages={
                **_slowest("send", [report.seconds for report in sent]),
                **_slowest("receive", [report.seconds for report in received]),
                "commit": seconds_commit,
            },
        )

    async def _find_route(self) -> "_Route":
        held, needed = await self._senders.describe(), await self._receivers.describe()
        delta = self._options.delta and all(layout.takes_changes for layout in needed)
        venue = make_venue(replace(self._options, delta=delta), held, needed, self._deadline_seconds)
        read = isinstance(venue, FileVenue)  # receivers read what they need, written by any rank
        make_plan = plan_files if read else plan_transfers
        # In a thread, since plans of large models take seconds.
        bucket_bytes = venue.bucket_bytes(self._bucket_bytes)
        plan = await asyncio.to_thread(make_plan, held, needed, bucket_bytes)
        sender_parts = plan.sender_parts(len(held))
        no_parts = [Part(rank, ()) for rank in range(len(needed))]
        await self._senders.prepare(sender_parts)
        await self._receivers.prepare(no_parts if read else plan.receiver_parts(len(needed)))
        if self._options.delta and not delta:
            reason = "the engines keep no tensors that changes could be applied to"
            logger.warning("generation.delta: %s; all weights are sent with every update", reason)
        return _Route(venue, sender_parts, len(needed), plan.num_bytes, delta)

    async def _transfer(
        self, version: int, route: "_Route"
    ) -> tuple[Sequence[SendReport], Sequence[ReceiveReport]]:
        venue = route.venue
        with venue.session(version, len(route.sender_parts), route.num_receivers) as session:
            if isinstance(venue, FileVenue):  # the version is complete before it is read
                sent = await self._senders.send(session)
                await asyncio.to_thread(venue.complete, session, route.sender_parts, sent)
                removing = asyncio.create_task(asyncio.to_thread(venue.remove_old))
                try:
                    return sent, await self._receivers.receive(session)
                finally:
                    await removing  # or it could remove what the next session writes
            self._num_refits += 1
            session = replace(
                session,
                keep=route.delta,
                base=self._committed if route.delta else None,
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
        # The first error that no other one caused is raised, with the others as its notes.
        in_order = sorted(calls, key=lambda call: call not in finished)
        errors = [error for call in in_order if (error := call.exception()) is not None]
        if errors:
            cause = next((error for error in errors if not isinstance(error, PeerClosed)), errors[0])
            for error in errors:
                if error is not cause:
                    cause.add_note(f"on the other side: {error}")
            raise cause
        return sending.result(), receiving.result()


@dataclass(frozen=True)
class _Route:
    venue: Venue
    sender_parts: Sequence[Part]
    num_receivers: int
    num_bytes: int  # of a full refit
    delta: bool


def _slowest(side: str, of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for seconds in of_ranks:
        for stage, value in seconds.items():
            found[f"{side}_{stage}"] = max(value, found.get(f"{side}_{stage}", 0.0))
    return found


def _compare(version: int, sent: Sequence[SendReport], received: Sequence[ReceiveReport]) -> None:
    expected: dict[tuple[int, str], list[int]] = defaultdict(list)
    for send_report in sent:
        for key, value in send_report.fingerprints.items():
            expected[key].append(value)
    reports = enumerate(received)
    found = {(rank, name): value for rank, r in reports for name, value in r.fingerprints.items()}
    keys = sorted(expected.keys() | found.keys())
    wrong = [key for key in keys if combine(expected[key]) != found.get(key)]
    if wrong:
        rank, name = wrong[0]
        reason = (
            f"{len(wrong)} tensors did not arrive as they were sent, first {name} at generation rank {rank}"
        )
        raise CorruptWeights(f"refit to version {version}: {reason}; generation keeps the version it had")
