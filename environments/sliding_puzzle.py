"""Order the tiles of a board by sliding those next to the gap into it.

    env      … 1 2 3
               4 _ 6
               7 5 8
    policy   <move>5</move>

A move is the number of a tile. The reward `sliding_puzzle` is 1 for the ordered board, else 0.
"""

import random

from nemorl.config.environment import SlidingPuzzleEnvConfig

from .games import Game, GameFactory, Reply

REWARD = "sliding_puzzle"
RULES = (
    "Order the tiles of the board by rows, with the gap `_` at the end. A move is the number of a tile next "
    "to the gap, which slides into it."
)
GAP = 0


class SlidingPuzzle(Game):
    def __init__(self, config: SlidingPuzzleEnvConfig) -> None:
        super().__init__(config)
        self._config, self._size = config, config.size
        self._ordered = [*range(1, config.size**2), GAP]
        self._tiles = list(self._ordered)  # by rows

    def begin(self, draws: random.Random) -> str:
        before = None
        for _ in range(self._config.num_shuffles):
            # Not back, so that more moves are further away.
            before = draws.choice([tile for tile in self._movable() if tile != before])
            self._slide(before)
        if self._tiles == self._ordered:  # around a circle of moves
            self._slide(self._movable()[0])
        tag = self._config.move_tag
        how = "Write it alone." if tag is None else f"Write it as <{tag}>5</{tag}>."
        return f"{RULES} {how}\n{self._board()}"

    def play(self, move: str) -> Reply:
        if move not in map(str, self._movable()):
            movable = ", ".join(map(str, sorted(self._movable())))
            return Reply(f"The tiles next to the gap are {movable}.\n{self._board()}")
        self._slide(int(move))
        return Reply(self._board(), over=self._tiles == self._ordered)

    def rewards(self) -> dict[str, float]:
        return {REWARD: float(self._tiles == self._ordered)}

    def random_move(self, draws: random.Random) -> str:
        return str(draws.choice(self._movable()))

    def _movable(self) -> list[int]:
        row, column = divmod(self._tiles.index(GAP), self._size)
        next_to = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
        on_board = (place for place in next_to if all(0 <= at < self._size for at in place))
        return [self._tiles[row * self._size + column] for row, column in on_board]

    def _slide(self, tile: int) -> None:
        place, gap = self._tiles.index(tile), self._tiles.index(GAP)
        self._tiles[place], self._tiles[gap] = GAP, tile

    def _board(self) -> str:
        width = len(str(self._size**2 - 1))
        cells = [f"{tile or '_':>{width}}" for tile in self._tiles]
        rows = (cells[start : start + self._size] for start in range(0, len(cells), self._size))
        return "\n".join(" ".join(row) for row in rows)


class SlidingPuzzleFactory(GameFactory):
    game = SlidingPuzzle
