"""One `Generator` over several engine replicas: balances them, and outlives the loss of some."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from nemorl.trajectories import StopReason

from .tokens import TokenBuffer
from .types import Completion, GenerationRequest, NoReplicaLeft, Progress, ReplicaLost, Report, RequestRefused

OnProgress = Callable[[Progress], None]

# Conversations whose replica is remembered; a forgotten one loses its prefix cache, nothing else.
REMEMBERED_CONVERSATIONS = 65536
MAX_LOSSES = 2  # a request that was on this number of replicas when they were lost may be what kills them
_MIN_SECONDS = 0.001  # of a request that moves when its deadline has passed: it ends where it arrives

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Flight:
    """A request, who waits for it, and what was sampled for it so far."""

    request: GenerationRequest
    answer: asyncio.Future[Completion]
    on_progress: OnProgress | None
    member: "_Member | None" = None  # with the replica that it is on, or was
    moves: int = 0  # to another replica
    losses: int = 0  # of the replicas that it was on; others have left
    sampled: TokenBuffer = field(default_factory=TokenBuffer)
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    num_kept: int = 0  # tokens from before the replica it is on now
    num_rows_kept: int = 0  # the same of rows of experts

    @property
    def cost(self) -> int:
        """Tokens that it may have at most."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.began

    @property
    def num_new(self) -> int:
        return len(self.sampled) - self.num_kept

    def remaining(self, progress_tokens: int) -> GenerationRequest:
        """What is left to ask of a replica."""
        self.num_kept, self.num_rows_kept = len(self.sampled), self.sampled.num_expert_rows
        request = self.sampled.remaining(self.request)
        seconds = request.deadline_seconds
        if self.num_kept:
            seconds = max(_MIN_SECONDS, seconds - self.seconds)
        progress_tokens = request.progress_tokens or progress_tokens
        return replace(request, progress_tokens=progress_tokens, deadline_seconds=seconds)

    def take(self, report: Report) -> None:
        """Keep what was sampled since the last report; answer with what ends the request."""
        if isinstance(report, Progress):
            progress = report
        elif isinstance(report, Completion):  # it has all tokens of this replica again
            new, experts = slice(self.num_new, None), report.routed_experts
            if experts is not None:
                experts = experts[self.sampled.num_expert_rows - self.num_rows_kept :]
            values = report.tokens[new], report.logprobs[new], report.versions[new]
            progress = Progress(report.id, *values, experts)
        else:
            self.fail(RequestRefused(report.reason))
            return
        self.sampled.add(progress)
        if isinstance(report, Completion):
            self.sampled.prompt_scores = report.prompt_scores
        if self.on_progress is not None:
            self.on_progress(progress)
        if isinstance(report, Completion):
            self.finish(report.stop, report.seconds if self.moves == 0 else None)

    def finish(self, stop: StopReason, seconds: float | None = None) -> None:
        if not self.answer.done():
            seconds = self.seconds if seconds is None else seconds
            self.answer.set_result(self.sampled.complete(self.request.id, stop, seconds))

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(frozen=True)
class Replica:
    """An engine. `generate` yields completions, refusals of single requests and progress, in any order.

    It raises RequestRefused if one can never be served (then none has begun), and ReplicaLost, or anything
    else, when no more answers will come. `abort` is for callers that have left.
    """

    name: str
    generate: Callable[[list[GenerationRequest]], AsyncGenerator[Sequence[Report], None]]
    abort: Callable[[Sequence[str]], Coroutine[Any, Any, None]] | None = None


@dataclass
class RouterMetrics:
    """What a router did since it was last asked."""

    moved_requests: int = 0  # to another replica, after theirs was lost or left
    kept_tokens: int = 0  # that those had sampled and did not sample again
    failed_requests: int = 0  # given up after `MAX_LOSSES` replicas


@dataclass(eq=False)
class _Member:
    replica: Replica
    outstanding_tokens: int = 0
    flights: dict[str, _Flight] = field(default_factory=dict)
    pending: list[_Flight] = field(default_factory=list)  # of this tick of the event loop
    # Ordered, as all that has an effect on the order of events: simulated runs are the same for a seed.
    streams: dict[asyncio.Task[None], None] = field(default_factory=dict)

    def holds(self, flight: _Flight) -> bool:
        return self.flights.get(flight.request.id) is flight

    def drop(self, flight: _Flight) -> None:
        del self.flights[flight.request.id]
        self.outstanding_tokens -= flight.cost


class Router:
    """Spreads requests over replicas by outstanding tokens; a conversation stays where it began.

    Requests made in one tick of the event loop, to which it belongs, travel in one call per replica. What a
    lost replica leaves continues on others: reported tokens are kept, and the rest has the same seeds.
    """

    def __init__(self, replicas: Sequence[Replica], progress_tokens: int = 64, waits: bool = False) -> None:
        """`progress_tokens`: how often replicas report, and so about the most that a loss costs a request.

        `waits` is for replicas that are restarted: without any, requests wait within their deadlines for the
        next one, or for `give_up`.
        """
        self.lost: dict[str, str] = {}  # the cause of each loss by the replica's name
        self._waits = waits
        self._held: list[_Flight] = []  # requests without a replica
        self._given_up: dict[str, str] = {}  # the causes, if no replica returns
        self._members = {replica.name: _Member(replica) for replica in replicas}
        self._progress_tokens = progress_tokens
        self._home: OrderedDict[str, _Member] = OrderedDict()
        self._waiting: set[str] = set()  # ids of unanswered requests
        self._metrics = RouterMetrics()
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def outstanding_tokens(self) -> list[int]:
        """Of each living replica, the tokens that its unanswered requests may have at most."""
        return [member.outstanding_tokens for member in self._members.values()]

    @property
    def num_unanswered(self) -> int:
        return len(self._waiting)

    @property
    def living(self) -> list[str]:
        return list(self._members)

    def lost_replicas(self) -> dict[str, str]:
        return dict(self.lost)

    def take_metrics(self) -> RouterMetrics:
        metrics, self._metrics = self._metrics, RouterMetrics()
        return metrics

    def add(self, replica: Replica) -> None:
        """Let a replica serve, also in the place of a lost one of the same name."""
        self.lose(replica.name, "another has taken its place")  # which was not noticed here yet
        self.lost.pop(replica.name, None)
        self._members[replica.name] = _Member(replica)
        held, self._held = self._held, []
        for flight in held:
            self._start(flight)

    def reset(self, replicas: Sequence[Replica]) -> None:
        """Let these replicas serve, and no others."""
        for name in self._members.keys() - {replica.name for replica in replicas}:
            self.lose(name, "it was lost before this router started")
        for replica in replicas:
            self.add(replica)

    def give_up(self, causes: Mapping[str, str]) -> None:
        """No replica returns: raise NoReplicaLeft for requests that wait, and for later ones."""
        self._given_up = dict(causes)
        held, self._held = self._held, []
        for flight in held:
            flight.fail(NoReplicaLeft(causes))

    async def generate(self, request: GenerationRequest, on_progress: OnProgress | None = None) -> Completion:
        """Sample one turn; `on_progress` receives each token once. Raises RequestRefused and NoReplicaLeft.

        After `MAX_LOSSES` lost replicas it is answered with what it has and stop reason `error`.
        """
        if request.id in self._waiting:
            raise ValueError(f"a request named {request.id} is under way already")
        flight = _Flight(request, asyncio.get_running_loop().create_future(), on_progress)
        self._waiting.add(request.id)
        try:
            self._start(flight)
            return await flight.answer
        finally:
            self._waiting.discard(request.id)
            self._release(flight)

    def lose(self, name: str, cause: str) -> None:
        """Give a replica up and move its requests; its later reports are ignored."""
        if name in self._members:
            log.warning("%s is lost: %s", name, cause)
            self.lost[name] = cause
            self._empty(name, losses=1)

    def remove(self, name: str) -> None:
        """Move the requests of a replica that leaves, which is not a loss."""
        self.lost.pop(name, None)
        if name in self._members:
            self._empty(name, losses=0)

    def _empty(self, name: str, losses: int) -> None:
        member = self._members.pop(name)
        for stream in member.streams:
            stream.cancel()
        for flight in list(member.flights.values()):
            member.drop(flight)
            if not flight.answer.done():
                flight.moves, flight.losses = flight.moves + 1, flight.losses + losses
                self._move(flight)

    def _start(self, flight: _Flight) -> None:
        if not self._members:
            if self._given_up or not self._waits:
                raise NoReplicaLeft(self._given_up or self.lost)
            self._held.append(flight)
            left = max(0.0, flight.request.deadline_seconds - flight.seconds)
            asyncio.get_running_loop().call_later(left, self._expire, flight)
            return
        conversation = flight.request.conversation
        member = self._home.pop(conversation, None) if conversation else None
        if member is None or not self._serves(member):
            member = min(self._members.values(), key=lambda member: member.outstanding_tokens)
        if conversation:
            self._home[conversation] = member
            if len(self._home) > REMEMBERED_CONVERSATIONS:
                self._home.popitem(last=False)
        if not member.pending:
            asyncio.get_running_loop().call_soon(self._send, member)
        member.flights[flight.request.id] = flight
        flight.member = member
        member.pending.append(flight)
        member.outstanding_tokens += flight.cost

    def _expire(self, flight: _Flight) -> None:
        if flight in self._held:
            self._held.remove(flight)
            flight.finish(StopReason.ABORT)

    def _serves(self, member: _Member) -> bool:
        return self._members.get(member.replica.name) is member

    def _send(self, member: _Member) -> None:
        waiting, member.pending = member.pending, []
        flights = [flight for flight in waiting if member.holds(flight)]  # not what was cancelled meanwhile
        if flights and self._serves(member):
            self._call(member, flights)

    def _call(self, member: _Member, flights: Sequence[_Flight]) -> None:
        stream = asyncio.create_task(self._receive(member, flights))
        member.streams[stream] = None
        stream.add_done_callback(lambda done: self._close(member, flights, done))

    async def _receive(self, member: _Member, flights: Sequence[_Flight]) -> None:
        requests = [flight.remaining(self._progress_tokens) for flight in flights]
        async with aclosing(member.replica.generate(requests)) as stream:
            async for reports in stream:
                for report in reports:
                    if report.id in member.flights:  # else the turn loop that asked was cancelled
                        member.flights[report.id].take(report)

    def _close(self, member: _Member, flights: Sequence[_Flight], stream: asyncio.Task[None]) -> None:
        member.streams.pop(stream, None)
        if stream.cancelled():
            return
        error = stream.exception()
        left = [flight for flight in flights if member.holds(flight) and not flight.answer.done()]
        if isinstance(error, RequestRefused):
            # A refusal is of a whole call: ask for each alone, so that only whom it concerns gets it.
            for flight in left:
                if len(left) == 1:
                    flight.fail(error)
                else:
                    self._call(member, [flight])
        elif self._serves(member) and (error is not None or left):
            cause = str(error) if isinstance(error, ReplicaLost) else f"{type(error).__name__}: {error}"
            if error is None:
                example = left[0].request.id
                cause = f"it ended its answers without one to {len(left)} requests, such as {example}"
            self.lose(member.replica.name, cause)

    def _move(self, flight: _Flight) -> None:
        # Nothing may be left to sample: its last report has come, and its end not.
        if len(flight.sampled) and flight.sampled.tokens[-1] in flight.request.stop_token_ids:
            flight.finish(StopReason.STOP)
        elif len(flight.sampled) >= flight.request.max_new_tokens:
            flight.finish(StopReason.LENGTH)
        elif flight.losses >= MAX_LOSSES and (self._members or self._waits):
            log.warning("request %s was on %d replicas when they were lost", flight.request.id, flight.losses)
            self._metrics.failed_requests += 1
            flight.finish(StopReason.ERROR)
        else:
            try:
                self._start(flight)
            except NoReplicaLeft as error:
                flight.fail(error)
                return
            self._metrics.moved_requests += 1
            self._metrics.kept_tokens += flight.num_new

    def _release(self, flight: _Flight) -> None:
        """Forget a request; end it if its caller has left."""
        if flight in self._held:
            self._held.remove(flight)
        answered, member = flight.answer.done() and not flight.answer.cancelled(), flight.member
        if member is None or not member.holds(flight):
            return
        member.drop(flight)
        if member.replica.abort is not None and not answered and flight not in member.pending:
            task = asyncio.create_task(_quietly(member.replica.abort([flight.request.id])))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)


async def _quietly(abort: Coroutine[Any, Any, None]) -> None:
    try:
        await abort
    except Exception as error:  # noqa: BLE001 (a lost replica is reported by its stream)
        log.info("a request could not be ended: %s", error)
