"""A `Generator` over several engine replicas, as turn loops use it."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from nemorl.generation.types import Completion, GenerationRequest

GenerateMany = Callable[[list[GenerationRequest]], AsyncIterator[Completion]]

# Conversations whose replica is remembered; a forgotten one loses its prefix cache, nothing else.
REMEMBERED_CONVERSATIONS = 65536


class GenerationFailed(RuntimeError):
    """A replica ended its answers without one to a request; the message names both."""


@dataclass
class _Replica:
    name: str
    generate_many: GenerateMany
    outstanding_tokens: int = 0
    pending: list[GenerationRequest] = field(default_factory=list)  # of this tick of the event loop


class GenerationClient:
    """Spreads requests over replicas by outstanding tokens; a conversation stays where it began.

    Requests made in one tick of the event loop travel in one call per replica, so that a thousand turn loops
    do not make a thousand remote calls. Belongs to one event loop.
    """

    def __init__(self, replicas: Sequence[GenerateMany]) -> None:
        """`replicas`: each takes requests and yields their completions as they finish, in any order."""
        self._replicas = [_Replica(f"generation replica {i}", call) for i, call in enumerate(replicas)]
        self._home: OrderedDict[str, _Replica] = OrderedDict()
        self._answers: dict[str, asyncio.Future[Completion]] = {}
        self._streams: set[asyncio.Task[None]] = set()

    @property
    def outstanding_tokens(self) -> list[int]:
        """For each replica the tokens of its unanswered requests: prompts, and the most they may sample."""
        return [replica.outstanding_tokens for replica in self._replicas]

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one turn. Raises what the replica raises, and GenerationFailed when it leaves one out."""
        if request.id in self._answers:
            raise ValueError(f"a request named {request.id} is under way already")
        loop = asyncio.get_running_loop()
        replica = self._route(request)
        cost = len(request.prompt) + request.max_new_tokens
        answer: asyncio.Future[Completion] = loop.create_future()
        self._answers[request.id] = answer
        replica.outstanding_tokens += cost
        if not replica.pending:
            loop.call_soon(self._send, replica)
        replica.pending.append(request)
        try:
            return await answer
        finally:
            replica.outstanding_tokens -= cost
            del self._answers[request.id]

    def _route(self, request: GenerationRequest) -> _Replica:
        home = self._home.pop(request.conversation, None) if request.conversation else None
        replica = home or min(self._replicas, key=lambda r: r.outstanding_tokens)
        if request.conversation:
            self._home[request.conversation] = replica
            if len(self._home) > REMEMBERED_CONVERSATIONS:
                self._home.popitem(last=False)
        return replica

    def _send(self, replica: _Replica) -> None:
        requests, replica.pending = replica.pending, []
        stream = asyncio.create_task(self._receive(replica, requests))
        self._streams.add(stream)
        stream.add_done_callback(lambda done: self._close(replica, requests, done))

    async def _receive(self, replica: _Replica, requests: list[GenerationRequest]) -> None:
        async for completion in replica.generate_many(requests):
            answer = self._answers.get(completion.id)
            # Gone when the turn loop that asked was cancelled.
            if answer is not None and not answer.done():
                answer.set_result(completion)

    def _close(
        self, replica: _Replica, requests: list[GenerationRequest], stream: asyncio.Task[None]
    ) -> None:
        """Fail what a finished stream left without an answer."""
        self._streams.discard(stream)
        error = None if stream.cancelled() else stream.exception()
        for request in requests:
            answer = self._answers.get(request.id)
            if answer is not None and not answer.done():
                left_out = f"{replica.name} ended its answers without one to request {request.id}"
                answer.set_exception(error or GenerationFailed(left_out))
