"""One rank leads a data-parallel copy in decoding, the others follow its orders.

The leader is the first tensor-parallel rank of the last stage, where the logits are. It knows the requests;
the others are told by integers what to compute, step by step, until the end of the stage.

Copies that share experts exchange tokens in every layer with experts, so none can pass through the model
alone: before each pass their leaders agree that there is one, and who has nothing to do passes padding along.
"""

import math
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from nemorl.config.policy import LayoutConfig

from .cache import KeyValueCache
from .decode import CachedModel, CachedPrompt

# Followers wait in a collective, which has a deadline: they hear from their leader at least so often.
HEARTBEAT_SECONDS = 5.0
# Copies that share experts and have nothing to do ask one another so often.
REST_SECONDS = 0.02


class Prompt(Protocol):
    """A prompt and the cache rows that start with it."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...

    @property
    def rows(self) -> Sequence[int]: ...


class _Order(IntEnum):
    END = 0
    HEARTBEAT = 1
    PASS_ALONG = 2
    RESERVE = 3
    COPY_ROWS = 4
    RELEASE = 5
    PREFILL = 6
    DECODE = 7


class _State(IntEnum):
    """Of a copy between two passes; of several copies the largest counts."""

    LEAVING = 0
    RESTING = 1
    PASSING = 2


def copy_leaders(layout: LayoutConfig) -> tuple[int, ...]:
    """The rank that leads each data-parallel copy."""
    first = layout.stage_size * (layout.pipeline_parallel_size - 1)
    return tuple(
        first + layout.tensor_parallel_size * layout.context_parallel_size * copy
        for copy in range(layout.data_parallel_size)
    )


def copies_that_share_experts(layout: LayoutConfig) -> int:
    """How many neighbouring copies cannot pass through the model one without the other."""
    tp_size = layout.tensor_parallel_size
    return math.lcm(tp_size, layout.expert_parallel_size * layout.expert_tensor_parallel_size) // tp_size


class DecodingCopy:
    """This rank's part in its copy. Made by all ranks of the policy together."""

    def __init__(self, model: CachedModel, layout: LayoutConfig, device: torch.device) -> None:
        self._model = model
        self._device = device
        leaders, shared = copy_leaders(layout), copies_that_share_experts(layout)
        copy = parallel_state.get_data_parallel_rank()
        self.leader = leaders[copy]
        self.leads = dist.get_rank() == self.leader
        self._group = parallel_state.get_model_parallel_group()
        self._peers: dist.ProcessGroup | None = None  # leaders of the copies that share experts
        if shared > 1:
            for first in range(0, len(leaders), shared):
                group = dist.new_group(list(leaders[first : first + shared]))
                if copy // shared == first // shared:
                    self._peers = group

    @property
    def agrees_alone(self) -> bool:
        """Whether no other copy has to agree."""
        return self._peers is None

    def follow(self) -> None:
        """Do as the leader says until it ends the stage."""
        while True:
            order, numbers = self._hear()
            if order is _Order.END:
                return
            self._execute(order, numbers)

    def command(self, order: _Order, numbers: Sequence[int] = ()) -> Tensor | None:
        """As the leader: have all ranks of the copy do it; logits of a pass."""
        if self._group.size() > 1:
            header = torch.tensor([order, len(numbers)], device=self._device)
            dist.broadcast(header, self.leader, group=self._group)
            if numbers:
                dist.broadcast(torch.tensor(numbers, device=self._device), self.leader, group=self._group)
        return self._execute(order, numbers)

    def agree(self, state: _State) -> _State:
        """As a leader: the largest of the states of the copies that share experts."""
        if self._peers is None:
            return state
        value = torch.tensor([state], device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._peers)
        return _State(int(value))

    def _hear(self) -> tuple[_Order, list[int]]:
        header = torch.empty(2, dtype=torch.int64, device=self._device)
        dist.broadcast(header, self.leader, group=self._group)
        order, count = header.tolist()
        numbers = torch.empty(count, dtype=torch.int64, device=self._device)
        if count:
            dist.broadcast(numbers, self.leader, group=self._group)
        return _Order(order), numbers.tolist()

    def _execute(self, order: _Order, numbers: Sequence[int]) -> Tensor | None:
        model = self._model
        match order:
            case _Order.PREFILL:
                return model.prefill(list(_unpacked(numbers)))
            case _Order.DECODE:
                half = len(numbers) // 2
                return model.decode(numbers[:half], numbers[half:])
            case _Order.PASS_ALONG:
                model.pass_along()
            case _Order.RESERVE:
                model.cache.reserve(*numbers)
            case _Order.COPY_ROWS:
                half = len(numbers) // 2
                model.cache.copy_rows(numbers[1 : half + 1], numbers[half + 1 :], numbers[0])
            case _Order.RELEASE:
                model.cache.release()
        return None

    @property
    def cache(self) -> KeyValueCache:
        """This rank's; its sizes are those of all ranks of the copy."""
        return self._model.cache


class LeaderCache:
    """The caches of all ranks of a copy, as one."""

    def __init__(self, copy: DecodingCopy) -> None:
        self._copy = copy

    @property
    def num_tokens(self) -> int:
        """Tokens for which memory is held."""
        return self._copy.cache.num_tokens

    def fits(self, rows: int, length: int) -> bool:
        """Whether `rows` sequences of which the longest has `length` tokens can be held at one time."""
        return self._copy.cache.fits(rows, length)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens, keeping what the first `rows` hold."""
        if rows > self._copy.cache.rows or length > self._copy.cache.length:
            self._copy.command(_Order.RESERVE, [rows, length])

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""
        if sources:
            self._copy.command(_Order.COPY_ROWS, [length, *sources, *targets])

    def release(self) -> None:
        """Give the memory back; nothing is held any more."""
        if self.num_tokens:
            self._copy.command(_Order.RELEASE)


class LeadingRunner:
    """The leader's model, which is that of all ranks of its copy: what an engine drives."""

    def __init__(self, copy: DecodingCopy, prefill_tokens: int) -> None:
        """`prefill_tokens`: of the prompts of one pass, where one alone has not more."""
        self.cache = LeaderCache(copy)
        self._copy = copy
        self._prefill_tokens = prefill_tokens
        self._spoke = time.monotonic()

    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Fill the cache rows of `prompts`; logits [vocabulary] after each."""
        found: list[Tensor] = []
        for batch in self._batches(prompts):
            found += self._pass(_Order.PREFILL, _packed(batch))
        return found

    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """[n, vocabulary] of what `prefill` gave for `n` prompts."""
        return torch.stack(list(hidden))

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step of the cache rows 0..n-1: logits [n, vocabulary] after `tokens` at `positions`."""
        return self._pass(_Order.DECODE, [*tokens, *positions])

    def experts(self, row: int, first: int, end: int) -> NDArray[np.int16]:
        """[end - first, MoE layers, top_k] of the tokens at these positions of a row, where they are kept."""
        return self._copy.cache.experts(row, first, end).cpu().numpy().copy()

    def rest(self) -> float:
        """Where this copy has nothing to do: let the others do theirs; seconds until the next rest."""
        if self._copy.agree(_State.RESTING) is _State.PASSING:
            self._copy.command(_Order.PASS_ALONG)
            self._spoke = time.monotonic()
            return 0.0
        self._beat()
        return HEARTBEAT_SECONDS if self._copy.agrees_alone else REST_SECONDS

    def end(self) -> None:
        """End the stage on all ranks of the copy, once the others that share its experts end it too."""
        while (state := self._copy.agree(_State.LEAVING)) is not _State.LEAVING:
            if state is _State.PASSING:
                self._copy.command(_Order.PASS_ALONG)
            else:
                self._beat()
                time.sleep(REST_SECONDS)
        self._copy.command(_Order.END)

    def _pass(self, order: _Order, numbers: Sequence[int]) -> Tensor:
        self._copy.agree(_State.PASSING)
        logits = self._copy.command(order, numbers)
        self._spoke = time.monotonic()
        assert logits is not None, "the leader is of the last stage"
        return logits

    def _beat(self) -> None:
        if time.monotonic() - self._spoke >= HEARTBEAT_SECONDS:
            self._copy.command(_Order.HEARTBEAT)
            self._spoke = time.monotonic()

    def _batches(self, prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
        batch: list[Prompt] = []
        for prompt in prompts:
            if batch and sum(len(p.tokens) for p in (*batch, prompt)) > self._prefill_tokens:
                yield batch
                batch = []
            batch.append(prompt)
        if batch:
            yield batch


def _packed(prompts: Sequence[Prompt]) -> list[int]:
    """Of each prompt the number of its tokens and rows, then these."""
    return [number for p in prompts for number in (len(p.tokens), len(p.rows), *p.tokens.tolist(), *p.rows)]


def _unpacked(numbers: Sequence[int]) -> Iterator[CachedPrompt]:
    place = 0
    while place < len(numbers):
        first = place + 2
        middle = first + numbers[place]
        end = middle + numbers[place + 1]
        yield CachedPrompt(numbers[first:middle], numbers[middle:end])
        place = end
