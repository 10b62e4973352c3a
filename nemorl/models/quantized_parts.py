"""The quantized weights in the parameters of a policy rank: which rows lie where, and what shares a scale."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from nemorl.config.policy import LayoutConfig
from nemorl.config.quantization import QuantizationConfig, QuantizationFormat

from .layout import PolicyRank, policy_slices
from .quantized import BLOCKS, LinearGroup, Unquantizable, experts_of, linear_groups
from .shape import ModelShape
from .slices import TensorSlice


@dataclass(frozen=True)
class QuantizedParam:
    """A matrix of a rank in which rows of one or several weights lie."""

    name: str
    parts: tuple[TensorSlice, ...]  # in the order of its rows
    group: LinearGroup  # that these weights belong to
    of_expert: bool
    columns_are_divided: bool  # over the ranks that share the matrix

    def runs(self) -> Iterator[tuple[TensorSlice, ...]]:
        """The parts of each weight, which are adjacent rows of it."""
        by_name: dict[str, list[TensorSlice]] = defaultdict(list)
        for part in self.parts:
            by_name[part.name].append(part)
        for parts in by_name.values():
            yield tuple(sorted(parts, key=lambda part: part.start))


def quantized_params(
    shape: ModelShape, config: QuantizationConfig, rank: PolicyRank
) -> tuple[QuantizedParam, ...]:
    """Raises Unquantizable, as `linear_groups` and where a block of one scale lies on several ranks."""
    groups = {name: group for group in linear_groups(shape, config.format, config.ignore) for name in group}
    by_param: dict[str, list[TensorSlice]] = defaultdict(list)
    for part in policy_slices(shape, rank):
        if part.name in groups:
            by_param[part.param].append(part)
    found = []
    for name, parts in by_param.items():
        first, ordered = parts[0], tuple(sorted(parts, key=lambda part: part.offset))
        divided = first.size[1] < first.shape[1]
        of_expert = experts_of(first.name) is not None
        param = QuantizedParam(name, ordered, groups[first.name], of_expert, divided)
        _require_whole_blocks(param, config.format)
        found.append(param)
    return tuple(found)


def require_divisible(shape: ModelShape, config: QuantizationConfig, layout: LayoutConfig) -> None:
    """Raises Unquantizable if a rank of a layout cannot round its weights without those of another."""
    stage = layout.model_copy(
        update={
            **dict.fromkeys(("pipeline_parallel_size", "virtual_pipeline_parallel_size"), 1),
            **dict.fromkeys(("layers_in_first_stage", "layers_in_last_stage")),
        }
    )
    sizes = layout.tensor_parallel_size, layout.expert_tensor_parallel_size
    for tp_rank, etp_rank in product(*map(range, sizes)):
        quantized_params(shape, config, PolicyRank(stage, tp_rank=tp_rank, etp_rank=etp_rank))


def _require_whole_blocks(param: QuantizedParam, format: QuantizationFormat) -> None:
    for parts in param.runs():
        first, last = parts[0], parts[-1]
        begin, end = first.start, (last.start[0] + last.size[0], last.start[1] + last.size[1])
        for axis, kind in enumerate(("rows", "columns")):
            block = BLOCKS[format][axis]
            if begin[axis] % block or (end[axis] % block and end[axis] != first.shape[axis]):
                sharing = "expert_tensor_parallel_size" if param.of_expert else "tensor_parallel_size"
                problem = f"a rank has the {kind} {begin[axis]} to {end[axis]} of {first.name}"
                fix = f"lower policy.layout.{sharing}, ignore such layers, or use another format"
                raise Unquantizable(f"{problem}, and {format} requires multiples of {block}; {fix}")
