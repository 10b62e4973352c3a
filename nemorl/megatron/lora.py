"""Adapters added to the frozen weights of a policy's model, as in PEFT (arXiv 2106.09685).

    y = W x + alpha / rank * B A x

Tensor parallelism divides what the weight's own division divides, and communicates `rank` columns:

    W by rows (column-parallel):     A copied, B by rows;     A x is gathered under sequence parallelism
    W by columns (row-parallel):     A by columns, B copied;  A x is summed (and scattered)
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from safetensors import safe_open
from torch import Tensor

from nemorl.config.policy import LoraConfig
from nemorl.models.adapters import adapter_params, adapter_slices, projection_of
from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.layout import PolicyRank, chunk_of, policy_slices
from nemorl.models.peft_adapter import read_peft_adapter, start_problem
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import ComputedTensors, local_view, merge_adapter


@dataclass(frozen=True)
class _Matrix:
    """An HF matrix, or some of its rows, in a weight, and its pair if it has one."""

    projection: str
    part: TensorSlice  # of the weight
    a: TensorSlice | None
    b: TensorSlice | None


class Adapter(torch.nn.Module):
    """A [rank, in] and B [out, rank] of one HF matrix, or this rank's part of them."""

    def __init__(self, a: TensorSlice, b: TensorSlice, like: Tensor) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.empty(a.size, dtype=like.dtype, device=like.device))
        self.b = torch.nn.Parameter(torch.empty(b.size, dtype=like.dtype, device=like.device))


class AdapterBranch(torch.nn.Module):
    """The adapters of a weight, in which several HF matrices may lie (q, k and v; gate and up).

    `rows` are these, each with its rows in one of the weight's `groups` (of heads). A weight that is divided
    by columns `sums_input` over the ranks.
    """

    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        rows: Mapping[str, int],
        *,
        groups: int,
        scale: float,
        sums_input: bool,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.enabled = True
        self._rows, self._groups, self._scale = rows, groups, scale
        # From `A x` of this rank's columns or tokens to that of its output's; the last sums gradients.
        self._exchange = {
            (True, True): tensor_parallel.reduce_scatter_to_sequence_parallel_region,
            (True, False): tensor_parallel.reduce_from_tensor_model_parallel_region,
            (False, True): tensor_parallel.gather_from_sequence_parallel_region,
            (False, False): tensor_parallel.copy_to_tensor_model_parallel_region,
        }[sums_input, sequence_parallel]
        self._names = tuple(adapters)
        for name, adapter in adapters.items():
            self.add_module(name, adapter)
            # Mark parameters that are shards (the norm sums them) and those whose gradients are partial.
            shard, dim, copy = (adapter.a, 1, adapter.b) if sums_input else (adapter.b, 0, adapter.a)
            tensor_parallel.set_tensor_model_parallel_attributes(shard, True, dim, 1)
            # Under sequence parallelism a rank multiplies the copied one with its own tokens only.
            copy.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, 1, rows of the weight on this rank] from the weight's own input."""
        adapters = [getattr(self, name) for name in self._names]
        low = x @ torch.cat([adapter.a for adapter in adapters]).t() * self._scale
        parts = self._exchange(low).split([adapter.a.shape[0] for adapter in adapters], dim=-1)
        pairs = zip(self._names, parts, adapters, strict=True)
        added = {name: part @ adapter.b.t() for name, part, adapter in pairs}
        groups = [
            added[name].unflatten(-1, (self._groups, count))
            if name in added
            else parts[0].new_zeros(*parts[0].shape[:-1], self._groups, count)
            for name, count in self._rows.items()
        ]
        return torch.cat(groups, dim=-1).flatten(-2)


class Adapters:
    def __init__(self, shape: ModelShape, lora: LoraConfig, rank: PolicyRank) -> None:
        self.slices = adapter_slices(shape, lora, rank)
        self._shape = shape
        self._lora, self._sequence_parallel = lora, rank.layout.sequence_parallel
        # By weight: the matrices in it, of which at least one has a pair.
        pairs = {part.param: part for part in self.slices}
        matrices: dict[str, list[_Matrix]] = defaultdict(list)
        for part in policy_slices(shape, rank):
            names = adapter_params(part.param, part.name)
            matrix = _Matrix(projection_of(part.name), part, pairs.get(names.a), pairs.get(names.b))
            matrices[part.param].append(matrix)
        self._weights = {param: found for param, found in matrices.items() if any(m.a for m in found)}
        self._branches: list[AdapterBranch] = []

    def attach(self, model: Any, chunk: int) -> None:
        """Freeze a stage's `chunk`-th run of layers, but no scalar head; add adapters to its weights."""
        model.requires_grad_(False)
        if model.scalar_head is not None:
            model.scalar_head.requires_grad_(True)
        for param, matrices in self._weights.items():
            number, name = chunk_of(param)
            if number != chunk:
                continue
            linear: Any = model.get_submodule(name.removesuffix(".weight"))
            pairs = {m.projection: (m.a, m.b) for m in matrices}
            columns = next(a for a, _ in pairs.values() if a is not None)
            linear.lora = AdapterBranch(
                {name: Adapter(a, b, linear.weight) for name, (a, b) in pairs.items() if a and b},
                {m.projection: m.part.size[0] for m in matrices},
                groups=len(matrices) // len(pairs),
                scale=self._lora.scale,
                sums_input=columns.size != columns.shape,
                sequence_parallel=self._sequence_parallel,
            )
            linear.register_forward_hook(_add_branch)
            self._branches.append(linear.lora)

    def described(self) -> dict[str, str]:
        targets = ", ".join(dict.fromkeys(m.projection for ms in self._weights.values() for m in ms if m.a))
        return {"adapters": f"rank {self._lora.rank}, alpha {self._lora.alpha:g}, on {targets}"}

    def begin(self, parameters: Mapping[str, Tensor], seed: int) -> None:
        """Set the first values: of the adapter at `policy.lora.start`, or drawn. Raises UnsupportedModel."""
        if self._lora.start is None:
            self._draw(parameters, seed)
            return
        if (problem := start_problem(self._lora, self._shape, "lora")) is not None:
            raise UnsupportedModel(f"{problem.field} = {problem.value}: {problem.fix}")
        with safe_open(read_peft_adapter(self._lora.start, self._shape).weights, framework="pt") as file:
            for part in self.slices:
                local_view(parameters, part).copy_(file.get_slice(part.name)[part.box])

    def _draw(self, parameters: Mapping[str, Tensor], seed: int) -> None:
        """Draw the first values as PEFT does: A uniform (Kaiming's for leaky ReLUs of slope sqrt(5)), B 0."""
        for part in self.slices:
            values = torch.zeros(part.shape)
            if part.name.endswith(".lora_A.weight"):  # drawn whole, so that no layout has other values
                digest = hashlib.sha256(f"{seed} {part.name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                bound = 1 / math.sqrt(part.shape[1])
                values.uniform_(-bound, bound, generator=generator)
            local_view(parameters, part).copy_(values[part.box])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes without adapters: as the reference, which it was before training."""
        for branch in self._branches:
            branch.enabled = False
        try:
            yield
        finally:
            for branch in self._branches:
                branch.enabled = True

    def merged(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The parameters with the adapters added to the weights, computed when one is asked for."""

        def merged(name: str) -> Tensor:
            weight = {name: parameters[name].clone()}
            for matrix in self._weights[name]:
                if matrix.a is not None and matrix.b is not None:
                    first = matrix.part.start[0] - matrix.b.start[0]
                    b = parameters[matrix.b.param][first : first + matrix.part.size[0]]
                    a = parameters[matrix.a.param]
                    merge_adapter(local_view(weight, matrix.part), a, b, self._lora.scale)
            return weight[name]

        return ComputedTensors(parameters, self._weights, merged)


def _add_branch(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Megatron's linears give their output and the bias that a later module adds."""
    if not linear.lora.enabled:
        return output
    x = inputs[0]
    norm = getattr(linear, "layer_norm_weight", None)
    if norm is not None:  # Transformer Engine puts a norm into the module of some weights
        weight = norm + 1 if linear.zero_centered_gamma else norm
        x = torch.nn.functional.rms_norm(x, norm.shape, weight, linear.eps)
    return output[0] + linear.lora(x), output[1]
