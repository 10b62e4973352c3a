"""The embedded engine: a compact decoder in plain torch, continuous batching over it, and its process.

One forward pass takes `N` packed tokens: a prefill attends within its prompts, a decoding step to the cache.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nemorl.config.generation import MtpConfig, TorchGenerationConfig
from nemorl.device import captures_graphs, has_packed_linear, prefill_tokens, upload
from nemorl.generation.batching import BatchingEngine
from nemorl.generation.drafts import DraftModel, MtpDrafts, MtpRunner
from nemorl.generation.front import DRAIN_SHARE
from nemorl.generation.step_driver import StepDriver
from nemorl.generation.tokens import Decode, RequestLimits, load_decoder
from nemorl.generation.types import EngineOptions, PromptScores
from nemorl.models.hf_folder import HfFolder
from nemorl.models.kv_cache import (
    CachedPass,
    KVCache,
    Prompt,
    StepTokens,
    decode_kernel,
    in_passes,
    next_tokens,
    rest_of_prompts,
    whole_places,
)
from nemorl.models.layout import mtp_parts, mtp_tensors
from nemorl.models.registry import load_shape
from nemorl.models.rope import RotaryTable
from nemorl.models.shape import ModelShape, MtpShape
from nemorl.models.slices import TensorSlice
from nemorl.trajectories import Int32Array
from nemorl.weights.endpoints import WeightReceiver
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout, RefitDeadline, RefitSession

from .graphs import DecodeGraphs, padded_rows

# With ragged rows the CPU libraries take kernels that round otherwise: a sequence would depend on its batch.
ROW_MULTIPLE = 4
_PREFILL_STEP = 8  # tokens; prompts are padded to multiples of this, or of an eighth of their size
_TYPICAL_ROWS = 16  # what the packed layout is chosen for; any number of rows works
_SCORED_ROWS = 256  # of logits that exist at one time
_END_SECONDS = 10.0  # for the step during which the engine is closed

T = TypeVar("T")


class Attention(Protocol):
    """Attention of one forward pass over `N` packed tokens."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, heads, D], key and value [N, kv_heads, D], rotated -> [N, heads * D]."""

    def keep(self, layer: int, *values: Tensor) -> None:
        """Keep values [N, *] of the tokens in the cache, if there is one."""


class PrefillAttention:
    """Causal attention within `prompts` right-padded to one length; what padding leaves is never read."""

    def __init__(self, cache: KVCache, prompts: int, length: int, rows: Tensor, owners: Tensor) -> None:
        """The cache row `rows[i]` gets the keys and values of prompt `owners[i]`, both [R]."""
        self._cache, self._prompts, self._owners = cache, prompts, owners
        self._places = whole_places(length)
        self._kept = min(length, cache.length)  # padding may reach beyond the rows
        self._slots = cache.slots(rows[:, None], torch.arange(self._kept, device=rows.device)).flatten()

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keep(layer, key, value)
        q, k, v = (heads.unflatten(0, (self._prompts, -1)) for heads in (query, key, value))
        # As many keys as a continued row reads, so that both round in the same way; the rest is masked.
        k, v = (functional.pad(x.transpose(1, 2), (0, 0, 0, self._places - x.shape[1])) for x in (k, v))
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(len(query), -1)

    def keep(self, layer: int, *values: Tensor) -> None:
        of_prompts = (value.unflatten(0, (self._prompts, -1)) for value in values)
        kept = (x[:, : self._kept][self._owners].flatten(0, 1) for x in of_prompts)
        self._cache.keep(layer, self._slots, *kept)


class LocalAttention:
    """Causal attention within one sequence that keeps nothing."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (heads.transpose(0, 1) for heads in (query, key, value))
        out = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(len(query), -1)

    def keep(self, layer: int, *values: Tensor) -> None:
        pass


class ContinuedAttention:
    """Attention of tokens that continue rows of the cache; 0 for those that pad."""

    def __init__(self, cached: CachedPass) -> None:
        self._cached = cached

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keep(layer, key, value)
        return self._cached.attend(layer, query).flatten(1)

    def keep(self, layer: int, *values: Tensor) -> None:
        self._cached.keep(layer, *values)


class Linear:
    """`x W^T + b` from a private copy of the weights, in the layout that is fastest on their device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` is [out, in], `bias` [out]."""
        self._bias = None if bias is None else bias.clone()
        # For few rows oneDNN's packed weights are twice as fast as torch's default.
        self._packed = has_packed_linear(weight.device, weight.dtype)
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
        return (sum(shape[0] for _, shape in self.parts), *self.parts[0][1][1:])

    def slices(self) -> Iterator[TensorSlice]:
        offset = 0
        for hf_name, shape in self.parts:
            strides = (*shape[1:], 1)
            yield TensorSlice(hf_name, shape, (0,) * len(shape), shape, self.name, offset, strides)
            offset += math.prod(shape)


def decoder_parameters(shape: ModelShape) -> list[Parameter]:
    """Every parameter of the decoder, in the order of the forward pass, and of a layer that drafts.

    Of several layers for further tokens only the first drafts, as `layers.<number of layers>`.
    """
    hidden, ffn, head_dim = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    query, key_value = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    projections = (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value))
    of_layer: dict[str, dict[str, tuple[int, ...]]] = {
        "attention_norm.weight": {"input_layernorm.weight": (hidden,)},
        "qkv.weight": {f"self_attn.{name}.weight": (rows, hidden) for name, rows in projections},
        "qkv.bias": {f"self_attn.{name}.bias": (rows,) for name, rows in projections if shape.qkv_bias},
        "q_norm.weight": {"self_attn.q_norm.weight": (head_dim,)} if shape.qk_norm else {},
        "k_norm.weight": {"self_attn.k_norm.weight": (head_dim,)} if shape.qk_norm else {},
        "attention_output.weight": {"self_attn.o_proj.weight": (hidden, query)},
        "mlp_norm.weight": {"post_attention_layernorm.weight": (hidden,)},
        "gate_up.weight": {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)},
        "down.weight": {"mlp.down_proj.weight": (hidden, ffn)},
    }
    vocabulary = (shape.vocab_size, hidden)
    parameters = [Parameter("embedding.weight", (("model.embed_tokens.weight", vocabulary),))]
    prefixes = [f"model.layers.{layer}." for layer in range(shape.num_layers)]
    further: list[Parameter] = []
    if shape.mtp is not None:
        parts = mtp_parts(shape)
        prefixes.append(parts["enorm"].rsplit(".", 2)[0] + ".")
        sizes = dict.fromkeys(parts, (hidden,)) | {"eh_proj": (hidden, 2 * hidden)}
        further = [Parameter(f"mtp.{name}.weight", ((hf, sizes[name]),)) for name, hf in parts.items()]
    for layer, prefix in enumerate(prefixes):
        for name, tensors in of_layer.items():
            if tensors:
                parts_of = tuple((prefix + hf, size) for hf, size in tensors.items())
                parameters.append(Parameter(f"layers.{layer}.{name}", parts_of))
    parameters.append(Parameter("norm.weight", (("model.norm.weight", (hidden,)),)))
    if not shape.tied_embeddings:
        parameters.append(Parameter("head.weight", (("lm_head.weight", vocabulary),)))
    return parameters + further


class _Layer:
    def __init__(self, shape: ModelShape, index: int, weights: Mapping[str, Tensor]) -> None:
        own = {name.removeprefix(f"layers.{index}."): weight for name, weight in weights.items()}

        def linear(name: str) -> Linear:
            return Linear(own[f"{name}.weight"], own.get(f"{name}.bias"))

        self._index = index
        self._heads, self._kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self._head_dim, self._epsilon = shape.head_dim, shape.rms_norm_eps
        self._attention_norm = own["attention_norm.weight"].clone()
        self._mlp_norm = own["mlp_norm.weight"].clone()
        self._qkv, self._attention_output = linear("qkv"), linear("attention_output")
        self._gate_up, self._down = linear("gate_up"), linear("down")
        self._qk_norm: Tensor | None = None  # [heads + kv_heads, head_dim]
        if shape.qk_norm:
            q_norm, k_norm = own["q_norm.weight"], own["k_norm.weight"]
            self._qk_norm = torch.cat((q_norm.expand(self._heads, -1), k_norm.expand(self._kv_heads, -1)))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """[N, hidden], and the factors [N, 1, head_dim] of a `RotaryTable` -> [N, hidden]."""
        x = x + self._attention_output(attention(self._index, *self._heads_of(x, cos, sin)))
        gate, up = self._gate_up(rms_norm(x, self._mlp_norm, self._epsilon)).chunk(2, dim=-1)
        return x + self._down(functional.silu(gate) * up)

    def keep(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> None:
        """Put keys and values of the tokens into the cache, and compute nothing else."""
        _, key, value = self._heads_of(x, cos, sin)
        attention.keep(self._index, key, value)

    def _heads_of(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as `Attention` takes them."""
        normed = rms_norm(x, self._attention_norm, self._epsilon)
        heads = self._qkv(normed).unflatten(-1, (-1, self._head_dim))  # [N, heads + 2 kv_heads, D]
        query_key, value = heads[:, : -self._kv_heads], heads[:, -self._kv_heads :]
        if self._qk_norm is not None:
            query_key = rms_norm(query_key, None, self._epsilon) * self._qk_norm
        query_key = torch.addcmul(query_key * cos, query_key.roll(self._head_dim // 2, -1), sin)
        return query_key[:, : self._heads], query_key[:, self._heads :], value


class _FurtherLayer:
    """A layer that predicts the token after the next one (docs/multi_token_prediction.md), to draft by."""

    def __init__(self, shape: ModelShape, mtp: MtpShape, weights: Mapping[str, Tensor]) -> None:
        self.before_norm, self._hidden_first = mtp.before_final_norm, mtp.hidden_first
        self._epsilon = shape.rms_norm_eps
        names = ("hnorm", "enorm", "final_layernorm")
        self._hidden_norm, self._embedding_norm, self._norm = (
            weights[f"mtp.{name}.weight"].clone() for name in names
        )
        self._projection = Linear(weights["mtp.eh_proj.weight"])
        self.layer = _Layer(shape, shape.num_layers, weights)

    def projected(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The input [N, hidden] of the layer."""
        parts = (
            rms_norm(hidden, self._hidden_norm, self._epsilon),
            rms_norm(embedded, self._embedding_norm, self._epsilon),
        )
        return self._projection(torch.cat(parts if self._hidden_first else parts[::-1], dim=-1))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """As an ordinary layer, of what is `projected`, with a norm at the end."""
        return rms_norm(self.layer(x, cos, sin, attention), self._norm, self._epsilon)


class Decoder:
    """The network with one version of the weights; new weights make a new decoder."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor], table: RotaryTable) -> None:
        """Copy `weights`, named as in `decoder_parameters`; later writes to them are not seen."""
        self._table, self._epsilon = table, shape.rms_norm_eps
        self._embedding = weights["embedding.weight"].clone()
        self._layers = [_Layer(shape, index, weights) for index in range(shape.num_layers)]
        self._norm = weights["norm.weight"].clone()
        self._further: _FurtherLayer | None = None
        if shape.mtp is not None:
            self._further = _FurtherLayer(shape, shape.mtp, weights)
        self._head = Linear(weights["embedding.weight" if shape.tied_embeddings else "head.weight"])

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states [N, hidden], normalized, of `tokens` [N] at `positions` [N]."""
        cos, sin = self._table.at(positions)
        x = functional.embedding(tokens, self._embedding)
        for layer in self._layers:
            x = layer(x, cos, sin, attention)
        normed = rms_norm(x, self._norm, self._epsilon)
        if self._further is not None:
            attention.keep(len(self._layers) + 1, x if self._further.before_norm else normed)
        return normed

    def further(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """What a layer for a further token makes of hidden states [N, hidden] and the tokens [N] after them.

        Its output [N, hidden] is an input of `logits` and, one position further, of the layer itself.
        """
        layer = self._further_layer
        x = layer.projected(hidden, functional.embedding(tokens, self._embedding))
        return layer(x, *self._table.at(positions), attention)

    def keep_further(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attention: Attention) -> None:
        """Put only the layer's keys and values into the cache."""
        layer = self._further_layer
        x = layer.projected(hidden, functional.embedding(tokens, self._embedding))
        layer.layer.keep(x, *self._table.at(positions), attention)

    @property
    def _further_layer(self) -> _FurtherLayer:
        assert self._further is not None, "the model has no layer for a further token"
        return self._further

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocabulary] in float32."""
        return self._head(hidden).float()


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def _padded(values: Tensor) -> Tensor:
    """[n, *] with zeros behind, up to a multiple of `ROW_MULTIPLE`."""
    return functional.pad(values, (0, 0) * (values.dim() - 1) + (0, -len(values) % ROW_MULTIPLE))


def _padded_length(prompt: Prompt) -> int:
    """Tokens with padding; a function of the prompt alone, so that its result depends on nothing else."""
    step = max(_PREFILL_STEP, (1 << len(prompt.tokens).bit_length()) >> 4)
    return -(-len(prompt.tokens) // step) * step


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
        max_rows: int = 0,
    ) -> None:
        """With `max_rows`, of steps, these are decoded by CUDA graphs where the device has them."""
        self._graphs: DecodeGraphs | None = None
        whole = (0, 0)
        if max_rows and captures_graphs(device):
            whole = (padded_rows(max_rows), max_positions)
        self.cache = KVCache(max_kv_tokens, whole=whole)
        self.cache.kernel = decode_kernel(device, dtype)
        if any(whole):
            self._graphs = DecodeGraphs(self.cache, max_rows, dtype, device)
        self._shape, self._device, self._dtype = shape, device, dtype
        self._prefill_tokens = prefill_tokens(device)
        self._table = RotaryTable(
            shape.head_dim, shape.rope, max_positions=max_positions, dtype=dtype, device=device
        )
        self._parameters = decoder_parameters(shape)
        self._staging = {p.name: torch.zeros(p.shape, device=device, dtype=dtype) for p in self._parameters}
        self.num_parameters = sum(staged.numel() for staged in self._staging.values())
        self._decoder: Decoder | None = None
        self.further: MtpRunner | None = None  # by which the engine may draft
        if shape.mtp is not None:
            self.further = MtpRunner(self, states=shape.num_layers + 1, device=device, dtype=dtype)

    def slices(self, *, drafts: bool = True) -> list[TensorSlice]:
        """Of all parameters, or of all but those of a layer that `drafts`."""
        further = f"layers.{self._shape.num_layers}.", "mtp."
        kept = (p for p in self._parameters if drafts or not p.name.startswith(further))
        return [part for parameter in kept for part in parameter.slices()]

    def staging_parameters(self) -> Mapping[str, Tensor]:
        """Where new weights are written, by parameter name; always these tensors, which no step reads."""
        return self._staging

    def load(self, folder: Path) -> None:
        HfFolder(folder).load_into(self._staging, self.slices())
        self.commit()

    def freeze(self) -> None:
        """Take no further weights: give up the memory in which they would arrive."""
        self._staging = {}

    @torch.inference_mode()
    def commit(self) -> None:
        self._decoder = Decoder(self._shape, self._staging, self._table)
        if self._graphs is not None:
            self._graphs.clear()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        hidden: dict[Prompt, Tensor] = {}
        whole = sorted((p for p in prompts if not p.start), key=_padded_length)
        for length, same in groupby(whole, key=_padded_length):
            together, count = list(same), max(1, self._prefill_tokens // length)
            for first in range(0, len(together), count):
                batch = together[first : first + count]
                hidden.update(zip(batch, self._prefill(batch), strict=True))
        for batch in in_passes([p for p in prompts if p.start], self._prefill_tokens):
            hidden.update(zip(batch, self._continue(batch), strict=True))
        if self.further is not None:
            # From the beginning: the last place in a page is of the token after it, maybe another text's.
            self.further.prefill([replace(prompt, start=0) for prompt in prompts])
        return [hidden[prompt] for prompt in prompts]

    @torch.inference_mode()
    def score(self, prompt: Int32Array) -> PromptScores:
        """Logprobs of a prompt's tokens in a pass of its own."""
        (tokens,) = upload(self._device, prompt.astype(np.int64))
        positions = torch.arange(len(tokens), device=self._device)
        hidden = self._network.hidden(tokens, positions, LocalAttention())[:-1]
        parts = []
        for place in range(0, len(hidden), _SCORED_ROWS):
            rows = slice(place, place + _SCORED_ROWS)
            of_all = self._network.logits(hidden[rows]).log_softmax(-1)
            given = of_all.gather(1, tokens[1:][rows, None]).squeeze(1)
            parts.append((given, *of_all.max(-1)))
        if not parts:  # of a single token
            none = np.empty(0, np.float32)
            return PromptScores(none, none.astype(np.int32), none)
        columns = zip(*parts, strict=True)
        logprobs, top, top_tokens = (torch.cat(values).cpu().numpy() for values in columns)
        return PromptScores(logprobs, top_tokens.astype(np.int32), top)

    def _prefill(self, batch: Sequence[Prompt]) -> Tensor:
        length = _padded_length(batch[0])
        padded = np.zeros((len(batch), length), dtype=np.int64)
        for index, prompt in enumerate(batch):
            padded[index, : len(prompt.tokens)] = prompt.tokens
        tokens, rows, owners, last = upload(
            self._device,
            padded.ravel(),
            [row for prompt in batch for row in prompt.rows],
            [index for index, prompt in enumerate(batch) for _ in prompt.rows],
            [index * length + len(prompt.tokens) - 1 for index, prompt in enumerate(batch)],
        )
        attention = PrefillAttention(self.cache, len(batch), length, rows, owners)
        positions = torch.arange(length, device=self._device).repeat(len(batch))
        return self._network.hidden(tokens, positions, attention)[last]

    def _continue(self, batch: Sequence[Prompt]) -> Tensor:
        """Read the rest of prompts whose beginnings their rows hold."""
        (tokens,) = upload(self._device, np.concatenate([prompt.tokens[prompt.start :] for prompt in batch]))
        positions, cached = rest_of_prompts(self.cache, batch, self._device, self._dtype)
        last = torch.tensor([prompt.num_new for prompt in batch], device=self._device).cumsum(0) - 1
        return self._hidden(tokens, positions, cached)[last]

    @torch.inference_mode()
    def decode(self, step: StepTokens) -> Tensor:
        if self._graphs is not None and (logits := self._graphs.logits(step, self._logits)) is not None:
            return logits
        tokens, positions, _ = step.uploaded
        cached = next_tokens(self.cache, step, self._dtype)
        return self._logits(tokens, positions, cached)[: len(tokens)]

    def run_eagerly(self) -> None:
        """Decode without CUDA graphs from now on."""
        self._graphs = None

    def _logits(self, tokens: Tensor, positions: Tensor, cached: CachedPass) -> Tensor:
        return self._network.logits(self._hidden(tokens, positions, cached))

    def _hidden(self, tokens: Tensor, positions: Tensor, cached: CachedPass) -> Tensor:
        return self._network.hidden(_padded(tokens), _padded(positions), ContinuedAttention(cached))

    def read_further(self, hidden: Tensor, tokens: Tensor, positions: Tensor, cached: CachedPass) -> Tensor:
        """Outputs [N, hidden] of the layer for a further token, see `Decoder.further`."""
        padded = _padded(hidden), _padded(tokens), _padded(positions)
        return self._network.further(*padded, ContinuedAttention(cached))[: len(tokens)]

    def keep_further(self, hidden: Tensor, tokens: Tensor, positions: Tensor, cached: CachedPass) -> None:
        """Its keys and values alone."""
        padded = _padded(hidden), _padded(tokens), _padded(positions)
        self._network.keep_further(*padded, ContinuedAttention(cached))

    @torch.inference_mode()
    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        return self.logits_of(torch.stack(list(hidden)))

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        return self._network.logits(_padded(hidden))[: len(hidden)]

    @property
    def _network(self) -> Decoder:
        if self._decoder is None:
            raise RuntimeError("the engine has no weights: call load() or commit() before the first step")
        return self._decoder


class TorchEngine(BatchingEngine):
    """Continuous batching over `model`, which takes new weights between two steps."""

    def __init__(
        self,
        shape: ModelShape,
        config: TorchGenerationConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_sequence_length: int,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.monotonic,
        draft_shape: ModelShape | None = None,
    ) -> None:
        """With `draft_shape`, of the model in `config.speculation`, `draft_runner` expects its weights."""
        kv, length = config.max_kv_tokens, max_sequence_length

        def runner(shape: ModelShape) -> ModelRunner:
            return ModelRunner(
                shape,
                max_kv_tokens=kv,
                max_positions=length,
                device=device,
                dtype=dtype,
                max_rows=config.max_batch_size,
            )

        self.model = runner(shape)
        self.draft_runner: ModelRunner | None = None
        drafts: DraftModel | None = None
        if self.model.further is not None and isinstance(config.speculation, MtpConfig):
            layers = sum(map(math.prod, mtp_tensors(shape).values()))
            head = shape.vocab_size * shape.hidden_size
            drafts = MtpDrafts(
                self.model.further,
                config.speculation,
                max_cached_tokens=0,
                size=(layers + head) / self.model.num_parameters,
                device=device,
                clock=clock,
            )
        if draft_shape is not None and config.draft_model is not None:
            self.draft_runner = runner(draft_shape)
            drafts = DraftModel(
                self.draft_runner,
                config.draft_model,
                max_cached_tokens=config.max_cached_tokens,
                size=self.draft_runner.num_parameters / self.model.num_parameters,
                device=device,
                clock=clock,
            )
        limits = RequestLimits(shape.vocab_size, length, kv, decode, scores_prompts=True)
        super().__init__(
            self.model,
            limits,
            config,
            device=device,
            clock=clock,
            draft_model=drafts,
            score=self.model.score,
        )

    def commit(self, version: int, *, restart: bool = False) -> None:
        """Sample with the staged weights of `model` from the next step on; `restart` as `weights_changed`."""
        self.model.commit()
        self.weights_changed(version, restart=restart)


def create_engine(config: TorchGenerationConfig, options: EngineOptions) -> TorchEngine:
    """The embedded engine, with the weights of the model's folder as version 0."""
    draft_path = None if config.draft_model is None else config.draft_model.model_path
    engine = TorchEngine(
        load_shape(options.model_path, with_mtp=config.drafts_by_mtp),
        config,
        device=torch.device(options.device),
        dtype=getattr(torch, config.precision or options.precision),
        max_sequence_length=options.max_sequence_length,
        decode=load_decoder(options.tokenizer_path),
        draft_shape=None if draft_path is None else load_shape(draft_path),
    )
    engine.model.load(options.model_path)
    if engine.draft_runner is not None and draft_path is not None:
        engine.draft_runner.load(draft_path)
        engine.draft_runner.freeze()
    return engine


class TorchHost(StepDriver):
    """A rank of the embedded engine with its thread."""

    def __init__(
        self, config: TorchGenerationConfig, options: EngineOptions, *, trained_drafts: bool = False
    ) -> None:
        """With `trained_drafts` updates bring the layers that draft too."""
        self._options, self._on_update = options, config.on_update
        self.engine = self._apart(lambda: create_engine(config, options)).result()
        super().__init__(self.engine, f"generation engine {options.rank}")
        model = self.engine.model
        slices = model.slices(drafts=trained_drafts)
        self._receiver = WeightReceiver(slices, model.staging_parameters, self._commit)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        return (self._receiver.describe(),)

    def prepare_refit(self, parts: tuple[Part, ...]) -> None:
        self._receiver.prepare(parts[0])

    async def receive_weights(self, session: RefitSession) -> tuple[ReceiveReport, ...]:
        return (await asyncio.wrap_future(self._apart(self._receiver.begin(session))),)

    async def commit_weights(self, version: int) -> None:
        await asyncio.wrap_future(self._apart(lambda: self._receiver.commit(version)))

    def abandon_refit(self) -> None:
        self._receiver.abandon()

    def close(self) -> None:
        super().close()
        self._thread.join(_END_SECONDS)

    def _apart(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in a thread that ends with it, and so do its OpenMP threads.

        Each thread that computes has OpenMP threads of its own. GNU OpenMP counts those of all threads: while
        there are more than cores, they sleep between two kernels, and each kernel of the engine wakes them.
        """
        executor = ThreadPoolExecutor(1, f"work of rank {self._options.rank}", initializer=self._set_threads)
        future = executor.submit(function)
        executor.shutdown(wait=False)  # ends the thread after the function
        return future

    def _set_threads(self) -> None:
        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)  # applies to the calling thread only

    def _run(self) -> None:
        self._set_threads()
        self.run()

    def _commit(self, version: int) -> None:
        seconds, restart = self._options.commit_seconds, self._on_update != "continue"
        drain_seconds = DRAIN_SHARE * seconds if self._on_update == "finish" else 0.0
        swap = self.post(lambda: self.engine.commit(version, restart=restart), drain_seconds)
        try:
            swap.result(seconds)
        except TimeoutError as error:
            swap.cancel()
            who = f"refit to version {version}: generation rank {self._options.rank}"
            problem = f"has received the weights, and its engine has not taken them within {seconds:g} s"
            raise RefitDeadline(f"{who} {problem} (cluster.deadlines.refit)") from error
