import asyncio

import pytest

from nemorl.config.data import DataConfig, ReasoningGymDataset
from nemorl.config.environment import ReasoningGymEnvConfig
from nemorl.data.datasets import load_tasks
from nemorl.environments.reasoning_gym import ReasoningGymFactory
from tests.environments.episodes import answer, task


def tasks_of(name: str, **options):
    dataset = ReasoningGymDataset(name="reasoning_gym", task=name, size=4, seed=1, options=options)
    return load_tasks(dataset, DataConfig(train=dataset))


def score(factory, given, text) -> float:
    return asyncio.run(answer(factory, given, text)).rewards["reasoning_gym"]


@pytest.fixture(scope="module")
def factory():
    made = ReasoningGymFactory(ReasoningGymEnvConfig(name="reasoning_gym"))
    yield made
    asyncio.run(made.close())


def test_the_text_of_the_tag_is_scored(factory):
    given = tasks_of("chain_sum")[0]
    right = given.answer
    assert score(factory, given, f"<think>5</think><answer> {right} </answer>") == 1.0
    assert score(factory, given, f"<answer>1</answer> or rather <answer>{right}</answer>") == 1.0
    assert score(factory, given, right) == 0.0  # no tag, no answer
    assert score(factory, given, "<answer></answer>") == 0.0
    # reasoning-gym's own partial credit: the share of the text that is the answer.
    assert score(factory, given, f"<answer>{right} !</answer>") == len(right) / len(right + " !")


def test_the_dataset_scores_with_the_options_it_was_made_with(factory):
    # Any expression that makes 24 of the four numbers is right, not just the one in the answer.
    given = tasks_of("countdown", min_numbers=3, max_numbers=3)[0]
    assert score(factory, given, f"<answer>({given.answer})</answer>") == 1.0
    assert score(factory, given, "<answer>1</answer>") < 0.1


def test_without_a_tag_the_whole_text_is_scored():
    whole = ReasoningGymFactory(ReasoningGymEnvConfig(name="reasoning_gym", answer_tag=None, weight=0.5))
    given = tasks_of("chain_sum")[1]
    assert whole.reward_weights == {"reasoning_gym": 0.5}
    assert score(whole, given, given.answer) == 1.0
    asyncio.run(whole.close())


def test_tasks_of_another_dataset_are_refused(factory):
    with pytest.raises(ValueError, match="task 0 was not made by reasoning-gym"):
        asyncio.run(factory.create().reset(task("7")))
