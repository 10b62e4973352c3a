"""What a worker holds for the weight exchange: a sender beside a policy, a receiver beside an engine."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.models.local_view import local_view
from nemorl.models.slices import TensorSlice

from .fingerprint import combine, fingerprint
from .plan import PartBucket
from .session import RefitFailed, RefitSession
from .shared_memory import bucket_receiver, bucket_sender


@dataclass(frozen=True)
class Part:
    """What one rank does in every refit, until a layout changes."""

    buckets: tuple[PartBucket, ...]
    dtype: torch.dtype  # on the wire: the receivers'


@dataclass(frozen=True)
class ReceiverLayout:
    """What a generation rank needs."""

    slices: tuple[TensorSlice, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SendReport:
    """What one sender did."""

    fingerprints: Mapping[tuple[int, str], int]  # by receiver and tensor
    extra_bytes: int  # shared memory, while it lasted


@dataclass(frozen=True)
class ReceiveReport:
    """What one receiver now has in staging."""

    fingerprints: Mapping[str, int]  # by tensor


class WeightSender:
    """Held by a policy worker. `parameters` is asked anew in each refit."""

    def __init__(
        self, rank: int, slices: Sequence[TensorSlice], parameters: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        self._rank = rank
        self._slices = tuple(slices)
        self._parameters = parameters
        self._part: Part | None = None

    def describe(self) -> tuple[TensorSlice, ...]:
        """What this rank holds."""
        return self._slices

    def prepare(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._part = part

    def send(self, session: RefitSession) -> SendReport:
        """Send all buckets, converted to the receivers' type. Raises `RefitFailed`."""
        part = _prepared(self._part)
        if not part.buckets:
            return SendReport({}, extra_bytes=0)
        parameters = self._parameters()
        sums: dict[tuple[int, str], list[int]] = defaultdict(list)
        receivers = sorted({bucket.peer for bucket in part.buckets})
        largest = max(bucket.num_elements for bucket in part.buckets) * part.dtype.itemsize
        with bucket_sender(self._rank, session, receivers, largest) as channel:
            for number, bucket in enumerate(part.buckets):
                slot = channel.slot(number, bucket.num_elements, part.dtype)
                for piece, values in _pieces(bucket, slot):
                    values.copy_(local_view(parameters, piece))
                    sums[bucket.peer, piece.name].append(fingerprint(values, piece.start, piece.shape))
                channel.publish(number, bucket.peer)
            channel.drain()
            return SendReport({key: combine(found) for key, found in sums.items()}, channel.num_bytes)


class WeightReceiver:
    """Held by a generation worker.

    `staging` gives the tensors that are written, which no sampling reads; `commit` makes them the weights of
    a version.
    """

    def __init__(
        self,
        rank: int,
        slices: Sequence[TensorSlice],
        staging: Callable[[], Mapping[str, Tensor]],
        commit: Callable[[int], None],
    ) -> None:
        self._rank = rank
        self._slices = tuple(slices)
        self._staging = staging
        self._commit = commit
        self._part: Part | None = None
        self._received: int | None = None

    def describe(self) -> ReceiverLayout:
        """What this rank needs, and the type it keeps it in. Raises ValueError where it keeps several."""
        staging = self._staging()
        dtypes = {staging[part.param].dtype for part in self._slices}
        if len(dtypes) != 1:
            raise ValueError(
                f"generation rank {self._rank} keeps weights of the types {sorted(map(str, dtypes))}; "
                "the exchange carries one"
            )
        return ReceiverLayout(self._slices, dtypes.pop())

    def prepare(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._part = part

    def receive(self, session: RefitSession) -> ReceiveReport:
        """Write all buckets into staging and read back what lies there. Raises `RefitFailed`."""
        part = _prepared(self._part)
        staging = self._staging()
        self._received = None
        senders = sorted({bucket.peer for bucket in part.buckets})
        with bucket_receiver(self._rank, session, senders) as channel:
            for bucket in part.buckets:
                number, slot = channel.next_bucket(bucket.peer, bucket.num_elements, part.dtype)
                for piece, values in _pieces(bucket, slot):
                    local_view(staging, piece).copy_(values)
                channel.taken(bucket.peer, number)
        self._received = session.version
        return ReceiveReport(self._staged_fingerprints(staging))

    def commit(self, version: int) -> None:
        """Make what was received the weights in use. Raises `RefitFailed` where another version was."""
        if self._received != version:
            raise RefitFailed(
                f"generation rank {self._rank} was told to use version {version}, but has "
                f"{'nothing' if self._received is None else f'version {self._received}'} in staging"
            )
        self._commit(version)
        self._received = None

    def _staged_fingerprints(self, staging: Mapping[str, Tensor]) -> dict[str, int]:
        sums: dict[str, list[int]] = defaultdict(list)
        for part in self._slices:
            sums[part.name].append(fingerprint(local_view(staging, part), part.start, part.shape))
        return {name: combine(found) for name, found in sums.items()}


def _pieces(bucket: PartBucket, slot: Tensor) -> list[tuple[TensorSlice, Tensor]]:
    """The slices of a bucket with their elements in it, of each slice's shape."""
    flat = slot.split([part.num_elements for part in bucket.slices])
    return [(part, values.view(part.size)) for part, values in zip(bucket.slices, flat, strict=True)]


def _prepared(part: Part | None) -> Part:
    if part is None:
        raise RefitFailed("this rank takes part in a refit before it was given its part of the plan")
    return part
