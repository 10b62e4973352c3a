"""Muon: matrices move by their orthogonalized momentum, everything else as under AdamW.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the size of a step is matched
to AdamW's (Liu et al. 2025, arXiv 2502.16982), so that both share one rate and weight decay.

A matrix is one of the Hugging Face checkpoint, whole, so every layout takes the same step: those that
Megatron fuses (q, k and v; gate and up) are orthogonalized apart, and one that tensor parallelism divides is
put together first. Every data-parallel rank holds the whole state.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemorl.config.policy import MuonConfig
from nemorl.models.adapters import TrainedWeights
from nemorl.models.layout import PolicyRank
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ADAMW_RMS = 0.2  # of an update of AdamW, as a rule
_NO_MATRICES = ("embedding.word_embeddings.weight", "output_layer.weight")


def orthogonalize(matrix: Tensor, iterations: int) -> Tensor:
    """Newton-Schulz: a matrix [rows, columns] with its singular values brought near 1 (0.7 to 1.2)."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.mT if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


@dataclass(frozen=True)
class Matrix:
    """An HF matrix, or one expert's part of an HF tensor, and what of it this rank holds."""

    boxes: tuple[TensorSlice, ...]
    start: tuple[int, ...]  # in the HF tensor
    size: tuple[int, ...]  # with the extents of 1 that do not count
    is_shared: bool  # by several tensor-parallel ranks

    def gather(self, param: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The whole matrix [rows, columns] from the parts that the ranks of a group have in `param`."""
        whole = param.new_zeros(self.size)
        for box in self.boxes:
            whole[self._within(box)] = local_view({box.param: param}, box)
        if self.is_shared:
            dist.all_reduce(whole, group=group)
        return whole.view([extent for extent in self.size if extent > 1])

    def scatter(self, whole: Tensor, param: Tensor) -> None:
        whole = whole.reshape(self.size)
        for box in self.boxes:
            local_view({box.param: param}, box).copy_(whole[self._within(box)])

    def _within(self, box: TensorSlice) -> tuple[slice, ...]:
        return tuple(slice(b - s, b - s + n) for b, s, n in zip(box.start, self.start, box.size, strict=True))


def matrices(trained: TrainedWeights, place: PolicyRank, *, of_experts: bool) -> dict[str, list[Matrix]]:
    """The matrices in each parameter of a rank, its experts' or the others, as its group shares them."""
    layout = place.layout
    if of_experts:
        group = [replace(place, etp_rank=n) for n in range(layout.expert_tensor_parallel_size)]
    else:
        group = [replace(place, tp_rank=n) for n in range(layout.tensor_parallel_size)]
    together: dict[tuple[str, str], list[TensorSlice]] = defaultdict(list)
    for part in chain(*map(trained.slices, group)):
        together[part.param, part.name].append(part)
    own: dict[tuple[str, str], list[TensorSlice]] = defaultdict(list)
    for part in trained.slices(place):
        own[part.param, part.name].append(part)
    found: dict[str, list[Matrix]] = defaultdict(list)
    for (param, name), boxes in own.items():
        parts = together[param, name]
        axes = range(len(parts[0].shape))
        start = tuple(min(part.start[axis] for part in parts) for axis in axes)
        end = tuple(max(part.start[axis] + part.size[axis] for part in parts) for axis in axes)
        extents = tuple(e - s for s, e in zip(start, end, strict=True))
        if sum(extent > 1 for extent in extents) == 2 and not param.endswith(_NO_MATRICES):
            is_shared = set(parts) != set(boxes)
            found[param].append(Matrix(tuple(boxes), start, extents, is_shared))
    return found


def group_of(is_expert: bool) -> dist.ProcessGroup:
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()  # type: ignore[no-any-return]
    return parallel_state.get_tensor_model_parallel_group()  # type: ignore[no-any-return]


class Muon(torch.optim.Optimizer):
    """Steps parameters of which it is given the matrices by Muon, the others by AdamW.

    `param_groups` are assigned by the caller; the moments lie in `state` before the first step.
    """

    def __init__(
        self, config: MuonConfig, matrices_of: Mapping[Tensor, Sequence[Matrix]], groups: Mapping[Tensor, Any]
    ) -> None:
        """`groups` gives each parameter with matrices the group of ranks that share them."""
        super().__init__([torch.zeros(())], {"lr": config.lr, "weight_decay": config.weight_decay, "step": 0})
        self._config = config
        self._matrices = matrices_of
        self._groups = groups

    def moments(self, param: Tensor) -> tuple[str, ...]:
        return ("momentum_buffer",) if param in self._matrices else ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from `grad`; all ranks of a tensor-parallel group take it together."""
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                param.mul_(1 - group["lr"] * group["weight_decay"])
                move = self._move_matrices if param in self._matrices else self._move_as_adam
                move(param, group["lr"], group["step"])

    def _move_matrices(self, param: Tensor, lr: float, step: int) -> None:
        gradient: Any = param.grad
        momentum = self.state[param]["momentum_buffer"].lerp_(gradient, 1 - self._config.momentum)
        ahead = gradient.lerp(momentum, self._config.momentum)  # Nesterov's
        update = torch.zeros_like(param)
        for matrix in self._matrices[param]:
            direction = orthogonalize(matrix.gather(ahead, self._groups[param]), self._config.iterations)
            matrix.scatter(direction * _ADAMW_RMS * max(direction.shape) ** 0.5, update)
        param.sub_(update, alpha=lr)

    def _move_as_adam(self, param: Tensor, lr: float, step: int) -> None:
        config, state = self._config, self.state[param]
        first = state["exp_avg"].lerp_(param.grad, 1 - config.beta1)
        second = state["exp_avg_sq"].mul_(config.beta2)
        second.addcmul_(param.grad, param.grad, value=1 - config.beta2)
        root = (second / (1 - config.beta2**step)).sqrt_().add_(config.eps)
        param.addcdiv_(first, root, value=-lr / (1 - config.beta1**step))
