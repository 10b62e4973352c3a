"""The shape of an EAGLE-3 head and its description in a folder (`nemorl.models.eagle3`). Imports no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .hf_config import HfConfig, UnsupportedModel, read_json_object
from .shape import ModelShape, Rope

LM_HEAD = "lm_head.weight"
SENT = "draft_head."  # before the names of the weights in updates of engines
ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYERS = "eagle_aux_hidden_state_layer_ids"  # where vLLM looks, in `eagle_config`
ANY_LAYERS = 8  # the number of layers of a model does not change the size of its head
_MIN_LAYERS = 7  # from which on the layers of `default_layers` differ

Layers = tuple[int, int, int]


def default_layers(num_layers: int) -> Layers:
    """The numbers of layers after which the states are taken: vLLM's, or the last three of small models."""
    if num_layers < _MIN_LAYERS:
        return num_layers - 2, num_layers - 1, num_layers
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True)
class Eagle3Shape:
    hidden_size: int  # also of the model
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # of the model
    draft_vocab_size: int  # tokens that the head drafts
    rope: Rope
    rms_norm_eps: float
    layers: Layers

    @classmethod
    def of(cls, model: ModelShape, layers: Layers | None = None) -> "Eagle3Shape":
        """A layer of the model's own size."""
        return cls(
            hidden_size=model.hidden_size,
            ffn_hidden_size=model.ffn_hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            draft_vocab_size=model.vocab_size,
            rope=model.rope,
            rms_norm_eps=model.rms_norm_eps,
            layers=layers or default_layers(model.num_layers),
        )

    @classmethod
    def read(cls, folder: Path, num_layers: int) -> "Eagle3Shape":
        """That of a folder with a head for a model of `num_layers`.

        Raises BrokenModelFolder, and UnsupportedModel for heads that are computed in another way.
        """
        config = HfConfig(read_json_object(folder / "config.json"), str(folder / "config.json"))
        architectures = config.get("architectures", [])
        if ARCHITECTURE not in architectures:
            reason = f"a head for drafts is a {ARCHITECTURE}"
            raise UnsupportedModel(f"{config.source}: architectures is {architectures}; {reason}")
        config.require(
            num_hidden_layers=1,
            attention_bias=False,
            norm_before_residual=False,
            norm_before_fc=False,
            fc_norm=False,
            norm_output=False,
        )
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        vocabulary = config.integer("vocab_size")
        named = config.get(LAYERS) or config.get("eagle_config", {}).get(LAYERS)
        layers = named or default_layers(num_layers)
        if len(layers) != len(default_layers(num_layers)):
            reason = f"{LAYERS} is {named}; only three hidden states are supported"
            raise UnsupportedModel(f"{config.source}: {reason}")
        return cls(
            hidden_size=hidden,
            ffn_hidden_size=config.integer("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=config.integer("num_key_value_heads", heads),
            head_dim=config.integer("head_dim", hidden // heads),
            vocab_size=vocabulary,
            draft_vocab_size=config.integer("draft_vocab_size", vocabulary),
            rope=config.rope(),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            layers=tuple(layers),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights, without `d2t`."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        query, key = (n * self.head_dim for n in (self.num_attention_heads, self.num_key_value_heads))
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        return {
            "fc.weight": (hidden, 3 * hidden),
            **{f"midlayer.{name}.weight": (hidden,) for name in norms},
            "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
            **{f"midlayer.self_attn.{name}_proj.weight": (key, 2 * hidden) for name in "kv"},
            "midlayer.self_attn.o_proj.weight": (hidden, query),
            **{f"midlayer.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")},
            "midlayer.mlp.down_proj.weight": (hidden, ffn),
            "norm.weight": (hidden,),
            LM_HEAD: (self.draft_vocab_size, hidden),
        }

    def sent_tensors(self) -> dict[str, tuple[int, ...]]:
        """`tensors` by their names in updates of engines, where the policy has an `lm_head` too."""
        return {SENT + name: extents for name, extents in self.tensors().items()}

    def num_parameters(self, ranks: int = 1) -> int:
        """Weights of one of the tensor-parallel ranks, which divide `lm_head`."""
        sizes = {name: math.prod(extents) for name, extents in self.tensors().items()}
        return sum(sizes.values()) - sizes[LM_HEAD] + -(-sizes[LM_HEAD] // ranks)


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """The names in a folder by those of `tensors`; published folders name the layer in several ways."""
    return {name.replace("layers.0.", "midlayer.").removeprefix("model."): name for name in names}


def is_head(folder: Path) -> bool:
    """True if a folder has such a head. Raises BrokenModelFolder."""
    return ARCHITECTURE in read_json_object(folder / "config.json").get("architectures", [])


def head_shape(model: ModelShape, layers: Layers | None, folder: Path | None) -> Eagle3Shape:
    """The shape of a head to train: that of the head in `folder`, or a layer of the model's size.

    Raises UnsupportedModel if the folder's does not fit the model or `layers`, and as `Eagle3Shape.read`.
    """
    if folder is None:
        return Eagle3Shape.of(model, layers)
    shape = Eagle3Shape.read(folder, model.num_layers)
    fits = replace(shape, hidden_size=model.hidden_size, vocab_size=model.vocab_size)
    fits = replace(fits, layers=layers or shape.layers)
    if fits != shape:
        there = f"hidden size {shape.hidden_size}, {shape.vocab_size} tokens and the layers {shape.layers}"
        here = f"{fits.hidden_size}, {fits.vocab_size} and {fits.layers}"
        raise UnsupportedModel(f"the head in {folder} is of another model: it has {there}, not {here}")
    return shape
