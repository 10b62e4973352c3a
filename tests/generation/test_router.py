"""The router over stand-in replicas: balance, homes, and what becomes of requests whose replica is lost."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from nemorl.config.generation import TorchGenerationConfig
from nemorl.generation.router import Replica, Router
from nemorl.generation.torch_engine.engine import TorchHost
from nemorl.generation.types import (
    EngineOptions,
    GenerationRequest,
    NoReplicaLeft,
    Progress,
    ReplicaLost,
    RequestRefused,
    SamplingParams,
)
from nemorl.trajectories import StopReason
from tests.generation.examples import Prompts
from tests.generation.examples import request as drawing
from tests.rollout.stand_ins import EchoEngine, completion


def request(name: str, conversation: str = "", prompt: int = 1, new: int = 1, **fields) -> GenerationRequest:
    return GenerationRequest(
        id=name,
        prompt=np.arange(prompt, dtype=np.int32),
        sampling=SamplingParams(),
        max_new_tokens=new,
        seed=0,
        conversation=conversation,
        **fields,
    )


def engines(count: int, **options) -> list[EchoEngine]:
    return [EchoEngine(lambda r: [len(r.prompt)], **options) for _ in range(count)]


def run(work):
    """Its result, or TimeoutError: what is lost must not be waited for. No callback may fail."""

    async def main():
        failures = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        result = await asyncio.wait_for(work, 30)
        await asyncio.sleep(0)
        assert not failures
        return result

    return asyncio.run(main())


def router_of(replicas: list) -> Router:
    return Router([Replica(f"replica {i}", r.generate) for i, r in enumerate(replicas)], progress_tokens=2)


def test_requests_of_one_tick_are_one_call_and_each_gets_its_own_answer():
    (engine,) = replicas = engines(1)

    async def main():
        router = router_of(replicas)
        asked = [request(f"r{i}", prompt=i + 1) for i in range(5)]
        answers = await asyncio.gather(*(router.generate(r) for r in asked))
        await router.generate(request("later"))
        assert router.outstanding_tokens == [0]
        return answers

    answers = run(main())
    assert [a.tokens.tolist() for a in answers] == [[1], [2], [3], [4], [5]]
    assert engine.calls == [["r0", "r1", "r2", "r3", "r4"], ["later"]]


def test_load_is_spread_by_outstanding_tokens():
    async def main():
        held = asyncio.Event()
        replicas = engines(2, held=held)
        router = router_of(replicas)
        long = asyncio.create_task(router.generate(request("long", prompt=10, new=90)))
        await asyncio.sleep(0)
        short = [asyncio.create_task(router.generate(request(f"s{i}", prompt=10, new=10))) for i in range(5)]
        await asyncio.sleep(0.01)
        assert router.outstanding_tokens == [100, 100]
        held.set()
        await asyncio.gather(long, *short)
        return [engine.calls for engine in replicas]

    assert run(main()) == [[["long"]], [["s0", "s1", "s2", "s3", "s4"]]]


def test_a_conversation_stays_on_its_replica():
    replicas = engines(2)

    async def main():
        router = router_of(replicas)
        for turn in range(3):
            # Alone, each would go to the first replica, which is always idle.
            await asyncio.gather(
                *(router.generate(request(f"{c}/{turn}", conversation=c)) for c in ("a", "b"))
            )
        await router.generate(request("b/3", conversation="b"))
        assert router.outstanding_tokens == [0, 0]

    run(main())
    assert replicas[0].calls == [["a/0"], ["a/1"], ["a/2"]]
    assert replicas[1].calls == [["b/0"], ["b/1"], ["b/2"], ["b/3"]]


def test_the_home_that_was_used_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr("nemorl.generation.router.REMEMBERED_CONVERSATIONS", 2)
    replicas = engines(3)

    async def main():
        router = router_of(replicas)
        together = request("alone"), request("a/0", "a"), request("b/0", "b")
        await asyncio.gather(*map(router.generate, together))
        for name in ("a/1", "c/0", "b/1", "c/1"):
            await router.generate(request(name, conversation=name[0]))

    run(main())
    # `c` is the third, and `a` was used after `b`. A new home is the first of equally idle replicas.
    assert replicas[0].calls == [["alone"], ["c/0"], ["b/1"], ["c/1"]]
    assert replicas[1].calls == [["a/0"], ["a/1"]]
    assert replicas[2].calls == [["b/0"]]


@dataclass
class Counting:
    """Samples 1, 2, 3, ... from a request's position on; reports after every token; breaks at `breaks_at`."""

    version: int
    breaks_at: int | None = None
    error: Exception | None = field(default_factory=lambda: ReplicaLost("killed by a test"))
    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[list, None]:
        self.requests += requests
        for asked in requests:
            first = asked.sampled_before + 1
            tokens = list(range(first, first + asked.max_new_tokens))
            for token in tokens:
                if token == self.breaks_at:
                    if self.error is None:
                        return
                    raise self.error
                whole = completion(asked, [token], version=self.version)
                yield [Progress(asked.id, whole.tokens, whole.logprobs, whole.versions)]
            yield [completion(asked, tokens, StopReason.LENGTH, version=self.version)]


def experts_at(first: int, end: int) -> np.ndarray:
    """[end - first, 2, 1] that report their position and layer."""
    rows = np.arange(first, end, dtype=np.int16) * 10
    return np.stack([rows, rows + 1], 1)[..., None]


class Pausing(Counting):
    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[list, None]:
        async for reports in super().generate(requests):
            yield reports
            await asyncio.sleep(0)


@dataclass
class Routing(Counting):
    """Reports experts, by and by or at its end, of all tokens but the last sampled one."""

    tells_early: bool = True

    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[list, None]:
        (asked,) = requests
        first, told = len(asked.prompt), asked.routed_experts_from
        async for (report,) in super().generate(requests):
            if isinstance(report, Progress):
                first += 1
                rows = experts_at(told, first - 1) if self.tells_early else None
                told = first - 1
            else:
                rows = experts_at(asked.routed_experts_from, first - 1)
            yield [replace(report, routed_experts=rows)]


@pytest.mark.parametrize("other_tells_early", [True, False])
@pytest.mark.parametrize("tells_early", [True, False])
def test_experts_continue_where_a_lost_replica_reported_the_last(tells_early, other_tells_early):
    other = Routing(5, tells_early=other_tells_early)
    replicas = [Routing(3, breaks_at=4, tells_early=tells_early), other]

    async def main():
        return await router_of(replicas).generate(request("r", prompt=4, new=6, routed_experts_from=1))

    answer = run(main())
    assert answer.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    # Four of the prompt and three sampled tokens are the new prompt, whose last token no one had read.
    assert [asked.routed_experts_from for asked in other.requests] == [6 if tells_early else 1]
    np.testing.assert_array_equal(answer.routed_experts, experts_at(1, 9))


def test_requests_of_replicas_that_leave_continue_and_no_number_of_moves_ends_them():
    async def main():
        router, seen = router_of([Pausing(0) for _ in range(4)]), []

        def leave_after_each(progress: Progress) -> None:
            seen.extend(progress.tokens.tolist())
            if len(router.living) > 1:
                asyncio.get_running_loop().call_soon(router.remove, f"replica {len(seen) - 1}")

        answer = await router.generate(request("r", new=6), leave_after_each)
        return router, answer, seen

    router, answer, seen = run(main())
    assert answer.tokens.tolist() == seen == [1, 2, 3, 4, 5, 6]
    assert answer.stop is StopReason.LENGTH
    assert (router.living, router.lost) == (["replica 3"], {})
    metrics = router.take_metrics()
    assert (metrics.moved_requests, metrics.failed_requests) == (3, 0)


def test_a_lost_replicas_request_continues_elsewhere_with_what_it_has():
    dying, other = replicas = [Counting(version=3, breaks_at=4), Counting(version=5)]
    told = []

    async def main():
        router = router_of(replicas)
        asked = request("r", "conversation", prompt=2, new=6, deadline_seconds=50.0)
        answer = await router.generate(asked, told.append)
        assert router.living == ["replica 1"]
        assert router.lost == {"replica 0": "killed by a test"}
        metrics = router.take_metrics()
        assert (metrics.moved_requests, metrics.kept_tokens, metrics.failed_requests) == (1, 3, 0)
        assert router.take_metrics().moved_requests == 0
        await router.generate(request("next", "conversation"))
        assert router.outstanding_tokens == [0]
        return answer

    answer = run(main())
    assert answer.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert answer.logprobs == pytest.approx([-t / 1000 for t in range(1, 7)])
    assert answer.versions.tolist() == [3, 3, 3, 5, 5, 5]
    assert answer.stop is StopReason.LENGTH
    assert [token for p in told for token in p.tokens.tolist()] == [1, 2, 3, 4, 5, 6]
    (continued, _) = other.requests
    assert continued.prompt.tolist() == [0, 1, 1, 2, 3]
    assert (continued.max_new_tokens, continued.sampled_before, continued.seed) == (3, 3, 0)
    assert continued.deadline_seconds < 50
    assert [len(dying.requests), len(other.requests)] == [1, 2]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionResetError("engine 3 was killed"), "ConnectionResetError: engine 3 was killed"),
        (None, "it ended its answers without one to 2 requests, such as a"),
    ],
)
def test_every_way_to_end_early_is_a_loss_with_its_cause(error, cause):
    async def lost():
        router = router_of([Counting(0, breaks_at=1, error=error)])
        asked = [router.generate(request(name)) for name in "ab"]
        return await asyncio.gather(*asked, return_exceptions=True)

    for failure in run(lost()):
        assert isinstance(failure, NoReplicaLeft)
        assert failure.causes == {"replica 0": cause}
        assert str(failure) == (
            f"all 1 generation replicas are lost, so nothing can be sampled.\n  | replica 0: {cause}"
        )


def test_the_time_of_an_answer_is_the_engines_unless_it_was_on_several():
    async def timed(requests):
        yield [replace(completion(r, [7]), seconds=12.5) for r in requests]

    async def main():
        router = Router([Replica("timed", timed)])
        undisturbed = await router.generate(request("r"))
        router = Router([Replica("dying", Counting(0, breaks_at=1).generate), Replica("timed", timed)])
        return undisturbed, await router.generate(request("r"))

    undisturbed, moved = run(main())
    assert undisturbed.seconds == 12.5
    assert 0 < moved.seconds < 12.5


def test_a_replica_that_breaks_after_its_answers_is_lost():
    async def breaks(requests):
        yield [completion(r, [7]) for r in requests]
        raise ReplicaLost("out of memory")

    async def main():
        router = Router([Replica("a", breaks)])
        await router.generate(request("r"))
        await asyncio.sleep(0.01)
        assert router.lost == {"a": "out of memory"}

    run(main())


def test_the_late_error_of_a_replaced_replica_is_not_its_successors():
    async def late(requests):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionResetError("closed") from None
        yield []

    async def main():
        router = Router([Replica("a", late)])
        asked = asyncio.create_task(router.generate(request("r")))
        await asyncio.sleep(0.01)
        router.add(Replica("a", EchoEngine(lambda r: [9]).generate))
        with pytest.raises(NoReplicaLeft):  # the only replica was given up before its successor came
            await asked
        await asyncio.sleep(0.01)
        assert (router.living, router.lost) == (["a"], {})

    run(main())


def test_a_replica_that_is_given_up_is_not_received_any_more():
    async def main():
        held = asyncio.Event()
        hanging, other = EchoEngine(lambda r: [7], held=held), EchoEngine(lambda r: [8])
        router = router_of([hanging, other])
        asked = asyncio.create_task(router.generate(request("r")))
        await asyncio.sleep(0.01)
        router.lose("replica 0", "no step for 60 s")
        held.set()
        answer = await asked
        assert (await router.generate(request("next"))).tokens.tolist() == [8]
        router.add(Replica("replica 0", EchoEngine(lambda r: [9]).generate))
        assert (router.living, router.lost) == (["replica 1", "replica 0"], {})
        # One that takes the place of another takes its requests, too.
        stuck = EchoEngine(lambda r: [7], held=asyncio.Event())
        router.add(Replica("replica 1", stuck.generate))
        waiting = [asyncio.create_task(router.generate(request(f"w{i}"))) for i in range(2)]
        await asyncio.sleep(0.01)
        assert stuck.calls == [["w1"]]
        router.add(Replica("replica 1", EchoEngine(lambda r: [5]).generate))
        assert {(await w).tokens.item() for w in waiting} <= {5, 9}
        return answer

    assert run(main()).tokens.tolist() == [8]


def test_a_request_that_two_replicas_did_not_survive_kills_no_third():
    replicas = [Counting(0, breaks_at=3), Counting(1, breaks_at=5), Counting(2)]

    async def main():
        router = router_of(replicas)
        answer = await router.generate(request("poison", new=9))
        assert router.living == ["replica 2"]
        assert router.take_metrics().failed_requests == 1
        return answer

    answer = run(main())
    assert (answer.stop, answer.tokens.tolist()) == (StopReason.ERROR, [1, 2, 3, 4])
    assert answer.versions.tolist() == [0, 0, 1, 1]
    assert replicas[2].requests == []


def test_what_had_all_its_tokens_is_not_asked_for_again():
    # The replica is lost between the last report and the completion.
    async def cut(requests):
        whole = completion(requests[0], [5, 6, 7])
        yield [Progress(requests[0].id, whole.tokens, whole.logprobs, whole.versions)]
        raise ReplicaLost("gone")

    async def main(asked):
        other = Counting(0)
        router = Router([Replica("cut", cut), Replica("other", other.generate)])
        answer = await router.generate(asked)
        assert other.requests == []
        return answer

    ended = run(main(request("r", new=9, stop_token_ids=frozenset({7}))))
    assert (ended.stop, ended.tokens.tolist()) == (StopReason.STOP, [5, 6, 7])
    full = run(main(request("r", new=3)))
    assert (full.stop, full.tokens.tolist()) == (StopReason.LENGTH, [5, 6, 7])


def test_a_refusal_concerns_no_one_else():
    calls = []

    async def strict(requests):
        calls.append([r.id for r in requests])
        if any(len(r.prompt) > 5 for r in requests):
            raise RequestRefused("the prompt is too long")
        yield [completion(r, [1]) for r in requests]

    async def main():
        router = Router([Replica("strict", strict)])
        asked = [router.generate(request(name, prompt=size)) for name, size in (("a", 1), ("b", 9), ("c", 2))]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert (router.living, router.outstanding_tokens) == (["strict"], [0])
        return answers

    first, second, third = run(main())
    assert (first.tokens.tolist(), third.tokens.tolist()) == ([1], [1])
    assert isinstance(second, RequestRefused)
    assert calls == [["a", "b", "c"], ["a"], ["b"], ["c"]]


def test_the_refusal_of_a_replica_that_was_given_up_meanwhile_is_ignored():
    async def main():
        async def refuses(requests):
            router.lose("a", "no step for 60 s")
            raise RequestRefused("the prompt is too long")
            yield []

        router = Router([Replica("a", refuses), Replica("b", EchoEngine(lambda r: [8]).generate)])
        return await router.generate(request("r"))

    assert run(main()).tokens.tolist() == [8]


def test_a_request_that_leaves_before_it_was_sent_is_not_sent():
    (engine,) = replicas = engines(1)

    async def main():
        router = router_of(replicas)
        asked = router.generate(request("gone"))
        asked.send(None)  # to where it waits for its answer
        asked.close()
        await asyncio.sleep(0.01)
        assert (router.outstanding_tokens, router.num_unanswered) == ([0], 0)

    run(main())
    assert engine.calls == []


def test_a_cancelled_request_gives_its_tokens_back_and_is_ended():
    async def main():
        held, ended = asyncio.Event(), []

        async def abort(ids):
            ended.extend(ids)

        (engine,) = engines(1, held=held)
        router = Router([Replica("only", engine.generate, abort)])
        asked = asyncio.create_task(router.generate(request("gone", prompt=5)))
        await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait({asked})
        assert router.outstanding_tokens == [0]
        held.set()
        assert (await router.generate(request("next"))).id == "next"
        await asyncio.sleep(0.01)
        assert ended == ["gone"]  # and not what was answered

    run(main())


def test_two_requests_of_one_name_are_refused():
    async def main():
        router = router_of(engines(1))
        await asyncio.gather(router.generate(request("same")), router.generate(request("same")))

    with pytest.raises(ValueError, match="a request named same is under way"):
        run(main())


def test_torch_engines_draw_after_a_loss_what_one_engine_draws(hf_models):
    """One of two engines is lost in mid-generation: tokens are those of an undisturbed engine."""
    folder = hf_models["llama"].folder
    asked = [
        drawing(prompt, f"r{i}", max_new_tokens=30, seed=i) for i, prompt in enumerate(Prompts(4).several(6))
    ]

    def worker(rank):
        return TorchHost(
            TorchGenerationConfig(),
            EngineOptions(folder, folder, 250, rank=rank, threads=1, commit_seconds=60),
        )

    async def main():
        workers = [worker(0), worker(1), worker(2)]

        async def cut_short(requests):
            reports = 0
            async for batch in workers[0].generate_batches(requests):
                yield batch
                reports += 1
                if reports == 4:
                    raise ReplicaLost("cut short")

        router = Router(
            [Replica("a", cut_short), Replica("b", workers[1].generate_batches)], progress_tokens=3
        )
        undisturbed = Router([Replica("c", workers[2].generate_batches)])
        try:
            moved = await asyncio.gather(*(router.generate(r) for r in asked))
            whole = await asyncio.gather(*(undisturbed.generate(r) for r in asked))
        finally:
            for each in workers:
                each.close()
        metrics = router.take_metrics()
        assert (metrics.moved_requests, metrics.failed_requests) == (3, 0)
        assert metrics.kept_tokens >= 3 * 3 * 3
        return moved, whole

    for moved, whole in zip(*run(main()), strict=True):
        assert moved.tokens.tolist() == whole.tokens.tolist()
        np.testing.assert_allclose(moved.logprobs, whole.logprobs, atol=1e-5)
        assert len(moved.versions) == len(moved.tokens) == 30


def test_requests_wait_for_a_replica_that_returns_and_continue_from_their_tokens():
    dying, back = Counting(version=3, breaks_at=4), Counting(version=5)

    async def main():
        router = Router([Replica("a", dying.generate)], progress_tokens=1, waits=True)
        moved = asyncio.create_task(router.generate(request("moved", new=6)))
        while not router.lost:
            await asyncio.sleep(0)
        later = asyncio.create_task(router.generate(request("later", new=2)))
        late = await router.generate(request("late", new=2, deadline_seconds=0.01))
        left = asyncio.create_task(router.generate(request("left", new=2)))
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.sleep(0)
        router.reset([Replica("a", back.generate)])
        return late, await moved, await later

    late, moved, later = run(main())
    assert (late.stop, len(late.tokens)) == (StopReason.ABORT, 0)
    assert moved.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert moved.versions.tolist() == [3, 3, 3, 5, 5, 5]
    assert later.tokens.tolist() == [1, 2]
    assert sorted(r.id for r in back.requests) == ["later", "moved"]


def test_a_request_that_waits_is_given_up_and_one_that_killed_two_replicas_does_not_wait():
    async def main():
        router = Router([Replica("a", Counting(0, breaks_at=2).generate)], progress_tokens=1, waits=True)
        poison = asyncio.create_task(router.generate(request("poison", new=9)))
        while not router.lost:
            await asyncio.sleep(0)
        router.add(Replica("a", Counting(0, breaks_at=4).generate))
        answer = await poison
        waiting = asyncio.create_task(router.generate(request("waiting")))
        await asyncio.sleep(0)
        router.give_up({"a": "no memory"})
        for asked in (waiting, router.generate(request("next"))):
            with pytest.raises(NoReplicaLeft, match="a: no memory"):
                await asked
        return answer

    answer = run(main())
    assert (answer.stop, answer.tokens.tolist()) == (StopReason.ERROR, [1, 2, 3])
