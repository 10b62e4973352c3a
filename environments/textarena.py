"""Games of TextArena. Each seat that the policy plays is a player of the episode, with its own trajectory.

    game     [GAME] You are Player 0 in Tic Tac Toe …
    policy   [4]
    game     [Player 1] [0] …

The reward `textarena` is the game's own for the player: mostly 1 for the winner, -1 for the loser and 0 for a
draw. The task's seed begins the game.
"""

import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import textarena
from textarena.envs.registration import ENV_REGISTRY

from nemorl.config.library_environments import EndpointOpponentConfig, TextArenaEnvConfig
from nemorl.errors import Problem
from nemorl.trajectories import (
    EnvironmentFactory,
    Episode,
    EpisodeEnvironment,
    Message,
    Model,
    Task,
)

from .chat_client import ChatClient
from .openings import opened, seed_of
from .own_thread import OwnThread
from .tags import last_tagged

REWARD = "textarena"
T = TypeVar("T")
_LISTED_MOVES = re.compile(r"(?:available|legal|valid) (?:moves|actions)\b(.*)", re.IGNORECASE | re.DOTALL)
_OPPONENT_SECONDS = 300.0  # of a turn
_RANDOM = threading.Lock()  # of the module `random`, whose state all games use


@dataclass(frozen=True)
class Seen:
    """What a player learns when its turn comes."""

    seat: int
    text: str  # of the game and of the others since its last turn
    turns: str  # of the others alone
    moves: tuple[str, ...]  # that the game lists; empty where it lists none


class Game:
    """One game, with its own state of the module `random`: it is the same for a seed, whatever else runs."""

    def __init__(self, config: TextArenaEnvConfig, seed: int) -> None:
        self._config = config
        self._random = random.Random(seed).getstate()
        env = self._alone(partial(textarena.make, config.game, **config.options))
        while isinstance(env, textarena.Wrapper):  # which format observations for one text a turn
            env = env.env
        self._env = env
        self._alone(partial(env.reset, num_players=config.num_players, seed=seed))

    def observe(self) -> Seen:
        seat, observed = self._alone(self._env.get_observation)
        before, after = self._config.action.split("{turn}")
        lines, turns, board = [], [], ""
        for sender, text, kind in observed:
            if kind is textarena.ObservationType.PLAYER_ACTION:
                if sender == seat:  # it is in the conversation already
                    continue
                turns.append(text.removeprefix(before).removesuffix(after))
            elif kind is textarena.ObservationType.GAME_BOARD:
                board = text
            name = "GAME" if sender == textarena.GAME_ID else f"Player {sender}"
            lines.append(f"[{name}] {text}")
        listed = _LISTED_MOVES.search(board)
        moves = re.findall(r"\[[^\[\]]+\]", listed[1]) if listed else []
        of_turns = (move.removeprefix(before).removesuffix(after) for move in moves)
        return Seen(seat, "\n".join(lines), "".join(turns), tuple(of_turns))

    def step(self, turn: str) -> bool:
        """Take the turn of the player who has seen the game last; True if the game is over."""
        done, _ = self._alone(partial(self._env.step, self._config.action.replace("{turn}", turn)))
        return bool(done)

    def rewards(self) -> dict[int, float]:
        """Of each seat, when the game is over."""
        rewards, _ = self._alone(self._env.close)
        return {seat: float(reward) for seat, reward in (rewards or {}).items()}

    def _alone(self, call: Callable[[], T]) -> T:
        with _RANDOM:
            others = random.getstate()
            random.setstate(self._random)
            try:
                return call()
            finally:
                self._random = random.getstate()
                random.setstate(others)


class Player(Protocol):
    async def turn(self, seen: Seen) -> str: ...


class _Talks:
    """A player with a conversation."""

    def __init__(self, config: TextArenaEnvConfig, task: Task) -> None:
        self._config, self._task = config, task
        self.messages: list[Message] = []

    def receive(self, seen: Seen) -> None:
        text = seen.text if self._config.observation == "messages" else seen.turns
        self.messages += (Message("user", text),) if self.messages else opened(self._task, text)

    def say(self, message: Message) -> str:
        """The turn in a message."""
        self.messages.append(message)
        tag = self._config.action_tag
        return message.content.strip() if tag is None else last_tagged(message.content, tag) or ""


class PolicyPlayer(_Talks):
    def __init__(self, config: TextArenaEnvConfig, task: Task, model: Model) -> None:
        super().__init__(config, task)
        self._model = model

    async def turn(self, seen: Seen) -> str:
        self.receive(seen)
        return self.say((await self._model.chat(self.messages)).message)


class EndpointPlayer(_Talks):
    """A model that does not train."""

    def __init__(self, config: TextArenaEnvConfig, task: Task, client: ChatClient) -> None:
        super().__init__(config, task)
        self._client = client

    async def turn(self, seen: Seen) -> str:
        """Raises EnvironmentLost if the server cannot be reached or fails, and ChatFailed."""
        self.receive(seen)
        text = await self._client.say([message.as_dict() for message in self.messages])
        return self.say(Message("assistant", text))


class RandomPlayer:
    def __init__(self, draws: random.Random) -> None:
        self._draws = draws

    async def turn(self, seen: Seen) -> str:
        """Raises ValueError if the game lists no moves."""
        if not seen.moves:
            raise ValueError(
                "the game lists no moves to draw from; set env.opponent.name to policy or endpoint"
            )
        return self._draws.choice(seen.moves)


class TextArenaEnvironment(EpisodeEnvironment):
    """All calls of a game run in one thread."""

    def __init__(self, config: TextArenaEnvConfig, opponent: ChatClient | None) -> None:
        """`opponent` plays the seats of an endpoint."""
        self._config, self._opponent, self._thread = config, opponent, OwnThread()

    async def run(self, task: Task, model: Model) -> Episode:
        """Raises ValueError for a task without a seed, and for a game in which the policy had no turn."""
        seed, call = seed_of(task), self._thread.call
        game = await call(Game, self._config, seed)
        players = self._players(task, model, seed)
        over = False
        while not over:
            seen = await call(game.observe)
            over = await call(game.step, await players[seen.seat].turn(seen))
        if not any(isinstance(player, PolicyPlayer) and player.messages for player in players):
            raise ValueError("the game was over before the policy had a turn: the opponent ended it")
        rewards = {seat: {REWARD: reward} for seat, reward in (await call(game.rewards)).items()}
        if self._config.num_players == 1:
            return Episode(rewards[0])
        trained = (seat for seat, player in enumerate(players) if isinstance(player, PolicyPlayer))
        return Episode(player_rewards={self._config.players[seat]: rewards[seat] for seat in trained})

    async def close(self) -> None:
        await self._thread.end(lambda: None)

    def _players(self, task: Task, model: Model, seed: int) -> list[Player]:
        """One for each seat."""
        config, names = self._config, self._config.players
        if not names:
            return [PolicyPlayer(config, task, model)]
        return [
            PolicyPlayer(config, task, model.player(name))
            if config.opponent.name == "policy" or seat == seed % len(names)
            else RandomPlayer(random.Random(f"{seed} {seat}"))
            if self._opponent is None
            else EndpointPlayer(config, task, self._opponent)
            for seat, name in enumerate(names)
        ]


class TextArenaFactory(EnvironmentFactory):
    def __init__(self, config: TextArenaEnvConfig) -> None:
        self.reward_weights = config.reward_weights
        self._config, self._opponent = config, None
        if isinstance(server := config.opponent, EndpointOpponentConfig):
            self._opponent = ChatClient(
                server.base_url,
                server.model,
                key=os.environ.get(server.api_key_env) if server.api_key_env else None,
                temperature=server.temperature,
                max_tokens=server.max_tokens,
                seconds=_OPPONENT_SECONDS,
            )

    def create(self) -> TextArenaEnvironment:
        return TextArenaEnvironment(self._config, self._opponent)

    async def close(self) -> None:
        if self._opponent is not None:
            await self._opponent.close()


def problems_of(config: TextArenaEnvConfig) -> Iterator[Problem]:
    """Why its game cannot be begun."""
    if config.game not in ENV_REGISTRY:
        yield Problem("game", config.game, "TextArena has no game of this id; correct it")
        return
    try:
        Game(config, 0)
    except AssertionError as error:  # how games refuse a number of players
        yield Problem("num_players", config.num_players, f"{error}; correct it")
    except Exception as error:  # noqa: BLE001  of the game or its options
        yield Problem(
            "options", config.options, f"the game raises {type(error).__name__}: {error}; correct them"
        )
