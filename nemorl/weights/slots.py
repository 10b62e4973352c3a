"""Memory for buckets on their way: two slots, so that one is filled while the other travels."""

import torch
from torch import Tensor

from .messages import Part

SLOTS = 2  # bucket n lies in slot n % SLOTS


class Slots:
    """Slots of a part's largest bucket."""

    def __init__(self, part: Part, device: torch.device | None = None) -> None:
        largest = max((bucket.num_bytes for bucket in part.buckets), default=0)
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(SLOTS)]

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return sum(slot.numel() for slot in self._slots)

    def bucket(self, number: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8: the beginning of the slot in which bucket `number` lies."""
        return self._slots[number % SLOTS][:num_bytes]
