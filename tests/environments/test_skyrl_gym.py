"""Environments of skyrl-gym, compared with its own loop."""

import asyncio

import pytest

from nemorl.config.library_environments import SkyrlGymEnvConfig
from nemorl.trajectories import Message, Step, Task
from tests.environments.episodes import said, task
from tests.required import require_module

skyrl_gym = require_module("skyrl_gym")
from skyrl_gym.envs.base_text_env import BaseTextEnv  # noqa: E402

HERE = "tests.environments.test_skyrl_gym"


class Settings(BaseTextEnv):
    """Says what it was made with."""

    def __init__(self, env_config, extras):
        super().__init__()
        self.env_config, self.extras = env_config, extras

    def init(self, prompt):
        return [{"role": "system", "content": self.env_config.rules}, *prompt], {}

    def step(self, action):
        told = {"role": "user", "content": f"{self.extras['level']} {sorted(self.extras)}"}
        return {"observations": [told], "reward": 0.5, "done": False, "metadata": {}}


def config(**fields) -> SkyrlGymEnvConfig:
    return SkyrlGymEnvConfig(**{"name": "skyrl_gym", **fields})


def play(given: SkyrlGymEnvConfig, on: Task, *turns: str) -> tuple[tuple[Message, ...], list[Step]]:
    async def main() -> tuple[tuple[Message, ...], list[Step]]:
        environment = given.make_factory().create()
        opening = await environment.reset(on)
        try:
            return opening, [await environment.step(said(turn)) for turn in turns]
        finally:
            await environment.close()

    return asyncio.run(main())


def test_turns_and_rewards_are_those_of_the_library():
    turns = "#### 12", "so it is 72", "#### 72"
    extras = {"max_turns": 4, "reward_spec": {"method": "rule", "ground_truth": "72"}}
    own = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)
    outputs = [own.step(turn) for turn in turns]
    assert [output["reward"] for output in outputs] == [0.05, 0.0, 1.0]  # 0.2 / 4 for the form
    opening, steps = play(config(env="gsm8k_multi_turn", max_turns=4), task("72", "How many?"), *turns)
    assert opening == (Message("user", "How many?"),)
    for step, output in zip(steps, outputs, strict=True):
        assert step.rewards == {"skyrl_gym": output["reward"]}
        assert step.done == output["done"]
        assert [message.as_dict() for message in step.messages] == output["observations"]


def test_a_row_of_skyrl_names_its_environment():
    row = {"env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "8"}}
    _, (step,) = play(config(), task(None, "3+5?", **row), "#### 8")
    assert step == Step(rewards={"skyrl_gym": 1.0})
    with pytest.raises(ValueError, match="task 0 has no text in column `env_class`"):
        play(config(), task("8"))


def test_a_class_of_the_user_gets_settings_and_the_row():
    given = config(env=f"{HERE}:Settings", options={"rules": "Be brief."}, max_turns=7)
    opening, (step,) = play(given, task("8", "Go.", level=3), "x")
    assert opening == (Message("system", "Be brief."), Message("user", "Go."))
    told = Message("user", "3 ['level', 'max_turns', 'reward_spec']")
    assert step == Step((told,), {"skyrl_gym": 0.5}, done=False)


def test_unknown_environments_are_problems():
    (unknown,) = config(env="gsm9k").problems({})
    assert (unknown.field, "No registered env with id: gsm9k" in unknown.fix) == ("env", True)
    (missing,) = config(env="no_such_module:Env").problems({})
    assert "cannot import no_such_module" in missing.fix
    assert not list(config(env="gsm8k").problems({}))
