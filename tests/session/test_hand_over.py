"""Handing weights over while engines are lost; the exchange and the pool are stand-ins."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from nemorl.cluster.errors import WorkerDied
from nemorl.generation.types import NoReplicaLeft
from nemorl.session.session import Session
from nemorl.weights.exchange import RefitStats
from nemorl.weights.messages import RefitFailed


@dataclass
class Exchange:
    """Fails as often as it is set."""

    failures: int
    error: Exception = RefitFailed("generation rank 1 died")
    versions: list[int] = field(default_factory=list)

    async def refit(self, version: int) -> RefitStats:
        self.versions.append(version)
        if len(self.versions) <= self.failures:
            raise self.error
        return RefitStats(version, 1.0, 0.5, 10**9, 10**9, 4, extra_bytes=0, kept_bytes=0)


@dataclass
class Pool:
    """Says how many engines each failed refit has cost."""

    losses: list[int]
    around: list[str] = field(default_factory=list)
    engines: tuple[str, ...] = ("one that is up",)
    shares_devices: bool = False
    starved: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def refitting(self) -> AsyncIterator[None]:
        self.around.append("begins")
        self.starved.clear()
        yield
        self.around.append("ends")

    async def lost_in_refit(self) -> bool:
        if not self.losses:
            raise NoReplicaLeft({"generation replica 0": "its weights are of two versions"})
        return self.losses.pop(0) > 0


def update_weights(exchange: Exchange, pool: Pool, version: int = 3) -> tuple[Session, dict[str, float]]:
    session = Session(exchange=exchange, replicas=pool)  # type: ignore[arg-type]
    return session, asyncio.run(session.update_weights(version))


def test_a_refit_that_lost_engines_is_done_again_without_them() -> None:
    exchange, pool = Exchange(failures=2), Pool([1, 2])
    session, metrics = update_weights(exchange, pool)
    assert exchange.versions == [3, 3, 3]
    assert (session.version, metrics["refit/gigabytes"]) == (3, 1.0)
    assert pool.around == ["begins", "ends"]


def test_a_refit_that_fails_with_all_engines_alive_ends_the_run() -> None:
    exchange = Exchange(failures=9)
    with pytest.raises(RefitFailed, match="generation rank 1 died"):
        update_weights(exchange, Pool([1, 0]))
    assert exchange.versions == [3, 3]


def test_where_no_engine_is_left_the_refit_says_what_it_failed_of() -> None:
    with pytest.raises(NoReplicaLeft) as caught:
        update_weights(Exchange(failures=9), Pool([]))
    assert caught.value.__notes__ == ["The refit to version 3 ended with: generation rank 1 died"]


def test_a_death_that_the_error_reports_is_not_reported_again_in_its_note() -> None:
    class Bereft(Pool):
        async def lost_in_refit(self) -> bool:
            raise NoReplicaLeft({"generation replica 1": str(death)})

    death = WorkerDied("generation", 1, "refit", "killed", Path("generation-1.log"), ())
    with pytest.raises(NoReplicaLeft) as caught:
        update_weights(Exchange(failures=9, error=death), Bereft([]))
    assert not hasattr(caught.value, "__notes__")


def sampling_session(exchange: Exchange, pool: Pool) -> Session:
    models: Any = {"policy": AsyncMock()}
    parts: Any = {"exchange": exchange, "replicas": pool}
    return Session(models=models, version=3, **parts)


def test_an_engine_that_returns_alone_while_sampling_waits_gets_the_weights_in_use() -> None:
    async def main() -> None:
        exchange, pool = Exchange(failures=0), Pool([])
        session = sampling_session(exchange, pool)
        async with session.pinned, session.resupplying():  # also of a validation's version
            for count in (1, 2):
                pool.starved.set()
                while len(pool.around) < 2 * count:
                    await asyncio.sleep(0)
        assert (exchange.versions, session.version) == ([3, 3], 3)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_sampling_ends_with_the_error_if_returned_engines_cannot_get_weights() -> None:
    """As of a policy that is lost too, so that the run can restart it instead of waiting for samples."""

    async def main() -> None:
        death = WorkerDied("policy", 0, "refit", "killed", Path("policy-0.log"), ())
        pool = Pool([0])
        session = sampling_session(Exchange(failures=9, error=death), pool)

        async def sample() -> None:
            async with session.resupplying():
                pool.starved.set()
                await asyncio.Event().wait()

        with pytest.raises(WorkerDied) as caught:
            await sample()
        assert caught.value is death
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_cancellation_of_sampling_stays_one() -> None:
    async def main() -> None:
        session = sampling_session(Exchange(failures=0), Pool([]))

        async def sample() -> None:
            async with session.resupplying():
                await asyncio.Event().wait()

        sampling = asyncio.create_task(sample())
        await asyncio.sleep(0)
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling

    asyncio.run(asyncio.wait_for(main(), 60))
