"""Simulated engines behind the real supervisor: they take requests and weights as real ones, in virtual time.

    Router ─▶ EngineHandle ─▶ SimulatedWorker ─▶ SimulatedEngine ◀─ SimulatedExchange
                               ReplicaSupervisor ─▶ SimulatedEngines ─┘

Token arrays would be most of the work, so that an entry of an array is a block of tokens (`Scale`).
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

import numpy as np

from nemorl.cluster.errors import WorkerDied
from nemorl.config.generation import OnUpdate
from nemorl.generation.types import (
    Completion,
    EngineHealth,
    EngineStats,
    GenerationRequest,
    Progress,
    Report,
)
from nemorl.trajectories import Int32Array, StopReason
from nemorl.weights.exchange import RefitStats

from .processes import Faults, SimulatedGroup, SimulatedProcess, died
from .workload import Workload

_TOLERANCE = 1e-6  # of a step, so that rounding of times leaves nothing to decode
_ENTRIES = 64  # of the array of an average turn


@dataclass(frozen=True)
class Scale:
    block: int  # tokens of one entry

    @classmethod
    def of(cls, workload: Workload) -> "Scale":
        return cls(max(1, round(workload.turn_tokens.mean / _ENTRIES)))

    def blocks(self, tokens: float) -> int:
        return max(1, round(tokens / self.block))


@dataclass
class Usage:
    """What engines did, in seconds over all of them."""

    decoding: float = 0.0
    paused: float = 0.0
    sequences: float = 0.0  # the seconds of each sequence that was decoded, added up
    alive: float = 0.0


@dataclass(eq=False)
class _Sequence:
    request: GenerationRequest
    reports: "asyncio.Queue[list[Report] | WorkerDied]"  # of the call that it came with
    arrived: float
    length: int  # blocks that it has in the end, without those from other engines
    stop: StopReason
    start: float = 0.0  # steps of the engine before it
    spans: list[tuple[int, int]] = field(default_factory=list)  # version and number of reported blocks
    reported: int = 0

    def versions(self, count: int, version: int) -> Int32Array:
        """[count] the last of `version`."""
        if not self.spans:
            return np.full(count, version, np.int32)
        spans = [*self.spans, (version, count - self.reported)]
        numbers, counts = zip(*spans, strict=True)
        return np.repeat(np.array(numbers, np.int32), counts)


class SimulatedEngine(SimulatedProcess):
    """Continuous batching: sequences join when there is room, and all advance by one block in a step."""

    def __init__(
        self, workload: Workload, scale: Scale, max_sequences: int, usage: Usage, version: int = 0
    ) -> None:
        super().__init__()
        self._workload, self._scale, self._max_sequences = workload, scale, max_sequences
        self._usage = usage
        self._loop = asyncio.get_running_loop()
        self._sequences: dict[str, _Sequence] = {}  # running and waiting
        self._running: set[str] = set()
        self._waiting: deque[_Sequence] = deque()
        self._ends: list[tuple[float, int, _Sequence]] = []  # a heap by the steps at which they end
        self._num_admitted = 0
        self._steps = 0.0
        self._reading = 0.0  # seconds that prompts still delay the steps
        self._seconds = 1.0  # of a step
        self._at = self._loop.time()  # until when the state is computed
        self._timer: asyncio.TimerHandle | None = None
        self._paused = self._draining = False
        self._drained = asyncio.Event()
        self._cached: dict[str, int] = {}  # blocks of each conversation whose keys and values are kept
        self._tokens = 0
        self.version = version

    @property
    def _progresses(self) -> bool:
        return bool(self._running) and not (self._paused or self.halted.done())

    # --- Calls of an engine's process.

    async def generate_batches(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[list[Report], None]:
        reports: asyncio.Queue[list[Report] | WorkerDied] = asyncio.Queue()
        self.settle()
        for request in requests:
            self._sequences[request.id] = sequence = self._sequence(request, reports)
            self._waiting.append(sequence)
        self._proceed()
        left = len(requests)
        try:
            while left:
                batch = await reports.get()
                if isinstance(batch, WorkerDied):
                    raise batch
                left -= sum(not isinstance(report, Progress) for report in batch)
                yield batch
        finally:
            # A request of a later call may have the same name, of a group that is sampled again.
            unended = [self._sequences[r.id] for r in requests if r.id in self._sequences]
            self._end(sequence for sequence in unended if sequence.reports is reports)

    async def abort(self, ids: Sequence[str]) -> None:
        self.settle()
        sequences = [self._sequences[name] for name in ids if name in self._sequences]
        for sequence in sequences:
            sequence.stop, sequence.length = StopReason.ABORT, self._sampled(sequence)
            sequence.reports.put_nowait([self._completion(sequence)])
        self._end(sequences)

    async def health(self) -> EngineHealth:
        self.settle()
        running, waiting = len(self._running), len(self._sequences) - len(self._running)
        # Whose first block is in progress has a token, but whose prompt is being read has none.
        read = sum(self._steps > self._sequences[name].start for name in self._running)
        return EngineHealth(
            self.version, running, waiting, self._paused, 0.0, queued=waiting + running - read
        )

    async def stats(self) -> EngineStats:
        tokens, self._tokens = self._tokens, 0
        return EngineStats(tokens_generated=tokens)

    async def sleep(self, level: int) -> None:
        self.settle()
        self._pause()

    async def wake(self, tags: Sequence[str]) -> None:
        if not tags or "kv_cache" in tags:
            self.settle()
            self._paused = False
            self._proceed()

    async def receive_weights(self, on_update: OnUpdate) -> None:
        """Pause, with `finish` after all that runs has ended, for the seconds of a weight update."""
        if on_update == "finish":
            self._draining = True
            self._drained.clear()
            if self._running:
                await self._drained.wait()
        self.settle()
        self._pause()
        await asyncio.sleep(self._workload.refit)

    async def commit_weights(self, version: int, on_update: OnUpdate) -> None:
        """Sample with new weights; `restart` reads again what each running sequence has so far."""
        self.settle()
        self.version = version
        self._cached.clear()
        if on_update == "restart":
            for name in self._running:
                sequence = self._sequences[name]
                self._read(len(sequence.request.prompt) + self._sampled(sequence))
        await self.resume()

    async def resume(self) -> None:
        self.settle()
        self._paused = self._draining = False
        self._proceed()

    # --- Failures.

    def _halt(self) -> None:
        self.settle()

    def fail(self, cause: str, *, hangs: bool = False) -> None:
        had_ended = self.failure.done()
        super().fail(cause, hangs=hangs)
        if hangs or had_ended:
            return
        for name in self._running:
            sequence = self._sequences[name]
            every = sequence.request.progress_tokens or 1
            self._report(sequence, self._sampled(sequence) // every * every)
        for reports in {id(s.reports): s.reports for s in self._sequences.values()}.values():
            reports.put_nowait(died("generation", cause))
        self._sequences.clear()
        self._running.clear()
        self._waiting.clear()

    # --- The batch.

    def settle(self) -> None:
        """Compute the state until now."""
        now = self._loop.time()
        elapsed, self._at = now - self._at, now
        if self.failure.done():
            return
        self._usage.alive += elapsed
        if self._paused:
            self._usage.paused += elapsed
        if not self._progresses:
            return
        self._usage.decoding += elapsed
        self._usage.sequences += elapsed * len(self._running)
        reading = min(elapsed, self._reading)
        self._reading -= reading
        self._steps += (elapsed - reading) / self._seconds

    def _proceed(self) -> None:
        """After a change: end what is complete, admit what waits, and set the time of the next end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.halted.done():
            return
        while self._ends and self._ends[0][0] <= self._steps + _TOLERANCE:
            sequence = heappop(self._ends)[2]
            if self._sequences.get(sequence.request.id) is sequence:
                sequence.reports.put_nowait([self._completion(sequence)])
                del self._sequences[sequence.request.id]
                self._running.discard(sequence.request.id)
        if not self._running:
            self._drained.set()
        while self._waiting and len(self._running) < self._max_sequences and not self._stays_out:
            self._admit(self._waiting.popleft())
        self._seconds = self._scale.block * self._workload.step_seconds(len(self._running))
        if self._progresses:
            left = max(0.0, self._ends[0][0] - self._steps) if self._ends else math.inf
            self._timer = self._loop.call_later(self._reading + left * self._seconds, self._tick)

    @property
    def _stays_out(self) -> bool:
        return self._paused or self._draining

    def _tick(self) -> None:
        self.settle()
        self._proceed()

    def _sequence(
        self, request: GenerationRequest, reports: "asyncio.Queue[list[Report] | WorkerDied]"
    ) -> _Sequence:
        """The seed decides on the length, so that it is the same on every engine."""
        length = self._scale.blocks(self._workload.turn_tokens.draw(Random(request.seed)))
        limit = request.sampled_before + request.max_new_tokens
        stop = StopReason.LENGTH if length > limit else StopReason.STOP
        left = max(0, min(length, limit) - request.sampled_before)
        return _Sequence(request, reports, self._loop.time(), left, stop)

    def _admit(self, sequence: _Sequence) -> None:
        request = sequence.request
        if self._sequences.get(request.id) is not sequence:
            return
        sequence.start = self._steps
        self._num_admitted += 1
        self._running.add(request.id)
        heappush(self._ends, (self._steps + sequence.length, self._num_admitted, sequence))
        self._read(len(request.prompt) - self._cached.get(request.conversation, 0))
        if request.conversation:
            self._cached[request.conversation] = len(request.prompt) + sequence.length

    def _read(self, blocks: int) -> None:
        self._reading += max(0, blocks) * self._scale.block * self._workload.prefill

    def _sampled(self, sequence: _Sequence) -> int:
        """Blocks so far."""
        if sequence.request.id not in self._running:
            return 0
        return min(sequence.length, int(self._steps - sequence.start + _TOLERANCE))

    def _pause(self) -> None:
        for name in self._running:
            self._report(self._sequences[name], self._sampled(self._sequences[name]))
        self._paused = True
        self._proceed()

    def _report(self, sequence: _Sequence, count: int) -> None:
        new = count - sequence.reported
        if new <= 0:
            return
        tokens, logprobs = np.zeros(new, np.int32), np.zeros(new, np.float32)
        versions = np.full(new, self.version, np.int32)
        sequence.reports.put_nowait([Progress(sequence.request.id, tokens, logprobs, versions)])
        sequence.spans.append((self.version, new))
        sequence.reported = count

    def _completion(self, sequence: _Sequence) -> Completion:
        count, seconds = sequence.length, self._loop.time() - sequence.arrived
        self._tokens += count * self._scale.block
        tokens, logprobs = np.zeros(count, np.int32), np.zeros(count, np.float32)
        versions = sequence.versions(count, self.version)
        return Completion(sequence.request.id, tokens, logprobs, versions, sequence.stop, seconds)

    def _end(self, sequences: Iterable[_Sequence]) -> None:
        ended = list(sequences)
        if not ended:
            return
        self.settle()
        for sequence in ended:
            self._sequences.pop(sequence.request.id, None)
            self._running.discard(sequence.request.id)
        self._proceed()


class SimulatedEngines(SimulatedGroup[SimulatedEngine]):
    """The processes of all engines."""

    def __init__(self, replicas: int, workload: Workload, max_sequences: int, faults: Faults) -> None:
        self._workload, self._max_sequences = workload, max_sequences
        self.scale, self.usage = Scale.of(workload), Usage()
        super().__init__("generation", replicas, faults)

    def settle(self) -> None:
        for engine in self.started:
            engine.settle()

    def _make(self, rank: int) -> SimulatedEngine:
        return SimulatedEngine(self._workload, self.scale, self._max_sequences, self.usage)


@dataclass
class SimulatedExchange:
    """Brings all engines of a group to a version, or leaves all with the one they had."""

    group: SimulatedEngines
    on_update: OnUpdate
    deadline_seconds: float
    check_sender: Callable[[str], None]  # raises WorkerDied if the policy cannot send
    seconds: float = 0.0  # of all updates so far

    def layout_changed(self) -> None: ...

    async def refit(self, version: int) -> RefitStats:
        """Raises what the first lost engine raises."""
        loop = asyncio.get_running_loop()
        workers, began = self.group.workers, loop.time()
        options: dict[str, Any] = {"stage": "refit", "seconds": self.deadline_seconds}
        calls = (worker.call("receive_weights", self.on_update, **options) for worker in workers)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        try:
            self.check_sender("refit")
        except WorkerDied as error:
            errors.append(error)
        if not errors:
            calls = (w.call("commit_weights", version, self.on_update, **options) for w in workers)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            others = [w for w, outcome in zip(workers, outcomes, strict=True) if outcome is None]
            await asyncio.gather(*(w.call("resume", **options) for w in others), return_exceptions=True)
            raise errors[0]
        self.seconds += loop.time() - began
        return RefitStats(version, loop.time() - began, max(self.group._workload.refit, 1e-9), 0, 0, 0, 0, 0)
