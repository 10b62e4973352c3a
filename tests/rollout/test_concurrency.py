"""Places of rollout workers, and the limit that follows engines: against a simulated engine."""

import asyncio

import pytest

from nemorl.generation.types import EngineHealth
from nemorl.rollout.concurrency import (
    MAX_QUEUED,
    ConcurrencyControl,
    ConcurrencyLimit,
    Places,
    PlacesUse,
    queued_share,
)


def engine(running: int, queued: int) -> EngineHealth:
    return EngineHealth(0, running, queued, paused=False, seconds_since_step=0.0, queued=queued)


@pytest.mark.parametrize("capacity", [3, 40, 300])
def test_the_limit_finds_what_engines_run_together(capacity: int) -> None:
    """Two engines that run `capacity` requests each, of more than they could run."""
    limit, values = ConcurrencyLimit.of(64, adaptive=True), []
    for _ in range(400):
        running = min(limit.value, capacity)
        engines = [engine(running, limit.value - running)] * 2
        limit.observe(engines, [PlacesUse(limit.value, 10)] * 2)
        values.append(limit.value)
    found = values[200:]
    # It overshoots until a tenth of the requests wait, and falls by a fifth.
    assert max(found) <= capacity / (1 - MAX_QUEUED) + limit.increase
    assert min(found) >= 0.8 * capacity - 1
    assert max(found) >= capacity


def test_samples_that_become_too_old_lower_the_limit() -> None:
    limit = ConcurrencyLimit.of(64, adaptive=True)
    limit.observe([engine(64, 0)], [PlacesUse(64, 5, num_stale=1)])
    assert limit.value == 51


def test_a_limit_that_nothing_waits_for_stays() -> None:
    """As at the end of a step, where a few trajectories are left."""
    limit = ConcurrencyLimit.of(64, adaptive=True)
    for left in (12, 10, 2, 0):
        limit.observe([engine(left // 2, left - left // 2)], [PlacesUse(left, 0)])
    assert limit.value == 64
    fixed = ConcurrencyLimit.of(8, adaptive=False)
    fixed.observe([engine(1, 7)], [PlacesUse(8, 10, num_stale=3)])
    assert fixed.value == 8


def test_a_limit_far_above_what_is_sampled_falls_until_it_binds() -> None:
    """One engine runs 16 of 64 trajectories; a limit of 384 would let all of them wait for ever."""
    limit = ConcurrencyLimit.of(384, adaptive=True)
    for _ in range(100):
        limit.observe([engine(16, 48)], [PlacesUse(64, 0)])
    assert 0.8 * 0.8 * 64 <= limit.value <= 64


def test_a_limit_waits_for_the_effect_of_its_last_decrease() -> None:
    """Trajectories keep their places until they end, which takes several observations."""
    limit = ConcurrencyLimit.of(64, adaptive=True)
    for in_use in (64, 62, 58, 54):
        limit.observe([engine(32, in_use - 32)], [PlacesUse(in_use, 9)])
        assert limit.value == 51
    limit.observe([engine(32, 19)], [PlacesUse(51, 9)])
    assert limit.value == 40


def test_what_waits_for_the_end_of_a_weight_update_does_not_count() -> None:
    limit = ConcurrencyLimit.of(64, adaptive=True)
    paused = EngineHealth(0, 8, 40, paused=True, seconds_since_step=0.0, queued=40)
    limit.observe([paused, paused], [PlacesUse(64, 9)] * 2)
    assert limit.value == 64
    limit.observe([paused, engine(44, 4)], [PlacesUse(64, 9)] * 2)
    assert limit.value == 64
    limit.observe([engine(44, 4)] * 2, [PlacesUse(64, 9)] * 2)
    assert limit.value == 68


def test_the_share_of_queued_requests_is_of_all_engines() -> None:
    assert queued_share([engine(6, 2), engine(0, 0), engine(2, 0)]) == 0.2
    assert queued_share([engine(0, 0)]) == 0


def test_places_are_given_in_order_and_their_number_may_change() -> None:
    async def main() -> None:
        places, entered, leave = Places(2), [], asyncio.Semaphore(0)

        async def sample(number: int) -> None:
            async with places:
                entered.append(number)
                await leave.acquire()

        async def settle() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(sample(number)) for number in range(8)]
        await settle()
        assert (entered, places.use) == ([0, 1], PlacesUse(2, 6))
        tasks[2].cancel()  # while it waits
        leave.release()
        await settle()
        assert (entered, places.use) == ([0, 1, 3], PlacesUse(2, 4))
        places.resize(4)
        await settle()
        assert (entered, places.use) == ([0, 1, 3, 4, 5], PlacesUse(4, 2))
        places.resize(1)
        leave.release()
        leave.release()
        await settle()
        assert places.use == PlacesUse(2, 2)
        leave.release()
        leave.release()
        await settle()
        assert (entered[-1], places.use) == (6, PlacesUse(1, 1))
        tasks[6].cancel()  # while it has a place
        await settle()
        assert (entered[-1], places.use) == (7, PlacesUse(1, 0))
        # Cancelled in the same moment in which it was admitted: the place is free again.
        late = asyncio.create_task(sample(9))
        await settle()
        leave.release()
        places.resize(2)
        late.cancel()
        await settle()
        assert places.use == PlacesUse(0, 0)
        assert 9 not in entered
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_the_control_shares_the_limit_among_workers_and_measures() -> None:
    limits = []

    async def health() -> list[EngineHealth]:
        return [engine(16, 0), engine(15, 1)]

    async def set_concurrency(limit: int) -> list[PlacesUse]:
        limits.append(limit)
        return [PlacesUse(20, 1), PlacesUse(12, 1), PlacesUse(0, 0)]

    async def main() -> None:
        await control.observe()
        await control.observe()

    limit = ConcurrencyLimit.of(16, adaptive=True)
    control = ConcurrencyControl(limit, lambda: 3, health, set_concurrency)
    asyncio.run(main())
    assert limits == [11, 12]  # two engines for three workers; one more after the first observation
    assert control.take_metrics() == {
        "generation/concurrency": 18.0,
        "generation/in_flight": 16.0,
        "generation/queued": 1 / 32,
    }
    assert control.take_metrics() == {"generation/concurrency": 18.0}
