"""Adapters of low rank (LoRA) in the coordinates of PEFT's files: which there are, and what a rank holds.

A matrix W [out, in] of the HF checkpoint gets A [rank, in] and B [out, rank], and the model computes with
`W + alpha / rank * B A` (Hu et al. 2021, arXiv 2106.09685). Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

from nemorl.config.policy import LoraConfig, Projection

from .family import HfTensor, Split, WeightRule
from .layout import SCALAR_HEAD, PolicyRank, slices_of, tensors_of, weight_rules
from .shape import Dim, ModelShape
from .slices import TensorSlice

PEFT_PREFIX = "base_model.model."  # before the names of PEFT's files
_PROJECTIONS: tuple[str, ...] = get_args(Projection)


def adaptable_projections(shape: ModelShape) -> tuple[str, ...]:
    """The names of a model's matrices that can have an adapter: not experts, routers or the head."""
    found = {projection_of(tensor.name) for _, tensor in _adaptable(shape)}
    return tuple(name for name in _PROJECTIONS if name in found)


def adapted_projections(shape: ModelShape, lora: LoraConfig) -> tuple[str, ...]:
    possible, targets = adaptable_projections(shape), lora.targets
    return possible if "all-linear" in targets else tuple(name for name in possible if name in targets)


def adapter_tensors(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """PEFT's names and shapes of all adapters' matrices."""
    return tensors_of(*_rules_and_shape(shape, lora))


def adapter_slices(shape: ModelShape, lora: LoraConfig, rank: PolicyRank) -> list[TensorSlice]:
    """Slices of the adapters on one policy rank, in parameters named as in `adapter_params`."""
    return slices_of(*_rules_and_shape(shape, lora), rank)


class AdapterNames(NamedTuple):
    a: str
    b: str


def peft_names(matrix: str) -> AdapterNames:
    """Names in PEFT's files of the pair of an HF matrix such as `model.layers.0.self_attn.q_proj.weight`."""
    module = PEFT_PREFIX + matrix.removesuffix(".weight")
    return AdapterNames(f"{module}.lora_A.weight", f"{module}.lora_B.weight")


def adapter_params(param: str, matrix: str) -> AdapterNames:
    """Names in the model of the pair of an HF matrix that lies in the Megatron parameter `param`."""
    module = f"{param.removesuffix('.weight')}.lora.{projection_of(matrix)}"
    return AdapterNames(f"{module}.a", f"{module}.b")


@dataclass(frozen=True)
class TrainedWeights:
    """The weights that are trained and in checkpoints: all but buffers, or adapters and a new scalar head."""

    shape: ModelShape
    lora: LoraConfig | None = None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return tensors_of(*self._rules_and_shape())

    def slices(self, rank: PolicyRank) -> list[TensorSlice]:
        return slices_of(*self._rules_and_shape(), rank)

    def _rules_and_shape(self) -> tuple[tuple[WeightRule, ...], ModelShape]:
        rules = weight_rules(self.shape)
        if self.lora is None:
            return tuple(rule for rule in rules if rule.learns), self.shape
        adapters, shape = _rules_and_shape(self.shape, self.lora)
        return (*adapters, *(rule for rule in rules if rule == SCALAR_HEAD)), shape


def projection_of(matrix: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return matrix.removesuffix(".weight").rsplit(".", 1)[-1]


def _adaptable(shape: ModelShape) -> Iterator[tuple[WeightRule, HfTensor]]:
    """PEFT takes a name that experts have for the experts' matrices, those of other layers for none."""
    rules = weight_rules(shape)
    of_experts = {projection_of(tensor.name) for rule in rules if rule.experts for tensor in rule.tensors}
    for rule in rules:
        for tensor in rule.tensors:
            projection = projection_of(tensor.name)
            is_linear = tensor.name.endswith(".weight") and projection in _PROJECTIONS
            if is_linear and projection not in of_experts:
                yield rule, tensor


def _rules_and_shape(shape: ModelShape, lora: LoraConfig) -> tuple[tuple[WeightRule, ...], ModelShape]:
    """Rules of the pairs: A is divided where the matrix is divided by columns, B where it is by rows."""
    targets = adapted_projections(shape, lora)
    rules: list[WeightRule] = []
    for base, tensor in _adaptable(shape):
        if projection_of(tensor.name) in targets:
            rows, columns = tensor.dims
            names, params = peft_names(tensor.name), adapter_params(base.param, tensor.name)
            split_a, split_b = Split.REPLICATED, Split.ROWS
            if base.split is Split.COLUMNS:
                split_a, split_b = Split.COLUMNS, Split.REPLICATED
            a = (HfTensor(names.a, (Dim.ADAPTER_RANK, columns)),)
            b = (HfTensor(names.b, (rows, Dim.ADAPTER_RANK)),)
            rules.append(replace(base, param=params.a, tensors=a, split=split_a))
            rules.append(replace(base, param=params.b, tensors=b, split=split_b))
    return tuple(rules), replace(shape, adapter_rank=lora.rank)
