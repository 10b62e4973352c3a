"""Environments of aviary, compared with its own loop."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from nemorl.config.data import DataConfig
from nemorl.config.library_datasets import AviaryDataset
from nemorl.config.library_environments import AviaryEnvConfig
from nemorl.data.datasets import DatasetError, load_tasks
from nemorl.trajectories import Action, Message, Reply, Step, StopReason, Task, ToolCall
from tests.environments.episodes import task
from tests.required import require_module

core = require_module("aviary.core")


def tasks(dataset: str, **fields) -> list[Task]:
    train = AviaryDataset(name="aviary", dataset=dataset, **fields)
    return list(load_tasks(train, DataConfig(train=train, system_prompt="Use tools.")))


def turn(*calls: tuple[str, dict], content: str = "", errors: tuple[str, ...] = ()) -> Action:
    made = tuple(ToolCall(f"call-{at}", *call) for at, call in enumerate(calls))
    return Action(content, np.zeros(1, np.int32), StopReason.STOP, Reply(content, None, made, errors))


def play(on: Task, *turns: Action, **fields) -> tuple[tuple[Message, ...], list[Step], list[dict]]:
    async def main() -> tuple[tuple[Message, ...], list[Step], list[dict]]:
        environment = AviaryEnvConfig(name="aviary", **fields).make_factory().create()
        opening = await environment.reset(on)
        try:
            return opening, [await environment.step(each) for each in turns], list(environment.tools)
        finally:
            await environment.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Options of the library's GSM8k, from a folder."""
    require_module("aviary.envs.gsm8k")
    folder: Path = tmp_path_factory.mktemp("gsm8k")
    rows = ({"question": f"{left}+3?", "answer": f"It is\n#### {left + 3}"} for left in range(6))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"split": "train_full", "hf_source": str(folder)}


def test_results_and_rewards_are_those_of_the_library(sums):
    calls = (
        [("calculator", {"expr": "2+3"}), ("calculator", {"expr": "2**3"})],
        [("submit_answer", {"answer": "5"})],
    )

    async def own() -> list[tuple]:
        env = core.TaskDataset.from_name("gsm8k", **sums).get_new_env_by_idx(2)
        await env.reset()
        steps = []
        for turn_calls in calls:
            made = [
                core.ToolCall(id=f"call-{at}", function=core.ToolCallFunction(name=name, arguments=arguments))
                for at, (name, arguments) in enumerate(turn_calls)
            ]
            steps.append(await env.step(core.ToolRequestMessage(content="", tool_calls=made)))
        return steps

    given = tasks("gsm8k", options=sums)
    assert len(given) == 6
    opening, steps, tools = play(given[2], *(turn(*each) for each in calls))
    assert opening == (Message("system", "Use tools."), Message("user", "2+3?"))
    assert [tool["function"]["name"] for tool in tools] == ["calculator", "submit_answer"]
    assert tools[0]["function"]["parameters"]["required"] == ["expr"]
    (first, last), (own_first, own_last) = steps, asyncio.run(own())
    assert [(m.content, m.tool_call_id, m.name) for m in first.messages] == [
        (m.content, m.tool_call_id, m.name) for m in own_first[0]
    ]
    assert [message.content for message in first.messages] == ["5", "8"]
    assert (first.rewards, first.done) == ({"aviary": own_first[1]}, False)
    assert last == Step(rewards={"aviary": own_last[1]})
    assert own_last[1] == 1.0


def test_turns_that_name_arguments_wrong_are_answered():
    (given,) = tasks("dummy", size=1)
    wrong, unread, none, last = (
        turn(("print_story", {"text": "x"}), ("get_random_int", {})),
        turn(errors=("The call is no JSON.",)),
        turn(content="no call"),
        turn(("print_story", {"story": "x"})),
    )
    _, steps, _ = play(given, wrong, unread, none, last)
    error, drawn = steps[0].messages
    assert error.content == "Error: the arguments of print_story are story"
    assert (error.tool_call_id, drawn.tool_call_id) == ("call-0", "call-1")
    assert int(drawn.content) in range(1, 11)
    assert steps[1] == Step((Message("user", "The call is no JSON."),), done=False)
    assert steps[2].messages[0].content.startswith("No tool calls received")
    assert steps[3] == Step(rewards={"aviary": 1.0})


def test_the_last_turn_ends_the_episode():
    (given,) = tasks("dummy", size=1)
    _, steps, _ = play(given, turn(content="no"), turn(errors=("no JSON",)), max_turns=2)
    assert [step.done for step in steps] == [False, True]


def test_parts_of_a_task_set(sums):
    given = tasks("gsm8k", options=sums, offset=4)
    assert [each.columns["aviary_index"] for each in given] == [4, 5]
    assert play(given[1])[0][-1].content == "5+3?"
    with pytest.raises(DatasetError, match="ask for 9 tasks of 6"):
        tasks("gsm8k", options=sums, offset=4, size=5)
    with pytest.raises(DatasetError, match="the task set has no end; set size"):
        tasks("dummy")
    with pytest.raises(DatasetError, match="Unknown environment name: nothing"):
        tasks("nothing")


def test_validation_must_be_another_part():
    def problems(**fields) -> list[str]:
        train = AviaryDataset(name="aviary", dataset="dummy", size=10)
        other = AviaryDataset(name="aviary", **{"dataset": "dummy", **fields})
        return [one.field for one in DataConfig(train=train, validation=other).problems({})]

    assert problems(size=5, offset=9) == problems() == ["validation.offset"]
    assert problems(size=5, offset=10) == problems(dataset="gsm8k") == []


def test_tasks_of_another_dataset_are_refused():
    environment = AviaryEnvConfig(name="aviary").make_factory().create()
    with pytest.raises(ValueError, match="task 0 is not of aviary"):
        asyncio.run(environment.reset(task("7")))
