"""The EAGLE-3 head (arXiv 2503.01840) of a model: a plain module that computes it, and its folder.

With t[i] the tokens of a sequence, E the model's embeddings, and a[i], b[i], c[i] its hidden states after a
low, a middle and a high number of layers, the head computes

    h[i] = W [a[i]; b[i]; c[i]]
    r[i] = h[i] + attention([norm(E[t[i + 1]]); norm(h[i])])        o[i] = r[i] + mlp(norm(r[i]))

and softmax(lm_head(norm(o[i]))) predicts t[i + 2]. Positions and attention are those of the token i. A draft
continues with o[i] in place of h at the position i + 1, next to E[t[i + 2]], and so on. The names of the
weights are those that vLLM and TensorRT-LLM load; a folder has no embedding, so engines use the model's.
`lm_head` may have the most frequent tokens only: row j is then that of the token j + d2t[j].
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .eagle3_shape import ARCHITECTURE, LAYERS, LM_HEAD, Eagle3Shape, stored_names
from .hf_config import SINGLE_FILE, BrokenModelFolder, UnsupportedModel, read_json_object
from .hf_folder import HfFolder
from .hf_writer import writing_folder

D2T = "d2t"
EMBEDDING = 0  # the hidden state after no layer

# (query [n, heads, dim], key and value [n, kv_heads, dim]) -> [n, heads * dim], causal within each sequence;
# queries and keys come without their positions.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """The shape and type of `x` [..., size], computed in float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)


class _Linear(nn.Linear):
    """Without a bias, in the type of its input."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class _Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self._head_dim, width = shape.head_dim, 2 * shape.hidden_size
        query, key = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = _Linear(width, query)
        self.k_proj = _Linear(width, key)
        self.v_proj = _Linear(width, key)
        self.o_proj = _Linear(query, shape.hidden_size)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """[n, H] of `x` [n, 2 H]."""
        of_heads = (p(x).unflatten(-1, (-1, self._head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(*of_heads))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = _Linear(shape.hidden_size, shape.ffn_hidden_size)
        self.up_proj = _Linear(shape.hidden_size, shape.ffn_hidden_size)
        self.down_proj = _Linear(shape.ffn_hidden_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        norm = (shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm, self.hidden_norm = _Norm(*norm), _Norm(*norm)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(*norm)
        self.mlp = _Mlp(shape)

    def forward(self, embedded: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(both, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Eagle3Head(nn.Module):
    """The head in plain PyTorch, with its weights in float32 and under their names in a folder."""

    def __init__(self, shape: Eagle3Shape, vocabulary_rows: int | None = None) -> None:
        """`vocabulary_rows` of `lm_head` are held here; all of them if None."""
        super().__init__()
        self.fc = _Linear(3 * shape.hidden_size, shape.hidden_size)
        self.midlayer = _Layer(shape)
        self.norm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        rows = shape.draft_vocab_size if vocabulary_rows is None else vocabulary_rows
        self.lm_head = _Linear(shape.hidden_size, rows)

    def forward(self, embedded: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        """[n, H] before `norm`, with which a draft continues in place of `hidden`; see `combined`.

        `embedded` [n, H] are embeddings of the next tokens.
        """
        return self.midlayer(embedded, hidden, attend)  # type: ignore[no-any-return]

    def combined(self, states: Tensor) -> Tensor:
        """`hidden` [n, H] of the first step, of the model's states [n, 3 H]."""
        return self.fc(states)  # type: ignore[no-any-return]

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw the matrices with a deviation of 1 / sqrt(columns); norms are 1, and `lm_head` is 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 1 or name == LM_HEAD:
                weight.fill_(weight.dim() == 1)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1]))


def read_head(folder: Path, shape: Eagle3Shape) -> dict[str, Tensor]:
    """The weights of a folder by name. Without `lm_head` the model's is meant. Raises BrokenModelFolder."""
    stored = HfFolder(folder)
    names = stored_names(stored.names())
    expected = shape.tensors()
    if missing := expected.keys() - names.keys() - {LM_HEAD}:
        raise BrokenModelFolder(f"{folder} holds no tensor {min(missing)!r} of a head for drafts")
    return {name: stored.tensor(names[name], extents) for name, extents in expected.items() if name in names}


def read_d2t(folder: Path, shape: Eagle3Shape) -> Tensor | None:
    """`d2t` [D] of a head that drafts some of the tokens only.

    Raises BrokenModelFolder, and UnsupportedModel if it does not name them in their order.
    """
    if shape.draft_vocab_size == shape.vocab_size:
        return None
    with safe_open(HfFolder(folder).file(D2T), framework="pt") as file:  # of integers
        d2t: Tensor = file.get_tensor(D2T).long()
    ids = drafted_ids(d2t)
    ascends = bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < shape.vocab_size
    if len(ids) != shape.draft_vocab_size or not ascends:
        count = shape.draft_vocab_size
        raise UnsupportedModel(f"{folder}: {D2T} does not name {count} tokens of the model in their order")
    return d2t


def drafted_ids(d2t: Tensor) -> Tensor:
    """[D] ids of the tokens that a head drafts."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def write_head(out: Path, shape: Eagle3Shape, weights: Mapping[str, Tensor], like: Path) -> None:
    """Write a folder that engines draft by; positions are those of the folder `like`, of a model or a head.

    Raises FileExistsError.
    """
    model = read_json_object(like / "config.json")
    ropes = ("rope_parameters", "rope_scaling", "rope_theta")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        **{name: model[name] for name in ropes if name in model},
        "max_position_embeddings": model["max_position_embeddings"],
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": str(weights[LM_HEAD].dtype).removeprefix("torch."),
        "eagle_config": {LAYERS: list(shape.layers), "use_aux_hidden_state": True},
    }
    with writing_folder(out) as folder:
        save_file(dict(weights), folder / SINGLE_FILE, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
