"""What comes to a receiver, whichever way it comes: pieces of tensors, one after another."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from nemorl.models.slices import TensorSlice

from .channel import ReceivingChannel, receiving_channel
from .messages import Part, PartBucket, ReceiverLayout
from .process_group import Membership
from .session import RefitSession
from .version_folder import VersionFolder

Piece = tuple[TensorSlice, Tensor]  # of the receiver's slices, and its elements, shaped as the piece


@contextmanager
def arriving(
    part: Part, layout: ReceiverLayout, session: RefitSession, member: Membership
) -> Iterator[Iterator[Piece]]:
    """All that `layout` asks for; values of a piece are there until the next one is asked for."""
    if session.transport == "files":
        with closing(VersionFolder(Path(session.place), session.version)) as folder:
            yield _read(folder, layout)
    else:
        with receiving_channel(part, session, member) as channel:
            yield _received(part, channel)


def torch_dtype(name: str) -> torch.dtype:
    """torch's type by its name in messages."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def pieces_of(bucket: PartBucket, content: Tensor) -> list[Piece]:
    """The slices of a bucket and their elements, of each slice's shape; `content` has all its bytes."""
    values = content.view(torch_dtype(bucket.dtype))
    flat = values.split([part.num_elements for part in bucket.slices])
    return [(part, values.view(part.size)) for part, values in zip(bucket.slices, flat, strict=True)]


def _read(folder: VersionFolder, layout: ReceiverLayout) -> Iterator[Piece]:
    for part, dtype in zip(layout.slices, layout.dtypes, strict=True):
        yield from folder.pieces(part, torch_dtype(dtype))


def _received(part: Part, channel: ReceivingChannel) -> Iterator[Piece]:
    for bucket in part.buckets:
        yield from pieces_of(bucket, channel.next_bucket())
        channel.taken()
