"""The weights of a model folder by their headers alone: all tensors there, of the shapes of config.json.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header, JSON: name to
dtype, shape and place. Reading that takes no torch and no time.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from nemorl.models.errors import BrokenModelFolder, UnsupportedModel
from nemorl.models.json_files import INDEX_FILE, SINGLE_FILE, indexed_files
from nemorl.models.layout import SCALAR_HEAD, hf_tensors
from nemorl.models.shape import ModelShape

DTYPES = ("F32", "BF16", "F16")  # that can be loaded
_SCALAR_HEAD = SCALAR_HEAD.tensors[0].name
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit

Header = Mapping[str, Mapping[str, Any]]


def weight_problems(
    model: Path, head: Literal["lm", "scalar"] = "lm", *, trained_head: bool = False
) -> Iterator[str]:
    """What is wrong with the weights; nothing where config.json is wrong, which is told of elsewhere.

    A scalar head may be missing, and begins at zero, unless a `trained_head` is wanted.
    """
    if not any((model / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        yield f"the folder holds no weights: {SINGLE_FILE} or {INDEX_FILE} is wanted"
        return
    try:
        wanted = hf_tensors(ModelShape.load(model, head))
    except (BrokenModelFolder, UnsupportedModel):
        return
    try:
        files = _tensor_files(model)
        headers = {file: _header(file) for file in dict.fromkeys(files.values())}
    except BrokenModelFolder as error:
        yield str(error)
        return
    here = {name: headers[file][name] for name, file in files.items() if name in headers[file]}
    missing = [name for name in wanted if name not in here and (trained_head or name != _SCALAR_HEAD)]
    if missing:
        yield (
            f"{len(missing)} of the model's {len(wanted)} tensors are missing, first {missing[0]}: take a "
            "folder whose config.json and weights are of one model"
        )
    yield from _unfit(wanted, here)


def _unfit(wanted: Mapping[str, tuple[int, ...]], here: Header) -> Iterator[str]:
    """The first tensor of another shape, and the first of a type that cannot be loaded."""
    shapes = {name: tuple(here[name]["shape"]) for name in wanted if name in here}
    for name, shape in shapes.items():
        if shape != wanted[name]:
            says = "one label wants" if name == _SCALAR_HEAD else "config.json says"
            yield (
                f"{name} has the shape {list(shape)}, and {says} {list(wanted[name])}: take a "
                "folder where both are of one model"
            )
            break
    for name in shapes:
        if here[name]["dtype"] not in DTYPES:
            yield (
                f"{name} is of type {here[name]['dtype']}, and weights may be {', '.join(DTYPES)}: take the "
                "model's unquantised weights"
            )
            break


def _tensor_files(model: Path) -> dict[str, Path]:
    """The file of each tensor."""
    indexed = indexed_files(model)
    if indexed is not None:
        return indexed
    single = model / SINGLE_FILE
    return dict.fromkeys(_header(single), single)


def _header(path: Path) -> Header:
    """Header of a file that is as long as it says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except OSError as error:
        raise BrokenModelFolder(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise BrokenModelFolder(f"{path} is no safetensors file: fetch it again") from error
    if size < end:
        raise BrokenModelFolder(f"{path} has {size} bytes of {end}: fetch it again, it was cut off")
    return header  # type: ignore[no-any-return]
