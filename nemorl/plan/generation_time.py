"""Seconds of sampling: an engine's steps by their batch, and samples by their lengths. Imports no torch."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from nemorl.config.experiment import Experiment
from nemorl.models.shape import ModelShape

from .costs import Attained, Cost, message_cost, product_cost, roofline
from .hardware import Hardware
from .operations import (
    Product,
    attention_width,
    cached_width,
    forward_attention,
    forward_products,
    layer_products,
)
from .training_time import Lengths

_CLASSES = 16  # of sequences with one length in an engine
_TAIL = 1 / 4  # of an engine's sequences: if fewer are left, it waits for them
_SPREAD = 1.0  # of the logarithm of response lengths that are not given, as in nemorl.simulate
_SAMPLING_BYTES = 16  # of a logit: written, read in float32, made a distribution, summed


def default_lengths(experiment: Experiment) -> Lengths:
    """Assumed, as `nemorl simulate` does: short prompts, and responses of a quarter of the longest."""
    longest = experiment.policy.max_sequence_length
    prompt = min(256, max(1, longest // 4))
    limit = max(1, min(experiment.generation.max_new_tokens, longest - prompt))
    return Lengths(prompt, limit / 4, limit, _SPREAD, scores_prompts=False)


@dataclass(frozen=True)
class Engine:
    """One replica of an engine."""

    shape: ModelShape
    hardware: Hardware
    attained: Attained
    tensor: int = 1
    stages: int = 1
    max_sequences: int = 256  # decoded together
    memory_share: float = 0.9  # of a device, for weights and KV cache
    weight_bytes: int = 2  # of an element
    cache_bytes: int = 2  # of an element
    max_cached: float = math.inf  # tokens in the KV cache
    fp8: bool = False

    @property
    def weights(self) -> float:
        """Bytes of all weights, embedding and head included."""
        tables = self.shape.hidden_size * self.shape.vocab_size * (1 if self.shape.tied_embeddings else 2)
        elements = tables
        for layer in range(self.shape.num_layers):
            for product in layer_products(self.shape, layer):
                experts = self.shape.moe.num_experts if self.shape.moe and product.module == "experts" else 1
                elements += product.inner * product.columns * experts
        return elements * self.weight_bytes

    @property
    def cached_tokens(self) -> float:
        """Tokens whose keys and values fit; 0 if the weights alone do not."""
        devices = self.tensor * self.stages
        room = self.hardware.memory_bytes * self.memory_share - self.weights / devices
        of_token = cached_width(self.shape) * self.cache_bytes * self.shape.num_layers
        return min(self.max_cached, max(0.0, room) / (of_token / self._cache_ranks / self.stages))

    def concurrency(self, lengths: Lengths) -> float:
        """Sequences that run together, by the engine's limit and its KV cache; at least one."""
        return max(1.0, min(self.max_sequences, self.cached_tokens / (lengths.prompt + lengths.context)))

    def decode_step(self, batch: float, context: float) -> Cost:
        """A token for each of `batch` sequences, before which there are `context` tokens."""
        rows = batch / self.stages  # of a micro-batch: stages compute others at the same time
        kinds = self._kinds
        cost = Cost()
        for (with_experts, window), count in kinds.items():
            layer = self.shape.num_layers - 1 if with_experts else 0
            products = layer_products(self.shape, layer)
            one = self._layer_step(products, rows, min(context, window or context))
            cost += one * count
        head = Product("projections", self.shape.hidden_size, self.shape.vocab_size, "columns")
        cost += product_cost(rows, head.on_rank(self.tensor), self.hardware, self.attained)
        cost += roofline(0.0, batch * self.shape.vocab_size * _SAMPLING_BYTES, self.hardware, self.attained)
        return cost + Cost(latency=batch * self.attained.sequence)

    def prefill(self, tokens: float, prompt: float) -> Cost:
        """Prompts of `prompt` tokens, `tokens` in all."""
        work = forward_products(self.shape) + forward_attention(self.shape, prompt / 2)
        rate = self.hardware.operations * self.attained.matmul * self.tensor * self.stages
        return Cost(compute=tokens * work / rate)

    def batch(self, samples: int, group: int, lengths: Lengths, of: int) -> Cost:
        """`samples` of this engine, begun together, in groups with the same prompt.

        Ends with the longest of `of` samples, those of all engines. Samples that do not run at first follow
        as others end.
        """
        running = min(float(samples), self.concurrency(lengths))
        cost = self.prefill(samples / group * lengths.prompt, lengths.prompt)
        waiting = samples - running
        if waiting > 0:  # until the last one has begun
            tokens = waiting * lengths.response
            cost += self.decode_step(running, lengths.prompt + lengths.context) * (tokens / running)
        classes = min(_CLASSES, max(1, math.ceil(running)))
        done = 0.0
        for index, length in enumerate(lengths.parts(classes)):
            left = running * (1 - index / classes)
            step = self.decode_step(left, lengths.prompt + (done + length) / 2)
            part = step * (length - done)
            cost += part if left >= running * _TAIL else part.waiting("straggler")
            done = length
        longest = lengths.quantile(1 - 0.5 / max(of, classes))
        rest = self.decode_step(1, lengths.prompt + longest) * max(0.0, longest - done)
        return cost + rest.waiting("straggler")

    @cached_property
    def _kinds(self) -> Counter[tuple[bool, int | None]]:
        """Layers by whether they have experts, and by their window."""
        return Counter((self.shape.is_moe(i), self.shape.window(i)) for i in range(self.shape.num_layers))

    @property
    def _cache_ranks(self) -> int:
        """Ranks over which keys and values are spread; latents of MLA are on each."""
        return min(self.tensor, self.shape.num_key_value_heads) if self.shape.mla is None else 1

    def _layer_step(self, products: tuple[Product, ...], rows: float, context: float) -> Cost:
        cost, moe = Cost(latency=self.attained.decode_layer), self.shape.moe
        for product in products:
            groups, each = 1.0, rows
            if moe is not None and product.module == "experts":
                # Experts that at least one of the sequences takes, if all are equally likely.
                groups = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** rows)
                each = rows * moe.top_k / groups
            part = product.on_rank(self.tensor)
            cost += product_cost(each, part, self.hardware, self.attained, groups=groups, fp8=self.fp8)
        cache = rows * context * cached_width(self.shape) * self.cache_bytes / self._cache_ranks
        work = 2 * rows * context * self._decoded_width / self.tensor
        rate = self.hardware.operations * self.attained.attention
        cost += roofline(work / rate, cache, self.hardware, self.attained)
        # Two sums over ranks, each a scattering and a gathering.
        sent = (
            2
            * 2
            * rows
            * self.shape.hidden_size
            * self.hardware.element_bytes
            * (self.tensor - 1)
            / self.tensor
        )
        return cost + message_cost(sent, self.tensor, self.hardware, self.attained, count=2)

    @property
    def _decoded_width(self) -> int:
        """Elements of queries and values; MLA decodes in the latent space, all heads with one key."""
        if (mla := self.shape.mla) is None:
            return attention_width(self.shape)
        return self.shape.num_attention_heads * (2 * mla.key_value_rank + mla.rotary_dim)
