"""The elements that a rank updates, and the states that its optimizer keeps of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checkpoint_files import WEIGHT

_FUSED_ADAMS_NAMES = {WEIGHT: "master_param"}


@dataclass(frozen=True)
class MainShard:
    """The elements of one parameter that this rank updates; the optimizer's parameter is their weight."""

    start: int  # the first of them in the local parameter
    param: Tensor  # as the optimizer's groups have it
    optimizer: torch.optim.Optimizer  # that updates it
    is_first: bool = True  # of the data-parallel ranks that update the same elements

    @property
    def gradient(self) -> Tensor:
        """Of this step, as `prepare_grads` of Megatron's optimizer has put it there."""
        assert self.param.grad is not None
        return self.param.grad

    def has(self, name: str) -> bool:
        """Whether it has a state of this name."""
        return name == WEIGHT or name in self.optimizer.state[self.param]

    def state(self, name: str) -> Tensor:
        """The float32 weight or one of the optimizer's own tensors [elements]."""
        return (self.param if name == WEIGHT else self.optimizer.state[self.param][name]).view(-1)

    def set_state(self, name: str, values: Tensor) -> None:
        """Take [elements] float32 as the weight or one of the optimizer's own tensors."""
        self.state(name).copy_(values)

    def take_weight(self) -> None:
        """Have the weight that the model has; Megatron sees to it where the two are not one."""

    def device_tensors(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Those of its states that lie on the policy's device, as they lie there."""
        return (self.state(name) for name in names if self.has(name))


class HeldShard(MainShard):
    """Its float32 weight is a state of the optimizer, in host memory; its parameter is the model's own."""

    @property
    def gradient(self) -> Tensor:
        """In the type of Megatron's buffers, which need not be that of the parameter."""
        return self.param.decoupled_grad  # type: ignore[attr-defined, no-any-return]

    def state(self, name: str) -> Tensor:
        """The float32 weight or one of the optimizer's own tensors [elements]."""
        return self.optimizer.state[self.param][name]  # type: ignore[no-any-return]

    def take_weight(self) -> None:
        """Have the weight that the model has."""
        self.set_state(WEIGHT, self.param.detach().float())

    def device_tensors(self, names: Sequence[str]) -> Iterator[Tensor]:
        """None."""
        return iter(())


class NarrowShard(HeldShard):
    """Its states are Transformer Engine's, on the device, in types of fewer bits and with their scales."""

    optimizer: Any  # FusedAdam, of version 2.1 or newer

    def state(self, name: str) -> Tensor:
        """A copy [elements] float32 of a state, in host memory: what saves it reads all of them at a time."""
        return self.optimizer.get_unscaled_state(self.param, self._stored(name)).cpu()  # type: ignore[no-any-return]

    def set_state(self, name: str, values: Tensor) -> None:
        """Take [elements] float32 as one of its states."""
        stored = self._stored(name)
        if values.any():
            self.optimizer.set_scaled_state(self.param, stored, values.clone())  # scaled in place
        else:  # which has no scale
            self.optimizer._initialize_state(self.param, stored, zero_buffer=True)

    def device_tensors(self, names: Sequence[str]) -> Iterator[Tensor]:
        """All of them; of one in FP8 its bytes."""
        states = (self.optimizer.state[self.param][self._stored(name)] for name in names)
        return (getattr(state, "_data", state) for state in states)

    def _stored(self, name: str) -> str:
        return _FUSED_ADAMS_NAMES.get(name, name)
