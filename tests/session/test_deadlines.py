"""Waits that end with a stage's name: for sequences, and for a rollout worker that answers no call."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nemorl.cluster.errors import DeadlineExceeded
from nemorl.cluster.worker import Worker
from nemorl.errors import RunError
from nemorl.rollout.groups import Dropped, GroupAssignment
from nemorl.session import handles
from nemorl.session.handles import RolloutHandle
from nemorl.session.session import Session


class SilentWorker(Worker):
    """Answers twice that no group has ended, then no more."""

    async def call_pair(
        self, method: str, *args: Any, stage: str, seconds: float, num_awaited: int = 1
    ) -> tuple[Any, Any]:
        self.actor.append((method, args[1:], stage, seconds))
        if len(self.actor) > 2:
            raise DeadlineExceeded(self.group, (self.rank,), stage, seconds, ("stopped",))
        return None, []

    def send(self, method: str, *args: Any, stage: str) -> None:
        self.actor.append((method, stage))


def test_sequences_that_do_not_come_name_their_stage() -> None:
    async def fetch() -> None:
        await Session().fetch(asyncio.get_running_loop().create_future(), 0.01)

    with pytest.raises(RunError, match=r"stage 'storing trajectories': .* not be read within 0.01 s"):
        asyncio.run(fetch())


def test_a_rollout_worker_that_answers_no_call_in_time_is_lost() -> None:
    calls: list[Any] = []
    handle = RolloutHandle(SilentWorker("rollout", 0, Path(), calls), 30.0)
    assignments = [GroupAssignment(5, 0, 2)]

    async def run() -> list[Any]:
        groups = asyncio.create_task(anext(aiter(handle.run_groups(assignments))))
        while handle.is_up:
            await asyncio.sleep(0)
        assert not handle.take_progress()
        handle.close()  # it does not return
        return [await groups]

    # It would answer after 30 s without a group.
    limit = 30.0 + handles.GRACE_SECONDS
    assert asyncio.run(run()) == [Dropped(5, "lost")]
    assert calls[:3] == [
        ("run_more", (assignments, 30.0), "generation", limit),
        ("run_more", ((), 30.0), "generation", limit),
        ("run_more", ((), 30.0), "generation", limit),
    ]
    assert handle.cause is not None
    assert "rollout has not finished stage 'generation' in 60 s; no answer from rank 0" in handle.cause
