"""Continuous batching: between any two steps finished sequences leave and waiting ones join.

waiting line ──▶ Scheduler (rows of the cache) ──▶ Runner (network) ──▶ Sampler ──▶ completions

Every draw inverts a cumulative distribution at a uniform number, a hash of the request's seed and the token's
position: neither the batch nor what was drawn before changes it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemorl.device import sums_in_order, upload
from nemorl.trajectories import Int16Array, Int32Array, StopReason

from .tokens import RequestLimits, StopStringFinder, TokenBuffer
from .types import Completion, EngineStats, GenerationRequest, Progress, RequestRefused, SamplingParams

_FIRST_CANDIDATES = 1024  # tokens looked at before the whole vocabulary is sorted
_CANDIDATE_GROWTH = 8
_PREFILL_STEP = 8  # tokens; prompts are padded to multiples of this, or of an eighth of their size


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
        self._groups = [(draws[way], torch.tensor(of, device=device)) for way, of in rows.items() if of]

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
        if len(self._groups) == 1:
            return self._groups[0][0](logits, uniforms)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=self._device)
        for draw, rows in self._groups:
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
        by_rank = (torch.arange(ranked.shape[1], device=ranked.device) < self._top_k[rows]) | ~has_top_k
        # Top-p acts on what top-k left, renormalised.
        mass_of_top_k = ranked.masked_fill(~by_rank, float("-inf")).logsumexp(-1, keepdim=True)
        probabilities = (ranked - torch.where(has_top_k, mass_of_top_k, logsumexp)).exp()
        before = _cumulative(probabilities) - probabilities
        by_mass = (before < top_p) | (top_p >= 1)
        by_ratio = ranked >= ranked[:, :1] + self._log_min_p[rows]
        keep = by_rank & by_mass & by_ratio
        keep[:, 0] = True  # rounding must not leave a row with nothing
        return keep


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


class RowCache(Protocol):
    """Keys and values of running sequences, in rows."""

    def fits(self, rows: int, length: int) -> bool:
        """True if `rows` sequences of which the longest has `length` tokens can be held at one time."""

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens, keeping what the first `rows` hold."""

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt to compute once, and the cache rows that start with it."""

    tokens: Int32Array  # [P]
    rows: Sequence[int]

    @property
    def padded_length(self) -> int:
        """Tokens with padding; a function of the prompt alone, so that its result depends on nothing else."""
        step = max(_PREFILL_STEP, (1 << len(self.tokens).bit_length()) >> 4)
        return -(-len(self.tokens) // step) * step


class StepTokens(NamedTuple):
    """The token that each of the cache rows 0..n-1 reads next, and its position."""

    tokens: Sequence[int]
    positions: Sequence[int]
    uploaded: tuple[Tensor, Tensor]  # both on the device, [n] int64


class Runner(Protocol):
    """The network with its cache: turns tokens into logits."""

    @property
    def cache(self) -> RowCache: ...

    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Fill the cache rows of `prompts`; for each the input of `logits`."""

    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """Logits [n, vocabulary], float32, after `n` prompts, of what `prefill` gave for them."""

    def decode(self, step: StepTokens) -> Tensor:
        """One step of the cache rows 0..n-1: logits [n, vocabulary] after their tokens."""


@dataclass(eq=False)
class ActiveSequence:
    """A request and what was sampled for it so far; times are those of the engine's clock."""

    request: GenerationRequest
    arrival: float
    max_tokens: int  # prompt included; reached, the sequence ends with `length`
    stop_strings: StopStringFinder | None = None
    sampled: TokenBuffer = field(default_factory=TokenBuffer)
    last_sampled: float | None = None
    prompt_hidden: Tensor | None = None  # [hidden] at the prompt's last token

    def __post_init__(self) -> None:
        self.prompt_key = self.request.prompt.tobytes()
        self.expires = self.arrival + self.request.deadline_seconds

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.sampled)

    def tokens_read(self) -> Int32Array:
        """The tokens whose keys and values a running sequence has: all but the last, which is read next."""
        return np.concatenate([self.request.prompt, np.array(self.sampled.tokens[:-1], np.int32)])

    def append(self, token: int, logprob: float, version: int, now: float) -> StopReason | None:
        """Take a sampled token; the stop reason if the sequence ends with it."""
        self.sampled.append(token, logprob, version)
        self.last_sampled = now
        found = self.stop_strings is not None and self.stop_strings.push(token)
        if found or token in self.request.stop_token_ids:
            return StopReason.STOP
        return StopReason.LENGTH if self.num_tokens >= self.max_tokens else None


def _draws(sequence: ActiveSequence) -> int:
    """Tokens drawn for a request so far, here and on engines before."""
    return sequence.request.sampled_before + len(sequence.sampled)


class Scheduler:
    """A waiting line and the rows of the running batch. Admission is strictly by arrival."""

    def __init__(self, max_rows: int, fits: Callable[[int, int], bool]) -> None:
        self._max_rows = max_rows
        self._fits = fits
        self._waiting: deque[ActiveSequence] = deque()
        self._rows: list[ActiveSequence | None] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._rows) - self._rows.count(None)

    def running(self) -> Iterator[tuple[int, ActiveSequence]]:
        return ((row, sequence) for row, sequence in enumerate(self._rows) if sequence is not None)

    def add(self, sequence: ActiveSequence) -> None:
        self._waiting.append(sequence)

    def admit(self) -> list[tuple[int, ActiveSequence]]:
        """Give rows to those at the head of the line who fit now."""
        longest = max((sequence.max_tokens for _, sequence in self.running()), default=0)
        running = self.num_running
        free = [row for row, sequence in enumerate(self._rows) if sequence is None]
        admitted = []
        while self._waiting and running < self._max_rows:
            longest = max(longest, self._waiting[0].max_tokens)
            if not self._fits(max(running + 1, len(self._rows)), longest):  # so that no one is evicted later
                break
            sequence = self._waiting.popleft()
            if not free:
                free.append(len(self._rows))
                self._rows.append(None)
            row = free.pop(0)
            self._rows[row] = sequence
            running += 1
            admitted.append((row, sequence))
        return admitted

    def remove(self, sequence: ActiveSequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._rows[self._rows.index(sequence)] = None
            self._drop_free_end()

    def compact(self) -> tuple[list[int], list[int]]:
        """Close the gaps from the end, so that rows 0..n-1 run; rows to copy from, and those to copy to."""
        sources, targets = [], []
        while None in self._rows:
            gap = self._rows.index(None)
            self._rows[gap] = self._rows.pop()  # the last row is never a gap
            sources.append(len(self._rows))
            targets.append(gap)
            self._drop_free_end()
        return sources, targets

    def _drop_free_end(self) -> None:
        while self._rows and self._rows[-1] is None:
            self._rows.pop()


class BatchingEngine:
    """The synchronous core: requests go in by `add`, a `step` samples one token for every running sequence.

    Who shares the batch changes what is sampled for a request by rounding at most, and where oneDNN computes,
    not at all. Nothing ends a turn but what its request names, not even the model's own end token. Not
    thread-safe.
    """

    def __init__(
        self,
        runner: Runner,
        limits: RequestLimits,
        *,
        max_batch_size: int,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        experts: Callable[[int, int, int], Int16Array] | None = None,
    ) -> None:
        """`experts` of a cache row, from a position to before another, where they are to be returned."""
        self.version = 0  # of the weights that sample
        self._runner, self._limits = runner, limits
        self._device, self._clock, self._experts = device, clock, experts
        self._scheduler = Scheduler(max_batch_size, runner.cache.fits)
        self._sequences: dict[str, ActiveSequence] = {}
        self._sampler: Sampler | None = None  # of the running batch; None when its members changed
        self._stats = EngineStats()

    def weights_changed(self, version: int, *, restart: bool = False) -> None:
        """New weights sample from the next step on; with `restart` they read all running sequences again."""
        self.version = version
        running = list(self._scheduler.running())
        for _, sequence in running:
            sequence.prompt_hidden = None  # no sequence may start from a prompt that the old weights read
        if restart:
            texts = [Prompt(sequence.tokens_read(), [row]) for row, sequence in running]
            self._runner.prefill(texts)
            self._stats.prompt_tokens += sum(len(text.tokens) for text in texts)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def next_expiry(self) -> float | None:
        """The clock at the earliest deadline of all requests; None without requests."""
        return min((sequence.expires for sequence in self._sequences.values()), default=None)

    def add(self, request: GenerationRequest) -> None:
        """Put a request in line. Raises RequestRefused if it can never be served or its id is in flight."""
        self._limits.check(request)
        if request.id in self._sequences:
            raise RequestRefused(f"request {request.id!r} is in flight already; ids must be unique")
        finder = self._limits.stop_finder(request)
        sequence = ActiveSequence(request, self._clock(), self._limits.max_tokens(request), finder)
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> Completion | None:
        """End a request with what it has; None if it is not in flight (any more)."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, StopReason.ABORT)

    def expire(self) -> list[Completion]:
        now = self._clock()
        late = [sequence for sequence in self._sequences.values() if sequence.expires <= now]
        return [self._end(sequence, StopReason.ABORT) for sequence in late]

    def step(self, admit: bool = True) -> list[Completion]:
        """Sample one token for every running sequence, two for those that join; the requests that ended."""
        completions = self.expire()
        if admit:
            completions += self._admit()
        return completions + self._advance()

    def _admit(self) -> list[Completion]:
        """Let waiting sequences join, and sample their first tokens; no prompt is read twice."""
        admitted = self._scheduler.admit()
        if not admitted:
            return []
        self._sampler = None
        running, cache = list(self._scheduler.running()), self._runner.cache
        cache.reserve(running[-1][0] + 1, max(s.num_tokens for _, s in running))

        donors = {s.prompt_key: (row, s) for row, s in running if s.prompt_hidden is not None}
        copies: list[tuple[int, int, int]] = []  # row copied from, row copied to, tokens
        fresh: dict[bytes, list[tuple[int, ActiveSequence]]] = {}
        for row, sequence in admitted:
            if sequence.prompt_key in donors:
                donor_row, donor = donors[sequence.prompt_key]
                copies.append((donor_row, row, len(sequence.request.prompt)))
                sequence.prompt_hidden = donor.prompt_hidden
            else:
                fresh.setdefault(sequence.prompt_key, []).append((row, sequence))
        if copies:
            sources, targets, lengths = zip(*copies, strict=True)
            cache.copy_rows(sources, targets, max(lengths))
        prompts = [
            Prompt(members[0][1].request.prompt, [row for row, _ in members]) for members in fresh.values()
        ]
        for members, of_prompt in zip(fresh.values(), self._runner.prefill(prompts), strict=True):
            for _, sequence in members:
                sequence.prompt_hidden = of_prompt
        self._stats.prompt_tokens += sum(len(prompt.tokens) for prompt in prompts)

        sequences = [sequence for _, sequence in admitted]
        hidden = {s.prompt_key: s.prompt_hidden for s in sequences if s.prompt_hidden is not None}
        logits = self._runner.logits(list(hidden.values()))
        if len(hidden) < len(sequences):
            index = {key: position for position, key in enumerate(hidden)}
            logits = logits[[index[s.prompt_key] for s in sequences]]
        sampler = self._make_sampler(sequences)
        (bits,) = upload(self._device, sampler.uniform_bits([_draws(s) for s in sequences]))
        return self._take(sequences, sampler(logits, bits))

    def _advance(self) -> list[Completion]:
        sources, targets = self._scheduler.compact()
        sequences = [sequence for _, sequence in self._scheduler.running()]
        if not sequences:
            return []
        longest = max(sequence.num_tokens for sequence in sequences)
        self._runner.cache.copy_rows(sources, targets, longest - 1)
        self._runner.cache.reserve(len(sequences), longest)
        if self._sampler is None:
            self._sampler = self._make_sampler(sequences)
        tokens = [sequence.sampled.tokens[-1] for sequence in sequences]
        positions = [sequence.num_tokens - 1 for sequence in sequences]
        numbers = self._sampler.uniform_bits([_draws(sequence) for sequence in sequences])
        # A step has one upload and one download, since a GPU's host may wait for each.
        *uploaded, bits = upload(self._device, tokens, positions, numbers)
        logits = self._runner.decode(StepTokens(tokens, positions, (uploaded[0], uploaded[1])))
        return self._take(sequences, self._sampler(logits, bits))

    def _take(self, sequences: Sequence[ActiveSequence], sampled: Sampled) -> list[Completion]:
        """Append each sequence's next token; the completions of those that end with it."""
        tokens, logprobs = sampled.read()
        now = self._clock()
        completions = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            stop = sequence.append(token, logprob, self.version, now)
            if stop is not None:
                completions.append(self._end(sequence, stop))
        self._stats.tokens_generated += len(sequences)
        return completions

    def _make_sampler(self, sequences: Sequence[ActiveSequence]) -> Sampler:
        requests = [sequence.request for sequence in sequences]
        return Sampler([r.sampling for r in requests], [r.seed for r in requests], self._device)

    def _end(self, sequence: ActiveSequence, stop: StopReason) -> Completion:
        del self._sequences[sequence.request.id]
        self._take_experts(sequence)
        self._scheduler.remove(sequence)
        self._sampler = None
        # Without a token its time ends now.
        end = self._clock() if sequence.last_sampled is None else sequence.last_sampled
        return sequence.sampled.complete(sequence.request.id, stop, end - sequence.arrival)

    def _take_experts(self, sequence: ActiveSequence) -> None:
        """Copy the expert rows that are new; the last sampled token has none, it was not read yet."""
        if self._experts is None or not sequence.sampled.tokens:
            return
        row = next(row for row, other in self._scheduler.running() if other is sequence)
        first = sequence.request.routed_experts_from + sequence.sampled.num_expert_rows
        sequence.sampled.experts.append(self._experts(row, first, sequence.num_tokens - 1))

    def take_progress(self) -> list[Progress]:
        """Progress of running sequences, once one has as much as its request asks for, and others half."""
        shares = [
            (sequence.sampled.num_unreported / sequence.request.progress_tokens, sequence)
            for _, sequence in self._scheduler.running()
            if sequence.request.progress_tokens
        ]
        if all(share < 1 for share, _ in shares):
            return []
        due = [sequence for share, sequence in shares if share >= 0.5]
        for sequence in due:
            self._take_experts(sequence)
        return [sequence.sampled.take_progress(sequence.request.id) for sequence in due]

    def take_stats(self) -> EngineStats:
        done, self._stats = self._stats, EngineStats()
        return done
