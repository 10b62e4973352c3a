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

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

from nemorl.errors import NemorlError

from .fingerprint import combine
from .messages import Part, ReceiveReport, ReceiverLayout, SenderLayout, SendReport
from .plan import TransferPlan, plan_transfers
from .session import PeerClosed, RefitFailed, RefitSession, refit_session


class CorruptWeights(RefitFailed):
    """What a receiver holds is not what was sent; the message names the tensors."""


@dataclass(frozen=True)
class RefitStats:
    """Figures of one refit."""

    version: int
    seconds: float  # all of it
    seconds_transfer: float  # sending and receiving
    num_bytes: int  # sent, over all receivers
    num_buckets: int
    extra_bytes: int  # shared memory of all senders together

    @property
    def gigabytes_per_second(self) -> float:
        """Of the transfer."""
        return self.num_bytes / self.seconds_transfer / 1e9


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
        self, senders: SenderGroup, receivers: ReceiverGroup, bucket_bytes: int, deadline_seconds: float
    ) -> None:
        self._senders = senders
        self._receivers = receivers
        self._bucket_bytes = bucket_bytes
        self._deadline_seconds = deadline_seconds
        self._plan: TransferPlan | None = None

    def layout_changed(self) -> None:
        """Ask both sides anew before the next refit."""
        self._plan = None

    def refit(self, version: int) -> RefitStats:
        """Bring all generation ranks to `version`, whole, or leave all at the version they had.

        Ranks that are written in place answer nothing after a failure, until a later refit succeeds.
        Raises `RefitFailed`, among them `CorruptWeights` naming tensors and rank, `RefitDeadline` and
        `PeerClosed`; or whatever the groups raise for a lost worker.
        """
        began = time.perf_counter()
        plan = self._plan = self._plan or self._make_plan()
        try:
            transfer_began = time.perf_counter()
            sent, received = self._transfer(version)
            seconds_transfer = time.perf_counter() - transfer_began
            _compare(version, sent, received)
            self._receivers.commit(version)
        except Exception as error:
            self._abandon(error)
            raise
        return RefitStats(
            version=version,
            seconds=time.perf_counter() - began,
            seconds_transfer=seconds_transfer,
            num_bytes=plan.num_bytes,
            num_buckets=len(plan.buckets),
            extra_bytes=sum(report.extra_bytes for report in sent),
        )

    def _make_plan(self) -> TransferPlan:
        held, layouts = self._senders.describe(), self._receivers.describe()
        plan = plan_transfers(held, layouts, self._bucket_bytes)
        self._senders.prepare([plan.sender_part(rank) for rank in range(len(held))])
        self._receivers.prepare([plan.receiver_part(rank) for rank in range(len(layouts))])
        return plan

    def _abandon(self, cause: Exception) -> None:
        """Have the receivers forget what came. Those that are gone cannot; `cause` tells of that."""
        try:
            self._receivers.abandon()
        except NemorlError as error:
            cause.add_note(f"when the update was given up: {error}")

    def _transfer(self, version: int) -> tuple[Sequence[SendReport], Sequence[ReceiveReport]]:
        with ThreadPoolExecutor(max_workers=2) as pool:
            with refit_session(version, self._deadline_seconds) as session:
                sending = pool.submit(self._senders.send, session)
                receiving = pool.submit(self._receivers.receive, session)
                calls: list[Future[Any]] = [sending, receiving]
                finished = wait(calls, return_when=FIRST_EXCEPTION).done
            # the session is over now: after an error, ranks that still wait give up
            _raise_cause(sorted(calls, key=lambda call: call not in finished))
            return sending.result(), receiving.result()


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
    wrong = [
        f"{name} at generation rank {rank}"
        for rank, receive_report in enumerate(received)
        for name, value in receive_report.fingerprints.items()
        if combine(expected[rank, name]) != value
    ]
    if wrong:
        raise CorruptWeights(
            f"refit to version {version}: {len(wrong)} tensors did not arrive as they were sent, first "
            f"{wrong[0]}; generation keeps the version it had"
        )
