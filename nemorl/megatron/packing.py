"""Micro-batches: sequences that run together, and the layout of their packed tokens for all layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemorl.config.policy import PolicyConfig
from nemorl.data.packed import PackedBatch
from nemorl.data.prefixes import Segment, prefix_tree, shortest_run, token_rows
from nemorl.device import has_dense_attention_with_lse
from nemorl.models.kv_cache import CachedPass
from nemorl.models.rope import RotaryTable
from nemorl.models.shape import ModelShape
from nemorl.plan.draft_training import DraftWork
from nemorl.plan.utilization import ModelWork

from .device import DTYPES, AttentionKernel, KernelRows, packed_attention_kernel
from .kernels import Kernels

Angles = tuple[Tensor, Tensor]  # cosines and signed sines, each [N, 1, dim]

# Sequences share a bucket while the shortest is at least this fraction of the longest: padding is computed
# for nothing, but each bucket costs several kernel launches per layer.
SIMILAR = 0.75
# Below this many tokens the launches always cost more than the padding.
SHORT = 32
# Tokens of a matrix product in FP8 are a multiple of this: of 16 in general, of 32 for MXFP8.
FP8_TOKENS = 32

# Before its first token a row of the cache has an empty place, whose key gives the logit 0, to which a layer
# with sinks adds the sink.
EMPTY_PLACES = 1
EXPERTS = -1  # in the place of a layer


@dataclass(frozen=True)
class ContextShare:
    """A rank's part of every sequence under context parallelism; by default the whole.

    A sequence is cut into twice as many chunks as there are ranks, and rank r of R takes chunk r and chunk
    2R - 1 - r, as causal attention costs later tokens more.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # of the ranks that share sequences

    @property
    def num_chunks(self) -> int:
        """Chunks of a sequence, all equally long."""
        return 2 * self.size if self.size > 1 else 1

    @property
    def chunks(self) -> tuple[int, ...]:
        """Numbers of the chunks that the rank takes, in their order."""
        return (self.rank, self.num_chunks - 1 - self.rank) if self.size > 1 else (0,)

    def places(self, lengths: Sequence[int]) -> Tensor:
        """[tokens / size] Positions of the rank's tokens in concatenated sequences of `lengths`."""
        if self.size == 1:
            return torch.arange(sum(lengths))
        parts = []
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            chunk = length // self.num_chunks
            parts += [torch.arange(chunk) + start + number * chunk for number in self.chunks]
        return torch.cat(parts)

    def order(self, lengths: Sequence[int]) -> Tensor:
        """[tokens] Position of each token of such sequences when the ranks' shares are concatenated."""
        shares = [ContextShare(rank, self.size).places(lengths) for rank in range(self.size)]
        return torch.cat(shares).argsort()


@dataclass(frozen=True)
class TokenRouting:
    """Input of the routers of a micro-batch about a rank's `n` tokens, padding included."""

    uses: Tensor  # [n] int: sequences that the token is in; 0 for padding
    segment: Tensor  # [n] number of the run of tokens in the micro-batch
    paths: Tensor  # [sequences, segments] float: 1 where the sequence has the run
    # [sequences] 1 / T^2 for a sequence of T tokens, 0 for one that nothing is learned from
    balance: Tensor
    experts: Tensor | None = None  # [n, MoE layers, top_k] to be taken; -1 where the router chooses
    # What this rank's routers chose, by MoE layer: [tokens of the rank, top_k]. None if not requested.
    chosen: dict[int, Tensor] | None = None

    def part(self, rank: int, size: int) -> "TokenRouting":
        """A tensor-parallel rank's tokens under sequence parallelism."""
        experts = None if self.experts is None else self.experts.chunk(size)[rank]
        uses, segment = self.uses.chunk(size)[rank], self.segment.chunk(size)[rank]
        return TokenRouting(uses, segment, self.paths, self.balance, experts, self.chosen)


@dataclass(frozen=True)
class Rows:
    """A run of packed tokens laid out densely as `count` rows of `length` tokens."""

    start: int  # first packed token
    end: int
    count: int
    length: int
    index: Tensor | None  # [end - start] dense place of each packed token; None when there is no padding

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def dense(self, packed: Tensor) -> Tensor:
        """[tokens, heads, dim] of all packed tokens, or of its own -> [count, heads, length, dim]."""
        x = packed if packed.shape[0] == self.num_tokens else packed[self.start : self.end]
        if self.index is not None:
            x = _Spread.apply(x, self.index, self.count * self.length)
        return x.reshape(self.count, self.length, *x.shape[1:]).transpose(1, 2)

    def packed(self, dense: Tensor) -> Tensor:
        """[count, heads, length, dim] -> [num_tokens, heads, dim]."""
        x = dense.transpose(1, 2).flatten(0, 1)
        if self.index is not None:
            x = _Select.apply(x, self.index)
        return x


class _Spread(torch.autograd.Function):
    """Rows of `x` [n, ...] at `index` [n] among `count` rows, of which the others are zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, index, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (index,) = grads, ctx.saved_tensors
        return grad.index_select(0, index), None, None


class _Select(torch.autograd.Function):
    """Rows of `x` at `index`, each at most once: the gradient is copied, where torch adds it to zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, index, grad), None


@dataclass(frozen=True)
class Span:
    """A chunk of every row of a bucket, of `length` queries that follow one another in their sequence."""

    first: int  # place in the row of queries
    length: int
    starts: Tensor | None = None  # [rows] place of its first query in the sequence; None: 0 for all
    min_start: int = 0
    largest_start: int = 0

    def sees(self, queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
        """True if queries of the span see keys of the row, [rows, 1, queries, keys] or [queries, keys]."""
        places = torch.arange(queries.start, queries.stop, device=device)
        key_places = torch.arange(keys.start, keys.stop, device=device)
        if self.starts is not None:
            places = (self.starts.unsqueeze(1) + places).unsqueeze(1)
        places = places.unsqueeze(-1)
        seen = key_places <= places
        return seen if window is None else seen & (key_places > places - window)


@dataclass(frozen=True)
class Bucket:
    queries: Rows
    keys: Rows
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class SharedKeys:
    """A segment whose keys the tokens of all segments after it in their sequences see."""

    queries: slice  # of the rank's packed tokens: those that see them
    keys: slice  # of the packed keys, without padding
    start: int  # position of the first key in its sequences
    furthest: int  # largest position of a query


@dataclass
class PackedLayout(PackedSeqParams):
    """The layout of a packed micro-batch, in Megatron's type; `cu_seqlens` are those of whole sequences."""

    qkv_format: str = "thd"
    rotary: Angles | None = None
    local_rotary: Angles | None = None  # of the layers with a window, where theirs are others
    buckets: list[Bucket] = field(default_factory=list)  # empty where a variable-length kernel is used
    is_tree: bool = False  # some tokens are those of several sequences
    shared: list[SharedKeys] = field(default_factory=list)  # next to buckets, whose rows see themselves only
    positions: Tensor | None = None  # [N] of the tokens in their sequences, where keys are shared
    kernel: AttentionKernel | None = None
    kernel_rows: KernelRows | None = None
    kernel_keys: Tensor | None = None  # which packed keys these rows have; None for all in their order
    share: ContextShare = ContextShare()
    key_order: Tensor | None = None  # [tokens of all ranks], see `ContextShare.order`; None for one rank
    routing: TokenRouting | None = None  # of a model with experts
    cached: CachedPass | None = None  # where sequences are continued token by token


def packed_layout(
    lengths: Sequence[int],
    rotary: Angles,
    kernel: AttentionKernel | None,
    local_rotary: Angles | None = None,
    share: ContextShare = ContextShare(),
    tree: Sequence[Segment] = (),
) -> PackedLayout:
    """Layout of sequences laid end to end, shortest first: `lengths`, multiples of `share.num_chunks`.

    With `tree` they are segments, in its order, followed by padding if there are more lengths.
    """
    device = rotary[0].device
    cu_seqlens = _starts(lengths, device)
    buckets = _buckets(lengths, share, device) if kernel is None else []
    rows, keys = None, None
    is_tree = any(segment.parent >= 0 for segment in tree)
    if kernel is not None:
        # A row for each chunk that the rank takes: its queries, and the keys of its sequence up to its end.
        queries = [length // share.num_chunks for length in lengths for _ in share.chunks]
        seen = [
            [*before, range(start, start + length // share.num_chunks * (number + 1))]
            for before, start, length in zip(
                _ranges_before(tree, lengths), accumulate(lengths, initial=0), lengths, strict=False
            )
            for number in share.chunks
        ]
        counts = [sum(map(len, ranges)) for ranges in seen]
        rows = KernelRows(_starts(queries, device), _starts(counts, device), max(queries), max(counts))
        if share.size > 1 or is_tree:
            keys = torch.cat([torch.arange(r.start, r.stop) for ranges in seen for r in ranges]).to(device)
    return PackedLayout(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        rotary=rotary,
        local_rotary=local_rotary,
        buckets=buckets,
        is_tree=is_tree,
        shared=_shared_keys(tree, lengths, share) if is_tree and kernel is None else [],
        kernel=kernel,
        kernel_rows=rows,
        kernel_keys=keys,
        share=share,
        key_order=share.order(lengths).to(device) if share.size > 1 else None,
    )


def _ranges_before(tree: Sequence[Segment], lengths: Sequence[int]) -> list[list[range]]:
    """For each length the packed tokens, without padding, of the segments that lead to it."""
    before: list[list[range]] = []
    starts = [*accumulate(lengths, initial=0)]
    for segment in tree:
        parent = segment.parent
        own = [] if parent < 0 else [range(starts[parent], starts[parent] + tree[parent].length)]
        before.append([*(before[parent] if parent >= 0 else ()), *own])
    return before + [[] for _ in range(len(lengths) - len(tree))]


def _shared_keys(tree: Sequence[Segment], lengths: Sequence[int], share: ContextShare) -> list[SharedKeys]:
    """Each segment that others follow; these are the next ones of the tree."""
    starts = [*accumulate(lengths, initial=0)]
    last, furthest = list(range(len(tree))), [segment.end - 1 for segment in tree]
    for number, segment in reversed([*enumerate(tree)]):
        if (parent := segment.parent) >= 0:
            last[parent] = max(last[parent], last[number])
            furthest[parent] = max(furthest[parent], furthest[number])
    return [
        SharedKeys(
            queries=slice(starts[number + 1] // share.size, starts[last[number] + 1] // share.size),
            keys=slice(starts[number], starts[number] + segment.length),
            start=segment.start,
            furthest=furthest[number],
        )
        for number, segment in enumerate(tree)
        if last[number] > number
    ]


def _buckets(lengths: Sequence[int], share: ContextShare, device: torch.device) -> list[Bucket]:
    """Put neighbors together while the shortest has enough of the length of the longest."""
    bounds, low, high = [0], lengths[0], lengths[0]
    for i, length in enumerate(lengths):
        low, high = min(low, length), max(high, length)
        if high > SHORT and low < SIMILAR * high:
            bounds.append(i)
            low = high = length
    bounds.append(len(lengths))
    starts = [0, *accumulate(lengths)]
    return [_bucket(lengths[a:b], starts[a], share, device) for a, b in pairwise(bounds)]


def _bucket(lengths: Sequence[int], start: int, share: ContextShare, device: torch.device) -> Bucket:
    chunks = [length // share.num_chunks for length in lengths]
    longest = max(chunks)
    keys = _rows(lengths, share.num_chunks * longest, [(0, length) for length in lengths], start, device)
    if share.size == 1:
        return Bucket(keys, keys, (Span(0, longest),))
    runs = [(longest * i, chunk) for chunk in chunks for i in range(len(share.chunks))]
    queries = _rows(lengths, len(share.chunks) * longest, runs, start // share.size, device)
    spans = tuple(
        Span(
            first=i * longest,
            length=longest,
            starts=torch.tensor(chunks, device=device) * number,
            min_start=min(chunks) * number,
            largest_start=longest * number,
        )
        for i, number in enumerate(share.chunks)
    )
    return Bucket(queries, keys, spans)


def _rows(
    lengths: Sequence[int], row_length: int, runs: Sequence[tuple[int, int]], start: int, device: torch.device
) -> Rows:
    """`runs` of tokens (first place in the row, number), equally many for each row, in packed order."""
    num_tokens = sum(number for _, number in runs)
    index = None
    if num_tokens < len(lengths) * row_length:
        by_row = len(runs) // len(lengths)
        places = [torch.arange(n) + first + i // by_row * row_length for i, (first, n) in enumerate(runs)]
        index = torch.cat(places).to(device)
    return Rows(start, start + num_tokens, len(lengths), row_length, index)


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[rows + 1] int32: where each begins, then the end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@dataclass(frozen=True)
class ModelInput:
    tokens: Tensor  # [1, n]
    position_ids: Tensor  # [1, n], 0 for padding
    layout: PackedLayout


@dataclass(frozen=True)
class FurtherTokens:
    """What one depth of multi-token prediction sees and predicts in a micro-batch (`nemorl.megatron.mtp`)."""

    tokens: Tensor  # [1, n] `depth` places after those of the rank in their sequences; 0 beyond the end
    labels: Tensor  # [m] places in the batch of the trained tokens that this rank predicts
    predictors: Tensor  # [m] place in the rank's tokens from which each is predicted
    count: int  # labels of all ranks that share the sequences


@dataclass(frozen=True)
class MicroBatch(ModelInput):
    """Sequences of one forward pass.

    A rank computes `tokens`: its share of every segment of their prefix tree, padded to equal chunks under
    context parallelism, and of a segment of padding, as sequence parallelism requires a multiple of the
    tensor-parallel size. What is said of the tokens of `batch` stays with them, so that a token that several
    sequences share has a label, a weight and an advantage in each.
    """

    batch: PackedBatch  # [N] whole sequences
    places: Tensor  # [N] position of each token in the complete batch of this rank
    scored: Tensor  # [M] places in `batch` whose logprob is computed: those of the loss mask
    labels: Tensor  # [m] those of them whose logprob this rank computes; without context parallelism all
    predictors: Tensor  # [m] place in `tokens` of the token before each label
    own: Tensor  # [k] places in `batch` of the tokens that this rank computes
    local_positions: Tensor  # [k] places in `tokens` of the same
    num_distinct: int  # tokens of all ranks, without padding
    flops: float  # operations of the model for these, forward and backward
    scoring_flops: tuple[float, float]  # the same of the forward pass alone, and without adapters
    # Of labels that are one token after the same ones: [u] a place in `labels` of each, and [m] the number of
    # each label among them. None where no two are.
    distinct: tuple[Tensor, Tensor] | None = None
    further: tuple[FurtherTokens, ...] = ()  # by depth

    @property
    def num_computed(self) -> int:
        """Tokens of all ranks that share the sequences, padding included."""
        return self.tokens.numel() * self.layout.share.size


class MicroBatchMaker:
    """Makes the micro-batches of a policy process that has joined the others."""

    def __init__(
        self, shape: ModelShape, config: PolicyConfig, kernels: Kernels, device: torch.device
    ) -> None:
        layout = config.layout
        length, dtype = config.max_sequence_length, DTYPES[config.precision]
        rotary = partial(RotaryTable, shape.rotary_dim, max_positions=length, dtype=dtype, device=device)
        self.rotary: RotaryTable = rotary(shape.rope)
        self.local_rotary: RotaryTable | None = rotary(shape.local_rope) if shape.local_rope else None
        self.device, self.kernel = device, packed_attention_kernel(kernels.attention)
        # The number of a rank's tokens is padded to a multiple of this.
        self.multiple = layout.tensor_parallel_size if layout.sequence_parallel else 1
        self.multiple *= FP8_TOKENS if config.fp8 is not None else 1
        self.share = ContextShare(
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_group(),
        )
        self.routes = shape.moe is not None
        self._work = ModelWork.of(shape, config.lora, config.multi_token_prediction)
        self._drafts = DraftWork.of(config, shape)
        attends = self.kernel is not None or has_dense_attention_with_lse(device)
        # Further tokens after a shared beginning differ.
        self.shares_prefixes = config.share_prefixes and attends and not self._work.depth

    def make(self, batch: PackedBatch, sequences: list[int]) -> MicroBatch:
        """The named sequences of a batch that lies on the CPU."""
        starts = batch.cu_seqlens.tolist()
        sequences = sorted(sequences, key=lambda s: starts[s + 1] - starts[s])
        selected = batch.select(sequences)
        places = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in sequences])
        tree = self._tree(selected)
        # Tokens of each segment with its padding, and of the last one, which is padding alone, if any.
        chunks, size = self.share.num_chunks, self.share.size
        padded = [-(-segment.length // chunks) * chunks for segment in tree]
        missing = -(sum(padded) // size) % math.lcm(self.multiple, len(self.share.chunks)) * size
        padded += [missing] * (missing > 0)
        real = _padded_places(selected, tree, padded)
        held = self.share.places(padded)  # [n] positions of the rank's tokens in the padded segments
        place_here = torch.full((sum(padded),), -1)
        place_here[held] = torch.arange(len(held))
        scored = selected.loss_mask.nonzero().squeeze(1)
        predictors = place_here[real[scored - 1]]
        own = (place_here[real] >= 0).nonzero().squeeze(1)
        mine = predictors >= 0
        positions = _spread(selected.position_ids, real, sum(padded))[held].to(self.device)
        layout = packed_layout(
            padded,
            self.rotary.at(positions),
            self.kernel,
            self.local_rotary.at(positions) if self.local_rotary else None,
            self.share,
            tree,
        )
        layout.positions = positions if layout.shared else None
        if self.routes:
            layout.routing = _routing(selected, tree, padded, real, held, self.device)
        labels, num_distinct = scored[mine], sum(segment.length for segment in tree)
        distinct = None
        if num_distinct < selected.num_tokens:
            distinct = _distinct(predictors[mine], selected.tokens[labels], self.device)
        computed = [(segment.start, segment.end) for segment in tree]
        num_scored = len(scored) if distinct is None or self.share.size > 1 else len(distinct[0])
        return MicroBatch(
            batch=selected.to(self.device),
            places=places,
            tokens=_spread(selected.tokens, real, sum(padded))[held].to(self.device).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            layout=layout,
            scored=scored.to(self.device),
            labels=labels.to(self.device),
            predictors=predictors[mine].to(self.device),
            own=own.to(self.device),
            local_positions=place_here[real[own]].to(self.device),
            num_distinct=num_distinct,
            flops=self._work.training(computed, num_scored) + self._draft_flops(selected),
            scoring_flops=(
                self._work.scoring(computed, num_scored),
                self._work.scoring(computed, num_scored, adapters=False),
            ),
            distinct=distinct,
            further=tuple(
                self._further(depth, selected, real, held, place_here)
                for depth in range(1, self._work.depth + 1)
            ),
        )

    def _draft_flops(self, batch: PackedBatch) -> float:
        """Of the head for drafts, which computes complete sequences."""
        if (work := self._drafts) is None:
            return 0.0
        drafted = [batch.loss_mask & (batch.position_ids > step) for step in range(1, work.steps + 1)]
        return work.of_sequences(batch.lengths, int(torch.stack(drafted).sum()))

    def _further(
        self, depth: int, batch: PackedBatch, real: Tensor, held: Tensor, place_here: Tensor
    ) -> FurtherTokens:
        """`real`, `held` and `place_here` as in `make`; the tree is one of separate sequences."""
        lengths = torch.tensor(batch.lengths)
        left = torch.repeat_interleave(lengths, lengths) - batch.position_ids  # of a sequence from a token on
        later = torch.where(left > depth, batch.tokens.roll(-depth), 0)
        trained = (batch.loss_mask & (batch.position_ids > depth)).nonzero().squeeze(1)
        predictors = place_here[real[trained - depth - 1]]
        mine = predictors >= 0
        return FurtherTokens(
            tokens=_spread(later, real, len(place_here))[held].to(self.device).unsqueeze(0),
            labels=trained[mine].to(self.device),
            predictors=predictors[mine].to(self.device),
            count=len(trained),
        )

    def _tree(self, batch: PackedBatch) -> list[Segment]:
        """The segments that are computed, each once; those that nothing follows shortest first."""
        if not self.shares_prefixes:
            return [Segment(0, length, (number,), -1) for number, length in enumerate(batch.lengths)]
        tokens = [part.numpy() for part in batch.tokens.int().split(batch.lengths)]
        experts: list[Any] = [None] * len(tokens)
        if batch.routed_experts is not None:
            experts = [part.numpy() for part in batch.routed_experts.split(batch.lengths)]
        return prefix_tree(token_rows(tokens, experts), shortest_run(self.share.size))


def _padded_places(batch: PackedBatch, tree: Sequence[Segment], padded: Sequence[int]) -> Tensor:
    """[N] the place of each token of the batch in the padded segments."""
    starts, places = batch.cu_seqlens.tolist(), torch.empty(batch.num_tokens, dtype=torch.int64)
    for segment, begin in zip(tree, accumulate(padded, initial=0), strict=False):
        own = torch.arange(begin, begin + segment.length)
        for sequence in segment.sequences:
            places[starts[sequence] + segment.start : starts[sequence] + segment.end] = own
    return places


def _distinct(predictors: Tensor, ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """`MicroBatch.distinct` of labels with these predictors and token ids."""
    rows = torch.stack((predictors, ids), 1).numpy()
    _, first, number = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    if len(first) == len(rows):
        return None
    return torch.from_numpy(first).to(device), torch.from_numpy(number.reshape(-1)).to(device)


def _routing(
    batch: PackedBatch,
    tree: Sequence[Segment],
    padded: Sequence[int],
    real: Tensor,
    held: Tensor,
    device: torch.device,
) -> TokenRouting:
    """`held` [n] are the places of the rank's tokens in the padded segments, `real` [N] the batch's."""
    size, count = sum(padded), batch.num_sequences
    lengths = torch.tensor(batch.lengths)
    of_token = torch.repeat_interleave(torch.arange(count), lengths)
    is_learned = torch.zeros(count).index_add(0, of_token, batch.loss_mask.float()) > 0
    paths = torch.zeros(count, len(padded))
    for number, segment in enumerate(tree):
        paths[list(segment.sequences), number] = 1
    experts = None
    if batch.routed_experts is not None:
        unknown = torch.full((size, *batch.routed_experts.shape[1:]), -1, dtype=batch.routed_experts.dtype)
        experts = unknown.index_copy(0, real, batch.routed_experts)[held].to(device)
    return TokenRouting(
        uses=torch.zeros(size, dtype=torch.int64).index_add(0, real, torch.ones_like(real))[held].to(device),
        segment=torch.repeat_interleave(torch.arange(len(padded)), torch.tensor(padded))[held].to(device),
        paths=paths.to(device),
        balance=(is_learned / lengths.square()).to(device),
        experts=experts,
    )


def _spread(values: Tensor, places: Tensor, size: int) -> Tensor:
    """[size] with the values at their places and 0 elsewhere."""
    return values.new_zeros(size).index_copy(0, places, values)


def check_batch(batch: PackedBatch, max_sequence_length: int) -> None:
    starts = batch.cu_seqlens.tolist()
    if not starts or starts[0] != 0 or starts[-1] != batch.num_tokens:
        raise ValueError(f"cu_seqlens {starts} does not run from 0 to the batch's {batch.num_tokens} tokens")
    for sequence, (start, end) in enumerate(pairwise(starts)):
        if not 0 < end - start <= max_sequence_length:
            raise ValueError(
                f"sequence {sequence} of the batch has {end - start} tokens; "
                f"policy.max_sequence_length allows 1 to {max_sequence_length}"
            )
    if batch.loss_mask[batch.cu_seqlens[:-1].long()].any():
        raise ValueError("the first token of a sequence has no logprob, so its loss_mask must be False")
