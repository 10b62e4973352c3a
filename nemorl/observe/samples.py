"""samples.jsonl: some of the sampled conversations of every step, as text a person can read."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from .files import JsonLinesWriter, read_json_lines

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
