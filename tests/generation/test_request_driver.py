"""The driver of engines that sample request by request, over one that samples when it is permitted."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemorl.config.generation import OnUpdate
from nemorl.generation import request_driver
from nemorl.generation.request_driver import Chunk, RequestDriver
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import (
    Completion,
    EngineFailed,
    GenerationRequest,
    Progress,
    Refusal,
    Report,
    RequestRefused,
)
from nemorl.session.supervisor import hanging
from nemorl.trajectories import StopReason
from nemorl.weights.messages import RefitDeadline
from tests.generation.examples import Prompts, completions, request


class Engine:
    """Samples one token for each permit; token and logprob are their number."""

    def __init__(self) -> None:
        self.version = 3
        self.permits = asyncio.Semaphore(0)
        self.asked: list[GenerationRequest] = []
        self.closed: list[str] = []
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.refuses: set[str] = set()  # ids, at their first token
        self.ends = asyncio.Event()  # else a request that is ended early continues ending
        self.ends.set()
        self.stops = asyncio.Event()  # else it does not pause
        self.stops.set()
        self.goes_on: bool | None = True  # None: a thaw never ends

    def check(self, request: GenerationRequest) -> None:
        if len(request.prompt) > 5:
            raise RequestRefused("too long")

    async def sample(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self.asked.append(request)
        try:
            for number in range(1, request.max_new_tokens + 1):
                await self.permits.acquire()
                if request.id in self.refuses:
                    raise RequestRefused("the server minds")
                if self.error is not None:
                    raise self.error
                stop = StopReason.LENGTH if number == request.max_new_tokens else None
                yield Chunk([number], [-number], [self.version], stop)
        finally:
            await self.ends.wait()
            self.closed.append(request.id)

    async def freeze(self) -> None:
        self.calls.append("freeze")
        await self.stops.wait()

    async def thaw(self) -> None:
        self.calls.append("thaw")
        if self.goes_on is None:
            await asyncio.Event().wait()
        if not self.goes_on:
            raise RuntimeError("it is stuck")

    def allow(self, tokens: int) -> None:
        for _ in range(tokens):
            self.permits.release()


def run(test: Any) -> None:
    """In an event loop, with an engine and its front."""

    async def inside() -> None:
        engine = Engine()
        await asyncio.wait_for(test(engine, RequestDriver(engine, "engine 7")), 20)

    asyncio.run(inside())


def ask(name: str, tokens: int = 4, **fields: Any) -> GenerationRequest:
    return replace(request(Prompts().one(3), name, max_new_tokens=tokens), **fields)


async def turns(count: int = 5) -> None:
    """Let others continue."""
    for _ in range(count):
        await asyncio.sleep(0)


def later(front: RequestDriver, one: GenerationRequest) -> asyncio.Task[Completion]:
    async def first() -> Completion:
        return await anext(completions(front, [one]))

    return asyncio.create_task(first())


def test_progress_comes_in_parts_and_the_answer_has_all() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        engine.allow(7)
        reports = [
            report
            async for batch in front.generate_batches([ask("a", 7, progress_tokens=3)])
            for report in batch
        ]
        progress, answer = reports[:-1], reports[-1]
        assert [report.tokens.tolist() for report in progress] == [[1, 2, 3], [4, 5, 6]]
        assert all(isinstance(report, Progress) for report in progress)
        assert isinstance(answer, Completion)
        assert answer.tokens.tolist() == list(range(1, 8))
        assert answer.logprobs.tolist() == [-float(number) for number in range(1, 8)]
        np.testing.assert_array_equal(answer.versions, 3)

    run(test)


def test_an_abort_before_the_first_step_is_answered_too() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        stream = front.generate_batches([ask("a")])
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # the request's own task has not begun
        await front.abort(["a"])
        (answer,) = await reading
        assert isinstance(answer, Completion)
        assert (answer.stop, len(answer.tokens)) == (StopReason.ABORT, 0)

    run(test)


def test_a_caller_that_leaves_ends_its_requests() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        stream = front.generate_batches([ask("a", progress_tokens=1), ask("b", progress_tokens=1)])
        engine.allow(2)
        await anext(stream)
        await stream.aclose()
        await turns()
        assert sorted(engine.closed) == ["a", "b"]
        assert front.health().running == 0

    run(test)


def test_a_refusal_begins_nothing_and_names_are_taken_once() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        with pytest.raises(RequestRefused):
            await anext(front.generate_batches([ask("a"), ask("b", prompt=Prompts().one(9))]))
        waiting = later(front, ask("a"))
        await turns()
        with pytest.raises(ValueError, match="'a' is in flight"):
            await anext(front.generate_batches([ask("a")]))
        engine.allow(4)
        assert (await waiting).stop is StopReason.LENGTH

    run(test)


def test_a_late_refusal_ends_no_other() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        engine.refuses = {"b"}
        names = ["a", "b", "c"]
        stream = front.generate_batches([ask(name, 2, progress_tokens=1) for name in names])
        first = asyncio.ensure_future(anext(stream))
        engine.allow(3)
        reports = [*await first]
        engine.allow(4)
        reports += [report async for batch in stream for report in batch]
        assert [report for report in reports if report.id == "b"] == [Refusal("b", "the server minds")]
        for name in ("a", "c"):
            progress, answer = (report for report in reports if report.id == name)
            assert isinstance(progress, Progress)
            assert isinstance(answer, Completion)
            assert answer.tokens.tolist() == [1, 2]
        engine.allow(1)
        with pytest.raises(RequestRefused, match="the server minds"):
            await later(front, ask("b"))

    run(test)


def test_the_router_delivers_a_late_refusal_to_its_request() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        engine.refuses = {"b"}
        calls = []

        async def generate(requests: list[GenerationRequest]) -> AsyncGenerator[Sequence[Report], None]:
            calls.append([request.id for request in requests])
            async for batch in front.generate_batches(requests):
                yield batch

        router = Router([Replica("one", generate, front.abort)])
        engine.allow(10)
        asked = (router.generate(ask(name)) for name in ("a", "b", "c"))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers[1], RequestRefused)
        assert str(answers[1]) == "the server minds"
        for answer in (answers[0], answers[2]):
            assert isinstance(answer, Completion)
            assert answer.tokens.tolist() == [1, 2, 3, 4]
        assert calls == [["a", "b", "c"]]  # no one was asked again
        assert router.living == ["one"]
        assert router.outstanding_tokens == [0]

    run(test)


def test_reports_before_an_error_are_delivered() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        stream = front.generate_batches([ask("a", 1), ask("b")])
        reading = asyncio.ensure_future(anext(stream))
        engine.allow(2)
        while "a" not in engine.closed:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # answered, and not yet read
        front.fail(RuntimeError("out of memory"))
        (answer,) = await reading
        assert isinstance(answer, Completion)
        assert answer.id == "a"
        with pytest.raises(EngineFailed, match="out of memory"):
            await anext(stream)

    run(test)


def test_ids_are_free_again_once_their_caller_has_left() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        engine.ends.clear()
        stream = front.generate_batches([ask("a", progress_tokens=1)])
        engine.allow(1)
        await anext(stream)
        leaving = asyncio.create_task(stream.aclose())
        await turns()
        assert not leaving.done()
        engine.ends.set()
        await leaving
        engine.allow(4)
        assert (await later(front, ask("a"))).stop is StopReason.LENGTH

    run(test)


def test_deadlines_hold_before_the_gate_too() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        await front.pause("keep")
        answer = await later(front, ask("a", deadline_seconds=0.01))
        assert (answer.stop, len(answer.tokens)) == (StopReason.ABORT, 0)
        assert engine.closed == []

    run(test)


def test_sequences_leave_a_suspended_engine_and_continue_with_what_is_left() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        engine.allow(3)
        running = later(front, ask("a", tokens=5))
        await turns(20)
        await front.suspend()
        await front.suspend()
        assert (engine.closed, engine.calls) == (["a"], ["freeze"])
        held = later(front, ask("b"))
        engine.version = 4
        await front.pause("keep")
        await front.resume()  # of the pause
        await turns(20)
        assert (front.health().running, front.health().waiting) == (0, 2)
        await front.revive()
        await front.revive()
        engine.allow(6)
        assert (await running).versions.tolist() == [3, 3, 3, 4, 4]
        assert (await held).stop is StopReason.LENGTH
        (first, again, _) = engine.asked
        assert again.max_new_tokens == first.max_new_tokens - 3
        assert engine.calls.count("freeze") == engine.calls.count("thaw")

    run(test)


def test_deadlines_wait_for_a_suspended_engine() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        engine.allow(1)
        late = later(front, ask("late", deadline_seconds=2.0))
        done = later(front, ask("done", deadline_seconds=60))
        await turns(20)
        await front.suspend()
        held = later(front, ask("held", deadline_seconds=2.0))
        await asyncio.sleep(2.2)
        assert not any(one.done() for one in (late, held))
        await front.revive()
        await turns(20)
        assert not any(one.done() for one in (late, held))
        assert (await late).stop is (await held).stop is StopReason.ABORT
        engine.allow(8)
        assert (await done).stop is StopReason.LENGTH

    run(test)


def test_a_waiting_pause_ends_with_what_runs_or_with_a_resume() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        running = later(front, ask("a"))
        await turns()
        pausing = asyncio.create_task(front.pause("wait"))
        held = later(front, ask("b"))
        await turns()
        assert not pausing.done()
        await front.resume()
        await pausing
        engine.allow(8)
        assert (await running).stop is (await held).stop is StopReason.LENGTH

    run(test)


def test_nothing_steps_while_paused_and_a_pause_outlasts_a_block() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        await front.pause("wait")
        async with front.paused(drain_seconds=9.0):
            await front.resume()  # in vain until the block ends
            held = later(front, ask("a"))
            engine.allow(4)
            await turns()
            assert not held.done()
        assert (await held).stop is StopReason.LENGTH
        assert engine.calls == ["freeze", "thaw"]
        await front.pause("keep")
        async with front.paused():
            pass
        assert engine.calls == ["freeze", "thaw", "freeze"]  # it stays paused
        async with front.paused():
            await front.resume()
            assert engine.calls[-1] == "freeze"
        assert engine.calls[-1] == "thaw"
        assert engine.calls.count("freeze") == engine.calls.count("thaw") == 2

    run(test)


def test_an_engine_that_does_not_pause_in_time_resumes() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        engine.stops.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), front.paused():
                raise AssertionError("it is not paused")
        assert engine.calls == ["freeze", "thaw"]
        assert not front.health().paused
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await front.pause("keep")
        assert engine.calls == ["freeze", "thaw"] * 2
        await front.resume()
        engine.stops.set()
        async with front.paused():
            assert engine.calls == ["freeze", "thaw"] * 2 + ["freeze"]
        engine.allow(4)
        assert (await later(front, ask("a"))).stop is StopReason.LENGTH

    run(test)


@pytest.mark.parametrize(
    ("goes_on", "message"),
    [
        (False, "RuntimeError: it is stuck"),
        (None, "TimeoutError: the engine did not pause and could not be resumed"),
    ],
)
def test_an_engine_that_does_neither_has_failed(
    goes_on: bool | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_driver, "_RESUME_SECONDS", 0.01)

    async def test(engine: Engine, front: RequestDriver) -> None:
        engine.stops.clear()
        engine.goes_on = goes_on
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), front.paused():
                raise AssertionError("it is not paused")
        with pytest.raises(EngineFailed, match=f"engine 7 has ended: {message}"):
            front.health()

    run(test)


def test_a_second_holder_waits_until_the_engine_has_paused() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        async def update() -> None:
            async with front.paused():
                assert engine.stops.is_set()

        engine.stops.clear()
        pausing = asyncio.create_task(front.pause("keep"))
        await turns()
        updating = asyncio.create_task(update())
        await turns()
        assert not updating.done()
        pausing.cancel()
        await turns()
        assert engine.calls == ["freeze", "thaw", "freeze"]  # the one who is left has it stopped again
        engine.stops.set()
        await updating
        assert engine.calls[-1] == "thaw"

    run(test)


def test_a_pause_that_is_resumed_before_it_fails_leaves_nothing_behind() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        engine.stops.clear()
        pausing = asyncio.create_task(front.pause("keep"))
        await turns()
        resuming = asyncio.create_task(front.resume())
        await turns()
        pausing.cancel()
        await resuming
        engine.stops.set()
        async with front.paused():
            assert engine.calls == ["freeze", "thaw", "freeze"]
        assert engine.calls[-1] == "thaw"

    run(test)


def test_pauses_overlap_and_the_last_one_resumes() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        running = later(front, ask("a"))
        await turns()
        draining = front.paused(drain_seconds=9.0)
        entering = asyncio.create_task(draining.__aenter__())
        await turns()
        assert engine.calls == []  # a sequence runs
        async with front.paused():
            await entering  # what others hold still does not end, and starts again
            assert engine.closed == ["a"]
        held = later(front, ask("b"))
        await turns()
        assert engine.calls == ["freeze"]
        assert front.health().waiting == 2
        await draining.__aexit__(None, None, None)
        assert engine.calls == ["freeze", "thaw"]
        engine.allow(8)
        assert (await running).stop is (await held).stop is StopReason.LENGTH

    run(test)


async def sampled(front: RequestDriver, tokens: int) -> None:
    """Return once that number of tokens were sampled."""
    while tokens > 0:
        await asyncio.sleep(0)
        tokens -= (await front.stats()).tokens_generated


def test_an_update_waits_for_what_runs_and_what_arrives_waits_for_the_update() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        running = later(front, ask("a"))
        await turns()
        updating = asyncio.create_task(update(engine, front, "finish", 20.0))
        await turns()
        held, late = later(front, ask("b")), later(front, ask("c", deadline_seconds=0.01))
        assert ((await late).stop, len((await late).tokens)) == (StopReason.ABORT, 0)
        assert not updating.done()
        engine.allow(4)
        await updating
        engine.allow(4)
        assert (await running).versions.tolist() == [3] * 4
        assert (await held).versions.tolist() == [4] * 4
        assert [request.id for request in engine.asked] == ["a", "b"]

    run(test)


async def update(engine: Engine, front: RequestDriver, mode: OnUpdate, seconds: float) -> None:
    async with front.paused_for(4, mode, seconds=seconds):
        engine.version = 4


def test_what_does_not_end_in_time_continues_from_its_tokens() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        asked = ask("a", seed=5, progress_tokens=1)
        running = later(front, asked)
        engine.allow(3)
        await sampled(front, 3)
        async with front.paused_for(4, "finish", seconds=0.1):
            assert engine.closed == ["a"]
            assert (front.health().running, front.health().waiting) == (0, 1)
            engine.version = 4
        engine.allow(1)
        answer = await running
        assert answer.tokens.tolist() == [1, 2, 3, 1]  # this engine counts from 1 again
        assert answer.versions.tolist() == [3, 3, 3, 4]
        assert answer.stop is StopReason.LENGTH
        rest = engine.asked[1]
        assert rest.prompt.tolist() == [*asked.prompt.tolist(), 1, 2, 3]
        assert (rest.max_new_tokens, rest.sampled_before, rest.seed) == (1, 3, 5)

    run(test)


@pytest.mark.parametrize("mode", ["continue", "restart"])
def test_other_updates_leave_sequences_in_the_engine(mode: OnUpdate) -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        running = later(front, ask("a"))
        engine.allow(3)
        await sampled(front, 3)
        await update(engine, front, mode, 20.0)
        engine.allow(1)
        assert (await running).versions.tolist() == [3, 3, 3, 4]
        assert len(engine.asked) == 1

    run(test)


def test_who_is_taken_out_may_still_be_aborted_end_or_be_late() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        aborted, late = later(front, ask("aborted")), later(front, ask("late", deadline_seconds=0.2))
        ended = later(front, ask("ended", 1))
        await turns()
        engine.allow(3)
        engine.ends.clear()  # the last one has its token and its stop, and is still being closed
        await sampled(front, 3)
        updating = asyncio.create_task(update(engine, front, "finish", 0.02))
        await asyncio.sleep(0.05)
        engine.ends.set()
        with pytest.raises(RefitDeadline, match=r"engine 7 did not pause within 0\.02 s"):
            await updating
        await front.pause("keep")
        await front.abort(["aborted"])
        assert [(await one).stop for one in (aborted, late)] == [StopReason.ABORT] * 2
        assert [(await one).tokens.tolist() for one in (aborted, late, ended)] == [[1]] * 3
        assert (await ended).stop is StopReason.LENGTH

    run(test)


def test_a_paused_engine_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(request_driver, "time", SimpleNamespace(monotonic=lambda: now))

    async def test(engine: Engine, front: RequestDriver) -> None:
        nonlocal now
        later(front, ask("a"))
        await turns()
        now = 50.0
        assert front.health().seconds_since_step == 50.0
        async with front.paused():
            assert hanging(front.health(), 600.0) is None
            now += 700.0
            assert hanging(front.health(), 600.0) is None
        assert front.health().seconds_since_step == 0.0
        await front.pause("keep")
        now += 700.0
        assert hanging(front.health(), 600.0) is None
        await front.resume()
        assert front.health().seconds_since_step == 0.0
        now += 700.0
        assert hanging(front.health(), 600.0) is not None

    run(test)


def test_all_requests_get_an_error_until_the_engine_recovers() -> None:
    async def test(engine: Engine, front: RequestDriver) -> None:
        both = [later(front, ask("a")), later(front, ask("b"))]
        await turns()
        engine.error = RuntimeError("out of memory")
        engine.allow(1)
        for waiting in both:
            with pytest.raises(EngineFailed, match="engine 7 has ended: RuntimeError: out of memory"):
                await waiting
        with pytest.raises(EngineFailed):
            front.health()
        with pytest.raises(EngineFailed):
            await later(front, ask("c"))
        engine.error = None
        front.recover()
        engine.allow(4)
        assert (await later(front, ask("d"))).stop is StopReason.LENGTH

    run(test)
