"""Declarations of a model family: how its config.json is read, and where its weights go.

Everything else about a family is computed from these, so that a new one is a short file (docs/families.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .hf_config import HfConfig
from .shape import Dim, ModelShape


class Split(Enum):
    """Division of one Megatron parameter by tensor parallelism; tensors of one rule are concatenated."""

    REPLICATED = "replicated"
    ROWS = "rows"  # Megatron's column-parallel linear: each rank holds its rows of each tensor in turn
    COLUMNS = "columns"  # Megatron's row-parallel linear
    VOCABULARY = "vocabulary"  # rows, after padding the vocabulary to a multiple of the ranks
    HEAD_GROUPS = "head_groups"  # rows interleaved per key-value head: its query heads, its key, its value


class Stage(Enum):
    """Pipeline stages that hold a parameter."""

    FIRST = "first"
    LAYERS = "layers"  # each stage, for its own layers; `{layer}` is part of the names
    LAST = "last"


class LayerKind(Enum):
    """The layers that a rule of `Stage.LAYERS` covers."""

    ALL = "all"
    DENSE = "dense"  # those with an ordinary MLP
    MOE = "moe"  # those with experts


def _as_tuple(dims: Dim | tuple[Dim, ...]) -> tuple[Dim, ...]:
    return dims if isinstance(dims, tuple) else (dims,)


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the HF checkpoint, or the part of it that belongs to one parameter.

    `dims` are its extents on disk. Extents in a nested tuple are one dimension on disk and several in the
    coordinates of slices, so that every second column, say, is a box. An expert's rule takes its own place
    along `Dim.EXPERTS`, and `part` along `Dim.TWO`.
    """

    name: str  # `{layer}` is the layer's number in the whole model, `{expert}` the expert's
    dims: tuple[Dim | tuple[Dim, ...], ...]
    part: int | None = None  # 0 or 1: the place along Dim.TWO that is meant
    transposed: bool = False  # Megatron keeps the two dimensions in the other order

    @property
    def axes(self) -> tuple[Dim, ...]:
        """The extents in the coordinates of slices."""
        return tuple(dim for dims in self.dims for dim in _as_tuple(dims))

    def stored_shape(self, shape: ModelShape) -> tuple[int, ...]:
        return tuple(math.prod(map(shape.extent, _as_tuple(dims))) for dims in self.dims)


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter (or buffer) and the HF tensors that lie in it."""

    param: str  # local layer spec's name; `{layer}` and `{expert}` are the numbers on this rank
    tensors: tuple[HfTensor, ...]
    split: Split
    stage: Stage = Stage.LAYERS
    layers: LayerKind = LayerKind.ALL
    experts: bool = False  # one parameter for each expert, divided by EP and ETP instead of TP
    learns: bool = True  # False for a buffer, which training leaves as the checkpoint has it


def layer_tensor(
    name: str, *dims: Dim | tuple[Dim, ...], part: int | None = None, transposed: bool = False
) -> HfTensor:
    return HfTensor("model.layers.{layer}." + name, dims, part, transposed)


def layer_rule(
    param: str,
    split: Split,
    *tensors: HfTensor,
    layers: LayerKind = LayerKind.ALL,
    experts: bool = False,
    learns: bool = True,
) -> WeightRule:
    name = "decoder.layers.{layer}." + param
    return WeightRule(name, tensors, split, layers=layers, experts=experts, learns=learns)


@dataclass(frozen=True)
class ModelFamily:
    name: str
    architectures: tuple[str, ...]  # of config.json
    read: Callable[[HfConfig], ModelShape]  # raises UnsupportedModel naming the field that is the reason
    weights: Callable[[ModelShape], tuple[WeightRule, ...]]  # the parameters that a model has
    classifier: str | None = None  # transformers' class with a scalar head, where its name is not the usual

    def scalar_architecture(self) -> str:
        """transformers' class of the same model with a head of classes, or of one number."""
        return self.classifier or self.architectures[0].replace("ForCausalLM", "ForSequenceClassification")
