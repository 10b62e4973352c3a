"""Draws one token from each row of logits.

Every draw inverts a cumulative distribution at a uniform number, a hash of the request's seed and the token's
position: neither the batch nor what was drawn before changes it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemorl.device import sums_in_order

from .types import SamplingParams

_FIRST_CANDIDATES = 1024  # tokens looked at before the whole vocabulary is sorted
_CANDIDATE_GROWTH = 8


class Sampled(NamedTuple):
    tokens: Tensor  # [n] int64
    logprobs: Tensor  # [n] float32, of the distribution sampled; NaN for logits that are not finite

    def read(self) -> tuple[list[int], list[float]]:
        """Both on the host, in one copy. Raises FloatingPointError for logits that were not finite."""
        together = torch.stack((self.tokens, self.logprobs.double().view(torch.int64)))
        tokens, bits = together.cpu().numpy()
        logprobs = bits.view(np.float64)
        if np.isnan(logprobs).any():
            raise FloatingPointError(
                "the model's logits are not finite: its weights are broken, by a corrupt model folder or by "
                "training that diverged"
            )
        return tokens.tolist(), logprobs.tolist()


_Draw = Callable[[Tensor, Tensor], Sampled]  # (logits [n, vocabulary], uniform numbers [n, 1])


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position): two rounds of splitmix64 (https://prng.di.unimi.it)."""
    bits = _splitmix64(_splitmix64(seeds) ^ positions)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Sampler:
    """Samples for a fixed sequence of rows, each with its entry of `params` and `seeds`."""

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._seeds = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        temperatures = [[p.temperature or 1.0] for p in params]
        self._temperatures: Tensor | None = None  # [n, 1]
        if any(temperature != [1.0] for temperature in temperatures):
            self._temperatures = torch.tensor(temperatures, dtype=torch.float32, device=device)
        rows: dict[str, list[int]] = {"greedy": [], "filtered": [], "plain": []}
        for row, p in enumerate(params):
            filtered = p.top_k is not None or p.top_p < 1 or p.min_p > 0
            rows["greedy" if p.temperature == 0 else "filtered" if filtered else "plain"].append(row)
        draws: dict[str, _Draw] = {
            "greedy": _draw_greedy,
            "filtered": _Filters([params[row] for row in rows["filtered"]], device).draw,
            "plain": _draw_plain,
        }
        used = [(draws[way], of) for way, of in rows.items() if of]
        self._groups = [
            (draw, torch.tensor(of, device=device) if len(used) > 1 else None) for draw, of in used
        ]

    def uniform_bits(self, positions: Sequence[int]) -> NDArray[np.int64]:
        """The uniform numbers of each row, float64 read as integers; `positions` count its sampled tokens."""
        return uniform(self._seeds, np.array(positions, dtype=np.uint64)).view(np.int64)

    def __call__(self, logits: Tensor, uniform_bits: Tensor) -> Sampled:
        """Draw from `logits` [n, vocabulary], float32, with the uploaded `uniform_bits` [n].

        Logprobs are of the distribution after temperature and filters; of a greedy row, which draws from a
        point mass, of the unfiltered one at temperature 1.
        """
        uniforms = uniform_bits.view(torch.float64).unsqueeze(1)
        if self._temperatures is not None:
            logits = logits / self._temperatures
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=self._device)
        for draw, rows in self._groups:
            if rows is None:
                return draw(logits, uniforms)
            tokens[rows], logprobs[rows] = draw(logits[rows], uniforms[rows])
        return Sampled(tokens, logprobs)


def _draw_greedy(logits: Tensor, uniforms: Tensor) -> Sampled:
    largest, tokens = logits.max(-1)
    return Sampled(tokens, largest - logits.logsumexp(-1))


def _draw_plain(logits: Tensor, uniforms: Tensor) -> Sampled:
    probabilities = logits.softmax(-1)
    tokens = _invert(probabilities, uniforms)
    return Sampled(tokens.squeeze(1), probabilities.gather(1, tokens).log().squeeze(1))


class _Filters:
    """Top-k, top-p and min-p of some rows; a filter that is off keeps everything."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self._has_top_k = torch.tensor([[p.top_k is not None] for p in params], device=device)
        self._top_k = torch.tensor([[p.top_k or 0] for p in params], device=device)
        self._top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float32, device=device)
        self._log_min_p = torch.tensor([[p.min_p] for p in params], dtype=torch.float32, device=device).log()
        self._candidates = max([_FIRST_CANDIDATES, *(p.top_k or 0 for p in params)])

    def draw(self, logits: Tensor, uniforms: Tensor) -> Sampled:
        logsumexp = logits.logsumexp(-1, keepdim=True)
        sampled = Sampled(logits.new_zeros(len(logits), dtype=torch.int64), logits.new_zeros(len(logits)))
        vocabulary = logits.shape[-1]
        rows = torch.arange(len(logits), device=logits.device)
        count = min(self._candidates, vocabulary)
        # Sorting a vocabulary is slow and few rows need more than its beginning: those are tried again.
        while len(rows):
            ranked, candidates = logits[rows].topk(count, dim=-1)
            keep = self._keep(ranked, logsumexp[rows], rows)
            probabilities = ranked.masked_fill(~keep, float("-inf")).softmax(-1)
            ranks = _invert(probabilities, uniforms[rows])
            sampled.tokens[rows] = candidates.gather(1, ranks).squeeze(1)
            sampled.logprobs[rows] = probabilities.gather(1, ranks).log().squeeze(1)
            # What is kept is a prefix: where the last candidate fell out, nothing behind it can be in.
            rows = rows[keep[:, -1]] if count < vocabulary else rows[:0]
            count = min(count * _CANDIDATE_GROWTH, vocabulary)
        return sampled

    def _keep(self, ranked: Tensor, logsumexp: Tensor, rows: Tensor) -> Tensor:
        """Mask [n, k] of what stays of `ranked` [n, k], in descending order; `logsumexp` [n, 1] is of all."""
        has_top_k, top_p = self._has_top_k[rows], self._top_p[rows]
        last = (self._top_k[rows].clamp(1, ranked.shape[1]) - 1).long()
        by_rank = (ranked >= ranked.gather(1, last)) | ~has_top_k
        # Top-p acts on what top-k left, renormalised.
        mass_of_top_k = ranked.masked_fill(~by_rank, float("-inf")).logsumexp(-1, keepdim=True)
        probabilities = (ranked - torch.where(has_top_k, mass_of_top_k, logsumexp)).exp()
        before = _cumulative(probabilities) - probabilities
        by_mass = (before < top_p) | (top_p >= 1)
        by_ratio = ranked >= ranked[:, :1] + self._log_min_p[rows]
        keep = by_rank & by_mass & by_ratio
        keep[:, 0] = True  # rounding must not leave a row with nothing
        # With the last one all tokens that are as likely: the trainer knows logits, and not their order.
        return ranked >= ranked.masked_fill(~keep, float("inf")).amin(-1, keepdim=True)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds the uniform number: [n, k], [n, 1] -> [n, 1]."""
    cumulative = _cumulative(probabilities)
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum((uniforms * total).to(total.dtype), below_total)
    # Sums that are not finite find no index; the logprob of the last one is NaN, too.
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[-1] - 1)


def _cumulative(probabilities: Tensor) -> Tensor:
    # The CPU adds one by one in double and rounds at the end; a GPU adds in a tree, which in single precision
    # could decrease by an ulp and let a token of probability zero be drawn.
    dtype = torch.float32 if sums_in_order(probabilities.device) else torch.float64
    return probabilities.cumsum(-1, dtype=dtype)
