"""Find a word by guesses, whose letters are compared with its own.

    env      … G: right place, Y: another place, -: not in the word …
    policy   <move>crane</move>
    env      crane: -YG--

The reward `wordle` is 1 for the word, else 0. Where `letters_weight` is not 0, `wordle_letters` is the
largest share of letters in the right place that a guess had.
"""

import random
from collections import Counter

from nemorl.config.environment import WordleEnvConfig

from .games import Game, GameFactory, Reply

REWARD, LETTERS_REWARD = "wordle", "wordle_letters"
WORDS = (
    "about above actor adult after agent alarm album apple arena award beach bench birth block board brain "
    "bread brick bring brown brush chain chair chest chief child claim class clean clear climb clock close "
    "cloud coach coast count court cover cream crime cross crowd crown cycle dance delay depth doubt draft "
    "drama dream dress drink drive earth enemy enjoy entry error event faith false field fight final flame "
    "flash fleet floor focus force frame fresh front fruit giant glass globe grace grade grain grand grant "
    "grass green group guard guest guide happy heart horse hotel house human image index inner input issue "
    "joint judge knife large laugh layer learn level light limit local lunch major march match metal model "
    "money month motor mouth movie music night noise north novel nurse ocean offer order other owner paint "
    "panel paper party peace phase phone photo piece pilot pitch place plain plane plant plate point pound "
    "power press price pride prize proof queen quick quiet radio range ratio reply right river rough round "
    "route scale scene score sense shape share sharp sheet shift shirt shock sight skill sleep slope small "
    "smart smile smoke solid sound south space speed sport staff stage start state steam steel stone store "
    "storm story strip study sugar table taste teach theme thing title total touch tower track trade train "
    "treat trend trial truck trust truth uncle union unity value video visit voice waste watch water wheel "
    "white whole woman world wound write youth"
)


class Wordle(Game):
    def __init__(self, config: WordleEnvConfig) -> None:
        super().__init__(config)
        self._config, self._words = config, config.words or tuple(WORDS.split())
        self._word = ""
        self._num_right = 0  # letters in the right place, of the best guess

    def begin(self, draws: random.Random) -> str:
        self._word = draws.choice(self._words)
        tag = self._config.move_tag
        form = "" if tag is None else f" as <{tag}>word</{tag}>"
        return (
            f"Find the word of {len(self._word)} letters in {self._config.max_moves} guesses. Write a "
            f"guess{form}. The answer has a sign for each letter: G in the right place, Y in another place, "
            "- not in the word."
        )

    def play(self, move: str) -> Reply:
        guess = move.lower()
        if len(guess) != len(self._word) or not guess.isalpha():
            return Reply(f"A guess has {len(self._word)} letters.")
        signs = compared(guess, self._word)
        self._num_right = max(self._num_right, signs.count("G"))
        return Reply(f"{guess}: {signs}", over=guess == self._word)

    def rewards(self) -> dict[str, float]:
        rewards = {REWARD: float(self._num_right == len(self._word))}
        if self._config.letters_weight:
            rewards[LETTERS_REWARD] = self._num_right / len(self._word)
        return rewards

    def random_move(self, draws: random.Random) -> str:
        same_length = [word for word in self._words if len(word) == len(self._word)]
        return draws.choice(same_length)


def compared(guess: str, word: str) -> str:
    """A sign per letter. A letter of the word is used once, first for guesses in its place."""
    left = Counter(letter for letter, guessed in zip(word, guess, strict=True) if letter != guessed)
    signs = ""
    for letter, guessed in zip(word, guess, strict=True):
        if letter == guessed:
            signs += "G"
        elif left[guessed]:
            left[guessed] -= 1
            signs += "Y"
        else:
            signs += "-"
    return signs


class WordleFactory(GameFactory):
    game = Wordle
