"""The decoder of the Llama, Qwen2 and Qwen3 families, written for sampling only.

One forward pass takes `N` tokens of any sequences, packed; where their keys and values lie is the business of
the `Attention` it is given.

The KV cache: one row per running sequence, rows 0..n-1 in use, every row as long as the longest needs.

Dense rows let the attention kernel read keys and values in place, without the gather that pages would cost
at every step. The price is the room behind short sequences, so admission counts rows times the longest row.
Storage starts small and grows by reallocation, one layer at a time; it never exceeds `max_tokens`.

How queries meet keys and values: a prefill attends within its prompts, a decoding step to the cache.

Matrix products with weights that change only between steps.

The engine's own parameters, and which boxes of the HF checkpoint they hold.

Query, key and value rows are fused into one matrix, gate and up rows into another: a decoding step is bound
by the number of matrix products and by the weights they stream. Names are `layers.{i}.qkv.weight` and so on;
a tied output head is no parameter of its own.

Rotating queries and keys by the angles of their positions.

The network, its weights and its cache: what turns tokens into logits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nemorl.generation.batching import Prompt
from nemorl.models.hf_folder import HfFolder
from nemorl.models.rope import RotaryTable
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice

# Numbers of keys that the attention kernel reads, within each of its blocks of 512. The CPU kernel sums a row
# over all keys that are read, those beyond the row's end as zeros; with 256 or 320 keys its matrix product
# splits the sum elsewhere, and a sequence's rounding would depend on the longest one in the batch (seen
# with MKL 2024.2 on x86-64; elsewhere the only loss is the bit).
_KEY_BLOCK = 512
_KEYS_IN_BLOCK = (64, 128, 192, 384, 448, 512)


def keys_to_read(length: int) -> int:
    """The least number of keys, at least `length`, for which every row sums in the same order."""
    whole, rest = divmod(length - 1, _KEY_BLOCK)
    return whole * _KEY_BLOCK + next(keys for keys in _KEYS_IN_BLOCK if keys > rest)


class KVCache:
    """Keys and values of `rows x length` tokens for every layer; `layers[i]` is [2, rows, length, width]."""

    def __init__(
        self, num_layers: int, width: int, max_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`width` is key-value heads times their dimension."""
        self._max_tokens = max_tokens
        self._width = width
        self._rows = 0
        self._length = 0
        # Zeros, not garbage: masked keys and values still enter the products, where a NaN would spread.
        self.layers = [torch.zeros(2, 0, 0, width, device=device, dtype=dtype) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens a row has room for."""
        return self._length

    @property
    def num_tokens(self) -> int:
        """Tokens for which memory is held."""
        return self._rows * self._length

    def fits(self, rows: int, length: int) -> bool:
        """Whether `rows` sequences of which the longest has `length` tokens can be held at one time."""
        return rows * length <= self._max_tokens

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens, keeping what the first `rows` hold.

        Raises ValueError when that is more than the cache may hold.
        """
        if rows <= self._rows and length <= self._length:
            return
        if not self.fits(rows, length):
            raise ValueError(
                f"the KV cache may hold {self._max_tokens} tokens, and {rows} rows of {length} tokens are"
                " requested; raise generation.max_kv_tokens"
            )
        kept_rows, kept_length = min(self._rows, rows), min(self._length, length)
        self._rows, self._length = self._new_size(rows, length)
        for index, old in enumerate(self.layers):
            new = old.new_zeros(2, self._rows, self._length, self._width)
            new[:, :kept_rows, :kept_length] = old[:, :kept_rows, :kept_length]
            self.layers[index] = new

    def _new_size(self, rows: int, length: int) -> tuple[int, int]:
        """The requested size, with what it may grow into where the limit leaves room for that."""
        if self._rows > rows and self.fits(self._rows, length):
            rows = self._rows
        grown = max(length, self._length + self._length // 2)
        for roomy in (keys_to_read(grown), max(keys_to_read(length), self._length), keys_to_read(length)):
            if self.fits(rows, roomy):
                return rows, roomy
        return rows, self._max_tokens // rows

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""
        if not sources:
            return
        device = self.layers[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for layer in self.layers:
            layer[:, target, :length] = layer[:, source, :length]


_QUERY_MULTIPLE = 4  # query rows of one kernel call; see `DecodeAttention`


class Attention(Protocol):
    """Attention of one forward pass over `N` packed tokens."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, heads, D], key and value [N, kv_heads, D], rotated -> [N, heads * D]."""
        ...


class PrefillAttention:
    """Causal attention within `prompts` right-padded to one length; keys and values go to the cache.

    `owners[i]` is the prompt whose keys and values the cache row `rows[i]` gets: identical prompts are
    computed once. Padding sits behind every real token, so the causal mask alone keeps it out; what it leaves
    in the cache is overwritten before a step can see it.
    """

    def __init__(self, cache: KVCache, num_prompts: int, rows: Tensor, owners: Tensor) -> None:
        self._cache = cache
        self._num_prompts = num_prompts
        self._rows = rows  # [R]
        self._owners = owners  # [R]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (heads.unflatten(0, (self._num_prompts, -1)) for heads in (query, key, value))
        stored = self._cache.layers[layer]
        length = min(q.shape[1], self._cache.length)  # padding may reach beyond the rows
        stored[0, self._rows, :length] = k[:, :length].flatten(2)[self._owners]
        stored[1, self._rows, :length] = v[:, :length].flatten(2)[self._owners]
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(len(query), -1)


class DecodeAttention:
    """One new token for each of the cache rows 0..n-1, attending to its row up to itself.

    The query heads that share a key-value head are the query rows of one kernel call, so grouped-query
    attention needs no copy of the keys. They are padded to a multiple of four: with fewer, the CPU kernel's
    rounding depends on the other rows of the batch.
    """

    def __init__(self, cache: KVCache, positions: Tensor, longest: int, dtype: torch.dtype) -> None:
        """`positions` [n] of the new tokens; the largest of them is `longest - 1`."""
        self._cache = cache
        self._num_rows = len(positions)
        device = positions.device
        self._keys = min(keys_to_read(longest), cache.length)
        self._slots = torch.arange(self._num_rows, device=device) * cache.length + positions
        visible = torch.arange(self._keys, device=device) <= positions.unsqueeze(1)
        mask = torch.zeros(visible.shape, device=device, dtype=dtype).masked_fill_(~visible, float("-inf"))
        self._mask = mask[:, None, None, :]  # [n, 1, 1, keys], added to the scores

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n, kv_heads = self._num_rows, key.shape[1]
        stored = self._cache.layers[layer]
        stored[0].flatten(0, 1).index_copy_(0, self._slots, key[:n].flatten(1))
        stored[1].flatten(0, 1).index_copy_(0, self._slots, value[:n].flatten(1))
        keys, values = stored[:, :n, : self._keys].unflatten(-1, (kv_heads, -1)).transpose(2, 3)

        q = query[:n].unflatten(1, (kv_heads, -1))  # [n, kv_heads, group, D]
        group = q.shape[2]
        q = functional.pad(q, (0, 0, 0, -group % _QUERY_MULTIPLE))
        out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask)
        attended = out[:, :, :group].reshape(n, -1)
        return functional.pad(attended, (0, 0, 0, len(query) - n))


# Rows of `x` are padded to a multiple of this by the callers: with fewer or ragged rows the CPU libraries
# take other kernels, whose sums round otherwise, and a sequence would then depend on who shares its batch.
ROW_MULTIPLE = 4
_TYPICAL_ROWS = 16  # what the packed layout is chosen for; any number of rows works


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed weights are used: for few rows they are twice as fast as torch's default."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """`x W^T + b` from a private copy of the weights, in the layout that is fastest on their device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy `weight` [out, in] and `bias` [out]; later writes to them are not seen."""
        self._bias = None if bias is None else bias.clone()
        self._packed = packs(weight.device, weight.dtype)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS) if self._packed else weight.clone()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")  # type: ignore[no-any-return]
        return functional.linear(x, self._weight, self._bias)


@dataclass(frozen=True)
class Parameter:
    """One parameter and the HF tensors stacked in it along the first dimension, in order."""

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # (HF tensor, its shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows of all parts, then the dimensions that the parts share."""
        return (sum(shape[0] for _, shape in self.parts), *self.parts[0][1][1:])

    def slices(self) -> Iterator[TensorSlice]:
        """One slice per part: whole HF tensors, each a contiguous run of the parameter."""
        offset = 0
        for hf_name, shape in self.parts:
            strides = (shape[1], 1) if len(shape) == 2 else (1,)
            part = TensorSlice(hf_name, shape, (0,) * len(shape), shape, self.name, offset, strides)
            yield part
            offset += part.num_elements


def _layer_parameters(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    hidden, ffn, head_dim = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    query = shape.num_attention_heads * head_dim
    key_value = shape.num_key_value_heads * head_dim
    own, hf = f"layers.{layer}", f"model.layers.{layer}"
    projections = (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value))

    yield Parameter(f"{own}.attention_norm.weight", ((f"{hf}.input_layernorm.weight", (hidden,)),))
    yield Parameter(
        f"{own}.qkv.weight",
        tuple((f"{hf}.self_attn.{name}.weight", (rows, hidden)) for name, rows in projections),
    )
    if shape.qkv_bias:
        yield Parameter(
            f"{own}.qkv.bias", tuple((f"{hf}.self_attn.{name}.bias", (rows,)) for name, rows in projections)
        )
    if shape.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Parameter(f"{own}.{name}.weight", ((f"{hf}.self_attn.{name}.weight", (head_dim,)),))
    yield Parameter(f"{own}.attention_output.weight", ((f"{hf}.self_attn.o_proj.weight", (hidden, query)),))
    yield Parameter(f"{own}.mlp_norm.weight", ((f"{hf}.post_attention_layernorm.weight", (hidden,)),))
    yield Parameter(
        f"{own}.gate_up.weight",
        tuple((f"{hf}.mlp.{name}.weight", (ffn, hidden)) for name in ("gate_proj", "up_proj")),
    )
    yield Parameter(f"{own}.down.weight", ((f"{hf}.mlp.down_proj.weight", (hidden, ffn)),))


def decoder_parameters(shape: ModelShape) -> list[Parameter]:
    """Every parameter of the decoder, in the order of the forward pass."""
    vocabulary = (shape.vocab_size, shape.hidden_size)
    parameters = [Parameter("embedding.weight", (("model.embed_tokens.weight", vocabulary),))]
    for layer in range(shape.num_layers):
        parameters.extend(_layer_parameters(shape, layer))
    parameters.append(Parameter("norm.weight", (("model.norm.weight", (shape.hidden_size,)),)))
    if not shape.tied_embeddings:
        parameters.append(Parameter("head.weight", (("lm_head.weight", vocabulary),)))
    return parameters


class Rotation(NamedTuple):
    """Factors for some positions, as `nemorl.models.rope.RotaryTable` gives them."""

    cos: Tensor  # [N, 1, head_dim]
    sin: Tensor  # [N, 1, head_dim]

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [N, heads, head_dim]."""
        rolled = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self.cos, rolled, self.sin)


class _Layer:
    def __init__(self, shape: ModelShape, index: int, weights: Mapping[str, Tensor]) -> None:
        def weight(name: str) -> Tensor | None:
            return weights.get(f"layers.{index}.{name}")

        def linear(name: str) -> Linear:
            return Linear(weights[f"layers.{index}.{name}.weight"], weight(f"{name}.bias"))

        self._index = index
        self._heads, self._kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self._head_dim, self._epsilon = shape.head_dim, shape.rms_norm_eps
        self._attention_norm = weights[f"layers.{index}.attention_norm.weight"].clone()
        self._mlp_norm = weights[f"layers.{index}.mlp_norm.weight"].clone()
        self._qkv, self._attention_output = linear("qkv"), linear("attention_output")
        self._gate_up, self._down = linear("gate_up"), linear("down")
        q_norm, k_norm = weight("q_norm.weight"), weight("k_norm.weight")
        self._qk_norm: Tensor | None = None  # [heads + kv_heads, head_dim]
        if q_norm is not None and k_norm is not None:
            self._qk_norm = torch.cat((q_norm.expand(self._heads, -1), k_norm.expand(self._kv_heads, -1)))

    def __call__(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        x = x + self._attend(rms_norm(x, self._attention_norm, self._epsilon), rotation, attention)
        gate, up = self._gate_up(rms_norm(x, self._mlp_norm, self._epsilon)).chunk(2, dim=-1)
        return x + self._down(functional.silu(gate) * up)

    def _attend(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        heads = self._qkv(x).unflatten(-1, (-1, self._head_dim))  # [N, heads + 2 kv_heads, D]
        query_key, value = heads[:, : -self._kv_heads], heads[:, -self._kv_heads :]
        if self._qk_norm is not None:
            query_key = rms_norm(query_key, None, self._epsilon) * self._qk_norm
        query_key = rotation.apply(query_key)
        query, key = query_key[:, : self._heads], query_key[:, self._heads :]
        return self._attention_output(attention(self._index, query, key, value))


class Decoder:
    """The network with one version of the weights; new weights make a new decoder."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor], table: RotaryTable) -> None:
        """Copy `weights`, named as in `parameters.py`; later writes to them are not seen."""
        self._table = table
        self._epsilon = shape.rms_norm_eps
        self._embedding = weights["embedding.weight"].clone()
        self._layers = [_Layer(shape, index, weights) for index in range(shape.num_layers)]
        self._norm = weights["norm.weight"].clone()
        head = "embedding.weight" if shape.tied_embeddings else "head.weight"
        self._head = Linear(weights[head])

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states [N, hidden], normalized, of `tokens` [N] at `positions` [N]."""
        rotation = Rotation(*self._table.at(positions))
        x = functional.embedding(tokens, self._embedding)
        for layer in self._layers:
            x = layer(x, rotation, attention)
        return rms_norm(x, self._norm, self._epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocabulary] in float32."""
        return self._head(hidden).float()


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


_PREFILL_TOKENS = 2048  # of one forward pass, padding included; bounds the activations


class ModelRunner:
    """Runs prefills and decoding steps with one version of the weights; takes new weights between them."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        max_kv_tokens: int,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.cache = KVCache(
            shape.num_layers, shape.num_key_value_heads * shape.head_dim, max_kv_tokens, device, dtype
        )
        self._shape = shape
        self._device, self._dtype = device, dtype
        self._table = RotaryTable(
            shape.head_dim, shape.rope, max_positions=max_positions, dtype=dtype, device=device
        )
        self._parameters = decoder_parameters(shape)
        self._staging = {p.name: torch.zeros(p.shape, device=device, dtype=dtype) for p in self._parameters}
        self._decoder: Decoder | None = None

    def slices(self) -> list[TensorSlice]:
        """Which boxes of the HF checkpoint the parameters hold."""
        return [part for parameter in self._parameters for part in parameter.slices()]

    def staging_parameters(self) -> Mapping[str, Tensor]:
        """Where new weights are written, by parameter name; always these tensors, which no step reads."""
        return self._staging

    def load(self, folder: Path) -> None:
        """Read an HF folder into the staging parameters and commit them."""
        HfFolder(folder).load_into(self._staging, self.slices())
        self.commit()

    @torch.inference_mode()
    def commit(self) -> None:
        """From the next step on, run with a copy of the staging parameters."""
        self._decoder = Decoder(self._shape, self._staging, self._table)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Fill the cache rows of `prompts`; the hidden state [hidden] of each prompt's last token."""
        hidden: dict[Prompt, Tensor] = {}
        for batch in _prefill_batches(prompts):
            hidden.update(zip(batch, self._prefill(batch), strict=True))
        return [hidden[prompt] for prompt in prompts]

    def _prefill(self, batch: Sequence[Prompt]) -> Tensor:
        length = batch[0].padded_length
        tokens = np.zeros((len(batch), length), dtype=np.int64)
        for index, prompt in enumerate(batch):
            tokens[index, : len(prompt.tokens)] = prompt.tokens
        attention = PrefillAttention(
            self.cache,
            len(batch),
            rows=self._indices([row for prompt in batch for row in prompt.rows]),
            owners=self._indices([index for index, prompt in enumerate(batch) for _ in prompt.rows]),
        )
        positions = torch.arange(length).repeat(len(batch))
        hidden = self._hidden(torch.from_numpy(tokens).flatten(), positions, attention)
        last = [index * length + len(prompt.tokens) - 1 for index, prompt in enumerate(batch)]
        return hidden[self._indices(last)]

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step of the cache rows 0..n-1: logits [n, vocabulary] after `tokens` at `positions`."""
        padding = [0] * (-len(tokens) % ROW_MULTIPLE)
        attention = DecodeAttention(self.cache, self._indices(positions), max(positions) + 1, self._dtype)
        hidden = self._hidden(
            torch.tensor([*tokens, *padding]), torch.tensor([*positions, *padding]), attention
        )
        return self._network.logits(hidden)[: len(tokens)]

    @torch.inference_mode()
    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """Logits [n, vocabulary] of `n` hidden states from `prefill`."""
        rows = torch.stack(list(hidden))
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % ROW_MULTIPLE))
        return self._network.logits(padded)[: len(rows)]

    @property
    def _network(self) -> Decoder:
        if self._decoder is None:
            raise RuntimeError("the engine has no weights: call load() or commit() before the first step")
        return self._decoder

    def _hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        return self._network.hidden(tokens.to(self._device), positions.to(self._device), attention)

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _prefill_batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts of one padded length together, as many as one pass may hold."""
    by_length = sorted(prompts, key=lambda prompt: prompt.padded_length)
    for length, same in groupby(by_length, key=lambda prompt: prompt.padded_length):
        batch: list[Prompt] = []
        for prompt in same:
            if batch and (len(batch) + 1) * length > _PREFILL_TOKENS:
                yield batch
                batch = []
            batch.append(prompt)
        yield batch
