"""One request on its way through the router, wherever it is sampled and however often it moves."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nemorl.trajectories import Int16Array, Int32Array, StopReason

from .types import Completion, GenerationRequest, Progress

T = TypeVar("T", bound=np.generic)

OnProgress = Callable[[Progress], None]
_LEAST_SECONDS = 0.001  # of a request that moves when its deadline has passed: it ends where it arrives


@dataclass(eq=False)
class Flight:
    """A request, who waits for it, and what was sampled for it so far."""

    request: GenerationRequest
    answer: asyncio.Future[Completion]
    on_progress: OnProgress | None = None
    losses: int = 0  # of the replicas that it was on
    parts: list[Progress] = field(default_factory=list)  # in the order of sampling
    num_sampled: int = 0  # tokens of the parts
    num_routed: int = 0  # rows of experts in the parts
    # Of both those that came before the replica it is on now.
    _num_kept: int = 0
    _num_routed_kept: int = 0

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    @property
    def cost(self) -> int:
        """What it is to a replica, in tokens."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def answered(self) -> bool:
        """Whether it ended of itself, so that no replica works on it any more."""
        return self.answer.done() and not self.answer.cancelled()

    @property
    def num_new(self) -> int:
        """Tokens that the replica it was on has reported."""
        return self.num_sampled - self._num_kept

    def remaining(self, progress_tokens: int) -> GenerationRequest:
        """What is left to ask of a replica: the sampled tokens stand at the end of the prompt."""
        self._num_kept, self._num_routed_kept = self.num_sampled, self.num_routed
        request = self.request
        progress = request.progress_tokens or progress_tokens
        if not self.num_sampled:
            return replace(request, progress_tokens=progress)
        return replace(
            request,
            prompt=np.concatenate([request.prompt, self._tokens()]),
            max_new_tokens=request.max_new_tokens - self.num_sampled,
            sampled_before=request.sampled_before + self.num_sampled,
            deadline_seconds=max(_LEAST_SECONDS, request.deadline_seconds - self._seconds),
            progress_tokens=progress,
            routed_experts_from=request.routed_experts_from + self.num_routed,
        )

    def advance(self, progress: Progress) -> None:
        """Keep what was sampled since the last report."""
        self.parts.append(progress)
        self.num_sampled += len(progress.tokens)
        if progress.routed_experts is not None:
            self.num_routed += len(progress.routed_experts)
        if self.on_progress is not None:
            self.on_progress(progress)

    def finish(self, completion: Completion) -> None:
        """Answer with what this replica sampled behind what others had."""
        told, experts = self.num_new, completion.routed_experts
        self.advance(
            Progress(
                completion.id,
                completion.tokens[told:],
                completion.logprobs[told:],
                completion.versions[told:],
                None if experts is None else experts[self.num_routed - self._num_routed_kept :],
            )
        )
        self._answer(completion.stop, completion.seconds if self.losses == 0 else self._seconds)

    def finish_if_whole(self) -> bool:
        """Answer if nothing is left to sample: its last report may have come, and its end not."""
        if self.num_sampled == 0:
            return False
        if int(self.parts[-1].tokens[-1]) in self.request.stop_token_ids:
            self._answer(StopReason.STOP, self._seconds)
        elif self.num_sampled >= self.request.max_new_tokens:
            self._answer(StopReason.LENGTH, self._seconds)
        return self.answer.done()

    def give_up(self) -> None:
        """Answer with what it has."""
        self._answer(StopReason.ERROR, self._seconds)

    def fail(self, error: Exception) -> None:
        """Let who waits for it have an error."""
        if not self.answer.done():
            self.answer.set_exception(error)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _answer(self, stop: StopReason, seconds: float) -> None:
        if self.answer.done():
            return
        self.answer.set_result(
            Completion(
                id=self.request.id,
                tokens=self._tokens(),
                logprobs=_join([part.logprobs for part in self.parts], np.float32),
                versions=_join([part.versions for part in self.parts], np.int32),
                stop=stop,
                seconds=seconds,
                routed_experts=self._routed_experts(),
            )
        )

    def _routed_experts(self) -> Int16Array | None:
        parts = [part.routed_experts for part in self.parts if part.routed_experts is not None]
        return np.concatenate(parts) if parts else None

    def _tokens(self) -> Int32Array:
        """[n] of all parts."""
        return _join([part.tokens for part in self.parts], np.int32)


def _join(parts: list[NDArray[T]], dtype: type[T]) -> NDArray[T]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
