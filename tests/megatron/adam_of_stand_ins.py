"""What the fused optimizers of the stand-ins compute: torch's kernel of AdamW on one tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def adam_step(
    weight: Tensor, gradient: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, group: Mapping[str, Any]
) -> None:
    """Update a weight and its moments in place; `group["step"]` counts this step."""
    adamw(
        [weight],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(group["step"] - 1))],
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
    )
