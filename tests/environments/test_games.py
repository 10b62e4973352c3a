"""Games by hand: what they say, when they end, what they reward."""

import asyncio
import random
from collections import Counter

import pytest

from nemorl.config.data import DataConfig, SeedsDataset
from nemorl.config.environment import (
    GameEnvBase,
    GuessNumberEnvConfig,
    SlidingPuzzleEnvConfig,
    WordleEnvConfig,
)
from nemorl.data.datasets import load_tasks
from nemorl.environments.games import Game
from nemorl.environments.wordle import compared
from nemorl.trajectories import Message, Step, Task
from tests.environments.episodes import said, task

GAMES = (
    GuessNumberEnvConfig(name="guess_number", max_moves=40),
    SlidingPuzzleEnvConfig(name="sliding_puzzle", size=2, num_shuffles=3, max_moves=200),
    WordleEnvConfig(name="wordle", words=("crane", "slate", "house"), max_moves=60),
)


def started(config: GameEnvBase, seed: int = 0) -> tuple[Game, str]:
    """A game and its rules."""
    game = config.make_factory().create()
    (opening,) = asyncio.run(game.reset(task("", "", seed=seed)))
    return game, opening.content


def play(game: Game, *moves: str) -> list[Step]:
    async def main() -> list[Step]:
        return [await game.step(said(move)) for move in moves]

    return asyncio.run(main())


def number(**fields) -> tuple[Game, int]:
    """A game and its number, as a search finds it."""
    config = GuessNumberEnvConfig(name="guess_number", low=0, high=99, move_tag=None, max_moves=100)
    searched = started(config, seed=1)[0]
    found = next(guess for guess in range(100) if play(searched, str(guess))[0].done)
    return started(config.model_copy(update=fields), seed=1)[0], found


def test_hints_lead_to_the_number():
    game, right = number(max_moves=3, discount=0.5, range_weight=1.0)
    below, above = right - 1, right + 1
    steps = play(game, str(below), str(above), str(right))
    assert [step.messages for step in steps[:2]] == [
        (Message("user", "higher"),),
        (Message("user", "lower"),),
    ]
    assert steps[2] == Step(rewards={"guess_number": 0.25, "guess_number_range": 1.0})


def test_guesses_that_the_hints_exclude_and_no_guesses_are_outside_of_the_range():
    game, right = number(max_moves=4, range_weight=1.0)
    *steps, last = play(game, str(right - 1), str(right - 1), "ten", "100")
    assert [step.messages[0].content for step in steps] == ["higher", "higher", "That is no number."]
    assert last == Step(rewards={"guess_number": 0.0, "guess_number_range": 1 / 4})


def test_a_seed_determines_the_game():
    for config in GAMES:
        first, second = ([started(config, seed)[1] for seed in range(10)] for _ in range(2))
        assert first == second
    boards = {started(GAMES[1], seed)[1] for seed in range(10)}
    assert len(boards) > 1


def test_numbers_are_drawn_from_the_complete_range():
    config = GuessNumberEnvConfig(name="guess_number", low=3, high=6, move_tag=None)
    found = Counter()
    for seed in range(100):
        for guess in range(3, 7):
            found[guess] += play(started(config, seed)[0], str(guess))[0].done
    assert found.total() == 100
    assert min(found[guess] for guess in range(3, 7)) > 10


def test_tiles_slide_into_the_gap_until_they_are_ordered():
    config = SlidingPuzzleEnvConfig(name="sliding_puzzle", size=2, num_shuffles=1, move_tag=None, max_moves=3)
    game, opening = started(config)
    board = opening.split("\n", 1)[1]
    assert board in {"1 2\n_ 3", "1 _\n3 2"}
    moved = "3" if board == "1 2\n_ 3" else "2"
    (wrong,) = play(game, "9")
    assert (
        wrong.messages[0].content
        == f"The tiles next to the gap are {'1, 3' if moved == '3' else '1, 2'}.\n{board}"
    )
    assert play(game, moved) == [Step(rewards={"sliding_puzzle": 1.0})]


def test_a_puzzle_that_is_not_ordered_ends_with_the_moves():
    config = SlidingPuzzleEnvConfig(name="sliding_puzzle", move_tag=None, max_moves=2)
    assert play(started(config)[0], "0", "0")[1] == Step(rewards={"sliding_puzzle": 0.0})


@pytest.mark.parametrize(
    ("guess", "word", "signs"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "react", "YYG-Y"),
        ("eerie", "crane", "--Y-G"),  # the only e of the word is in its place
        ("allot", "llama", "YGY--"),  # both l of the word
        ("lolly", "hello", "-YGG-"),  # both l of the word are in their places
    ],
)
def test_letters_are_compared_with_those_of_the_word(guess, word, signs):
    assert compared(guess, word) == signs


def test_a_word_is_found_by_its_letters():
    config = WordleEnvConfig(name="wordle", words=("crane",), letters_weight=1.0, max_moves=3)
    game, opening = started(config)
    assert "word of 5 letters in 3 guesses" in opening
    steps = play(game, "<move>train</move>", "house", "<move> Crane </move>")
    assert steps[0].messages == (Message("user", "train: -GG-Y"),)
    assert steps[1].messages == (Message("user", "A guess has 5 letters."),)  # outside of the tag
    assert steps[2] == Step(rewards={"wordle": 1.0, "wordle_letters": 1.0})
    lost = play(started(config)[0], *["<move>brand</move>"] * 3)[-1]
    assert lost == Step(rewards={"wordle": 0.0, "wordle_letters": 3 / 5})


@pytest.mark.parametrize("config", GAMES, ids=lambda config: config.name)
def test_random_turns_end_every_game(config):
    draws = random.Random(0)
    game, _ = started(config)
    while not (last := play(game, game.example_turn(draws))[0]).done:
        assert last.messages
    assert last.rewards == {config.name: 1.0}  # with as many moves as these games allow


def test_the_opening_follows_the_text_of_the_task():
    train = SeedsDataset(name="seeds", size=3, seed=5)
    data = DataConfig(train=train, system_prompt="Play.", prompt_template="A game. {prompt}")
    given = load_tasks(train, data)
    assert [each.columns for each in given] == [{"seed": 5}, {"seed": 6}, {"seed": 7}]
    system, user = asyncio.run(GAMES[0].make_factory().create().reset(given[0]))
    assert system == Message("system", "Play.")
    assert user.content.startswith("A game. Find the number from 1 to 100 in 40 guesses")


def test_a_task_without_a_seed_is_refused():
    with pytest.raises(ValueError, match=r"task 0 has no integer in column `seed`"):
        asyncio.run(GAMES[0].make_factory().create().reset(Task(0, (Message("user", "x"),))))
