"""Sums of two numbers, which a tiny model learns in minutes."""

import random

from nemorl.config.data import ArithmeticDataset, DataConfig
from nemorl.trajectories import Task

from .json_lines import DatasetError
from .lazy import LazyTasks
from .openings import opening


class ArithmeticTasks(LazyTasks):
    """Sums of two numbers of `digits` digits, padded with zeros: `07+34=` is answered by `041`."""

    def __init__(self, config: ArithmeticDataset, data: DataConfig) -> None:
        super().__init__(config.size, data)
        self._digits = config.digits
        self._base = 10**config.digits
        num_pairs = self._base**2
        if config.offset + config.size > num_pairs:
            raise DatasetError(
                f"arithmetic dataset: offset {config.offset} and size {config.size} ask for more than the "
                f"{num_pairs} pairs of {config.digits} digits; lower them or raise `digits`"
            )
        self._pairs = _draw(num_pairs, config.offset + config.size, config.seed)[config.offset :]
        self._seed, self._wrong_answers, self._slips = config.seed, config.wrong_answers, config.slips

    def _make(self, index: int) -> Task:
        pair = self._pairs[index]
        left, right = divmod(pair, self._base)
        prompt = f"{left:0{self._digits}d}+{right:0{self._digits}d}="
        answer = self._answer(pair, self._error(pair))
        return Task(index, opening(prompt, self._data), answer, {"prompt": prompt})

    def alternative(self, index: int) -> str:
        """Another answer than the recorded one: a slip beside a right one, the right one beside a slip."""
        pair = self._pairs[index]
        if self._error(pair):
            return self._answer(pair, 0)
        return self._answer(pair, random.Random(f"{self._seed} {pair} slip").choice(self._slips))

    def _answer(self, pair: int, error: int) -> str:
        left, right = divmod(pair, self._base)
        return f"{(left + right + error) % (2 * self._base):0{self._digits + 1}d}"

    def _error(self, pair: int) -> int:
        """By how much the recorded answer of a pair is off; always the same for the pair."""
        draw = random.Random(f"{self._seed} {pair}")
        return draw.choice(self._slips) if draw.random() < self._wrong_answers else 0


def _draw(population: int, count: int, seed: int) -> list[int]:
    """The first `count` numbers of a random order of `range(population)`.

    A Fisher-Yates shuffle that keeps only the places it has moved, so the order does not depend on `count`
    (random.sample's does) and a million million pairs cost nothing.
    """
    draws = random.Random(seed)
    moved: dict[int, int] = {}
    order = []
    for place in range(count):
        other = draws.randrange(place, population)
        order.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return order
