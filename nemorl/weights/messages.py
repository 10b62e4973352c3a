"""Messages between the driver and the ranks of an exchange.

They are frozen and consist of integers, strings and tuples only, so that an engine may send them to its
processes as JSON (pydantic's `TypeAdapter`). Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nemorl.models.slices import TensorSlice

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of the types that travel, by torch's names


@dataclass(frozen=True)
class SenderLayout:
    """What a policy rank holds."""

    slices: tuple[TensorSlice, ...]
    node: str = ""  # the machine it runs on; receivers there are served first


@dataclass(frozen=True)
class ReceiverLayout:
    """What a generation rank needs. Raises ValueError for a type that does not travel."""

    slices: tuple[TensorSlice, ...]
    dtypes: tuple[str, ...]  # of each slice, by torch's name: "bfloat16"
    node: str = ""
    takes_changes: bool = True  # it keeps what came, so that a refit may bring only what changed since

    def __post_init__(self) -> None:
        if len(self.dtypes) != len(self.slices):
            raise ValueError(f"{len(self.dtypes)} types for {len(self.slices)} slices: give one for each")
        for part, dtype in zip(self.slices, self.dtypes, strict=True):
            if dtype not in ITEM_BYTES:
                raise ValueError(
                    f"the engine keeps {part.param} as {dtype}; the exchange carries {', '.join(ITEM_BYTES)}"
                )


@dataclass(frozen=True)
class PartBucket:
    """A bucket as one of its ranks handles it.

    In shared memory all its receivers read the same slot. By messages the sender sends it to the first
    receiver, and each receiver to the next one.
    """

    sender: int
    receivers: tuple[int, ...]
    dtype: str  # of all elements on the wire: the receivers'
    slices: tuple[TensorSlice, ...]  # they lie in the bucket in this order, without gaps

    @property
    def num_elements(self) -> int:
        """Elements of all slices."""
        return sum(part.num_elements for part in self.slices)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slices."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Part:
    """What one rank does in every refit, until a layout changes."""

    rank: int  # among all ranks of its side
    buckets: tuple[PartBucket, ...]


@dataclass(frozen=True)
class SendReport:
    """What one sender did."""

    fingerprints: Mapping[tuple[int, str], int]  # by receiver and tensor
    extra_bytes: int  # memory for buckets, while it lasted
    kept_bytes: int = 0  # host memory for the last version sent, kept from refit to refit
    of_pieces: tuple[int, ...] = ()  # fingerprints in the order of the part's slices, for files


@dataclass(frozen=True)
class ReceiveReport:
    """Weights that one receiver now has, staged or in place."""

    fingerprints: Mapping[str, int]  # by tensor
    num_bytes: int  # received; with files, read
