"""The reference policy: the weights as they were loaded, kept beside the ones that learn."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class ReferenceWeights:
    """A frozen copy of a model's local parameters that can take their place for a forward pass."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._copies = [(p, p.detach().clone()) for module in modules for p in module.parameters()]

    def tensors(self) -> list[Tensor]:
        """The copies."""
        return [copy for _, copy in self._copies]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the reference weights; nothing is copied."""
        current = [p.data for p, _ in self._copies]
        for parameter, copy in self._copies:
            parameter.data = copy
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._copies, current, strict=True):
                parameter.data = data
