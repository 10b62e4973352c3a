"""`nemorl env`: environments without a model."""

import io
from pathlib import Path

import pytest

from tests.cli.conftest import Nemorl

CONFIG = """
run_dir: runs/x
policy: {{model_path: models/none, max_sequence_length: 512, micro_batch_tokens: 512}}
data: {{train: {{name: arithmetic, digits: 1, size: 10}}}}
env: {{name: custom, factory: "my_env:{}"}}
algorithm: {{name: grpo, num_steps: 1, num_prompts_per_step: 2, num_generations_per_prompt: 2}}
"""
ENVIRONMENTS = """
import asyncio
import subprocess

from nemorl.trajectories import Message, Step


class Twice:
    async def reset(self, task):
        self.turns = 0
        return task.messages

    async def step(self, action):
        self.turns += 1
        if action.text == "fall":
            raise RuntimeError("it fell")
        return Step((Message("user", "again"),), {"twice": 0.5 * (action.text == "yes")}, self.turns == 2)

    async def close(self):
        pass


class TwiceFactory:
    reward_weights = {"twice": 2.0}

    def create(self):
        return Twice()

    async def close(self):
        pass


class LeakingFactory(TwiceFactory):
    def create(self):
        asyncio.ensure_future(asyncio.sleep(60))
        return Twice()


class ForgetfulFactory(TwiceFactory):
    def __init__(self):
        self.process = subprocess.Popen(["sleep", "20"])
"""


def write(factory: str) -> Path:
    """An experiment with an environment of one's own, in the current folder."""
    Path("my_env.py").write_text(ENVIRONMENTS, encoding="utf-8")
    file = Path("experiment.yaml")
    file.write_text(CONFIG.format(factory), encoding="utf-8")
    return file


def test_scripted_turns_and_their_rewards(nemorl: Nemorl) -> None:
    outcome = nemorl("env", "try", write("TwiceFactory"), "--say", "no", "--say", "yes", "data.train.size=3")
    _, *lines = outcome.out.splitlines()  # the task is a sum
    assert lines == [
        "assistant no",
        "user      again",
        "assistant yes",
        "reward twice: 0.5 (weight 2)",
        "reward: 1 after 2 turns",
    ]


def test_the_task_answers_where_no_turn_is_given(nemorl: Nemorl) -> None:
    outcome = nemorl("env", "try", "math", "--agent", "scripted", "--task", "5")
    assert "reward math: 1 (weight 1)\nreward: 1 after 1 turn" in outcome.out


def test_reward_functions_are_computed_where_they_need_no_model(nemorl: Nemorl) -> None:
    Path("my_rewards.py").write_text(
        "def turns(completions, answer, word):\n"
        "    return [sum(m['content'] == word for m in one) + len(answer[0]) for one in completions]\n",
        encoding="utf-8",
    )
    rewards = (
        "rewards=[{function: 'my_rewards:turns', arguments: {word: again}, weight: 3}, "
        "{function: 'my_rewards:tokens'}, {kind: model, name: rm, url: 'http://127.0.0.1:1/v1', model: m}]"
    )
    with Path("my_rewards.py").open("a", encoding="utf-8") as file:
        file.write("def tokens(sampled_ids):\n    raise AssertionError\n")
    outcome = nemorl("env", "try", write("TwiceFactory"), "--say", "yes", rewards)
    # Two right turns, the word once in the conversation, and an answer of two digits.
    assert outcome.out.splitlines()[-3:] == [
        "reward twice: 1 (weight 2)",
        "reward turns: 3 (weight 3)",
        "reward: 11 after 2 turns",
    ]
    assert "not computed: tokens, rm" in outcome.err


def test_a_reward_function_that_fails_is_named(nemorl: Nemorl) -> None:
    Path("broken_rewards.py").write_text(
        "def broken(completions):\n    raise LookupError('no table')\n", encoding="utf-8"
    )
    rewards = "rewards=[{function: 'broken_rewards:broken'}]"
    outcome = nemorl("env", "try", write("TwiceFactory"), "--say", "yes", rewards)
    assert outcome.status == 1
    assert "broken" in outcome.err
    assert "no table" in outcome.err


def test_a_human_plays_until_the_end_of_the_input(nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("<move>0</move>\n"))
    outcome = nemorl("env", "try", "guess_number", "--agent", "human", "env.max_moves=4")
    assert "in 4 guesses" in outcome.out
    assert "assistant <move>0</move>\nuser      higher\nreward: 0 after 1 turn" in outcome.out
    assert "the episode was ended" in outcome.err


@pytest.mark.parametrize("game", ["guess_number", "sliding_puzzle", "wordle"])
def test_random_turns_are_the_same_for_a_seed(nemorl: Nemorl, game: str) -> None:
    first, again, other = (nemorl("env", "try", game, "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["wordl"], "wordl: no environment has this name, and it is no .yaml file; did you mean `wordle`?"),
        (["custom"], "custom: a custom environment has a factory"),
        (["wordle", "--task", "10000"], "--task 10000: there are 10000 tasks, numbered from 0"),
        (["wordle", "--agent", "scripted"], "--agent scripted: task 0 has no answer; give turns with --say"),
        (["wordle", "env.max_move=3"], "env.max_move = 3"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_targets_are_refused(nemorl: Nemorl, words: list[str], problem: str) -> None:
    outcome = nemorl("env", "try", *words)
    assert outcome.status == 2
    assert problem in outcome.err


def test_a_call_that_fails_is_named(nemorl: Nemorl) -> None:
    outcome = nemorl("env", "try", write("TwiceFactory"), "--say", "fall")
    assert outcome.status == 1
    assert "step('fall') raised RuntimeError: it fell" in outcome.err


def test_episodes_are_counted_and_leave_nothing(nemorl: Nemorl) -> None:
    outcome = nemorl("env", "bench", write("TwiceFactory"), "--episodes", 30, "--concurrency", 4)
    found = dict(line.rsplit(maxsplit=1) for line in outcome.out.splitlines()[:8])
    assert (found["episodes"], found["turns of an episode"]) == ("30", "2")
    assert float(found["turns/s"]) == pytest.approx(2 * float(found["episodes/s"]), rel=1e-3)
    assert outcome.status == 0


@pytest.mark.parametrize(
    ("factory", "problem"),
    [("LeakingFactory", "11 tasks were left"), ("ForgetfulFactory", "(sleep) were left")],
)
def test_what_is_left_is_a_failure(nemorl: Nemorl, factory: str, problem: str) -> None:
    outcome = nemorl("env", "bench", write(factory), "--episodes", 10)
    assert problem in outcome.err
    assert outcome.status == 1
