"""The policy's own model as a generator: prompts are read into a cache, then one token a step for all rows.

Every rank of a data-parallel copy makes the same calls with the same numbers; logits come out on the ranks of
the last stage. decode_copy.py brings the calls from one rank to the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from .cache import CachedPass, KeyValueCache, NextTokens
from .micro_batch import MicroBatchMaker
from .model import PolicyModel
from .packing import PackedLayout, packed_layout
from .routing import TokenRouting


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt to read once, and the cache rows that start with it."""

    tokens: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True)
class _Input:
    """What the model takes of a pass."""

    tokens: Tensor  # [1, n] padded
    position_ids: Tensor  # [1, n]
    layout: PackedLayout


class CachedModel:
    """This rank's stage with its cache. Every method is collective over the ranks of a copy."""

    def __init__(
        self,
        model: PolicyModel,
        maker: MicroBatchMaker,
        vocab_size: int,
        max_tokens: int,
        kept_experts: tuple[int, int] | None = None,
    ) -> None:
        """`max_tokens` of the cache: rows times the tokens of the longest.

        `kept_experts`, MoE layers and experts of a token, has the routers' choices kept beside the keys.
        """
        self.cache = KeyValueCache(max_tokens)
        self._kept_experts = kept_experts
        self._vocab_size = vocab_size
        self._model = model
        self._maker = maker
        self._device = maker.device
        self._is_first = parallel_state.is_pipeline_first_stage()
        self._is_last = parallel_state.is_pipeline_last_stage()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[CachedPrompt]) -> Tensor | None:
        """Fill the rows of the prompts; logits [prompts, vocabulary] after each, on the last stage."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))  # neighbours of like length
        lengths = [len(prompts[i].tokens) for i in order]
        tokens = torch.cat([torch.as_tensor(prompts[i].tokens, dtype=torch.int64) for i in order])
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = torch.tensor(lengths).cumsum(0)
        sources, rows = [], []
        for i, end, length in zip(order, ends.tolist(), lengths, strict=True):
            for row in prompts[i].rows:
                sources.append(torch.arange(end - length, end))
                rows.append(torch.full((length,), row))
        kept = torch.cat(sources)
        slots = self.cache.slots(torch.cat(rows), positions[kept])
        cached = CachedPass(self.cache, kept.to(self._device), slots.to(self._device), step=None)
        hidden = self._run(tokens, positions, cached, lengths)
        if hidden is None:
            return None
        last = torch.empty(len(order), dtype=torch.int64)
        last[order] = ends - 1
        return self._logits(hidden[last.to(self._device)])

    @torch.no_grad()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor | None:
        """The next token of the rows 0..n-1: logits [n, vocabulary] after `tokens` at `positions`."""
        n, places = len(tokens), torch.tensor(positions)
        cached = CachedPass(
            self.cache,
            torch.arange(n, device=self._device),
            self.cache.slots(torch.arange(n), places).to(self._device),
            NextTokens(places.to(self._device), max(positions), self._model.config.params_dtype),
        )
        hidden = self._run(torch.tensor(tokens), places, cached, None)
        return None if hidden is None else self._logits(hidden[:n])

    @torch.no_grad()
    def pass_along(self) -> None:
        """A pass with nothing but padding, for copies that share experts with this one."""
        nothing = torch.zeros(0, dtype=torch.int64)
        self._run(nothing, nothing, None, [])

    def _run(
        self, tokens: Tensor, positions: Tensor, cached: CachedPass | None, lengths: list[int] | None
    ) -> Tensor | None:
        """Hidden states [n, H] behind the last stage. `lengths` of prompts; None for single tokens."""
        model = self._model
        step = self._input(tokens, positions, cached, lengths)
        if not self._is_first:
            model.set_input_tensor(self._from_previous_stage(step.tokens.numel()))
        hidden = model(step)
        if not self._is_last:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.send(hidden, parallel_state.get_pipeline_model_parallel_next_rank(), group=group)
        if cached is not None and self._kept_experts is not None:
            experts = self._chosen_experts(step, self._kept_experts)
            self.cache.keep_experts(cached.slots, experts.index_select(0, cached.sources))
        if not self._is_last:
            return None
        if model.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        return hidden.squeeze(1)  # type: ignore[no-any-return]

    def _input(
        self, tokens: Tensor, positions: Tensor, cached: CachedPass | None, lengths: list[int] | None
    ) -> _Input:
        """With tokens of padding behind, a sequence of their own, as many as sequence parallelism wants."""
        maker, n = self._maker, len(tokens)
        missing = -n % maker.multiple if n else maker.multiple
        tokens, positions = (
            torch.nn.functional.pad(x, (0, missing)).to(self._device) for x in (tokens, positions)
        )
        rotary = maker.rotary.at(positions)
        local = maker.local_rotary.at(positions) if maker.local_rotary else None
        if lengths is None:
            layout = PackedLayout(rotary=rotary, local_rotary=local)
        else:
            layout = packed_layout(lengths + [missing] * (missing > 0), rotary, maker.kernel, local)
        layout.cached = cached
        if maker.routes:
            places = torch.arange(n + missing, device=self._device)
            chosen: dict[int, Tensor] | None = None if self._kept_experts is None else {}
            balance = rotary[0].new_zeros(1)
            layout.routing = TokenRouting(places < n, torch.zeros_like(places), balance, chosen=chosen)
        return _Input(tokens.unsqueeze(0), positions.unsqueeze(0), layout)

    def _chosen_experts(self, step: _Input, size: tuple[int, int]) -> Tensor:
        """[n, MoE layers, top_k] of all tokens and layers, which are spread over the ranks of the copy."""
        assert step.layout.routing is not None
        experts = torch.full((step.tokens.numel(), *size), -1, dtype=torch.int32, device=self._device)
        rank = parallel_state.get_tensor_model_parallel_rank() if self._model.config.sequence_parallel else 0
        for layer, chosen in (step.layout.routing.chosen or {}).items():
            experts[len(chosen) * rank : len(chosen) * (rank + 1), layer] = chosen.to(torch.int32)
        group = parallel_state.get_model_parallel_group()
        if group.size() > 1:
            dist.all_reduce(experts, op=dist.ReduceOp.MAX, group=group)
        return experts.to(torch.int16)

    def _from_previous_stage(self, num_tokens: int) -> Tensor:
        config = self._model.config
        own = num_tokens // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        hidden = torch.empty(own, 1, config.hidden_size, dtype=config.params_dtype, device=self._device)
        source = parallel_state.get_pipeline_model_parallel_prev_rank()
        dist.recv(hidden, source, group=parallel_state.get_pipeline_model_parallel_group())
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] float32 of hidden states [n, H], on all tensor-parallel ranks."""
        logits = torch.mm(hidden, self._model.output_weight().t())
        group = self._model.vocabulary.group
        if group is not None:
            parts = [torch.empty_like(logits) for _ in range(group.size())]
            dist.all_gather(parts, logits, group=group)
            logits = torch.cat(parts, -1)
        return logits[:, : self._vocab_size].float()
