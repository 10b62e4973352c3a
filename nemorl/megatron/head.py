"""From hidden states to logprobs and statistics, vocab-parallel and in chunks: a batch's logits never exist.

With logits `z`, divided by the temperature, whose columns are spread over the TP ranks:

    logprob of token i:  z_i - lse(z)      d/dz_j of sum_i g_i logprob_i: sum_i g_i 1[j = i] - p_j sum_i g_i
    entropy:             lse(z) - sum_j p_j z_j                   d/dz_j: -p_j (z_j - lse(z) + entropy)
    collision:           sum_j p_j^2, without a gradient

One chunk keeps its logits for backward; of several, each is computed again.

With the filters of sampling, logits below the lowest one that they keep become padding, so that all of this
is of the filtered distribution. A token as likely as the last one that a filter keeps is kept: the order of
equal logits does not matter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.config.generation import SamplingConfig
from nemorl.device import has_float32_products

# Logit of a column that pads the vocabulary: exp gives 0, and 0 times it is 0 (infinity would give NaN).
PADDING_LOGIT = -1e30
_FIRST_CANDIDATES = 1024  # logits of each rank among which top-p looks first; few rows need more
_CANDIDATE_GROWTH = 8
_FILTERED_ELEMENTS = 2**23  # logits of all ranks, of the rows that are filtered together


@dataclass(frozen=True)
class VocabularyShard:
    """The columns of the vocabulary that this rank's output weight holds, and who holds the others."""

    start: int  # first column
    num_real: int  # columns that are tokens; the rest pad the vocabulary
    group: dist.ProcessGroup | None  # tensor-parallel ranks; None when this rank holds all columns


class Scores(NamedTuple):
    """What a head says of M tokens, float32; statistics are of the distribution that each was drawn from."""

    logprobs: Tensor  # [M], or [M, C] of several ids each
    entropies: Tensor | None = None  # [M]
    collisions: Tensor | None = None  # [M] sums of squared probabilities; no gradient


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy: bool,
    collision: bool = False,
    filters: SamplingConfig | None = None,
) -> Scores:
    """Logprobs of `ids` [M, C], a token once or more in a row, and statistics, if asked for.

    Equal on all tensor-parallel ranks. `hidden` [M, H] predicts the ids; `weight` [V / TP, H]. Of `hidden`
    each rank gets the gradient of its own columns only: the caller sums it over the tensor-parallel ranks.

    All are of the distribution that the top-k, top-p and min-p of `filters` keep. The logprob of a token
    that they drop is -inf; the caller gives it no gradient.
    """
    options = (temperature, chunk_tokens, entropy, collision, filters)
    logprobs, entropies, collisions, _ = _Logprobs.apply(hidden, weight, ids, shard, *options)
    return Scores(logprobs, entropies if entropy else None, collisions if collision else None)


def predictions(
    hidden: Tensor, weight: Tensor, ids: Tensor, shard: VocabularyShard, *, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Logprobs [M] of `ids` [M], as `token_logprobs`, and which of them are the likeliest token [M] bool."""
    options = (1.0, chunk_tokens, False, False, None)
    logprobs, _, _, is_likeliest = _Logprobs.apply(hidden, weight, ids.unsqueeze(1), shard, *options)
    return logprobs.squeeze(1), is_likeliest.squeeze(1)


@torch.no_grad()
def top_logprobs(
    hidden: Tensor, weight: Tensor, k: int, shard: VocabularyShard, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Ids [M, k] int64 of the likeliest tokens after each hidden state [M, H], and logprobs [M, k] float32.

    Likeliest first, equal on all tensor-parallel ranks. `weight` [V / TP, H]; k is at most V without padding.
    """
    ids = hidden.new_zeros((hidden.shape[0], k), dtype=torch.int64)
    logprobs = torch.zeros_like(ids, dtype=torch.float32)
    for rows in _chunks(hidden.shape[0], chunk_tokens):
        shifted = _shifted_logits(hidden[rows], weight, shard, temperature)
        log_sum = _sum_over_ranks(shifted.exp().sum(-1), shard).log()
        values, columns = shifted.topk(min(k, shifted.shape[1]), dim=-1)
        values = columns_of_all_ranks(values, shard)
        columns = columns_of_all_ranks(columns + shard.start, shard)
        values, places = values.topk(k, dim=-1)
        ids[rows] = columns.gather(1, places)
        logprobs[rows] = values - log_sum.unsqueeze(1)
    return ids, logprobs


class _Logprobs(torch.autograd.Function):
    """Of `ids` [M, C] logprobs, and if each is the likeliest; statistics [M] between, 0 unless needed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        shard: VocabularyShard,
        temperature: float,
        chunk_tokens: int,
        needs_entropy: bool,
        needs_collision: bool,
        filters: SamplingConfig | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logprobs = hidden.new_zeros(ids.shape, dtype=torch.float32)
        is_likeliest = torch.zeros_like(ids, dtype=torch.bool)
        entropies, collisions = (logprobs.new_zeros(ids.shape[0]) for _ in range(2))
        lowest = None if filters is None else torch.zeros_like(entropies)  # logits that are kept
        kept: list[tuple[Tensor, Tensor]] = []
        needs = needs_entropy, needs_collision
        keeps = ids.shape[0] <= chunk_tokens and (hidden.requires_grad or weight.requires_grad)
        for rows in _chunks(ids.shape[0], chunk_tokens):
            shifted = _shifted_logits(hidden[rows], weight, shard, temperature)
            if filters is not None and lowest is not None:
                lowest[rows] = _lowest_kept(shifted, filters, shard)
                shifted.masked_fill_(shifted < lowest[rows, None], PADDING_LOGIT)
            log_sum, logits, entropies[rows], collisions[rows] = _reduce(shifted, ids[rows], shard, *needs)
            logprobs[rows], is_likeliest[rows] = logits - log_sum.unsqueeze(1), logits == 0
            if keeps:
                kept.append((shifted, log_sum))
            del shifted  # before the next one takes memory
        if filters is not None:
            logprobs.masked_fill_(logprobs < PADDING_LOGIT / 2, -math.inf)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, ids, entropies, lowest)
        ctx.options = (shard, temperature, chunk_tokens, kept)
        ctx.mark_non_differentiable(collisions, is_likeliest)
        return logprobs, entropies, collisions, is_likeliest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, entropies, lowest = ctx.saved_tensors
        shard, temperature, chunk_tokens, kept = ctx.options
        grad_logprobs, grad_entropies, _, _ = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(ids, dtype=torch.float32)
        grad_hidden = torch.zeros_like(hidden)
        # In float32, so that it does not show in how many chunks the sum was taken; None when frozen.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(ids.shape[0], chunk_tokens):
            if kept:
                shifted, log_sum = kept.pop()
            else:
                shifted = _shifted_logits(hidden[rows], weight, shard, temperature)
                if lowest is not None:
                    shifted.masked_fill_(shifted < lowest[rows, None], PADDING_LOGIT)
                log_sum = _sum_over_ranks(shifted.exp().sum(-1), shard).log()
            of_entropies = None if grad_entropies is None else (entropies[rows], grad_entropies[rows])
            grad = _grad_logits(shifted, log_sum, ids[rows], grad_logprobs[rows], of_entropies, shard)
            grad = grad.div_(temperature).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[rows])
            del shifted, grad
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


class SoftTargets(NamedTuple):
    """What a second head learns from the distributions of a first one, of M tokens."""

    loss: Tensor  # [] float32, a sum of cross entropies
    agreed: Tensor  # [] float32, the number of tokens whose likeliest next token is the same
    grad_hidden: Tensor  # [M, H] of the loss, summed over the tensor-parallel ranks
    grad_weight: Tensor  # [V / TP, H] float32


@torch.no_grad()
def soft_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target_hidden: Tensor,
    target_weight: Tensor,
    shard: VocabularyShard,
    *,
    chunk_tokens: int,
) -> SoftTargets:
    """The cross entropy -sum_v p_v log q_v at temperature 1, with its gradients.

    q is of the logits of `hidden` [M, H] and `weight` [V / TP, H], and p of those of `target_hidden` and
    `target_weight`, of the same shapes. With z the logits of q, d/dz_v is q_v - p_v.
    """
    loss, agreed = (hidden.new_zeros((), dtype=torch.float32) for _ in range(2))
    grad_hidden = torch.zeros_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    for rows in _chunks(hidden.shape[0], chunk_tokens):
        target = _shifted_logits(target_hidden[rows], target_weight, shard, 1.0)
        own = _shifted_logits(hidden[rows], weight, shard, 1.0)
        is_largest = ((own == 0) & (target == 0)).any(-1)
        p, q = target.exp_(), own.exp()
        of_rows = torch.stack((p.sum(-1), q.sum(-1), (p * own).sum(-1), is_largest.float()), 1)
        sum_p, sum_q, product, count = _sum_over_ranks(of_rows, shard).unbind(1)
        loss += (sum_q.log() - product / sum_p).sum()
        agreed += count.clamp_(max=1).sum()  # equally large ones may be on several ranks
        grad = q.div_(sum_q.unsqueeze(1)).sub_(p.div_(sum_p.unsqueeze(1))).to(hidden.dtype)
        torch.mm(grad, weight, out=grad_hidden[rows])
        _add_product(grad_weight, grad, hidden[rows])
        del target, own, p, q, grad  # before the next ones take memory
    return SoftTargets(loss, agreed, _sum_over_ranks(grad_hidden, shard), grad_weight)


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Add the gradient of a weight, from those of logits [m, V / TP] and `hidden` [m, H], in float32."""
    if hidden.dtype == torch.float32:
        total.addmm_(grad.t(), hidden)
    elif has_float32_products(hidden.device):
        total.add_(torch.mm(grad.t(), hidden, out_dtype=torch.float32))
    else:
        total.add_(grad.t() @ hidden)


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _shifted_logits(hidden: Tensor, weight: Tensor, shard: VocabularyShard, temperature: float) -> Tensor:
    """Logits [m, V / TP] of this rank's columns in float32, less the largest of the row over all ranks."""
    logits = torch.mm(hidden, weight.t()).float()
    if temperature != 1.0:
        logits.div_(temperature)
    logits[:, shard.num_real :] = PADDING_LOGIT
    largest = logits.amax(-1)
    if shard.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    return logits.sub_(largest.unsqueeze(1))


def _lowest_kept(shifted: Tensor, filters: SamplingConfig, shard: VocabularyShard) -> Tensor:
    """[m] the lowest logit of each row that the filters keep, of the columns of all ranks."""
    ranks = 1 if shard.group is None else shard.group.size()
    size = max(1, _FILTERED_ELEMENTS // (shifted.shape[1] * ranks))
    lowest = shifted.new_empty(len(shifted))
    for rows in _chunks(len(shifted), size):
        lowest[rows] = _lowest_of_rows(shifted[rows], filters, shard)
    return lowest.clamp_(min=math.log(filters.min_p)) if filters.min_p else lowest  # the largest logit is 0


def _lowest_of_rows(shifted: Tensor, filters: SamplingConfig, shard: VocabularyShard) -> Tensor:
    """The same without min-p: each rank's largest logits are enough if the lowest one kept is above the rest.

    All decisions are made from what was gathered, so that all ranks make the same.
    """
    of_top_k = shifted.new_full((len(shifted),), -math.inf)
    if filters.top_k is not None:
        ranked, _ = _ranked(shifted, filters.top_k, shard)
        of_top_k = ranked[:, min(filters.top_k, ranked.shape[1]) - 1]
    if filters.top_p == 1:
        return of_top_k
    # Top-p acts on what top-k left: a token is kept if those above it have less than this share of the mass.
    exponentials = shifted.exp()
    if filters.top_k is not None:
        exponentials.masked_fill_(shifted < of_top_k.unsqueeze(1), 0.0)
    sums = exponentials.sum(-1, keepdim=True, dtype=torch.float64)
    del exponentials
    limit = filters.top_p * columns_of_all_ranks(sums, shard).sum(-1, keepdim=True)
    lowest, count = torch.empty_like(of_top_k), min(_FIRST_CANDIDATES, filters.top_k or _FIRST_CANDIDATES)
    rows = torch.arange(len(shifted), device=shifted.device)
    while len(rows):
        ranked, unseen = _ranked(shifted[rows], count, shard)
        exponentials = ranked.double().exp_()
        above = exponentials.cumsum(-1).sub_(exponentials)
        found = ranked.masked_fill(above >= limit[rows], 0.0).amin(-1)
        lowest[rows] = torch.maximum(found, of_top_k[rows])
        needs_more = (found <= unseen) & (found > of_top_k[rows])
        rows = rows[needs_more] if count < shifted.shape[1] else rows[:0]
        count *= _CANDIDATE_GROWTH
    return lowest


def _ranked(shifted: Tensor, count: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """[m, n] the `count` largest logits of each rank, in descending order; [m] the bound of all others."""
    count = min(count, shifted.shape[1])
    values = shifted.topk(count, dim=-1).values
    if shard.group is None:
        return values, values[:, -1]
    gathered = columns_of_all_ranks(values, shard)
    unseen = gathered.view(len(values), -1, count)[:, :, -1].amax(-1)
    return gathered.sort(dim=-1, descending=True).values, unseen


def _reduce(
    shifted: Tensor, ids: Tensor, shard: VocabularyShard, needs_entropy: bool, needs_collision: bool
) -> tuple[Tensor, ...]:
    """Log of the sum of the exponentials [m], logits of ids [m, C], entropies and collisions [m].

    Logits are less the largest of their row. A statistic is 0 unless it is needed.
    """
    exponentials = shifted.exp()
    column, is_mine = _local_columns(ids, shard)
    logits = shifted.gather(1, column) * is_mine
    total = exponentials.sum(-1)
    zeros = torch.zeros_like(total)
    # By the norm, which takes no memory for the squares.
    squares = torch.linalg.vector_norm(exponentials, dim=-1).square() if needs_collision else zeros
    weighted = exponentials.mul_(shifted).sum(-1) if needs_entropy else zeros
    of_rows = torch.stack((total, weighted, squares), dim=1)
    sums = _sum_over_ranks(torch.cat((logits, of_rows), dim=1), shard)
    logits, (total, weighted, squares) = sums[:, :-3], sums[:, -3:].unbind(1)
    log_sum = total.log()
    entropies = log_sum - weighted / total if needs_entropy else weighted
    return log_sum, logits, entropies, squares / total.square()


def _grad_logits(
    shifted: Tensor,
    log_sum: Tensor,
    ids: Tensor,
    grad_logprobs: Tensor,
    of_entropies: tuple[Tensor, Tensor] | None,
    shard: VocabularyShard,
) -> Tensor:
    """Gradient [m, V / TP] of the logits, in the memory of `shifted`; entropies come with their gradient."""
    log_p = shifted.sub_(log_sum.unsqueeze(1))
    of_all = grad_logprobs.sum(-1, keepdim=True)
    if of_entropies is None:
        grad = log_p.exp_().mul_(-of_all)
    else:
        entropies, grad_entropies = of_entropies
        p = log_p.exp()
        grad = log_p.add_(entropies.unsqueeze(1)).mul_(grad_entropies.unsqueeze(1))
        grad = grad.add_(of_all).mul_(p).neg_()
    column, is_mine = _local_columns(ids, shard)
    return grad.scatter_add_(1, column, grad_logprobs * is_mine)


def _sum_over_ranks(values: Tensor, shard: VocabularyShard) -> Tensor:
    """`values` itself, changed."""
    if shard.group is not None:
        dist.all_reduce(values, group=shard.group)
    return values


def _local_columns(ids: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Column of each id in this rank's shard, 0 where it is another's, and whether it is there."""
    local = ids - shard.start
    is_mine = (local >= 0) & (local < shard.num_real)
    return torch.where(is_mine, local, 0), is_mine


def columns_of_all_ranks(values: Tensor, shard: VocabularyShard) -> Tensor:
    """[m, n * TP] from the [m, n] of each rank."""
    if shard.group is None:
        return values
    parts = [torch.empty_like(values) for _ in range(shard.group.size())]
    dist.all_gather(parts, values.contiguous(), group=shard.group)
    return torch.cat(parts, dim=1)
