"""Drafts of the tokens that may follow: by prompt lookup, a smaller model or a layer, while they save time.

A step computes logits after each token of a draft and keeps what it draws up to the first that differs. So
drafts change how many tokens a step gives, and never which.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from nemorl.config.generation import DraftModelConfig, MtpConfig, PromptLookupConfig
from nemorl.device import cheap_rows, prefill_tokens, upload
from nemorl.models.kv_cache import (
    CachedPass,
    KVCache,
    Prompt,
    PromptReader,
    Runner,
    StepTokens,
    in_passes,
    next_tokens,
    padded_slots,
    rest_of_prompts,
)
from nemorl.trajectories import Int32Array

from .sampling import Sampler
from .types import GenerationRequest

_ITEM = np.dtype(np.int32).itemsize
# Tokens that are counted as seen before the first draft, and the share of them that was right.
_PRIOR_TOKENS, _PRIOR_RATE = 2.0, 0.75
_KEPT_AFTER_NO_DRAFT = 0.97  # of what was seen or measured: after some time without drafts another is tried

_KEPT_AFTER_STEP = 0.99  # of the measured steps, so that the last hundred count
_PRIOR_SPREAD = 4.0  # squared rows: steps whose numbers of rows differ by less say little about a row's time
_PRIOR_STEPS = 2.0  # of a draft model, which count as measured before the first
# Tokens that a draft model reads of a row within a step; more are read as the rest of a prompt, in parts.
_MOST_BEHIND = 16


class Acceptance:
    """How often the drafts of one sequence were right; recent ones count more while none are made."""

    def __init__(self) -> None:
        self._right = self._seen = 0.0  # draft tokens, up to the first wrong one of each draft

    @property
    def rate(self) -> float:
        """Estimated probability that a draft token is right if those before it are."""
        return (self._right + _PRIOR_RATE * _PRIOR_TOKENS) / (self._seen + _PRIOR_TOKENS)

    def update(self, drafted: int, right: int) -> None:
        self._right += right
        self._seen += min(right + 1, drafted)

    def fade(self) -> None:
        """Count what was seen less, after a step without a draft."""
        self._right *= _KEPT_AFTER_NO_DRAFT
        self._seen *= _KEPT_AFTER_NO_DRAFT


class PromptLookup:
    """Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) in one sequence.

    The text is searched for the latest earlier occurrence of its last `max_match` tokens, or of fewer; what
    followed there is the draft.
    """

    def __init__(self, config: PromptLookupConfig, tokens: Int32Array) -> None:
        """`tokens` are the beginning of the text."""
        self._config = config
        self._text = bytearray(tokens.tobytes())
        self.acceptance = Acceptance()

    def draft(self, limit: int, *, worth: float) -> list[int]:
        """At most `limit` tokens, none that is right with less than the probability `worth`."""
        worthwhile = math.log(worth) / math.log(self.acceptance.rate) if worth else math.inf
        most = int(min(limit, self._config.max_tokens, worthwhile))
        if most < 1:
            self.acceptance.fade()
            return []
        text = self._text
        for match in range(self._config.max_match, self._config.min_match - 1, -1):
            place = self._find(text[-match * _ITEM :]) if len(text) > match * _ITEM else -1
            if place >= 0:
                # If less follows than is asked for, the text has begun to repeat itself.
                follows = np.frombuffer(bytes(text[place + match * _ITEM :]), np.int32)
                return np.resize(follows, most).tolist()
        return []

    def update(self, tokens: list[int], drafted: int, right: int) -> None:
        """Append sampled `tokens`, the first `right` of which were drafted."""
        self._text += np.array(tokens, np.int32).tobytes()
        self.acceptance.update(drafted, right)

    def _find(self, pattern: bytearray) -> int:
        """The last place of `pattern` before the end of the text, in bytes; -1 if there is none."""
        end = len(self._text) - 1
        while (place := self._text.rfind(pattern, 0, end)) > 0 and place % _ITEM:
            end = place + len(pattern) - 1
        return place


class StepCost:
    """How the seconds of decoding steps grow with their rows, `first + each * rows`, from those measured.

    A line of least squares over recent steps. While these had nearly the same number of rows its slope is the
    prior's. Before the first step the unit of time is arbitrary.
    """

    def __init__(self, cheap_rows: int) -> None:
        """A step of `cheap_rows` is expected to take twice as long as one without rows would."""
        self._prior = cheap_rows
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    @property
    def num_measured(self) -> float:
        """Steps that were measured, older ones counting less."""
        return self._weight

    def fade(self) -> None:
        """Count what was measured less, where a step was not made."""
        self._add(_KEPT_AFTER_NO_DRAFT, (0.0,) * 5)

    def update(self, rows: float, seconds: float) -> None:
        """Count a step."""
        self._add(_KEPT_AFTER_STEP, (1.0, rows, seconds, rows * rows, rows * seconds))

    @property
    def of_row(self) -> float:
        """Seconds of one row more; at least 0 and at most its share of a mean step."""
        if not self._seconds:
            return 1.0
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_rows**2
        together = self._products / self._weight - mean_rows * mean_seconds
        expected = mean_seconds / (mean_rows + self._prior)
        each = (together + _PRIOR_SPREAD * expected) / (spread + _PRIOR_SPREAD)
        return min(max(each, 0.0), mean_seconds / mean_rows)

    def of_step(self, rows: int) -> float:
        """Seconds of a step of `rows`."""
        if not self._seconds:
            return float(rows + self._prior)
        return self._seconds / self._weight + self.of_row * (rows - self._rows / self._weight)

    def _add(self, kept: float, new: Sequence[float]) -> None:
        """Add to the sums, of which this share is kept."""
        old = (self._weight, self._rows, self._seconds, self._squares, self._products)
        self._weight, self._rows, self._seconds, self._squares, self._products = (
            kept * before + now for before, now in zip(old, new, strict=True)
        )

    def share(self, rows: int) -> float:
        """The time of one row more, relative to a step's time for each of its `rows`; between 0 and 1."""
        return self.of_row * rows / self.of_step(rows)


class ModelDrafts:
    """What a draft model has read of one sequence, and how often it was right there."""

    def __init__(self, num_read: int = 0) -> None:
        self.acceptance = Acceptance()
        # Tokens whose keys and values its row holds; later ones there are of wrong drafts.
        self.num_read = num_read

    def update(self, tokens: list[int], drafted: int, right: int) -> None:
        """Take back what was read of a draft behind the first `right` tokens. The last was not read."""
        self.num_read += max(0, min(right, drafted - 1))
        self.acceptance.update(drafted, right)


class _MtpSequence(ModelDrafts):
    """Of drafts, keys and values are those of guessed hidden states: each token is read again."""

    def update(self, tokens: list[int], drafted: int, right: int) -> None:
        self.acceptance.update(drafted, right)


class DraftRow(NamedTuple):
    """A sequence of which the next tokens are to be drafted."""

    request: GenerationRequest
    sampled: Sequence[int]  # at least one token
    limit: int  # most tokens of its draft
    drafts: ModelDrafts

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.sampled)

    def tokens(self, start: int) -> Int32Array:
        """All tokens from the position `start` on."""
        sampled = np.array(self.sampled[max(0, start - len(self.request.prompt)) :], np.int32)
        return np.concatenate([self.request.prompt[start:], sampled])


class DraftModel:
    """A smaller model with a cache of its own, whose rows are those of the sequences that it drafts for.

    It draws with the filters and the uniform numbers with which the draft will be checked: the closer its
    distribution is to the model's, the more often both draw the same token. It reads a sequence when it first
    drafts for it, and then what was sampled since its last draft. Its weights stay as they were loaded.
    """

    def __init__(
        self,
        runner: Runner,
        config: DraftModelConfig | MtpConfig,
        *,
        max_cached_tokens: int,
        size: float,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`size`: its parameters relative to those of the model, which its first step is expected to cost."""
        self._runner, self._max_tokens, self._size = runner, config.max_tokens, size
        self._reader = PromptReader(runner, max_cached_tokens)
        self._device, self._clock = device, clock
        self._cost = StepCost(cheap_rows(device))
        self._rows = 0  # of the cache that may hold something

    def begin(self, request: GenerationRequest) -> ModelDrafts:
        """Draft for a sequence from now on, whose prompt the model has read."""
        return ModelDrafts()

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Follow sequences to other rows; `length` is at least that of the longest."""
        held = [(row, to) for row, to in zip(sources, targets, strict=True) if row < self._rows]
        if held:
            self._runner.cache.copy_rows([row for row, _ in held], [to for _, to in held], length)

    def keep(self, drafts: ModelDrafts, tokens: Int32Array, row: int) -> None:
        """Keep what was read of a sequence that ends, for those that begin with it."""
        self._reader.save(tokens[: drafts.num_read], row)

    def draft(self, rows: Sequence[DraftRow], step_cost: StepCost) -> list[list[int]]:
        """Drafts for the sequences of the cache rows 0..n-1, as far as they save time; empty ones else."""
        lengths = self._lengths(rows, step_cost)
        if not any(lengths):
            self._cost.fade()
            return [[] for _ in rows]
        longest = max(row.num_tokens + length for row, length in zip(rows, lengths, strict=True))
        self._runner.cache.reserve(len(rows), longest)
        self._rows = len(rows)
        self._catch_up(rows, lengths)
        began = self._clock()
        drafted, rows_read = self._decode(rows, lengths)
        drafts: list[list[int]] = [[] for _ in rows]
        numbers = iter(torch.cat(drafted).tolist())  # the one read of the device
        for depth in range(max(lengths)):
            for draft, length in zip(drafts, lengths, strict=True):
                if length > depth:
                    draft.append(next(numbers))
        for row, length in zip(rows, lengths, strict=True):
            if length:
                row.drafts.num_read = row.num_tokens
        steps = max(lengths)
        self._cost.update(rows_read / steps, (self._clock() - began) / steps)
        return drafts

    def _lengths(self, rows: Sequence[DraftRow], step_cost: StepCost) -> list[int]:
        """Tokens to draft for each sequence.

        One token more is drafted for those whose expected gain outweighs the time of its row in both models,
        relative to the tokens per second without it; and if together they outweigh the draft model's step.
        """
        own = self._cost
        known = own.num_measured / (own.num_measured + _PRIOR_STEPS)

        def drafting(measured: float, of_model: float) -> float:
            """Seconds in the draft model, from those measured in it and those of the model."""
            return known * measured + (1 - known) * self._size * of_model

        each = step_cost.of_row + drafting(own.of_row, step_cost.of_row)
        tokens, seconds = float(len(rows)), step_cost.of_step(len(rows))
        lengths = [0] * len(rows)
        for depth in range(1, self._max_tokens + 1):
            gains = {
                i: row.drafts.acceptance.rate**depth
                for i, row in enumerate(rows)
                if lengths[i] == depth - 1 and row.limit >= depth
            }
            gains = {i: gain for i, gain in gains.items() if gain * seconds > each * tokens}
            gain = sum(gains.values())
            more = drafting(own.of_step(len(gains)), step_cost.of_step(len(gains)))
            more += step_cost.of_row * len(gains)
            if gain * seconds <= more * tokens:
                break
            for i in gains:
                lengths[i] = depth
            tokens, seconds = tokens + gain, seconds + more
        for row, length in zip(rows, lengths, strict=True):
            if not length:
                row.drafts.acceptance.fade()
        return lengths

    def _catch_up(self, rows: Sequence[DraftRow], lengths: Sequence[int]) -> None:
        """Read prompts, and long parts of sequences for which nothing was drafted for some time."""
        drafted = [(place, row) for place, row in enumerate(rows) if lengths[place]]
        new: dict[bytes, list[int]] = {}
        for place, row in drafted:
            if not row.drafts.num_read:
                new.setdefault(row.request.prompt.tobytes(), []).append(place)
        self._reader.read([Prompt(rows[places[0]].request.prompt, places) for places in new.values()])
        for places in new.values():
            for place in places:
                rows[place].drafts.num_read = len(rows[place].request.prompt)
        rest = []
        for place, row in drafted:
            if row.num_tokens - row.drafts.num_read > _MOST_BEHIND:
                rest.append(Prompt(row.tokens(0)[:-1], [place], row.drafts.num_read))
                row.drafts.num_read = row.num_tokens - 1
        if rest:
            self._runner.prefill(rest)

    def _decode(self, rows: Sequence[DraftRow], lengths: Sequence[int]) -> tuple[list[Tensor], int]:
        """Draw the first token of each draft, then the second, and so on; and the number of tokens read.

        What is drawn stays on the device until all is: a step reads what the one before drew.
        """
        drawn: list[Tensor] = []
        members: list[int] = []
        sampler: Sampler | None = None
        num_read = 0
        for depth in range(max(lengths)):
            before, members = members, [i for i, length in enumerate(lengths) if length > depth]
            if sampler is None or len(members) < len(before):
                requests = [rows[i].request for i in members]
                sampler = Sampler([r.sampling for r in requests], [r.seed for r in requests], self._device)
            draws = [rows[i].request.sampled_before + len(rows[i].sampled) + depth for i in members]
            first = [rows[i].num_tokens + depth - 1 if drawn else rows[i].drafts.num_read for i in members]
            spans = [range(at, rows[i].num_tokens + depth) for i, at in zip(members, first, strict=True)]
            counts = [0] * len(rows)
            for i, span in zip(members, spans, strict=True):
                counts[i] = len(span)
            positions = [position for span in spans for position in span]
            if drawn:  # which of those before continue
                picked = [before.index(i) for i in members]
                text: list[int] = []
            else:  # after which token of each row
                picked = (np.cumsum([len(span) for span in spans]) - 1).tolist()
                text = [token for i, at in zip(members, first, strict=True) for token in rows[i].tokens(at)]
            bits, index, tokens, *placed = upload(
                self._device, sampler.uniform_bits(draws), picked, text, positions, padded_slots(counts)
            )
            if drawn:
                tokens = drawn[-1][index]
            logits = self._runner.decode(StepTokens(text, positions, counts, (tokens, *placed)))
            drawn.append(sampler(logits if drawn else logits[index], bits).tokens)
            num_read += len(positions)
        return drawn, num_read


class FurtherModel(Protocol):
    """A model with a layer for a further token.

    It takes hidden states [N, hidden], the tokens [N] after these, and positions [N] of the former.
    """

    @property
    def cache(self) -> KVCache: ...

    def read_further(self, hidden: Tensor, tokens: Tensor, positions: Tensor, cached: CachedPass) -> Tensor:
        """Outputs [N, hidden]; keys and values go to the cache."""

    def keep_further(self, hidden: Tensor, tokens: Tensor, positions: Tensor, cached: CachedPass) -> None:
        """Only the latter."""

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[N, vocabulary] of outputs."""


class MtpRunner:
    """A layer for a further token (MTP) as a draft model.

    With h[p] the model's hidden state at the position p and t the tokens, it reads t[p] next to h[p - 1], at
    the position p - 1, and says what follows t[p]; the first token it does not read. Its keys and values lie
    in the model's cache as one more layer, and the hidden states as another, so that both follow sequences to
    other rows and into pages. Where the model has not read t[p] yet, h[p] is what this layer made of it: so
    it drafts more than one token, as in vLLM 0.32.
    """

    def __init__(self, model: FurtherModel, *, states: int, device: torch.device, dtype: torch.dtype) -> None:
        """`states` is the layer of the cache that has the model's hidden states."""
        self.cache = model.cache
        self._model, self._states, self._device, self._dtype = model, states, device, dtype

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Fill rows with the keys and values of tokens that the model has read; nothing follows from them."""
        shifted = [Prompt(p.tokens[1:], p.rows, max(0, p.start - 1)) for p in prompts if p.num_new]
        shifted = [prompt for prompt in shifted if prompt.num_new]
        for batch in in_passes(shifted, prefill_tokens(self._device)):
            positions, cached = rest_of_prompts(self.cache, batch, self._device, self._dtype)
            tokens, rows = upload(
                self._device,
                np.concatenate([prompt.tokens[prompt.start :] for prompt in batch]),
                np.repeat([prompt.rows[0] for prompt in batch], [prompt.num_new for prompt in batch]),
            )
            hidden = self._hidden(rows, positions)
            self._model.keep_further(hidden, tokens, positions, cached)
        return []

    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """[n, vocabulary] of outputs."""
        return self._model.logits_of(torch.stack(list(hidden)))

    @torch.inference_mode()
    def decode(self, step: StepTokens) -> Tensor:
        tokens, positions, slots = step.uploaded
        own = step._replace(
            positions=[p - 1 for p in step.positions], uploaded=(tokens, positions - 1, slots)
        )
        rows, cached = slots // max(step.counts), next_tokens(self.cache, own, self._dtype)
        hidden = self._hidden(rows, positions - 1)
        output = self._model.read_further(hidden, tokens, positions - 1, cached)
        ends = [end - 1 for end, count in zip(accumulate(step.counts), step.counts, strict=True) if count]
        (last,) = upload(self._device, ends)
        self.cache.keep(self._states, self.cache.slots(rows[last], positions[last]), output[last])
        return self._model.logits_of(output)

    def _hidden(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[N, hidden] of the tokens at `positions` of cache `rows`, [N] each."""
        return self.cache.at(self._states, self.cache.slots(rows, positions))[0]


class MtpDrafts(DraftModel):
    """The layer for a further token that the model has, whose keys and values are in the model's cache.

    The model computes those of prompts when it reads these. Of a sequence the layer then reads what was
    sampled since its last draft, with the model's hidden states.
    """

    def begin(self, request: GenerationRequest) -> ModelDrafts:
        return _MtpSequence(len(request.prompt))

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Nothing: the model's rows are these."""

    def keep(self, drafts: ModelDrafts, tokens: Int32Array, row: int) -> None:
        """Nothing: the model keeps its hidden states, from which the rest is computed."""
