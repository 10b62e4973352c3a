"""Declarations of a model family: how its config.json is read, and where its weights go.

Everything else about a family is computed from these, so that a new one is a short file (docs/families.md).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    MTP = "mtp"  # the last one, for the layers that predict further tokens; `{layer}` is part of the names


class LayerKind(Enum):
    """The layers that a rule of `Stage.LAYERS` or `Stage.MTP` covers."""

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

    # `{layer}` is the layer's number in the whole model, `{mtp}` that among those for further tokens, and
    # `{expert}` the expert's.
    name: str
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


_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."  # before names in a layer


def layer_tensor(
    name: str, *dims: Dim | tuple[Dim, ...], part: int | None = None, transposed: bool = False
) -> HfTensor:
    return HfTensor(_HF_LAYER + name, dims, part, transposed)


def layer_rule(
    param: str,
    split: Split,
    *tensors: HfTensor,
    layers: LayerKind = LayerKind.ALL,
    experts: bool = False,
    learns: bool = True,
) -> WeightRule:
    return WeightRule(_LAYER + param, tensors, split, layers=layers, experts=experts, learns=learns)


def mtp_rules(
    rules: Iterable[WeightRule], parts: Mapping[str, str], hf_layer: str = _HF_LAYER
) -> tuple[WeightRule, ...]:
    """Rules of layers for further tokens: of `parts`, and of an ordinary layer, which `rules` are about.

    `parts` are names in the checkpoint by Megatron's: norms, and the projection `eh_proj`; `hf_layer` is the
    beginning of names.
    """
    found = []
    for param, name in parts.items():
        is_norm = param.endswith("norm")
        dims = (Dim.HIDDEN,) if is_norm else (Dim.HIDDEN, Dim.TWICE_HIDDEN)
        split = Split.REPLICATED if is_norm else Split.ROWS
        tensor = HfTensor(f"{hf_layer}{name}.weight", dims)
        found.append(WeightRule(f"mtp.layers.{{layer}}.{param}.weight", (tensor,), split, Stage.MTP))
    for rule in rules:
        if rule.stage is Stage.LAYERS:
            tensors = (replace(t, name=hf_layer + t.name.removeprefix(_HF_LAYER)) for t in rule.tensors)
            name = "mtp.layers.{layer}.transformer_layer." + rule.param.removeprefix(_LAYER)
            found.append(replace(rule, param=name, tensors=tuple(tensors), stage=Stage.MTP))
    return tuple(found)


@dataclass(frozen=True)
class ModelFamily:
    name: str
    architectures: tuple[str, ...]  # of config.json
    read: Callable[[HfConfig], ModelShape]  # raises UnsupportedModel naming the field that is the reason
    weights: Callable[[ModelShape], tuple[WeightRule, ...]]  # the parameters that a model has
    classifier: str | None = None  # transformers' class with a scalar head, where its name is not the usual
    # Names under which layers for further tokens have a tensor of the model, with the tensor's name.
    copies: Mapping[str, str] = field(default_factory=dict)
    drafts_by_heads: bool = True  # vLLM's class returns hidden states of layers, which heads for drafts take

    def scalar_architecture(self) -> str:
        """transformers' class of the same model with a head of classes, or of one number."""
        return self.classifier or self.architectures[0].replace("ForCausalLM", "ForSequenceClassification")
