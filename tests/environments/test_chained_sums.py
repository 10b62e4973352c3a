import asyncio

import pytest

from nemorl.config.data import ArithmeticDataset, DataConfig
from nemorl.config.environment import ChainedSumsEnvConfig
from nemorl.data.datasets import load_tasks
from nemorl.environments.chained_sums import ChainedSumsFactory
from nemorl.trajectories import Message, Step, Task
from tests.environments.episodes import said, task


def play(given: Task, *turns: str, num_sums: int = 2) -> list[Step]:
    """The environment's answers to these turns."""

    async def main():
        config = ChainedSumsEnvConfig(name="chained_sums", num_sums=num_sums)
        environment = ChainedSumsFactory(config).create()
        assert await environment.reset(given) == given.messages
        return [await environment.step(said(turn)) for turn in turns]

    return asyncio.run(main())


def sums(prompt: str) -> Task:
    return Task(0, (Message("user", prompt),), columns={"prompt": prompt})


def test_each_sum_continues_from_the_answer_and_is_rewarded_where_it_is_made():
    steps = play(sums("12+34="), "046", "058", "092", num_sums=3)
    assert steps == [
        Step((Message("user", "46+12="),), {"chained_sums_turn": 1.0}, done=False),
        Step((Message("user", "58+34="),), {"chained_sums_turn": 1.0}, done=False),
        Step(rewards={"chained_sums": 1.0}),
    ]


def test_a_wrong_answer_is_gone_on_from_by_its_last_digits():
    first, last = play(sums("60+70="), "131", "091")
    assert first == Step((Message("user", "31+60="),), {"chained_sums_turn": 0.0}, done=False)
    assert last == Step(rewards={"chained_sums": 1.0})
    assert play(sums("60+70="), "130", "091")[-1] == Step(rewards={"chained_sums": 0.0})


@pytest.mark.parametrize("answer", ["46", "0046", "+46", "", "٠٤٦"])
def test_what_is_no_sum_ends_it_unpaid(answer):
    assert play(sums("12+34="), answer) == [Step(rewards={"chained_sums_turn": 0.0, "chained_sums": 0.0})]


def test_it_opens_with_tasks_of_the_arithmetic_dataset():
    train = ArithmeticDataset(name="arithmetic", digits=1, size=5)
    given = load_tasks(train, DataConfig(train=train, chat=False))[0]
    first, last = play(given, given.answer, "xx")
    numbers = given.columns["prompt"].removesuffix("=").split("+")
    assert first.messages == (Message("user", f"{given.answer[-1]}+{numbers[0]}="),)
    assert last.rewards == {"chained_sums": 0.0}


def test_a_task_that_is_no_sum_is_refused():
    with pytest.raises(ValueError, match="task 0 is no sum such as 12\\+34="):
        play(task("7"))
