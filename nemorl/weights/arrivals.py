"""What comes to a receiver, whichever way it comes: pieces of tensors, one after another."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from nemorl.models.slices import TensorSlice

from .channel import ReceivingChannel, receiving_channel
from .messages import Part, PartBucket, ReceiverLayout
from .process_group import Membership
from .session import RefitFailed, RefitSession, receiver_name
from .version_folder import VersionFolder

Piece = tuple[TensorSlice, Tensor]  # of the receiver's slices, and its elements, shaped as the piece
Change = Callable[[PartBucket, Tensor], None]  # add changes to what is held; see `delta`


class Arrivals:
    """All that a layout asks for; the values of a piece are there until the next one is asked for."""

    def __init__(self, pieces: Callable[["Arrivals"], Iterator[Piece]]) -> None:
        self._pieces = pieces
        self.num_bytes = 0  # that have come; of files, that were read

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces(self)


@contextmanager
def arriving(
    part: Part,
    layout: ReceiverLayout,
    session: RefitSession,
    member: Membership,
    change: Change | None = None,
) -> Iterator[Arrivals]:
    """Meet the senders, or open their files. Buckets of changes go to `change` and give no pieces."""
    if session.transport == "files":
        with closing(VersionFolder(Path(session.place), session.version)) as folder:
            yield Arrivals(lambda arrivals: _read(arrivals, folder, layout))
    elif not part.buckets:
        yield Arrivals(lambda arrivals: iter(()))
    else:
        with receiving_channel(part, session, member) as channel:
            yield Arrivals(lambda arrivals: _received(arrivals, part, channel, change))


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


def _read(arrivals: Arrivals, folder: VersionFolder, layout: ReceiverLayout) -> Iterator[Piece]:
    for part, dtype in zip(layout.slices, layout.dtypes, strict=True):
        for piece in folder.pieces(part, torch_dtype(dtype)):
            arrivals.num_bytes = folder.num_bytes
            yield piece


def _received(
    arrivals: Arrivals, part: Part, channel: ReceivingChannel, change: Change | None
) -> Iterator[Piece]:
    for bucket in part.buckets:
        content = channel.next_bucket()
        arrivals.num_bytes += content.numel()
        if content.numel() == bucket.num_bytes:
            yield from pieces_of(bucket, content)
        elif change is not None:
            change(bucket, content)
        else:
            raise RefitFailed(
                f"{receiver_name(part.rank)} got changes, and does not hold what they were taken from"
            )
        channel.taken()
