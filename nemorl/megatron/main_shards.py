"""The elements that a rank updates, and the states that its optimizer keeps of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint_files import WEIGHT


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
