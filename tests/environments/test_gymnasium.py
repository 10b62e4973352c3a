"""Environments of gymnasium, compared with its own loop."""

import asyncio
import random
import threading
import time

import numpy as np
import pytest

from nemorl.config.library_environments import GymnasiumEnvConfig
from nemorl.errors import Problem
from nemorl.trajectories import Message, Step
from tests.environments.episodes import said, task
from tests.required import require_module

gymnasium = require_module("gymnasium")
from gymnasium import spaces  # noqa: E402


class Echo(gymnasium.Env):
    """Rewards the length of what is said, and shows it."""

    observation_space = spaces.Dict({"said": spaces.Text(8, min_length=0), "turn": spaces.Discrete(9)})

    def __init__(self, action_space=spaces.Text(8), delay: float = 0.0) -> None:  # noqa: B008
        self.action_space, self._turn, self._delay = action_space, 0, delay

    def reset(self, *, seed=None, options=None):
        return {"said": "", "turn": 0}, {}

    def step(self, action):
        time.sleep(self._delay)
        self._turn += 1
        return {"said": str(action), "turn": self._turn}, float(len(str(action))), False, self._turn == 3, {}


gymnasium.register("Echo-v0", Echo, disable_env_checker=True)


def shout(observation, env) -> str:
    return observation["said"].upper()


def spell(text: str, env) -> str:
    if not text:
        raise ValueError("Say something.")
    return "-".join(text)


def config(**fields) -> GymnasiumEnvConfig:
    return GymnasiumEnvConfig(**{"name": "gymnasium", "action_tag": None, "instructions": "", **fields})


def play(given: GymnasiumEnvConfig, *turns: str, seed: int = 0) -> tuple[str, list[Step]]:
    """The opening and the answers to these turns."""

    async def main() -> tuple[str, list[Step]]:
        environment = given.make_factory().create()
        (opening,) = await environment.reset(task("", "", seed=seed))
        try:
            return opening.content, [await environment.step(said(turn)) for turn in turns]
        finally:
            await environment.close()

    return asyncio.run(main())


def problems(**fields) -> list[Problem]:
    return list(config(**fields).problems({}))


def test_the_tag_holds_the_action_and_the_seed_decides_the_episode():
    actions = [2, 2, 1, 1, 2, 1, 0, 1, 3, 2]
    env = gymnasium.make("FrozenLake-v1")
    first, _ = env.reset(seed=5)
    own = [env.step(action)[:3] for action in actions]
    given = config(id="FrozenLake-v1", action_tag="action", instructions=None)
    opening, steps = play(given, *(f"so <action>{action}</action>" for action in actions), seed=5)
    assert opening == f"An action is an integer from 0 to 3.\nWrite it as <action>...</action>.\n{first}"
    ended = next((at for at, (_, _, over) in enumerate(own) if over), len(own))
    for step, (place, reward, over) in zip(steps[: ended + 1], own, strict=False):
        assert step == Step(() if over else (Message("user", str(place)),), {"gymnasium": reward}, over)


def test_numbers_are_read_and_written():
    env = gymnasium.make("Pendulum-v1")
    env.reset(seed=1)
    observation, reward, *_ = env.step(np.array([-1.5], np.float32))
    opening, (unread, wrong, step) = play(
        config(id="Pendulum-v1", instructions=None), "left", "3", "[-1.5]", seed=1
    )
    rule = "An action is numbers, separated by commas, from [-2] to [2]."
    assert opening.startswith(f"{rule}\n[")
    assert unread == wrong == Step((Message("user", rule),), done=False)
    assert step.rewards == {"gymnasium": pytest.approx(reward)}
    shown = [float(number) for number in step.messages[0].content.strip("[]").split(",")]
    assert shown == pytest.approx(observation.tolist(), rel=1e-3)


def test_texts_dicts_and_the_last_turn():
    opening, steps = play(config(id="Echo-v0", max_turns=2), "abc", "toolongtoread")
    assert opening == "said: \nturn: 0"
    assert steps[0] == Step((Message("user", "said: abc\nturn: 1"),), {"gymnasium": 3.0}, done=False)
    assert steps[1].done  # as the number of turns says
    assert steps[1].rewards == {}


@pytest.mark.parametrize(
    ("space", "right", "action", "wrong"),
    [
        (spaces.Discrete(3, start=4), "6", "6", "3"),
        (spaces.MultiDiscrete([2, 3]), "1, 2", "[1 2]", "2, 0"),
        (spaces.MultiBinary(3), "[1, 0, 1]", "[1 0 1]", "1, 0"),
        (spaces.Box(0, 1, (2, 2)), "0, .5, 1, 1e-1", "[[0.  0.5]\n [1.  0.1]]", "nan, 0, 0, 0"),
        (spaces.Discrete(3), "2", "2", "9" * 30),
    ],
)
def test_actions_of_each_space(space, right, action, wrong):
    _, (done, refused) = play(config(id="Echo-v0", options={"action_space": space}), right, wrong)
    assert done.messages[0].content == f"said: {action}\nturn: 1"
    assert refused.messages[0].content.startswith("An action is ")
    assert refused.rewards == {}


def test_functions_of_the_user():
    here = "tests.environments.test_gymnasium"
    given = config(id="Echo-v0", observe=f"{here}:shout", act=f"{here}:spell", instructions="Speak. ")
    opening, (spelled, silent) = play(given, "abc", "")
    assert opening == "Speak. "
    assert spelled == Step((Message("user", "A-B-C"),), {"gymnasium": 5.0}, done=False)
    assert silent == Step((Message("user", "Say something."),), done=False)
    assert list(given.problems({})) == []


def test_random_turns_end_an_episode():
    async def main() -> Step:
        environment = config(id="CartPole-v1", action_tag="action").make_factory().create()
        await environment.reset(task("", "", seed=0))
        draws, steps = random.Random(0), 0
        while not (last := await environment.step(said(environment.example_turn(draws)))).done:
            steps += 1
            assert last.rewards == {"gymnasium": 1.0}
        assert steps > 5
        await environment.close()
        return last

    assert asyncio.run(main()).rewards == {"gymnasium": 1.0}
    threads = [thread for thread in threading.enumerate() if thread.name == "environment"]
    for thread in threads:  # ends soon after `close`
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_slow_environment_does_not_hold_up_others():
    async def main() -> None:
        slow, fast = (
            config(id="Echo-v0", options={"delay": delay}).make_factory().create() for delay in (0.3, 0)
        )
        for environment in (slow, fast):
            await environment.reset(task("", "", seed=0))
        waiting = asyncio.ensure_future(slow.step(said("a")))
        await fast.step(said("b"))
        assert not waiting.done()
        await waiting
        for environment in (slow, fast):
            await environment.close()

    asyncio.run(main())


def test_what_cannot_be_made_is_a_problem():
    (unknown,) = problems(id="NoSuchThing-v7")
    assert unknown.field == "id"
    assert "NameNotFound" in unknown.fix
    (refused,) = problems(id="CartPole-v1", options={"wings": 2})
    assert "unexpected keyword argument 'wings'" in refused.fix
    (missing,) = problems(id="CartPole-v1", act="no_such_module:act")
    assert missing.field == "act"
    (space,) = problems(
        id="Echo-v0", instructions=None, options={"action_space": spaces.Graph(spaces.Discrete(2), None)}
    )
    assert (space.field, space.value) == ("act", None)
    assert "has no text by default; name a function" in space.fix


def test_a_task_without_a_seed_is_refused():
    environment = config(id="CartPole-v1").make_factory().create()
    with pytest.raises(ValueError, match="task 0 has no integer in column `seed`"):
        asyncio.run(environment.reset(task("7")))
