"""AdamW in host memory: float32 weights and moments lie there, and the step is taken on the CPU.

The device keeps the model's weights and gradients. Parameter by parameter the gradient comes down, torch's
fused AdamW goes over it, and the weight goes up in the model's precision. In place of Megatron's
HybridDeviceOptimizer, which keeps a float32 copy of the weights on the device too.
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
        self._arriving = torch.empty(0)  # a gradient, on its way from a GPU

    def allocate(self, param: Tensor) -> None:
        """Room for the state of a parameter, pinned where its values come from a GPU; moments are zero."""
        like = param.detach().float()
        weight, first, second = (host_buffer(self._kind, like) for _ in range(3))
        weight.copy_(like)
        self.state[param] = {WEIGHT: weight, "exp_avg": first.zero_(), "exp_avg_sq": second.zero_()}
        if self._kind != "cpu" and param.numel() > self._arriving.numel():
            self._arriving = host_buffer(self._kind, like)

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
        param.copy_(state[WEIGHT].to(param.dtype))  # rounded here, so that half the bytes go up

    def _on_host(self, gradient: Tensor) -> Tensor:
        """Valid until the next one."""
        if self._kind == "cpu":
            return gradient
        arrived = self._arriving[: gradient.numel()].copy_(gradient, non_blocking=True)
        finish_copies(self._kind)
        return arrived
