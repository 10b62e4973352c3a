"""Which part of which HF tensor a policy rank holds, and where: a pure function of shape and layout.

Imports no torch: the checks of a config and the memory plan use it before anything starts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .family import HfTensor, Split, Stage, WeightRule
from .registry import family_of
from .shape import ModelShape
from .slices import TensorSlice

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class PolicyRank:
    """Where a policy process stands in tensor and pipeline parallelism; data parallelism copies."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


def padded_vocab_size(shape: ModelShape, tp_size: int) -> int:
    """Rows of Megatron's embedding: the vocabulary, padded to a multiple of the tensor-parallel size."""
    return -(-shape.vocab_size // tp_size) * tp_size


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of the HF checkpoint, in its order; no `lm_head.weight` when tied."""
    rules = family_of(shape).weights
    return {
        tensor.name.format(layer=layer): _extents(shape, tensor)
        for stage in Stage
        for layer in range(shape.num_layers if stage is Stage.LAYERS else 1)
        for rule in rules
        if rule.stage is stage
        for tensor in rule.tensors
        if not (shape.tied_embeddings and tensor.name == _HEAD)
    }


def policy_slices(shape: ModelShape, rank: PolicyRank) -> list[TensorSlice]:
    """What one policy rank holds, in the parameters of Megatron's local layer spec.

    Layers are split evenly over the stages. Rows that pad the vocabulary belong to no slice. With tied
    embeddings the last of several stages holds a copy of the embedding in `output_layer.weight`.
    Raises ValueError naming the sizes that do not divide.
    """
    _check_divisible(shape, rank)
    rules = family_of(shape).weights
    layers_per_stage = shape.num_layers // rank.pp_size
    first_layer = rank.pp_rank * layers_per_stage
    found: list[TensorSlice] = []
    if rank.pp_rank == 0:
        found += _stage_slices(rules, Stage.FIRST, shape, rank)
    for local in range(layers_per_stage):
        found += _stage_slices(rules, Stage.LAYERS, shape, rank, layer=first_layer + local, local_layer=local)
    if rank.pp_rank == rank.pp_size - 1:
        found += _stage_slices(rules, Stage.LAST, shape, rank)
    return found


def _stage_slices(
    rules: tuple[WeightRule, ...],
    stage: Stage,
    shape: ModelShape,
    rank: PolicyRank,
    layer: int = 0,
    local_layer: int = 0,
) -> Iterator[TensorSlice]:
    for rule in rules:
        if rule.stage is not stage:
            continue
        tensors = {t.name.format(layer=layer): _extents(shape, t) for t in rule.tensors}
        if shape.tied_embeddings and _HEAD in tensors:
            if rank.pp_size == 1:  # the head uses the embedding's own parameter
                continue
            tensors = {_EMBEDDING: tensors[_HEAD]}
        yield from _rule_slices(rule.split, tensors, rule.param.format(layer=local_layer), shape, rank)


def _rule_slices(
    split: Split, tensors: dict[str, tuple[int, ...]], param: str, shape: ModelShape, rank: PolicyRank
) -> Iterator[TensorSlice]:
    """Slices of one parameter; `tensors` are the HF tensors in it, by name, with their shapes."""
    match split:
        case Split.HEAD_GROUPS:
            yield from _interleaved(tensors, param, rank, groups=shape.num_key_value_heads)
        case Split.ROWS:
            yield from _interleaved(tensors, param, rank, groups=rank.tp_size)
        case Split.REPLICATED:
            for name, extents in tensors.items():
                yield _box(name, extents, (0,) * len(extents), extents, param)
        case Split.COLUMNS:
            for name, (rows, columns) in tensors.items():
                share = columns // rank.tp_size
                yield _box(name, (rows, columns), (0, rank.tp_rank * share), (rows, share), param)
        case Split.VOCABULARY:
            share = padded_vocab_size(shape, rank.tp_size) // rank.tp_size
            start = rank.tp_rank * share
            for name, (rows, columns) in tensors.items():
                if start < rows:
                    yield _box(name, (rows, columns), (start, 0), (min(share, rows - start), columns), param)


def _interleaved(
    tensors: dict[str, tuple[int, ...]], param: str, rank: PolicyRank, groups: int
) -> Iterator[TensorSlice]:
    """Rows cut into equal groups, a run of groups per rank; in each group the tensors follow one another."""
    local_groups = groups // rank.tp_size
    offset = 0
    for group in range(rank.tp_rank * local_groups, (rank.tp_rank + 1) * local_groups):
        for name, (rows, *rest) in tensors.items():
            size = (rows // groups, *rest)
            box = _box(name, (rows, *rest), (group * size[0], *[0] * len(rest)), size, param, offset)
            offset += box.num_elements
            yield box


def _box(
    name: str,
    extents: tuple[int, ...],
    start: tuple[int, ...],
    size: tuple[int, ...],
    param: str,
    offset: int = 0,
) -> TensorSlice:
    """A box that lies contiguous in its parameter, from `offset` on."""
    strides = tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))
    return TensorSlice(name, extents, start, size, param, offset, strides)


def _extents(shape: ModelShape, tensor: HfTensor) -> tuple[int, ...]:
    return tuple(shape.extent(dim) for dim in tensor.dims)


def _check_divisible(shape: ModelShape, rank: PolicyRank) -> None:
    checks = (
        ("tensor-parallel", rank.tp_size, "attention heads", shape.num_attention_heads),
        ("tensor-parallel", rank.tp_size, "key-value heads", shape.num_key_value_heads),
        ("tensor-parallel", rank.tp_size, "rows of the MLP (intermediate_size)", shape.ffn_hidden_size),
        ("pipeline-parallel", rank.pp_size, "layers", shape.num_layers),
    )
    for axis, size, what, count in checks:
        if count % size:
            raise ValueError(f"{axis} size {size} does not divide the model's {count} {what}")
