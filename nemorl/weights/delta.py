"""Encoding of refits that send only changes.

A small optimizer step changes the bfloat16 of two to four weights in a hundred. A sender keeps what it sent
last, in the type on the wire, and sends for each bucket the changed positions and their differences:

    positions      gaps between them, one byte each (255: the gap continues)
    differences    of the bits as integers, mod 2^bits, so exact; mostly plus or minus one step of the type
    both           bytes of equal significance together, zlib at level 1

On Adam's steps this is 1.3 bytes for each changed element of bfloat16. A bucket with half of its elements
changed is sent completely; in float32 that is every bucket.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .messages import ITEM_BYTES, Part, PartBucket

_HEADER = struct.Struct("<qq")  # changed elements, bytes of their gaps
_INTEGERS = {4: torch.int32, 2: torch.int16}  # by bytes of an element
_MAX_GAP = 255


class LastSent:
    """Last version that a sender sent, in host memory. Equal buckets of several receivers are kept once."""

    def __init__(self, part: Part) -> None:
        self._buckets = part.buckets
        firsts: dict[tuple[object, ...], int] = {}
        self._key = [firsts.setdefault((b.dtype, b.slices), i) for i, b in enumerate(part.buckets)]
        self._last_use = {key: number for number, key in enumerate(self._key)}
        self._content: dict[int, Tensor] = {}
        self.version: int | None = None  # of all buckets

    @property
    def num_bytes(self) -> int:
        return sum(content.numel() for content in self._content.values())

    def changes(
        self, number: int, content: Tensor, sizes: Sequence[int], *, compare: bool
    ) -> list[bytearray | None]:
        """Changes in bucket `number` ([bytes] uint8) since the last refit, for each of its parts; keep it.

        None is a part to send completely; `sizes` are the bytes of the parts.
        """
        key, itemsize = self._key[number], ITEM_BYTES[self._buckets[number].dtype]
        found: list[bytearray | None] = [None] * len(sizes)
        if compare:
            parts = zip(self._content[key].split(list(sizes)), content.split(list(sizes)), strict=True)
            found = [encode(old, new, itemsize) for old, new in parts]
        if self._last_use[key] == number:
            if key not in self._content:
                self._content[key] = torch.empty_like(content)
            self._content[key].copy_(content)
        return found


def encode(old: Tensor, new: Tensor, itemsize: int) -> bytearray | None:
    """Changes from `old` to `new` ([bytes] uint8 both); None where it is better to send `new` whole."""
    before, after = old.view(_INTEGERS[itemsize]), new.view(_INTEGERS[itemsize])
    places = (before != after).nonzero().squeeze(1)
    if 2 * places.numel() > after.numel():
        return None
    unchanged = np.diff(places.numpy(), prepend=-1) - 1  # elements before each
    more, last = np.divmod(unchanged, _MAX_GAP)
    gaps = np.full(unchanged.size + int(more.sum()), _MAX_GAP, np.uint8)
    gaps[np.cumsum(more + 1) - 1] = last
    differences = (after[places] - before[places]).numpy()
    zigzag = (differences << 1) ^ (differences >> (8 * itemsize - 1))  # small ones of either sign are small
    planes = zigzag.view(np.uint8).reshape(-1, itemsize).T
    packed = zlib.compress(gaps.tobytes() + planes.tobytes(), level=1)
    encoded = bytearray(_HEADER.pack(places.numel(), gaps.size) + packed)
    return encoded if len(encoded) < new.numel() else None


class BrokenChanges(ValueError):
    """Bytes that are not an output of `encode`."""


def decode(content: Tensor, itemsize: int) -> tuple[Tensor, Tensor]:
    """Ascending positions, integer differences. Raises BrokenChanges, also for bytes altered in transit."""
    encoded = content.cpu().numpy().tobytes()
    try:
        count, gap_bytes = _HEADER.unpack_from(encoded)
        unpacked = np.frombuffer(zlib.decompress(encoded[_HEADER.size :]), np.uint8)
    except (struct.error, zlib.error) as error:
        raise BrokenChanges(str(error)) from error
    gaps = unpacked[: max(gap_bytes, 0)]
    if count < 0 or gap_bytes + itemsize * count != unpacked.size or (gaps != _MAX_GAP).sum() != count:
        raise BrokenChanges(f"{count} changes do not fit into {unpacked.size} bytes")
    planes = unpacked[gap_bytes:].reshape(itemsize, count)
    zigzag = np.ascontiguousarray(planes.T).view(f"<u{itemsize}").reshape(-1)
    sign = -(zigzag & 1).astype(zigzag.dtype)
    differences = ((zigzag >> 1) ^ sign).view(f"<i{itemsize}")
    places: NDArray[np.int64] = np.cumsum(gaps, dtype=np.int64)[gaps != _MAX_GAP] + np.arange(count)
    return torch.from_numpy(places), torch.from_numpy(differences)


def add_changes(values: Tensor, content: Tensor) -> None:
    """Add the changes of a box to all of its values, in the order of its axes. Raises BrokenChanges."""
    bits = values.view(_INTEGERS[values.element_size()]).view(-1)
    places, differences = decode(content, values.element_size())
    bits[places] += differences


def apply(bucket: PartBucket, content: Tensor, weights: Mapping[str, Tensor]) -> None:
    """Add the changes of a bucket to the weights. Raises BrokenChanges before it has added any."""
    places, differences = decode(content, ITEM_BYTES[bucket.dtype])
    ends = np.cumsum([part.num_elements for part in bucket.slices])
    cuts = np.searchsorted(places.numpy(), ends)
    first_place = first = 0
    for part, end, cut in zip(bucket.slices, ends.tolist(), cuts.tolist(), strict=True):
        inside = places[first:cut] - first_place
        offsets = torch.full_like(inside, part.offset)
        for extent, stride in zip(reversed(part.size), reversed(part.strides), strict=True):
            offsets += inside % extent * stride
            inside = inside // extent
        bits = weights[part.param].detach()
        bits = bits.view(_INTEGERS[bits.element_size()])
        length = bits.untyped_storage().nbytes() // bits.element_size() - bits.storage_offset()
        flat = bits.as_strided((length,), (1,))  # from the parameter's first element on
        flat[offsets.to(flat.device)] += differences[first:cut].to(flat.device)
        first_place, first = end, cut
