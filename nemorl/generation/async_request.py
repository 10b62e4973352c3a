"""The bookkeeping of `AsyncEngineWorker`: a request that is under way, and what was done."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nemorl.trajectories import Float32Array, Int16Array, Int32Array, StopReason

from .types import Completion, GenerationRequest, Progress, Refusal, Report


@dataclass(eq=False)
class OpenRequest:
    """A request that has not been answered."""

    request: GenerationRequest
    reports: asyncio.Queue[Report | Exception]  # of its call
    task: asyncio.Task[StopReason] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: list[Int16Array] = field(default_factory=list)  # rows of each chunk
    num_told: int = 0  # tokens that progress has reported
    _chunks_told: int = 0  # of experts

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, last: bool
    ) -> None:
        """Keep what was sampled, and report progress where it is due."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        every = self.request.progress_tokens
        if not last and every and len(self.tokens) - self.num_told >= every:
            arrays, experts = self._arrays(self.num_told), self._experts(self._chunks_told)
            self.reports.put_nowait(Progress(self.request.id, *arrays, experts))
            self.num_told, self._chunks_told = len(self.tokens), len(self.routed_experts)

    def end(self, stop: StopReason) -> None:
        """Answer with what there is."""
        seconds = time.monotonic() - self._began
        arrays, experts = self._arrays(0), self._experts(0)
        self.reports.put_nowait(Completion(self.request.id, *arrays, stop, seconds, experts))

    def refuse(self, reason: str) -> None:
        """Answer that it cannot be served; others are not concerned."""
        self.reports.put_nowait(Refusal(self.request.id, reason))

    def abort(self) -> None:
        """Stop sampling; it is answered when its task has ended."""
        if self.task is not None:
            self.task.cancel()

    def _experts(self, first: int) -> Int16Array | None:
        """Rows of the chunks from `first` on."""
        new = self.routed_experts[first:]
        return np.concatenate(new) if new else None

    def _arrays(self, first: int) -> tuple[Int32Array, Float32Array, Int32Array]:
        return (
            np.array(self.tokens[first:], np.int32),
            np.array(self.logprobs[first:], np.float32),
            np.array(self.versions[first:], np.int32),
        )


@dataclass
class Figures:
    """What was done since they were last asked for."""

    peak: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    seconds_busy: float = 0.0
    _counted: float = field(default_factory=time.monotonic)

    def count(self, num_running: int) -> None:
        """Let the time until now be busy if anything ran."""
        now = time.monotonic()
        self.seconds_busy += (now - self._counted) if num_running else 0.0
        self._counted = now
