"""Guess a number; each wrong guess is answered with a hint.

    env      Guess the number from 1 to 100 …
    policy   <move>50</move>
    env      higher
    policy   <move>75</move>

The reward `guess_number` is `discount ** (guesses - 1)` for the number, else 0. Where `range_weight` is not
0, `guess_number_range` is the share of guesses that were possible after the hints so far.
"""

import random
import re

from nemorl.config.environment import GuessNumberEnvConfig

from .games import Game, GameFactory, Reply

REWARD, RANGE_REWARD = "guess_number", "guess_number_range"
MAX_DIGITS = 20


class GuessNumber(Game):
    def __init__(self, config: GuessNumberEnvConfig) -> None:
        super().__init__(config)
        self._config = config
        self._low, self._high = config.low, config.high  # what the hints leave
        self._num_possible = 0
        self._found = False

    def begin(self, draws: random.Random) -> str:
        config = self._config
        self._number = draws.randint(config.low, config.high)
        given = {"low": config.low, "high": config.high, "guesses": config.max_moves}
        return re.sub(r"\{(low|high|guesses)\}", lambda found: str(given[found[1]]), config.texts.opening)

    def play(self, move: str) -> Reply:
        texts = self._config.texts
        if not re.fullmatch(rf"-?[0-9]{{1,{MAX_DIGITS}}}", move):
            return Reply(texts.invalid)
        guess = int(move)
        self._num_possible += self._low <= guess <= self._high
        if guess == self._number:
            self._found = True
            return Reply("", over=True)
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return Reply(texts.higher)
        self._high = min(self._high, guess - 1)
        return Reply(texts.lower)

    def rewards(self) -> dict[str, float]:
        rewards = {REWARD: self._config.discount ** (self.num_moves - 1) if self._found else 0.0}
        if self._config.range_weight:
            rewards[RANGE_REWARD] = self._num_possible / self.num_moves
        return rewards

    def random_move(self, draws: random.Random) -> str:
        return str(draws.randint(self._low, self._high))


class GuessNumberFactory(GameFactory):
    game = GuessNumber
