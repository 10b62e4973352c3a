"""Continuous batching: between any two steps finished sequences leave and waiting ones join."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nemorl.generation.errors import RequestRefused
from nemorl.generation.types import Completion, EngineStats, GenerationRequest, Progress
from nemorl.trajectories import Int16Array, StopReason

from .limits import RequestLimits
from .network import Runner
from .runner import Prompt
from .sampling import Sampled, Sampler
from .scheduler import Scheduler
from .sequence import ActiveSequence
from .stop_strings import Decode, StopStringFinder


@dataclass
class _Work:
    tokens_generated: int = 0
    prompt_tokens: int = 0
    seconds_busy: float = 0.0
    peak_batch: int = 0


class BatchingEngine:
    """The synchronous core: requests go in by `add`, a `step` samples one token for every running sequence.

    What is sampled for a request depends on its prompt, its parameters, its seed and the weights; who shares
    the batch changes it by rounding at most, and where oneDNN computes, not at all. A sequence whose weights
    change in flight keeps the keys and values it has; `Completion.versions` tells its tokens apart. Nothing
    ends a turn but what its request names: the model's own end token is for the caller to pass. Not
    thread-safe.
    """

    def __init__(
        self,
        runner: Runner,
        limits: RequestLimits,
        *,
        max_batch_size: int,
        device: torch.device,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.monotonic,
        experts: Callable[[int, int, int], Int16Array] | None = None,
    ) -> None:
        """`decode` turns tokens into text and is wanted for stop strings only; `clock` counts seconds.

        `experts` are those of a cache row, from a position to before another, where they are to be returned.
        """
        self._experts = experts
        self._limits = limits
        self._runner = runner
        self._device = device
        self._decode = decode
        self._clock = clock
        self._scheduler = Scheduler(max_batch_size, runner.cache.fits)
        self._sequences: dict[str, ActiveSequence] = {}
        self._sampler: Sampler | None = None  # of the running batch; None when its members changed
        self._version = 0
        self._work = _Work()

    @property
    def version(self) -> int:
        """The version of the weights that sample."""
        return self._version

    def weights_changed(self, version: int) -> None:
        """Call the weights that sample from the next step on `version`."""
        self._version = version
        for _, sequence in self._scheduler.running():
            sequence.prompt_hidden = None  # nobody may start from a prompt that the old weights read

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences of the running batch."""
        return self._scheduler.num_running

    @property
    def kv_tokens(self) -> int:
        """Tokens for which the KV cache holds memory."""
        return self._runner.cache.num_tokens

    @property
    def next_expiry(self) -> float | None:
        """The clock at the earliest deadline of all requests; None without requests."""
        return min((sequence.expires for sequence in self._sequences.values()), default=None)

    def add(self, request: GenerationRequest) -> None:
        """Put a request in line. Raises RequestRefused if it can never be served or its id is in flight."""
        self._limits.check(request)
        if request.id in self._sequences:
            raise RequestRefused(f"request {request.id!r} is in flight already; ids must be unique")
        sequence = ActiveSequence(
            request,
            arrival=self._clock(),
            max_tokens=self._limits.max_tokens(request),
        )
        if request.stop_strings and self._decode is not None:
            tokens = request.prompt.tolist()
            own = len(tokens) - request.sampled_before
            sequence.stop_strings = StopStringFinder(request.stop_strings, tokens[:own], self._decode)
            for token in tokens[own:]:  # a stop string may have begun in what was sampled before
                sequence.stop_strings.push(token)
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> Completion | None:
        """End a request with what it has; None if it is not in flight (any more)."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, StopReason.ABORT)

    def abort_all(self) -> list[Completion]:
        """End every request with what it has."""
        return [self._end(sequence, StopReason.ABORT) for sequence in list(self._sequences.values())]

    def expire(self) -> list[Completion]:
        """End the requests whose deadline has passed."""
        now = self._clock()
        late = [sequence for sequence in self._sequences.values() if sequence.expires <= now]
        return [self._end(sequence, StopReason.ABORT) for sequence in late]

    def step(self, admit: bool = True) -> list[Completion]:
        """Sample one token for every running sequence; the requests that ended.

        Sequences that join (unless `admit` is false) get their first two tokens.
        """
        started = self._clock()
        completions = self.expire()
        if admit:
            completions += self._admit()
        completions += self._advance()
        self._work.seconds_busy += self._clock() - started
        return completions

    def _admit(self) -> list[Completion]:
        """Let waiting sequences join, and sample their first tokens."""
        admitted = self._scheduler.admit()
        if not admitted:
            return []
        self._sampler = None
        running = list(self._scheduler.running())
        self._runner.cache.reserve(self._scheduler.num_rows, max(s.num_tokens for _, s in running))
        self._read_prompts(admitted, running)
        sequences = [sequence for _, sequence in admitted]
        hidden = {s.prompt_key: s.prompt_hidden for s in sequences if s.prompt_hidden is not None}
        logits = self._runner.logits(list(hidden.values()))
        if len(hidden) < len(sequences):
            index = {key: position for position, key in enumerate(hidden)}
            logits = logits[[index[s.prompt_key] for s in sequences]]
        positions = [sequence.position for sequence in sequences]
        return self._take(sequences, self._make_sampler(sequences)(logits, positions))

    def _read_prompts(
        self, admitted: Sequence[tuple[int, ActiveSequence]], running: Sequence[tuple[int, ActiveSequence]]
    ) -> None:
        """Fill the rows of new sequences, reading each distinct prompt once at most.

        A prompt that a running sequence has, read by the same weights, is copied from its row.
        """
        donors = {s.prompt_key: (row, s) for row, s in running if s.prompt_hidden is not None}
        copies: list[tuple[int, int, int]] = []  # row copied from, row copied to, tokens
        fresh: dict[bytes, list[tuple[int, ActiveSequence]]] = {}
        for row, sequence in admitted:
            if sequence.prompt_key not in donors:
                fresh.setdefault(sequence.prompt_key, []).append((row, sequence))
                continue
            donor_row, donor = donors[sequence.prompt_key]
            copies.append((donor_row, row, len(sequence.request.prompt)))
            sequence.prompt_hidden = donor.prompt_hidden
        if copies:
            sources, targets, lengths = zip(*copies, strict=True)
            self._runner.cache.copy_rows(sources, targets, max(lengths))
        prompts = [
            Prompt(members[0][1].request.prompt, [row for row, _ in members]) for members in fresh.values()
        ]
        for members, hidden in zip(fresh.values(), self._runner.prefill(prompts), strict=True):
            for _, sequence in members:
                sequence.prompt_hidden = hidden
        self._work.prompt_tokens += sum(len(prompt.tokens) for prompt in prompts)

    def _advance(self) -> list[Completion]:
        """Sample the next token of every running sequence."""
        moves = self._scheduler.compact()
        sequences = [sequence for _, sequence in self._scheduler.running()]
        if not sequences:
            return []
        longest = max(sequence.num_tokens for sequence in sequences)
        self._runner.cache.copy_rows(moves.sources, moves.targets, longest - 1)
        self._runner.cache.reserve(len(sequences), longest)
        logits = self._runner.decode(
            [sequence.tokens[-1] for sequence in sequences],
            [sequence.num_tokens - 1 for sequence in sequences],
        )
        if self._sampler is None:
            self._sampler = self._make_sampler(sequences)
        self._work.peak_batch = max(self._work.peak_batch, len(sequences))
        return self._take(sequences, self._sampler(logits, [sequence.position for sequence in sequences]))

    def _take(self, sequences: Sequence[ActiveSequence], sampled: Sampled) -> list[Completion]:
        """Give each sequence its token; the completions of those that end with it."""
        now = self._clock()
        completions = []
        rows = zip(sequences, sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True)
        for sequence, token, logprob in rows:
            stop = sequence.append(token, logprob, self._version, now)
            if stop is not None:
                completions.append(self._end(sequence, stop))
        self._work.tokens_generated += len(sequences)
        return completions

    def _make_sampler(self, sequences: Sequence[ActiveSequence]) -> Sampler:
        requests = [sequence.request for sequence in sequences]
        return Sampler([r.sampling for r in requests], [r.seed for r in requests], self._device)

    def _end(self, sequence: ActiveSequence, stop: StopReason) -> Completion:
        del self._sequences[sequence.request.id]
        experts = self._experts_of(sequence, sequence.request.routed_experts_from)
        self._scheduler.remove(sequence)
        self._sampler = None
        return sequence.complete(stop, self._clock(), experts)

    def _experts_of(self, sequence: ActiveSequence, first: int) -> Int16Array | None:
        """Of its tokens from position `first` on, but for the last sampled one, which was not read yet."""
        if self._experts is None or not sequence.tokens:
            return None
        row = next(row for row, other in self._scheduler.running() if other is sequence)
        return self._experts(row, first, sequence.num_tokens - 1)

    def take_progress(self) -> list[Progress]:
        """What the running sequences have sampled, once one of them has as much as its request wants to hear.

        Those that are half-way there report with it, since a message costs more than its tokens.
        """
        sequences = [s for _, s in self._scheduler.running() if s.num_unreported]
        if not any(s.num_unreported >= s.request.progress_tokens for s in sequences):
            return []
        told = [s for s in sequences if 2 * s.num_unreported >= s.request.progress_tokens]
        return [s.report(self._experts_of(s, s.experts_reported)) for s in told]

    def take_stats(self) -> EngineStats:
        """What was done since the last call; prompts that were shared count once."""
        work, self._work = self._work, _Work()
        return EngineStats(
            version=self._version,
            tokens_generated=work.tokens_generated,
            prompt_tokens=work.prompt_tokens,
            seconds_busy=work.seconds_busy,
            peak_batch=work.peak_batch,
        )
