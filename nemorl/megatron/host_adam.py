"""AdamW in host memory: float32 weights and moments lie there, and the step is taken on the CPU.

The device keeps the model's weights and gradients. Parameter by parameter the gradient comes down, torch's
fused AdamW goes over it, and the weight goes up in the model's precision. What passes the bus lies in two
pinned buffers, as large as the largest parameter; the states are ordinary memory, as torch rounds pinned
memory up to powers of two. In place of Megatron's HybridDeviceOptimizer, which keeps a float32 copy of the
weights on the device too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nemorl.config.policy import AdamConfig

from .checkpoint_files import WEIGHT
from .device import DeviceKind, finish_copies, host_buffer


class HostAdam(torch.optim.Optimizer):
    """Steps the model's own weights, of which `state` has the float32 ones.

    `param_groups` are assigned by whoever makes it, and every parameter is allocated before the first step.
    """

    def __init__(self, config: AdamConfig, kind: DeviceKind) -> None:
        super().__init__([torch.zeros(())], {"lr": config.lr, "weight_decay": config.weight_decay, "step": 0})
        self._config = config
        self._kind: DeviceKind = kind
        # Of one parameter, on the way from and to a GPU.
        self._gradient, self._weight = torch.empty(0), torch.empty(0)

    def allocate(self, param: Tensor) -> None:
        """Room for the state of a parameter, with the weight that it has; moments are zero."""
        weight = torch.empty(param.shape).copy_(param.detach())
        moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        self.state[param] = {WEIGHT: weight, **moments}
        if self._kind != "cpu" and param.numel() > self._gradient.numel():
            self._gradient, self._weight = (host_buffer(self._kind, like) for like in (weight, param))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from `decoupled_grad`, where Megatron puts gradients of a type of their own."""
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                self._update(param, group)

    def _update(self, param: Any, group: dict[str, Any]) -> None:
        state = self.state[param]
        adamw(
            [state[WEIGHT]],
            [self._on_host(param.decoupled_grad)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.tensor(float(group["step"] - 1))],  # it counts this step itself
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            eps=self._config.eps,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
        )
        self._to_device(state[WEIGHT], param)

    def _on_host(self, gradient: Tensor) -> Tensor:
        """Valid until the next one. The weight before it has then gone up."""
        if self._kind == "cpu":
            return gradient
        arrived = self._gradient[: gradient.numel()].copy_(gradient, non_blocking=True)
        finish_copies(self._kind)
        return arrived

    def _to_device(self, weight: Tensor, param: Tensor) -> None:
        """Rounded here, so that half the bytes go up."""
        if self._kind == "cpu":
            param.copy_(weight)
        else:
            param.copy_(self._weight[: weight.numel()].copy_(weight), non_blocking=True)
