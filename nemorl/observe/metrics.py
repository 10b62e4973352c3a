"""metrics.jsonl: the figures of every step, one JSON object a line.

Keys are paths such as `reward/mean`, `loss/policy`, `kl/reference`, `grad_norm`, `logprob_gap/max`,
`tokens/generated`, `time/generation` (seconds), `throughput/tokens_per_second` and `validation/...`.
JSON knows no NaN and no infinity: such a value is written as null and its kind under `nonfinite`.

samples.jsonl: some of the sampled conversations of every step, as text a person can read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from .files import JsonLinesWriter, JsonObject, read_json_lines

RESERVED_KEYS = frozenset({"step", "version", "nonfinite"})


@dataclass(frozen=True)
class StepMetrics:
    """The figures after one step; step 0 is the state before the first one."""

    step: int
    version: int  # of the weights after the step
    values: Mapping[str, float]

    def __post_init__(self) -> None:
        if taken := RESERVED_KEYS & set(self.values):
            raise ValueError(f"metrics of step {self.step}: {sorted(taken)} are names of the line itself")


@dataclass(frozen=True)
class Change:
    """A figure before and after the run; None where it was not measured."""

    metric: str
    before: float | None
    after: float | None


class MetricsWriter:
    """Appends to metrics.jsonl; use as a context manager or call `close`."""

    def __init__(self, path: Path) -> None:
        """Raises `WriteError` when the file cannot be opened."""
        self._lines = JsonLinesWriter(path)

    def write(self, metrics: StepMetrics) -> None:
        """Add one line; it is with the operating system when this returns. Raises `WriteError`."""
        self._lines.append(_to_json(metrics))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """All steps of a metrics.jsonl, with NaN and infinities restored; a torn last line is left out.

    Raises `RunFolderError` naming the line when another line is damaged.
    """
    return [_from_json(line) for line in read_json_lines(path)]


def _to_json(metrics: StepMetrics) -> JsonObject:
    values = {key: float(value) for key, value in metrics.values.items()}
    line: JsonObject = {"step": metrics.step, "version": metrics.version}
    line |= {key: value if math.isfinite(value) else None for key, value in values.items()}
    if nonfinite := {key: str(value) for key, value in values.items() if not math.isfinite(value)}:
        line["nonfinite"] = nonfinite
    return line


def _from_json(line: JsonObject) -> StepMetrics:
    nonfinite = {key: float(kind) for key, kind in line.get("nonfinite", {}).items()}
    values = {key: value for key, value in line.items() if key not in RESERVED_KEYS and value is not None}
    return StepMetrics(step=line["step"], version=line["version"], values=values | nonfinite)


Phase = Literal["training", "validation"]


@dataclass(frozen=True)
class Sample:
    """One conversation: the opening, and all that came after it (tool results included)."""

    step: int
    phase: Phase
    task: int  # index of the task in its dataset
    prompt: str
    completion: str
    reward: float  # the weighted sum
    rewards: Mapping[str, float]  # by name, before weights
    stop: str  # the stop reason
    prompt_tokens: int
    sampled_tokens: int
    answer: str | None = None  # what was expected, where the task knows
    error: str | None = None


class SampleWriter:
    """Appends to samples.jsonl."""

    def __init__(self, path: Path) -> None:
        """Raises `WriteError` when the file cannot be opened."""
        self._lines = JsonLinesWriter(path)

    def write(self, samples: Sequence[Sample]) -> None:
        """Add one line for each. Raises `WriteError`."""
        for sample in samples:
            self._lines.append(asdict(sample))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_samples(path: Path) -> list[Sample]:
    """All samples of a file, without a torn last line. Raises `RunFolderError` for another damaged line."""
    return [Sample(**line) for line in read_json_lines(path)]
