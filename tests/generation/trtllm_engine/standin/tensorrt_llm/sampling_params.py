"""A request's parameters: the fields that exist, with the defaults that they have."""

from dataclasses import dataclass
from enum import StrEnum


class LogprobMode(StrEnum):
    RAW = "raw_logprobs"
    PROCESSED = "processed_logprobs"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobMode = LogprobMode.RAW
    ignore_eos: bool = False
    detokenize: bool = True

    @property
    def greedy(self) -> bool:
        """Without a top-k and a top-p there is no sampling, whatever the temperature."""
        unset = self.top_k in (None, 1) and self.top_p in (None, 0.0)
        return unset or self.top_k == 1 or self.temperature == 0
