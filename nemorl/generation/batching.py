"""Continuous batching: between any two steps finished sequences leave and waiting ones join.

waiting line ──▶ Scheduler (rows of the cache) ──▶ Runner (network) ──▶ Sampler ──▶ completions

The beginning of a prompt is copied from pages of the cache where these have it. A step may read drafts of the
tokens that follow; what is drawn for a row is kept as long as its draft was right. As a draw depends on its
logits and its position alone, the tokens are those of steps without drafts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nemorl.config.generation import BatchingConfig, PromptLookupConfig
from nemorl.device import cheap_rows, upload
from nemorl.models.kv_cache import Beginning, Prompt, PromptReader, Runner, StepTokens, padded_slots
from nemorl.trajectories import Int16Array, Int32Array, StopReason

from .drafts import DraftModel, DraftRow, ModelDrafts, PromptLookup, StepCost
from .sampling import Sampled, Sampler
from .tokens import RequestLimits, StopStringFinder, TokenBuffer
from .types import Completion, EngineStats, GenerationRequest, Progress, PromptScores, RequestRefused


@dataclass(eq=False)
class ActiveSequence:
    """A request and what was sampled for it so far; times are those of the engine's clock."""

    request: GenerationRequest
    arrival: float
    max_tokens: int  # prompt included; reached, the sequence ends with `length`
    stop_strings: StopStringFinder | None = None
    sampled: TokenBuffer = field(default_factory=TokenBuffer)
    last_sampled: float | None = None
    read_by: int | None = None  # the version that computed its keys and values; None for several
    reading: Prompt | None = None  # sequences with one have the same keys and values of their prompts
    drafts: PromptLookup | ModelDrafts | None = None

    def __post_init__(self) -> None:
        self.prompt_key = self.request.prompt.tobytes()
        self.expires = self.arrival + self.request.deadline_seconds

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.sampled)

    def tokens_read(self) -> Int32Array:
        """The tokens whose keys and values a running sequence has: all but the last, which is read next."""
        return np.concatenate([self.request.prompt, np.array(self.sampled.tokens[:-1], np.int32)])

    def append(
        self, tokens: Sequence[int], logprobs: Sequence[float], draft: Sequence[int], version: int, now: float
    ) -> tuple[int, StopReason | None]:
        """Take what was drawn after the last token and its `draft`, up to the first token that differs.

        Returns the number of tokens taken, and the stop reason if the sequence ends with them.
        """
        self.last_sampled = now
        for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=1):
            self.sampled.append(token, logprob, version)
            if (stop := self._stop(token)) is not None or count > len(draft) or draft[count - 1] != token:
                return count, stop
        raise ValueError(f"{len(tokens)} tokens were drawn with a draft of {len(draft)}, expected one more")

    def _stop(self, token: int) -> StopReason | None:
        found = self.stop_strings is not None and self.stop_strings.push(token)
        if found or token in self.request.stop_token_ids:
            return StopReason.STOP
        return StopReason.LENGTH if self.num_tokens >= self.max_tokens else None


def _draws(sequence: ActiveSequence) -> int:
    """Tokens drawn for a request so far, here and on engines before."""
    return sequence.request.sampled_before + len(sequence.sampled)


def _beginnings(sequences: Sequence[ActiveSequence]) -> list[Beginning]:
    """The prompts of the rows 0..n-1; none if no two of them were read together."""
    rows: dict[Prompt | None, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows.setdefault(sequence.reading, []).append(row)
    if len(rows) == len(sequences):
        return []
    return [Beginning(same, len(sequences[same[0]].request.prompt)) for same in rows.values()]


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

    def row(self, sequence: ActiveSequence) -> int:
        """The row of a sequence that runs."""
        return self._rows.index(sequence)

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
            self._rows[self.row(sequence)] = None
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

    Who shares the batch changes what is sampled for a request by rounding at most; where oneDNN computes and
    no prompt is read for several requests, not at all. Nothing ends a turn but what its request names, not
    even the model's own end token. Not thread-safe.
    """

    def __init__(
        self,
        runner: Runner,
        limits: RequestLimits,
        config: BatchingConfig,
        *,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        experts: Callable[[int, int, int], Int16Array] | None = None,
        score: Callable[[Int32Array], PromptScores] | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`experts` of a cache row, from a position to before another, where they are to be returned.

        `score` computes the logprobs of a prompt, where `limits` allow requests for them.
        """
        self.version = 0  # of the weights that sample
        self._runner, self._limits = runner, limits
        self._device, self._clock, self._experts, self._score = device, clock, experts, score
        self._reader = PromptReader(runner, config.max_cached_tokens)
        self._lookup = config.speculation if isinstance(config.speculation, PromptLookupConfig) else None
        self._draft_model = draft_model
        self._drafts_tokens = self._lookup is not None or draft_model is not None
        self._step_cost = StepCost(cheap_rows(device))
        self._scheduler = Scheduler(config.max_batch_size, runner.cache.fits)
        self._sequences: dict[str, ActiveSequence] = {}
        self._sampler: Sampler | None = None  # of the running batch; None when its members changed
        self._stats = EngineStats()
        self._suspended_at: float | None = None

    def suspend(self) -> None:
        """Let the cache be freed until `revive`; between two steps."""
        for _, sequence in self._scheduler.running():
            self._take_experts(sequence)
        self._suspended_at = self._clock()

    def revive(self, version: int) -> None:
        """Sample with the weights of `version`, which read running sequences again; deadlines have waited."""
        if running := list(self._scheduler.running()):
            self._reserve(running)
        self.weights_changed(version, restart=True)
        if self._suspended_at is not None:
            waited, self._suspended_at = self._clock() - self._suspended_at, None
            for sequence in self._sequences.values():
                sequence.expires += waited

    def weights_changed(self, version: int, *, restart: bool = False) -> None:
        """New weights sample from the next step on; with `restart` they read all running sequences again."""
        self.version = version
        self._reader.forget()
        running = list(self._scheduler.running())
        for _, sequence in running:
            sequence.read_by = version if restart else None
        if restart:
            self._reader.read([Prompt(sequence.tokens_read(), [row]) for row, sequence in running])

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
        running = list(self._scheduler.running())
        self._reserve(running)
        rows: dict[bytes, list[int]] = {}
        for row, sequence in admitted:
            rows.setdefault(sequence.prompt_key, []).append(row)
            sequence.read_by = self.version
            if sequence.request.scores_prompt and self._score is not None:
                sequence.sampled.prompt_scores = self._score(sequence.request.prompt)
            if self._lookup is not None:
                sequence.drafts = PromptLookup(self._lookup, sequence.request.prompt)
            elif self._draft_model is not None:
                sequence.drafts = self._draft_model.begin(sequence.request)
        prompts = {s.prompt_key: Prompt(s.request.prompt, rows[s.prompt_key]) for _, s in admitted}
        for _, sequence in admitted:
            sequence.reading = prompts[sequence.prompt_key]
        hidden = self._reader.read(list(prompts.values()))
        logits = self._runner.logits(hidden)
        sequences = [sequence for _, sequence in admitted]
        if len(prompts) < len(sequences):
            index = {key: position for position, key in enumerate(prompts)}
            logits = logits[[index[s.prompt_key] for s in sequences]]
        sampler = self._make_sampler(sequences)
        (bits,) = upload(self._device, sampler.uniform_bits([_draws(s) for s in sequences]))
        return self._take(sequences, [()] * len(sequences), sampler(logits, bits))

    def _reserve(self, running: Sequence[tuple[int, ActiveSequence]]) -> None:
        """Make room for what these have, in ascending rows."""
        self._runner.cache.reserve(running[-1][0] + 1, max(sequence.num_tokens for _, sequence in running))

    def _advance(self) -> list[Completion]:
        sources, targets = self._scheduler.compact()
        sequences = [sequence for _, sequence in self._scheduler.running()]
        if not sequences:
            return []
        length = max(s.num_tokens for s in sequences) - 1
        self._runner.cache.copy_rows(sources, targets, length)
        if self._draft_model is not None:
            self._draft_model.copy_rows(sources, targets, length)
        drafts = self._draft(sequences)
        began = self._clock()
        counts = [1 + len(draft) for draft in drafts]
        longest = max(map(sum, zip((s.num_tokens for s in sequences), map(len, drafts), strict=True)))
        self._runner.cache.reserve(len(sequences), longest)
        drafted = sum(counts) > len(sequences)
        if drafted:
            sampler = self._make_sampler(sequences, counts)
        else:
            sampler = self._sampler = self._sampler or self._make_sampler(sequences)
        tokens: list[int] = []
        positions: list[int] = []
        draws: list[int] = []
        for sequence, draft, count in zip(sequences, drafts, counts, strict=True):
            tokens += [sequence.sampled.tokens[-1], *draft]
            positions += range(sequence.num_tokens - 1, sequence.num_tokens - 1 + count)
            draws += range(_draws(sequence), _draws(sequence) + count)
        # A step has one upload and one download, since a GPU's host may wait for each.
        numbers = sampler.uniform_bits(draws)
        bits, *uploaded = upload(self._device, numbers, tokens, positions, padded_slots(counts))
        step = StepTokens(tokens, positions, counts, tuple(uploaded), _beginnings(sequences))
        logits = self._runner.decode(step)
        completions = self._take(sequences, drafts, sampler(logits, bits))
        if self._drafts_tokens:
            self._step_cost.update(sum(counts), self._clock() - began)
        return completions

    def _draft(self, sequences: Sequence[ActiveSequence]) -> list[list[int]]:
        """For each sequence tokens that may follow its last one, none beyond its end; empty without."""
        if not self._drafts_tokens:
            return [[] for _ in sequences]
        limits = [s.max_tokens - s.num_tokens - 1 for s in sequences]
        if self._draft_model is not None:
            rows = [
                DraftRow(s.request, s.sampled.tokens, limit, s.drafts)
                for s, limit in zip(sequences, limits, strict=True)
                if isinstance(s.drafts, ModelDrafts)  # all of them
            ]
            return self._draft_model.draft(rows, self._step_cost)
        share = self._step_cost.share(len(sequences))
        return [
            []
            if s.drafts is None or isinstance(s.drafts, ModelDrafts)
            else s.drafts.draft(limit, worth=share)
            for s, limit in zip(sequences, limits, strict=True)
        ]

    def _take(
        self, sequences: Sequence[ActiveSequence], drafts: Sequence[Sequence[int]], sampled: Sampled
    ) -> list[Completion]:
        """Append to each sequence what was drawn while its draft was right; completions of those that end."""
        tokens, logprobs = sampled.read()
        now, first = self._clock(), 0
        completions = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            drawn = slice(first, first + 1 + len(draft))
            first = drawn.stop
            count, stop = sequence.append(tokens[drawn], logprobs[drawn], draft, self.version, now)
            if sequence.drafts is not None:
                sequence.drafts.update(tokens[drawn][:count], drafted=len(draft), right=count - 1)
            self._stats.tokens_generated += count
            self._stats.drafted_tokens += len(draft)
            self._stats.accepted_tokens += count - 1
            if stop is not None:
                completions.append(self._end(sequence, stop))
        return completions

    def _make_sampler(
        self, sequences: Sequence[ActiveSequence], counts: Sequence[int] | None = None
    ) -> Sampler:
        """Of a step in which each sequence has `counts` rows of logits, or one."""
        requests = [sequence.request for sequence in sequences]
        if counts is not None:
            requests = [r for r, count in zip(requests, counts, strict=True) for _ in range(count)]
        return Sampler([r.sampling for r in requests], [r.seed for r in requests], self._device)

    def _end(self, sequence: ActiveSequence, stop: StopReason) -> Completion:
        del self._sequences[sequence.request.id]
        self._take_experts(sequence)
        if sequence.read_by == self.version and sequence.sampled.tokens:
            # The next turn of a conversation begins with it.
            self._reader.save(sequence.tokens_read(), self._scheduler.row(sequence))
        if self._draft_model is not None and isinstance(sequence.drafts, ModelDrafts):
            self._draft_model.keep(sequence.drafts, sequence.tokens_read(), self._scheduler.row(sequence))
        self._scheduler.remove(sequence)
        self._sampler = None
        # Without a token its time ends now.
        end = self._clock() if sequence.last_sampled is None else sequence.last_sampled
        return sequence.sampled.complete(sequence.request.id, stop, end - sequence.arrival)

    def _take_experts(self, sequence: ActiveSequence) -> None:
        """Copy the expert rows that are new; the last sampled token has none, it was not read yet."""
        if self._experts is None or not sequence.sampled.tokens:
            return
        row = self._scheduler.row(sequence)
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
        done.prompt_tokens, done.cached_tokens = self._reader.tokens_read, self._reader.tokens_copied
        self._reader.tokens_read = self._reader.tokens_copied = 0
        return done
