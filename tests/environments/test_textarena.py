"""Games of TextArena compared with the loop of TextArena."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.data import DataConfig, SeedsDataset
from nemorl.config.environment import ByTaskEnvConfig
from nemorl.config.facts import metric_names
from nemorl.config.library_environments import TextArenaEnvConfig
from nemorl.data.datasets import load_tasks
from nemorl.trajectories import Answer, EnvironmentLost, Episode, Message, StopReason
from tests.environments.episodes import task
from tests.required import require_module

textarena = require_module("textarena")

WON = ["[4]", "[0]", "[3]", "[1]", "[5]"]  # by player 0, in the middle row
Say = Callable[[str, list[Message]], str]  # from the name of a player and its messages


@dataclass
class Policy:
    """A model that says what a function says; it keeps what each player was shown."""

    say: Say
    player_name: str = ""
    shown: dict[str, list[str]] = field(default_factory=dict)

    def player(self, name: str) -> "Policy":
        return Policy(self.say, name, self.shown)

    async def chat(self, messages: list[Message]) -> Answer:
        self.shown.setdefault(self.player_name, []).append(messages[-1].content)
        text = self.say(self.player_name, messages)
        message = Message("assistant", text)
        return Answer(text, np.zeros(1, dtype=np.int32), StopReason.STOP, id="a", message=message)


def config(**fields: Any) -> TextArenaEnvConfig:
    return TextArenaEnvConfig.model_validate({"name": "textarena", "game": "TicTacToe-v0", **fields})


def scripted(*turns: str) -> Say:
    left = list(turns)
    return lambda _, __: left.pop(0)


async def play(
    given: TextArenaEnvConfig, say: Say, seed: int = 0, prompt: str = ""
) -> tuple[Episode, Policy]:
    factory, policy = given.make_factory(), Policy(say)
    environment = factory.create()
    try:
        return await environment.run(task(None, prompt, seed=seed), policy), policy
    finally:
        await environment.close()
        await factory.close()


def of_library(game: str, actions: list[str], num_players: int = 2) -> dict[int, float]:
    """The rewards of the library's own loop."""
    env = textarena.make(game)
    env.reset(num_players=num_players, seed=0)
    for action in actions:
        env.get_observation()
        env.step(action=action)
    return env.close()[0]


def test_each_player_is_shown_what_is_new_and_has_the_reward_of_the_library() -> None:
    episode, policy = asyncio.run(play(config(), scripted(*WON), prompt="Play. "))
    rewards = of_library("TicTacToe-v0", WON)
    assert rewards == {0: 1, 1: -1}
    assert episode.player_rewards == {f"player_{seat}": {"textarena": r} for seat, r in rewards.items()}
    first, second, third = policy.shown["player_0"]
    assert first.startswith("Play. [GAME] You are Player 0 in Tic Tac Toe.")
    assert second.startswith("[GAME] Player 0 placed their symbol (O) in cell 4.")  # and not its own turn
    assert "[Player 1] [0]\n[GAME] Player 1 placed their symbol (X) in cell 0." in second
    assert "You are Player" not in second + third
    assert "[Player 0] [4]" in policy.shown["player_1"][0]


def test_models_with_few_tokens_are_shown_turns_alone() -> None:
    given = config(action="[{turn}]", observation="turns")
    episode, policy = asyncio.run(play(given, scripted("4", "0", "3", "1", "5"), prompt="="))
    assert policy.shown == {"player_0": ["=", "0", "1"], "player_1": ["=4", "3"]}
    assert episode.player_rewards["player_0"] == {"textarena": 1.0}


def test_a_refused_turn_is_repeated_and_the_second_one_loses() -> None:
    episode, policy = asyncio.run(play(config(action_tag="move"), scripted("<move>[4]</move>", "[9]", "no")))
    assert "attempted an invalid move" in policy.shown["player_1"][1]
    assert episode.player_rewards == {"player_0": {"textarena": 1.0}, "player_1": {"textarena": -1.0}}


def test_a_random_opponent_takes_moves_that_the_game_lists() -> None:
    def first_listed(_: str, messages: list[Message]) -> str:
        return "[" + messages[-1].content.rpartition("Available Moves: '[")[2][0] + "]"

    async def main() -> list[Episode]:
        given = config(opponent={"name": "random"})
        games = await asyncio.gather(*(play(given, first_listed, seed=seed) for seed in range(20)))
        for seed, (_, policy) in enumerate(games):
            assert list(policy.shown) == [f"player_{seed % 2}"]
            assert "invalid" not in "".join(policy.shown[f"player_{seed % 2}"])
        return [episode for episode, _ in games]

    once, again = asyncio.run(main()), asyncio.run(main())
    assert once == again
    found = {reward["textarena"] for episode in once for reward in episode.player_rewards.values()}
    assert found == {1.0, -1.0} or found == {1.0, 0.0, -1.0}


def test_a_game_is_that_of_its_seed_though_others_run() -> None:
    given = config(game="PigDice-v0-short")

    def roll(_: str, messages: list[Message]) -> str:
        return "[hold]" if "Turn Total" in messages[-1].content and len(messages) % 3 == 0 else "[roll]"

    async def alone() -> dict[str, list[str]]:
        return (await play(given, roll, seed=3))[1].shown

    async def beside() -> list[dict[str, list[str]]]:
        games = await asyncio.gather(*(play(given, roll, seed=seed) for seed in (3, 4, 3, 5)))
        return [policy.shown for _, policy in games]

    random.seed(1)
    state = random.getstate()
    once, games = asyncio.run(alone()), asyncio.run(beside())
    assert games[0] == games[2] == once
    assert games[1] != once
    assert random.getstate() == state


def test_a_game_for_one_has_no_players() -> None:
    numbers = iter(range(1, 21))
    given = config(game="GuessTheNumber-v0", num_players=1)
    episode, policy = asyncio.run(play(given, lambda *_: f"[{next(numbers)}]"))
    assert (list(policy.shown), list(episode.rewards), episode.player_rewards) == ([""], ["textarena"], {})


def test_an_endpoint_plays_the_other_seat() -> None:
    asked: list[dict[str, Any]] = []
    turns = ["[0]", "[1]"]

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if not turns:
            return web.Response(status=503)
        return web.json_response({"choices": [{"message": {"content": turns.pop(0)}}]})

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        server = {"name": "endpoint", "base_url": f"http://127.0.0.1:{port}/v1", "model": "old"}
        given = config(opponent=server)
        try:
            episode, policy = await play(given, scripted("[4]", "[3]", "[5]"))
            assert episode.player_rewards == {"player_0": {"textarena": 1.0}}
            assert list(policy.shown) == ["player_0"]
            with pytest.raises(EnvironmentLost, match="answered with status 503"):
                await play(given, scripted("[4]"))
        finally:
            await runner.cleanup()

    asyncio.run(main())
    assert [len(body["messages"]) for body in asked] == [1, 3, 1]
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "[0]"}
    assert asked[0]["model"] == "old"


def test_a_game_that_the_opponent_ends_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> str:
        return "no move"

    monkeypatch.setattr("nemorl.environments.textarena.RandomPlayer.turn", refused)
    with pytest.raises(ValueError, match="over before the policy had a turn"):
        asyncio.run(play(config(opponent={"name": "random"}), scripted(), seed=1))


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({"game": "TicTacTo-v0"}, "game", "TextArena has no game of this id"),
        ({"num_players": 3}, "num_players", "The number of players has to be 2"),
        ({"options": {"color": "red"}}, "options", "the game raises TypeError"),
        ({"action": "[]"}, "action", "the turn has no place in it"),
        (
            {"num_players": 1, "opponent": {"name": "random"}, "game": "GuessTheNumber-v0"},
            "opponent.name",
            "is 1",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(fields: dict[str, Any], field: str, problem: str) -> None:
    (found,) = config(**fields).problems({})
    assert found.field == field
    assert problem in found.fix


def test_metrics_of_its_players_can_be_named() -> None:
    counts = {"num_steps": 1, "num_prompts_per_step": 1, "num_generations_per_prompt": 2}
    algorithm = OnlineConfig.model_validate({"name": "grpo", **counts, "validation": {"at_end": True}})
    train = SeedsDataset(name="seeds", size=5, columns={"env": "games", "seed": 9})
    data = DataConfig(train=train, validation=SeedsDataset(name="seeds", size=5, seed=5))
    env = ByTaskEnvConfig(name="by_task", environments={"games": config()})
    names = metric_names(algorithm, env, (), data)
    for prefix in ("", "validation/"):
        assert {f"{prefix}players/player_{seat}/reward" for seat in range(2)} <= names
    assert [task.columns for task in load_tasks(train, data)][2] == {"env": "games", "seed": 2}
