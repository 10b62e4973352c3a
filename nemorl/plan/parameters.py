"""How many parameters a policy rank holds, counted from the family's rules without listing its slices."""

import math
from dataclasses import dataclass
from functools import lru_cache

from nemorl.config.policy import LayoutConfig
from nemorl.models.family import Dim, HfTensor, LayerKind, Split, Stage, WeightRule
from nemorl.models.layout import is_tied_head, padded_vocab_size, stage_layers, weight_rules
from nemorl.models.shape import ModelShape


@dataclass(frozen=True)
class Parameters:
    """Of one rank. Copies of experts lie on other ranks than copies of the rest."""

    dense: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts

    def per_copy(self, layout: LayoutConfig) -> int:
        """What is left of a rank's state when it is spread over the ranks that hold the same."""
        copies = layout.context_parallel_size * layout.data_parallel_size
        shared = layout.expert_parallel_size * layout.expert_tensor_parallel_size
        return self.dense // copies + self.experts * shared // layout.stage_size


def stage_parameters(shape: ModelShape, layout: LayoutConfig, stage: int) -> Parameters:
    """Parameters of each rank of a pipeline stage, rows that pad the vocabulary included."""
    chunks = range(layout.virtual_pipeline_parallel_size)
    layers = [layer for chunk in chunks for layer in stage_layers(shape.num_layers, layout, stage, chunk)]
    with_experts = sum(shape.is_moe(layer) for layer in layers)
    times = {
        LayerKind.ALL: len(layers),
        LayerKind.MOE: with_experts,
        LayerKind.DENSE: len(layers) - with_experts,
    }
    last = layout.pipeline_parallel_size - 1
    dense = experts = 0
    for rule, elements in _rules(shape):
        if rule.stage is Stage.LAYERS:
            count = times[rule.layers]
        else:
            count = int(stage == (0 if rule.stage is Stage.FIRST else last))
        if is_tied_head(rule, shape) and last == 0:
            continue  # the head uses the embedding's own parameter
        if rule.experts:
            experts += count * _of_rank(elements, rule, shape, layout)
        else:
            dense += count * _of_rank(elements, rule, shape, layout)
    return Parameters(dense, experts)


@lru_cache(maxsize=4)
def _rules(shape: ModelShape) -> tuple[tuple[WeightRule, int], ...]:
    """Every rule of a model with the elements of one of its parameters."""
    return tuple(
        (rule, sum(_elements(tensor, rule, shape) for tensor in rule.tensors)) for rule in weight_rules(shape)
    )


def _of_rank(whole: int, rule: WeightRule, shape: ModelShape, layout: LayoutConfig) -> int:
    """Elements of a rank's parameters of one layer: of all its experts where the rule is theirs."""
    size = layout.tensor_parallel_size
    if rule.experts:
        assert shape.moe is not None, "rules of experts belong to models with experts"
        whole *= shape.moe.num_experts // layout.expert_parallel_size
        size = layout.expert_tensor_parallel_size
    if rule.split is Split.REPLICATED:
        return whole
    if rule.split is Split.VOCABULARY:
        return whole // shape.vocab_size * padded_vocab_size(shape, size) // size
    return whole // size


def _elements(tensor: HfTensor, rule: WeightRule, shape: ModelShape) -> int:
    """Of the part of an HF tensor that belongs to one parameter."""
    dims = list(tensor.axes)
    if rule.experts and Dim.EXPERTS in dims:
        dims.remove(Dim.EXPERTS)
    if tensor.part is not None:
        dims.remove(Dim.TWO)
    return math.prod(shape.extent(dim) for dim in dims)
