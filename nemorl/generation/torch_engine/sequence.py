"""One request on its way through the engine."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from nemorl.generation.types import Completion, GenerationRequest, Progress
from nemorl.trajectories import Int16Array, StopReason

from .stop_strings import StopStringFinder


@dataclass(eq=False)
class ActiveSequence:
    """A request and what was sampled for it so far; times are those of the engine's clock."""

    request: GenerationRequest
    arrival: float
    max_tokens: int  # prompt included; reached, the sequence ends with `length`
    stop_strings: StopStringFinder | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    last_sampled: float | None = None
    prompt_hidden: Tensor | None = None  # [hidden] at the prompt's last token
    num_reported: int = 0

    def __post_init__(self) -> None:
        self.prompt_key = self.request.prompt.tobytes()
        self.experts_reported = self.request.routed_experts_from  # position up to which its caller has them
        self.expires = self.arrival + self.request.deadline_seconds

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those sampled."""
        return len(self.request.prompt) + len(self.tokens)

    def append(self, token: int, logprob: float, version: int, now: float) -> StopReason | None:
        """Take a sampled token; the reason, if the sequence ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.last_sampled = now
        found = self.stop_strings is not None and self.stop_strings.push(token)
        if found or token in self.request.stop_token_ids:
            return StopReason.STOP
        return StopReason.LENGTH if self.num_tokens >= self.max_tokens else None

    @property
    def position(self) -> int:
        """Of the next token among all that were sampled for the request, here or before it came here."""
        return self.request.sampled_before + len(self.tokens)

    @property
    def num_unreported(self) -> int:
        """Sampled tokens that its caller, who asked for progress, has not heard of."""
        return len(self.tokens) - self.num_reported if self.request.progress_tokens else 0

    def report(self, experts: Int16Array | None) -> Progress:
        """What was sampled since the last report; `experts` are the rows from `experts_reported` on."""
        new = slice(self.num_reported, None)
        self.num_reported = len(self.tokens)
        self.experts_reported += 0 if experts is None else len(experts)
        return Progress(
            id=self.request.id,
            tokens=np.array(self.tokens[new], dtype=np.int32),
            logprobs=np.array(self.logprobs[new], dtype=np.float32),
            versions=np.array(self.versions[new], dtype=np.int32),
            routed_experts=experts,
        )

    def complete(self, stop: StopReason, now: float, experts: Int16Array | None) -> Completion:
        """The completion with what was sampled so far; `now` counts where nothing was."""
        return Completion(
            id=self.request.id,
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            stop=stop,
            seconds=(now if self.last_sampled is None else self.last_sampled) - self.arrival,
            routed_experts=experts,
        )
