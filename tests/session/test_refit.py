"""Ranks of several replicas are numbered through; a failed refit leaves the processes alone."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from nemorl.cluster.group import WorkerGroup
from nemorl.models.slices import TensorSlice
from nemorl.session.handles import GenerationReceivers
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout, RefitSession

SESSION = RefitSession(1, "shared_memory", "/nowhere", 1.0)


class Replicas:
    """A group of replicas with these numbers of ranks, which notes what it is asked."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks
        self.prepared: Sequence[tuple[Part, ...]] = ()
        self.options: list[dict[str, Any]] = []

    async def call(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        self.options.append({"method": method, **options})
        if "shards" in options:
            self.prepared = options["shards"]
        answers = {
            "describe_weights": [
                tuple(layout(r, rank) for rank in range(n)) for r, n in enumerate(self.ranks)
            ],
            "receive_weights": [
                tuple(ReceiveReport({}, 10 * r + rank) for rank in range(n)) for r, n in enumerate(self.ranks)
            ],
        }
        return answers.get(method, [None] * len(self.ranks))


def layout(replica: int, rank: int) -> ReceiverLayout:
    part = TensorSlice("w", (8,), (rank,), (1,), f"replica {replica}", 0, (1,))
    return ReceiverLayout((part,), ("float32",))


@pytest.fixture
def replicas() -> Replicas:
    return Replicas(2, 1, 3)


@pytest.fixture
def receivers(replicas: Replicas) -> GenerationReceivers:
    return GenerationReceivers(cast(WorkerGroup, replicas), deadline_seconds=5.0)


def test_layouts_and_reports_are_in_the_order_of_replicas(receivers: GenerationReceivers) -> None:
    found = [
        (layout.slices[0].param, layout.slices[0].start[0]) for layout in asyncio.run(receivers.describe())
    ]
    assert found == [
        ("replica 0", 0),
        ("replica 0", 1),
        ("replica 1", 0),
        ("replica 2", 0),
        ("replica 2", 1),
        ("replica 2", 2),
    ]
    assert [report.num_bytes for report in asyncio.run(receivers.receive(SESSION))] == [0, 1, 10, 20, 21, 22]


def test_every_replica_gets_the_parts_of_its_ranks(
    receivers: GenerationReceivers, replicas: Replicas
) -> None:
    asyncio.run(receivers.describe())
    asyncio.run(receivers.prepare([Part(rank, ()) for rank in range(6)]))
    assert [[part.rank for part in parts] for parts in replicas.prepared] == [[0, 1], [2], [3, 4, 5]]


def test_a_failure_ends_no_process(receivers: GenerationReceivers, replicas: Replicas) -> None:
    asyncio.run(receivers.prepare([]))
    asyncio.run(receivers.receive(SESSION))
    asyncio.run(receivers.commit(1))
    asyncio.run(receivers.abandon())
    assert [options["method"] for options in replicas.options] == [
        "prepare_refit",
        "receive_weights",
        "commit_weights",
        "abandon_refit",
    ]
    assert not any(options["ends_group"] for options in replicas.options)
    assert {options["seconds"] for options in replicas.options} == {5.0}
