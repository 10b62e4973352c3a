"""What the trainer computed for the tokens of stored trajectories, in files next to theirs.

    trajectories/step_000012-trained-3.safetensors   [N] tokens, by the data-parallel rank that trained them

Sequences lie end to end; the metadata has their names and lengths. Nothing is unpickled.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from torch import Tensor

    from .packed import PackedBatch

# Arrays of the file by their fields of the batch.
_FIELDS = {name: name for name in ("advantages", "reference_logprobs", "values", "returns")}
_FIELDS |= {"logprobs": "old_logprobs", "entropies": "old_entropies"}
_NAMES = "sequences"  # in the metadata: [name, number of tokens] of each
_MARK = "-trained-"


@dataclass(frozen=True)
class Trained:
    """What was trained of a sequence: means over the tokens of its loss mask, NaN where they are unknown."""

    advantage: float
    logprob_gap: float  # |trainer - engine|
    num_tokens: int  # of the loss mask, with a weight


def trained_of(batch: "PackedBatch") -> list[Trained]:
    """Of each sequence of a data-parallel rank."""
    trains, num_sequences = _trains(batch).numpy(), batch.num_sequences
    numbers = np.repeat(np.arange(num_sequences), batch.lengths)[trains]  # of the trained tokens' sequences
    counts = np.bincount(numbers, minlength=num_sequences).tolist()

    def means(values: "Tensor | None") -> list[float]:
        if values is None:
            return [float("nan")] * num_sequences
        sums = np.bincount(numbers, values.numpy()[trains], num_sequences).tolist()
        return [total / count if count else float("nan") for total, count in zip(sums, counts, strict=True)]

    gaps = None
    if batch.old_logprobs is not None and batch.logprobs is not None:
        gaps = (batch.old_logprobs - batch.logprobs).abs()
    return list(map(Trained, means(batch.advantages), means(gaps), counts))


def _trains(batch: "PackedBatch") -> "Tensor":
    return batch.loss_mask & (batch.weights > 0)


def write_trained(folder: Path, step: int, rank: int, batch: "PackedBatch", names: Mapping[int, str]) -> None:
    """Write the arrays of the sequences of `names`, by their number. Raises OSError."""
    chosen = batch.select(list(names))
    tensors = {name: getattr(chosen, held) for name, held in _FIELDS.items()} | {"mask": _trains(chosen)}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}
    lengths = list(zip(names.values(), chosen.lengths, strict=True))
    path = folder / f"step_{step:06d}{_MARK}{rank}.safetensors"
    save_arrays(path, arrays, {_NAMES: json.dumps(lengths)})


def save_arrays(path: Path, arrays: dict[str, NDArray[Any]], metadata: dict[str, str] | None = None) -> None:
    """Replace a safetensors file. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(arrays, temporary, metadata)
        os.replace(temporary, path)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written: {error}") from error


def read_trained(folder: Path, step: int, name: str) -> dict[str, NDArray[Any]]:
    """[T] `mask`, `advantages`, and what was computed of `logprobs`, `values` and others, of a sequence.

    Empty if it did not train, or its file is missing. Raises OSError for a file that cannot be read.
    """
    for path in sorted(folder.glob(f"step_{step:06d}{_MARK}*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                start = 0
                for other, length in json.loads(file.metadata()[_NAMES]):
                    if other == name:
                        keys = list(file.keys())
                        return {key: file.get_slice(key)[start : start + length] for key in keys}
                    start += length
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise OSError(f"{path} cannot be read: {error}") from error
    return {}
