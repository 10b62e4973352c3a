"""Requests, completions, state and errors: what every engine takes and returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from nemorl.errors import RunError
from nemorl.trajectories import Float32Array, Int16Array, Int32Array, StopReason


@dataclass(frozen=True)
class SamplingParams:
    """The distribution to sample from: logits / temperature, then top-k, then top-p, then min-p."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class GenerationRequest:
    """One turn to sample. `seed` alone, not the batch it shares, decides what is drawn."""

    id: str
    prompt: Int32Array  # [P]
    sampling: SamplingParams
    max_new_tokens: int
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    deadline_seconds: float = 600.0  # from arrival; past it the turn ends with `abort`
    conversation: str = ""  # turns of one conversation share it, so that a router keeps them on one replica
    progress_tokens: int = 0  # report whenever about this many tokens more are sampled; 0 never does
    # Tokens at the end of `prompt` that a lost replica sampled: draws and stop strings continue from there.
    sampled_before: int = 0
    routed_experts_from: int = 0  # position of the first token whose experts an engine returns, if any
    scores_prompt: bool = False  # return logprobs of the prompt's tokens; refused where an engine cannot


@dataclass(frozen=True)
class PromptScores:
    """Logprobs of a prompt's tokens after the first, each given those before it, at temperature 1.

    `p` is the number of prompt tokens less one.
    """

    logprobs: Float32Array  # [p]
    top_tokens: Int32Array  # [p] the most probable one in each place
    top_logprobs: Float32Array  # [p]


@dataclass(frozen=True)
class Completion:
    """What was sampled for one request. `n` tokens, the end token included."""

    id: str
    tokens: Int32Array  # [n]
    logprobs: Float32Array  # [n] of the distribution actually sampled
    versions: Int32Array  # [n] weights that sampled each token
    stop: StopReason
    seconds: float = 0.0  # from arrival to the last token
    # [m, layers with experts, experts of a token] chosen when each token was read, from `routed_experts_from`
    # on, prompt included; the last token was not read yet
    routed_experts: Int16Array | None = None
    prompt_scores: PromptScores | None = None  # where the request `scores_prompt`


@dataclass(frozen=True)
class Progress:
    """What was sampled for a request since its last report. `n` tokens, which its completion has again."""

    id: str
    tokens: Int32Array  # [n]
    logprobs: Float32Array  # [n]
    versions: Int32Array  # [n]
    routed_experts: Int16Array | None = None  # rows since the last report; see `Completion`


@dataclass(frozen=True)
class Refusal:
    """The end of a request that an engine began and then could not serve: nothing of it is an answer."""

    id: str
    reason: str


Report = Completion | Progress | Refusal  # an item of an engine's stream


@dataclass(frozen=True)
class EngineHealth:
    version: int
    running: int
    waiting: int
    paused: bool
    seconds_since_step: float  # or since it was last idle
    corruption: str | None = None  # why its requests wait until a complete refit
    queued: int = 0  # running or waiting requests that have no token yet


class Generator(Protocol):
    """A handle on one or more engines, as the turn loop sees it."""

    async def generate(
        self, request: GenerationRequest, on_progress: Callable[[Progress], None] | None = None
    ) -> Completion: ...


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine's process besides its section of the configuration."""

    model_path: Path
    tokenizer_path: Path
    max_sequence_length: int  # tokens of prompt and completion
    rank: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"  # the policy's, where the section names none
    threads: int | None = None  # CPU threads of the engine
    commit_seconds: float = 600.0  # limits how long the engine may take to pause for, or swap, new weights


@dataclass
class EngineStats:
    """What an engine did since it was last asked."""

    tokens_generated: int = 0
    prompt_tokens: int = 0  # of prompts that were read: those that requests shared count once
    cached_tokens: int = 0  # of prompts, whose keys and values were kept from others
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of drafts
    retries: int = 0  # of requests to a server that is not ours
    busy_seconds: float = 0.0  # in which requests ran
    seconds: float = 0.0  # since the last answer, or the first request


class RequestRefused(ValueError):
    """A request that can never be served; the message names the limit that it breaks."""


class EngineFailed(RuntimeError):
    """The engine died of an error, which is the cause; nothing it was asked for will arrive."""


class ReplicaLost(RuntimeError):
    """A replica answers nothing any more; the message is the cause."""


class NoReplicaLeft(RunError):
    """Every replica of a pool is lost."""

    def __init__(self, causes: Mapping[str, str]) -> None:
        super().__init__(dict(causes))
        self.causes = dict(causes)

    def __str__(self) -> str:
        causes = "".join(f"\n  | {name}: {cause}" for name, cause in self.causes.items())
        return f"all {len(self.causes)} generation replicas are lost, so nothing can be sampled.{causes}"
