"""What the trainer computed for the tokens of stored trajectories, in files next to theirs.

    trajectories/step_000012-trained-3.safetensors   [N] tokens, by the data-parallel rank that trained them

Sequences lie end to end; the metadata has their names and lengths. Nothing is unpickled.
"""

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .losses import Trained

if TYPE_CHECKING:
    from torch import Tensor

    from .packed import PackedBatch

_FIELDS = ("advantages", "reference_logprobs", "values", "returns")
_NAMES = "sequences"  # in the metadata: [name, number of tokens] of each
_MARK = "-trained-"


def trained_of(batch: "PackedBatch", logprobs: "Tensor | None") -> list[Trained]:
    """Of each sequence of a data-parallel rank; `logprobs` [N] are the trainer's."""
    trains = batch.loss_mask & (batch.weights > 0)
    gaps = None
    if logprobs is not None and batch.logprobs is not None:
        gaps = (logprobs - batch.logprobs).abs()
    starts = batch.cu_seqlens.tolist()
    found = []
    for start, end in itertools.pairwise(starts):
        mask = trains[start:end]
        advantage, gap = (
            float("nan") if values is None else float(values[start:end][mask].double().mean())
            for values in (batch.advantages, gaps)
        )
        found.append(Trained(advantage, gap, int(mask.sum())))
    return found


def write_trained(
    folder: Path,
    step: int,
    rank: int,
    batch: "PackedBatch",
    logprobs: "Tensor | None",
    names: Mapping[int, str],
) -> None:
    """Write the arrays of the sequences of `names`, by their number. Raises OSError."""
    chosen = batch.select(list(names))
    tensors = {name: getattr(chosen, name) for name in _FIELDS}
    tensors |= {"mask": chosen.loss_mask & (chosen.weights > 0), "entropies": chosen.old_entropies}
    if logprobs is not None:
        starts = batch.cu_seqlens.tolist()
        parts = [logprobs[starts[number] : starts[number + 1]].numpy() for number in names]
    arrays: dict[str, NDArray[Any]] = {
        name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None
    }
    if logprobs is not None:
        arrays["logprobs"] = np.concatenate(parts)
    lengths = list(zip(names.values(), chosen.lengths, strict=True))
    path = folder / f"step_{step:06d}{_MARK}{rank}.safetensors"
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(arrays, temporary, {_NAMES: json.dumps(lengths)})
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
