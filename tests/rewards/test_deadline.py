import asyncio

from nemorl.rewards.scored import Outcome, attempt


def test_a_value_an_exception_and_a_hang_are_all_answers():
    async def value():
        return 3

    async def fails():
        raise OSError("disk gone")

    async def hangs():
        await asyncio.Event().wait()

    async def main():
        return [await attempt(call(), "the stage", 0.05) for call in (value, fails, hangs)]

    assert asyncio.run(main()) == [
        Outcome(value=3),
        Outcome(failure="the stage: OSError: disk gone"),
        Outcome(failure="the stage: no answer within 0.05 s"),
    ]


def test_what_hangs_is_cancelled_and_so_is_what_nothing_waits_for():
    ended = []

    async def hangs():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asyncio.get_running_loop().time())

    async def main():
        await attempt(hangs(), "the stage", 0.02)
        await asyncio.sleep(0)
        assert len(ended) == 1
        waiting = asyncio.create_task(attempt(hangs(), "the stage", 60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=1)
        await asyncio.sleep(0)
        assert len(ended) == 2

    asyncio.run(main())
