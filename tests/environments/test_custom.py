"""An environment of the user's own, named by its import path, is tried before a run and trained in."""

import gc
import re
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml

from nemorl.config.environment import CustomEnvConfig, ProgramEnvConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import Tokenizer, load_tokenizer
from nemorl.errors import Problem
from nemorl.rollout.custom_environment import Trial, custom_environment_problems, program_problems
from tests.data.tokenizers import save_tokenizer
from tests.environments.episodes import task
from tests.run.runs import finish, lines, start, tiny_model, write_experiment

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = "nemorl.examples.second_try:SecondTryFactory"
SECONDS = 0.5

GOOD = """
import time
from nemorl.trajectories import Message, Step

class Environment:
    async def reset(self, task):
        return task.messages

    async def step(self, action):
        return Step(rewards={"right": 1.0})

    async def close(self):
        pass

class Factory:
    def __init__(self, size=1):
        self.reward_weights = {"right": 1.0}

    def create(self):
        return Environment()

    async def close(self):
        pass
"""


AGENT = """
import asyncio
import time
from nemorl.trajectories import Episode, Message

class Environment:
    async def run(self, task, model):
        answer = await model.chat(task.messages)
        return Episode(rewards={"right": float(answer.content == task.answer)})

    async def close(self):
        pass

class Factory:
    reward_weights = {"right": 1.0}

    def create(self):
        return Environment()

    async def close(self):
        pass
"""


def problems(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    source: str,
    tokenizer: Tokenizer | None = None,
    *,
    chat: bool = True,
    remarks: list[Problem] | None = None,
    **options: object,
) -> list[Problem]:
    """What is wrong with the environment of a module with this source."""
    (folder / "my_environment.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_environment", raising=False)
    config = CustomEnvConfig(name="custom", factory="my_environment:Factory", options=options)
    trial = Trial(task(), SECONDS, tokenizer, chat, [] if remarks is None else remarks)
    return list(custom_environment_problems(config, trial))


def test_a_sound_environment_has_no_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert problems(monkeypatch, tmp_path, GOOD, size=3) == []


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        ("class Factory:", "class Factories:", "my_environment has no Factory; did you mean `Factories`?"),
        ("class Factory:", "class Other:", "my_environment has no Factory; correct the name, or define it"),
        ("import time", "import no_such_module", "No module named 'no_such_module'; correct the module"),
        ("def create(self)", "def make(self)", "Factory is not an EnvironmentFactory; add the methods"),
        ("async def step", "async def act", "Environment is not an Environment; add the methods step"),
        ('{"right": 1.0}\n\n    def create', '["right"]\n\n    def create', "its reward_weights is ["),
        ("return task.messages", "raise LookupError('no board')", "reset() raised LookupError: no board"),
        ("return Step(", "raise SystemExit(3)  # ", "step('') raised SystemExit: 3"),
        ("return Step(", "time.sleep(60)  # ", "step('') returned nothing within 0.5 s"),
        ("        pass\n\nclass", "        time.sleep(60)\n\nclass", "close() returned nothing within 0.5 s"),
        ("return task.messages", "return 'a text'", "reset() returned 'a text'; return a tuple of Messages"),
        ("return task.messages", "return ()", "reset() returned (); return a tuple of Messages"),
        ("    async def reset", "    def reset", "reset() is not async; define it with `async def`"),
        ('Step(rewards={"right": 1.0})', '{"right": 1.0}', "returned {'right': 1.0}; return a Step"),
        ("Step(", "Step(messages=('7',), ", "step('') returned the messages ('7',); return a tuple of"),
        ("Step(", "Step(done=False, ", "step('') returned done=False and no messages; return a message"),
        ("Step(", "Step(stop_strings='</a>', ", "step('') returned the stop_strings '</a>'; give a tuple of"),
        ('Step(rewards={"right": 1.0})', 'Step(rewards={"left": 1.0})', "gave the reward 'left', which"),
        ('Step(rewards={"right": 1.0})', 'Step(rewards={"right": None})', "gave the reward 'right' the"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good: str, bad: str, problem: str
) -> None:
    assert good in GOOD
    (found,) = problems(monkeypatch, tmp_path, GOOD.replace(good, bad))
    assert (found.field, found.value) == ("env.factory", "my_environment:Factory")
    assert problem in found.fix


def test_a_sound_agent_has_no_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    remarks: list[Problem] = []
    assert problems(monkeypatch, tmp_path, AGENT, remarks=remarks) == []
    picky = AGENT.replace("return Episode(", "assert answer.content; return Episode(")
    assert problems(monkeypatch, tmp_path, picky, remarks=remarks) == []
    endless = AGENT.replace("answer = await", "while True: answer = await")  # until it is truncated
    assert problems(monkeypatch, tmp_path, endless, remarks=remarks) == []
    assert remarks == []


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        ("return Episode(", "return dict(", "run: TypeError: it returned {'rewards': {'right': 1.0}};"),
        ('{"right": float', '{"left": float', "run() gave the reward 'left', which has no weight; add its"),
        ("await model.chat(task.messages)", "task.messages[0]", "it ended without a call of the model"),
        ("await model.chat(", "await asyncio.Event().wait(), (", "no call of the model and no end within"),
        ("await model.chat(", "time.sleep(60), (", "run() returned nothing within 0.5 s"),
        ("    async def run", "    def run", "run: TypeError: it is not async; define it with `async def`"),
        ("return Episode(", "raise SystemExit(3)  # ", "run: RuntimeError: SystemExit: 3"),
        ("        pass\n\nclass", "        raise OSError('held')\n\nclass", "close() raised OSError: held"),
    ],
)  # fmt: skip
def test_an_agent_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good: str, bad: str, problem: str
) -> None:
    assert good in AGENT
    source = AGENT.replace(good, bad)
    if bad.startswith("    def"):
        source = source.replace("await model.chat(task.messages)", "task.messages[0]")
    (found,) = problems(monkeypatch, tmp_path, source)
    assert (found.field, found.value) == ("env.factory", "my_environment:Factory")
    assert problem in found.fix


def test_what_an_agent_raises_is_a_remark_since_no_model_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remarks: list[Problem] = []
    source = AGENT.replace("return Episode(", "raise LookupError('no tool call')  # ")
    assert problems(monkeypatch, tmp_path, source, remarks=remarks) == []
    (remark,) = remarks
    assert remark.field == "env.factory"
    assert remark.fix == "its episode with scripted answers raised LookupError: no tool call"


@pytest.mark.parametrize(
    ("good", "bad", "refused", "remark"),
    [
        ("", "", None, None),
        ("print(", "print({'rewards': {'other': 1}} and ", None, None),
        ('"right"', '"left"', "run() gave the reward 'left', which has no weight; add its weight", None),
        ("answer = chat()", "answer = '7'", "it ended without a call of the model", None),
        ("import json", "import no_such_module", None, "No module named 'no_such_module'"),
    ],
)
def test_programs_are_tried(good: str, bad: str, refused: str | None, remark: str | None) -> None:
    source = textwrap.dedent("""
        import json, os, sys, urllib.request
        task = json.loads(sys.stdin.readline())
        def chat():
            body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
            headers = {"X-API-Key": os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
            url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
        answer = chat()
        print(json.dumps({"rewards": {"right": float(answer == task["answer"])}}))
    """).replace(good, bad)
    command = (sys.executable, "-c", source)
    config = ProgramEnvConfig(name="program", command=command, weights={"right": 1.0})
    trial = Trial(task(), 30.0)
    assert [refused in problem.fix for problem in program_problems(config, trial)] == [True] * bool(refused)
    assert [remark in one.fix for one in trial.remarks] == [True] * bool(remark)


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        ("'3+4='", "'guess: 3+4='", "reset() returned the text 'guess: 3+4=', but"),
        ("Step(", "Step(messages=(Message('user', 'hot'),), ", "step('') returned the text 'hot', but"),
        ("'3+4='", "'4+3='", None),
    ],
)
def test_texts_that_the_tokenizer_cannot_encode_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good: str, bad: str, problem: str | None
) -> None:
    tokenizer = load_tokenizer(PolicyConfig(model_path=tiny_model(tmp_path / "model")))
    sound = GOOD.replace("task.messages", "(Message('user', '3+4='),)")
    found = problems(monkeypatch, tmp_path, sound.replace(good, bad), tokenizer)
    assert [(p.field, problem in p.fix) for p in found] == ([("env.factory", True)] if problem else [])


def test_tools_that_a_model_cannot_be_offered_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = GOOD.replace("return task.messages", "self.tools = [TOOL]\n        return task.messages")
    (found,) = problems(monkeypatch, tmp_path, f"TOOL = 'search'\n{source}")
    assert "its tools have 'search' after reset()" in found.fix
    tool = {"type": "function", "function": {"name": "search", "parameters": {}}}
    chatml = load_tokenizer(PolicyConfig(model_path=save_tokenizer(tmp_path)))
    (found,) = problems(monkeypatch, tmp_path, f"TOOL = {tool}\n{source}", chatml)
    assert "shows no known format of tool calls" in found.fix
    (found,) = problems(monkeypatch, tmp_path, f"TOOL = {tool}\n{source}", chatml, chat=False)
    assert "set `data.chat: true`" in found.fix
    assert problems(monkeypatch, tmp_path, f"TOOL = {tool}\n{source}") == []


def test_a_call_that_hangs_is_ended_without_a_complaint_of_asyncio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = GOOD.replace("return task.messages", "await asyncio.Event().wait()")
    (found,) = problems(monkeypatch, tmp_path, source.replace("import time", "import asyncio"))
    assert "reset() returned nothing within 0.5 s" in found.fix
    gc.collect()
    assert "Task was destroyed" not in caplog.text


def test_an_agent_that_blocked_its_thread_leaves_no_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What asyncio finds later it reports in the middle of other code, which may be a parser."""
    source = AGENT.replace("await model.chat(", "time.sleep(2), (")
    (found,) = problems(monkeypatch, tmp_path, source)
    assert "run() returned nothing within 0.5 s" in found.fix
    time.sleep(3)
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize(
    ("options", "bad", "problem"),
    [
        ({"sise": 2}, "", "the constructor raised TypeError: Factory.__init__() got an unexpected keyword"),
        ({"size": 2}, "raise ValueError('too small')", "the constructor raised ValueError: too small"),
        ({"size": 2}, "time.sleep(60)", "the constructor returned nothing within 0.5 s"),
    ],
)
def test_options_that_the_factory_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, object], bad: str, problem: str
) -> None:
    source = GOOD.replace("size=1):", f"size=1):\n        {bad}")
    (found,) = problems(monkeypatch, tmp_path, source, **options)
    assert (found.field, found.value) == ("env.options", options)
    assert problem in found.fix


def test_the_reward_weights_are_those_of_the_factory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "weighted.py").write_text(
        GOOD.replace("1.0}\n\n    def", "size}\n\n    def"), encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = CustomEnvConfig(name="custom", factory="weighted:Factory", options={"size": 0.25})
    assert config.reward_weights == {"right": 0.25}
    assert CustomEnvConfig(name="custom", factory="weighted:Missing").reward_weights == {}


def test_the_example_of_the_page_is_sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "environments.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(# my_environment\.py\n.*?)```", page, re.DOTALL)
    (section,) = re.findall(r"```yaml\nenv:\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_environment.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_environment", raising=False)
    config = CustomEnvConfig.model_validate(yaml.safe_load(section))
    assert list(custom_environment_problems(config, Trial(task(), SECONDS))) == []
    assert config.reward_weights


def test_a_run_trains_in_the_example(tmp_path: Path) -> None:
    """Both the first answer and, where it is wrong, the second are sampled and rewarded."""
    shipped = yaml.safe_load((REPOSITORY / "configs" / "grpo_custom_environment.yaml").read_text())
    path = write_experiment(
        tmp_path,
        tiny_model(tmp_path / "model"),
        "custom",
        env=shipped["env"],
        rewards=[],
        policy={"max_sequence_length": 32, "layout": {}},
        algorithm={"num_steps": 2, "kl": {"coefficient": 0}, "validation": {}},
        checkpointing={"period": 2},
    )
    status, output = finish(start("train", path))
    assert status == 0, output
    steps = lines(tmp_path / "custom")
    assert [step.step for step in steps] == [1, 2]
    assert all("reward/second_try" in step.values for step in steps)
    assert any(step.values["turns/mean"] > 1 for step in steps)
