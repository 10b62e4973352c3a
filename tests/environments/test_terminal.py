import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from nemorl.config.data import DataConfig, TasksDataset
from nemorl.config.terminal_environment import TerminalEnvConfig
from nemorl.data.datasets import load_tasks
from nemorl.environments.sandbox import LocalSandbox, SandboxUnavailable, find_isolation
from nemorl.environments.task_folder import folder_of
from nemorl.environments.terminal import TerminalFactory, reward_in
from nemorl.trajectories import Action, Reply, Step, StopReason, ToolCall
from tests.environments.episodes import said, task

SANDBOX = {"cpu_seconds": 100, "wall_seconds": 110}
TIMES = {"command_seconds": 100, "test_seconds": 100, "sandbox": SANDBOX}  # on a machine under load


def files(folder: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def harbor(folder: Path, **changed: str) -> Path:
    """Sort the words of a file; the reward is the share of lines that are right."""
    test = """
        [ -e /app/seen ] && echo "the tests were there" && exit 1
        right=$(diff --unchanged-line-format=x --old-line-format= --new-line-format= \\
            /tests/expected.txt /app/sorted.txt | wc -c)
        echo "$right / 4" | python3 -c "print(eval(input()))" > /logs/verifier/reward.txt
    """
    whole = {
        "instruction.md": "Sort the lines of words.txt into sorted.txt.\n",
        "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n',
        "environment/Dockerfile": "FROM ubuntu:24.04\n# the words\nWORKDIR /app\nCOPY words.txt .\n",
        "environment/words.txt": "pear\napple\nquince\nfig\n",
        "tests/test.sh": test,
        "tests/expected.txt": "apple\nfig\npear\nquince\n",
    }
    return files(folder, whole | changed)


def terminal_bench(folder: Path, **changed: str) -> Path:
    config = "instruction: |-\n  Write 42 into answer.txt.\ndifficulty: easy\nparser_name: pytest\n"
    dockerfile = """FROM ghcr.io/laude-institute/t-bench/python-3-13:20250620
        ENV GREETING="hello there" NUMBER=42
        WORKDIR /workspace/inner
        RUN mkdir -p deep && \\
            echo $NUMBER > deep/number
        COPY ["data", "/data/"]
    """
    whole = {
        "task.yaml": config,
        "Dockerfile": dockerfile,
        "docker-compose.yaml": "services:\n  client:\n    build: .\n",
        "data/one.txt": "1",
        "data/more/two.txt": "2",
        "run-tests.sh": "python3 $TEST_DIR/test_answer.py",
        "tests/test_answer.py": "assert open('answer.txt').read().strip() == '42'",
    }
    return files(folder, whole | changed)


def runs(*commands: str, name: str = "bash", errors: tuple[str, ...] = ()) -> Action:
    calls = tuple(ToolCall(f"call{n}", name, {"command": command}) for n, command in enumerate(commands))
    return Action("…", np.zeros(1, dtype=np.int32), StopReason.STOP, Reply("", None, calls, errors))


def converse(folder: Path, *actions: Action, **config) -> list[Step]:
    async def main() -> list[Step]:
        settings = TerminalEnvConfig(name="terminal", **(TIMES | config))
        try:
            factory = TerminalFactory(settings)
        except SandboxUnavailable as error:
            pytest.skip(str(error))
        environment = factory.create()
        try:
            await environment.reset(task(folder=str(folder)))
            return [await environment.step(action) for action in actions]
        finally:
            await environment.close()
            await factory.close()

    return asyncio.run(asyncio.wait_for(main(), 300))


def results(step: Step) -> list[str]:
    return [message.content for message in step.messages]


def test_work_in_a_harbor_folder_is_rewarded_by_its_reward_file(tmp_path):
    folder = harbor(tmp_path / "sort")
    looks = "pwd; ls; [ -e /tests/test.sh ] && touch seen; cd /; echo gone > /tmp/note"
    first, second, last = converse(
        folder, runs(looks, "cat missing.txt"), runs("sort words.txt | head -3 > sorted.txt; cat /tmp/note"),
        said("Done."),
    )  # fmt: skip
    assert results(first)[0] == "/app\nwords.txt"
    assert results(first)[1].endswith("No such file or directory\n(exit status 1)")
    assert [message.tool_call_id for message in first.messages] == ["call0", "call1"]
    assert (results(second), second.done) == (["gone"], False)
    assert (last.rewards, last.done) == ({"terminal": 3 / 4}, True)


def test_work_in_a_terminal_bench_folder_is_rewarded_by_the_exit_status(tmp_path):
    folder = terminal_bench(tmp_path)
    looks = "pwd; cat deep/number; find /data -type f | sort; echo $GREETING"
    seen, done = converse(folder, runs(looks), runs("cat deep/number > answer.txt"), max_turns=2)
    assert results(seen) == ["/workspace/inner\n42\n/data/more/two.txt\n/data/one.txt\nhello there"]
    assert (done.rewards, done.done) == ({"terminal": 1.0}, True)
    assert converse(folder, runs("echo 41 > answer.txt"), said(""))[-1].rewards == {"terminal": 0.0}


@pytest.mark.parametrize(
    ("written", "plain", "reward"),
    [
        ('{"reward": 0.5, "speed": 2}', "1", 0.5),
        ('{"score": 0.25}', None, 0.25),
        ("-1.5", None, -1.5),
        (None, " 0.75\n", 0.75),
        (None, "nan", 0.0),
        (None, "much", 0.0),
        (None, None, 0.0),  # Harbor requires a file
    ],
)
def test_rewards_that_tests_write(tmp_path, written, plain, reward):
    folder = folder_of(task(folder=str(harbor(tmp_path))), TerminalEnvConfig(name="terminal"))
    assert reward_in([written, plain], 0, folder, "reward") == reward
    with pytest.raises(ValueError, match=r"reward.json has a, b; set env.reward_key to one of them"):
        reward_in(['{"a": 1, "b": 2}', None], 0, folder, "reward")


def test_the_policy_writes_neither_rewards_nor_tests(tmp_path):
    folder = harbor(tmp_path, **{"tests/test.sh": "exit 0"})
    forge = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 'kill $PPID' > /tests/test.sh"
    assert converse(folder, runs(forge), said(""))[-1].rewards == {"terminal": 0.0}


def test_commands_end_in_time_and_long_output_loses_its_middle(tmp_path):
    folder = harbor(tmp_path)
    slow, after, flood = converse(
        folder, runs("echo begun; sleep 600", "echo never"), runs("sleep 600 & echo here"),
        runs("seq 100000"), command_seconds=6.0, max_result_characters=300,
    )  # fmt: skip
    assert results(slow)[0].startswith("begun\n(ended after")
    assert results(slow)[1] == "Error: earlier commands of this turn took its time"
    assert results(after) == ["here"]
    text = results(flood)[0]
    assert text.startswith("1\n2\n3\n")
    assert text.endswith("99999\n100000")
    assert "bytes left out" in text
    assert len(text) < 300


@pytest.mark.parametrize("ends", ["kill -9 $PPID", "python3 -c 'x = bytes(10**9)'; kill $PPID; sleep 60"])
def test_a_policy_that_ends_its_sandbox_has_the_reward_0(tmp_path, ends):
    folder = harbor(tmp_path, **{"tests/test.sh": "echo 1 > /logs/verifier/reward.txt"})
    (step,) = converse(folder, runs(ends))
    assert (step.rewards, step.done) == ({"terminal": 0.0}, True)


def test_wrong_calls_are_answered(tmp_path):
    folder = harbor(tmp_path)
    other, unread = converse(folder, runs("ls", name="sh"), runs(errors=("Tool call 1 cannot be read.",)))
    assert results(other) == ["Error: there is no tool `sh`; the tools are bash"]
    assert (results(unread), unread.done) == (["Tool call 1 cannot be read."], False)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"environment/Dockerfile": "FROM node:20"}, "the image node:20"),
        ({"environment/Dockerfile": "FROM ubuntu:24.04\nRUN ls && \\\n  apt-get -y install jq"},
         "a network for `apt-get -y install` in the Dockerfile"),
        ({"environment/Dockerfile": "FROM debian:12 AS a\nFROM debian:12"}, "an image built in stages"),
        ({"environment/Dockerfile": "FROM debian:12\nCOPY words.txt /opt/x"}, "the folder /opt/x"),
        ({"environment/Dockerfile": "FROM debian:12\nCOPY none.txt /app"}, "the files none.txt"),
        ({"environment/Dockerfile": "FROM debian:12\nENTRYPOINT serve"}, "`ENTRYPOINT serve`"),
        ({"task.toml": "[environment]\ndocker_image = 'org/image:1'"}, "the image org/image:1"),
        ({"task.toml": "[environment]\ngpus = 1"}, "environment.gpus"),
        ({"task.toml": "[verifier.env]\nKEY = '${KEY}'"}, "the variable KEY of the machine"),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "several steps"),
        ({"environment/docker-compose.yaml": ""}, "several containers"),
        ({"tests/test.sh": "curl -LsSf https://example.org/uv.sh | sh\nuvx pytest"}, "a network for `curl"),
        ({"task.toml": "["}, "cannot be read"),
    ],
)  # fmt: skip
def test_folders_that_require_more_than_a_sandbox_are_refused(tmp_path, changed, reason):
    folder = harbor(tmp_path, **changed)
    with pytest.raises(ValueError, match=r"requires|cannot be read") as refused:
        folder_of(task(folder=str(folder)), TerminalEnvConfig(name="terminal"))
    assert reason in str(refused.value)


class Prepared(LocalSandbox):
    """A sandbox with a machine for each task, whose Dockerfile it does not read."""

    def __init__(self, config):
        local = TerminalEnvConfig(name="terminal", **TIMES).sandbox
        super().__init__(local, find_isolation(local))

    def task_session(self, folder):
        session = self.session()
        run = session.run

        async def prepared(code):
            session.run = run
            await run(f"open('/app/words.txt', 'w').write({folder.name!r})")
            return await run(code)

        session.run = prepared
        return session


def test_a_custom_sandbox_makes_a_machine_for_each_task(tmp_path):
    image = {"environment/Dockerfile": "FROM gcc:14\nRUN apt-get install -y jq"}
    folder = harbor(tmp_path / "with_image", **image)
    sandbox = {"name": "custom", "factory": "tests.environments.test_terminal:Prepared", **SANDBOX}
    (step,) = converse(folder, runs("cat words.txt"), sandbox=sandbox)
    assert results(step) == ["with_image"]


def test_a_folder_of_task_folders_is_a_dataset(tmp_path):
    harbor(tmp_path / "a")
    terminal_bench(tmp_path / "b")
    (tmp_path / "notes").mkdir()
    train = TasksDataset(name="tasks", path=tmp_path, answer_key=None)
    tasks = load_tasks(train, DataConfig(train=train, prompt_template="Task: {prompt}"))
    prompts = [one.messages[-1].content for one in tasks]
    assert prompts == [
        "Task: Sort the lines of words.txt into sorted.txt.\n",
        "Task: Write 42 into answer.txt.",
    ]
    assert [one.columns["task"] for one in tasks] == ["a", "b"]
    config = TerminalEnvConfig(name="terminal")
    assert [folder_of(one, config).path.name for one in tasks] == ["a", "b"]


def test_times_fit_into_each_other():
    from nemorl.config.run import ClusterConfig

    config = TerminalEnvConfig(name="terminal", test_seconds=55, sandbox={"wall_seconds": 61})
    problems = list(config.problems({"cluster": ClusterConfig()}))
    assert [problem.field for problem in problems] == ["sandbox.wall_seconds"]
    config = TerminalEnvConfig(name="terminal", test_seconds=55)
    assert [problem.field for problem in config.problems({"cluster": ClusterConfig()})] == ["test_seconds"]
    assert json.loads(config.sandbox.model_dump_json())["folders"][0] == "/app"
