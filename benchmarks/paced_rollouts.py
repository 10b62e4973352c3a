"""An engine and environments with drawn seconds and faults: conversations in which all else is overhead.

A conversation of task `n` has the turns and seconds that `pace(n)` draws, so that what the delays allow is
known without a measurement.
"""

import asyncio
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from nemorl.generation.types import Completion, GenerationRequest
from nemorl.trajectories import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentLost,
    Message,
    Step,
    StopReason,
    Task,
)

Fault = Literal["hang", "raise", "die"]
TURN_TOKENS = (4, 5, 6, 7, 1)  # digits and the end token of the arithmetic tokenizer
OBSERVATION = "12+34="
REWARD = "paced"


@dataclass(frozen=True)
class Delays:
    """Medians of log-normal seconds, and the mean number of turns, which is geometric."""

    model_seconds: float = 0.0  # of a turn
    environment_seconds: float = 0.0  # of an answer to it
    turns: float = 3.0
    sigma: float = 0.0
    max_turns: int = 16


@dataclass(frozen=True)
class Pace:
    """The seconds of each turn of a conversation: of the model, and of the environment after it."""

    model: tuple[float, ...]
    environment: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return sum(self.model) + sum(self.environment)


@dataclass(frozen=True)
class Span:
    """A conversation that met no fault, by the monotonic clock."""

    began: float
    ended: float
    allowed: float  # seconds of its pace

    def late(self, released: float) -> float:
        """Seconds beyond its pace, if its first turn was held until `released`."""
        return self.ended - max(self.began, released) - self.allowed


@lru_cache(maxsize=100_000)
def pace(delays: Delays, task: int) -> Pace:
    draws = random.Random(task)
    turns = 1
    while turns < delays.max_turns and draws.random() > 1 / delays.turns:
        turns += 1

    def seconds(median: float) -> tuple[float, ...]:
        return tuple(median * math.exp(draws.gauss(0, delays.sigma)) for _ in range(turns))

    return Pace(seconds(delays.model_seconds), seconds(delays.environment_seconds))


@dataclass
class PacedEngine:
    """An engine replica that answers each request after the seconds of its turn, whatever else it answers."""

    delays: Delays
    num_held: int = 0  # first turns that wait for each other, so that as many conversations run at once
    released: float = -math.inf  # when they had all arrived, by the monotonic clock
    _arrived: int = 0
    _all_arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[list[Completion], None]:
        answers = [asyncio.ensure_future(self.answer(request)) for request in requests]
        try:
            for answer in asyncio.as_completed(answers):
                yield [await answer]
        finally:
            for one in answers:
                one.cancel()

    async def answer(self, request: GenerationRequest) -> Completion:
        conversation, _, turn = request.id.rpartition("/")
        if int(turn) == 0 and self._arrived < self.num_held:
            self._arrived += 1
            if self._arrived == self.num_held:
                self.released = time.monotonic()
                self._all_arrived.set()
            await self._all_arrived.wait()
        seconds = pace(self.delays, int(conversation.partition("/")[0].partition(".")[0])).model
        await asyncio.sleep(seconds[min(int(turn), len(seconds) - 1)])
        return completion(request)


def completion(request: GenerationRequest) -> Completion:
    tokens = np.array(TURN_TOKENS, dtype=np.int32)
    logprobs, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
    return Completion(request.id, tokens, logprobs, versions, StopReason.STOP)


class PacedEnvironment(Environment):
    """Answers each turn after its seconds; a drawn turn may meet a fault.

    One that may die has a process of its own, which that fault kills.
    """

    def __init__(self, factory: "PacedFactory") -> None:
        self._factory, self._turn = factory, 0
        self._process: asyncio.subprocess.Process | None = None

    async def reset(self, task: Task) -> tuple[Message, ...]:
        self._began = time.monotonic()
        self._pace = pace(self._factory.delays, task.index)
        attempt = self._factory.attempts[task.index]
        self._factory.attempts[task.index] += 1
        self._fault, self._fault_turn = self._factory.fault(task.index, attempt, len(self._pace.model))
        if self._fault == "die":
            program = [sys.executable, "-S", "-c", "input()"]
            self._process = await asyncio.create_subprocess_exec(*program, stdin=asyncio.subprocess.PIPE)
        return (Message("user", OBSERVATION),)

    async def step(self, action: Action) -> Step:
        seconds = self._pace.environment[self._turn]
        if self._turn == self._fault_turn:
            await self._meet_fault()
        self._turn += 1
        await asyncio.sleep(seconds)
        done = self._turn == len(self._pace.environment)
        if done:
            span = Span(self._began, time.monotonic(), self._pace.seconds)
            self._factory.spans.append(span)
        rewards = {REWARD: float(action.tokens[0] % 2)} if done else {}
        return Step(() if done else (Message("user", OBSERVATION),), rewards, done)

    async def _meet_fault(self) -> None:
        assert self._fault is not None
        self._factory.faults_met[self._fault] += 1
        if self._fault == "hang":
            await asyncio.Event().wait()
        if self._fault == "raise":
            raise ValueError("drawn to fail")
        assert self._process is not None
        self._process.kill()
        await self._process.wait()
        raise EnvironmentLost("its process was killed")

    async def close(self) -> None:
        self._factory.num_closed += 1
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class PacedFactory(EnvironmentFactory):
    made: ClassVar[list["PacedFactory"]] = []  # of this process, for what counts them

    def __init__(
        self, delays: Mapping[str, float] | None = None, faults: Mapping[Fault, float] | None = None
    ) -> None:
        """`faults`: the share of conversations that meet each of them, at a drawn turn."""
        self.reward_weights = {REWARD: 1.0}
        self.delays = Delays(**(delays or {}))  # type: ignore[arg-type]
        self._faults = dict(faults or {})
        self.attempts: Counter[int] = Counter()  # by task
        self.faults_met: Counter[str] = Counter()
        self.spans: list[Span] = []
        self.num_created = self.num_closed = 0
        self.made.append(self)

    def fault(self, task: int, attempt: int, turns: int) -> tuple[Fault | None, int]:
        """The fault that an attempt at a conversation meets, and the turn; -1 if none."""
        draws = random.Random(f"{task} {attempt}")
        kinds: Sequence[Fault | None] = [*self._faults, None]
        shares = [*self._faults.values(), 1 - sum(self._faults.values())]
        (fault,) = draws.choices(kinds, shares)
        return fault, draws.randrange(turns) if fault is not None else -1

    def create(self) -> PacedEnvironment:
        self.num_created += 1
        return PacedEnvironment(self)
