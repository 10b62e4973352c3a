"""Handing weights over while engines are lost; the exchange and the pool are stand-ins."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

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

    @asynccontextmanager
    async def refitting(self) -> AsyncIterator[None]:
        self.around.append("begins")
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
