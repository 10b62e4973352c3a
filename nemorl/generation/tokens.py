"""One request in any engine: its limits, its seed, what was sampled for it, its stop strings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from nemorl.trajectories import Int16Array, StopReason

from .types import Completion, GenerationRequest, Progress, PromptScores, RequestRefused

Decode = Callable[[Sequence[int]], str]  # special tokens included

_CONTEXT_TOKENS = 5  # of the prompt: what a tokenizer does at the start of a text must not hit sampled tokens
_INCOMPLETE = "\ufffd"  # what a decoder shows for the bytes of an incomplete character
_GOLDEN = 0x9E3779B97F4A7C15  # odd: different positions of one request get different seeds
_MAX_SEED = 2**63


@dataclass(eq=False)
class TokenBuffer:
    """Tokens sampled for one request, with logprobs and weight versions, and how many were reported."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[Int16Array] = field(default_factory=list)  # consecutive rows; see `Completion`
    prompt_scores: PromptScores | None = None
    _num_reported: int = 0
    _experts_reported: int = 0  # arrays of `experts`

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_unreported(self) -> int:
        return len(self.tokens) - self._num_reported

    @property
    def num_expert_rows(self) -> int:
        return sum(map(len, self.experts))

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def extend(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        experts: Int16Array | None = None,
    ) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        if experts is not None:
            self.experts.append(experts)

    def add(self, report: Progress | Completion) -> None:
        self.extend(
            report.tokens.tolist(), report.logprobs.tolist(), report.versions.tolist(), report.routed_experts
        )

    def remaining(self, request: GenerationRequest) -> GenerationRequest:
        """What is left to sample of `request`: these tokens become the end of its prompt."""
        if not self.tokens:
            return request
        return replace(
            request,
            prompt=np.concatenate([request.prompt, np.array(self.tokens, np.int32)]),
            max_new_tokens=request.max_new_tokens - len(self),
            sampled_before=request.sampled_before + len(self),
            routed_experts_from=request.routed_experts_from + self.num_expert_rows,
        )

    def take_progress(self, request_id: str) -> Progress:
        report = self._from(self._num_reported, self._experts_reported, request_id)
        self._num_reported, self._experts_reported = len(self.tokens), len(self.experts)
        return report

    def complete(self, request_id: str, stop: StopReason, seconds: float) -> Completion:
        p = self._from(0, 0, request_id)
        values = (p.tokens, p.logprobs, p.versions)
        return Completion(p.id, *values, stop, seconds, p.routed_experts, self.prompt_scores)

    def _from(self, token: int, experts: int, request_id: str) -> Progress:
        return Progress(
            request_id,
            np.array(self.tokens[token:], np.int32),
            np.array(self.logprobs[token:], np.float32),
            np.array(self.versions[token:], np.int32),
            np.concatenate(self.experts[experts:]) if len(self.experts) > experts else None,
        )


class TextDecoder:
    """Decodes one sequence as it grows, at each step only the tokens since the last complete character."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        """`before` are tokens whose text was read already."""
        self._decode = decode
        self._tokens = list(before)
        self._context = 0  # first token that is decoded
        self._read = len(self._tokens)  # the text of tokens before this one was returned

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Text that is complete with these tokens; after the `last` ones, an incomplete character too."""
        self._tokens += tokens
        known = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        if not last and (text.endswith(_INCOMPLETE) or len(text) <= len(known)):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text[len(known) :]


class StopStringFinder:
    """Reports when a stop string is complete in the sampled text of one sequence."""

    def __init__(self, stop_strings: Sequence[str], prompt: Sequence[int], decode: Decode) -> None:
        self._stop_strings = tuple(stop_strings)
        self._text = TextDecoder(decode, prompt[-_CONTEXT_TOKENS:])
        self._tail = ""  # end of the sampled text, as long as a stop string may still begin in it

    def find(self, tokens: Sequence[int]) -> int | None:
        """Number of these next tokens up to the one that completes a stop string; None if none does."""
        return next((number for number, token in enumerate(tokens, start=1) if self.push(token)), None)

    def push(self, token: int) -> bool:
        """True if `token` completes a stop string."""
        new = self._text.push([token])
        if not new:
            return False
        self._tail += new
        if any(stop in self._tail for stop in self._stop_strings):
            return True
        beginnings = max(map(len, self._stop_strings)) - 1  # characters that may begin a stop string
        self._tail = self._tail[-beginnings:] if beginnings else ""
        return False


@dataclass(frozen=True)
class RequestLimits:
    """Limits beyond which a request can never be served."""

    vocab_size: int
    max_sequence_length: int  # tokens of prompt and completion
    max_kv_tokens: int
    decode: Decode | None = None  # required for stop strings only
    scores_prompts: bool = False  # the engine returns logprobs of prompts

    def max_tokens(self, request: GenerationRequest) -> int:
        """Tokens the sequence may reach, prompt included."""
        return min(len(request.prompt) + request.max_new_tokens, self.max_sequence_length)

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestRefused, with the limit that the request breaks."""
        prompt, new, longest = request.prompt, request.max_new_tokens, self.max_tokens(request)
        if len(prompt) == 0 or new < 1:
            problem = f"has {len(prompt)} prompt tokens and max_new_tokens={new}; both must be at least 1"
        elif prompt.min() < 0 or prompt.max() >= self.vocab_size:
            problem = f"has token ids from {prompt.min()} to {prompt.max()}; the model's vocabulary has"
            problem += f" {self.vocab_size}: is the tokenizer another model's?"
        elif len(prompt) >= self.max_sequence_length:
            limit = f"policy.max_sequence_length={self.max_sequence_length}"
            problem = f"has a prompt of {len(prompt)} tokens, which leaves nothing to sample below {limit};"
            problem += " shorten it or raise the limit"
        elif longest > self.max_kv_tokens:
            problem = f"may grow to {longest} tokens, and the KV cache holds"
            problem += f" generation.max_kv_tokens={self.max_kv_tokens}; raise it or lower max_new_tokens"
        elif request.stop_strings and self.decode is None:
            problem = "has stop strings, and there is no tokenizer.json to decode with; save the tokenizer in"
            problem += " the fast format or use stop_token_ids"
        elif request.scores_prompt and not self.scores_prompts:
            problem = "asks for logprobs of its prompt, which only the embedded engine returns; serve the"
            problem += " model with generation.backend: torch"
        else:
            return
        raise RequestRefused(f"request {request.id!r} {problem}")

    def stop_finder(self, request: GenerationRequest) -> StopStringFinder | None:
        """None without stop strings; one may begin in tokens that another replica sampled."""
        if not request.stop_strings or self.decode is None:
            return None
        tokens = request.prompt.tolist()
        length = len(tokens) - request.sampled_before
        finder = StopStringFinder(request.stop_strings, tokens[:length], self.decode)
        finder.find(tokens[length:])
        return finder


def engine_seed(request: GenerationRequest) -> int:
    """Seed for an engine that draws in order: a request that another replica began must not draw the same."""
    return (request.seed + _GOLDEN * request.sampled_before) % _MAX_SEED


def load_decoder(tokenizer_path: Path) -> Decode | None:
    """Tokens to text by the folder's `tokenizer.json`; None without one."""
    file = tokenizer_path / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = Tokenizer.from_file(str(file))  # transformers would cost every engine seconds and 400 MB
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
