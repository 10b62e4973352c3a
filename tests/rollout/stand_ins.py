"""Named stand-ins for engines and environments, so that rollouts run in one process."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemorl.generation.types import Completion, GenerationRequest
from nemorl.trajectories import Action, Message, Step, StopReason, Task, ToolSchemas


def completion(
    request: GenerationRequest, tokens: Sequence[int], stop: StopReason = StopReason.STOP, version: int = 0
) -> Completion:
    """An answer whose logprobs identify the token they belong to: -token / 1000."""
    ids = np.array(tokens, dtype=np.int32)
    return Completion(
        id=request.id,
        tokens=ids,
        logprobs=(-ids / 1000).astype(np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
        stop=stop,
    )


@dataclass
class ScriptedGenerator:
    """A `Generator` that answers turn by turn from a list of token lists and keeps the requests it got."""

    turns: Sequence[Sequence[int]]
    stops: dict[int, StopReason] = field(default_factory=dict)  # of turns that do not just stop
    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest, on_progress: Any = None) -> Completion:
        turn = len(self.requests)
        self.requests.append(request)
        stop = self.stops.get(turn, StopReason.STOP)
        return completion(request, self.turns[turn][: request.max_new_tokens], stop, version=turn)


@dataclass
class EchoEngine:
    """An engine replica: answers each request with `answer(request)`, newest first, and keeps its calls."""

    answer: Callable[[GenerationRequest], Sequence[int]]
    calls: list[list[str]] = field(default_factory=list)
    held: asyncio.Event | None = None  # answers wait for it when given

    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[list[Completion], None]:
        self.calls.append([request.id for request in requests])
        if self.held is not None:
            await self.held.wait()
        for request in reversed(requests):
            yield [completion(request, self.answer(request))]


@dataclass
class ScriptedEnvironment:
    """An environment that answers from a list of steps; a step may be an exception, or None to hang."""

    steps: Sequence[Step | Exception | None]
    closes: int = 0
    actions: list[Action] = field(default_factory=list)
    tools: ToolSchemas = ()

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        step = self.steps[len(self.actions) - 1]
        if isinstance(step, Exception):
            raise step
        if step is None:
            await asyncio.Event().wait()
        assert step is not None
        return step

    async def close(self) -> None:
        self.closes += 1
