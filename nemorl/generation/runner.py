"""The network that an engine batches over, and how it reads prompts: none that pages hold is read again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from nemorl.models.kv_cache import PAGE_TOKENS, PrefixIndex, PrefixKey, Prompt, StepTokens
from nemorl.trajectories import Int32Array


class RowCache(Protocol):
    """Keys and values of running sequences, in rows."""

    def fits(self, rows: int, length: int) -> bool:
        """True if `rows` sequences of which the longest has `length` tokens can be held at one time."""

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens, keeping what the first `rows` hold."""

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""

    def save_pages(self, row: int, first: int, pages: Sequence[int], num_pages: int) -> None:
        """Copy the tokens of a row from the position `first` on to `pages`, of at most `num_pages`."""

    def load_pages(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Copy `pages`, which were saved, to the beginnings of `rows`."""


class Runner(Protocol):
    """The network with its cache: turns tokens into logits."""

    @property
    def cache(self) -> RowCache: ...

    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Fill the cache rows of `prompts`; for each the input of `logits`."""

    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """Logits [n, vocabulary], float32, after `n` prompts, of what `prefill` gave for them."""

    def decode(self, step: StepTokens) -> Tensor:
        """One step of the cache rows 0..n-1: logits [N, vocabulary] after each of their tokens."""


class PromptReader:
    """Reads prompts into the rows of a cache, and keeps pages of what was read for those that begin so."""

    def __init__(self, runner: Runner, max_cached_tokens: int) -> None:
        self._runner = runner
        self._prefixes = PrefixIndex(max_cached_tokens // PAGE_TOKENS)
        self.tokens_read = self.tokens_copied = 0  # of prompts

    def forget(self) -> None:
        """Give up all pages: the weights that computed them are replaced."""
        self._prefixes.clear()

    def read(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Read prompts, for each the input of `Runner.logits`.

        One waits for another that begins in the same way, and then begins with its pages.
        """
        hidden: dict[int, Tensor] = {}
        waiting = dict(enumerate(prompts))
        while waiting:
            together: dict[int, Prompt] = {}
            missing: set[PrefixKey] = set()
            for place, prompt in waiting.items():
                pages, following = self._prefixes.find(prompt.tokens)
                if following is None or following not in missing:
                    together[place] = replace(prompt, start=len(pages) * PAGE_TOKENS)
                    self._runner.cache.load_pages(pages, prompt.rows)
                    if following is not None:
                        missing.add(following)
            hidden |= zip(together, self._runner.prefill(list(together.values())), strict=True)
            for place, prompt in together.items():
                self.save(prompt.tokens, prompt.rows[0])
                del waiting[place]
            self.tokens_read += sum(prompt.num_new for prompt in together.values())
            self.tokens_copied += sum(prompt.start for prompt in together.values())
        return [hidden[place] for place in range(len(prompts))]

    def save(self, tokens: Int32Array, row: int) -> None:
        """Keep the pages of `tokens`, which a cache row holds, for sequences that begin with them."""
        first, pages = self._prefixes.add(tokens)
        self._runner.cache.save_pages(row, first * PAGE_TOKENS, pages, self._prefixes.num_pages)
