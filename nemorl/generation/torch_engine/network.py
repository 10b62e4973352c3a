"""What continuous batching needs of a network and its cache."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .runner import Prompt


class RowCache(Protocol):
    """Keys and values of running sequences, in rows."""

    @property
    def num_tokens(self) -> int:
        """Tokens for which memory is held."""
        ...

    def fits(self, rows: int, length: int) -> bool:
        """Whether `rows` sequences of which the longest has `length` tokens can be held at one time."""
        ...

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens, keeping what the first `rows` hold."""
        ...

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""
        ...


class Runner(Protocol):
    """The network with its cache: turns tokens into logits."""

    @property
    def cache(self) -> RowCache:
        """Where keys and values stay."""
        ...

    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Fill the cache rows of `prompts`; for each what `logits` wants."""
        ...

    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """Logits [n, vocabulary], float32, after `n` prompts, of what `prefill` gave for them."""
        ...

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step of the cache rows 0..n-1: logits [n, vocabulary] after `tokens` at `positions`."""
        ...
