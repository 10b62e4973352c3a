"""Groups that take longer than others: carried over, cut off, or ended at their deadline."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np

from nemorl.config.algorithm import OnlineConfig
from nemorl.data.tokenizer import Tokenizer
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import Completion, GenerationRequest, Progress, Report
from nemorl.rollout.collector import Collector
from nemorl.rollout.groups import Dropped, GroupAssignment, GroupSummary
from nemorl.rollout.order import TaskOrder
from nemorl.rollout.schedule import CollectorPlan, GroupSchedule
from nemorl.rollout.worker import RolloutWorker
from nemorl.trajectories import StopReason, Trajectory
from tests.data.tokenizers import ENDOFTEXT
from tests.rollout.stand_ins import completion
from tests.rollout.test_worker import experiment


class SlowEngine:
    """Answers at once; requests whose id begins with one of `slow` get a token for each version in `updates`.

    They end with the third one.
    """

    def __init__(self, *slow: str) -> None:
        self.slow, self.version = slow, 0
        self.updates: asyncio.Queue[int] = asyncio.Queue()
        self.aborted: list[str] = []

    async def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids

    async def generate(self, requests: list[GenerationRequest]) -> AsyncGenerator[list[Report], None]:
        slow = [request for request in requests if request.id.startswith(self.slow)]
        for request in requests:
            if request not in slow:
                yield [completion(request, [1, ENDOFTEXT], version=self.version)]
        versions: list[int] = []
        while slow and len(versions) < 3:
            versions.append(await self.updates.get())
            for request in slow:
                one = np.array([5], dtype=np.int32), np.zeros(1, np.float32)
                yield [Progress(request.id, *one, np.array(versions[-1:], dtype=np.int32))]
        for request in slow:
            tokens = np.array([5, 5, 5], dtype=np.int32)
            of_tokens = np.zeros(3, np.float32), np.array(versions, dtype=np.int32)
            yield [Completion(request.id, tokens, *of_tokens, StopReason.LENGTH)]


def rollout(
    folder: Path, engine: SlowEngine, **algorithm: object
) -> tuple[RolloutWorker, Router, list[list[Trajectory]]]:
    stored: list[list[Trajectory]] = []
    counts = {"num_steps": 9, "num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    config = OnlineConfig.model_validate({"name": "grpo", **counts, **algorithm})
    router = Router([Replica("slow", engine.generate, engine.abort)])

    def store(trajectories: list[Trajectory]) -> int:
        stored.append(trajectories)
        return len(stored) - 1

    return RolloutWorker(experiment(folder, algorithm=config), router, store), router, stored


def collector(worker: RolloutWorker, staleness: int, extra: int = 0) -> Collector:
    plan = CollectorPlan(2, samples_per_group=2, max_staleness=staleness, extra_groups=extra)
    return Collector([worker], GroupSchedule(TaskOrder(50, 0, False), plan), 20.0)


def test_a_group_continues_over_weight_updates_with_a_version_for_each_token(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async def main() -> list[list[int]]:
        sampling, batches = collector(worker, staleness=2), []
        for version in range(3):
            engine.version = version
            sampling.advance(version)
            engine.updates.put_nowait(version)
            if version == 2:  # the slow group has its last token
                await asyncio.sleep(0.05)
            batches.append([summary.group for summary in await sampling.next_batch()])
        assert sampling.take_dropped() == ([], 0)
        await sampling.close()
        await worker.close()
        return batches

    engine = SlowEngine("0/")
    worker, _, stored = rollout(model_folder, engine)
    assert asyncio.run(main()) == [[1, 2], [3, 4], [0, 5]]
    slow = [trajectory for group in stored for trajectory in group if trajectory.group == 0]
    assert [t.versions[t.loss_mask].tolist() for t in slow] == [[0, 1, 2]] * 2
    assert engine.aborted == []


def test_a_step_ends_without_its_slowest_group_which_is_sampled_again(model_folder: Path) -> None:
    async def main() -> None:
        sampling = collector(worker, staleness=0, extra=1)
        sampling.advance(0)
        engine.updates.put_nowait(0)
        assert [summary.group for summary in await sampling.next_batch()] == [1, 2]
        assert sorted(engine.aborted) == ["0/0/0", "0/1/0"]
        assert router.num_unanswered == 0  # nothing is sampled while the policy trains
        assert sampling.take_dropped() == ([Dropped(0, "cut_off", (1, 1))], 0)
        engine.slow, engine.version = ("3/",), 1
        sampling.advance(1)
        assert [summary.group for summary in await sampling.next_batch()] == [0, 4]
        await sampling.close()
        await worker.close()

    engine = SlowEngine("0/")
    worker, router, stored = rollout(model_folder, engine)
    asyncio.run(main())
    # What was cut off is not kept, and its task has been sampled again.
    assert sorted(trajectories[0].group for trajectories in stored) == [0, 1, 2, 4]


def test_a_deadline_ends_what_is_left_of_a_group(model_folder: Path) -> None:
    """A group with enough finished members is trained on without the others; validation has no deadline."""

    async def main() -> dict[str, GroupSummary | Dropped]:
        assignments = [GroupAssignment(0, 0, 3), GroupAssignment(1, 1, 2), GroupAssignment(2, 2, 2, True)]
        outcomes: dict[str, GroupSummary | Dropped] = {}
        engine.updates.put_nowait(0)
        async for outcome in worker.run_groups(assignments):
            outcomes[str(outcome.group)] = outcome
            if len(outcomes) == 2:  # the validation is left
                assert "2" not in outcomes
                engine.updates.put_nowait(0)
                engine.updates.put_nowait(0)
        await worker.close()
        return outcomes

    engine = SlowEngine("0/2/", "1/1/", "validation-2/1/")
    # The others answer at once, and have all of this time for it.
    worker, _, _ = rollout(model_folder, engine, group_seconds=1.5)
    outcomes = asyncio.run(main())
    kept, measured = outcomes["0"], outcomes["2"]
    assert isinstance(kept, GroupSummary)
    assert isinstance(measured, GroupSummary)
    late = kept.trajectories[2]
    assert [t.trains for t in kept.trajectories] == [True, True, False]
    assert (late.stop, late.num_sampled) == (StopReason.DEADLINE, 1)
    assert late.error == "not finished within `algorithm.group_seconds`"
    assert outcomes["1"] == Dropped(1, "deadline", (2, 1))
    assert [t.stop for t in measured.trajectories] == [StopReason.STOP, StopReason.LENGTH]
    assert sorted(engine.aborted) == ["0/2/0", "1/1/0"]
