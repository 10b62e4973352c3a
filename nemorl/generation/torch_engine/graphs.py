"""CUDA graphs of decoding steps: what a GPU's host would launch kernel by kernel is launched once.

Rows and keys are padded to a few sizes, each with a graph. A graph reads its tokens and positions from
buffers that stay, and holds the addresses of the weights and of the cache: with others it is captured again.
Not run on hardware.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nemorl.models.kv_cache import CachedPass, ContinuedRows, KVCache, StepTokens

logger = logging.getLogger(__name__)

Compute = Callable[[Tensor, Tensor, CachedPass], Tensor]  # tokens, positions, cache -> logits [n, vocabulary]

_ROWS = (1, 2, 4, 8)  # and multiples of the last
_KEYS = 512  # and its doubles: each size more is a capture more, and keys that are masked take time
_WARM_UPS = 2  # steps before a capture, in which libraries set up what they may not in one


class DecodeGraphs:
    """Graphs of steps in which each row reads one token."""

    def __init__(self, cache: KVCache, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._cache, self._dtype = cache, dtype
        self._tokens = torch.zeros(padded_rows(max_rows), dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._layout: tuple[int, ...] = ()  # of the cache in these graphs
        self._pool: Any = None  # memory that all graphs share, as only one runs at a time
        self._fails = False

    def clear(self) -> None:
        """Drop all graphs: the weights are at other addresses."""
        self._graphs.clear()
        self._pool = None

    def logits(self, step: StepTokens, compute: Compute) -> Tensor | None:
        """Logits [n, vocabulary] of a step, valid until the next one; None if it must run without a graph."""
        count = len(step.counts)
        rows, keys = padded_rows(count), padded_keys(max(step.positions) + 1, self._cache.length)
        if self._fails or len(step.positions) != count or max(step.counts) > 1:
            return None
        if rows > min(self._cache.rows, len(self._tokens)):
            return None
        if self._cache.layout != self._layout:
            self.clear()
            self._layout = self._cache.layout
        # Rows that pad write to the first place of cache rows that hold no sequence.
        self._tokens[:rows].zero_()
        self._positions[:rows].zero_()
        self._tokens[:count].copy_(step.uploaded[0])
        self._positions[:count].copy_(step.uploaded[1])
        if (rows, keys) not in self._graphs:
            try:
                self._graphs[rows, keys] = self._capture(rows, keys, compute)
            except RuntimeError as error:
                self._fails = True
                self.clear()
                reason = str(error).partition("\n")[0]
                logger.warning("decoding without CUDA graphs: a step could not be captured (%s)", reason)
                return None
        graph, logits = self._graphs[rows, keys]
        graph.replay()
        return logits[:count]

    def _capture(self, rows: int, keys: int, compute: Compute) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        tokens, positions = self._tokens[:rows], self._positions[:rows]

        def run() -> Tensor:
            slots = self._cache.slots(torch.arange(rows, device=tokens.device), positions)
            continued = ContinuedRows(self._cache, range(rows), 1, positions, keys, self._dtype)
            return compute(tokens, positions, CachedPass(self._cache, slots, continued=[continued]))

        current, other = torch.cuda.current_stream(), torch.cuda.Stream()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(other)
        graph = torch.cuda.CUDAGraph()
        # Meanwhile another thread may receive weights: its calls must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = run()
        self._pool = self._pool or graph.pool()
        return graph, logits


def padded_rows(count: int) -> int:
    """The least number of rows, at least `count`, of which there are graphs."""
    most = _ROWS[-1]
    return next((rows for rows in _ROWS if rows >= count), -(-count // most) * most)


def padded_keys(longest: int, length: int) -> int:
    """The same of the keys that a row reads; a row of the cache has `length`."""
    keys = _KEYS
    while keys < longest:
        keys *= 2
    return min(keys, length)
