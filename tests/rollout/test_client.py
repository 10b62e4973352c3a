import asyncio

import numpy as np
import pytest

from nemorl.generation.types import GenerationRequest, SamplingParams
from nemorl.rollout.client import GenerationClient, GenerationFailed
from tests.rollout.stand_ins import EchoEngine, completion


def request(name: str, conversation: str = "", prompt: int = 1, new: int = 1) -> GenerationRequest:
    return GenerationRequest(
        id=name,
        prompt=np.arange(prompt, dtype=np.int32),
        sampling=SamplingParams(),
        max_new_tokens=new,
        seed=0,
        conversation=conversation,
    )


def engines(count: int, **options) -> list[EchoEngine]:
    return [EchoEngine(lambda r: [len(r.prompt)], **options) for _ in range(count)]


def client_of(replicas: list[EchoEngine]) -> GenerationClient:
    return GenerationClient([replica.generate_many for replica in replicas])


def test_requests_of_one_tick_are_one_call_and_each_gets_its_own_answer():
    (engine,) = replicas = engines(1)

    async def main():
        client = client_of(replicas)
        asked = [request(f"r{i}", prompt=i + 1) for i in range(5)]
        answers = await asyncio.gather(*(client.generate(r) for r in asked))
        await client.generate(request("later"))
        assert client.outstanding_tokens == [0]
        return answers

    answers = asyncio.run(main())
    assert [a.tokens.tolist() for a in answers] == [[1], [2], [3], [4], [5]]
    assert engine.calls == [["r0", "r1", "r2", "r3", "r4"], ["later"]]


def test_load_is_spread_by_outstanding_tokens():
    async def main():
        held = asyncio.Event()
        replicas = engines(2, held=held)
        client = client_of(replicas)
        long = asyncio.create_task(client.generate(request("long", prompt=10, new=90)))
        await asyncio.sleep(0)
        short = [asyncio.create_task(client.generate(request(f"s{i}", prompt=10, new=10))) for i in range(5)]
        await asyncio.sleep(0.01)
        assert client.outstanding_tokens == [100, 100]
        held.set()
        await asyncio.gather(long, *short)
        return [engine.calls for engine in replicas]

    assert asyncio.run(main()) == [[["long"]], [["s0", "s1", "s2", "s3", "s4"]]]


def test_a_conversation_stays_on_its_replica():
    replicas = engines(2)

    async def main():
        client = client_of(replicas)
        for turn in range(3):
            # Alone, each would go to the first replica, which is always idle.
            await asyncio.gather(
                *(client.generate(request(f"{c}/{turn}", conversation=c)) for c in ("a", "b"))
            )
        await client.generate(request("b/3", conversation="b"))

    asyncio.run(main())
    assert replicas[0].calls == [["a/0"], ["a/1"], ["a/2"]]
    assert replicas[1].calls == [["b/0"], ["b/1"], ["b/2"], ["b/3"]]


async def broken(requests):
    yield completion(requests[0], [1])
    raise ConnectionResetError("engine 3 was killed")


async def forgetful(requests):
    yield completion(requests[0], [1])


@pytest.mark.parametrize(
    ("stream", "error", "reason"),
    [
        (broken, ConnectionResetError, "engine 3 was killed"),
        (forgetful, GenerationFailed, "generation replica 0 ended its answers without one to request second"),
    ],
)
def test_a_broken_stream_fails_what_it_did_not_answer(stream, error, reason):
    async def main():
        client = GenerationClient([stream])
        answers = await asyncio.gather(
            *(client.generate(request(name)) for name in ("first", "second")), return_exceptions=True
        )
        assert client.outstanding_tokens == [0]
        return answers

    first, second = asyncio.run(main())
    assert first.tokens.tolist() == [1]
    assert isinstance(second, error)
    assert str(second) == reason


def test_a_cancelled_request_gives_its_tokens_back():
    async def main():
        held = asyncio.Event()
        client = client_of(engines(1, held=held))
        asked = asyncio.create_task(client.generate(request("gone", prompt=5)))
        await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait({asked})
        assert client.outstanding_tokens == [0]
        held.set()
        assert (await client.generate(request("next"))).id == "next"

    asyncio.run(main())


def test_two_requests_of_one_name_are_refused():
    async def main():
        client = client_of(engines(1))
        await asyncio.gather(client.generate(request("same")), client.generate(request("same")))

    with pytest.raises(ValueError, match="a request named same is under way"):
        asyncio.run(main())
