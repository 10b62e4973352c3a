"""`nemorl env`: environments without a model."""

import asyncio
import io
import json
import random
import sys
from pathlib import Path

import pytest

from nemorl.commands.env_agents import random_agent, random_call
from nemorl.trajectories import Message, Task
from tests.cli.conftest import Nemorl

CONFIG = """
run_dir: runs/x
policy: {{model_path: models/none, max_sequence_length: 512, micro_batch_tokens: 512}}
data: {{train: {{name: arithmetic, digits: 1, size: 10}}}}
env: {{name: custom, factory: "my_env:{}"}}
algorithm: {{name: grpo, num_steps: 1, num_prompts_per_step: 2, num_generations_per_prompt: 2}}
"""
ENVIRONMENTS = '''
import asyncio
import subprocess

from nemorl.trajectories import Episode, EpisodeTruncated, Message, Step


class Debate:
    """Two players, one of which speaks twice."""

    async def run(self, task, model):
        pro, con = model.player("pro"), model.player("con")
        opening = (Message("user", "for"),)
        claim = await pro.chat(opening)
        reply = await con.chat((Message("user", "against"), Message("user", claim.text)))
        await pro.chat((*opening, claim.message, Message("user", reply.text)))
        return Episode({"twice": 0.25}, player_rewards={"con": {"twice": 1.0}})

    async def close(self):
        pass


class Debates:
    reward_weights = {"twice": 2.0}

    def create(self):
        return Debate()

    async def close(self):
        pass


class Endless(Debate):
    async def run(self, task, model):
        try:
            while True:
                await model.chat(task.messages)
        except EpisodeTruncated:
            return Episode({"twice": 1.0})


class EndlessFactory(Debates):
    def create(self):
        return Endless()


class Fails(Debate):
    async def run(self, task, model):
        await model.chat(task.messages)
        raise LookupError("no board")


class FailsFactory(Debates):
    def create(self):
        return Fails()


def add(a: int, b: int = 2, note: str = "") -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
        note: Anything.
    """
    return a + b


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


class TiredFactory(TwiceFactory):
    def create(self):
        raise OSError("too many environments")


class ForgetfulFactory(TwiceFactory):
    def __init__(self):
        self.process = subprocess.Popen(["sleep", "20"])
'''


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


class TestTools:
    TARGET = ("data.chat=true", "env={name: tools, tools: ['my_env:add'], answer: equal}")

    def test_typed_calls_reach_the_tools_which_are_shown(self, nemorl: Nemorl) -> None:
        calls = [
            f'<tool_call>{{"name": "add", "arguments": {one}}}</tool_call>' for one in ('{"a": 1}', "{}")
        ]
        said = [word for text in (f"Hm. {calls[0]}{calls[1]}", "12") for word in ("--say", text)]
        outcome = nemorl("env", "try", write("TwiceFactory"), *said, *self.TARGET)
        _, tools, first, *results, answer, _, reward = outcome.out.splitlines()
        shown = json.loads(tools.removeprefix("tools"))
        assert (shown["name"], shown["parameters"]["required"]) == ("add", ["a"])
        assert first == f"assistant Hm. {calls[0]}{calls[1]}"
        assert results == ["tool      3", "tool      Error: a: Missing required argument"]
        assert (answer, reward) == ("assistant 12", "reward: 0 after 2 turns")

    def test_most_random_turns_call_a_tool(self) -> None:
        """Three of four; the others are words of the conversation, the answer or nothing."""
        task = Task(0, (Message("user", "How many?"),), "12")
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]

        async def turns() -> list[str]:
            agent = random_agent(task, "1 0")
            return [await agent(task.messages, tools, None) for _ in range(400)]

        said = asyncio.run(turns())
        calls = [text for text in said if text.startswith('<tool_call>{"name": "add", "arguments": {"a": ')]
        assert 270 <= len(calls) <= 330
        assert {"", "12"} < {*said} - {*calls}
        assert asyncio.run(turns()) == said

    def test_random_arguments_keep_to_the_schema(self) -> None:
        jsonschema = pytest.importorskip("jsonschema")
        schema = {
            "type": "object",
            "properties": {
                "place": {"enum": ["left", "right"]},
                "count": {"type": "integer", "minimum": 3, "maximum": 4},
                "share": {"type": "number", "maximum": 0.5},
                "names": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "other": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["place", "count", "names", "other"],
            "additionalProperties": False,
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                        "kind": {"const": 7},
                    },
                    "required": ["kind"],
                }
            },
        }
        tool = {"function": {"name": "go", "parameters": schema}}
        for seed in range(200):
            text = random_call(tool, random.Random(seed), ["word"])
            call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            jsonschema.validate(call["arguments"], schema)


class TestEpisodes:
    """Environments that own their loop: the agent answers in place of the model."""

    def test_each_conversation_and_the_rewards_of_players(self, nemorl: Nemorl) -> None:
        turns = [word for text in ("yes", "no", "well") for word in ("--say", text)]
        outcome = nemorl("env", "try", write("Debates"), *turns)
        assert outcome.out.split("\n") == [
            "user      for",
            "assistant yes",
            "",
            "user      against",
            "user      yes",
            "assistant no",
            "",
            "user      no",
            "assistant well",
            "pro reward twice: 0.25 (weight 2)",
            "pro reward: 0.5",
            "con reward twice: 1.25 (weight 2)",
            "con reward: 2.5",
            "",
        ]

    def test_a_person_answers_until_the_end_of_the_input(
        self, nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("aye\n"))
        outcome = nemorl("env", "try", write("Debates"), "--agent", "human")
        assert outcome.out.splitlines()[:2] == ["user      for", "assistant aye"]
        assert "the episode was ended" in outcome.err
        assert outcome.status == 0

    def test_an_episode_without_an_end_is_truncated(self, nemorl: Nemorl) -> None:
        outcome = nemorl("env", "try", write("EndlessFactory"), "env.limits.max_calls=3")
        assert outcome.out.endswith("reward: 2 after 3 turns\n")

    def test_an_episode_that_fails_is_reported(self, nemorl: Nemorl) -> None:
        outcome = nemorl("env", "try", write("FailsFactory"), "--say", "a")
        assert outcome.status == 1
        assert "environment run: LookupError: no board" in outcome.err

    def test_a_program_calls_the_endpoint(self, nemorl: Nemorl) -> None:
        program = Path(__file__).parents[2] / "examples" / "second_try_program.py"
        target = f"env={{name: program, command: [{sys.executable}, {program}], weights: {{right: 1.0}}}}"
        experiment = write("Debates")
        outcome = nemorl("env", "try", experiment, target, "--say", "no", "--say", "never")
        question = outcome.out.splitlines()[0].removeprefix("user      ")
        assert outcome.out.split("\n") == [
            f"user      {question}",
            "assistant no",
            "",
            f"user      {question}no{question}",  # a program that continues texts
            "assistant never",
            "reward right: 0 (weight 1)",
            "reward: 0 after 2 turns",
            "",
        ]
        right = nemorl("env", "try", experiment, target, "--agent", "scripted")
        assert right.out.endswith("reward: 1 after 1 turn\n")

    def test_they_are_measured_and_leave_nothing(self, nemorl: Nemorl) -> None:
        outcome = nemorl("env", "bench", write("Debates"), "--episodes", 12, "--concurrency", 4)
        found = dict(line.rsplit(maxsplit=1) for line in outcome.out.splitlines()[:8])
        assert (found["episodes"], found["turns of an episode"]) == ("12", "3")
        assert float(found["reward twice, mean"]) == pytest.approx((0.25 + 1.25) / 2)
        assert outcome.status == 0


@pytest.mark.parametrize("game", ["guess_number", "sliding_puzzle", "wordle"])
def test_random_turns_are_the_same_for_a_seed(nemorl: Nemorl, game: str) -> None:
    first, again, other = (nemorl("env", "try", game, "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["wordl"],
            "wordl: no environment and no shipped experiment has this name, and it is no .yaml file; did you "
            "mean `wordle`?",
        ),
        (["custom"], "custom: its code is your own; name an experiment file that names it"),
        (["openrlhf"], "openrlhf: its code is your own; name an experiment file that names it"),
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
    outcome = nemorl("env", "try", write("TiredFactory"))
    assert outcome.status == 1
    assert "create() raised OSError: too many environments" in outcome.err


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
