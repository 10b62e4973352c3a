import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemorl.config.algorithm import OnlineConfig, ValidationConfig
from nemorl.config.data import ArithmeticDataset, DataConfig
from nemorl.config.environment import CalculatorEnvConfig, FunctionRewardConfig
from nemorl.config.experiment import Experiment
from nemorl.config.generation import SamplingConfig, TorchGenerationConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.datasets import load_tasks
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import NoReplicaLeft, Progress, SamplingParams
from nemorl.rollout.groups import Dropped, GroupAssignment, GroupSummary
from nemorl.rollout.turn_loop import SampleKey
from nemorl.rollout.worker import GroupRunner, RolloutWorker
from nemorl.trajectories import StopReason
from tests.algorithms.groups import trajectory as summary_of
from tests.data.tokenizers import ENDOFTEXT
from tests.rollout.stand_ins import EchoEngine, completion


def experiment(model_folder, **options) -> Experiment:
    train = ArithmeticDataset(name="arithmetic", digits=1, size=50)
    validation = ArithmeticDataset(name="arithmetic", digits=1, size=10, offset=50)
    settings = {
        "run_dir": Path("unused"),
        "policy": PolicyConfig(model_path=model_folder, max_sequence_length=64),
        "generation": TorchGenerationConfig(max_new_tokens=8, sampling=SamplingConfig(temperature=0.7)),
        "data": DataConfig(train=train, validation=validation, chat=False),
        "rewards": (FunctionRewardConfig(function="exact_match", weight=2.0),),
        "algorithm": OnlineConfig(
            name="grpo",
            num_steps=1,
            num_prompts_per_step=2,
            num_generations_per_prompt=2,
            validation=ValidationConfig(sampling=SamplingConfig(temperature=0.0)),
        ),
    }
    return Experiment(**(settings | options))


def adds(tokenizer):
    """A policy that can add, but gets every odd sample of a group wrong."""

    def answer(request):
        left, right = tokenizer.decode(request.prompt.tolist()).rstrip("=").split("+")
        wrong = int(request.conversation.rpartition("/")[2]) % 2
        return [*tokenizer.encode(f"{int(left) + int(right) + wrong:02d}"), ENDOFTEXT]

    return answer


def sample(worker, assignments):
    async def main():
        try:
            return [summary async for summary in worker.run_groups(assignments)]
        finally:
            await worker.close()

    return asyncio.run(main())


def test_groups_are_sampled_rewarded_stored_and_summarised(model_folder, tokenizer):
    engine = EchoEngine(adds(tokenizer))
    stored = []
    config = experiment(model_folder)
    worker = RolloutWorker(
        config,
        Router([Replica("echo", engine.generate)]),
        store=lambda trajectories: stored.append(trajectories) or len(stored) - 1,
    )
    summaries = sample(
        worker,
        [
            GroupAssignment(group=30, task_index=4, num_samples=4, num_texts=2),
            GroupAssignment(group=31, task_index=9, num_samples=2),
        ],
    )
    # One call carried all first turns of both groups.
    assert [len(call) for call in engine.calls] == [6]
    first, second = sorted(summaries, key=lambda summary: summary.group)
    assert [t.reward for t in first.trajectories] == [2.0, 0.0, 2.0, 0.0]
    assert [t.rewards for t in second.trajectories] == [{"exact_match": 1.0}, {"exact_match": 0.0}]
    task = load_tasks(config.data.train, config.data)[4]
    for summary in first.trajectories:
        trajectory = stored[first.reference][summary.row]
        assert (trajectory.group, trajectory.task) == (30, 4)
        assert trajectory.reward == summary.reward
        assert summary.num_tokens == trajectory.num_tokens
        assert summary.num_sampled == len(tokenizer.encode(task.answer)) + 1
        assert (summary.num_turns, summary.stop, summary.error) == (1, StopReason.STOP, None)
        assert (summary.min_version, summary.max_version) == (0, 0)
    assert [text.sample for text in first.texts] == [0, 1]
    assert first.texts[0].prompt == task.messages[0].content
    assert first.texts[0].completion == f"{task.answer}<|endoftext|>"
    assert second.texts == ()


def test_a_greedy_sample_next_to_a_group_is_rewarded_and_not_stored(model_folder, tokenizer):
    requests, stored = [], []

    def keep(request):
        requests.append(request)
        return adds(tokenizer)(request)

    worker = RolloutWorker(
        experiment(model_folder), Router([Replica("echo", EchoEngine(keep).generate)]), store=stored.append
    )
    (summary,) = sample(worker, [GroupAssignment(30, 4, num_samples=2, greedy_baseline=True)])
    assert [t.reward for t in summary.trajectories] == [2.0, 0.0]
    assert summary.greedy.reward == 2.0
    assert [len(trajectories) for trajectories in stored] == [2]
    greedy = [request for request in requests if request.sampling.temperature == 0]
    assert [request.conversation for request in greedy] == ["30/2"]
    assert {request.sampling.temperature for request in requests} == {0.0, 0.7}


def test_a_group_is_scored_while_others_sample(model_folder, tokenizer):
    """The engine finishes no answer of group 1 before group 0's reward is under way, which waits for it.

    Scored after all had been sampled, or sampled after the first had been scored, this would never end.
    """
    scoring, sampled = threading.Event(), threading.Event()

    async def generate(requests):
        for request in sorted(requests, key=lambda request: request.conversation):
            if request.conversation.startswith("1/"):
                await asyncio.to_thread(scoring.wait)
            yield [completion(request, adds(tokenizer)(request))]
        sampled.set()

    slow = FunctionRewardConfig(
        function="tests.rewards.own_rewards:waits", arguments={"event": sampled, "reached": scoring}
    )
    worker = RolloutWorker(
        experiment(model_folder, rewards=(slow,)), Router([Replica("echo", generate)]), store=len
    )
    summaries = sample(worker, [GroupAssignment(group, group, num_samples=2) for group in range(2)])
    assert [t.reward for summary in summaries for t in summary.trajectories] == [1.0] * 4
    assert [summary.scoring["waits"].errors for summary in summaries] == [0, 0]


def test_validation_has_its_own_tasks_sampling_and_seeds(model_folder, tokenizer):
    requests = []

    def keep(request):
        requests.append(request)
        return adds(tokenizer)(request)

    config = experiment(model_folder)
    worker = RolloutWorker(config, Router([Replica("echo", EchoEngine(keep).generate)]), store=len)
    sample(worker, [GroupAssignment(3, 3, 1), GroupAssignment(3, 3, 1, validation=True)])
    by_id = {request.id: request for request in requests}
    training, validation = by_id["3/0/0"], by_id["validation-3/0/0"]
    assert training.sampling == SamplingParams(temperature=0.7)
    assert validation.sampling == SamplingParams(temperature=0.0)
    assert training.seed != validation.seed
    expected = load_tasks(config.data.validation, config.data)[3].messages[0].content
    assert tokenizer.decode(validation.prompt.tolist()) == expected


def test_a_conversation_with_a_tool_from_config_to_reward(model_folder, tokenizer):
    def policy(request):
        prompt = tokenizer.decode(request.prompt.tolist())
        task, _, rest = prompt.partition("=<|im_end|>")
        sums = task.rpartition("\n")[2]
        if "<|im_start|>tool" not in rest:
            return tokenizer.encode(f"<tool>{sums}</tool><|im_end|>")
        result = rest.partition("tool\n")[2].partition("<|im_end|>")[0]
        return tokenizer.encode(f"<answer>{result}</answer><|im_end|>")

    config = experiment(
        model_folder,
        policy=PolicyConfig(model_path=model_folder, max_sequence_length=900),
        generation=TorchGenerationConfig(max_new_tokens=90),
        env=CalculatorEnvConfig(name="calculator", weight=0.5),
        data=DataConfig(train=ArithmeticDataset(name="arithmetic", digits=1, size=50)),
        rewards=(FunctionRewardConfig(function="format_tags", weight=0.25),),
    )
    engine = EchoEngine(policy)
    stored = []
    worker = RolloutWorker(config, Router([Replica("echo", engine.generate)]), stored.append)
    (summary,) = sample(worker, [GroupAssignment(0, 0, 3)])
    assert [t.reward for t in summary.trajectories] == [0.75] * 3
    assert [t.num_turns for t in summary.trajectories] == [2] * 3
    assert [len(call) for call in engine.calls] == [3, 3]
    # The whole conversation is what the template makes of it, and only the two turns train.
    for trajectory in stored[0]:
        turns = [tokenizer.decode(trajectory.tokens[t.start : t.end]) for t in trajectory.turns]
        assert "".join(turns) == tokenizer.decode(trajectory.tokens[trajectory.loss_mask])
        assert turns[0].startswith("<tool>")
        assert turns[1].startswith("<answer>")
        assert tokenizer.encode(tokenizer.decode(trajectory.tokens)) == trajectory.tokens.tolist()


def test_the_loss_of_the_only_engine_ends_the_call(model_folder):
    async def dead(requests):
        raise ConnectionError("engine 0 was killed")
        yield

    worker = RolloutWorker(experiment(model_folder), Router([Replica("only", dead)]), store=len)
    with pytest.raises(NoReplicaLeft, match="only: ConnectionError: engine 0 was killed"):
        sample(worker, [GroupAssignment(0, 0, 2)])


def test_votes_of_a_further_validation_set(model_folder, tokenizer):
    """Its tasks are its own, and each sample comes with what it says; in training nothing votes."""
    train = ArithmeticDataset(name="arithmetic", digits=1, size=50)
    large = ArithmeticDataset(name="arithmetic", digits=2, size=10)
    data = DataConfig(train=train, validation_sets={"large": large}, chat=False)
    algorithm = OnlineConfig(
        name="grpo",
        num_steps=1,
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        validation=ValidationConfig(num_generations_per_prompt=2, cons_at_k=(2,)),
    )
    router = Router([Replica("echo", EchoEngine(adds(tokenizer)).generate)])
    worker = RolloutWorker(experiment(model_folder, data=data, algorithm=algorithm), router, store=len)
    measured = GroupAssignment(3, 3, 2, validation=True, validation_set="large", num_texts=1)
    by_group = {g.group: g for g in sample(worker, [measured, GroupAssignment(4, 4, 2)])}
    task = load_tasks(large, data)[3]
    left, right = task.messages[0].content.rstrip("=").split("+")
    assert by_group[3].texts[0].answer == task.answer
    assert [t.answer for t in by_group[3].trajectories] == [
        f"{int(left) + int(right) + wrong:02d}" for wrong in (0, 1)
    ]
    assert [t.answer for t in by_group[4].trajectories] == [None, None]


def test_groups_with_tokens_of_too_old_weights_are_dropped(model_folder):
    """Also within a turn that has not ended; what has no token yet, or is of a validation, continues."""
    aborted: list[str] = []
    started: list[str] = []  # whose tokens so far were taken

    async def generate(requests):
        for request in requests:
            group = int(request.id.split("/")[0].removeprefix("validation-"))
            if group != 2:
                tokens = np.array([1, 2, 3], dtype=np.int32)
                versions = np.full(3, 5 if group == 1 else 4, dtype=np.int32)
                yield [Progress(request.id, tokens, np.zeros(3, np.float32), versions)]
        started.extend(request.id for request in requests)
        await reached.wait()
        for request in requests:
            if request.id not in aborted:
                yield [completion(request, [1, 2, 3, ENDOFTEXT], version=5)]

    async def abort(ids):
        aborted.extend(ids)

    async def main():
        worker = RolloutWorker(
            experiment(model_folder), Router([Replica("slow", generate, abort)]), store=lambda _: 0
        )
        assignments = [
            *(GroupAssignment(group, group, 2) for group in (0, 1, 2)),
            GroupAssignment(3, 3, 2, validation=True),
        ]

        async def collect():
            return [outcome async for outcome in worker.run_groups(assignments)]

        collecting = asyncio.create_task(collect())
        while len(started) < 8:
            await asyncio.sleep(0.01)
        await worker.abort_stale(5)
        while len(aborted) < 2:
            await asyncio.sleep(0.01)
        reached.set()
        try:
            return await collecting
        finally:
            await worker.close()

    reached = asyncio.Event()
    outcomes = asyncio.run(main())
    dropped = [outcome for outcome in outcomes if isinstance(outcome, Dropped)]
    assert dropped == [Dropped(0, "aborted", lengths=(3, 3))]
    assert sorted(outcome.group for outcome in outcomes) == [0, 1, 2, 3]
    assert sorted(aborted) == ["0/0/0", "0/1/0"]


def test_another_attempt_at_a_group_has_other_names_and_seeds(model_folder, tokenizer):
    engine = EchoEngine(adds(tokenizer))
    worker = RolloutWorker(experiment(model_folder), Router([Replica("echo", engine.generate)]), lambda _: 0)
    sample(worker, [GroupAssignment(7, 0, 1), GroupAssignment(7, 0, 1, attempt=2)])
    assert sorted(name for call in engine.calls for name in call) == ["7.2/0/0", "7/0/0"]
    seeds = {SampleKey(0, 7, 0, attempt=attempt).seed(0) for attempt in range(3)}
    assert len(seeds) == 3


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0)


class GroupsByHand(GroupRunner):
    """Each group ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[int, asyncio.Future[None]] = {}

    async def _run_group(self, assignment, records):
        self.ends[assignment.group] = asyncio.get_running_loop().create_future()
        await self.ends[assignment.group]
        members = tuple(summary_of(1.0, row=row) for row in range(assignment.num_samples))
        stored = [(assignment.group, row) for row in range(assignment.num_samples)]
        return GroupSummary(assignment.group, 0, stored, members)


def test_groups_that_ended_are_handed_over_together():
    async def run() -> None:
        worker = GroupsByHand()
        assignments = [GroupAssignment(group, 0, 2) for group in range(5)]
        first = asyncio.create_task(worker.run_more(0, assignments, 60.0))
        other = asyncio.create_task(worker.run_more(1, [GroupAssignment(9, 0, 2)], 60.0))
        await until(lambda: len(worker.ends) == 6)
        assert await worker.run_more(0, [], 0.01) == ([], [])
        worker.ends[2].set_result(None)
        stored, (outcome,) = await first
        assert (stored, outcome.group) == ([(2, 0), (2, 1)], 2)
        for group in (3, 0):
            worker.ends[group].set_result(None)
        await worker.abort_groups([4])
        await until(lambda: len(worker._running) == 2)
        stored, outcomes = await worker.run_more(0, [], 60.0)
        assert [outcome.group for outcome in outcomes] == [0, 3, 4]
        assert isinstance(outcomes[2], Dropped)
        for outcome in outcomes[:2]:
            assert outcome.reference is None
            assert [stored[t.row] for t in outcome.trajectories] == [(outcome.group, 0), (outcome.group, 1)]
        worker.ends[1].set_result(None)
        assert (await worker.run_more(0, [], 60.0))[1][0].group == 1
        await worker.end_call(1)
        assert await other == ([], [])
        await until(worker.ends[9].cancelled)

    asyncio.run(run())


def test_a_failed_group_ends_the_call():
    async def run() -> None:
        worker = GroupsByHand()
        call = asyncio.create_task(
            worker.run_more(0, [GroupAssignment(group, 0, 2) for group in range(2)], 60.0)
        )
        await until(lambda: len(worker.ends) == 2)
        worker.ends[0].set_exception(ValueError("no reward"))
        with pytest.raises(ValueError, match="no reward"):
            await call
        await worker.end_call(0)
        await until(worker.ends[1].cancelled)

    asyncio.run(run())
