"""Context parallelism: which tokens of a sequence a rank computes.

Causal attention costs a token more, the later it stands. So that all ranks have equal work, a sequence is cut
into twice as many chunks as there are ranks, and rank r of R takes chunk r and chunk 2R - 1 - r.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextShare:
    """A rank's part of every sequence; by default the whole."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # of the ranks that share sequences

    @property
    def num_chunks(self) -> int:
        """Chunks of a sequence, all equally long: its length has to be a multiple of this."""
        return 2 * self.size if self.size > 1 else 1

    @property
    def chunks(self) -> tuple[int, ...]:
        """Numbers of the chunks that the rank takes, in their order."""
        return (self.rank, self.num_chunks - 1 - self.rank) if self.size > 1 else (0,)

    def places(self, lengths: Sequence[int]) -> Tensor:
        """Where the rank's tokens stand in sequences of `lengths`, laid end to end: [tokens / size]."""
        if self.size == 1:
            return torch.arange(sum(lengths))
        parts, start = [], 0
        for length in lengths:
            chunk = length // self.num_chunks
            parts += [torch.arange(chunk) + start + number * chunk for number in self.chunks]
            start += length
        return torch.cat(parts)

    def order(self, lengths: Sequence[int]) -> Tensor:
        """Where each token of such sequences stands when the ranks' shares are laid end to end: [tokens]."""
        shares = [ContextShare(rank, self.size).places(lengths) for rank in range(self.size)]
        return torch.cat(shares).argsort()
