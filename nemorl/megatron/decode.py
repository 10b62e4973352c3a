"""The policy's own model as a generator: prompts are read into a cache, then one token a step for all rows.

The leader of a data-parallel copy, the first tensor-parallel rank of the last stage, has the requests. It
broadcasts what to compute to the other ranks as integers, step by step, until the end of the stage.

Copies that share experts exchange tokens in every layer with experts, so none can pass through the model
alone: before each pass their leaders agree that there is one, and who has nothing to do passes padding along.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from numpy.typing import NDArray
from torch import Tensor

from nemorl.config.policy import LayoutConfig
from nemorl.device import upload
from nemorl.models.kv_cache import (
    CachedPass,
    KVCache,
    Prompt,
    StepTokens,
    in_passes,
    next_tokens,
    padded_slots,
    rest_of_prompts,
)

from . import packing
from .head import columns_of_all_ranks
from .model import PolicyModel
from .moe import experts_of_rank


class CachedModel:
    """This rank's stage with its cache. Every method is collective over the ranks of a copy."""

    def __init__(
        self,
        model: PolicyModel,
        maker: packing.MicroBatchMaker,
        vocab_size: int,
        max_tokens: int,
        kept_experts: tuple[int, int] | None = None,
    ) -> None:
        """`max_tokens`: rows times the longest; `kept_experts` (MoE layers, top_k): choices to keep."""
        self.cache = KVCache(max_tokens, packing.EMPTY_PLACES)
        self._model, self._maker, self._device = model, maker, maker.device
        self._vocab_size, self._kept_experts = vocab_size, kept_experts
        self._dtype = model.config.params_dtype
        self._is_last = parallel_state.is_pipeline_last_stage()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt]) -> Tensor | None:
        """Fill the rows of prompts, all without a beginning in the cache or all with one.

        Returns logits [prompts, vocabulary] after each, on the last stage.
        """
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
        ordered = [prompts[i] for i in order]
        lengths = [prompt.num_new for prompt in ordered]
        tokens = torch.cat([torch.as_tensor(p.tokens[p.start :], dtype=torch.int64) for p in ordered])
        positions, cached = rest_of_prompts(self.cache, ordered, self._device, self._dtype)
        if any(prompt.start for prompt in prompts):
            hidden = self._run(tokens, positions, cached, None)
        else:
            hidden = self._run(tokens, positions, replace(cached, continued=()), lengths)
        if hidden is None:
            return None
        last = torch.empty(len(order), dtype=torch.int64)
        last[order] = torch.tensor(lengths).cumsum(0) - 1
        return self._logits(hidden[last.to(self._device)])

    @torch.no_grad()
    def decode(self, tokens: Sequence[int], positions: Sequence[int], counts: Sequence[int]) -> Tensor | None:
        """The next tokens of the rows 0..n-1, `counts` of each: logits [N, vocabulary] after `tokens`."""
        uploaded = upload(self._device, tokens, positions, padded_slots(counts))
        step = StepTokens(tokens, positions, counts, uploaded)
        cached = next_tokens(self.cache, step, self._dtype)
        hidden = self._run(uploaded[0], uploaded[1], cached, None)
        return None if hidden is None else self._logits(hidden[: len(tokens)])

    @torch.no_grad()
    def pass_along(self) -> None:
        """A pass over padding only, for copies that share experts with this one."""
        nothing = torch.zeros(0, dtype=torch.int64)
        self._run(nothing, nothing, None, [])

    def _run(
        self, tokens: Tensor, positions: Tensor, cached: CachedPass | None, lengths: list[int] | None
    ) -> Tensor | None:
        """Hidden states [n, H] behind the last stage. `lengths` of prompts; None for continued rows."""
        model, config = self._model, self._model.config
        stages = parallel_state.get_pipeline_model_parallel_group()
        step = self._input(tokens, positions, cached, lengths)
        if not parallel_state.is_pipeline_first_stage():
            shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
            size = (step.tokens.numel() // shares, 1, config.hidden_size)
            received = torch.empty(size, dtype=config.params_dtype, device=self._device)
            dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank(), group=stages)
            model.set_input_tensor(received)
        hidden = model(step)
        if not self._is_last:
            dist.send(hidden, parallel_state.get_pipeline_model_parallel_next_rank(), group=stages)
        if cached is not None and self._kept_experts is not None:
            assert step.layout.routing is not None
            experts = experts_of_rank(
                *(step.layout.routing, step.tokens.numel(), self._kept_experts),
                sequence_parallel=config.sequence_parallel,
            )
            cached.keep(packing.EXPERTS, experts.to(torch.int16))
        if not self._is_last:
            return None
        if config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        return hidden.squeeze(1)  # type: ignore[no-any-return]

    def _input(
        self, tokens: Tensor, positions: Tensor, cached: CachedPass | None, lengths: list[int] | None
    ) -> packing.ModelInput:
        """Append the padding that sequence parallelism requires, as a separate sequence."""
        maker, n = self._maker, len(tokens)
        missing = -n % maker.multiple if n else maker.multiple
        tokens, positions = (F.pad(x, (0, missing)).to(self._device) for x in (tokens, positions))
        rotary = maker.rotary.at(positions)
        local = maker.local_rotary.at(positions) if maker.local_rotary else None
        if lengths is None:
            layout = packing.PackedLayout(rotary=rotary, local_rotary=local)
        else:
            layout = packing.packed_layout(lengths + [missing] * (missing > 0), rotary, maker.kernel, local)
        layout.cached = cached
        if maker.routes:
            places = torch.arange(n + missing, device=self._device)
            chosen: dict[int, Tensor] | None = None if self._kept_experts is None else {}
            nothing = rotary[0].new_zeros(1)  # is balanced here
            layout.routing = packing.TokenRouting(
                (places < n).int(), torch.zeros_like(places), nothing[None], nothing, chosen=chosen
            )
        return packing.ModelInput(tokens.unsqueeze(0), positions.unsqueeze(0), layout)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] float32 of hidden states [n, H], on all tensor-parallel ranks."""
        logits = torch.mm(hidden, self._model.output_weight().t())
        return columns_of_all_ranks(logits, self._model.vocabulary)[:, : self._vocab_size].float()


# Followers wait in a collective, which has a deadline: their leader broadcasts at least this often.
HEARTBEAT_SECONDS = 5.0
# Copies that share experts and have nothing to do ask one another so often.
REST_SECONDS = 0.02


class Order(IntEnum):
    END = 0
    HEARTBEAT = 1
    PASS_ALONG = 2
    RESERVE = 3
    COPY_ROWS = 4
    RELEASE = 5
    PREFILL = 6
    DECODE = 7
    SAVE_PAGES = 8
    LOAD_PAGES = 9


class CopyState(IntEnum):
    """State of a copy between two passes; the largest of several copies counts."""

    LEAVING = 0
    RESTING = 1
    PASSING = 2


def copy_leaders(layout: LayoutConfig) -> tuple[int, ...]:
    """The rank that leads each data-parallel copy."""
    first = layout.stage_size * (layout.pipeline_parallel_size - 1)
    size = layout.tensor_parallel_size * layout.context_parallel_size
    return tuple(range(first, first + size * layout.data_parallel_size, size))


def copies_that_share_experts(layout: LayoutConfig) -> int:
    """The number of neighboring copies that must run the model together."""
    tp_size = layout.tensor_parallel_size
    return math.lcm(tp_size, layout.expert_parallel_size * layout.expert_tensor_parallel_size) // tp_size


class DecodingCopy:
    """This rank's part in its copy. Made by all ranks of the policy together."""

    def __init__(self, model: CachedModel, layout: LayoutConfig, device: torch.device) -> None:
        self._model, self._device = model, device
        self.cache = model.cache  # this rank's; its sizes are those of all ranks of the copy
        leaders, shared = copy_leaders(layout), copies_that_share_experts(layout)
        copy = parallel_state.get_data_parallel_rank()
        self.leader = leaders[copy]
        self.leads = dist.get_rank() == self.leader
        self._group = parallel_state.get_model_parallel_group()
        self.peers: dist.ProcessGroup | None = None  # leaders of the copies that share experts
        if shared > 1:
            for first in range(0, len(leaders), shared):
                group = dist.new_group(list(leaders[first : first + shared]))
                if copy // shared == first // shared:
                    self.peers = group

    def follow(self) -> None:
        """Execute the leader's orders until it ends the stage."""
        header = torch.empty(2, dtype=torch.int64, device=self._device)
        while True:
            dist.broadcast(header, self.leader, group=self._group)
            order, count = header.tolist()
            if order == Order.END:
                return
            numbers = torch.empty(count, dtype=torch.int64, device=self._device)
            if count:
                dist.broadcast(numbers, self.leader, group=self._group)
            self._execute(Order(order), numbers.tolist())

    def command(self, order: Order, numbers: Sequence[int] = ()) -> Tensor | None:
        """As the leader, run an order on all ranks of the copy; returns the logits of a pass."""
        if self._group.size() > 1:
            header = torch.tensor([order, len(numbers)], device=self._device)
            dist.broadcast(header, self.leader, group=self._group)
            if numbers:
                dist.broadcast(torch.tensor(numbers, device=self._device), self.leader, group=self._group)
        return self._execute(order, numbers)

    def agree(self, state: CopyState) -> CopyState:
        """As the leader, return the largest state of the copies that share experts."""
        if self.peers is None:
            return state
        value = torch.tensor([state], device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.peers)
        return CopyState(int(value))

    def _execute(self, order: Order, numbers: Sequence[int]) -> Tensor | None:
        model = self._model
        match order:
            case Order.PREFILL:
                return model.prefill(decoded_prompts(numbers))
            case Order.DECODE:
                return model.decode(*decoded_step(numbers))
            case Order.PASS_ALONG:
                model.pass_along()
            case Order.RESERVE:
                model.cache.reserve(*numbers)
            case Order.COPY_ROWS:
                half = len(numbers) // 2
                model.cache.copy_rows(numbers[1 : half + 1], numbers[half + 1 :], numbers[0])
            case Order.SAVE_PAGES:
                row, first, num_pages, *pages = numbers
                model.cache.save_pages(row, first, pages, num_pages)
            case Order.LOAD_PAGES:
                model.cache.load_pages(numbers[1 : 1 + numbers[0]], numbers[1 + numbers[0] :])
            case Order.RELEASE:
                model.cache.release()
        return None


class CopyOrders(Protocol):
    """A copy as its leader sees it; see `DecodingCopy`."""

    cache: KVCache
    peers: dist.ProcessGroup | None

    def command(self, order: Order, numbers: Sequence[int] = ()) -> Tensor | None: ...

    def agree(self, state: CopyState) -> CopyState: ...


class LeaderCache:
    """The caches of all ranks of a copy, as one; see `KVCache`."""

    def __init__(self, copy: CopyOrders) -> None:
        self._copy = copy

    def fits(self, rows: int, length: int) -> bool:
        return self._copy.cache.fits(rows, length)

    def reserve(self, rows: int, length: int) -> None:
        if rows > self._copy.cache.rows or length > self._copy.cache.length:
            self._copy.command(Order.RESERVE, [rows, length])

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        if sources:
            self._copy.command(Order.COPY_ROWS, [length, *sources, *targets])

    def save_pages(self, row: int, first: int, pages: Sequence[int], num_pages: int) -> None:
        if pages:
            self._copy.command(Order.SAVE_PAGES, [row, first, num_pages, *pages])

    def load_pages(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        if pages:
            self._copy.command(Order.LOAD_PAGES, [len(pages), *pages, *rows])

    def release(self) -> None:
        if self._copy.cache.num_tokens:
            self._copy.command(Order.RELEASE)


class LeadingRunner:
    """The leader's model, which is that of all ranks of its copy: what an engine drives."""

    def __init__(self, copy: CopyOrders, prefill_tokens: int) -> None:
        """`prefill_tokens`: of the prompts of one pass, where one alone has not more."""
        self.cache, self._copy, self._prefill_tokens = LeaderCache(copy), copy, prefill_tokens
        self._last_order = time.monotonic()

    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        logits: dict[Prompt, Tensor] = {}
        for group in ([p for p in prompts if not p.start], [p for p in prompts if p.start]):
            for batch in in_passes(group, self._prefill_tokens):
                logits.update(zip(batch, self._pass(Order.PREFILL, encode_prompts(batch)), strict=True))
        return [logits[prompt] for prompt in prompts]

    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(hidden))

    def decode(self, step: StepTokens) -> Tensor:
        return self._pass(Order.DECODE, encode_step(step))

    def experts(self, row: int, first: int, end: int) -> NDArray[np.int16]:
        """[end - first, MoE layers, top_k] of the tokens at these positions of a row, where they are kept."""
        return self._copy.cache.tokens(packing.EXPERTS, row, first, end)[0].cpu().numpy().copy()

    def rest(self) -> float:
        """Let the other copies work while this one has nothing to do; seconds until the next rest."""
        if self._copy.agree(CopyState.RESTING) is CopyState.PASSING:
            self._copy.command(Order.PASS_ALONG)
            self._last_order = time.monotonic()
            return 0.0
        self._beat()
        return HEARTBEAT_SECONDS if self._copy.peers is None else REST_SECONDS

    def end(self) -> None:
        """End the stage on all ranks of the copy, once the others that share its experts end it too."""
        while (state := self._copy.agree(CopyState.LEAVING)) is not CopyState.LEAVING:
            if state is CopyState.PASSING:
                self._copy.command(Order.PASS_ALONG)
            else:
                self._beat()
                time.sleep(REST_SECONDS)
        self._copy.command(Order.END)

    def _pass(self, order: Order, numbers: Sequence[int]) -> Tensor:
        self._copy.agree(CopyState.PASSING)
        logits = self._copy.command(order, numbers)
        self._last_order = time.monotonic()
        assert logits is not None, "the leader is of the last stage"
        return logits

    def _beat(self) -> None:
        if time.monotonic() - self._last_order >= HEARTBEAT_SECONDS:
            self._copy.command(Order.HEARTBEAT)
            self._last_order = time.monotonic()


def encode_step(step: StepTokens) -> list[int]:
    """Encode a step: the number of rows, how many tokens each reads, the tokens, their positions."""
    return [len(step.counts), *step.counts, *step.tokens, *step.positions]


def decoded_step(numbers: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Tokens, their positions, and how many of them each row reads."""
    first = 1 + numbers[0]
    half = first + (len(numbers) - first) // 2
    return numbers[first:half], numbers[half:], numbers[1:first]


def encode_prompts(prompts: Sequence[Prompt]) -> list[int]:
    """Encode prompts: for each the numbers of tokens, rows and cached tokens, what is read, and rows."""
    return [
        number
        for p in prompts
        for number in (len(p.tokens), len(p.rows), p.start, *p.tokens[p.start :].tolist(), *p.rows)
    ]


def decoded_prompts(numbers: Sequence[int]) -> list[Prompt]:
    """What is not read of a prompt is 0."""
    prompts, place = [], 0
    while place < len(numbers):
        length, num_rows, start = numbers[place : place + 3]
        first = place + 3
        middle = first + length - start
        place = middle + num_rows
        tokens = np.array([*[0] * start, *numbers[first:middle]], np.int32)
        prompts.append(Prompt(tokens, numbers[middle:place], start))
    return prompts
