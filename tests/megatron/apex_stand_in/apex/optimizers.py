"""The optimizers, of which Megatron takes both or none."""

import torch

from tests.megatron.adam_of_stand_ins import adam_step


class FusedSGD:
    """Ours takes its place."""


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        assert adam_w_mode
        assert not any((amsgrad, capturable, master_weights))
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                adam_step(param, param.grad, state["exp_avg"], state["exp_avg_sq"], group)
