"""The engines to choose from, behind one interface."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from nemorl.config.generation import TorchGenerationConfig
from nemorl.models.registry import load_shape
from nemorl.models.slices import TensorSlice

from .torch_engine.engine import TorchEngine
from .types import Completion, EngineStats, GenerationRequest, Progress

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class SamplingEngine(Protocol):
    """A synchronous engine, driven by one thread: requests go in, steps bring completions."""

    @property
    def version(self) -> int:
        """The version of the weights that sample."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences of the running batch."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        ...

    @property
    def next_expiry(self) -> float | None:
        """The earliest deadline of all requests, on `time.monotonic`'s clock; None without requests."""
        ...

    def add(self, request: GenerationRequest) -> None:
        """Put a request in line. Raises RequestRefused if it can never be served or its id is in flight."""
        ...

    def step(self, admit: bool = True) -> list[Completion]:
        """Sample one token for every running sequence, after letting waiting ones join; who ended."""
        ...

    def take_progress(self) -> list[Progress]:
        """What requests that asked for it have sampled since it was last taken; empty until it is due."""
        ...

    def expire(self) -> list[Completion]:
        """End the requests whose deadline has passed."""
        ...

    def abort(self, request_id: str) -> Completion | None:
        """End a request with what it has; None if it is not in flight."""
        ...

    def abort_all(self) -> list[Completion]:
        """End every request with what it has."""
        ...

    def take_stats(self) -> EngineStats:
        """What was done since the last call."""
        ...


class Engine(SamplingEngine, Protocol):
    """One with weights of its own, which an exchange brings."""

    def slices(self) -> list[TensorSlice]:
        """Which boxes of the HF checkpoint the engine holds."""
        ...

    def staging_parameters(self) -> Mapping[str, Tensor]:
        """Where new weights are written while the old ones sample."""
        ...

    def commit(self, version: int) -> None:
        """Sample with the staged weights from the next step on."""
        ...


def create_engine(
    config: TorchGenerationConfig,
    model_path: Path,
    *,
    device: Literal["cpu", "cuda"],
    precision: Literal["float32", "bfloat16"],
    tokenizer_path: Path,
    max_sequence_length: int,
) -> Engine:
    """The embedded engine, with the weights of `model_path` as version 0.

    `precision` is the policy's, taken where the config names none.
    """
    engine = TorchEngine(
        load_shape(model_path),
        config,
        device=torch.device(device),
        dtype=_DTYPES[config.precision or precision],
        max_sequence_length=max_sequence_length,
        decode=text_of(tokenizer_path),
    )
    engine.load(model_path)
    return engine


def text_of(tokenizer_path: Path) -> Callable[[Sequence[int]], str] | None:
    """Tokens to text by the folder's `tokenizer.json`; None without one.

    The tokenizers library alone does it: transformers would cost every engine seconds and 400 MB.
    """
    file = tokenizer_path / "tokenizer.json"
    if not file.exists():
        return None
    tokenizer = Tokenizer.from_file(str(file))

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return decode
