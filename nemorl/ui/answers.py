"""Bodies of answers: JSON, and JSON with raw arrays behind it.

A body of arrays is the length of its header (4 bytes, little-endian), the header as JSON (`facts`, and of
each of `arrays` its `dtype`, `shape` and `offset` in what follows), zeros up to a multiple of 8 bytes, and
the arrays, little-endian, each at a multiple of 8 bytes.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

ALIGNMENT = 8


def json_answer(value: Any, status: int = 200) -> web.Response:
    """Dataclasses become objects; NaN and infinity, which JSON lacks, the texts of JavaScript's numbers."""
    return web.json_response(text=to_json(value), status=status)


def to_json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def arrays_answer(arrays: Mapping[str, NDArray[Any]], facts: Any) -> web.Response:
    return web.Response(body=pack_arrays(arrays, facts), content_type="application/octet-stream")


def pack_arrays(arrays: Mapping[str, NDArray[Any]], facts: Any) -> bytes:
    described: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name, array in arrays.items():
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        described[name] = {"dtype": array.dtype.name, "shape": array.shape, "offset": offset}
        padded = data + bytes(-len(data) % ALIGNMENT)
        parts.append(padded)
        offset += len(padded)
    header = to_json({"facts": facts, "arrays": described}).encode()
    start = struct.pack("<I", len(header)) + header
    return b"".join([start, bytes(-len(start) % ALIGNMENT), *parts])


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value.value if isinstance(value, Enum) else value
        case float():
            return value if math.isfinite(value) else _NAMES[str(value)]
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case np.generic() | np.ndarray():
            return _plain(value.tolist())
        case Path() | Enum():
            return str(value)
        case Sequence() | set() | frozenset():
            return [_plain(each) for each in value]
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
