"""Games that a seed begins: a move a turn, until the game is over or no moves are left."""

import random
from abc import abstractmethod
from dataclasses import dataclass

from nemorl.config.environment import GameEnvBase
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

from .openings import opened, seed_of
from .tags import last_tagged


@dataclass(frozen=True)
class Reply:
    text: str  # the next observation
    over: bool = False


class Game(Environment):
    """The task's column `seed` determines the game, its opening ends the task's last message."""

    def __init__(self, config: GameEnvBase) -> None:
        self._tag, self.moves_left, self._name = config.move_tag, config.max_moves, config.name
        self.num_moves = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Raises ValueError for a task without a seed."""
        return opened(task, self.begin(random.Random(f"{self._name} {seed_of(task)}")))

    async def step(self, action: Action) -> Step:
        self.moves_left -= 1
        self.num_moves += 1
        move = action.text.strip() if self._tag is None else last_tagged(action.text, self._tag)
        reply = self.play(move or "")
        if reply.over or self.moves_left == 0:
            return Step(rewards=self.rewards())
        return Step((Message("user", reply.text),), done=False)

    def example_turn(self, draws: random.Random) -> str:
        """A random turn that the game accepts, for `nemorl env`."""
        move = self.random_move(draws)
        return move if self._tag is None else f"<{self._tag}>{move}</{self._tag}>"

    @abstractmethod
    def begin(self, draws: random.Random) -> str:
        """Draw the game; its rules."""

    @abstractmethod
    def play(self, move: str) -> Reply:
        """Take a move, which may be any text; empty without one."""

    @abstractmethod
    def rewards(self) -> dict[str, float]:
        """Of the game as it ended."""

    @abstractmethod
    def random_move(self, draws: random.Random) -> str: ...


class GameFactory(EnvironmentFactory):
    game: type[Game]

    def __init__(self, config: GameEnvBase) -> None:
        self._config, self.reward_weights = config, config.reward_weights

    def create(self) -> Game:
        return self.game(self._config)
