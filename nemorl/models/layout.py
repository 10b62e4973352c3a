"""The parts of HF tensors that a policy rank holds: a pure function of shape and layout. No torch."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nemorl.config.policy import LayoutConfig

from .family import HfTensor, LayerKind, Split, Stage, WeightRule
from .layout_rules import division_problems, layers_by_stage
from .registry import family_of
from .shape import Dim, ModelShape
from .slices import TensorSlice

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
# transformers' sequence classification with one label
_SCORE = HfTensor("score.weight", (Dim.ONE, Dim.HIDDEN))
SCALAR_HEAD = WeightRule("scalar_head.weight", (_SCORE,), Split.REPLICATED, Stage.LAST)


@dataclass(frozen=True)
class PolicyRank:
    """The place of a policy process in the axes that divide weights; CP and DP copy them."""

    layout: LayoutConfig = field(default_factory=LayoutConfig)
    tp_rank: int = 0
    pp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0


def policy_rank(layout: LayoutConfig, rank: int) -> PolicyRank:
    """A process by its global rank.

    Megatron's order tp-cp-ep-dp-pp: within a stage TP neighbors are adjacent, then CP, then DP. For experts
    the same processes are laid out differently: ETP neighbors are adjacent, then EP, then the copies.
    """
    pp_rank, place = divmod(rank, layout.stage_size)
    tp_size, ep_size = layout.tensor_parallel_size, layout.expert_parallel_size
    group, etp_rank = divmod(place, layout.expert_tensor_parallel_size)
    return PolicyRank(layout, place % tp_size, pp_rank, group % ep_size, etp_rank)


def stage_layers(num_layers: int, layout: LayoutConfig, pp_rank: int, chunk: int = 0) -> range:
    """Layers of a stage, or of its `chunk`-th run under VPP; only of layouts without `division_problems`."""
    chunks = layout.virtual_pipeline_parallel_size
    sizes = layers_by_stage(num_layers, layout)
    before = sum(sizes) // chunks * chunk + sum(sizes[:pp_rank]) // chunks
    return range(before, before + sizes[pp_rank] // chunks)


def padded_vocab_size(shape: ModelShape, tp_size: int) -> int:
    """Rows of Megatron's embedding: the vocabulary, padded to a multiple of the tensor-parallel size."""
    return -(-shape.vocab_size // tp_size) * tp_size


def hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes (on disk) of the tensors of the HF checkpoint; no `lm_head.weight` when tied."""
    return tensors_of(weight_rules(shape), shape)


def mtp_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Those of the layers for further tokens alone."""
    others = hf_tensors(replace(shape, mtp=None))
    return {name: extents for name, extents in hf_tensors(shape).items() if name not in others}


def mtp_parts(shape: ModelShape) -> dict[str, str]:
    """HF names of what the first of these layers has besides an ordinary layer, by Megatron's names."""
    found = {}
    for rule in weight_rules(shape):
        name = rule.param.removeprefix("mtp.layers.{layer}.").removesuffix(".weight")
        if rule.stage is Stage.MTP and "." not in name:
            found[name] = tensor_name(rule.tensors[0].name, shape, shape.num_layers)
    return found


def weight_rules(shape: ModelShape) -> tuple[WeightRule, ...]:
    """The parameters of a model, as its family declares them, with the head that it has."""
    rules, is_scalar = family_of(shape).weights(shape), shape.head == "scalar"
    return tuple(SCALAR_HEAD if is_scalar and rule.tensors[0].name == _HEAD else rule for rule in rules)


def tensors_of(rules: Sequence[WeightRule], shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return {
        tensor_name(tensor.name, shape, layer, expert): tensor.stored_shape(shape)
        for stage in Stage
        for layer in _layers_of(stage, shape)
        for rule in _rules_of(rules, shape, stage, layer)
        for expert in range(shape.moe.num_experts if rule.experts and shape.moe else 1)
        if not is_tied_head(rule, shape)
        for tensor in rule.tensors
    }


def hf_copies(shape: ModelShape) -> dict[str, str]:
    """Names under which layers for further tokens have tensors of the model on disk, with the tensors'."""
    copies, tensors = family_of(shape).copies, hf_tensors(shape)
    found = {
        tensor_name(copy, shape, layer): name
        for layer in _layers_of(Stage.MTP, shape)
        for copy, name in copies.items()
    }
    # With tied embeddings the head is the embedding.
    return {copy: name if name in tensors else _EMBEDDING for copy, name in found.items()}


def tensor_name(name: str, shape: ModelShape, layer: int, expert: int = 0) -> str:
    """The name of an HfTensor of a layer by its number, those for further tokens included."""
    return name.format(layer=layer, expert=expert, mtp=layer - shape.num_layers)


def _layers_of(stage: Stage, shape: ModelShape) -> range:
    """Numbers of the layers for which a stage's rules are; one, which counts for nothing, for no layers."""
    match stage:
        case Stage.LAYERS:
            return range(shape.num_layers)
        case Stage.MTP:
            return range(shape.num_layers, shape.num_layers + shape.num_mtp_layers)
        case _:
            return range(1)


def policy_slices(shape: ModelShape, rank: PolicyRank) -> list[TensorSlice]:
    """The slices of one policy rank, in the parameters of Megatron's local layer spec.

    Rows that pad the vocabulary belong to no slice. With tied embeddings the last of several stages holds a
    copy of the embedding in `output_layer.weight`, and with layers for further tokens in any case one in
    `embedding.word_embeddings.weight`, which a tied head then shares. Parameters of the second and later runs
    of layers under VPP are named `chunk1.…` and so on. Raises ValueError naming the sizes that do not divide.
    """
    return slices_of(weight_rules(shape), shape, rank)


def slices_of(rules: Sequence[WeightRule], shape: ModelShape, rank: PolicyRank) -> list[TensorSlice]:
    layout = rank.layout
    for problem in division_problems(shape, layout):
        raise ValueError(f"{problem.field} is {problem.value}: {problem.fix}")
    found: list[TensorSlice] = []

    def add(stage: Stage, prefix: str, layer: int = 0, local_layer: int = 0) -> None:
        for rule in _rules_of(rules, shape, stage, layer):
            if is_tied_head(rule, shape):
                if not has_own_head(shape, layout):  # the head uses the embedding's own parameter
                    continue
                rule = WeightRule(rule.param, (HfTensor(_EMBEDDING, rule.tensors[0].dims),), rule.split)
            for local_expert, expert in enumerate(_experts(rule, shape, rank)):
                parts = [_Part.of(tensor, shape, layer, expert, rule.experts) for tensor in rule.tensors]
                param = prefix + rule.param.format(layer=local_layer, expert=local_expert)
                found.extend(_rule_slices(rule, parts, param, shape, rank))

    chunks = layout.virtual_pipeline_parallel_size
    for chunk in range(chunks):
        prefix = chunk_prefix(chunk)
        if rank.pp_rank == 0 and chunk == 0:
            add(Stage.FIRST, prefix)
        for local, layer in enumerate(stage_layers(shape.num_layers, layout, rank.pp_rank, chunk)):
            add(Stage.LAYERS, prefix, layer, local)
        if rank.pp_rank == layout.pipeline_parallel_size - 1 and chunk == chunks - 1:
            add(Stage.LAST, prefix)
            for local, layer in enumerate(_layers_of(Stage.MTP, shape)):
                add(Stage.MTP, prefix, layer, local)
            if shape.mtp is not None and layout.pipeline_parallel_size > 1:
                add(Stage.FIRST, prefix)  # the embedding, of which these layers have a copy
    return found


def has_own_head(shape: ModelShape, layout: LayoutConfig) -> bool:
    """True if the last stage has a parameter for the head, and not only the embedding's."""
    return not shape.tied_embeddings or (layout.pipeline_parallel_size > 1 and shape.mtp is None)


def is_tied_head(rule: WeightRule, shape: ModelShape) -> bool:
    """True if a rule's tensor is the embedding's, under the head's name."""
    return shape.tied_embeddings and rule.tensors[0].name == _HEAD


def chunk_prefix(chunk: int) -> str:
    return f"chunk{chunk}." if chunk else ""


def chunk_of(param: str) -> tuple[int, str]:
    """The number of a parameter's run of layers, and its name there."""
    first, _, rest = param.partition(".")
    return (int(first.removeprefix("chunk")), rest) if first.startswith("chunk") else (0, param)


def _rules_of(rules: Sequence[WeightRule], shape: ModelShape, stage: Stage, layer: int) -> list[WeightRule]:
    kinds = {LayerKind.ALL, LayerKind.MOE if shape.is_moe(layer) else LayerKind.DENSE}
    here = (rule for rule in rules if rule.stage is stage)
    return [rule for rule in here if stage in (Stage.FIRST, Stage.LAST) or rule.layers in kinds]


def _experts(rule: WeightRule, shape: ModelShape, rank: PolicyRank) -> range:
    if not rule.experts or shape.moe is None:
        return range(1)
    local = shape.moe.num_experts // rank.layout.expert_parallel_size
    return range(rank.ep_rank * local, (rank.ep_rank + 1) * local)


@dataclass(frozen=True)
class _Part:
    """The part of an HF tensor that belongs to one parameter, as the parameter sees it."""

    name: str
    shape: tuple[int, ...]  # of the whole HF tensor, unmerged
    fixed: dict[int, int]  # place along each axis that the parameter does not have
    axes: tuple[int, ...]  # of the HF tensor, in the parameter's order

    @classmethod
    def of(cls, tensor: HfTensor, shape: ModelShape, layer: int, expert: int, of_expert: bool) -> "_Part":
        dims = tensor.axes
        fixed = {dims.index(Dim.EXPERTS): expert} if of_expert and Dim.EXPERTS in dims else {}
        if tensor.part is not None:
            fixed[dims.index(Dim.TWO)] = tensor.part
        axes = [axis for axis in range(len(dims)) if axis not in fixed]
        name, extents = tensor_name(tensor.name, shape, layer, expert), tuple(map(shape.extent, dims))
        return cls(name, extents, fixed, tuple(reversed(axes) if tensor.transposed else axes))

    @property
    def extents(self) -> tuple[int, ...]:
        """Rows first, as in the parameter."""
        return tuple(self.shape[axis] for axis in self.axes)

    def box(self, first: int, count: int, param: str, offset: int, axis: int = 0) -> TensorSlice:
        """`count` rows (or columns, by `axis`) from `first` on, contiguous in the parameter from `offset`."""
        start, size = [0] * len(self.axes), list(self.extents)
        start[axis], size[axis] = first, count
        strides = [math.prod(size[a + 1 :]) for a in range(len(size))]
        spread = {hf: (start[a], size[a], strides[a]) for a, hf in enumerate(self.axes)}
        spread |= {hf: (place, 1, 1) for hf, place in self.fixed.items()}
        by_axis = [spread[hf] for hf in range(len(self.shape))]
        starts, sizes, steps = (tuple(values) for values in zip(*by_axis, strict=True))
        return TensorSlice(self.name, self.shape, starts, sizes, param, offset, steps)


def _rule_slices(
    rule: WeightRule, parts: list[_Part], param: str, shape: ModelShape, rank: PolicyRank
) -> Iterator[TensorSlice]:
    tp_rank, tp_size = rank.tp_rank, rank.layout.tensor_parallel_size
    if rule.experts:
        tp_rank, tp_size = rank.etp_rank, rank.layout.expert_tensor_parallel_size
    part, rows = parts[0], parts[0].extents[0]
    match rule.split:
        case Split.REPLICATED:
            yield part.box(0, rows, param, 0)
        case Split.COLUMNS:
            share = part.extents[1] // tp_size
            yield part.box(tp_rank * share, share, param, 0, axis=1)
        case Split.VOCABULARY:
            share = padded_vocab_size(shape, tp_size) // tp_size
            start = tp_rank * share
            if start < rows:
                yield part.box(start, min(share, rows - start), param, 0)
        case Split.HEAD_GROUPS | Split.ROWS:
            # Rows are cut into equal groups, in each of which the tensors follow one another; each rank has a
            # run. Where there are fewer groups than ranks, a group's rows go to several of them.
            groups = shape.num_key_value_heads if rule.split is Split.HEAD_GROUPS else tp_size
            share = sum(part.extents[0] for part in parts) // tp_size
            first, last = tp_rank * share, (tp_rank + 1) * share
            place, offset = 0, 0
            for group, part in itertools.product(range(groups), parts):
                rows = part.extents[0] // groups
                begin, end = max(first, place), min(last, place + rows)
                if begin < end:
                    box = part.box(group * rows + begin - place, end - begin, param, offset)
                    offset += box.num_elements
                    yield box
                place += rows
