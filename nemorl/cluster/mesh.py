"""Coordinates of ranks in the parallel layout. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from nemorl.config.policy import LayoutConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """Ranks in Megatron's order tp-cp-ep-dp-pp: TP ranks are adjacent, stages farthest apart."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1

    @classmethod
    def of(cls, layout: LayoutConfig) -> "Mesh":
        """The mesh of a policy's layout."""
        return cls(
            layout.tensor_parallel_size,
            layout.pipeline_parallel_size,
            layout.data_parallel_size,
            layout.context_parallel_size,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._copy * self.data * self.pipeline

    @property
    def _copy(self) -> int:
        """Ranks of a stage that are given the same share of the batch."""
        return self.tensor * self.context

    def tp_rank(self, rank: int) -> int:
        """Position among the ranks that share each matrix."""
        return rank % self.tensor

    def cp_rank(self, rank: int) -> int:
        """Position among the ranks that share each sequence."""
        return rank // self.tensor % self.context

    def dp_rank(self, rank: int) -> int:
        """Which share of the batch the rank trains on."""
        return rank // self._copy % self.data

    def pp_rank(self, rank: int) -> int:
        """Which stage of the pipeline the rank holds."""
        return rank // (self._copy * self.data)

    @property
    def output_ranks(self) -> tuple[int, ...]:
        """One rank for each share of the batch, in order: the first that has it, of the last stage."""
        first = self._copy * self.data * (self.pipeline - 1)
        return tuple(first + self._copy * dp for dp in range(self.data))

    def spread(self, shards: Sequence[T]) -> list[T]:
        """For every rank its DP rank's shard; raises `ValueError` unless there is one shard for each."""
        if len(shards) != self.data:
            raise ValueError(f"{len(shards)} shards for a data-parallel size of {self.data}: give as many.")
        return [shards[self.dp_rank(rank)] for rank in range(self.world_size)]
